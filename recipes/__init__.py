"""What a person starts: each script here is one job or one benchmark, and says on top what it shows.

`python -m recipes.prefix_recovery --out DIR` is the main job: generate, cut, kill everything, regrow, compare.
"""

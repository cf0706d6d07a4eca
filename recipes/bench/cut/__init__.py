"""The sides of ``recipes/bench_cut.py``: what is staged, and how each system stages it.

`load` says what there is to stage and what a run must answer; `regraft_side` and `transfer_queue_side` are the
processes in which it is done, each with its own Ray.
"""

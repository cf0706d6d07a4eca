"""The main job, end to end, on a real model: generate, cut in mid-flight, kill everything, regrow, compare.

`__main__` runs the job from outside: it starts each life as a child process, watches and kills it, and judges the
result; it imports neither ray nor torch. `driver` is one life of the job: it starts a Ray cluster and does the work.
`plan` and `events` are what the two sides say to each other.
"""

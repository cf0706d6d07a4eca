"""The sides of ``recipes/bench_restore.py``: what is restored, and how each system reads it.

`load` says what there is to restore and when, and has the workers do it; `regraft_side` and `transfer_queue_side` are
the two systems: a process that holds the rows, and the processes that the workers share.
"""

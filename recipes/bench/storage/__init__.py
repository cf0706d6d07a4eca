"""The parts of ``recipes/bench_storage.py``.

`load` says which rows there are and what must come back. `side` is what a system must offer: servers in the driver, and
a client per process; `regraft_side` and `transfer_queue_side` are the two. `worker` is a process that writes and reads
through such a client, `cluster` the Ray on which all of them run, `footprint` the memory that they take, `runs` what is
timed. `bounds` is what the machine allows: memcpy and a bare socket.
"""

"""The work of `recipes.bench_controller`, in the systems that it compares.

`rows` says what is published. `catalog` and `transfer_queue` do it in process, through one interface; `runs` times it.
`load` drives servers over ZeroMQ: `regraft_load` and `transfer_queue_load` are the two sides of it.
"""

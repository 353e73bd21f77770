"""Ranks, and what they do together: the tree of devices, schedules of all-reduce, and the ways
to run them.

Nothing here knows a solver but through the callbacks of `sync`. Start reading with `topology`
(which devices reach each other) and `schedule` (all-reduce algorithms as data). `sync` chooses
the way: `host`, `gpu` and `nccl` implement it, over `peers` and `links`. `buckets` and `factors`
divide up the gradients. `rank_group` is where ranks wait for one another, `worker_threads` are
the threads in which they run.
"""

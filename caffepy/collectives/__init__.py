"""Ranks and what they do together: the tree of devices, all-reduce schedules and synchronizers.

Nothing here knows a solver; `synchronizer` is what a solver calls. Start reading with `topology`
(which devices reach each other) and `schedule` (all-reduce algorithms as data). `sync` chooses
among `host`, `gpu` and `nccl`, which are built on `peers` and `links`. `buckets` and `factors`
divide up the gradients. `rank_group` is where ranks wait for each other, also in turn
(`round_robin`), `worker_threads` are the threads in which they run. `world` is what the processes
of a run do together, `mpi` carries their messages.
"""

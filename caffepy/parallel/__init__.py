"""Solvers that train as one, and nets that test as one: the only place where solver and collectives
meet.

Start reading with `manager`, whose `p2p_manager` joins a root solver with workers; an iteration on
n devices is drawn there. `worker` has the solver of a worker. `workers` is what training and
testing on several devices have in common: devices, threads, the end; `turns` which of them takes a
batch. `synchronization` and `batch_norm` are parts of the manager; `watchdog` is for faults alone.
"""

"""Solvers that train as one: the only place where the solver and the collectives meet.

`manager` joins a root solver, on the main thread, with workers in threads of their own, watches
them, and ends all of them when one fails; start reading with its `team_of`. `worker` has the
solver that follows a root.
"""

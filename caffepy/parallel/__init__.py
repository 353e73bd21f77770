"""Several solvers as one: the tree of devices, schedules of all-reduce, and those who run them.

It knows the solver only through its callbacks.
"""

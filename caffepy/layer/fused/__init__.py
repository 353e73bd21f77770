"""Runs of layers that are computed together, in fewer passes over memory, with the same
numbers.

`base` has the contract, FusedRun, and is the place to start reading; the other modules implement
it, each for one family of layers. `caffepy.net.fusion` decides which layers of a net form a run.
"""

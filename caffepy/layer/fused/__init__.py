"""Fused groups: layers that are computed together, in fewer passes over memory, with the same
numbers.

`base` has the contract, FusedGroup, and `patterns` the table of groups: start there. The other
modules implement one kind of group each. `caffepy.net.fusion` finds the groups of a net.
"""

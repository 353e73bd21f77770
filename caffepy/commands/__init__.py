"""The work of the commands of the command line: a module for each command, with the command's name.

A module here takes values, builds a run from files and objects of the other packages, and returns a
value with `table()` and `json()`, or raises an error of `caffepy.core.errors`. It prints nothing:
`caffepy.cli` does. Several commands share `devices`, `inference` and `preprocess`. Start reading
with `train`. `data` has the commands that make and show data, `bench` those that measure.
"""

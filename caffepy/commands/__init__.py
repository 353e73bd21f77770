"""What the commands of the command line do: a module for each command, with the command's name.

A module here takes values, puts a run together from files and objects of the other packages, and
returns a value with `table()` and `json()`, or raises an error of `caffepy.core.errors`. It
prints nothing: `caffepy.cli` does. `inference` and `preprocess` are what several commands share.
Start reading with `train`. `data` has the commands that make databases and look at them, `bench`
those that measure.
"""

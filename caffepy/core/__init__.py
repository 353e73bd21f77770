"""Foundations: modules that import nothing else of the package, and that all others may import.

Start with `errors`, the one family of exceptions with their exit codes. `registry` maps names to
things, `names` finds those that are like an unknown one, `files` resolves paths in a prototxt and
writes files that are whole or absent, `cache` keeps small results from run to run. `events` is the
class whose methods a training run calls. `python_modules` finds the modules of Python layers,
`caffe_alias` gives modules further names, such as `caffe`.
"""

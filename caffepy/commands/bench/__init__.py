"""The commands that measure how fast caffepy trains.

`train` measures one net, `scaling` several devices against one, `allreduce` the cost of each way to
synchronize. Start reading with `train`; `scaling` is built on it.
"""

"""The commands that measure how fast caffepy trains.

`train` measures one net, `scaling` several devices beside one, `allreduce` what each way to
synchronize costs. Start reading with `train`; `scaling` is built on it.
"""

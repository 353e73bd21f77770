"""Devices: where arrays live and arithmetic runs.

Start with `device`: class Device is the CPU and the interface of a GPU. `cuda` has CudaDevice and
CudaGraph, with `streams` (main and side streams, drawn there) and `math_mode` (a device's
precision). `blob` has Blob, a shape with its arrays `data` and `diff`, and the memory behind them.
`random_numbers` has a device's generator, `gpus` says which GPUs a machine has, `threads` is the
host's thread pool; `caffepy.commands.devices` makes devices from a command line.
Import from these modules: `from caffepy.device.blob import Blob`.
"""

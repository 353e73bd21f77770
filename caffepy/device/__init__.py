"""Where arrays live and arithmetic runs.

`blob` has Blob, a shape with its arrays `data` and `diff`, and the memory behind them. `device`
has the CPU and the CUDA devices with their streams, recorded graphs and random numbers; start
reading there, with class Device. `gpus` finds out which GPUs a machine has, `threads` is the
pool of threads of the host. Import from these modules, as in `from caffepy.device.blob import
Blob`.
"""

"""Arithmetic on one NVIDIA GPU: cuDNN, cuBLAS and kernels of our own, on CuPy arrays that are C-contiguous.

All work goes to CuPy's current stream; nothing waits for it, nothing is read back, so that a step can be captured as a
CUDA graph once every shape has been seen. Sums that are Python floats on the CPU are arrays without axes here.
"""

try:
    import cupy  # noqa: F401
except ImportError as error:
    from caffepy.errors import DeviceError

    raise DeviceError(f"no GPU arithmetic without CuPy ({error}): pip install 'caffepy[cuda13]'") from error

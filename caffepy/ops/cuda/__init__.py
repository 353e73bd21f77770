"""Arithmetic on one NVIDIA GPU: cuDNN, cuBLAS and kernels of our own, on CuPy arrays that are C-contiguous.

All work goes to CuPy's current stream; nothing waits for it, nothing is read back, so that a step can be captured as a
CUDA graph once every shape has been seen. Sums that are Python floats on the CPU are arrays without axes here.
"""

try:
    import cupy  # noqa: F401
except ImportError as error:
    from caffepy.errors import DeviceError

    raise DeviceError(f"no GPU arithmetic without CuPy ({error}): pip install 'caffepy[cuda13]'") from error

from caffepy.ops.cuda.blas import add_bias, bias_gradient, matmul
from caffepy.ops.cuda.convolution import Convolution
from caffepy.ops.cuda.threads import blas_scope, num_threads, parallel, set_num_threads

__all__ = [
    "Convolution",
    "add_bias",
    "bias_gradient",
    "blas_scope",
    "matmul",
    "num_threads",
    "parallel",
    "set_num_threads",
]

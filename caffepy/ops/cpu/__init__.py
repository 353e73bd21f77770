"""Arithmetic on the CPU: numba loops and BLAS calls, shared out over a pool of threads. All arrays C-contiguous."""

from caffepy.ops.cpu.blas import add_bias, bias_gradient, matmul
from caffepy.ops.cpu.convolution import Convolution
from caffepy.ops.cpu.lrn import lrn_backward, lrn_forward
from caffepy.ops.cpu.pooling import ave_pool_backward, ave_pool_forward, max_pool_backward, max_pool_forward
from caffepy.ops.cpu.threads import blas_scope, num_threads, parallel, set_num_threads
from caffepy.ops.cpu.transform import transform_batch

__all__ = [
    "Convolution",
    "add_bias",
    "ave_pool_backward",
    "ave_pool_forward",
    "bias_gradient",
    "blas_scope",
    "lrn_backward",
    "lrn_forward",
    "matmul",
    "max_pool_backward",
    "max_pool_forward",
    "num_threads",
    "parallel",
    "set_num_threads",
    "transform_batch",
]

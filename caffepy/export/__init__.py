"""Nets as files of other formats: ONNX. A file for each family of layers says how they are written.

`caffepy.commands.export` is the caller. Start reading with `trace` (what of a net is exported) and
`write`.

Parameters are named after their layer and their index in it, `conv1.0`, as in HDF5 files of
weights; blobs keep their names. BatchNorm's mean and variance are stored as such, not as the sums
of which they are means.
"""

from caffepy.export import neuron, normalization, pooling, product, recurrent, shape

__all__ = [
    "neuron",
    "normalization",
    "pooling",
    "product",
    "recurrent",
    "shape",
]

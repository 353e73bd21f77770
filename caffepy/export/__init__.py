"""Nets as ONNX models; one file for each family of layers has their operators.

`caffepy.commands.export` is the caller. Start reading with `trace` (which part of a net is
exported) and `write`.

Parameters are named after their layer and their index in it, `conv1.0`, as in HDF5 files of
weights; blobs keep their names. BatchNorm's mean and variance are stored themselves, not the
running sums.
"""

from caffepy.export import detection, neuron, normalization, pooling, product, recurrent, shape

__all__ = ["detection", "neuron", "normalization", "pooling", "product", "recurrent", "shape"]

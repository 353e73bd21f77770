"""The base class of Python layers."""

from typing import Any

from caffepy.layer.python_blob import Blob, BlobVec


class Layer:
    """Base of Python layers: `class Mine(caffe.Layer)`, named in a prototxt by `python_param {
    module layer }`.

    A subclass defines `forward(self, bottom, top)`, usually `setup` and `reshape` with the same
    arguments, and `backward(self, top, propagate_down, bottom)` if something below it learns.
    `bottom` and `top` are lists of blobs, whose `data` and `diff` are numpy arrays;
    `blobs.add_blob(*shape)` makes a learnable parameter. `reshape` runs before each forward.
    """

    type: str = "Python"
    param_str: str = ""
    phase: int
    blobs: BlobVec

    def __init__(self, param: Any = None) -> None:
        """`param` is the LayerParameter; `param_str`, `phase` and `blobs` exist from `setup` on."""

    @property
    def param_str_(self) -> str:
        """The older name of `param_str`."""
        return self.param_str

    def setup(self, bottom: list[Blob], top: list[Blob]) -> None:
        """Read `param_str`, check the number of blobs, add parameters; runs once."""

    def reshape(self, bottom: list[Blob], top: list[Blob]) -> None:
        """Shape the tops by the bottoms."""

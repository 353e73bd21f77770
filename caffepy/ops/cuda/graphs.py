"""cuDNN's graphs of convolutions.

cuDNN has two layouts for arrays of (N, C, *spatial): this order, and one with the channels last, in
which weights are (O, *kernel, C). A convolution over one axis is one over two for it.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from caffepy.device import cudnn
from caffepy.ops.cuda import plans
from caffepy.ops.cuda.launch import Array

Shape = tuple[int, ...]

LARGE, LARGEST = 1e10, 3.5e10
"""Of a convolution with more operations than these, more plans are timed."""


class Geometry(NamedTuple):
    """The sizes of a convolution: x (N, C, *size), w (O, C/g, *kernel), y (N, O, *out)."""

    x: Shape
    w: Shape
    y: Shape
    stride: Shape
    padding: Shape
    dilation: Shape

    @property
    def group(self) -> int:
        """The number of groups of channels."""
        return self.x[1] // self.w[1]

    @property
    def operations(self) -> int:
        """Multiplications and additions of forward, or of either gradient."""
        return 2 * prod(self.y) * prod(self.w[1:])

    def __str__(self) -> str:
        return " ".join(
            f"{name} {list(sizes)}" for name, sizes in self._asdict().items() if name != "y"
        )


def find(what: str, geometry: Geometry, last: bool, arrays: Sequence[Array]) -> plans.Plan | None:
    """Return the plan for these arrays, the last of which is the output; None if cuDNN has none.
    All have one type.

    "forward" takes x, w, y; "forward bias" and "forward bias relu" x, w, b, y; "backward_data" dy,
    w, dx; "backward_weight" x, dy, dw. The channels lie last if `last`.
    """

    operation, *after = what.split()
    x, w, y = geometry[:3]
    kind = cudnn.DATA_TYPES[arrays[0].dtype.name]
    inside = cudnn.DOUBLE if kind == cudnn.DOUBLE else cudnn.FLOAT
    shapes = {"backward_data": (y, w, x), "backward_weight": (x, y, w)}.get(operation, (x, w, y))

    def tensor(uid: int, shape: Shape, virtual: bool = False) -> cudnn.Descriptor:
        pixel = shape[1] if last else 1
        spatial = [prod(shape[a + 1 :]) * pixel for a in range(2, len(shape))]
        stride = [prod(shape[1:]), 1 if last else prod(shape[2:]), *spatial]
        return cudnn.tensor(uid, shape, stride, inside if virtual else kind, virtual)

    def build() -> list[cudnn.Descriptor]:
        """Return the operations; what is not in memory has the numbers from 10 on."""
        output = tensor(2 + ("bias" in after), shapes[2])
        passed = [tensor(10 + i, shapes[2], virtual=True) for i in range(len(after))] + [output]
        tensors = (tensor(0, shapes[0]), tensor(1, shapes[1]), passed[0])
        window = geometry.stride, geometry.padding, geometry.dilation
        made = [cudnn.convolution(operation, window, inside, tensors)]
        for step, (before, result) in zip(after, pairwise(passed), strict=True):
            if step == "bias":
                bias = tensor(2, (1, y[1], *[1] * len(geometry.stride)))
                made.append(cudnn.addition(inside, before, bias, result))
            else:
                made.append(cudnn.relu(inside, before, result))
        return made

    candidates = plans.CANDIDATES[sum(geometry.operations > n for n in (LARGE, LARGEST))]
    name = f"{what} {geometry}{' channels last' * last}"
    return plans.find(name, arrays[0].dtype, build, arrays, candidates)

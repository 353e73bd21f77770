"""cuDNN's graphs of convolutions.

cuDNN has two layouts for arrays of (N, C, *spatial): this order, and one with the channels last, in
which weights are (O, *kernel, C). A convolution over one axis is one over two for it.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from caffepy.ops.cuda import plans

Array = Any  # cupy.ndarray
Shape = tuple[int, ...]

LARGE = 1e10
"""Of a convolution with more operations than this, more plans are timed."""


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

    def build(cudnn: Any, graph: Any) -> list[Any]:
        return _Builder(graph, geometry, last).build(what)

    candidates = plans.MORE_CANDIDATES if geometry.operations > LARGE else plans.CANDIDATES
    name = f"{what} {geometry}{' channels last' * last}"
    return plans.find(name, arrays[0].dtype, build, arrays, candidates)


class _Builder:
    def __init__(self, graph: Any, geometry: Geometry, last: bool) -> None:
        self.graph, self.sizes, self.last = graph, geometry, last
        self.how = {
            name: list(getattr(geometry, name)) for name in ("stride", "padding", "dilation")
        }

    def build(self, what: str) -> list[Any]:
        name, *after = what.split()
        if name == "backward_data":
            dy, w = self.tensor(self.sizes.y), self.tensor(self.sizes.w)
            return [
                dy,
                w,
                self.output(self.graph.conv_dgrad(loss=dy, filter=w, **self.how), self.sizes.x),
            ]
        if name == "backward_weight":
            x, dy = self.tensor(self.sizes.x), self.tensor(self.sizes.y)
            return [
                x,
                dy,
                self.output(self.graph.conv_wgrad(image=x, loss=dy, **self.how), self.sizes.w),
            ]
        tensors = [self.tensor(self.sizes.x), self.tensor(self.sizes.w)]
        y = self.graph.conv_fprop(image=tensors[0], weight=tensors[1], **self.how)
        if "bias" in after:
            tensors.append(self.tensor((1, self.sizes.y[1], *[1] * len(self.sizes.stride))))
            y = self.graph.bias(self.lying(y, self.sizes.y), tensors[2])
        if "relu" in after:
            y = self.graph.relu(self.lying(y, self.sizes.y))
        return [*tensors, self.output(y, self.sizes.y)]

    def strides(self, shape: Shape) -> list[int]:
        pixel = shape[1] if self.last else 1
        spatial = [prod(shape[a + 1 :]) * pixel for a in range(2, len(shape))]
        return [prod(shape[1:]), 1 if self.last else prod(shape[2:]), *spatial]

    def tensor(self, shape: Shape) -> Any:
        kind = self.graph.context.io_data_type
        return self.graph.tensor(dim=list(shape), stride=self.strides(shape), data_type=kind)

    def lying(self, tensor: Any, shape: Shape) -> Any:
        """Return the tensor with its layout set; by default cuDNN takes channels last."""
        return tensor.set_dim(list(shape)).set_stride(self.strides(shape))

    def output(self, tensor: Any, shape: Shape) -> Any:
        return self.lying(
            tensor.set_output(True).set_data_type(self.graph.context.io_data_type), shape
        )

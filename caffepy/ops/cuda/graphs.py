"""cuDNN's graphs of convolutions.

cuDNN has two layouts for arrays of (N, C, *spatial): this order, and one with the channels last, in
which weights are (O, *kernel, C). A convolution over one axis is one over two for it.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from caffepy.ops.cuda import plans
from caffepy.ops.cuda.launch import Array

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

    operation, *after = what.split()
    x, w, y = geometry[:3]
    how = {name: list(getattr(geometry, name)) for name in ("stride", "padding", "dilation")}

    def layout(shape: Shape) -> dict[str, list[int]]:
        pixel = shape[1] if last else 1
        spatial = [prod(shape[a + 1 :]) * pixel for a in range(2, len(shape))]
        stride = [prod(shape[1:]), 1 if last else prod(shape[2:]), *spatial]
        return {"dim": list(shape), "stride": stride}

    def lying(tensor: Any, shape: Shape) -> Any:
        """Return the tensor with its layout set; by default cuDNN takes channels last."""
        lies = layout(shape)
        return tensor.set_dim(lies["dim"]).set_stride(lies["stride"])

    def build(cudnn: Any, graph: Any) -> list[Any]:
        kind = graph.context.io_data_type
        shapes = {"backward_data": [y, w], "backward_weight": [x, y]}.get(operation, [x, w])
        tensors = [graph.tensor(**layout(shape), data_type=kind) for shape in shapes]
        if operation == "backward_data":
            result, shape = graph.conv_dgrad(loss=tensors[0], filter=tensors[1], **how), x
        elif operation == "backward_weight":
            result, shape = graph.conv_wgrad(image=tensors[0], loss=tensors[1], **how), w
        else:
            result, shape = graph.conv_fprop(image=tensors[0], weight=tensors[1], **how), y
        if "bias" in after:
            shapes.append((1, y[1], *[1] * len(geometry.stride)))
            tensors.append(graph.tensor(**layout(shapes[2]), data_type=kind))
            result = graph.bias(lying(result, shape), tensors[2])
        if "relu" in after:
            result = graph.relu(lying(result, shape))
        return [*tensors, lying(result.set_output(True).set_data_type(kind), shape)]

    candidates = plans.MORE_CANDIDATES if geometry.operations > LARGE else plans.CANDIDATES
    name = f"{what} {geometry}{' channels last' * last}"
    return plans.find(name, arrays[0].dtype, build, arrays, candidates)

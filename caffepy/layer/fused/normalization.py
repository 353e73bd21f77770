"""BatchNorm and the layers before and after it, computed together."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from caffepy.device.blob import Array, Blob
from caffepy.layer.convolution import Convolution
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.fused.base import Member
from caffepy.layer.neuron import ReLU, is_in_place
from caffepy.layer.normalization import BatchNorm, Scale


class NormGroup:
    """[Convolution,] BatchNorm [, Scale] [, Eltwise] [, ReLU] [, Split]; each reads the only top of
    the one before.

    The Scale has a factor for each channel, the Eltwise adds one blob from outside, the ReLU's
    slope is 0, the Split has two tops: y = relu(x * factor + shift + other), and the gradient of y
    is the sum of those of the Split's tops.

    x, the output of the convolution, is a blob of the group's own; its diff shares the memory of
    that of y. A group that never runs backward (`learns` False) has x where y will be.
    `has_gradient` says which tops get a gradient.
    """

    def __init__(
        self,
        members: Sequence[Member],
        learns: bool = True,
        has_gradient: Sequence[bool] = (True, True),
    ) -> None:
        of = {type(member.layer): member for member in members}
        self.norm, self.convolution = of[BatchNorm], of.get(Convolution)
        self.scale = of[Scale].layer if Scale in of else None
        self.relu = ReLU in of
        self.tops = members[-1].tops
        with_gradient = [top for top, has in zip(self.tops, has_gradient, strict=False) if has]
        self.other, self.wants_other = _other(members)
        source = self.norm.bottoms[0]
        keeps = is_in_place(source, self.tops[0]) if self.convolution is None else True
        if learns and keeps:
            self.x = _like(source)
            if self.convolution is not None and with_gradient:
                self.x.share_diff(with_gradient[0])
        else:
            self.x = source if self.convolution is None else self.tops[0]

    def forward(self) -> None:
        layer, y = self._layer, self.tops[0]
        self.x.reshape_like(y)
        if self.convolution is not None:
            self.convolution.layer.forward(self.convolution.bottoms, [self.x])
        elif self.x is not self.norm.bottoms[0]:
            layer.ops.copy(self.norm.bottoms[0].data, self.x.data)
        x = _flat(self.x.data)
        scale, bias = _pair([] if self.scale is None else [blob.data for blob in self.scale.blobs])
        numbers = layer.prepare(x, scale, bias)
        other = None if self.other is None else _flat(self.other.data)
        layer.ops.norm_forward(x, numbers, other, self.relu, _flat(y.data))

    def backward(self) -> None:
        """Write the gradients of x and of the other blob, add to those of the parameters."""
        layer = self._layer
        # Tops whose diff was never touched get no gradient.
        touched = [top for top in self.tops if top.diff_memory.touched]
        dys = [_flat(top.diff) for top in touched or self.tops[:1]]
        by_y = self.relu and self.other is not None
        masked = None
        if self.other is not None and self.wants_other:
            masked = _flat(self.other.diff)
        elif by_y or len(dys) > 1:
            masked = dys[0]
        layer.ops.norm_backward(
            _flat(self.x.data),
            layer.numbers.data,
            dys,
            _flat(self.tops[0].data) if by_y else None,
            self.relu,
            masked,
            self._dx(),
            *self._sums(),
            layer.is_global,
        )
        if self.convolution is not None and self.norm.propagate_down[0]:
            member = self.convolution
            member.layer.backward([self.x], member.propagate_down, member.bottoms)

    @property
    def _layer(self) -> BatchNorm:
        assert isinstance(self.norm.layer, BatchNorm)
        return self.norm.layer

    def _sums(self) -> tuple[Array | None, Array | None]:
        """The diffs of the Scale's parameters, None for those that are not wanted."""
        if self.scale is None:
            return None, None
        wanted = zip(self.scale.blobs, self.scale.param_propagate_down, strict=True)
        return _pair([blob.diff if want else None for blob, want in wanted])

    def _dx(self) -> Array | None:
        if not self.norm.propagate_down[0]:
            return None
        return _flat(self.norm.bottoms[0].diff if self.convolution is None else self.x.diff)


def _other(members: Sequence[Member]) -> tuple[Blob | None, bool]:
    """Return the blob from outside that an Eltwise adds, and True if it gets a gradient."""
    for before, member in pairwise(members):
        if isinstance(member.layer, Eltwise):
            index = 1 if member.bottoms[0] is before.tops[0] else 0
            return member.bottoms[index], member.propagate_down[index]
    return None, False


def _pair(values: Sequence[Array | None]) -> tuple[Array | None, Array | None]:
    """Return the values of scale and bias, None for those that are missing."""
    first, second = (*values, None, None)[:2]
    return first, second


def _like(blob: Blob) -> Blob:
    made = Blob(blob.shape, blob.dtype, blob.gpu)
    if made.layout != blob.layout:
        made.set_layout(blob.layout)
    return made


def _flat(array: Array) -> Array:
    n, c, *spatial = array.shape
    flat: Array = array.reshape(n, c, prod(spatial))
    return flat

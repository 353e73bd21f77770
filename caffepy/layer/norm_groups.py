"""Fused groups with a BatchNorm."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf, prod
from typing import Protocol

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.layer.batch_norm import BatchNorm
from caffepy.layer.convolution import Convolution
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.group import Member, kind_of
from caffepy.layer.neuron import ReLU, ReLU6, is_in_place
from caffepy.layer.pooling import Pooling
from caffepy.layer.scale import Scale
from caffepy.ops.objects import Normalized, NormForward, NormGradient, NormSums


class _Reader(Protocol):
    """A group that reads what another one made."""

    @property
    def takes_normalized(self) -> bool:
        """True if it can normalize what it reads itself."""


class NormGroup:
    """[Convolution,] BatchNorm [, Scale] [, Eltwise] [, ReLU or ReLU6] [, Split]; each reads the
    only top of the one before.

    The Scale has a factor for each channel, the Eltwise adds one blob from outside, the slope of
    ReLU or ReLU6 is 0, the Split has two tops: y = relu(x * factor + shift + other), and the
    gradient of y is the sum of those of the Split's tops.

    x, the output of the convolution, is a blob of the group's own; its diff shares the memory of
    that of y. A group that never runs backward (`learns` False) has x where y will be; one whose
    convolution `skips_output` has no x. `has_gradient` says which tops get a gradient.

    Backward comes in two halves: sums over the gradient of y, and what is computed with them. The
    convolution of the group that writes the last part of that gradient, whose `sums_for` this is,
    computes the first half with it where it can: the part need not be written and read again.
    """

    def __init__(
        self,
        members: Sequence[Member],
        learns: bool = True,
        has_gradient: Sequence[bool] = (True, True),
    ) -> None:
        of = {kind_of(member.layer): member for member in members}
        self.norm, self.convolution = of[BatchNorm], of.get(Convolution)
        assert isinstance(self.norm.layer, BatchNorm)
        self.layer = self.norm.layer
        self.scale = of[Scale].layer if Scale in of else None
        self.ceiling = 6.0 if ReLU6 in of else inf if ReLU in of else None
        self.tops = members[-1].tops
        with_gradient = [top for top, has in zip(self.tops, has_gradient, strict=False) if has]
        # The blob from outside that an Eltwise adds, and whether it gets a gradient.
        self.other: Blob | None = None
        self.wants_other = False
        for before, member in pairwise(members):
            if isinstance(member.layer, Eltwise):
                index = 1 if member.bottoms[0] is before.tops[0] else 0
                self.other, self.wants_other = member.bottoms[index], member.propagate_down[index]
        self.bits = self.layer.buffer(dtype=np.uint8)  # where y is in the ReLU's range, or nothing
        self._fit()
        source = self.norm.bottoms[0]
        keeps = is_in_place(source, self.tops[0]) if self.convolution is None else True
        if learns and keeps:
            self.x = self.layer.buffer_like(source)
            if self.convolution is not None and with_gradient:
                self.x.share_diff(with_gradient[0])
        else:
            self.x = source if self.convolution is None else self.tops[0]
        self.learns = learns
        self.line = self.layer.buffer([2, self.layer.blobs[0].count])
        self.summed: Blob | None = None  # whose diff has the first half of backward
        self.sums_for: NormGroup | None = None
        self.sums_alike = True  # others that write part of that gradient have the same window
        self.reader: _Reader | None = None  # which alone reads the top
        self.source: NormGroup | None = None  # whose reader this is
        self.hidden = False  # the last forward did not write the top: the reader normalizes x
        self.own_diffs: Sequence[Blob] = ()
        self._kept = [self.x] if learns and keeps else []
        self.skipped = False  # the output of the convolution, by the last forward

    @property
    def buffers(self) -> Sequence[Blob]:
        """The output of a convolution, or a bottom that is overwritten; bits of the top."""
        kept = [] if self.skips_output else self._kept
        return [*kept, self.bits] if self.learns else kept

    @property
    def half(self) -> tuple[Sequence[Blob], Sequence[Blob]]:
        """Blobs whose data the first half of backward reads, and whose diffs it writes."""
        writes = [self.other] if self.other is not None and self.wants_other else []
        reads = [] if self.skips_output else [self.x]
        return [*reads, self.bits, self.tops[0]], writes

    @property
    def skips_output(self) -> bool:
        """True if a forward pass computes y without x, unless it recomputes after one that did not:
        where the convolution saves passes so.
        """
        if self.convolution is None or not (self.learns and self._is_of_batch):
            return False
        return self._convolving.skips_output(self.x.layout)

    @property
    def skips_gradient(self) -> bool:
        """True if backward does not write the gradient of x, because the convolution's kernel
        computes it as it reads what it is made of.
        """
        convolution = self.convolution
        if convolution is None or self.skipped:
            return False
        if not (self._is_of_batch and convolution.propagate_down[0]):
            return False
        return self._convolving.skips_gradient(self.x.layout)

    @property
    def takes_normalized(self) -> bool:
        """True if the convolution of a group that learns may normalize its bottom as it reads it:
        no other pass reads that.
        """
        if not (self.learns and self.skips_gradient):
            return False
        return self._convolving.takes_normalized(self.x.layout)

    @property
    def normalized(self) -> Normalized:
        """Numbers by which a reader computes y from x."""
        return Normalized(self.layer.numbers.data, self.ceiling)

    @property
    def _hides_top(self) -> bool:
        """True if y need not be written, since its reader normalizes x itself."""
        if self.reader is None or self.convolution is None or self.other is not None:
            return False
        keeps_x = self.learns and self._is_of_batch and not self.skips_output
        return keeps_x and self.reader.takes_normalized

    @property
    def _is_of_batch(self) -> bool:
        """True if x is normalized by statistics of its own, and gets a gradient."""
        layer = self.layer
        others = layer.is_global or any(layer.lacks) or layer.together
        return not others and self.norm.propagate_down[0]

    @property
    def masks_by_y(self) -> bool:
        """True if backward finds the mask of a ReLU in y, or in bits of it, and not in x."""
        return self.ceiling is not None and (self.other is not None or self.skips_output)

    @property
    def _convolving(self) -> Convolution:
        """The layer of the convolution, of a group that has one."""
        assert self.convolution is not None
        assert isinstance(self.convolution.layer, Convolution)
        return self.convolution.layer

    def sums_of(self, top: Blob) -> NormSums | None:
        """Return the first half of backward, to be computed with the gradient of a top; from then
        on backward is the second half. None if it is not of this kind.
        """
        layer = self.layer
        if layer.is_global or layer.together or not self.norm.propagate_down[0]:
            return None
        more = [t for t in self.tops if t is not top and t.diff_memory.touched]
        self.summed = self.other if self.other is not None and self.wants_other else top
        return NormSums(
            None if self.skipped else self.x.data,
            layer.numbers.data,
            more[0].diff if more else None,
            self.tops[0].data if self.masks_by_y else None,
            self.kept_bits,
            self.ceiling,
            self.summed.diff,
            *self._scale_diffs(),
            self.line.data,
        )

    def _scale_diffs(self) -> tuple[Array | None, Array | None]:
        """Return the diffs of the Scale's parameters that are wanted."""
        if self.scale is None:
            return None, None
        wanted = zip(self.scale.blobs, self.scale.param_propagate_down, strict=True)
        diffs = [blob.diff if want else None for blob, want in wanted]
        return diffs[0], diffs[1] if len(diffs) > 1 else None

    def _fit(self) -> None:
        """Make room for the bits of the top, which only a sum's gradient wants: a convolution that
        reads y has it at hand.
        """
        y, ops = self.tops[0], self.layer.ops
        wanted = self.ceiling is not None and self.other is not None
        self.bits.reshape([ops.mask_size(y.shape, y.layout) if wanted else 0])

    @property
    def kept_bits(self) -> Array | None:
        """Bits of y for backward; None: it looks at y itself, or needs nothing."""
        return self.bits.data if self.learns and self.bits.count else None

    def forward(self) -> None:
        layer, y = self.layer, self.tops[0]
        self.x.reshape_like(y)
        self._fit()
        if not layer.recomputes:
            self.summed, self.skipped, self.hidden = None, self.skips_output, False
        if self.skipped:
            self._forward_at_once()
            return
        x, numbers = self._prepare()
        self.hidden = self._hides_top
        if self.hidden:
            return
        other = None if self.other is None else _flat(self.other.data)
        layer.ops.norm_forward(x, numbers, other, self.ceiling, _flat(y.data), self.kept_bits)

    def _forward_at_once(self) -> None:
        """Compute y without x."""
        assert self.convolution is not None
        (bottom,), convolution = self.convolution.bottoms, self._convolving
        layer, other = self.layer, None if self.other is None else self.other.data
        preparation = None if layer.recomputes else layer.preparation(*self._scale_data())
        to = other, self.ceiling, self.tops[0].data, self.kept_bits
        norm = NormForward(preparation, layer.numbers.data, *to)
        convolution.conv.forward_normalized(bottom.data, convolution.blobs[0].data, norm)

    def _scale_data(self) -> list[Array]:
        """Return factors, and with them shifts, of the Scale, if there is one."""
        return [] if self.scale is None else [blob.data for blob in self.scale.blobs]

    def _prepare(self) -> tuple[Array, Array]:
        """Compute x (N, C, P), and the numbers of its channels."""
        layer, scale = self.layer, self._scale_data()
        if self.convolution is not None and layer.takes_statistics:
            (bottom,), given, source = self.convolution.bottoms, None, self.source
            if source is not None and source.hidden:
                bottom = source.x
                given = source.normalized
            self._convolving.forward_prepare(bottom, self.x, layer.preparation(*scale), given)
            x, numbers = _flat(self.x.data), layer.numbers.data
        else:
            if self.convolution is not None:
                self.convolution.layer.forward(self.convolution.bottoms, [self.x])
            elif self.x is not self.norm.bottoms[0]:
                layer.ops.copy(self.norm.bottoms[0].data, self.x.data)
            x = _flat(self.x.data)
            numbers = layer.prepare(x, *scale)
        return x, numbers

    def backward(self) -> None:
        """Write the gradients of x and of the other blob, add to those of the parameters."""
        if self.skipped:
            self._backward_at_once()
            return
        if self.skips_gradient:
            self._backward_past_gradient()
            return
        source = self.norm.bottoms[0] if self.convolution is None else self.x
        if self.summed is not None:
            given = _flat(self.x.data), self.layer.numbers.data, self.line.data
            self.layer.ops.norm_gradient(*given, _flat(self.summed.diff), _flat(source.diff))
            self.summed = None
        else:
            self._backward_norm(_flat(source.diff) if self.norm.propagate_down[0] else None)
        self._backward_convolution()

    def _backward_past_gradient(self) -> None:
        """Backward without the gradient of x."""
        assert self.convolution is not None
        (bottom,), convolution, layer = self.convolution.bottoms, self._convolving, self.layer
        if self.summed is None:
            dys, masked = self._top_diffs()
            first = self.sums_of(self._touched[0])
            assert first is not None
            if self.other is not None and masked is not None:
                y = _flat(self.tops[0].data) if self.masks_by_y else None
                how = y, self.ceiling, _flat(masked), self.kept_bits
                layer.ops.norm_mask(list(map(_flat, dys)), *how)
                first = first._replace(more=None, y=None, bits=None, ceiling=None)
            layer.ops.norm_sums(first)
        assert self.summed is not None
        dy = NormGradient(self.x.data, layer.numbers.data, self.line.data, self.summed.diff)
        self.summed = None
        norm = None if self.sums_for is None else self.sums_for.sums_of(bottom)
        x = None if self.source is not None and self.source.hidden else bottom.data
        given = x, convolution.blobs[0].data, dy, convolution.weight_diff
        convolution.conv.backward_norm_gradient(*given, bottom.diff if norm is None else norm)

    def _backward_at_once(self) -> None:
        """Backward without x, and without its gradient."""
        assert self.convolution is not None
        (bottom,), (propagate_down,) = self.convolution.bottoms, self.convolution.propagate_down
        convolution = self._convolving
        if self.summed is None:
            dys, masked = self._top_diffs()
            g = masked if masked is not None else dys[0]
            if masked is not None:
                y = _flat(self.tops[0].data) if self.masks_by_y else None
                how = y, self.ceiling, _flat(masked), self.kept_bits
                self.layer.ops.norm_mask(list(map(_flat, dys)), *how)
        else:
            g = self.summed.diff
            self.summed = None
        to = None
        if propagate_down:
            to = self._sums_of(bottom, g) or bottom.diff
        gradients = convolution.weight_diff, *self._scale_diffs()
        given = bottom.data, convolution.blobs[0].data, g, self.layer.numbers.data, gradients
        convolution.conv.backward_normalized(*given, to)

    def _top_diffs(self) -> tuple[list[Array], Array | None]:
        """Return the gradients of the tops, and where their masked sum goes, if it is wanted."""
        dys = [top.diff for top in self._touched]
        if self.other is not None and self.wants_other:
            return dys, self.other.diff
        return dys, dys[0] if self.masks_by_y or len(dys) > 1 else None

    @property
    def _touched(self) -> Sequence[Blob]:
        """The tops that get a gradient: the diffs of the others were never touched."""
        return [top for top in self.tops if top.diff_memory.touched] or self.tops[:1]

    def _sums_of(self, bottom: Blob, dy: Array) -> NormSums | None:
        """Return what the convolution computes with the gradient of its bottom, if it does."""
        group = self.sums_for
        if group is None or not self._convolving.sums_gradients(dy, bottom, self.sums_alike):
            return None
        return group.sums_of(bottom)

    def _backward_convolution(self) -> None:
        if self.convolution is None or not self.norm.propagate_down[0]:
            return
        member, layer = self.convolution, self._convolving
        (bottom,) = member.bottoms
        norm = self._sums_of(bottom, self.x.diff)
        if norm is None:
            layer.backward([self.x], member.propagate_down, member.bottoms)
        else:
            layer.backward_norm(self.x, bottom, norm)

    def _backward_norm(self, dx: Array | None) -> None:
        layer = self.layer
        dys, masked = self._top_diffs()
        dys = [_flat(dy) for dy in dys]
        masked = None if masked is None else _flat(masked)
        y = _flat(self.tops[0].data) if self.masks_by_y else None
        x, numbers = _flat(self.x.data), layer.numbers.data
        given = x, numbers, dys, y, self.ceiling, masked, dx, *self._scale_diffs(), layer.is_global
        layer.ops.norm_backward(*given, self.kept_bits)


class NormPooling(NormGroup):
    """[Convolution,] BatchNorm [, Scale], ReLU, Pooling: maxima of relu(x * factor + shift), which
    is not kept.

    x is the group's own after a convolution, with a diff of its own.
    """

    def __init__(self, members: Sequence[Member], learns: bool = True) -> None:
        *rest, pooling = members
        super().__init__(rest, learns, (False,))
        assert isinstance(pooling.layer, Pooling)
        self.pooling = pooling.layer
        self.tops = pooling.tops
        source = self.norm.bottoms[0]
        self.x, self._kept = source, []
        if self.convolution is not None:
            self.x = self.layer.buffer_like(source)
            self._kept = self.own_diffs = [self.x]

    @property
    def buffers(self) -> Sequence[Blob]:
        """The output of the convolution, and the places of the maxima."""
        return [*self._kept, *self.pooling.buffers]

    def forward(self) -> None:
        self.x.reshape_like(self.norm.bottoms[0])
        _, numbers = self._prepare()
        y, pooling = self.tops[0].data, self.pooling
        given = self.x.data, numbers, y, pooling.index.data, pooling.window
        self.layer.ops.norm_max_pool_forward(*given)

    def backward(self) -> None:
        layer, source = self.layer, self.norm.bottoms[0] if self.convolution is None else self.x
        dx = source.diff if self.norm.propagate_down[0] else None
        maxima = self.tops[0].diff, self.pooling.index.data, self.pooling.window
        given = self.x.data, layer.numbers.data, *maxima, dx, *self._scale_diffs(), layer.is_global
        layer.ops.norm_max_pool_backward(*given)
        self._backward_convolution()


def _flat(array: Array) -> Array:
    n, c, *spatial = array.shape
    flat: Array = array.reshape(n, c, prod(spatial))
    return flat

"""Records of a net: one a layer, one a parameter; and the layout casts of a layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from caffepy.device.blob import Blob, Layout, on_host
from caffepy.layer import Layer
from caffepy.proto.caffe_pb2 import LayerParameter, ParamSpec

Convert = Callable[[Any, Any], None]
"""ops.convert: copies an array into one of another layout."""


class LayoutCasts:
    """Copies of blobs in the layout that a layer takes; converted before and after its passes.

    `copied` has blobs, by the id of a bottom, that must be copies whatever the layouts.
    """

    def __init__(
        self,
        bottoms: Sequence[Blob],
        tops: Sequence[Blob],
        layouts: Sequence[Layout],
        copied: Mapping[int, Blob],
    ) -> None:
        self._of: dict[int, tuple[Blob, Blob]] = {}  # id of the blob -> (blob, copy)
        for blob, layout in zip(bottoms, layouts, strict=True):
            if id(blob) in copied:
                self._of[id(blob)] = blob, copied[id(blob)]
            elif blob.layout != layout and id(blob) not in self._of:
                copy = Blob(blob.shape, blob.dtype, blob.gpu)
                copy.set_layout(layout)
                self._of[id(blob)] = blob, copy
        self.bottoms = [self._seen(b) for b in bottoms]
        self.tops = [self._seen(t) for t in tops]
        self._in_place = [self._of[id(t)] for t in tops if id(t) in self._of]

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Blob]:
        return (copy for _, copy in self._of.values())

    def _seen(self, blob: Blob) -> Blob:
        return self._of[id(blob)][1] if id(blob) in self._of else blob

    def reshape(self) -> None:
        """Reshape the copies like the blobs."""
        for blob, copy in self._of.values():
            copy.reshape_like(blob)

    def before_forward(self, convert: Convert) -> None:
        """Convert what the layer reads."""
        for blob, copy in self._of.values():
            convert(blob.data, copy.data)

    def after_forward(self, convert: Convert) -> None:
        """Convert back what the layer wrote in place."""
        for blob, copy in self._in_place:
            blob.reshape_like(copy)
            convert(copy.data, blob.data)

    def before_backward(self, convert: Convert) -> None:
        """Convert the gradients of in-place tops."""
        for blob, copy in self._in_place:
            convert(blob.diff, copy.diff)

    def after_backward(
        self, convert: Convert, bottoms: Sequence[Blob], propagate_down: Sequence[bool]
    ) -> None:
        """Convert back the gradients that the layer wrote."""
        for blob, down in zip(bottoms, propagate_down, strict=True):
            if down and id(blob) in self._of:
                convert(self._of[id(blob)][1].diff, blob.diff)


@dataclass(slots=True, eq=False)
class Param:
    """A parameter blob of a layer. Of layers that share one the first is the `owner`."""

    blob: Blob
    layer: int  # place in the net
    index: int  # place in the layer
    spec: ParamSpec  # of an owner: lr_mult and decay_mult, also those that sharing layers give
    owner: "Param | None" = None

    @property
    def name(self) -> str:
        """Name in the definition, else the index."""
        return self.spec.name or str(self.index)


@dataclass(slots=True, eq=False)
class Node:
    """A layer with its wiring.

    `bottoms` and `tops` are blobs of the net. The layer computes with `layer_bottoms` and
    `layer_tops`: the same blobs, or copies in another layout, or host views of either.
    """

    param: LayerParameter  # as the net's definition has it
    layer: Layer
    bottom_names: list[str]
    top_names: list[str]
    bottoms: list[Blob]
    tops: list[Blob]
    propagate_down: list[bool]  # which bottoms get a gradient
    of_root: bool = False  # the layer belongs to the root net
    need_backward: bool = False
    params: list[Param] = field(default_factory=list)
    casts: LayoutCasts | None = None
    # By the id of a bottom, the top into which it is copied for a layer that works in place on it.
    copied: dict[int, Blob] = field(default_factory=dict)
    layer_bottoms: list[Blob] = field(init=False)
    layer_tops: list[Blob] = field(init=False)
    _shapes: list[tuple[Blob, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute_with(self.bottoms, self.tops)

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.param.name

    @property
    def losses(self) -> list[Blob]:
        """Tops with a loss weight, which is in their diff."""
        pairs = zip(self.tops, self.layer.loss_weights, strict=True)
        return [top for top, weight in pairs if weight]

    def cast(self, layouts: Sequence[Layout]) -> None:
        """Make the layer compute with its bottoms in these layouts, and reshape it."""
        casts = LayoutCasts(self.bottoms, self.tops, layouts, self.copied)
        self.casts = casts or None
        self.compute_with(casts.bottoms, casts.tops)
        with self.layer.forward_lock:
            self.reshape()
        self.write_loss_weights()

    def compute_with(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Set the blobs that the layer computes with; it gets host views if it runs on the host."""
        views = self.layer.on_host
        self.layer_bottoms, self.layer_tops = (
            (on_host(bottoms), on_host(tops)) if views else (bottoms, tops)
        )

    def reshape(self) -> None:
        """Reshape the layer."""
        self.layer.reshape(self.layer_bottoms, self.layer_tops)
        self.keep_shapes()

    def keep_shapes(self) -> None:
        """Keep the present shapes, for `reshape_if_changed` to compare with."""
        self._shapes = [(b, b.shape) for b in (*self.layer_bottoms, *self.layer_tops)]

    def reshape_if_changed(self) -> None:
        """Reshape the layer unless all shapes are as they were after its last reshape."""
        if self.layer.always_reshape or self.shapes_changed():
            self.reshape()

    def shapes_changed(self) -> bool:
        """True if a shape is not as it was after the layer's last reshape."""
        return any(blob.shape is not shape and blob.shape != shape for blob, shape in self._shapes)

    def write_loss_weights(self) -> None:
        """Fill the diffs of tops with a loss weight with it."""
        for blob, weight in zip(self.tops, self.layer.loss_weights, strict=True):
            if weight:
                blob.host_diff[...] = weight

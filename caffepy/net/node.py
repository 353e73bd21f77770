"""Records of a net: one a layer, one a parameter."""

from dataclasses import dataclass, field

from caffepy.device.blob import Blob, on_host
from caffepy.layer import Layer
from caffepy.net.casts import LayoutCasts
from caffepy.proto.caffe_pb2 import LayerParameter, ParamSpec


@dataclass(slots=True, eq=False)
class Param:
    """A parameter blob of a layer. Those that share one have the first as `owner`."""

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
    layer_bottoms: list[Blob] = field(init=False)
    layer_tops: list[Blob] = field(init=False)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute_with(self.bottoms, self.tops)

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.param.name

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
        self._shapes = [b.shape for b in self.layer_bottoms + self.layer_tops]

    def reshape_if_changed(self) -> None:
        """Reshape the layer unless all shapes are as they were after its last reshape."""
        shapes = [b.shape for b in self.layer_bottoms]
        shapes += [b.shape for b in self.layer_tops]
        if self.layer.always_reshape or shapes != self._shapes:
            self.reshape()

    def write_loss_weights(self) -> None:
        """Fill the diffs of tops with a loss weight with it."""
        for blob, weight in zip(self.tops, self.layer.loss_weights, strict=True):
            if weight:
                blob.host_diff[...] = weight

"""Nets that need no data: their data layers make random images and labels, for timings, benchmarks
and tests.
"""

from collections.abc import Sequence

from caffepy.core.errors import ConfigError
from caffepy.models import path
from caffepy.proto.caffe_pb2 import DummyDataParameter, LayerParameter, NetParameter
from caffepy.proto.text import read_net

_SOURCES = {
    "Data": "data_param",
    "ImageData": "image_data_param",
    "WindowData": "window_data_param",
    "HDF5Data": "hdf5_data_param",
}

# Layers whose tops have as many channels as their bottom; others than these and those with
# num_output end the trace.
_KEEP_CHANNELS = frozenset(
    {"BatchNorm", "Dropout", "LRN", "Pooling", "PReLU", "ReLU", "Scale", "Softmax"}
)


def synthetic(
    net: NetParameter, batch: int | None = None, image: Sequence[int] | None = None
) -> NetParameter:
    """A copy of `net` whose layers that read data are DummyData: gaussian images, labels drawn from
    all classes.

    They are drawn once, so that they cost nothing from the second pass on. The first top has the
    images, others labels. `batch` replaces the batch size of every data layer. `image` is the shape
    (C, H, W); without it the layer must have a crop_size, or new_height and new_width,
    else ConfigError. Labels lie in [0, classes) and are whole numbers once a loss has truncated
    them.
    """
    copy = NetParameter()
    copy.CopyFrom(net)
    for layer in copy.layer:
        if layer.type in _SOURCES:
            dummy = DummyDataParameter()
            size = batch or getattr(layer, _SOURCES[layer.type]).batch_size
            for i, top in enumerate(layer.top):
                dummy.shape.add(dim=[size] if i else [size, *(image or _image(layer))])
                if i == 0:
                    dummy.data_filler.add(type="gaussianstatic", std=1)
                else:
                    dummy.data_filler.add(
                        type="uniformstatic", min=0, max=_classes(net, top) - 0.01
                    )
            layer.type = "DummyData"
            layer.dummy_data_param.CopyFrom(dummy)
            for field in ("transform_param", *_SOURCES.values()):
                layer.ClearField(field)
    return copy


def image_shape(name: str) -> tuple[int, ...]:
    """The shape (C, H, W) of one image of a bundled net, as its deploy net takes it."""
    deploy = path(name, "deploy")
    if deploy is None:
        raise ConfigError(f"there is no bundled net {name!r}")
    return tuple(read_net(deploy).layer[0].input_param.shape[0].dim[1:])


def _image(layer: LayerParameter) -> list[int]:
    """The shape (C, H, W) of the images by the layer's own settings."""
    transform, files = layer.transform_param, layer.image_data_param
    grey = transform.force_gray or not files.is_color
    height, width = (
        (transform.crop_size,) * 2 if transform.crop_size else (files.new_height, files.new_width)
    )
    if not (height and width):
        raise ConfigError(
            f'layer "{layer.name}" has no crop_size: give the shape of its images, --image '
            "CHANNELS,HEIGHT,WIDTH"
        )
    return [1 if grey else 3, height, width]


def _classes(net: NetParameter, label: str) -> int:
    """The smallest number of scores that a layer compares with this label; 1 if unknown."""
    channels: dict[str, int] = {}
    found = []
    for layer in net.layer:
        first = channels.get(layer.bottom[0], 0) if layer.bottom else 0
        if first and label in layer.bottom[1:]:
            found.append(first)
        kept = first if layer.type in _KEEP_CHANNELS else 0
        for top in layer.top:
            channels[top] = (
                layer.inner_product_param.num_output or layer.convolution_param.num_output or kept
            )
    return min(found, default=1)

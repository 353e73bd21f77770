"""Offsets of old nets' crops: those that FCN's authors published, those of pycaffe's coordinate
maps, and what cannot be aligned.
"""

import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse
from caffepy.proto.upgrade import upgrade_net
from caffepy.pycaffe import coord_map
from caffepy.pycaffe.net_spec import layers as made

INPUT = 'input: "data" input_dim: 1 input_dim: 3 input_dim: 500 input_dim: 500\n'


def convolution(name: str, bottom: str, kernel: int, settings: str = "", kind: str = "") -> str:
    return (
        f'layers {{ name: "{name}" type: {kind or "CONVOLUTION"} bottom: "{bottom}" top: "{name}" '
        f"convolution_param {{ num_output: 2 kernel_size: {kernel} {settings} }} }}\n"
    )


def pooling(name: str, bottom: str, settings: str = "kernel_size: 2 stride: 2") -> str:
    return (
        f'layers {{ name: "{name}" type: POOLING bottom: "{bottom}" top: "{name}" '
        f"pooling_param {{ {settings} }} }}\n"
    )


def widened(name: str, bottom: str, kernel: int, stride: int) -> str:
    return convolution(name, bottom, kernel, f"stride: {stride}", "DECONVOLUTION")


def crop(name: str, first: str, second: str) -> str:
    return f'layers {{ name: "{name}" type: CROP bottom: "{first}" bottom: "{second}" top: "{name}" }}\n'


def offsets(text: str) -> dict[str, tuple[int, list[int]]]:
    net = upgrade_net(parse(INPUT + text, NetParameter(), "net.prototxt"), "net.prototxt")
    return {
        layer.name: (layer.crop_param.axis, list(layer.crop_param.offset))
        for layer in net.layer
        if layer.type == "Crop"
    }


def fcn8() -> str:
    """The layers of FCN-8s (Long et al. 2015) by which positions go."""
    text = convolution("conv1", "data", 3, "pad: 100")
    text += 'layers { name: "relu1" type: RELU bottom: "conv1" top: "conv1" }\n'
    text += pooling("pool1", "conv1") + pooling("pool2", "pool1") + pooling("pool3", "pool2")
    text += pooling("pool4", "pool3") + pooling("pool5", "pool4")
    text += convolution("fc6", "pool5", 7) + convolution("score", "fc6", 1)
    text += widened("score2", "score", 4, 2) + convolution("score-pool4", "pool4", 1)
    text += crop("crop4", "score-pool4", "score2")
    text += (
        'layers { name: "fuse" type: ELTWISE bottom: "score2" bottom: "crop4" top: "fused" }\n'
        + widened("score4", "fused", 4, 2)
        + convolution("score-pool3", "pool3", 1)
        + crop("crop3", "score-pool3", "score4")
        + 'layers { name: "final" type: ELTWISE bottom: "score4" bottom: "crop3" top: "all" }\n'
        + widened("big", "all", 16, 8)
        + crop("crop", "big", "data")
    )
    return text


def test_fcn_8s_has_the_offsets_that_its_authors_wrote_later() -> None:
    assert offsets(fcn8()) == {"crop4": (2, [5, 5]), "crop3": (2, [9, 9]), "crop": (2, [31, 31])}


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilation"),
    [(3, 1, 7, 1), (5, 1, 9, 2), (4, 2, 21, 1), (2, 2, 8, 3), (3, 3, 10, 1)],
)
def test_offsets_are_those_of_coordinate_maps(
    kernel: int, stride: int, pad: int, dilation: int
) -> None:
    sizes = {"kernel_size": kernel, "stride": stride, "pad": pad, "dilation": dilation}
    text = convolution("c", "data", kernel, f"stride: {stride} pad: {pad} dilation: {dilation}")
    wide = 2 * stride - stride % 2
    text += widened("d", "c", wide, stride) + crop("crop", "d", "data")
    data = made.Input()
    found = made.Deconvolution(
        made.Convolution(data, **sizes), convolution_param={"kernel_size": wide, "stride": stride}
    )
    wanted = coord_map.crop(found, data).fn.params["crop_param"]
    assert offsets(text) == {"crop": (wanted["axis"], list(wanted["offset"]) * 2)}


def test_rows_and_columns_have_offsets_of_their_own() -> None:
    text = convolution("c", "data", 3, "pad_h: 3 pad_w: 5").replace(
        "kernel_size: 3", "kernel_h: 3 kernel_w: 5"
    )
    assert offsets(text + crop("crop", "c", "data")) == {"crop": (2, [2, 3])}
    text = pooling("p", "data", "kernel_h: 3 kernel_w: 1 pad_h: 1 pad_w: 0 stride: 1")
    assert offsets(text + crop("crop", "p", "data")) == {"crop": (2, [0, 0])}


def test_a_crop_is_found_through_another() -> None:
    text = convolution("c", "data", 1, "pad: 4") + crop("a", "c", "data")
    text += convolution("e", "a", 1, "pad: 2") + crop("b", "e", "data")
    assert offsets(text) == {"a": (2, [4, 4]), "b": (2, [2, 2])}


def test_crops_that_find_their_place_in_new_nets() -> None:
    """RCF's AutoCrop, also where two stand one behind the other."""
    text = convolution("c", "data", 1, "pad: 4") + crop("a", "c", "data")
    text = text.replace("layers", "layer").replace("CONVOLUTION", '"Convolution"')
    text = text.replace("type: CROP", 'type: "AutoCrop"')
    assert offsets(text) == {"a": (2, [4, 4])}


REFUSED = {
    "no whole offset aligns them": pooling("p", "data") + crop("crop", "p", "data"),
    'lies at 1 x -0.5 of "data"': convolution("c", "data", 2) + crop("crop", "c", "data"),
    "so no whole offset": convolution("c", "data", 3) + crop("crop", "c", "data"),
    "have no earlier blob in common": (
        'layers { name: "ip" type: INNER_PRODUCT bottom: "data" top: "ip" '
        "inner_product_param { num_output: 3 } }" + crop("crop", "data", "ip")
    ),
    'layer "c" (Convolution): its stride is 0': convolution("c", "data", 3, "stride: 0")
    + crop("crop", "c", "data"),
    'layer "d" (Deconvolution): its stride is 0': widened("d", "data", 3, 0)
    + crop("crop", "d", "data"),
    "it takes 2 bottoms, not 1": crop("crop", "data", "data").replace('bottom: "data"', "", 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_aligned(message: str) -> None:
    with pytest.raises(ConfigError) as error:
        offsets(REFUSED[message])
    assert message in str(error.value)
    assert "net.prototxt" in str(error.value)

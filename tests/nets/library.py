"""Layers and small nets as text, for tests that need a net but are not about its text.

A layer's top has its name unless `top` says otherwise. `bottom` and `top` are names of blobs, with
blanks between several; `settings` are those of the layer's own message, such as
convolution_param, and `more` is what else stands in the layer.
"""

from collections.abc import Sequence
from pathlib import Path

Shape = Sequence[int]

DIGITS = Path(__file__).parent.parent / "golden" / "digits"
XAVIER, MSRA = 'type: "xavier"', 'type: "msra"'
NARROW = 'type: "gaussian" std: 0.3'


def layer(kind: str, name: str, bottom: str = "", more: str = "", *, top: str | None = None) -> str:
    """Any layer."""
    blobs = [f'bottom: "{blob}"' for blob in bottom.split()]
    blobs += [f'top: "{blob}"' for blob in (name if top is None else top).split()]
    return f'layer {{ name: "{name}" type: "{kind}" {" ".join([*blobs, more])} }}\n'


def dims(shape: Shape) -> str:
    return f"shape {{ {' '.join(f'dim: {d}' for d in shape)} }}"


def inputs(name: str = "data", /, **shapes: Shape) -> str:
    """An Input layer with a top of each name and shape."""
    settings = " ".join(dims(shape) for shape in shapes.values())
    return layer("Input", name, "", f"input_param {{ {settings} }}", top=" ".join(shapes))


def dummies(name: str = "data", /, *fillers: str, **shapes: Shape) -> str:
    """A DummyData layer with a top of each name and shape, each filled its own way."""
    settings = [dims(shape) for shape in shapes.values()]
    settings += [f"data_filler {{ {filler} }}" for filler in fillers]
    return layer(
        "DummyData", name, "", f"dummy_data_param {{ {' '.join(settings)} }}", top=" ".join(shapes)
    )


def digits(batch: object, test_batch: object = 0, transform: str = "scale: 0.004") -> str:
    """Data layers of the digits: for training, and for tests unless `test_batch` is 0."""

    def data(part: str, size: object) -> str:
        return layer(
            "Data",
            "data",
            "",
            f"include {{ phase: {part.upper()} }} transform_param {{ {transform} }} data_param {{ "
            f'source: "{DIGITS}/digits_{part}_lmdb" batch_size: {size} backend: LMDB }}',
            top="data label",
        )

    return data("train", batch) + (data("test", test_batch) if test_batch else "")


def records(source: object, batch: int, more: str = "") -> str:
    """A Data layer of an LMDB."""
    param = f'data_param {{ source: "{source}" batch_size: {batch} backend: LMDB }}'
    return layer("Data", "data", "", f"{more} {param}".lstrip(), top="data label")


def _learning(message: str, sizes: str, settings: str, filler: str, more: str) -> str:
    weights = f"weight_filler {{ {filler} }}" if filler else ""
    return f"{more} {message} {{ {sizes} {weights} {settings} }}".lstrip()


def convolution(
    name: str,
    bottom: str,
    outputs: int,
    kernel: int,
    settings: str = "",
    *,
    filler: str = XAVIER,
    more: str = "",
    top: str | None = None,
    kind: str = "Convolution",
) -> str:
    sizes = f"num_output: {outputs} kernel_size: {kernel}"
    text = _learning("convolution_param", sizes, settings, filler, more)
    return layer(kind, name, bottom, text, top=top)


def inner_product(
    name: str,
    bottom: str,
    outputs: int,
    settings: str = "",
    *,
    filler: str = XAVIER,
    more: str = "",
    top: str | None = None,
) -> str:
    text = _learning("inner_product_param", f"num_output: {outputs}", settings, filler, more)
    return layer("InnerProduct", name, bottom, text, top=top)


def recurrent(
    kind: str,
    name: str,
    bottom: str,
    outputs: int,
    *,
    filler: str = XAVIER,
    top: str | None = None,
) -> str:
    text = _learning("recurrent_param", f"num_output: {outputs}", "", filler, "")
    return layer(kind, name, bottom, text, top=top)


def in_place(kind: str, name: str, blob: str, more: str = "") -> str:
    return layer(kind, name, blob, more, top=blob)


def relu(name: str, blob: str) -> str:
    return in_place("ReLU", name, blob)


def pooling(name: str, bottom: str, settings: str) -> str:
    return layer("Pooling", name, bottom, f"pooling_param {{ {settings} }}")


def normalization(name: str, bottom: str, top: str) -> str:
    """BatchNorm, and Scale with bias."""
    return layer("BatchNorm", f"{name}_bn", bottom, top=top) + in_place(
        "Scale", f"{name}_scale", top, "scale_param { bias_term: true }"
    )


def softmax_loss(bottom: str, label: str = "label", more: str = "") -> str:
    return layer("SoftmaxWithLoss", "loss", f"{bottom} {label}", more)


def euclidean_loss(bottom: str, target: str) -> str:
    return layer("EuclideanLoss", "loss", f"{bottom} {target}")


def accuracy(bottom: str, label: str = "label", more: str = "") -> str:
    return layer("Accuracy", "accuracy", f"{bottom} {label}", more)


IN_TESTS = "include { phase: TEST }"


def regression(data: str) -> str:
    """Two numbers "o" that come linearly from "x", and their distance from "y"."""
    return data + inner_product("ip", "x", 2, filler=NARROW, top="o") + euclidean_loss("o", "y")


def linear_classifier(data: str, classes: int, bottom: str = "data") -> str:
    return data + inner_product("ip", bottom, classes) + softmax_loss("ip")


def perceptron(data: str, noise: str = "") -> str:
    """Ten classes of "data" by twenty hidden units, half of them dropped; layers of `noise` make
    "noisy" from those.
    """
    return (
        data
        + inner_product("ip1", "data", 20)
        + relu("relu", "ip1")
        + in_place("Dropout", "drop", "ip1")
        + noise
        + inner_product("ip2", "noisy" if noise else "ip1", 10)
        + softmax_loss("ip2")
    )


def small_convolution(data: str) -> str:
    """Ten classes of "data" by one convolution of four kernels."""
    return (
        data
        + convolution("conv", "data", 4, 3, more="param { lr_mult: 1 } param { lr_mult: 2 }")
        + relu("relu", "conv")
        + pooling("pool", "conv", "kernel_size: 2 stride: 2")
        + inner_product("ip", "pool", 10)
        + softmax_loss("ip")
        + accuracy("ip", more=IN_TESTS)
    )

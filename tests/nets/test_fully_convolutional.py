"""A fully convolutional net for segmentation (Long, Shelhamer and Darrell 2015), in small: two
strides, one skip.

As in the paper the first convolution pads by more than it needs, learned scores are enlarged by
bilinear deconvolutions, and Crop brings them to the size of what they meet.
"""

import numpy as np

from caffepy.device.blob import Array

from . import library
from .training import Training, fall

SIZE, IGNORED = 20, 255


def conv(name: str, bottom: str, outputs: int, kernel: int, pad: int = 0) -> str:
    return library.convolution(name, bottom, outputs, kernel, f"pad: {pad}", filler=library.MSRA)


def relu_pool(name: str, bottom: str) -> str:
    return library.relu(f"relu_{name}", bottom) + library.pooling(
        name, bottom, "kernel_size: 2 stride: 2"
    )


def enlarge(name: str, bottom: str) -> str:
    return library.convolution(
        name,
        bottom,
        2,
        4,
        "group: 2 stride: 2 bias_term: false",
        filler='type: "bilinear"',
        more="param { lr_mult: 0 }",
        kind="Deconvolution",
    )


def crop(name: str, bottom: str, like: str, offset: int) -> str:
    return library.layer(
        "Crop", name, f"{bottom} {like}", f"crop_param {{ axis: 2 offset: {offset} }}"
    )


NET = "".join(
    [
        library.inputs(data=(4, 1, SIZE, SIZE), label=(4, 1, SIZE, SIZE)),
        conv("conv1", "data", 8, kernel=3, pad=8),
        relu_pool("pool1", "conv1"),
        conv("conv2", "pool1", 16, kernel=3, pad=1),
        relu_pool("pool2", "conv2"),
        conv("score", "pool2", 2, kernel=1),
        enlarge("up2", "score"),
        conv("score_pool1", "pool1", 2, kernel=1),
        crop("up2c", "up2", "score_pool1", 1),
        library.layer("Eltwise", "fuse", "up2c score_pool1"),
        enlarge("up4", "fuse"),
        crop("final", "up4", "data", 8),
        library.softmax_loss("final", more=f"loss_param {{ ignore_label: {IGNORED} }}"),
    ]
)


def squares(rng: np.random.Generator) -> dict[str, Array]:
    """Bright squares on noise; the label is 1 inside, and ignored along the border of the square."""
    data = rng.standard_normal((4, 1, SIZE, SIZE))
    label = np.zeros(data.shape)
    for n in range(len(data)):
        y, x, size = *rng.integers(1, 9, 2), rng.integers(6, 10)
        label[n, 0, y - 1 : y + size + 1, x - 1 : x + size + 1] = IGNORED
        label[n, 0, y : y + size, x : x + size] = 1
        data[n, 0, y : y + size, x : x + size] += 2
    return {"data": data, "label": label}


def test_the_loss_falls_below_a_third():
    training = Training(NET, 'type: "Adam" base_lr: 0.01 momentum: 0.9 lr_policy: "fixed"', squares)
    upscore = training.net.layers[training.net.layer_names.index("up4")].blobs[0]
    before = upscore.data.copy()
    losses = training.run(60, "loss")
    assert fall(losses) < 1 / 3
    assert training.net.blobs["final"].shape == (4, 2, SIZE, SIZE)
    np.testing.assert_array_equal(upscore.data, before)
    batch = training.feed()
    training.net.forward()
    seen = batch["label"] != IGNORED
    guess = training.net.blobs["final"].data.argmax(1)[:, None]
    assert (guess == batch["label"])[seen].mean() > 0.9

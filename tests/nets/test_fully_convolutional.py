"""A fully convolutional net for segmentation (Long, Shelhamer and Darrell 2015), in small: two
strides, one skip.

As in the paper the first convolution pads by more than it needs, learned scores are enlarged by
bilinear deconvolutions, and Crop brings them to the size of what they meet.
"""

import numpy as np

from caffepy.device.blob import Array

from .training import Training, fall, inputs

SIZE, IGNORED = 20, 255


def conv(name: str, bottom: str, top: str, outputs: int, kernel: int, pad: int = 0) -> str:
    return f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{top}" convolution_param {{
  num_output: {outputs} kernel_size: {kernel} pad: {pad} weight_filler {{ type: "msra" }} }} }}
"""


def relu_pool(name: str, bottom: str) -> str:
    return f"""layer {{ name: "relu_{name}" type: "ReLU" bottom: "{bottom}" top: "{bottom}" }}
layer {{ name: "{name}" type: "Pooling" bottom: "{bottom}" top: "{name}" pooling_param {{ kernel_size: 2 stride: 2 }} }}
"""


def enlarge(name: str, bottom: str) -> str:
    return f"""layer {{ name: "{name}" type: "Deconvolution" bottom: "{bottom}" top: "{name}" param {{ lr_mult: 0 }}
  convolution_param {{ num_output: 2 group: 2 kernel_size: 4 stride: 2 bias_term: false
    weight_filler {{ type: "bilinear" }} }} }}
"""


def crop(name: str, bottom: str, like: str, offset: int) -> str:
    return f"""layer {{ name: "{name}" type: "Crop" bottom: "{bottom}" bottom: "{like}" top: "{name}"
  crop_param {{ axis: 2 offset: {offset} }} }}
"""


NET = "".join(
    [
        inputs(data=(4, 1, SIZE, SIZE), label=(4, 1, SIZE, SIZE)),
        conv("conv1", "data", "conv1", 8, kernel=3, pad=8),
        relu_pool("pool1", "conv1"),
        conv("conv2", "pool1", "conv2", 16, kernel=3, pad=1),
        relu_pool("pool2", "conv2"),
        conv("score", "pool2", "score", 2, kernel=1),
        enlarge("up2", "score"),
        conv("score_pool1", "pool1", "score_pool1", 2, kernel=1),
        crop("up2c", "up2", "score_pool1", 1),
        'layer { name: "fuse" type: "Eltwise" bottom: "up2c" bottom: "score_pool1" top: "fuse" }\n',
        enlarge("up4", "fuse"),
        crop("final", "up4", "data", 8),
        f"""layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "final" bottom: "label" top: "loss"
  loss_param {{ ignore_label: {IGNORED} }} }}
""",
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

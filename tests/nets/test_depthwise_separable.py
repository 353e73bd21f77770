"""A depthwise-separable net (Howard et al. 2017) in small: a 3x3 kernel a channel, then 1x1
convolutions.
"""

import numpy as np

from caffepy.device.blob import Array

from . import library
from .training import Training, fall, gratings

BATCH, SIZE = 16, 20


def conv(name: str, bottom: str, outputs: int, kernel: int, settings: str = "") -> str:
    """A convolution without bias, BatchNorm, Scale with bias and ReLU, the last three in place."""
    return (
        library.convolution(
            name, bottom, outputs, kernel, f"bias_term: false {settings}", filler=library.MSRA
        )
        + library.in_place(
            "BatchNorm",
            f"{name}/bn",
            name,
            "batch_norm_param { moving_average_fraction: 0.9 }",
        )
        + library.in_place(
            "Scale",
            f"{name}/scale",
            name,
            "scale_param { bias_term: true filler { value: 1 } bias_filler { value: 0 } }",
        )
        + library.relu(f"{name}/relu", name)
    )


def separable(name: str, bottom: str, channels: int, outputs: int, stride: int) -> str:
    depthwise = f"pad: 1 stride: {stride} group: {channels}"
    return conv(f"{name}/dw", bottom, channels, 3, depthwise) + conv(
        f"{name}/sep", f"{name}/dw", outputs, 1
    )


NET = "".join(
    [
        library.inputs(data=(BATCH, 1, SIZE, SIZE), label=(BATCH,)),
        conv("conv1", "data", 8, 3, "pad: 1 stride: 2"),
        separable("conv2_1", "conv1", 8, 16, stride=1),
        separable("conv2_2", "conv2_1/sep", 16, 32, stride=2),
        library.pooling("pool", "conv2_2/sep", "pool: AVE global_pooling: true"),
        library.convolution("fc", "pool", 4, 1, filler=library.MSRA),
        library.softmax_loss("fc"),
        library.accuracy("fc", more=library.IN_TESTS),
    ]
)
SETTINGS = """
type: "SGD" base_lr: 0.05 momentum: 0.9 weight_decay: 0.0001 lr_policy: "poly" power: 1 max_iter: 80
test_state {} test_iter: 1 test_interval: 1000 test_initialization: false
"""


def images(rng: np.random.Generator) -> dict[str, Array]:
    data, label = gratings(rng, BATCH, SIZE)
    return {"data": data, "label": label}


def test_the_loss_falls_below_a_tenth_and_stored_statistics_serve():
    training = Training(NET, SETTINGS, images)
    losses = training.run(60, "loss")
    assert fall(losses) < 1 / 10
    (test_net,) = training.solver.test_nets
    test_net.share_trained_layers_with(training.net)
    training.feed(test_net)
    test_net.forward()
    assert test_net.blobs["accuracy"].data > 0.9

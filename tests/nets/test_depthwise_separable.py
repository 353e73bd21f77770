"""A depthwise-separable net (Howard et al. 2017) in small: a 3x3 kernel a channel, then 1x1
convolutions.
"""

import numpy as np

from caffepy.device.blob import Array

from .training import Training, fall, gratings, inputs

BATCH, SIZE = 16, 20


def conv(name: str, bottom: str, outputs: int, extra: str) -> str:
    """A convolution without bias, BatchNorm, Scale with bias and ReLU, the last three in place."""
    return f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{
  num_output: {outputs} bias_term: false weight_filler {{ type: "msra" }} {extra} }} }}
layer {{ name: "{name}/bn" type: "BatchNorm" bottom: "{name}" top: "{name}"
  batch_norm_param {{ moving_average_fraction: 0.9 }} }}
layer {{ name: "{name}/scale" type: "Scale" bottom: "{name}" top: "{name}"
  scale_param {{ bias_term: true filler {{ value: 1 }} bias_filler {{ value: 0 }} }} }}
layer {{ name: "{name}/relu" type: "ReLU" bottom: "{name}" top: "{name}" }}
"""


def separable(name: str, bottom: str, channels: int, outputs: int, stride: int) -> str:
    depthwise = f"kernel_size: 3 pad: 1 stride: {stride} group: {channels}"
    return conv(f"{name}/dw", bottom, channels, depthwise) + conv(
        f"{name}/sep", f"{name}/dw", outputs, "kernel_size: 1"
    )


NET = "".join(
    [
        inputs(data=(BATCH, 1, SIZE, SIZE), label=(BATCH,)),
        conv("conv1", "data", 8, "kernel_size: 3 pad: 1 stride: 2"),
        separable("conv2_1", "conv1", 8, 16, stride=1),
        separable("conv2_2", "conv2_1/sep", 16, 32, stride=2),
        """
layer { name: "pool" type: "Pooling" bottom: "conv2_2/sep" top: "pool"
  pooling_param { pool: AVE global_pooling: true } }
layer { name: "fc" type: "Convolution" bottom: "pool" top: "fc" convolution_param {
  num_output: 4 kernel_size: 1 weight_filler { type: "msra" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "fc" bottom: "label" top: "accuracy" include { phase: TEST } }
""",
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

"""SqueezeNet (Iandola et al. 2016) in small: fire modules, no inner product, the mean over each
class's plane.
"""

import numpy as np

from caffepy.device.blob import Array

from .training import Training, fall, gratings, inputs

BATCH, SIZE = 16, 20


def conv(
    name: str,
    bottom: str,
    outputs: int,
    kernel: int = 1,
    pad: int = 0,
    filler: str = 'type: "msra"',
) -> str:
    return f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{
  num_output: {outputs} kernel_size: {kernel} pad: {pad} weight_filler {{ {filler} }} }} }}
layer {{ name: "relu_{name}" type: "ReLU" bottom: "{name}" top: "{name}" }}
"""


def fire(name: str, bottom: str, squeeze: int, expand: int) -> str:
    """Few 1x1 convolutions, then 1x1 and 3x3 ones side by side."""
    return f"""{conv(f"{name}/squeeze1x1", bottom, squeeze)}
{conv(f"{name}/expand1x1", f"{name}/squeeze1x1", expand)}
{conv(f"{name}/expand3x3", f"{name}/squeeze1x1", expand, kernel=3, pad=1)}
layer {{ name: "{name}/concat" type: "Concat" bottom: "{name}/expand1x1" bottom: "{name}/expand3x3"
  top: "{name}/concat" }}
"""


def pool(name: str, bottom: str, how: str) -> str:
    return f"""layer {{ name: "{name}" type: "Pooling" bottom: "{bottom}" top: "{name}" pooling_param {{ {how} }} }}
"""


NET = "".join(
    [
        inputs(data=(BATCH, 1, SIZE, SIZE), label=(BATCH,)),
        conv("conv1", "data", 16, kernel=3),
        pool("pool1", "conv1", "pool: MAX kernel_size: 3 stride: 2"),
        fire("fire2", "pool1", 8, 16),
        fire("fire3", "fire2/concat", 8, 16),
        pool("pool3", "fire3/concat", "pool: MAX kernel_size: 3 stride: 2"),
        fire("fire4", "pool3", 12, 24),
        'layer { name: "drop4" type: "Dropout" bottom: "fire4/concat" top: "fire4/concat" '
        "dropout_param { dropout_ratio: 0.2 } }\n",
        conv("conv10", "fire4/concat", 4, filler='type: "gaussian" std: 0.1'),
        pool("pool10", "conv10", "pool: AVE global_pooling: true"),
        'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "pool10" bottom: "label" top: "loss" }\n',
        'layer { name: "accuracy" type: "Accuracy" bottom: "pool10" bottom: "label" top: "accuracy" }\n',
    ]
)


def images(rng: np.random.Generator) -> dict[str, Array]:
    data, label = gratings(rng, BATCH, SIZE)
    return {"data": data, "label": label}


def test_the_loss_falls_below_a_fifth():
    training = Training(NET, 'type: "Adam" base_lr: 0.004 momentum: 0.9 lr_policy: "fixed"', images)
    values = training.run(80, "loss", "accuracy")
    assert fall(values[:, 0]) < 1 / 5
    assert values[-5:, 1].mean() > 0.9

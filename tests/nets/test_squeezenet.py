"""SqueezeNet (Iandola et al. 2016) in small: fire modules, no inner product, the mean over each
class's plane.
"""

import numpy as np

from caffepy.device.blob import Array

from . import library
from .training import Training, fall, gratings

BATCH, SIZE = 16, 20


def conv(
    name: str,
    bottom: str,
    outputs: int,
    kernel: int = 1,
    pad: int = 0,
    filler: str = library.MSRA,
) -> str:
    return library.convolution(
        name, bottom, outputs, kernel, f"pad: {pad}", filler=filler
    ) + library.relu(f"relu_{name}", name)


def fire(name: str, bottom: str, squeeze: int, expand: int) -> str:
    """Few 1x1 convolutions, then 1x1 and 3x3 ones side by side."""
    return (
        conv(f"{name}/squeeze1x1", bottom, squeeze)
        + conv(f"{name}/expand1x1", f"{name}/squeeze1x1", expand)
        + conv(f"{name}/expand3x3", f"{name}/squeeze1x1", expand, kernel=3, pad=1)
        + library.layer("Concat", f"{name}/concat", f"{name}/expand1x1 {name}/expand3x3")
    )


NET = "".join(
    [
        library.inputs(data=(BATCH, 1, SIZE, SIZE), label=(BATCH,)),
        conv("conv1", "data", 16, kernel=3),
        library.pooling("pool1", "conv1", "pool: MAX kernel_size: 3 stride: 2"),
        fire("fire2", "pool1", 8, 16),
        fire("fire3", "fire2/concat", 8, 16),
        library.pooling("pool3", "fire3/concat", "pool: MAX kernel_size: 3 stride: 2"),
        fire("fire4", "pool3", 12, 24),
        library.in_place(
            "Dropout", "drop4", "fire4/concat", "dropout_param { dropout_ratio: 0.2 }"
        ),
        conv("conv10", "fire4/concat", 4, filler='type: "gaussian" std: 0.1'),
        library.pooling("pool10", "conv10", "pool: AVE global_pooling: true"),
        library.softmax_loss("pool10"),
        library.accuracy("pool10"),
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

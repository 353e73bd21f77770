"""The autoencoder of Hinton and Salakhutdinov (2006) in small: a code of a few numbers, all units
logistic.

It learns by the cross entropy; the squared error is shown beside it with weight 0, as in Caffe's
example for MNIST.
"""

import numpy as np

from caffepy.device.blob import Array

from . import library
from .training import Training, fall

BATCH, SIDE = 50, 6


def dense(name: str, bottom: str, outputs: int, sigmoid: bool = True) -> str:
    layer = library.inner_product(
        name,
        bottom,
        outputs,
        more="param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 1 decay_mult: 0 }",
    )
    return layer + library.layer("Sigmoid", f"{name}neuron", name) if sigmoid else layer


NET = "".join(
    [
        library.inputs(data=(BATCH, 1, SIDE, SIDE)),
        library.layer("Flatten", "flatdata", "data"),
        dense("encode1", "data", 24),
        dense("encode2", "encode1neuron", 6, sigmoid=False),
        dense("decode2", "encode2", 24),
        dense("decode1", "decode2neuron", SIDE * SIDE, sigmoid=False),
        library.layer(
            "SigmoidCrossEntropyLoss",
            "loss",
            "decode1 flatdata",
            "loss_weight: 1",
            top="cross_entropy_loss",
        ),
        library.layer("Sigmoid", "decode1neuron", "decode1"),
        library.layer(
            "EuclideanLoss", "error", "decode1neuron flatdata", "loss_weight: 0", top="l2_error"
        ),
    ]
)
SETTINGS = 'type: "Nesterov" base_lr: 0.05 momentum: 0.9 lr_policy: "fixed" weight_decay: 0.0005'


def bars(rng: np.random.Generator) -> dict[str, Array]:
    """Each row of an image is all one or all zero."""
    rows = rng.integers(0, 2, (BATCH, 1, SIDE, 1))
    return {"data": np.broadcast_to(rows, (BATCH, 1, SIDE, SIDE))}


def test_both_losses_fall_below_a_third_and_one_of_them_is_minimized():
    training = Training(NET, SETTINGS, bars)
    losses = training.run(100, "cross_entropy_loss", "l2_error")
    assert fall(losses[:, 0]) < 1 / 3
    assert fall(losses[:, 1]) < 1 / 3
    assert training.net.loss() == losses[-1, 0]


def test_the_error_of_weight_zero_changes_nothing():
    without = "".join(NET.partition('layer { name: "decode1neuron"')[:1])
    runs = [Training(text, SETTINGS, bars) for text in (NET, without)]
    for training in runs:
        training.run(3)
    for a, b in zip(*(training.net.learnable_params for training in runs), strict=True):
        np.testing.assert_array_equal(a.data, b.data)

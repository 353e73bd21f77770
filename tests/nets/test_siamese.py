"""A siamese net (Hadsell, Chopra and LeCun 2006): two towers with the same parameters, pairs that
attract or repel.
"""

import numpy as np

from caffepy.device.blob import Array

from . import library
from .training import Training, fall, gratings

PAIRS, SIZE = 32, 10


def tower(suffix: str, bottom: str) -> str:
    """Layers that share their parameters by name with the other tower."""
    return (
        library.convolution(
            f"conv{suffix}",
            bottom,
            8,
            3,
            more='param { name: "conv_w" } param { name: "conv_b" lr_mult: 2 }',
        )
        + library.relu(f"relu{suffix}", f"conv{suffix}")
        + library.pooling(f"pool{suffix}", f"conv{suffix}", "kernel_size: 2 stride: 2")
        + library.inner_product(
            f"feat{suffix}",
            f"pool{suffix}",
            2,
            more='param { name: "feat_w" } param { name: "feat_b" lr_mult: 2 }',
        )
    )


NET = (
    library.inputs(pair_data=(PAIRS, 2, SIZE, SIZE), sim=(PAIRS,))
    + library.layer(
        "Slice", "slice", "pair_data", "slice_param { axis: 1 slice_point: 1 }", top="data data_p"
    )
    + tower("", "data")
    + tower("_p", "data_p")
    + library.layer(
        "ContrastiveLoss", "loss", "feat feat_p sim", "contrastive_loss_param { margin: 1 }"
    )
)


def pairs(rng: np.random.Generator) -> dict[str, Array]:
    """Two gratings each; similar if they have one direction, which half of the pairs are made to
    have.
    """
    images, label = gratings(rng, 8 * PAIRS, SIZE)
    first, second = np.arange(PAIRS), np.arange(PAIRS, 2 * PAIRS)
    for i in range(0, PAIRS, 2):
        second[i] = np.flatnonzero(label == label[i])[-1]
    return {
        "pair_data": np.concatenate([images[first], images[second]], 1),
        "sim": label[first] == label[second],
    }


def test_the_loss_falls_below_a_quarter():
    training = Training(
        NET, 'base_lr: 0.05 momentum: 0.9 lr_policy: "inv" gamma: 0.001 power: 0.75', pairs
    )
    losses = training.run(80, "loss")
    assert fall(losses) < 1 / 4
    net = training.net
    assert len(net.learnable_params) == 4
    for name in ("conv", "feat"):
        ours, theirs = (
            net.layers[net.layer_names.index(name + suffix)].blobs for suffix in ("", "_p")
        )
        assert all(np.shares_memory(a.data, b.data) for a, b in zip(ours, theirs, strict=True))
    similar = training.feed()["sim"]
    net.forward()
    distance = np.linalg.norm(net.blobs["feat"].data - net.blobs["feat_p"].data, axis=1)
    assert distance[similar].mean() < distance[~similar].mean() / 3

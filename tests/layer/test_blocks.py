from itertools import product

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

BATCH = {
    "blocks": ((2, 4, 6, 3), (2, 3), (0, 0, 0, 0)),
    "with margins": ((2, 3, 4, 2), (2, 3), (1, 0, 0, 2)),
    "of one axis": ((1, 4, 3), (2,), ()),
}
FORMATS = ["NHWC", "NCHW", "DCR", "CRD"]


def to_batch(shape, block, margins):
    sizes = " ".join(f"block_shape: {b}" for b in block)
    padded = " ".join(f"paddings: {m}" for m in margins)
    return f'type: "SpaceToBatchND" space_to_batch_nd_param {{ {sizes} {padded} }}'


def from_batch(shape, block, margins):
    sizes = " ".join(f"block_shape: {b}" for b in block)
    cropped = " ".join(f"crops: {m}" for m in margins)
    return f'type: "BatchToSpaceND" batch_to_space_nd_param {{ {sizes} {cropped} }}'


def apart(x, block, margins):
    """Images of the places of blocks, element by element."""
    sides = [margins[2 * i : 2 * i + 2] or (0, 0) for i in range(len(block))]
    x = np.pad(x, [(0, 0), *sides, *[(0, 0)] * (x.ndim - 1 - len(block))])
    images = []
    for at in product(*map(range, block)):
        steps = (slice(a, None, b) for a, b in zip(at, block, strict=True))
        images.append(x[(slice(None), *steps)])
    return np.concatenate(images)


@pytest.mark.parametrize("case", BATCH)
def test_blocks_over_the_batch(case):
    shape, block, margins = BATCH[case]
    x = random(*shape)
    (y,) = Single(to_batch(*BATCH[case]), x).forward()
    np.testing.assert_array_equal(y, apart(x, block, margins))
    (back,) = Single(from_batch(*BATCH[case]), y).forward()
    np.testing.assert_array_equal(back, x)
    check_gradient(to_batch(*BATCH[case]), x)
    check_gradient(from_batch(*BATCH[case]), y)


@pytest.mark.gpu
@pytest.mark.parametrize("case", BATCH)
def test_blocks_over_the_batch_on_gpu(case):
    shape, block, margins = BATCH[case]
    x = random(*shape)
    check_plain_on_gpu(to_batch(*BATCH[case]), x, propagate_down=[True])
    check_plain_on_gpu(from_batch(*BATCH[case]), apart(x, block, margins), propagate_down=[True])


def deep(x, size, format_):
    """The places of blocks as channels, element by element."""
    if format_ == "NHWC":
        return deep(x.transpose(0, 3, 1, 2), size, "NCHW").transpose(0, 2, 3, 1)
    n, c, h, w = x.shape
    y = np.empty((n, c * size * size, h // size, w // size))
    for k, i, j in np.ndindex(c, size, size):
        to = k * size * size + i * size + j if format_ == "CRD" else (i * size + j) * c + k
        y[:, to] = x[:, k, i::size, j::size]
    return y


@pytest.mark.parametrize("format_", FORMATS)
def test_blocks_over_the_channels(format_):
    x = random(2, 4, 6, 2) if format_ == "NHWC" else random(2, 3, 4, 6)
    setting = f'block_size: 2 data_format: "{format_}"'
    there = f'type: "SpaceToDepth" space_to_depth_param {{ {setting} }}'
    back = f'type: "DepthToSpace" depth_to_space_param {{ {setting} }}'
    (y,) = Single(there, x).forward()
    np.testing.assert_array_equal(y, deep(x, 2, format_))
    np.testing.assert_array_equal(Single(back, y).forward()[0], x)
    check_gradient(there, x)
    check_gradient(back, y)


@pytest.mark.gpu
@pytest.mark.parametrize("format_", FORMATS)
def test_blocks_over_the_channels_on_gpu(format_):
    x = random(2, 4, 6, 4) if format_ == "NHWC" else random(2, 4, 4, 6)
    setting = f'block_size: 2 data_format: "{format_}"'
    for text in (
        f'type: "SpaceToDepth" space_to_depth_param {{ {setting} }}',
        f'type: "DepthToSpace" depth_to_space_param {{ {setting} }}',
    ):
        check_plain_on_gpu(text, x, propagate_down=[True])


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        (to_batch((), (2, 2, 2), ()), (1, 2, 2), "block_shape .* must name sizes of some of the 2"),
        (to_batch((), (2,), (1,)), (1, 2, 2), "two numbers for each or none"),
        (to_batch((), (2, 2), ()), (1, 3, 2), r"planes of \[3, 2\] cannot be cut into blocks"),
        (from_batch((), (2, 2), ()), (3, 2, 2), "3 images cannot be cut into blocks"),
        (from_batch((), (2,), (2, 2)), (2, 2, 2), "leave nothing of"),
        ('type: "SpaceToDepth" space_to_depth_param { block_size: 3 }', (1, 4, 6, 1), "4x6 cannot"),
        ('type: "DepthToSpace" depth_to_space_param { block_size: 2 }', (1, 1, 1, 6), "6 channels"),
        ('type: "DepthToSpace"', (1, 1, 1, 6), "a block_size of 1 or more, not 0"),
    ],
)
def test_what_cannot_be_cut(text, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, np.zeros(shape))

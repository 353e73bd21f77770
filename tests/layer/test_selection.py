import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Blob
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_on_gpu, check_plain_on_gpu, check_problem_on_gpu

INDEX = np.array([4.0, 0, 0, 2])
SELECTOR = np.array([1.0, 0, 0, 2])

# name: prototxt, bottoms, tops, propagate_down, function of the bottoms that gives the tops
CASES = {
    "Crop": (
        'type: "Crop" crop_param { offset: 1 offset: 2 }',
        [random(2, 2, 4, 5), random(2, 2, 3, 2)],
        1,
        None,
        lambda x, y: [x[:, :, 1:4, 2:4]],
    ),
    "Crop axis 1": (
        'type: "Crop" crop_param { axis: 1 offset: 1 }',
        [random(2, 4, 4), random(1, 3, 2)],
        1,
        None,
        lambda x, y: [x[:, 1:4, 1:3]],
    ),
    "BatchReindex": (
        'type: "BatchReindex"',
        [random(5, 3), INDEX],
        1,
        [True, False],
        lambda x, i: [x[i.astype(int)]],
    ),
    "Gather": (
        'type: "Gather" gather_param { indices: [2, 0, 0, 1, 2, 1] shape: [2, 3] axis: 1 }',
        [random(2, 3, 4)],
        1,
        None,
        lambda x: [x[:, [[2, 0, 0], [1, 2, 1]]]],
    ),
    "Gather one": (
        'type: "Gather" gather_param { indices: 2 shape: 0 axis: -1 }',
        [random(2, 3, 4)],
        1,
        None,
        lambda x: [x[..., 2]],
    ),
    "Gather without settings": (
        'type: "Gather"',
        [random(2, 3), random(4)],
        2,
        None,
        lambda x, y: [x, y],
    ),
    "Filter": (
        'type: "Filter"',
        [random(4, 3), random(4, 2), SELECTOR],
        2,
        [True, True, False],
        lambda x, y, s: [x[s != 0], y[s != 0]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    text, bottoms, tops, propagate_down, _ = CASES[case]
    check_gradient(text, *bottoms, tops=tops, propagate_down=propagate_down)


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case):
    text, bottoms, tops, _, function = CASES[case]
    answers = Single(text, *bottoms, tops=tops).forward()
    for answer, expected in zip(answers, function(*bottoms), strict=True):
        np.testing.assert_array_equal(answer, expected)


def test_gradients_against_a_loop():
    """Items that are taken twice get both gradients, the others 0."""
    single, dy = Single('type: "BatchReindex"', random(5, 3), INDEX), random(4, 3, seed=1)
    single.forward()
    (dx, _), _ = single.backward([dy], [True, False])
    want = np.zeros((5, 3))
    for row, index in enumerate(INDEX):
        want[int(index)] += dy[row]
    np.testing.assert_allclose(dx, want)

    single = Single('type: "Filter"', random(4, 3), random(4, 2), SELECTOR, tops=2)
    dys = [random(*y.shape, seed=2) for y in single.forward()]
    dxs, _ = single.backward(dys, [True, True, False])
    for dx, dy in zip(dxs, dys, strict=False):
        rows = iter(dy)
        for item, chosen in zip(dx, SELECTOR, strict=True):
            np.testing.assert_array_equal(item, next(rows) if chosen else 0)


@pytest.mark.parametrize("case", ["argmax", "argmax_val", "batch_reindex", "crop", "filter"])
def test_as_caffe(case):
    check_golden(case)


def test_argmax_against_sorting():
    x = np.array([[[3.0, 1, 3, 0], [1, 2, 0, 5]]])
    (flat,) = Single('type: "ArgMax" argmax_param { top_k: 3 }', x).forward()
    np.testing.assert_array_equal(flat, [[[7, 2, 0]]])
    (both,) = Single('type: "ArgMax" argmax_param { top_k: 2 out_max_val: true }', x).forward()
    np.testing.assert_array_equal(both, [[[7, 2], [5, 3]]])
    (along,) = Single('type: "ArgMax" argmax_param { axis: 1 }', x).forward()
    np.testing.assert_array_equal(along, [[[0, 1, 0, 1]]])
    (values,) = Single(
        'type: "ArgMax" argmax_param { axis: -1 top_k: 2 out_max_val: true }', x
    ).forward()
    np.testing.assert_array_equal(values, [[[3, 3], [5, 2]]])


def test_filter_without_any_item():
    single = Single('type: "Filter"', random(3, 2), np.zeros(3))
    (y,) = single.forward()
    assert y.shape == (0, 2)
    (dx, _), _ = single.backward([np.zeros((0, 2))], [True, False])
    np.testing.assert_array_equal(dx, 0)


def test_no_index_gives_no_item():
    assert Single('type: "BatchReindex"', random(2, 3), random(0)).forward()[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("text", "shapes", "tops", "message"),
    {
        "argmax": (
            'type: "ArgMax" argmax_param { top_k: 4 }',
            [(2, 3)],
            1,
            "top_k 4 must lie between 1 and 3",
        ),
        "crop": (
            'type: "Crop" crop_param { axis: 1 offset: 2 }',
            [(2, 3), (2, 2)],
            1,
            "offset 2 and size 2 exceed",
        ),
        "crop axes": (
            'type: "Crop" crop_param { axis: 1 }',
            [(2, 3), (2, 3, 4)],
            1,
            "equally many axes",
        ),
        "crop offsets": (
            'type: "Crop" crop_param { axis: 1 offset: 0 offset: 0 }',
            [(2, 3), (2, 3)],
            1,
            "2 offsets for 1 axes",
        ),
        "index axes": ('type: "BatchReindex"', [(2, 3), (2, 1)], 1, "one axis"),
        "selector": ('type: "Filter"', [(2, 3), (3,)], 1, r"shape \[2\] for 2 items"),
        "filter tops": ('type: "Filter"', [(2, 3), (2,)], 2, "1, not 2"),
    }.values(),
)
def test_what_does_not_fit_is_refused(text, shapes, tops, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*s) for s in shapes), tops=tops)


def test_index_outside_is_named():
    with pytest.raises(DataError, match="index 5 is not one of the 5 items 0 to 4"):
        Single('type: "BatchReindex"', random(5, 2), np.array([1.0, 5.0])).forward()


@pytest.mark.parametrize(
    ("text", "bottoms"),
    {
        "BatchReindex": ('type: "BatchReindex"', [random(5, 3), INDEX]),
        "Filter": ('type: "Filter"', [random(4, 3), SELECTOR]),
    }.values(),
)
def test_indices_and_selectors_have_no_gradient(text, bottoms):
    single = Single(text, *bottoms)
    single.forward()
    with pytest.raises(ConfigError, match="propagate_down: false"):
        single.backward([single.tops[0]])


@pytest.mark.gpu
def test_crop_on_gpu_in_all_formats():
    x, y = (
        seeded(i).integers(-20, 20, shape) / 4
        for i, shape in enumerate([(2, 8, 5, 7), (2, 8, 3, 4)])
    )
    check_on_gpu('type: "Crop" crop_param { offset: 1 offset: 2 }', x, y)
    check_on_gpu('type: "Crop" crop_param { axis: 1 offset: 3 offset: 1 offset: 2 }', x, y[:, :5])


ARGMAX = [
    "top_k: 3",
    "top_k: 2 out_max_val: true",
    "axis: 1",
    "axis: -1 top_k: 2 out_max_val: true",
]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ARGMAX)
def test_argmax_on_gpu(setting):
    x = random(4, 3, 5).round()
    check_plain_on_gpu(f'type: "ArgMax" argmax_param {{ {setting} }}', x, propagate_down=[False])


def make(layer, bottom, top):
    layer.setup(bottom, top)
    layer.reshape(bottom, top)


@pytest.mark.parametrize(
    ("param", "shape", "message"),
    [
        ("indices: [0, 3] shape: 2", (3, 2), "index 3 is not below 3"),
        ("indices: [0, 1] shape: 3", (3, 2), "2 indices do not fit the shape"),
        ("indices: 0 shape: 1 axis: 1", (1 << 25, 1), "rows are more than"),
    ],
)
def test_what_gather_refuses(param, shape, message):
    text = f'type: "Gather" gather_param {{ {param} }}'
    layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, Device())
    bottom, top = [Blob(shape)], [Blob()]
    with pytest.raises(ConfigError, match=message):
        make(layer, bottom, top)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["Gather", "Gather one", "Gather without settings"])
def test_gather_on_gpu(case):
    text, bottoms, tops, _, _ = CASES[case]
    check_plain_on_gpu(text, *bottoms, tops=tops, propagate_down=[True] * tops)


@pytest.mark.gpu
def test_batch_reindex_on_gpu():
    x = random(5, 3, 2)
    check_plain_on_gpu('type: "BatchReindex"', x, INDEX, propagate_down=[True, False])
    check_plain_on_gpu('type: "BatchReindex"', x, random(0), propagate_down=[True, False])


@pytest.mark.gpu
@pytest.mark.parametrize("index", [5, -0.5, np.nan])
def test_index_outside_is_named_on_gpu(index):
    check_problem_on_gpu('name: "r" type: "BatchReindex"', random(5, 2), np.array([1, index, 9]))


def test_filter_and_argmax_need_axes():
    with pytest.raises(ConfigError, match=r"the selector must have shape \[1\] for 1 items"):
        Single('type: "Filter"', np.zeros(()), np.zeros(()))
    with pytest.raises(ConfigError, match=r"bottom 0 has 2 items|must have shape \[2\]"):
        Single('type: "Filter"', np.zeros((2, 3)), np.zeros(()))
    with pytest.raises(ConfigError, match="axis 0 is out of range"):
        Single('type: "ArgMax"', np.zeros(()))

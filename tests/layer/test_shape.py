import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_on_gpu, check_plain_on_gpu

GOLDEN = [
    "concat",
    "concat_axis0",
    "flatten",
    "reduction_mean",
    "reduction_sum",
    "reduction_sumsq",
    "reshape",
    "reshape_axis",
    "slice_points",
    "split",
    "tile",
]

# name: prototxt, bottoms, tops, function of the bottoms that gives the tops
CASES = {
    "Concat": (
        'type: "Concat"',
        [random(2, 3, 4), random(2, 1, 4), random(2, 2, 4)],
        1,
        lambda *x: [np.concatenate(x, 1)],
    ),
    "Concat axis -1": (
        'type: "Concat" concat_param { axis: -1 }',
        [random(2, 3, 4), random(2, 3, 1)],
        1,
        lambda *x: [np.concatenate(x, 2)],
    ),
    "Concat concat_dim 0": (
        'type: "Concat" concat_param { concat_dim: 0 }',
        [random(2, 3), random(1, 3)],
        1,
        lambda *x: [np.concatenate(x, 0)],
    ),
    "Concat of one": ('type: "Concat"', [random(2, 3)], 1, lambda x: [x]),
    "Slice": ('type: "Slice"', [random(2, 6, 2)], 3, lambda x: np.split(x, 3, 1)),
    "Slice points": (
        'type: "Slice" slice_param { axis: 2 slice_point: 1 slice_point: 4 }',
        [random(2, 1, 5)],
        3,
        lambda x: np.split(x, [1, 4], 2),
    ),
    "Slice slice_dim 0": (
        'type: "Slice" slice_param { slice_dim: 0 }',
        [random(4, 3)],
        2,
        lambda x: np.split(x, 2),
    ),
    "Slice into one": ('type: "Slice"', [random(2, 3)], 1, lambda x: [x]),
    "Split": ('type: "Split"', [random(2, 3)], 3, lambda x: [x, x, x]),
    "Split into one": ('type: "Split"', [random(2, 3)], 1, lambda x: [x]),
    "Flatten": ('type: "Flatten"', [random(2, 3, 4)], 1, lambda x: [x.reshape(2, 12)]),
    "Flatten the middle": (
        'type: "Flatten" flatten_param { axis: -3 end_axis: 2 }',
        [random(2, 3, 4, 2)],
        1,
        lambda x: [x.reshape(2, 12, 2)],
    ),
    "Reshape": (
        'type: "Reshape" reshape_param { shape { dim: 0 dim: -1 dim: 2 } }',
        [random(2, 3, 4)],
        1,
        lambda x: [x.reshape(2, 6, 2)],
    ),
    "Reshape appends": (
        'type: "Reshape" reshape_param { shape { dim: 1 dim: 1 } axis: -1 }',
        [random(2, 3)],
        1,
        lambda x: [x.reshape(2, 3, 1, 1)],
    ),
    "Reshape inserts": (
        'type: "Reshape" reshape_param { shape { dim: 1 } axis: 1 num_axes: 0 }',
        [random(2, 3)],
        1,
        lambda x: [x.reshape(2, 1, 3)],
    ),
    "Squeeze": ('type: "Squeeze"', [random(2, 1, 3, 1)], 1, lambda x: [x.reshape(2, 3)]),
    "Squeeze one": (
        'type: "Squeeze" squeeze_param { axis: -1 }',
        [random(2, 1, 3, 1)],
        1,
        lambda x: [x.reshape(2, 1, 3)],
    ),
    "Pad": (
        'type: "Pad" pad_param { paddings: [0, 1, 2, 0, 1, 1] constant_values: 0.5 }',
        [random(2, 3, 1)],
        1,
        lambda x: [np.pad(x, [(0, 1), (2, 0), (1, 1)], constant_values=0.5)],
    ),
    "Tile": (
        'type: "Tile" tile_param { tiles: 3 }',
        [random(2, 3, 2)],
        1,
        lambda x: [np.tile(x, (1, 3, 1))],
    ),
    "Tile axis 0": (
        'type: "Tile" tile_param { axis: 0 tiles: 2 }',
        [random(2, 3)],
        1,
        lambda x: [np.tile(x, (2, 1))],
    ),
    "Reduction": ('type: "Reduction"', [random(2, 3, 4)], 1, lambda x: [x.sum()]),
    "Reduction ASUM": (
        'type: "Reduction" reduction_param { operation: ASUM axis: 1 coeff: 2 }',
        [random(2, 3, 4)],
        1,
        lambda x: [2 * abs(x).sum((1, 2))],
    ),
    "Reduction SUMSQ": (
        'type: "Reduction" reduction_param { operation: SUMSQ axis: -1 }',
        [random(2, 3, 4)],
        1,
        lambda x: [(x * x).sum(2)],
    ),
    "Reduction MEAN": (
        'type: "Reduction" reduction_param { operation: MEAN axis: 1 coeff: 0.5 }',
        [random(2, 3, 4)],
        1,
        lambda x: [x.mean((1, 2)) / 2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    text, bottoms, tops, _ = CASES[case]
    check_gradient(text, *bottoms, tops=tops)


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case):
    text, bottoms, tops, function = CASES[case]
    answers = Single(text, *bottoms, tops=tops).forward()
    for answer, expected in zip(answers, function(*bottoms), strict=True):
        np.testing.assert_allclose(answer, expected)


@pytest.mark.parametrize("case", GOLDEN)
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("case", ["Flatten", "Reshape", "Concat of one", "Slice into one", "Split"])
def test_nothing_is_copied(case):
    text, bottoms, tops, *_ = CASES[case]
    single = Single(text, *bottoms, tops=tops)
    assert all(t.data_memory is single.bottom[0].data_memory for t in single.top)
    if case != "Split":
        assert single.top[0].diff_memory is single.bottom[0].diff_memory


def test_split_passes_over_tops_without_a_gradient():
    single = Single('type: "Split"', random(2, 3), tops=3)
    single.forward()
    for touched, expected in ((None, 0), (1, 1), (2, 2)):
        if touched:
            single.top[touched].diff.fill(1)
        single.layer.backward(single.top, [True], single.bottom)
        np.testing.assert_array_equal(single.bottom[0].diff, expected)


def test_large_arrays_are_copied_by_several_threads():
    x = random(3, 4, 150, 100)
    (a, b) = Single('type: "Slice" slice_param { slice_point: 1 }', x, tops=2).forward()
    np.testing.assert_array_equal(a, x[:, :1])
    (y,) = Single('type: "Concat"', a, b).forward()
    np.testing.assert_array_equal(y, x)


def test_silence_gives_zero():
    single = Single('type: "Silence"', random(2, 3), random(4, seed=1), tops=0)
    single.forward()
    (a, b), _ = single.backward([])
    np.testing.assert_array_equal(a, np.zeros((2, 3)))
    np.testing.assert_array_equal(b, np.zeros(4))


def test_input_takes_its_shapes_and_keeps_what_a_user_makes_of_them():
    single = Single('type: "Input" input_param { shape { dim: 2 dim: 3 } }', tops=2)
    assert [t.shape for t in single.top] == [(2, 3), (2, 3)]
    single.top[0].reshape((5, 3))
    single.layer.reshape([], single.top)
    assert single.top[0].shape == (5, 3)
    two = Single('type: "Input" input_param { shape { dim: 2 } shape { dim: 3 } }', tops=2)
    assert [t.shape for t in two.top] == [(2,), (3,)]


def test_parameter_is_its_top_and_adds_its_gradient():
    single = Single('type: "Parameter" parameter_param { shape { dim: 2 dim: 3 } }')
    single.params[0][...] = 7
    np.testing.assert_array_equal(single.forward()[0], 7)
    for _ in range(2):
        _, (gradient,) = single.backward([np.full((2, 3), 2.0)])
        np.testing.assert_array_equal(gradient, 2)


@pytest.mark.parametrize("name", ["blob_filler", "filler"])
def test_parameter_is_filled_where_its_fork_says_so(name):
    filler = name + ' { type: "constant" value: 3 }'
    text = f'type: "Parameter" parameter_param {{ shape {{ dim: 2 dim: 3 }} {filler} }}'
    np.testing.assert_array_equal(Single(text).forward()[0], np.full((2, 3), 3.0))


def test_empty_blobs_pass():
    assert Single('type: "Concat"', random(0, 3), random(0, 2)).forward()[0].shape == (0, 5)
    assert [y.shape for y in Single('type: "Slice"', random(0, 4), tops=2).forward()] == [
        (0, 2),
        (0, 2),
    ]


@pytest.mark.parametrize(
    ("text", "shapes", "tops", "message"),
    {
        "concat sizes": (
            'type: "Concat"',
            [(2, 3), (3, 3)],
            1,
            r"bottom 1 has shape \[3, 3\].*differ in axis 1 only",
        ),
        "concat axes": ('type: "Concat"', [(2, 3), (2, 3, 1)], 1, "differ in axis 1 only"),
        "concat both": (
            'type: "Concat" concat_param { axis: 1 concat_dim: 1 }',
            [(2, 3)],
            1,
            "give axis only",
        ),
        "slice parts": (
            'type: "Slice"',
            [(2, 5)],
            2,
            "axis 1 of size 5 cannot be cut into 2 equal parts",
        ),
        "slice points": (
            'type: "Slice" slice_param { slice_point: 4 slice_point: 2 }',
            [(2, 5)],
            3,
            r"slice_point \[4, 2\] must rise and lie within the 5 of axis 1",
        ),
        "slice beyond": (
            'type: "Slice" slice_param { slice_point: 5 }',
            [(2, 5)],
            2,
            r"slice_point \[5\] must rise",
        ),
        "slice count": (
            'type: "Slice" slice_param { slice_point: 1 }',
            [(2, 5)],
            3,
            "3 tops need 2 slice_point, not 1",
        ),
        "slice both": (
            'type: "Slice" slice_param { axis: 1 slice_dim: 1 }',
            [(2, 4)],
            2,
            "give axis only",
        ),
        "flatten": (
            'type: "Flatten" flatten_param { axis: 2 end_axis: 1 }',
            [(2, 3, 4)],
            1,
            "axis 2 comes after",
        ),
        "reshape count": (
            'type: "Reshape" reshape_param { shape { dim: 2 dim: 4 } }',
            [(2, 3)],
            1,
            r"dims 2 4 \(8\) make 8 elements of 6 of the bottom 2 3 \(6\); one dim may be -1",
        ),
        "reshape rest": (
            'type: "Reshape" reshape_param { shape { dim: 4 dim: -1 } }',
            [(2, 3)],
            1,
            r"6 elements of the bottom 2 3 \(6\) cannot be divided .* dims' 4 \(4\); write dims",
        ),
        "reshape copy": (
            'type: "Reshape" reshape_param { shape { dim: 0 dim: 0 dim: 0 } }',
            [(2, 3)],
            1,
            r"dim 2 is 0, which copies axis 2, but the bottom 2 3 \(6\) has 2 axes; write the size",
        ),
        "reshape two -1": (
            'type: "Reshape" reshape_param { shape { dim: -1 dim: -1 } }',
            [(2, 3)],
            1,
            "but for one -1",
        ),
        "reshape axis": (
            'type: "Reshape" reshape_param { axis: 1 num_axes: 2 shape { dim: 3 } }',
            [(2, 3)],
            1,
            "do not lie within",
        ),
        "input": (
            'type: "Input" input_param { shape { dim: 1 } shape { dim: 2 } }',
            [],
            3,
            "2 shapes for 3 tops",
        ),
        "squeeze": (
            'type: "Squeeze" squeeze_param { axis: 0 }',
            [(2, 3)],
            1,
            r"axes \[0\] of 2 3 \(6\) do not all have size 1",
        ),
        "pad": ('type: "Pad" pad_param { paddings: 1 }', [(2, 3)], 1, "two for each axis of"),
        "tile": ('type: "Tile"', [(2, 3)], 1, "tiles must be 1 or more, not 0"),
    }.values(),
)
def test_what_does_not_fit_is_refused(text, shapes, tops, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*s) for s in shapes), tops=tops)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (2, 7, 6), (3, 6)], ids=str)
def test_on_gpu_in_all_formats(shape):
    x, y, z = (seeded(i).integers(-20, 20, shape) / 4 for i in range(3))
    check_on_gpu('type: "Concat"', x, y[:, :3], z)
    check_on_gpu('type: "Concat"', x)
    check_on_gpu('type: "Slice" slice_param { slice_point: 1 slice_point: 5 }', x, tops=3)
    for n in (1, 2, 3):
        check_on_gpu('type: "Split"', x, tops=n)
    check_on_gpu('type: "Silence"', x, y, tops=0)
    group = 2 if shape[1] % 2 == 0 else shape[1]
    check_on_gpu(f'type: "ShuffleChannel" shuffle_channel_param {{ group: {group} }}', x)


@pytest.mark.parametrize(("shape", "group"), [((2, 6, 3, 2), 2), ((1, 6), 3), ((2, 4, 5), 1)])
def test_shuffled_channels(shape, group):
    text = f'type: "ShuffleChannel" shuffle_channel_param {{ group: {group} }}'
    x = random(*shape)
    (y,) = Single(text, x).forward()
    each = shape[1] // group
    for c in range(shape[1]):
        np.testing.assert_array_equal(y[:, c % each * group + c // each], x[:, c])
    check_gradient(text, x)


@pytest.mark.parametrize("group", [0, 4])
def test_channels_that_cannot_be_shuffled(group):
    text = f'type: "ShuffleChannel" shuffle_channel_param {{ group: {group} }}'
    with pytest.raises(ConfigError, match=rf"\[2, 6\] cannot be split into {group} groups"):
        Single(text, random(2, 6))


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 1), (2,), (), (0, 1, 2, 3)], ids=str)
def test_permuted_axes(order):
    text = 'type: "Permute" permute_param {' + "".join(f" order: {axis}" for axis in order) + " }"
    x = random(2, 3, 4, 5)
    (y,) = Single(text, x).forward()
    axes = [*order, *(axis for axis in range(4) if axis not in order)]
    np.testing.assert_array_equal(y, x.transpose(axes))
    check_gradient(text, x)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (2,), ()], ids=str)
def test_permute_on_gpu(order):
    text = 'type: "Permute" permute_param {' + "".join(f" order: {axis}" for axis in order) + " }"
    check_plain_on_gpu(text, random(2, 3, 4, 5), propagate_down=[True])


@pytest.mark.parametrize("order", ["order: 1 order: 1", "order: 4"])
def test_axes_that_cannot_be_permuted(order):
    with pytest.raises(ConfigError, match=r"must name axes of the 4 of \[2, 3, 4, 5\]"):
        Single(f'type: "Permute" permute_param {{ {order} }}', random(2, 3, 4, 5))


@pytest.mark.parametrize("order", [(3, 2, 0, 1), (2, 3, 1, 0), (0, 1, 2, 3)], ids=str)
def test_transposed_axes(order):
    text = 'type: "Transpose" transpose_param {' + "".join(f" dim: {a}" for a in order) + " }"
    x = random(2, 3, 4, 5)
    (y,) = Single(text, x).forward()
    np.testing.assert_array_equal(y, x.transpose(order))
    check_gradient(text, x)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["dim: 3 dim: 2 dim: 0 dim: 1", "dim: 2 dim: 3 dim: 1 dim: 0"])
def test_transpose_on_gpu(text):
    text = f'type: "Transpose" transpose_param {{ {text} }}'
    check_plain_on_gpu(text, random(2, 3, 4, 5), propagate_down=[True])


@pytest.mark.parametrize("dims", ["", "dim: 0 dim: 1 dim: 2", "dim: 0 dim: 1 dim: 1 dim: 2"])
def test_axes_that_cannot_be_transposed(dims):
    with pytest.raises(ConfigError, match=r"must name each axis of \[2, 3, 4, 5\] once"):
        Single(f'type: "Transpose" transpose_param {{ {dims} }}', random(2, 3, 4, 5))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reversed_axis(axis):
    text, x = f'type: "Reverse" reverse_param {{ axis: {axis} }}', random(4, 3, 5)
    (y,) = Single(text, x).forward()
    np.testing.assert_array_equal(y, np.stack(list(reversed(np.moveaxis(x, axis, 0))), axis))
    check_gradient(text, x)


@pytest.mark.gpu
def test_pad_on_gpu():
    text = 'type: "Pad" pad_param { paddings: [0, 1, 2, 0, 1, 1] constant_values: 0.5 }'
    check_plain_on_gpu(text, random(2, 3, 4), propagate_down=[True])


@pytest.mark.gpu
def test_reverse_on_gpu():
    check_plain_on_gpu('type: "Reverse"', random(4, 3, 5), propagate_down=[True])


def test_an_axis_that_is_not_there():
    with pytest.raises(ConfigError, match=r"\[4, 3\] has no axis 2"):
        Single('type: "Reverse" reverse_param { axis: 2 }', random(4, 3))


FLIPS = {
    "width": "",
    "height": "flip_param { flip_width: false flip_height: true }",
    "both": "flip_param { flip_height: true }",
    "neither": "flip_param { flip_width: false }",
}


@pytest.mark.parametrize("which", FLIPS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4), (2, 3)], ids=str)
def test_flipped_axes(which, shape):
    text, x = f'type: "Flip" {FLIPS[which]}', random(*shape)
    (y,) = Single(text, x).forward()
    n, c, h, w = (*shape, 1, 1)[:4]
    image, want = x.reshape(n, c, h, w), np.zeros((n, c, h, w), x.dtype)
    for row in range(h):
        for column in range(w):
            from_row = h - 1 - row if which in ("height", "both") else row
            from_column = w - 1 - column if which in ("width", "both") else column
            want[:, :, row, column] = image[:, :, from_row, from_column]
    np.testing.assert_array_equal(y, want.reshape(shape))
    check_gradient(text, x)


@pytest.mark.gpu
@pytest.mark.parametrize("which", FLIPS)
def test_flip_on_gpu(which):
    check_plain_on_gpu(f'type: "Flip" {FLIPS[which]}', random(2, 3, 4, 5), propagate_down=[True])


def test_more_axes_than_an_image_cannot_be_flipped():
    with pytest.raises(ConfigError, match=r"at most 4 axes, not \[1, 2, 3, 4, 5\]"):
        Single('type: "Flip"', random(1, 2, 3, 4, 5))


def test_concat_of_different_numbers_of_axes():
    with pytest.raises(ConfigError, match=r"bottom 1 has shape \[\], bottom 0 has \[3\]"):
        Single('type: "Concat" concat_param { axis: 0 }', np.zeros(3), np.zeros(()))


REDUCED = {
    "SUM": ("reduction_param { axis: 1 }", (2, 5, 3)),
    "MEAN": ("level: 1 reduction_param { operation: MEAN axis: 1 }", (2, 5, 3)),
    "TOPK": ("reduction_param { operation: TOPK k: 2 axis: 1 }", (2, 5, 3)),
    "of the first axis": ("reduction_param { operation: TOPK k: 3 }", (5, 4)),
    "levels": ("level: 1 level: 2 reduction_param { operation: MEAN axis: 1 }", (2, 5, 3)),
    "pos": ("pos: true reduction_param { operation: MEAN axis: 1 }", (2, 3, 3, 2)),
    "pos TOPK": ("pos: true reduction_param { operation: TOPK k: 2 axis: 1 }", (2, 3, 3, 2)),
    "a level": ("level: 2 reduction_param { axis: -1 }", (2, 4)),
}


def reduced(x, case):
    """The numbers of each level, or of the diagonal, one after the other."""
    axis = {"of the first axis": 0}.get(case, 1)
    if "pos" in case:
        x = np.stack([x[:, i, i] for i in range(x.shape[1])], axis=1)
    rows = np.moveaxis(x, axis, 0)
    if case == "levels":
        return np.moveaxis(np.array([rows[0], sum(rows[1:]) / 4]), 0, axis)
    if case == "a level":
        return sum(rows)[:, None]
    if "TOPK" in case or case == "of the first axis":
        rows = np.sort(rows, axis=0)[-3 if case == "of the first axis" else -2 :]
    return sum(rows) / (1 if case == "SUM" else len(rows))


@pytest.mark.parametrize("case", REDUCED)
def test_batch_reduction_against_a_loop(case):
    settings, shape = REDUCED[case]
    text, x = f'type: "BatchReduction" batch_reduction_param {{ {settings} }}', random(*shape)
    (y,) = Single(text, x).forward()
    np.testing.assert_allclose(y, reduced(x, case), rtol=1e-12)
    check_gradient(text, x)


def test_the_first_of_equal_numbers_is_among_the_largest():
    text = (
        'type: "BatchReduction" batch_reduction_param { reduction_param { operation: TOPK k: 2 } }'
    )
    single = Single(text, np.array([1.0, 3, 1, 1]))
    assert single.forward()[0] == 2
    np.testing.assert_array_equal(single.backward([4])[0][0], [2, 2, 0, 0])


def test_the_mean_of_no_numbers_is_zero():
    text = 'type: "BatchReduction" batch_reduction_param { reduction_param { operation: MEAN } }'
    single = Single(text, np.zeros((0, 3)))
    (y,) = single.forward()
    np.testing.assert_array_equal(y, np.zeros(3))
    assert single.backward([np.ones(3)])[0][0].shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REDUCED)
def test_batch_reduction_on_gpu(case):
    settings, shape = REDUCED[case]
    text = f'type: "BatchReduction" batch_reduction_param {{ {settings} }}'
    check_plain_on_gpu(text, random(*shape), propagate_down=[True])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("reduction_param { operation: ASUM }", "operation is SUM, MEAN or TOPK"),
        ("level: 0", "level must be 1 or more"),
        ("level: 1 level: 2 pos: true", "pos and TOPK take one level"),
        ("level: 1 level: 3", "levels .1, 3. need 10 places, not 4"),
        ("pos: true", "two axes of one size, not .4, 3."),
        ("reduction_param { operation: TOPK k: 5 }", "k must be 1 to 4, not 5"),
    ],
)
def test_batch_reductions_that_do_not_fit(settings, message):
    text = f'type: "BatchReduction" batch_reduction_param {{ {settings} }}'
    with pytest.raises(ConfigError, match=message):
        Single(text, random(4, 3))


def test_the_largest_numbers_are_of_batch_reduction_alone():
    with pytest.raises(ConfigError, match="TOPK is for BatchReduction"):
        Single('type: "Reduction" reduction_param { operation: TOPK }', random(4, 3))

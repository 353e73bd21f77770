import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import Single, check_golden, check_gradient, random
from .on_gpu import check_plain_on_gpu

CASES = {
    "basic": ((3, 2, 2, 2), "num_output: 4"),
    "no bias": ((3, 5), "num_output: 4 bias_term: false"),
    "transposed": ((3, 5), "num_output: 4 transpose: true"),
    "axis 2": ((2, 3, 2, 2), "num_output: 3 axis: 2"),
    "axis -1": ((2, 3, 4), "num_output: 3 axis: -1"),
    "axis 0": ((2, 3), "num_output: 3 axis: 0"),
}


def text(param):
    return (
        f'name: "ip" type: "InnerProduct" inner_product_param {{ '
        f'{param} weight_filler {{ type: "gaussian" }} }}'
    )


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    shape, param = CASES[case]
    check_gradient(text(param), random(*shape))


@pytest.mark.parametrize("turned", [False, True])
def test_weights_that_are_normalized_in_forward(turned):
    x = random(3, 5)
    single = Single(text(f"num_output: 4 normalize: true transpose: {str(turned).lower()}"), x)
    w = single.params[0].copy()
    (y,) = single.forward()
    w /= np.linalg.norm(w, axis=0 if turned else 1, keepdims=True)
    np.testing.assert_allclose(single.params[0], w)
    np.testing.assert_allclose(y, x @ (w if turned else w.T))


@pytest.mark.parametrize("case", ["ip_basic", "ip_axis2", "ip_transpose"])
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("transpose", ["false", "true"])
def test_formula(transpose):
    single = Single(text(f"num_output: 4 axis: 2 transpose: {transpose}"), random(2, 3, 4, 5))
    w, b = single.params
    b[...] = random(4)
    w = w.T if transpose == "true" else w
    (y,) = single.forward()
    np.testing.assert_allclose(y, single.inputs[0].reshape(2, 3, 20) @ w.T + b)


def test_only_what_is_wanted_is_computed():
    single = Single(text("num_output: 2"), random(2, 5))
    single.forward()
    single.layer.param_propagate_down = [True, False]
    (dx,), (dw, db) = single.backward([random(2, 2)], [False])
    assert dx is None
    assert dw.all()
    assert not db.any()


def test_num_output_is_needed():
    with pytest.raises(ConfigError, match="num_output must be 1 or more"):
        Single(text(""), random(2, 3))


def test_the_inner_size_must_stay():
    single = Single(text("num_output: 2"), random(2, 3, 4, 4))
    single.bottom[0].reshape((5, 3, 4, 4))
    single.layer.reshape(single.bottom, single.top)
    assert single.top[0].shape == (5, 2)
    single.bottom[0].reshape((2, 3, 4, 5))
    with pytest.raises(
        ConfigError,
        match=r"Input size incompatible with inner product parameters. .* 48 inputs, not 60",
    ):
        single.layer.reshape(single.bottom, single.top)


TOLERANCE = {"float32": 2e-3, "float16": 3e-3, "uint16": 2e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transpose", ["false", "true"])
@pytest.mark.parametrize(
    ("kind", "top_kind"),
    [
        ("float32",) * 2,
        ("float16",) * 2,
        ("uint16",) * 2,
        ("float16", "float32"),
        ("uint16", "float32"),
    ],
)
def test_on_a_gpu_in_any_type(kind, top_kind, transpose, bias):
    device = CudaDevice(seed=1)
    param = f"num_output: 6 transpose: {transpose} bias_term: {str(bias).lower()}"
    layer = create_layer(text_format.Parse(text(param), LayerParameter()), TRAIN, device)
    x, top_diff = random(5, 4, 2), random(5, 6, seed=1)
    with device.scope():
        bottom, top = Blob((5, 4, 2), device=device), Blob(device=device)
        layer.setup([bottom], [top])
        for blob, stored in ((bottom, kind), (top, top_kind)):
            blob.set_layout(Layout(np.dtype(stored), False))
        layer.reshape([bottom], [top])
        layer.param_propagate_down = [True] * (1 + bias)
        for blob in layer.blobs:
            blob.host_data[...] = random(*blob.shape)
            blob.host_diff.fill(1)
        bottom.host_data[...] = x
        layer.forward([bottom], [top])
        top.host_diff[...] = top_diff
        layer.backward([top], [True], [bottom])
    w, x = layer.blobs[0].host_data, x.reshape(5, 8)
    w, dw = (
        (w.T, layer.blobs[0].host_diff.T) if transpose == "true" else (w, layer.blobs[0].host_diff)
    )
    pairs = [
        (top.host_data, x @ w.T + (layer.blobs[1].host_data if bias else 0)),
        (bottom.host_diff.reshape(5, 8), top_diff @ w),
        (dw, 1 + top_diff.T @ x),
    ]
    if bias:
        pairs.append((layer.blobs[1].host_diff, 1 + top_diff.sum(0)))
    for have, want in pairs:
        np.testing.assert_allclose(have, want, atol=TOLERANCE[kind] * np.abs(want).max(), rtol=0)


TYPES = {"SINGLE": 1, "DOUBLE": 2, "TRIPLE": 3, "QUADRUPLE": 4}
LABELS = np.array([2.0, 0, 1, 2, 0])
SCHEDULE = "base: 10 gamma: 0.5 power: 2 lambda_min: 0.3 iteration: 4"


def margin(kind, more=SCHEDULE, type_="MarginInnerProduct"):
    return (
        f'type: "{type_}" margin_inner_product_param {{ num_output: 3 type: {kind} '
        f'{more} weight_filler {{ type: "gaussian" }} }}'
    )


def folded(angle, m):
    """(-1)^k cos(m a) - 2k, where k counts the halves of periods of cos(m a) before a."""
    k = min(int(angle * m / np.pi), m - 1)
    return (-1) ** k * np.cos(m * angle) - 2 * k


@pytest.mark.parametrize("kind", TYPES)
def test_margin_inner_product_against_the_paper(kind):
    x = random(5, 4)
    single = Single(margin(kind), x, LABELS, tops=2)
    lengths = np.linalg.norm(single.params[0], axis=1)
    single.params[0] *= 3 / lengths[:, None]
    y, weight = single.forward()
    w = single.params[0]
    np.testing.assert_allclose(np.linalg.norm(w, axis=1), 1)
    np.testing.assert_allclose(weight, [max(10 * (1 + 0.5 * 5) ** -2.0, 0.3)], rtol=1e-6)
    want = x @ w.T
    for i, k in enumerate(LABELS.astype(int)):
        length = np.linalg.norm(x[i])
        angle = np.arccos(want[i, k] / length)
        want[i, k] = (weight[0] * want[i, k] + length * folded(angle, TYPES[kind])) / (
            1 + weight[0]
        )
    np.testing.assert_allclose(y, want, rtol=1e-6)
    assert single.forward()[1] < weight  # it counts its passes


@pytest.mark.parametrize("kind", TYPES)
def test_gradient_of_margins_is_that_of_sphereface(kind):
    """The part of the margin has the length 1; the weight's gradient knows no margin."""
    x, m = random(5, 4), TYPES[kind]
    single = Single(margin(kind), x, LABELS)
    single.forward()
    weight = np.maximum(10 * (1 + 0.5 * single.layer.passes.data[0]) ** -2.0, np.float32(0.3))
    dy, w = random(5, 3, seed=3), single.params[0].copy()
    (dx, _), (dw,) = single.backward([dy], [True, False])
    np.testing.assert_allclose(dw, dy.T @ x, rtol=1e-6)
    want = dy @ w
    for i, k in enumerate(LABELS.astype(int) if m > 1 else ()):

        def score(v, k=k):
            length = np.linalg.norm(v)
            return length * folded(np.arccos(v @ w[k] / length), m)

        unit = np.eye(4) * 1e-6
        slope = np.array([(score(x[i] + u) - score(x[i] - u)) / 2e-6 for u in unit])
        unscaled = np.array([w[k], x[i]]).T
        parts = np.linalg.lstsq(unscaled, slope, rcond=None)[0]  # of w and of x
        slope /= np.linalg.norm(parts)
        want[i] += dy[i, k] * ((slope + weight * w[k]) / (1 + weight) - w[k])
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=1e-6)


def test_margin_inner_product_gradient():
    single = margin("SINGLE", "").replace("SINGLE", "SINGLE axis: 1")
    check_gradient(single, random(5, 2, 2), LABELS, propagate_down=[True, False], params=[])


def test_a_resumed_run_goes_on_with_its_lambda():
    both = (margin("DOUBLE", type_=name) for name in ("MarginInnerProduct", "AngularMargin"))
    first, resumed = (Single(text, random(5, 4), LABELS, tops=2) for text in both)
    first.forward()
    resumed.layer.set_state(first.layer.state())
    np.testing.assert_array_equal(resumed.forward()[1], first.forward()[1])


def large_margin(kind, more=SCHEDULE):
    text = margin(kind, more, "LargeMarginInnerProduct")
    return text.replace("margin_inner", "largemargin_inner")


@pytest.mark.parametrize("kind", TYPES)
def test_large_margin_inner_product_against_the_paper(kind):
    x = random(5, 4)
    single = Single(large_margin(kind), x, LABELS, tops=2)
    single.params[0][...] = random(3, 4, seed=2)
    y, weight = single.forward()
    np.testing.assert_allclose(weight, [max(10 * (1 + 0.5 * 5) ** -2.0, 0.3)], rtol=1e-6)
    w = random(3, 4, seed=2)
    want = x @ w.T
    for i, k in enumerate(LABELS.astype(int)):
        length = np.linalg.norm(x[i]) * np.linalg.norm(w[k])
        with_margin = length * folded(np.arccos(want[i, k] / length), TYPES[kind])
        want[i, k] = (weight[0] * want[i, k] + with_margin) / (1 + weight[0])
    np.testing.assert_allclose(y, want, rtol=1e-6)
    assert single.forward()[1] < weight  # it counts its passes


@pytest.mark.parametrize("kind", TYPES)
def test_large_margin_inner_product_gradient(kind):
    """LargeMarginInnerProduct: lambda is the same in each pass, so that only x and w move."""
    check_gradient(
        large_margin(kind, "base: 0.7"), random(5, 4), LABELS, propagate_down=[True, False]
    )


def test_large_margin_of_nothing():
    x = random(5, 4)
    x[1] = 0
    single = Single(large_margin("DOUBLE"), x, LABELS)
    (y,) = single.forward()
    (dx, _), (dw,) = single.backward([random(5, 3)], [True, False])
    assert (y[1] == 0).all()
    assert all(np.isfinite(array).all() for array in (y, dx, dw))


DISTANCES = {
    "squares": "",
    "sizes": 'distance_type: "L1"',
    "normalized": "normalize: true",
}


def inner_distance(case, more="num_output: 3"):
    return (
        f'type: "InnerDistance" inner_distance_param {{ {more} {DISTANCES[case]} '
        'weight_filler { type: "gaussian" } }'
    )


def apart(x, w, case):
    gaps = x[:, None] - w
    return (np.abs(gaps) if case == "sizes" else gaps**2).sum(axis=2)


@pytest.mark.parametrize("case", DISTANCES)
def test_inner_distance_against_numpy(case):
    x = random(5, 2, 2)
    single = Single(inner_distance(case), x)
    w = single.params[0].copy()
    if case == "normalized":
        w /= np.sqrt((w**2).sum(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(single.forward()[0], apart(x.reshape(5, 4), w, case))
    np.testing.assert_array_equal(single.params[0], w)
    w = random(3, 4, seed=2)
    (y,) = Single(inner_distance(case, ""), x, w).forward()  # a bottom is not normalized
    np.testing.assert_allclose(y, apart(x.reshape(5, 4), w, case))


@pytest.mark.parametrize("case", ["squares", "sizes"])
def test_inner_distance_gradient(case):
    """InnerDistance."""
    check_gradient(inner_distance(case), random(5, 4))
    check_gradient(inner_distance(case, "axis: 2"), random(2, 2, 4), random(3, 4, seed=2))


@pytest.mark.parametrize("case", ["squares", "sizes"])
@pytest.mark.parametrize("of_bottom", [False, True])
def test_centers_learn_from_their_own_class(case, of_bottom):
    x, w = random(5, 4), random(3, 4, seed=2)
    given = [x, w, LABELS] if of_bottom else [x, LABELS]
    single = Single(inner_distance(case, "num_output: 3 update_center_only: true"), *given)
    if not of_bottom:
        single.params[0][...] = w
    single.forward()
    dy = random(5, 3, seed=4)
    flags = [True] * (len(given) - 1) + [False]
    (dx, *rest), params = single.backward([dy], flags)
    slope = np.sign if case == "sizes" else lambda gap: 2 * gap
    want = np.zeros_like(w)
    for m, n in enumerate(LABELS.astype(int)):
        want[n] += dy[m, n] * slope(w[n] - x[m])
    np.testing.assert_allclose(rest[0] if of_bottom else params[0], want)
    whole = Single(inner_distance(case, ""), x, w)
    whole.forward()
    np.testing.assert_allclose(dx, whole.backward([dy])[0][0])


@pytest.mark.parametrize(
    ("more", "shapes", "message"),
    [
        ("num_output: 3 distance_type: 'cosine'", [(5, 4)], 'L1 or L2, not "cosine"'),
        ("", [(5, 4)], "num_output must be 1 or more"),
        ("", [(5, 4), (3, 5)], "rows of 5 numbers have no distance from items of 4"),
        ("", [(5, 4), (3, 4), (5,)], "goes with update_center_only"),
        ("num_output: 3 update_center_only: true", [(5, 4)], "needs labels as the last bottom"),
        ("num_output: 3 update_center_only: true", [(5, 4), (4,)], "4 labels do not fit 5 rows"),
    ],
)
def test_no_distances(more, shapes, message):
    text = inner_distance("squares", more)
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*shape) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", DISTANCES)
def test_inner_distance_on_gpu(case):
    """InnerDistance."""
    x, w, own = random(5, 4), random(3, 4, seed=2), "num_output: 3 update_center_only: true"
    check_plain_on_gpu(inner_distance(case), x, propagate_down=[True])
    check_plain_on_gpu(inner_distance(case, ""), x, w, propagate_down=[True, True])
    check_plain_on_gpu(inner_distance(case, own), x, LABELS, propagate_down=[True, False])


MATMUL = {
    "matrices": ("", [(4, 5), (5, 3)], "mk,kn->mn"),
    "many": ("", [(2, 3, 4, 5), (2, 3, 5, 2)], "abmk,abkn->abmn"),
    "transposed": (
        "transpose_a: true transpose_b: true",
        [(2, 5, 4), (2, 3, 5)],
        "akm,ank->amn",
    ),
    "one for all": ("", [(2, 3, 4, 5), (5, 3)], "abmk,kn->abmn"),
    "parameter": ("blob_shape: [5, 3]", [(2, 4, 5)], "amk,kn->amn"),
    "sizes": ("dim_1: 4 dim_2: 5 dim_3: 3", [(4, 5, 1, 1), (3, 5)], "mkij,nk->mn"),
}


def matmul(case):
    return f'type: "MatMul" matmul_param {{ {MATMUL[case][0]} }}'


@pytest.mark.parametrize("case", MATMUL)
def test_matmul_against_numpy(case):
    _, shapes, how = MATMUL[case]
    arrays = [random(*shape, seed=k) for k, shape in enumerate(shapes)]
    single = Single(matmul(case), *arrays)
    for param in single.params:
        param[...] = random(*param.shape, seed=5)
    (y,) = single.forward()
    np.testing.assert_allclose(y, np.einsum(how, *arrays, *single.params), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", MATMUL)
def test_matmul_gradient(case):
    arrays = [random(*shape, seed=k) for k, shape in enumerate(MATMUL[case][1])]
    check_gradient(matmul(case), *arrays)


@pytest.mark.parametrize(
    ("layer", "shapes", "message"),
    [
        (matmul("matrices"), [(4, 5), (4, 3)], r"shape \[4, 5\] and \[4, 3\] do not fit"),
        (matmul("matrices"), [(2, 4, 5), (3, 5, 3)], "do not fit"),
        (matmul("matrices"), [(4, 5), (2, 5, 3)], "do not fit"),
        (matmul("sizes"), [(4, 4), (3, 5)], "do not fit"),
        (matmul("matrices"), [(4, 5)], "needs a blob_shape"),
        (margin("DOUBLE"), [(5, 4), (4,)], "4 labels do not fit 5 rows"),
        ('type: "MarginInnerProduct"', [(5, 4), (5,)], "num_output must be 1 or more"),
    ],
)
def test_what_does_not_fit_a_product_is_refused(layer, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(layer, *(random(*shape) for shape in shapes))


def test_a_label_of_no_class_is_named():
    with pytest.raises(DataError, match="label 3 is not one of the 3 classes 0 to 2"):
        Single(margin("DOUBLE"), random(2, 4), np.array([1.0, 3])).forward()


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", TYPES)
def test_margin_inner_product_on_gpu(kind):
    """With a lambda that does not depend on the pass: a capture is one, too."""
    for text in (margin(kind, "base: 2"), large_margin(kind, "base: 2")):
        check_plain_on_gpu(text, random(5, 4), LABELS, propagate_down=[True, False])


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", MATMUL)
def test_matmul_on_gpu(case):
    arrays = [random(*shape, seed=k) for k, shape in enumerate(MATMUL[case][1])]
    check_plain_on_gpu(matmul(case), *arrays, propagate_down=[True] * len(arrays))


def test_nothing_to_multiply():
    """Batches without items: of a margin's, whose labels are looked at, and of distances."""
    margin = (
        'type: "LargeMarginInnerProduct" largemargin_inner_product_param { num_output: 2 '
        'type: DOUBLE base: 1 weight_filler { type: "xavier" } }'
    )
    y, _ = Single(margin, np.zeros((0, 3)), np.zeros(0), tops=2).forward()
    assert y.shape == (0, 2)
    (y,) = Single('type: "InnerDistance"', np.zeros((0, 3)), np.zeros((0, 3))).forward()
    assert y.shape == (0, 0)
    with pytest.raises(ConfigError, match="have no distance from items of 1"):
        Single('type: "InnerDistance"', np.zeros((2, 1)), np.zeros(()))


def test_outer_products_against_numpy():
    a, b = random(2, 3), random(2, 4, 1, 1, seed=1)
    (y,) = Single('type: "OuterProduct"', a, b).forward()
    np.testing.assert_array_equal(y[:, 0], np.einsum("na,nb->nab", a, b[:, :, 0, 0]))
    assert y.shape == (2, 1, 3, 4)
    check_gradient('type: "OuterProduct"', a, b)
    check_gradient('type: "OuterProduct"', a, b, propagate_down=[False, True])


def test_outer_products_of_nothing():
    single = Single('type: "OuterProduct"', np.zeros((0, 3)), np.zeros((0, 4)))
    (y,) = single.forward()
    assert y.shape == (0, 1, 3, 4)
    (da, db), _ = single.backward([y])
    assert (da.shape, db.shape) == ((0, 3), (0, 4))


@pytest.mark.gpu
def test_outer_products_on_gpu():
    arrays = random(3, 5), random(3, 4, 1, 1, seed=1)
    check_plain_on_gpu('type: "OuterProduct"', *arrays, propagate_down=[True, True])


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((2, 3), (2,)), ((2, 3, 2), (2, 4))])
def test_outer_products_that_do_not_fit(shapes):
    with pytest.raises(ConfigError, match=r"needs \(N, A\) and \(N, B\)"):
        Single('type: "OuterProduct"', *(random(*shape) for shape in shapes))

"""Losses of forks on embeddings, and the focal loss, against loops and numerical gradients."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

LABELS = np.array([2.0, 0, 2, 1])
CENTERS = (
    'type: "CenterLoss" center_loss_param { num_output: 3 center_filler { type: "gaussian" } }'
)
FOCAL = 'type: "FocalLoss" focal_loss_param { gamma: 1.5 } loss_param { ignore_label: 1 }'
LIFTED = 'type: "LiftedStructSimilaritySoftmaxLoss"'
PAIRS = np.array([0.0, 1, 0, 2, 1, 0])
# name: prototxt, bottoms, propagate_down
CASES = {
    "L1Loss": ('type: "L1Loss" loss_weight: 2', [random(3, 4), random(3, 4, seed=1)], [True, True]),
    "TripletLoss": (
        'type: "TripletLoss" triplet_loss_param { margin: 2 }',
        [random(4, 3, 2, seed=k) for k in range(3)],
        [True, True, True],
    ),
    "LiftedStructSimilaritySoftmaxLoss": (LIFTED, [random(6, 4), PAIRS], [True, False]),
    "lifted structure of a margin": (
        LIFTED + " lifted_struct_sim_softmax_loss_param { margin: 3 } loss_weight: 0.5",
        [random(6, 2, 2) * 3, PAIRS],
        [True, False],
    ),
    "FocalLoss": (FOCAL, [random(4, 3), LABELS], [True, False]),
    "FocalLoss of pixels": (
        'type: "FocalLoss" focal_loss_param { type: ONEADDP } loss_weight: 0.5',
        [random(2, 3, 2), LABELS.reshape(2, 2)],
        [True, False],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    text, bottoms, propagate_down = CASES[case]
    check_gradient(text, *bottoms, propagate_down=propagate_down)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, "CenterLoss"])
def test_on_gpu(case):
    text, bottoms, propagate_down = CASES.get(
        case, (CENTERS + " loss_weight: 1", [random(4, 5), LABELS], [True, False])
    )
    check_plain_on_gpu(text, *bottoms, propagate_down=propagate_down)


def test_l1_loss_against_a_loop():
    a, b = random(3, 2, 2), random(3, 2, 2, seed=1)
    (loss,) = Single('type: "L1Loss"', a, b).forward()
    assert loss == pytest.approx(sum(abs(a[i] - b[i]) for i in np.ndindex(a.shape)) / 3)


def test_triplet_loss_against_a_loop():
    a, p, n = (random(4, 3, seed=k) for k in range(3))
    total = 0.0
    for i in range(4):
        near, far = sum((a[i] - p[i]) ** 2), sum((a[i] - n[i]) ** 2)
        total += max(0, 1 + near - far)
    (loss,) = Single('type: "TripletLoss"', a, p, n).forward()
    assert loss == pytest.approx(total / 8)


@pytest.mark.parametrize("margin", [1, 4])
def test_lifted_structure_against_a_loop(margin):
    x, total, count = random(6, 4), 0.0, 0
    d = [[np.sqrt(((a - b) ** 2).sum()) for b in x] for a in x]
    for i in range(6):
        for j in range(i + 1, 6):
            if PAIRS[i] == PAIRS[j]:
                others = [k for k in range(6) if PAIRS[k] != PAIRS[i]]
                terms = [np.exp(margin - d[place][k]) for place in (i, j) for k in others]
                total += max(0, d[i][j] + np.log(sum(terms))) ** 2
                count += 1
    text = f"{LIFTED} lifted_struct_sim_softmax_loss_param {{ margin: {margin} }}"
    (loss,) = Single(text, x, PAIRS).forward()
    assert count == 4
    assert loss == pytest.approx(total / 8)


@pytest.mark.parametrize("labels", [np.zeros(3), np.arange(3.0)], ids=["one label", "no pair"])
def test_lifted_structure_needs_pairs_and_others(labels):
    single = Single(LIFTED, random(3, 4), labels, dtype=np.float32)
    (loss,) = single.forward()
    (dx, _), _ = single.backward([np.float32(1)], [True, False])
    assert loss == 0
    np.testing.assert_array_equal(dx, 0)


def test_lifted_structure_of_equal_items_is_finite():
    x = random(4, 3)
    x[1] = x[0]
    single = Single(LIFTED, x, np.array([0.0, 0, 1, 2]), dtype=np.float32)
    (loss,) = single.forward()
    (dx, _), _ = single.backward([np.float32(1)], [True, False])
    assert np.isfinite(loss)
    assert np.isfinite(dx).all()


MMD = 'type: "MMDLoss" mmd_param { kernel_num: 3 kernel_mul: 4 fix_gamma: true }'


def pairs_of(single, n, m):
    """The pairs that the layer drew, (places in source and target, sign), checked to be pairs."""
    (s, other, _), (t, last, _), *_ = single.layer.pairs
    assert len(s) == max(n, m)
    assert (s != other).all()
    assert (t != last).all()
    assert max(s.max(), other.max()) < n <= min(t.min(), last.min())
    return single.layer.pairs


@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 6)])
def test_mmd_loss_against_a_loop(n, m):
    source, target = random(n, 2, 3), random(m, 6, seed=1) + 0.5
    single = Single(MMD, source, target)
    (loss,) = single.forward()
    both = np.concatenate([source.reshape(n, 6), target])
    squares = [((a - b) ** 2).sum() for a in both for b in both]
    gamma, total = (n + m) * (n + m - 1) / sum(squares), 0.0
    for places, others, sign in pairs_of(single, n, m):
        for a, b in zip(places, others, strict=True):
            square = ((both[a] - both[b]) ** 2).sum()
            total += sign * sum(np.exp(-gamma * 4.0 ** (i - 1) * square) for i in range(3))
    assert loss == pytest.approx(total)


def test_mmd_loss_has_the_gradient_of_the_mean():
    """Of a fixed gamma, the loss over the number of draws."""
    single = Single(MMD + " loss_weight: 2", random(3, 4), random(5, 4, seed=1))
    single.forward()
    diffs, _ = single.backward([np.array(2.0)])
    for array, diff in zip(single.inputs, diffs, strict=True):
        for index in np.ndindex(array.shape):
            value, ends = array[index], []
            for step in (1e-5, -1e-5):
                array[index] = value + step
                ends.append(float(single.forward()[0]))
            array[index] = value
            numeric = 2 * (ends[0] - ends[1]) / 2e-5 / 5
            assert diff[index] == pytest.approx(numeric, abs=1e-6)
    assert single.layer.state()["gamma"] == single.layer.gamma
    again = Single(MMD, *single.inputs)
    again.layer.set_state({"gamma": 0.25})
    again.forward()
    assert again.layer.gamma == 0.25


def test_mmd_loss_of_one_item_is_0():
    single = Single(MMD.replace("fix_gamma: true", ""), random(1, 4), random(3, 4))
    (loss,) = single.forward()
    diffs, _ = single.backward([np.array(1.0)])
    assert loss == 0
    assert not any(diff.any() for diff in diffs)
    assert single.layer.state() == {}


def test_mmd_loss_has_no_gradient_before_its_first_forward():
    diffs, _ = Single(MMD, random(3, 4), random(5, 4)).backward([np.array(1.0)])
    assert not any(diff.any() for diff in diffs)


@pytest.mark.parametrize("weight", [1, 0.25])
def test_center_loss_against_a_loop(weight):
    """The centres' gradient does not depend on the loss weight."""
    x = random(4, 5)
    single = Single(f"{CENTERS} loss_weight: {weight}", x, LABELS)
    (loss,) = single.forward()
    (dx, _), (dc,) = single.backward([np.array(float(weight))], [True, False])
    centers = single.params[0]
    off = np.array([x[i] - centers[int(LABELS[i])] for i in range(4)])
    assert loss == pytest.approx((off**2).sum() / 8)
    np.testing.assert_allclose(dx, weight * off / 4)
    for k in range(3):
        mine = [i for i in range(4) if LABELS[i] == k]
        np.testing.assert_allclose(dc[k], sum(-off[i] for i in mine) / (1 + len(mine)))


def test_center_loss_has_weight_0_unless_told():
    assert Single(CENTERS, random(4, 5), LABELS).weights == [0]
    assert Single(CENTERS + " loss_weight: 0.5", random(4, 5), LABELS).weights == [0.5]


@pytest.mark.parametrize("kind", ["ORIGIN", "LINEAR", "ONEADDP"])
def test_focal_loss_against_a_loop(kind):
    x, total = random(4, 3), 0.0
    for i, label in enumerate(LABELS):
        if label != 1:
            p = np.exp(x[i, int(label)]) / np.exp(x[i]).sum()
            total -= (1 + p if kind == "ONEADDP" else 1 - p) ** 1.5 * np.log(p)
    text = FOCAL.replace("gamma", f"type: {kind} gamma")
    (loss,) = Single(text, x, LABELS).forward()
    assert loss == pytest.approx(total / 3)
    again, p = Single(text, x, LABELS, tops=2).forward()
    assert again == loss
    np.testing.assert_allclose(p, np.exp(x) / np.exp(x).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("alpha", [1, 1.5])
def test_gradient_of_the_focal_loss_takes_alpha_for_1_beside_the_power(alpha, sign):
    kind = "ONEADDP" if sign > 0 else "ORIGIN"
    x, gamma = random(4, 3), 1.5
    text = FOCAL.replace("gamma", f"type: {kind} alpha: {alpha} gamma")
    single = Single(text, x, LABELS)
    single.forward()
    (dx, _), _ = single.backward([np.array(1.0)], propagate_down=[True, False])
    want = np.zeros_like(x)
    for i, label in enumerate(LABELS.astype(int)):
        if label != 1:
            p = np.exp(x[i]) / np.exp(x[i]).sum()
            power = (alpha + sign * p[label]) ** gamma
            inner = gamma * power / (1 + sign * p[label]) * p[label] * np.log(p[label])
            want[i] = (power + sign * inner) * (p - np.eye(3)[label]) / 3
    np.testing.assert_allclose(dx, want, rtol=1e-9)


@pytest.mark.parametrize("gamma", [0, 0.5])
def test_a_sure_label_has_no_gradient_of_the_focal_loss(gamma):
    """1 - p is 0, and its power below 1 infinite."""
    text = f'type: "FocalLoss" focal_loss_param {{ gamma: {gamma} }}'
    single = Single(text, np.array([[200.0, 0, 0]]), np.zeros(1), dtype=np.float32)
    (loss,) = single.forward()
    (dx, _), _ = single.backward([np.float32(1)], propagate_down=[True, False])
    assert loss == 0
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("text", [CENTERS, FOCAL])
def test_label_outside_is_named(text):
    single = Single(text, random(2, 3), np.array([0.0, 3]))
    with pytest.raises(DataError, match="label 3 is not one of the 3 classes 0 to 2"):
        single.forward()


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "L1Loss"', [(3, 4), (3, 5)], "the bottoms must have the same count: 12 of shape"),
        ('type: "TripletLoss"', [(3, 4), (3, 4), (3, 2)], "bottom 2 has shape .3, 2., bottom 0"),
        (CENTERS, [(3, 4), (3, 2)], "3 items need as many labels, not 6"),
        (MMD, [(3, 4), (3, 2)], "items of 4 and of 2 numbers"),
        (MMD.replace("mul: 4", "mul: 0"), [(3, 4), (3, 4)], "kernel_mul must be above 0, not 0"),
        (MMD.replace("num: 3", "num: 4000"), [(3, 4), (3, 4)], "must be 1000 or less, not 4000"),
        (LIFTED, [(3, 4), (3, 2)], "3 items need as many labels, not 6"),
        ('type: "CenterLoss"', [(3, 4), (3,)], "num_output must be 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*shape) for shape in shapes))

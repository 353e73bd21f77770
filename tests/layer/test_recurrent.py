import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import TEST, NetParameter
from caffepy.solver import sidecar

from .harness import Single, check_golden, check_gradient, random
from .on_gpu import check_plain_on_gpu

T, N, D, H, S = 4, 3, 5, 2, 3
FILLERS = (
    'weight_filler { type: "gaussian" std: 0.5 } bias_filler { type: "uniform" min: -0.5 max: 0.5 }'
)
STATES = {"LSTM": 2, "RNN": 1}
TYPES = list(STATES)


def text(type_, expose=False, size=H, extra=""):
    expose_hidden = "expose_hidden: true" if expose else ""
    return (
        f'type: "{type_}" recurrent_param {{ num_output: {size} '
        f"{FILLERS} {expose_hidden} }} {extra}"
    )


def cont(pattern, steps=T, streams=N):
    """0 where a sequence begins: in the first step, nowhere, in one stream's third step,
    everywhere.
    """
    flags = np.ones((steps, streams))
    if pattern == "batches":
        flags[0] = 0
    elif pattern == "inside":
        flags[0], flags[steps // 2, streams // 2] = 0, 0
    elif pattern == "never":
        flags[...] = 0
    else:
        assert pattern == "going on"
    return flags


PATTERNS = ["batches", "inside", "never", "going on"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive(type_, params, x, flags, static, states):
    """One step, one stream at a time, as the formulas stand."""
    w_x, b, *rest = params
    w_static = rest.pop(0) if static is not None else None
    w_h = rest[0]
    states = [s.copy() for s in states]  # (N, H) each
    y = np.empty((*x.shape[:2], states[0].shape[1]))
    for t in range(len(x)):
        for n in range(x.shape[1]):
            sums = w_x @ x[t, n].reshape(-1) + b + w_h @ (flags[t, n] * states[0][n])
            if static is not None:
                sums += w_static @ static[n].reshape(-1)
            if type_ == "LSTM":
                i, f, o, g = np.split(sums, 4)
                states[1][n] = flags[t, n] * sigmoid(f) * states[1][n] + sigmoid(i) * np.tanh(g)
                states[0][n] = y[t, n] = sigmoid(o) * np.tanh(states[1][n])
            else:
                states[0][n] = np.tanh(sums)
                y[t, n] = np.tanh(rest[1] @ states[0][n] + rest[2])
    return y, states


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("expose", [False, True])
@pytest.mark.parametrize("type_", TYPES)
def test_against_a_loop_over_two_batches(type_, expose, static, pattern, dtype):
    x, flags, x_static = random(T, N, 2, 3), cont(pattern), random(N, S)
    first = [random(N, H, seed=s) if expose else np.zeros((N, H)) for s in range(STATES[type_])]
    bottoms = [x, flags] + [x_static] * static + [s[None] for s in first] * expose
    tops = 1 + STATES[type_] * expose
    single = Single(text(type_, expose), *bottoms, tops=tops, dtype=dtype)
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == np.float32 else 1e-12}
    for _ in range(2):
        answers = single.forward()
        want, last = naive(type_, single.params, x, flags, x_static if static else None, first)
        np.testing.assert_allclose(answers[0], want, **tolerance)
        for answer, state in zip(answers[1:], last, strict=expose):
            np.testing.assert_allclose(answer[0], state, **tolerance)
        if not expose:
            first = last


@pytest.mark.parametrize("pattern", ["batches", "inside", "never"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("type_", TYPES)
def test_gradient(type_, static, pattern):
    bottoms = [random(T, N, D), cont(pattern)] + [random(N, S)] * static
    check_gradient(text(type_), *bottoms, propagate_down=[True, False, True][: len(bottoms)])


@pytest.mark.parametrize("type_", TYPES)
def test_gradient_from_given_states(type_):
    n = STATES[type_]
    states = [random(1, N, H, seed=s) for s in range(n)]
    weights = "loss_weight: 1 " + "loss_weight: 0 " * n
    bottoms = [random(T, N, D), cont("going on"), random(N, S), *states]
    single = Single(text(type_, expose=True, extra=weights), *bottoms, tops=1 + n)
    single.forward()
    diffs, _ = single.backward(
        [1] + [np.nan] * n,  # a state's gradient is ignored
        [True, False, True] + [True] * n,
    )
    assert not any(d.any() for d in diffs[3:])
    check_gradient(
        text(type_, expose=True, extra=weights),
        *bottoms,
        tops=1 + n,
        propagate_down=[True, False, True] + [False] * n,
    )


@pytest.mark.parametrize("type_", TYPES)
def test_gradient_stops_at_the_batch(type_):
    """A batch that goes on from another one has the gradient of one with the same states given."""
    x, flags = random(T, N, D), cont("going on")
    carried = Single(text(type_), x, flags)
    carried.forward()
    states = [
        s[None]
        for s in naive(type_, carried.params, x, flags, None, [np.zeros((N, H))] * STATES[type_])[1]
    ]
    given = Single(text(type_, expose=True), x, flags, *states, tops=1 + len(states))
    for mine, its in zip(given.params, carried.params, strict=True):
        mine[...] = its
    dy = random(T, N, H, seed=5)
    np.testing.assert_allclose(carried.forward()[0], given.forward()[0], atol=1e-12)
    (dx, _), params = carried.backward([dy], [True, False])
    (want_dx, *_), want_params = given.backward(
        [dy] + [0] * len(states), [True] + [False] * (1 + len(states))
    )
    np.testing.assert_allclose(dx, want_dx, atol=1e-12)
    for got, want in zip(params, want_params, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("case", ["lstm", "rnn"])
def test_as_caffe(case):
    check_golden(case)


def test_parameters_stand_in_caffes_order():
    shapes = {
        t: [
            p.shape for p in Single(text(t), random(T, N, 2, 4), cont("never"), random(N, S)).params
        ]
        for t in TYPES
    }
    assert shapes["LSTM"] == [(4 * H, 8), (4 * H,), (4 * H, S), (4 * H, H)]
    assert shapes["RNN"] == [(H, 8), (H,), (H, S), (H, H), (H, H), (H,)]


@pytest.mark.parametrize("type_", TYPES)
def test_frozen_parameters_and_inputs_are_left_alone(type_):
    single = Single(text(type_), random(T, N, D), cont("batches"), random(N, S))
    single.forward()
    dy = random(T, N, H)
    _, want = single.backward([dy], [True, False, True])
    for k in range(len(want)):
        single.layer.param_propagate_down = [i == k for i in range(len(want))]
        (dx, _, dstatic), diffs = single.backward([dy], [False] * 3)
        assert dx is None
        assert dstatic is None
        assert np.isnan(single.bottom[0].diff).all()
        assert np.isnan(single.bottom[2].diff).all()
        for i, (diff, all_) in enumerate(zip(diffs, want, strict=True)):
            np.testing.assert_array_equal(diff, all_ if i == k else 0)


@pytest.mark.parametrize("type_", TYPES)
def test_top_may_be_changed_in_place(type_):
    """A layer in place after it touches neither the state nor the gradient."""
    bottoms, dy = (random(T, N, D), cont("going on")), random(T, N, H)
    plain, changed = Single(text(type_), *bottoms), Single(text(type_), *bottoms)
    for _ in range(2):
        want = plain.forward()[0]
        np.testing.assert_array_equal(changed.forward()[0], want)
        changed.top[0].data.fill(7)
    np.testing.assert_array_equal(
        changed.backward([dy], [True, False])[0][0], plain.backward([dy], [True, False])[0][0]
    )


@pytest.mark.parametrize("streams", [0, 1, N - 1, N + 4])
@pytest.mark.parametrize("type_", TYPES)
def test_streams_may_change(type_, streams):
    single = Single(text(type_), random(T, N, D), cont("going on"))
    single.forward()
    single.inputs = [random(T, streams, D), np.ones((T, streams))]
    for blob, array in zip(single.bottom, single.inputs, strict=True):
        blob.reshape(array.shape)
    single.layer.reshape(single.bottom, single.top)
    # As in Caffe the first streams go on; more streams than ever before all begin anew.
    flags = np.ones((T, N))
    _, states = naive(
        type_, single.params, random(T, N, D), flags, None, [np.zeros((N, H))] * STATES[type_]
    )
    first = [s[:streams] if streams <= N else np.zeros((streams, H)) for s in states]
    want, _ = naive(type_, single.params, *single.inputs, None, first)
    np.testing.assert_allclose(single.forward()[0], want, atol=1e-12)
    assert single.backward([random(T, streams, H)], [True, False])[0][0].shape == (T, streams, D)


NET = """force_backward: true
layer { name: "in" type: "Input" top: "x" top: "cont"
        input_param { shape { dim: 4 dim: 3 dim: 5 } shape { dim: 4 dim: 3 } } }
layer { name: "it" %s bottom: "x" bottom: "cont" top: "y" }"""


def build(type_, phase=None, seed=1):
    param = text_format.Parse(NET % text(type_), NetParameter())
    if phase is not None:
        param.state.phase = phase
    net = Net(param, device=Device(seed=seed))
    net.blobs["x"].data[...] = random(T, N, D)
    net.blobs["cont"].data[...] = 1
    return net


@pytest.mark.parametrize("type_", TYPES)
def test_a_resumed_net_goes_on_exactly(type_, tmp_path):
    net = build(type_)
    net.forward()
    net.forward()
    sidecar.write(str(tmp_path / "state"), {"net": net.state()})
    resumed = build(type_)
    resumed.set_state(sidecar.read(str(tmp_path / "state"))["net"])
    other = build(type_)
    for n in (net, resumed, other):
        n.forward()
    np.testing.assert_array_equal(resumed.blobs["y"].data, net.blobs["y"].data)
    assert (other.blobs["y"].data != net.blobs["y"].data).any()


@pytest.mark.parametrize("type_", TYPES)
def test_a_state_of_other_streams_is_taken_up(type_):
    single = Single(text(type_), random(T, N, D), cont("going on"))
    single.forward()
    for streams in (1, N + 2):
        state = {"last": [random(1, streams, H) for _ in range(STATES[type_])]}
        single.layer.set_state(state)
        assert single.forward()[0].shape == (T, N, H)


def test_exposed_states_are_the_callers():
    single = Single(
        text("LSTM", expose=True), random(T, N, D), cont("batches"), *[random(1, N, H)] * 2, tops=3
    )
    assert single.layer.state() == {}


@pytest.mark.parametrize("type_", TYPES)
def test_test_net_uses_the_weights_but_not_the_state(type_):
    train, test = build(type_), build(type_, TEST, seed=2)
    test.share_trained_layers_with(train)
    train.forward()
    test.forward()
    np.testing.assert_array_equal(test.blobs["y"].data, train.blobs["y"].data)
    train.params[0].data[...] *= 0.5
    fresh = build(type_)
    fresh.share_trained_layers_with(train)
    fresh.forward()
    test.set_state(
        {k: {"last": [np.zeros_like(a) for a in v["last"]]} for k, v in test.state().items()}
    )
    test.forward()
    np.testing.assert_array_equal(test.blobs["y"].data, fresh.blobs["y"].data)


def test_parameters_of_the_prototxt_are_taken():
    blobs = "".join(
        (
            f"blobs {{ shape {{ {' '.join(f'dim: {d}' for d in shape)} }} "
            f"{'data: 0.5 ' * np.prod(shape)} }} "
        )
        for shape in [(4 * H, D), (4 * H,), (4 * H, H)]
    )
    single = Single(text("LSTM", extra=blobs), random(T, N, D), cont("batches"))
    assert all((p == 0.5).all() for p in single.params)
    with pytest.raises(ConfigError, match="incorrect W_xc shape"):
        Single(text("LSTM", extra=blobs), random(T, N, D + 1), cont("batches"))
    with pytest.raises(ConfigError, match="incorrect number of weight blobs: 3, not 6"):
        Single(text("RNN", extra=blobs), random(T, N, D), cont("batches"), random(N, S))


def test_number_of_steps_is_fixed():
    single = Single(text("LSTM"), random(T, N, D), cont("batches"))
    for blob in single.bottom:
        blob.reshape((T + 1, *blob.shape[1:]))
    with pytest.raises(
        ConfigError, match="input number of timesteps changed: 5, at set-up it was 4"
    ):
        single.layer.reshape(single.bottom, single.top)


def test_size_of_the_inputs_is_fixed():
    single = Single(text("RNN"), random(T, N, D), cont("batches"), random(N, S))
    single.bottom[2].reshape((N, S + 1))
    with pytest.raises(ConfigError, match="for 3 inputs, not 4"):
        single.layer.reshape(single.bottom, single.top)


@pytest.mark.parametrize(
    ("bottoms", "expose", "message"),
    [
        ([(T,), (T, N)], False, "at least 2 axes"),
        ([(0, N, D), (0, N)], False, "needs 1 timestep or more"),
        ([(T, N, D), (T, N, 1)], False, "exactly 2 axes"),
        ([(T, N, D), (N, T)], False, "exactly 2 axes"),
        ([(T, N, D), (T, N), (T, D)], False, "the 3 streams"),
        ([(T, N, D), (T, N)], True, "takes 4 bottoms"),
        ([(T, N, D), (T, N), (N, S), (1, N, H)], False, "takes 2 bottoms"),
        (
            [(T, N, D), (T, N), (1, N, H), (1, N + 1, H)],
            True,
            r"bottom\[3\] shape must match hidden state",
        ),
    ],
)
def test_bottoms_that_do_not_fit(bottoms, expose, message):
    with pytest.raises(ConfigError, match=message):
        Single(text("LSTM", expose), *map(np.ones, bottoms), tops=3 if expose else 1)


def test_bad_parameters_and_gradients():
    with pytest.raises(ConfigError, match="num_output must be positive"):
        Single(text("LSTM", size=0), random(T, N, D), cont("batches"))
    single = Single(text("RNN"), random(T, N, D), cont("batches"))
    with pytest.raises(ConfigError, match="sequence indicators"):
        single.layer.backward(single.top, [True, True], single.bottom)
    assert [single.layer.allow_force_backward(i) for i in range(3)] == [True, False, True]


UNIT = 'type: "LSTMUnit"'


def test_unit_gradient():
    flags = np.ones((1, N))
    flags[0, 1] = 0
    bottoms = [random(1, N, H), random(1, N, 4 * H), flags]
    check_gradient(UNIT, *bottoms, tops=2, propagate_down=[True, True, False])
    check_gradient(UNIT, *bottoms, tops=2, propagate_down=[False, True, False])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unit_against_the_formula(dtype):
    flags = np.array([[1, 0, 0.5]])
    before, gates = random(1, N, 40), random(1, N, 160, seed=1)
    single = Single(UNIT, before, gates, flags, tops=2, dtype=dtype)
    i, f, o, g = np.split(gates, 4, axis=2)
    want_c = flags[..., None] * sigmoid(f) * before + sigmoid(i) * np.tanh(g)
    c, h = single.forward()
    tolerance = 1e-6 if dtype == np.float32 else 1e-14
    np.testing.assert_allclose(c, want_c, atol=tolerance)
    np.testing.assert_allclose(h, sigmoid(o) * np.tanh(want_c), atol=tolerance)
    np.testing.assert_array_equal(single.bottom[1].data, gates.astype(dtype))


def test_unit_takes_what_fits():
    with pytest.raises(ConfigError, match=r"must be \(1, N, H\)"):
        Single(UNIT, random(2, N, H), random(2, N, 4 * H), np.ones((2, N)), tops=2)
    with pytest.raises(ConfigError, match=r"gates must be \[1, 3, 8\]"):
        Single(UNIT, random(1, N, H), random(1, N, 3 * H), np.ones((1, N)), tops=2)
    single = Single(UNIT, random(1, N, H), random(1, N, 4 * H), np.ones((1, N)), tops=2)
    with pytest.raises(ConfigError, match="sequence indicators"):
        single.layer.backward(single.top, [False, False, True], single.bottom)
    assert [single.layer.allow_force_backward(i) for i in range(3)] == [True, True, False]


INDICATORS = 'type: "ContinuationIndicator" continuation_indicator_param { %s batch_size: 2 }'


def test_indicators_of_whole_sequences():
    (y,) = Single(INDICATORS % "time_step: 3").forward()
    np.testing.assert_array_equal(y, [[0, 0], [1, 1], [1, 1]])
    with pytest.raises(ConfigError, match="needs a time_step and a batch_size"):
        Single(INDICATORS % "")


def test_indicators_of_as_many_sequences_as_a_bottom_has():
    param = "continuation_indicator_param { time_step: 3 axis: 1 }"
    (y,) = Single(f'type: "ContinuationIndicator" {param}', np.zeros((5, 2, 4))).forward()
    np.testing.assert_array_equal(y, [[0, 0], [1, 1], [1, 1]])


@pytest.mark.gpu
def test_indicators_on_gpu():
    check_plain_on_gpu(INDICATORS % "time_step: 3", propagate_down=[])


def lstm_text(extra="", size=H):
    return f'type: "Lstm" lstm_param {{ num_output: {size} {FILLERS} {extra} }}'


LSTMS = {
    "steps and streams": ("", (T, N, 2, 3)),
    "flat": (f"batch_size: {N}", (T * N, 6)),
    "flat, more axes": (f"batch_size: {N}", (T * N, 2, 3)),
    "flat, one stream": ("", (T * N, 6)),
}


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
@pytest.mark.parametrize("form", LSTMS)
def test_lstm_of_ctpn_against_a_loop(form, pattern):
    extra, shape = LSTMS[form]
    steps, streams = (T * N, 1) if form == "flat, one stream" else (T, N)
    flags = cont(pattern or "batches", steps, streams)
    bottoms = [random(*shape)] + ([flags] if pattern else [])
    single = Single(lstm_text(extra), *bottoms)
    w_x, w_h, bias = single.params
    states = [np.zeros((streams, H))] * 2
    for batch in range(2):
        (y,) = single.forward()
        x = bottoms[0].reshape(steps, streams, 6)
        want, states = naive("LSTM", [w_x, bias, w_h], x, flags, None, states)
        assert y.shape == ((T * N, H) if form.startswith("flat") else (T, N, H)), batch
        np.testing.assert_allclose(y.reshape(want.shape), want, atol=1e-12)
        if not pattern:
            states = [np.zeros((streams, H))] * 2


@pytest.mark.parametrize("pattern", [None, "batches", "inside", "never"])
@pytest.mark.parametrize("form", LSTMS)
@pytest.mark.parametrize("bound", ["", "clipping_threshold: 1e6"])
def test_lstm_of_ctpn_gradient(form, pattern, bound):
    extra, shape = LSTMS[form]
    steps, streams = (T * N, 1) if form == "flat, one stream" else (T, N)
    bottoms = [random(*shape)] + ([cont(pattern, steps, streams)] if pattern else [])
    wanted = [True, False][: len(bottoms)]
    check_gradient(lstm_text(f"{extra} {bound}"), *bottoms, propagate_down=wanted)


@pytest.mark.parametrize("pattern", [None, "inside"])
def test_gradients_of_gates_are_cut_in_each_step(pattern):
    """A loop backward, with a bound that many gradients reach."""
    most, flags = float(np.float32(0.02)), cont(pattern or "batches")
    x, dy = random(T, N, 6), random(T, N, H, seed=3)
    bottoms = [x] + ([flags] if pattern else [])
    single = Single(lstm_text(f"clipping_threshold: {most}"), *bottoms)
    (h,) = single.forward()
    w_x, w_h, bias = single.params
    wanted = [True, False][: len(bottoms)]
    (dx, *_), gradients = single.backward([dy], propagate_down=wanted)
    before, c, gates = np.zeros((N, H)), np.zeros((T + 1, N, H)), []
    for t in range(T):
        now = flags[t][:, None]
        a = (x[t] @ w_x.T + bias + (now * before) @ w_h.T).reshape(N, 4, H)
        i, f, o, g = *(sigmoid(a[:, k]) for k in range(3)), np.tanh(a[:, 3])
        f = f * now
        c[t + 1] = f * c[t] + i * g
        before = o * np.tanh(c[t + 1])
        gates.append((i, f, o, g))
    dc, dh, all_da, reached = np.zeros((N, H)), np.zeros((N, H)), np.zeros((T, N, 4 * H)), 0
    for t in range(T - 1, -1, -1):
        i, f, o, g = gates[t]
        dh, tanh = dh + dy[t], np.tanh(c[t + 1])
        dc = dc + dh * o * (1 - tanh**2)
        parts = dc * g * i * (1 - i), dc * c[t] * f * (1 - f), dh * tanh * o * (1 - o)
        da = np.hstack([*parts, dc * i * (1 - g**2)])
        reached += np.sum(np.abs(da) > most)
        all_da[t] = np.clip(da, -most, most)
        dc = dc * f
        dh = flags[t][:, None] * (all_da[t] @ w_h)
    kept = np.concatenate([np.zeros((1, N, H)), h[:-1]]) * flags[..., None]
    assert 10 < reached < all_da.size
    np.testing.assert_allclose(dx, all_da @ w_x, atol=1e-12)
    for got, want in zip(
        gradients,
        (
            np.einsum("tng,tnd->gd", all_da, x),
            np.einsum("tng,tnh->gh", all_da, kept),
            all_da.sum(axis=(0, 1)),
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("bound", ["", "clipping_threshold: 0.05"])
@pytest.mark.parametrize("flagged", [False, True])
def test_lstm_of_ctpn_without_sequences(bound, flagged):
    bottoms = [np.zeros((T, 0, D))] + ([np.zeros((T, 0))] if flagged else [])
    single = Single(lstm_text(bound), *bottoms)
    (y,) = single.forward()
    assert y.shape == (T, 0, H)
    (dx, *_), gradients = single.backward([0], [True, False][: len(bottoms)])
    assert dx.shape == (T, 0, D)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("bound", ["", "clipping_threshold: 0.05"])
@pytest.mark.parametrize("pattern", [None, "inside"])
def test_lstm_of_ctpn_on_gpu(pattern, bound):
    bottoms = [random(T, N, D)] + ([cont(pattern)] if pattern else [])
    wanted = [True, False][: len(bottoms)]
    check_plain_on_gpu(lstm_text(bound), *bottoms, propagate_down=wanted)


@pytest.mark.parametrize(
    ("extra", "shapes", "message"),
    [
        ("clipping_threshold: -1", [(T, N, D)], "clipping_threshold 0 or more, not 2 and -1"),
        ("batch_size: 5", [(T * N, D)], "12 items cannot be divided into sequences"),
        ("batch_size: 0", [(T * N, D)], "batch_size must be 1 or more, not 0"),
        ("", [(T,)], r"needs \(T, N, ...\)"),
        ("", [(0, N, D)], r"needs 1 step or more, which \[0, 3, 5\]"),
        ("", [(0, D)], r"needs 1 step or more, which \[0, 5\]"),
        ("batch_size: 3", [(0, D), (0, N)], r"needs 1 step or more, which \[0, 5\]"),
        ("", [(T, N, D), (T, N + 1)], "4 steps of 3 sequences need as many indicators"),
    ],
)
def test_lstms_that_are_refused(extra, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(lstm_text(extra), *(random(*shape) for shape in shapes))
    with pytest.raises(ConfigError, match="num_output must be 1 or more"):
        Single(lstm_text(size=0), random(T, N, D))

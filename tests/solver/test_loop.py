"""Iterations that the CPU runs as one call do what single ones do, to the last bit: weights, losses,
rates, positions, snapshots, and where they fail; they are single where something is to see each.
"""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy.core.errors import CaffeError, DataError, DivergenceError
from caffepy.device.threads import num_threads, set_num_threads
from caffepy.layer.feed import Ring
from caffepy.solver import Action, Signals, Solver, loop
from caffepy.solver.update import rules
from tests.nets import library
from tests.solver.cases import Recorder, change_numbers, solver_of
from tests.solver.test_replay import CONVOLUTIONS, DROPPING, FED, RULES, feed, numbers

SETTINGS = 'lr_policy: "inv" gamma: 0.1 power: 0.75 base_lr: 0.02 snapshot_after_train: false '


class Several(Recorder):
    """Hears of several iterations at a time."""

    takes_several = True

    def __init__(self) -> None:
        super().__init__()
        self.smoothed: list[tuple[int, float | None, float]] = []

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        super().iterated(iteration, loss, rate, images)
        self.smoothed.append((iteration, loss, rate))


@pytest.fixture(autouse=True)
def any_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops may take long, and longer than single iterations: others share the machine."""
    monkeypatch.setattr(loop, "LONGEST", 1e6)
    monkeypatch.setattr(loop, "SLOWER", 1e6)
    before = num_threads()
    set_num_threads(getattr(request, "param", 2))
    yield
    set_num_threads(before)


def looped(solver: Solver) -> int:
    """Number of iterations in calls for several."""
    return solver.iterations.loop._replayed


def state_of(solver: Solver) -> Any:
    return solver.iterations.positions()


def same_state(mine: Any, theirs: Any) -> None:
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            same_state(mine[key], theirs[key])
    elif isinstance(mine, list):
        assert len(mine) == len(theirs)
        for pair in zip(mine, theirs, strict=True):
            same_state(*pair)
    else:
        np.testing.assert_array_equal(mine, theirs)


def rows(folder: Path, counts: tuple[int, ...] = (23,), more: str = "") -> str:
    """A layer that reads HDF5 files of so many rows."""
    rng, names = np.random.default_rng(6), list[str]()
    for i, count in enumerate(counts):
        names.append(f"{folder}/{i}.h5")
        with h5py.File(names[-1], "w") as file:
            file["data"], file["label"] = rng.standard_normal((count, 6)), rng.integers(0, 3, count)
    (folder / "files.txt").write_text("\n".join(names))
    param = f'hdf5_data_param {{ source: "{folder}/files.txt" batch_size: 4 {more} }}'
    return library.layer("HDF5Data", "in", "", param, top="data label")


def same(
    settings: str,
    net: str = CONVOLUTIONS,
    steps: tuple[int, ...] = (40,),
    loops: bool = True,
    fuse: bool = True,
) -> None:
    """Train in one call for many iterations, or singly, and compare all after each call."""
    solvers, heard = list[Solver](), list[Several]()
    for capture in (False, True):
        heard.append(Several())
        solvers.append(solver_of(SETTINGS + settings, net, reporter=heard[-1]))
        solvers[-1].capture, solvers[-1].fuse = capture, fuse
    for count in steps:
        for solver in solvers:
            solver.step(count)
        np.testing.assert_array_equal(*map(numbers, solvers))
        same_state(*map(state_of, solvers))
        for name in solvers[0].net.blobs:
            blobs = [solver.net.blobs[name] for solver in solvers]
            np.testing.assert_array_equal(*[blob.host_data for blob in blobs], name)
    plain, mine = heard
    assert plain.events == mine.events
    assert plain.losses == mine.losses
    assert plain.smoothed == mine.smoothed
    for one, other in zip(plain.tests, mine.tests, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    assert (looped(solvers[1]) > 0) == loops
    for solver in solvers:
        solver.close()


@pytest.mark.parametrize("rule", rules)
def test_each_rule(rule: str) -> None:
    same(f'type: "{rule}" {RULES[rule]} average_loss: 5 ')


@pytest.mark.parametrize("any_time", [1, 2, 3], indirect=True)
def test_any_number_of_threads() -> None:
    same(RULES["SGD"])


SHOWN = "display: 7 average_loss: 3 test_iter: 3 test_interval: 10 test_compute_loss: true "


@pytest.mark.parametrize(
    "settings",
    [
        SHOWN,
        SHOWN + "test_initialization: false test_offset: 3 ",
        'lr_policy: "multistep" stepvalue: 5 stepvalue: 6 stepvalue: 30 gamma: 0.5 ',
        'lr_policy: "step" stepsize: 9 gamma: 0.5 ',
        "warmup_iter: 10 warmup_start_lr: 0.001 ",
        "iter_size: 3 ",
        "weight_decay: 0.01 momentum: 0.9 ",
    ],
)
def test_settings(settings: str) -> None:
    same(settings, steps=(21, 1, 2, 16))


@pytest.mark.parametrize("settings", ["clip_gradients: 0.5 ", "display: 1 "])
def test_settings_for_single_iterations(settings: str) -> None:
    same(settings, loops=False)


def test_what_is_displayed_and_when_a_policy_steps(caplog: pytest.LogCaptureFixture) -> None:
    lines = []
    for capture in (False, True):
        solver = solver_of(
            SETTINGS + 'lr_policy: "multistep" stepvalue: 5 stepvalue: 12 gamma: 0.5 display: 10 ',
            CONVOLUTIONS,
            reporter=Several(),
        )
        solver.capture, solver.fuse = capture, True
        caplog.clear()
        with caplog.at_level(logging.INFO, "caffepy.solver"):
            solver.step(30)
        lines.append(caplog.messages[:])
        solver.close()
    assert lines[0] == lines[1]
    assert "MultiStep Status: Iteration 12, step = 2" in lines[0]


@pytest.mark.parametrize("shuffle", ["", "shuffle: true"])
@pytest.mark.parametrize("counts", [(23,), (5,), (23, 9, 40)])
def test_rows_of_hdf5(counts: tuple[int, ...], shuffle: str, tmp_path: Path) -> None:
    net = library.linear_classifier(rows(tmp_path, counts, shuffle), 3)
    same("", net, (19, 1, 22, 3, 50))


@pytest.mark.parametrize("param", ["", "mirror: true scale: 0.5", "crop_size: 5 mean_value: 2"])
def test_images_that_are_transformed(param: str) -> None:
    data = library.digits(3, 0, param)
    same("", library.linear_classifier(data, 10), (19, 1, 22, 3, 150))


def test_two_data_layers(tmp_path: Path) -> None:
    """Their batches are not read in step."""
    images = library.digits(4).replace('top: "label"', 'top: "digit"').replace('"data"', '"image"')
    net = rows(tmp_path, (9, 14)) + images + library.inner_product("seen", "image", 3)
    net += library.inner_product("ip", "data", 3) + library.layer("Eltwise", "sum", "ip seen")
    same("", net + library.softmax_loss("sum"), (19, 1, 22, 3))


def test_a_net_fed_by_a_script() -> None:
    ended = []
    for capture in (False, True):
        solver = solver_of(SETTINGS, FED)
        solver.capture = capture
        for i in range(4):
            feed(solver, i / 8)
            solver.step(9)
            solver.net.learnable_params[0].host_data[...] *= 0.9
        assert (looped(solver) > 0) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


@pytest.mark.parametrize("rule", rules)
def test_settings_that_python_changes_count(rule: str) -> None:
    ended = []
    for capture in (False, True):
        solver = solver_of(f'type: "{rule}" {SETTINGS} {RULES[rule]}', FED)
        solver.capture = capture
        feed(solver, 0)
        solver.step(12)
        change_numbers(solver.param)
        solver.param.weight_decay = 0.1
        solver.param.gamma = 0.5
        solver.step(12)
        assert (looped(solver) > 9) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


def failing(folder: Path, at: int, value: float, name: str) -> str:
    """A net whose rows are bad in batch `at`; it drops some of what it has."""
    dropped = library.layer("Dropout", "dropped", "data")
    net = library.linear_classifier(rows(folder, (400,)) + dropped, 3, "dropped")
    with h5py.File(folder / "0.h5", "r+") as file:
        file[name][4 * at + 2] = value
    return net


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "error"), [("data", np.nan, DivergenceError), ("label", 12, DataError)]
)
def test_an_iteration_that_fails(
    name: str, value: float, error: type[CaffeError], passes: int, segments: int, tmp_path: Path
) -> None:
    """The solver stands before it, and goes on behind it if it is told to."""
    said, ended, heard, states = [], [], [], []
    for capture in (False, True):
        net = failing(tmp_path, 41, value, name)
        heard.append(Several())
        settings = f"{SETTINGS} momentum: 0.9 iter_size: {passes} display: 100 "
        solver = solver_of(settings, net, reporter=heard[-1])
        solver.capture = capture
        if segments > 1:
            solver.save_memory(segments)
        with pytest.raises(error) as raised:
            solver.step(90)
        said.append(str(raised.value))
        assert solver.iter == 41 // passes
        assert solver.iterations.step.whole
        ended.append(numbers(solver)[: solver.params.data.size])
        states.append([state_of(solver), solver.net.state(), solver.device.random.state])
        solver.step(5)
        ended[-1] = np.concatenate([ended[-1], numbers(solver)])
        states[-1].append(state_of(solver))
        assert (looped(solver) > 3) == capture
        solver.close()
    assert said[0] == said[1]
    assert error is DataError or ' is "data" of layer "in" (HDF5Data); lower' in said[0]
    np.testing.assert_array_equal(*ended)
    assert heard[0].smoothed == heard[1].smoothed
    same_state(*states)


def test_a_damaged_file_is_told_where_it_is_told_singly(tmp_path: Path) -> None:
    net = library.linear_classifier(rows(tmp_path, (40, 8)), 3)
    (tmp_path / "1.h5").write_text("no HDF5")
    said, ended = [], []
    for capture in (False, True):
        solver = solver_of(SETTINGS, net)
        solver.capture = capture
        with pytest.raises(DataError, match="an HDF5 file") as error:
            solver.step(40)
        said.append(str(error.value))
        assert solver.iter == 9
        assert (looped(solver) > 0) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)
    assert said[0] == said[1]


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Snapshots are written from within what a ring holds."""
    settings = SETTINGS + RULES["SGD"] + f'snapshot: 14 snapshot_prefix: "{tmp_path}/s" '
    straight = solver_of(settings, CONVOLUTIONS)
    straight.capture = False
    straight.step(50)
    straight.close()
    for first, end in ((0, 28), (28, 50)):
        solver = solver_of(settings, CONVOLUTIONS)
        if first:
            solver.restore(f"{tmp_path}/s_iter_{first}.solverstate")
        solver.step(end - first)
        assert looped(solver)
        solver.close()
    np.testing.assert_array_equal(numbers(solver), numbers(straight))


def test_going_back_drops_what_was_read(tmp_path: Path) -> None:
    settings = SETTINGS + f'snapshot: 14 snapshot_prefix: "{tmp_path}/s" '
    for net in (CONVOLUTIONS, library.linear_classifier(rows(tmp_path), 3)):
        solver = solver_of(settings, net)
        solver.step(40)
        there = numbers(solver), solver.net.state()
        solver.restore(f"{tmp_path}/s_iter_14.solverstate")
        solver.step(26)
        np.testing.assert_array_equal(numbers(solver), there[0])
        same_state(solver.net.state(), there[1])
        solver.net.layers[0].skip(3)
        skipped = solver.net.state()
        solver.restore(f"{tmp_path}/s_iter_14.solverstate")
        solver.step(29)
        same_state(solver.net.state(), skipped)
        solver.close()


def test_an_action_that_is_to_be_polled_each_time_is() -> None:
    for several in (False, True):
        polled = list[int]()
        solver = solver_of(SETTINGS, CONVOLUTIONS)

        def action(solver: Solver = solver, polled: list[int] = polled) -> Action:
            polled.append(solver.iter)
            return Action.STOP if solver.iter >= 20 else Action.NONE

        action.takes_several = several  # type: ignore[attr-defined]
        solver.action = action
        solver.step(1000)
        assert (polled == list(range(1, 21))) != several
        assert (solver.iter == 20) != several
        assert polled[-1] == solver.iter < 1000
        solver.close()


def test_callbacks_and_reporters_hear_of_each_iteration() -> None:
    seen = list[int]()

    class Looks(Recorder):
        def iterated(self, iteration: int, *told: Any) -> None:
            seen.append(solver.iter - iteration)

    solver = solver_of(SETTINGS, CONVOLUTIONS, reporter=Looks())
    solver.step(20)
    assert seen == [1] * 20
    solver = solver_of(SETTINGS, CONVOLUTIONS)
    counted = list[int]()

    class Counts:
        def on_start(self) -> None:
            counted.append(solver.iter)

        on_gradients_ready = on_start

    solver.add_callback(Counts())
    solver.step(20)
    assert counted == [i for i in range(20) for _ in range(2)]
    assert not looped(solver)


def test_callbacks_of_a_net_are_called_at_each_layer_also_between_calls_for_several() -> None:
    solver = solver_of(SETTINGS, CONVOLUTIONS)
    solver.step(20)
    before, layers = looped(solver), list(range(len(solver.net.layers)))
    assert before
    seen = list[int]()
    solver.net.after_forward.append(seen.append)
    solver.step(5)
    assert seen == 5 * layers
    solver.net.after_forward.clear()
    solver.step(5)
    assert looped(solver) > before
    assert seen == 5 * layers


def test_a_callback_that_is_replayable_is_called_before_batches_are_read() -> None:
    """As the class says: it need not know of each iteration, nor of layers that are replayed."""

    class Watches:
        replayable = True
        seen: list[int]

        def __call__(self, layer: int) -> None:
            self.seen.append(layer)

    solver = solver_of(SETTINGS, CONVOLUTIONS)
    watches = Watches()
    watches.seen = []
    solver.net.before_forward.append(watches)
    solver.step(20)
    assert looped(solver)
    watches.seen = []
    solver.step(20)
    assert set(watches.seen) == {0}
    assert 1 <= len(watches.seen) < 20


def test_a_signal_stops_it_with_a_snapshot(tmp_path: Path) -> None:
    settings = SETTINGS + f'snapshot: 1000000 snapshot_prefix: "{tmp_path}/s" '
    with Signals() as signals:
        signals.listen()
        solver = solver_of(settings, CONVOLUTIONS)
        solver.action = signals.poll
        solver.step(30)
        assert looped(solver)
        signal.raise_signal(signal.SIGTERM)
        solver.step(100000)
    assert solver.stopped
    assert solver.iter < 200
    assert (tmp_path / f"s_iter_{solver.iter}.solverstate").exists()
    solver.close()


@pytest.mark.parametrize("runs", [True, False])
def test_an_interruption_between_calls_counts_what_was_done(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a second signal came while compiled code runs, or before that."""
    solver = solver_of(SETTINGS, NORMALIZED)
    solver.step(20)
    graph = solver.iterations.loop._graph
    assert graph
    replay = graph.replay

    def interrupted(times: int) -> None:
        if runs:
            replay(times)
        raise KeyboardInterrupt

    monkeypatch.setattr(graph, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solver.step(1000)
    done = solver.iter
    assert (done > 20) == runs
    monkeypatch.undo()
    plain = solver_of(SETTINGS, NORMALIZED)
    plain.capture = False
    plain.step(done)
    np.testing.assert_array_equal(*[s.params.data for s in (solver, plain)])
    same_state(*[s.iterations.positions() for s in (solver, plain)])
    same_state(*[[blob.data for blob in s.net.params] for s in (solver, plain)])
    for s in (solver, plain):
        s.step(30)
    np.testing.assert_array_equal(*map(numbers, (solver, plain)))


@pytest.mark.parametrize("filled", [False, True])
def test_an_interruption_while_batches_are_read_loses_none(
    filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = solver_of(SETTINGS, CONVOLUTIONS)
    solver.step(20)
    fill = Ring.fill

    def interrupted(ring: Ring, count: int, state_after: Any) -> None:
        if filled:
            fill(ring, count, state_after)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ring, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solver.step(1000)
    monkeypatch.undo()
    plain = solver_of(SETTINGS, CONVOLUTIONS)
    plain.capture = False
    plain.step(solver.iter)
    same_state(*[s.iterations.positions() for s in (solver, plain)])
    for s in (solver, plain):
        s.step(30)
    np.testing.assert_array_equal(*map(numbers, (solver, plain)))
    same_state(*[s.iterations.positions() for s in (solver, plain)])


NORMALIZED = (
    library.digits(6, 11)
    + library.convolution("conv1", "data", 4, 3, "pad: 1 bias_term: false")
    + library.normalization("norm1", "conv1", "norm1")
    + library.in_place("ReLU", "relu1", "norm1")
    + library.convolution("conv2", "norm1", 4, 3, "pad: 1 bias_term: false")
    + library.normalization("norm2", "conv2", "norm2")
    + library.layer("Eltwise", "sum", "norm1 norm2")
    + library.in_place("ReLU", "relu2", "sum")
    + library.layer("LRN", "lrn", "sum")
    + library.layer("BatchNorm", "norm3", "lrn")
    + library.inner_product("ip", "norm3", 10)
    + library.softmax_loss("ip")
    + library.accuracy("ip", more=library.IN_TESTS)
)


@pytest.mark.parametrize("fuse", [True, False])
def test_batch_normalization(fuse: bool) -> None:
    """Running statistics are those of single iterations, also where tests read them."""
    same(RULES["SGD"] + SHOWN, NORMALIZED, (21, 1, 2, 16), fuse=fuse)


def test_running_statistics_before_an_iteration_that_fails(tmp_path: Path) -> None:
    found = []
    for capture in (False, True):
        net = failing(tmp_path, 41, np.nan, "data").replace(
            'bottom: "dropped"', 'bottom: "norm"', 1
        )
        norm = library.layer("BatchNorm", "norm", "dropped")
        head, tail = net.split('layer { name: "ip"')
        solver = solver_of(SETTINGS, f'{head}{norm}layer {{ name: "ip"{tail}')
        solver.capture = capture
        with pytest.raises(DivergenceError):
            solver.step(90)
        assert solver.iter == 41
        assert (looped(solver) > 0) == capture
        found.append([solver.params.data, *(blob.data for blob in solver.net.params)])
    for plain, mine in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, mine)
        assert np.isfinite(mine).all()


@pytest.mark.parametrize("passes", [1, 2])
def test_layers_that_draw_seeds(passes: int) -> None:
    """In training and in tests, in the order of single iterations."""
    more = library.layer("Dropout", "noisy", "ip1")
    net = library.perceptron(library.digits(7, 11), more) + library.accuracy("ip2")
    same(RULES["SGD"] + SHOWN + f"iter_size: {passes} ", net, (21, 1, 2, 16))


def test_other_layers_that_draw_numbers_run_singly() -> None:
    same(RULES["SGD"], DROPPING.replace("Dropout", "RReLU"), loops=False)


def test_a_loop_that_is_slower_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SLOWER", 0)
    monkeypatch.setattr(loop, "CALLS", 3)
    solver = solver_of(SETTINGS + "display: 5 ", CONVOLUTIONS)
    solver.step(40)
    done = looped(solver)
    solver.step(20)
    assert looped(solver) == done > 0
    plain = solver_of(SETTINGS, CONVOLUTIONS)
    plain.step(60)
    np.testing.assert_array_equal(*map(numbers, (solver, plain)))

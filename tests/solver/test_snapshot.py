import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.commands.inference import load_all
from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter, SolverState
from caffepy.solver import Solver, sidecar, snapshot
from tests.solver.cases import FED, FORMATS, NET, SOLVERS, damage, fed, solver_of, state_of, trained


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_new_solver_takes_everything_up(form: str, kind: str, tmp_path: Path) -> None:
    settings = FORMATS[form] + f'type: "{kind}" lr_policy: "step" gamma: 0.5 stepsize: 2 '
    first = trained(tmp_path, settings)
    second = solver_of(f'snapshot_prefix: "{tmp_path}/s" random_seed: 77 {settings}')
    second.restore(state_of(tmp_path, 3, settings))
    assert (second.iter, second.iterations.current_step) == (3, 1)
    np.testing.assert_array_equal(first.params.data, second.params.data)
    np.testing.assert_array_equal(first.history, second.history)
    for solver in (first, second):
        solver.step(2)
    np.testing.assert_array_equal(first.params.data, second.params.data)


def test_binary_files_hold_what_caffes_hold(tmp_path: Path) -> None:
    trained(tmp_path, "snapshot_diff: true ")
    state = SolverState.FromString((tmp_path / "s_iter_3.solverstate").read_bytes())
    caffe = SolverState.FromString((SOLVERS / "sgd_step_iter_10.solverstate").read_bytes())
    assert (state.iter, state.learned_net) == (3, f"{tmp_path}/s_iter_3.caffemodel")
    assert [f.name for f, _ in state.ListFields()] == [f.name for f, _ in caffe.ListFields()]
    assert [list(h.shape.dim) for h in state.history] == [[2, 3], [2]]
    net = NetParameter.FromString((tmp_path / "s_iter_3.caffemodel").read_bytes())
    blob = next(layer for layer in net.layer if layer.name == "ip").blobs[0]
    assert len(blob.data) == len(blob.diff) == 6


def test_hdf5_state_has_caffes_layout(tmp_path: Path) -> None:
    trained(tmp_path, FORMATS["hdf5"])

    def layout(path: str | Path) -> dict[str, object]:
        found: dict[str, object] = {}
        with h5py.File(path) as file:
            for name in ("iter", "current_step", "learned_net", "history", "history/0"):
                item = file[name]
                dataset = isinstance(item, h5py.Dataset)
                found[name] = (
                    (item.dtype.kind, item.ndim, item.id.get_type().get_class())
                    if dataset
                    else "group"
                )
            text = file["learned_net"].id
            found["text"] = (
                text.get_type().get_strpad(),
                text.get_space().get_simple_extent_npoints(),
            )
            raw = np.zeros((), f"S{text.get_type().get_size()}")
            text.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=text.get_type())
            found["ends with NUL"] = len(raw.item()) < text.get_type().get_size()
        return found

    assert layout(state_of(tmp_path, 3, "HDF5")) == layout(
        SOLVERS / "sgd_step_iter_10.solverstate.h5"
    )


@pytest.mark.parametrize("form", FORMATS)
def test_model_beside_the_state_is_found(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    first = solver_of(f'snapshot_prefix: "a/s" {FORMATS[form]}')
    first.snapshot()
    (tmp_path / "a").rename(tmp_path / "b")
    second = solver_of("random_seed: 5 ")
    second.restore(state_of(tmp_path / "b", 0, FORMATS[form]))
    np.testing.assert_array_equal(first.params.data, second.params.data)


@pytest.mark.parametrize("has_sidecar", [True, False])
def test_model_beside_the_state_comes_before_one_of_its_name(
    has_sidecar: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    solvers = {}
    for folder, seed in ("a", 1), ("b", 2):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        solvers[folder] = solver_of(f'snapshot_prefix: "s" random_seed: {seed} ')
        solvers[folder].snapshot()
    if not has_sidecar:
        (tmp_path / "a" / "s_iter_0.caffepystate").unlink()
    resumed = solver_of("random_seed: 5 ")
    with caplog.at_level(logging.INFO):
        resumed.restore("../a/s_iter_0.solverstate")
    np.testing.assert_array_equal(resumed.params.data, solvers["a"].params.data)
    told = "Using ../a/s_iter_0.caffemodel beside the state, not s_iter_0.caffemodel"
    assert told in caplog.messages


@pytest.mark.parametrize("form", FORMATS)
def test_a_damaged_model_is_refused_as_weights(form: str, tmp_path: Path) -> None:
    trained(tmp_path, FORMATS[form])
    model = tmp_path / f"s_iter_3.caffemodel{'.h5' if form == 'hdf5' else ''}"
    solver_of(f'weights: "{model}" ')
    damage(model, "flipped")
    with pytest.raises(ConfigError, match=r"s_iter_3\.caffemodel.*: this file was damaged"):
        solver_of(f'weights: "{model}" ')
    with pytest.raises(ConfigError, match=r"s_iter_3\.caffemodel.*: this file was damaged"):
        load_all(solver_of("").net, [str(model)])


def test_formats_of_state_and_model_may_differ(tmp_path: Path) -> None:
    first = trained(tmp_path, FORMATS["hdf5"])
    trained(tmp_path)
    for path in tmp_path.glob("*.caffepystate"):
        path.unlink()
    (tmp_path / "s_iter_3.caffemodel.h5").rename(tmp_path / "s_iter_3.caffemodel")
    second = solver_of("random_seed: 5 ")
    second.restore(state_of(tmp_path, 3))
    np.testing.assert_array_equal(first.params.data, second.params.data)


def test_missing_model_is_named(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "s_iter_3.caffemodel").unlink()
    with pytest.raises(
        ConfigError, match=r"its model .*s_iter_3.caffemodel exists neither beside it nor"
    ):
        solver_of("").restore(state_of(tmp_path, 3))


WRONG = {
    "weights": ("sgd_step_iter_10.caffemodel", "did you mean --weights"),
    "weights_hdf5": ("sgd_step_iter_10.caffemodel.h5", "did you mean --weights"),
    "two_histories": (
        "adam_iter_10.solverstate",
        "Incorrect length of history blobs: 8 in the file, 2 in this solver",
    ),
    "other_net": (
        "sgd_step_iter_10.solverstate",
        "Incorrect length of history blobs: 4 in the file, 2 in this solver",
    ),
    "nothing": ("sgd_stp_iter_10.solverstate", "no such file, did you mean"),
    "foreign": ("adam.npz", "adam.npz"),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_are_no_state_of_this_net_are_refused(case: str) -> None:
    name, message = WRONG[case]
    solver = solver_of("")
    before = solver.params.data.copy()
    with pytest.raises(ConfigError) as error:
        solver.restore(str(SOLVERS / name))
    assert message in str(error.value)
    assert str(SOLVERS / name) in str(error.value)
    np.testing.assert_array_equal(solver.params.data, before)


COUNTS = (
    "Incorrect length of history blobs: {} in the file, {} in this solver of type {}; "
    "it looks like a state with {}"
)
# (state of Caffe's, type that takes it up): what is said
FOREIGN = {
    (
        "sgd_step",
        "RMSProp",
    ): "RMSProp, as this one is: it looks like a state of Nesterov or SGD (negative values in",
    (
        "sgd_inv",
        "AdaGrad",
    ): "AdaGrad, as this one is: it looks like a state of Nesterov or SGD (negative values in",
    (
        "nesterov",
        "AdaGrad",
    ): "(negative values in history blob 0 and 3 more); set type to Nesterov or SGD, or give the "
    "model as weights",
    (
        "adam",
        "AdaDelta",
    ): "AdaDelta, as this one is: it looks like a state of Adam (negative values in",
    ("adam", "SGD"): COUNTS.format(
        8, 4, "SGD", "two histories: Adam; set type to Adam, or give the model as weights"
    ),
    ("adadelta", "RMSProp"): COUNTS.format(
        8, 4, "RMSProp", "two histories: AdaDelta or Adam; set type to"
    ),
    ("sgd_step", "Adam"): COUNTS.format(4, 8, "Adam", "one history: Nesterov or SGD; set type to"),
    ("adagrad", "AdaDelta"): COUNTS.format(
        4, 8, "AdaDelta", "one history: AdaGrad, Nesterov, RMSProp or SGD; set"
    ),
}


def solver_of_caffes_net(kind: str) -> Solver:
    momentum = "" if kind in ("AdaGrad", "RMSProp") else "momentum: 0.9 "
    net = np.load(SOLVERS / "sgd_step.npz")["net"]
    settings = f'base_lr: 0.01 lr_policy: "fixed" type: "{kind}" {momentum} net_param {{ {net} }}'
    return Solver(text_format.Parse(settings, SolverParameter()))


@pytest.mark.parametrize("extension", ["solverstate", "solverstate.h5"])
@pytest.mark.parametrize(("name", "kind"), FOREIGN)
def test_a_state_of_caffes_of_another_type_is_refused(name: str, kind: str, extension: str) -> None:
    solver = solver_of_caffes_net(kind)
    before = solver.params.data.copy()
    path = str(SOLVERS / f"{name}_iter_10.{extension}")
    with pytest.raises(ConfigError) as error:
        solver.restore(path)
    assert FOREIGN[name, kind] in str(error.value)
    assert path in str(error.value)
    np.testing.assert_array_equal(solver.params.data, before)
    assert not any(flat.any() for flat in solver.history)


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd_step", "Nesterov"), ("nesterov", "SGD"), ("adadelta", "Adam")]
)
def test_a_state_that_may_be_of_this_type_is_taken_up(name: str, kind: str) -> None:
    solver = solver_of_caffes_net(kind)
    solver.restore(str(SOLVERS / f"{name}_iter_10.solverstate"))
    assert solver.iter == 10


def test_a_state_that_no_solver_writes_is_refused(tmp_path: Path) -> None:
    state = SolverState.FromString((SOLVERS / "adam_iter_10.solverstate").read_bytes())
    state.history[6].data[0] = -1
    path = tmp_path / "s_iter_10.solverstate"
    path.write_bytes(state.SerializeToString())
    with pytest.raises(
        ConfigError,
        match=r"no solver writes such a state \(negative values in history blob 6\); give",
    ):
        solver_of_caffes_net("Adam").restore(str(path))


def test_history_of_other_shapes_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    wide = NET.replace("dim: 3", "dim: 5")
    with pytest.raises(
        ConfigError,
        match=r"history blob 0 has shape 2 3 \(6\) in the file, 2 5 \(10\) in this solver",
    ):
        solver_of("", wide).restore(state_of(tmp_path, 3))


def test_state_of_another_solver_type_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 'type: "Nesterov" ')
    with pytest.raises(
        ConfigError, match="written by a solver of type Nesterov, but this one is SGD"
    ):
        solver_of("").restore(state_of(tmp_path, 3))


def test_a_renamed_layer_is_named_when_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed(tmp_path).solve()
    other = fed(
        tmp_path,
        net=FED.replace('name: "ip"', 'name: "ip_new"').replace('name: "in"', 'name: "feed"'),
    )
    other.restore(state_of(tmp_path, 8))
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f'{tmp_path}/s_iter_8.caffepystate has no position of "0/feed": they start anew',
        f'{tmp_path}/s_iter_8.caffepystate has a position of "0/in": which this net does not have',
        f'{tmp_path}/s_iter_8.caffemodel has no weights for "ip_new": they start anew',
    ]


def test_an_hdf5_state_does_not_say_when_it_was_written(tmp_path: Path) -> None:
    trained(tmp_path, FORMATS["hdf5"])
    with h5py.File(tmp_path / "s_iter_3.solverstate.h5") as file:
        assert h5py.h5o.get_info(file["learned_net"].id).ctime == 0


def test_an_hdf5_state_reads_no_other_file(tmp_path: Path) -> None:
    settings = FORMATS["hdf5"]
    trained(tmp_path, settings)
    path = tmp_path / "s_iter_3.solverstate.h5"
    with h5py.File(path, "r+") as file:
        del file["history/0"]
        file["history/0"] = h5py.ExternalLink("other.h5", "/x")
    (tmp_path / "s_iter_3.caffepystate").unlink()
    with pytest.raises(ConfigError, match='"history/0" is a link to another file'):
        solver_of(settings).restore(str(path))


@pytest.mark.parametrize("which", ["caffemodel", "caffepystate", "solverstate"])
def test_unreadable_files_are_named(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    opened = open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(which):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError, match=rf"s_iter_3\.{which}.*: permission denied"):
        solver_of("").restore(state_of(tmp_path, 3))


@pytest.mark.parametrize(
    "name", ["sgd_step_iter_10.solverstate", "sgd_step_iter_10.solverstate.h5", "x.caffepystate"]
)
def test_damaged_bytes_give_one_message_or_a_state(name: str, tmp_path: Path) -> None:
    """Truncated anywhere or with any byte changed, a file loads or is refused; nothing else
    happens.
    """
    path = tmp_path / name
    if name == "x.caffepystate":
        sidecar.write(str(path), {"a": np.arange(50), "b": [1, 2, {"c": "d" * 50}]})
    else:
        path.write_bytes((SOLVERS / name).read_bytes())
    content = path.read_bytes()
    rng, refused = np.random.default_rng(4), 0
    for _ in range(150):
        broken = bytearray(content)
        for place in rng.integers(len(broken), size=rng.integers(1, 4)):
            broken[place] = rng.integers(256)
        path.write_bytes(broken[: rng.integers(len(broken) + 1) if rng.random() < 0.3 else None])
        try:
            sidecar.read(str(path)) if name == "x.caffepystate" else snapshot.read_state(str(path))
        except ConfigError:
            refused += 1
    assert 0 < refused <= 150

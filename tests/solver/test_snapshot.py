import copy
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.commands.inference import load_all
from caffepy.core.errors import CaffeError, ConfigError, DataError, DivergenceError
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter, SolverState
from caffepy.solver import Action, Solver, check_folder, newest_good, sidecar, snapshot
from tests.nets import library
from tests.solver.cases import ENVIRONMENT, GOLDEN, NET, AskAt, solver_of

FORMATS = {"binary": "", "hdf5": "snapshot_format: HDF5 "}
SOLVERS = GOLDEN / "solvers"


def trained(folder: Path, settings: str = "", steps: int = 3) -> Solver:
    solver = solver_of(f'snapshot_prefix: "{folder}/s" max_iter: 100 {settings}')
    solver.step(steps)
    solver.snapshot()
    return solver


def state_of(folder: Path, iteration: int, settings: str = "") -> str:
    return str(folder / f"s_iter_{iteration}.solverstate") + (".h5" if "HDF5" in settings else "")


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
    "nothing": ("gone.solverstate", "no such file, did you mean"),
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


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(
        {"flipped": content, "truncated": content[: len(content) // 2], "empty": b""}[how]
    )


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "gone"])
@pytest.mark.parametrize("which", ["caffemodel", "solverstate", "caffepystate"])
@pytest.mark.parametrize("form", FORMATS)
def test_auto_falls_back_to_the_newest_that_is_whole(
    form: str, which: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solver = trained(tmp_path, FORMATS[form])
    for _ in range(2):
        solver.step(3)
        solver.snapshot()
    suffix = ".h5" if form == "hdf5" and which != "caffepystate" else ""
    damage(tmp_path / f"s_iter_9.{which}{suffix}", how)
    expected = (
        9 if (which, how) == ("caffepystate", "gone") else 6
    )  # without a sidecar it is one of Caffe's snapshots
    assert newest_good(f"{tmp_path}/s") == state_of(tmp_path, expected, FORMATS[form])
    if expected == 6 and (which, how) != ("solverstate", "gone"):
        assert "s_iter_9" in caplog.text
        assert "cannot be resumed from" in caplog.text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("differ", [False, True])
def test_files_of_two_writers_are_taken_only_if_they_belong_together(
    form: str, differ: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of a cut link write the same iteration to a file system that they share, and each
    file is of either.
    """
    both, *sides = (tmp_path / name for name in ("both", "a", "b"))
    for folder, steps, kind in zip(
        (both, *sides), (2, 3, 3), ("SGD", "SGD", "Nesterov"), strict=True
    ):
        folder.mkdir()
        monkeypatch.chdir(folder)
        trained(Path(), f'type: "{kind if differ else "SGD"}" {FORMATS[form]}', steps)
    older, newer = (state_of(both, iteration, FORMATS[form]) for iteration in (2, 3))
    names = sorted(path.name for path in sides[0].glob("s_iter_3.*"))
    assert len(names) == 3
    for chosen in product(sides, repeat=3):
        for name, side in zip(names, chosen, strict=True):
            shutil.copy(side / name, both / name)
        fits = not differ or len(set(chosen)) == 1
        assert newest_good(f"{both}/s") == (newer if fits else older), chosen


def test_explicit_restore_refuses_a_damaged_snapshot(tmp_path: Path) -> None:
    trained(tmp_path)
    damage(tmp_path / "s_iter_3.caffemodel", "flipped")
    with pytest.raises(
        ConfigError, match=r"s_iter_3\.caffemodel: this file was damaged or changed"
    ):
        solver_of("").restore(state_of(tmp_path, 3))


def test_auto_without_snapshots_starts_fresh_and_without_whole_ones_refuses(tmp_path: Path) -> None:
    assert newest_good(f"{tmp_path}/s") is None
    trained(tmp_path)
    assert newest_good(f"{tmp_path}/other") is None
    damage(tmp_path / "s_iter_3.solverstate", "empty")
    with pytest.raises(ConfigError, match="none of the 1 snapshot"):
        newest_good(f"{tmp_path}/s")


def test_auto_takes_caffes_snapshots(tmp_path: Path) -> None:
    for path in SOLVERS.glob("sgd_step_iter_10.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = newest_good(f"{tmp_path}/sgd_step")
    assert found is not None
    damage(Path(found), "truncated")
    other = newest_good(f"{tmp_path}/sgd_step")
    assert other is not None
    assert {Path(found).suffix, Path(other).suffix} == {".solverstate", ".h5"}


def test_sidecar_keeps_trees_and_arrays(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    tree = {
        "a": [1, 2.5, "t", None, True],
        "b": {"c": np.arange(6, dtype=np.uint32).reshape(2, 3), "d": 1 << 100},
    }
    sidecar.write(path, tree)
    back = sidecar.read(path)
    assert back is not None
    np.testing.assert_array_equal(back["b"].pop("c"), tree["b"].pop("c"))  # type: ignore[attr-defined]
    assert back == {"format": 1, **tree}
    assert sidecar.read(str(tmp_path / "y")) is None
    with pytest.raises(ConfigError, match=r"numbers, text and arrays: .* set"):
        sidecar.write(path, {"kept": {1, 2}})
    assert sidecar.read(path).keys() == back.keys()


def test_folder_is_checked(tmp_path: Path) -> None:
    check_folder(f"{tmp_path}/s", total=1 << 10)
    with pytest.raises(ConfigError, match=r"the folder .*/gone of snapshot_prefix does not exist"):
        check_folder(f"{tmp_path}/gone/s")
    with pytest.raises(ConfigError, match="a snapshot takes 1099511627776 MiB, but only"):
        check_folder(f"{tmp_path}/s", total=1 << 60)


def test_a_prefix_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="snapshot_prefix holds a NUL"):
        check_folder("s\0x")


def test_last_names_are_checked_before_training(tmp_path: Path) -> None:
    (tmp_path / "s_iter_5.caffepystate").mkdir()
    with pytest.raises(ConfigError, match=r"s_iter_5.caffepystate, which is a folder"):
        solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/s" ').solve()
    long = solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/{"s" * 240}" ')
    with pytest.raises(ConfigError, match="File name too long"):
        long.solve()
    assert long.iter == 0


@pytest.mark.parametrize("form", FORMATS)
def test_names_as_long_as_the_system_allows(form: str, tmp_path: Path) -> None:
    prefix = "s" * (255 - len("_iter_5.caffepystate.h5"))
    solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/{prefix}" {FORMATS[form]}').solve()
    assert len(list(tmp_path.iterdir())) == 3


def test_limit_of_file_sizes_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (30, 30))
    solver = solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/s" ')
    with pytest.raises(ConfigError, match="this process may write files of 30 bytes only"):
        solver.solve()
    assert solver.iter == 0


@pytest.mark.parametrize("form", FORMATS)
def test_names_that_cannot_be_loaded_again_are_refused(form: str, tmp_path: Path) -> None:
    settings = f'max_iter: 5 snapshot_prefix: "{tmp_path}/s" {FORMATS[form]}'
    twice = NET.replace('name: "in"', 'name: "ip"')
    with pytest.raises(ConfigError, match='several layers are named "ip"'):
        solver_of(settings, twice).solve()
    with pytest.raises(ConfigError, match='several layers are named "ip"'):
        solver_of(f"{settings} snapshot: 3 ", twice)
    (tmp_path / "net.prototxt").write_text(twice.replace("layer {", "\nlayer {").strip())
    with pytest.raises(ConfigError, match=r"several layers are named .ip. \(lines 1, 3\), so"):
        solver_of(f'net: "{tmp_path}/net.prototxt" {settings} snapshot: 3 ')
    unnamed = solver_of(settings, NET.replace('name: "ip"', 'name: ""'))
    if form == "hdf5":
        with pytest.raises(ConfigError, match='HDF5 cannot hold layers of the names ""'):
            unnamed.solve()
    else:
        unnamed.solve()


def test_files_of_killed_runs_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stale = tmp_path / ".s_iter_7.caffemodel.0123456789abcdef.tmp"
    of_others = tmp_path / ".s_best_iter_7.caffemodel.0123456789abcdef.tmp"
    stale.touch()
    of_others.touch()
    with caplog.at_level(logging.INFO):
        solver_of(f'max_iter: 1 snapshot_prefix: "{tmp_path}/s" ').solve()
    assert not stale.exists()
    assert of_others.exists()
    assert f"Removed {stale}, which a killed run left unfinished" in caplog.messages


FED = library.regression(
    library.layer(
        "HDF5Data",
        "in",
        "",
        'hdf5_data_param { source: "SOURCE" batch_size: 2 shuffle: true }',
        top="x y",
    )
)


def fed(folder: Path, settings: str = "", net: str = FED) -> Solver:
    for i in range(3):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["x"], file["y"] = np.random.default_rng(i).random((4, 3)), np.zeros((4, 2))
    (folder / "list").write_text("".join(f"{folder}/{i}.h5\n" for i in range(3)))
    return solver_of(
        f'snapshot_prefix: "{folder}/s" max_iter: 8 {settings}',
        net.replace("SOURCE", f"{folder}/list"),
    )


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


def test_failing_data_does_not_cost_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whole").mkdir()
    whole = fed(tmp_path / "whole")
    whole.solve()
    solver = fed(tmp_path)
    good = {path: path.read_bytes() for path in tmp_path.glob("?.h5")}
    solver.step(3)
    for path in good:
        path.write_bytes(b"")
    with pytest.raises(DataError):
        solver.solve()
    assert "what was learned up to" in caplog.text
    for path, content in good.items():
        path.write_bytes(content)
    resumed = fed(tmp_path)
    resumed.restore(state_of(tmp_path, solver.iter))
    resumed.solve()
    np.testing.assert_array_equal(resumed.params.data, whole.params.data)


def test_an_error_of_one_solver_does_not_cost_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whole").mkdir()
    whole = fed(tmp_path / "whole")
    whole.solve()
    solver = fed(tmp_path)

    def fail(layer: int) -> None:
        if solver.iter == 5:
            raise ZeroDivisionError

    solver.net.before_backward.append(fail)
    with pytest.raises(ZeroDivisionError):
        solver.solve()
    assert "A solver failed; what was learned up to iteration 5 is saved" in caplog.text
    resumed = fed(tmp_path)
    resumed.restore(state_of(tmp_path, 5))
    resumed.solve()
    np.testing.assert_array_equal(resumed.params.data, whole.params.data)


def test_a_layer_that_changes_the_working_directory_moves_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in "here", "there":
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    solver = solver_of('max_iter: 4 snapshot: 2 snapshot_prefix: "s" ')
    solver.net.before_forward.append(lambda layer: os.chdir(tmp_path / "there"))
    solver.solve()
    assert len(list((tmp_path / "here").iterdir())) == 6
    assert not list((tmp_path / "there").iterdir())
    assert solver.resume_state.saved_now == "s_iter_4.solverstate"


def test_an_infinite_history_is_not_saved(tmp_path: Path) -> None:
    solver = solver_of(f'type: "Adam" momentum: 0.9 snapshot_prefix: "{tmp_path}/s" max_iter: 2 ')
    solver.step(1)
    solver.params.split(solver.history[1])[1][0] = np.inf
    with pytest.raises(DivergenceError) as caught:
        solver.solve()
    assert str(caught.value).startswith(
        'iteration 2: the history of parameter 1 of layer "ip" (InnerProduct) is not finite, so no '
        "snapshot is written; lower base_lr"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_in_the_last_test_saves_what_was_trained(
    saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the forward pass that shows the last loss, which takes a batch."""
    settings = (
        f"display: 2 test_iter: 3 test_interval: 4 snapshot_after_train: {str(saves).lower()} "
    )
    contents = {}
    caplog.set_level(logging.INFO)
    for name, ask in ("whole", None), ("stopped", AskAt(16, Action.STOP | Action.SNAPSHOT)):
        (tmp_path / name).mkdir()
        solver = fed(tmp_path / name, settings)
        if ask:
            solver.action = ask
        if not ask and not saves:
            solver.step(8)
            solver.snapshot()
        else:
            solver.solve()
        assert solver.stopped == bool(ask)
        contents[name] = sidecar.read(str(tmp_path / name / "s_iter_8.caffepystate"))
    whole, stopped = contents["whole"], contents["stopped"]
    assert whole
    assert stopped
    np.testing.assert_equal(stopped["positions"]["net"], whole["positions"]["net"])
    np.testing.assert_equal(stopped["positions"]["rng"], whole["positions"]["rng"])
    held = f"{tmp_path}/stopped/s_iter_8.solverstate holds this iteration"
    assert (held in caplog.messages) == saves


WRONG_CONTENT: list[Any] = [
    None,
    -1,
    1e30,
    "x",
    [],
    {},
    10**30,
    [1, 2],
    {"a": 1},
    float("nan"),
    np.zeros(3),
]


def test_sidecars_of_wrong_content_are_named_and_change_nothing(tmp_path: Path) -> None:
    """Every entry replaced or removed: it is taken up or refused, and after that the solver still
    works.
    """
    fed(tmp_path).solve()
    path, state = str(tmp_path / "s_iter_8.caffepystate"), state_of(tmp_path, 8)
    content = sidecar.read(path)
    assert content
    solver = fed(tmp_path)
    rng = np.random.default_rng(6)
    for keys in list(_entries(content)):
        broken = copy.deepcopy(content)
        inner: Any = broken
        for key in keys[:-1]:
            inner = inner[key]
        if rng.random() < 0.3:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = WRONG_CONTENT[rng.integers(len(WRONG_CONTENT))]
        broken.pop("format", None)
        sidecar.write(path, broken)
        before = solver.iter, solver.params.data.copy(), solver.net.state()
        try:
            solver.restore(state)
        except CaffeError:
            assert solver.iter == before[0]
            np.testing.assert_array_equal(solver.params.data, before[1])
            np.testing.assert_equal(solver.net.state(), before[2])
        solver.step(1)


def test_a_sidecar_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    trained(tmp_path)
    path = tmp_path / "s_iter_3.caffepystate"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: it is a pipe or a device"):
        solver_of("max_iter: 100 ").restore(state_of(tmp_path, 3))


def test_an_hdf5_state_does_not_say_when_it_was_written(tmp_path: Path) -> None:
    trained(tmp_path, FORMATS["hdf5"])
    with h5py.File(tmp_path / "s_iter_3.solverstate.h5") as file:
        assert h5py.h5o.get_info(file["learned_net"].id).ctime == 0


@pytest.mark.parametrize("workers", [1, [1], [{"net": {}}], ["x"]])
def test_workers_positions_are_checked_before_any_worker_takes_them(
    workers: Any, tmp_path: Path
) -> None:
    trained(tmp_path)
    path, state = str(tmp_path / "s_iter_3.caffepystate"), state_of(tmp_path, 3)
    content = sidecar.read(path)
    assert content
    content["positions"]["workers"] = workers
    del content["format"]
    sidecar.write(path, content)
    with pytest.raises(ConfigError, match=r"this \.caffepystate file is damaged"):
        solver_of("max_iter: 100 ").restore(state)


def _entries(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, item in items:
        yield (*keys, key)
        yield from _entries(item, (*keys, key))


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


def test_folder_is_checked_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="snapshot_prefix: the folder"):
        solver_of(f'snapshot: 5 snapshot_prefix: "{tmp_path}/gone/s" ')
    solver = solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/gone/s" ')
    with pytest.raises(ConfigError, match="does not exist"):
        solver.solve()
    assert solver.iter == 0


def test_unwritable_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        check_folder(f"{tmp_path}/s")


def test_failing_snapshot_costs_the_snapshot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    solver = solver_of(f'max_iter: 6 snapshot: 2 snapshot_prefix: "{tmp_path}/s" ')
    solver.step(2)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_write_binary", full)
        solver.step(2)
    assert "No snapshot of iteration 4" in caplog.text
    assert (
        "s_iter_4.solverstate: this file of a snapshot cannot be written: No space left on device"
        in caplog.text
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == whole
    solver.step(2)
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("seed", range(12))
def test_of_what_is_kept_the_newest_can_be_resumed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever snapshots fail, and in whichever of their files: the last whole ones are there."""
    draw = np.random.default_rng(seed)
    keep = int(draw.integers(1, 4))
    solver = solver_of(f'max_iter: 100 snapshot: 1 snapshot_prefix: "{tmp_path}/s" ')
    solver.resume_state.keep = keep
    whole = [1]
    solver.step(1)
    for _ in range(12):
        fails = draw.random() < 0.5
        writer = ("write_binary", "_write_binary", "replacing_all")[draw.integers(3)]

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(snapshot, writer, full)
            solver.step(1)
        if not fails:
            whole.append(solver.iter)
        assert newest_good(f"{tmp_path}/s") == state_of(tmp_path, whole[-1])
        left = sorted(int(path.stem.rpartition("_")[2]) for path in tmp_path.glob("*.solverstate"))
        assert left == whole[-keep:]
        assert len(list(tmp_path.iterdir())) == 3 * len(left)
    assert 1 < len(whole) < 13


def test_failing_last_snapshot_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = solver_of(f'max_iter: 2 snapshot: 2 snapshot_prefix: "{tmp_path}/s" ')

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "_write_binary", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        solver.solve()
    assert not list(tmp_path.iterdir())


FULL = """
import resource, signal, sys
from tests.solver.cases import solver_of
from caffepy.core.errors import CaffeError, ConfigError, DataError
solver = solver_of(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
try:
    solver.snapshot()
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("form", FORMATS)
def test_full_disk_is_one_message(form: str, tmp_path: Path) -> None:
    settings = f'snapshot_prefix: "{tmp_path}/s" {FORMATS[form]}'
    command = [sys.executable, "-c", FULL, settings]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert run.returncode == 1
    assert "this file of a snapshot cannot be written: " in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from tests.solver.cases import solver_of
solver = solver_of(sys.argv[1])
print("ready", flush=True)
while True:
    solver.step(1)
    solver.snapshot()
"""


KILLED = """
import os, signal, sys
from pathlib import Path
from caffepy.solver import newest_good, snapshot
from tests.solver.cases import solver_of

folder = Path(sys.argv[1]).parent
settings = f'snapshot_prefix: "{sys.argv[1]}" {sys.argv[2]}'
files = lambda: {p.name: p.read_bytes() for p in folder.glob("s_iter*") if "caffepy" not in p.name}
old, new = solver_of(settings), solver_of(settings + "random_seed: 8 ")
new.snapshot()
written = files()
kinds = []
for point in range(1, 100):
    old.snapshot()
    before = files()
    if not (child := os.fork()):
        calls = 0
        def killing(call):
            def count(*args):
                global calls
                calls += 1
                if calls == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args)
            return count
        os.replace, os.fsync = killing(os.replace), killing(os.fsync)
        new.snapshot()
        os._exit(0)
    if not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        break
    snapshot.clean(sys.argv[1])
    left = files()
    assert left in (before, written), point
    assert newest_good(sys.argv[1]), "its sidecar has other checksums"
    assert len(list(folder.iterdir())) == 3
    kinds.append(left == written)
print(*kinds)
"""


@pytest.mark.parametrize("form", FORMATS)
def test_a_snapshot_that_is_killed_while_it_replaces_another_leaves_one_of_both(
    form: str, tmp_path: Path
) -> None:
    """Killed before each fsync and each rename."""
    command = [sys.executable, "-c", KILLED, f"{tmp_path}/s", FORMATS[form]]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert not run.returncode, run.stderr
    kinds = run.stdout.split()
    assert sorted(kinds) == kinds, "first the old one, then the new one"
    assert (kinds.count("False"), kinds.count("True")) == (4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_killed_snapshots_are_whole_or_absent(form: str, tmp_path: Path) -> None:
    """After each of CAFFEPY_KILLS kills, every file under its final name must load."""
    settings = f'snapshot_prefix: "{tmp_path}/s" snapshot_diff: true {FORMATS[form]}'
    rng = np.random.default_rng()
    for _ in range(int(os.environ.get("CAFFEPY_KILLS", "4"))):
        command = [sys.executable, "-c", WRITER, settings]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            try:
                writer.wait(rng.uniform(0.005, 0.3))
            except subprocess.TimeoutExpired:
                writer.kill()
            assert writer.wait() == -9
        _check_all(tmp_path, settings)


def _check_all(folder: Path, settings: str) -> None:
    solver = solver_of(settings)
    for path in folder.glob("s_iter_*"):
        if ".caffemodel" in path.name:
            model = solver_of(f'{settings} weights: "{path}" ')
            assert np.isfinite(model.params.data).all()
        elif ".solverstate" in path.name:
            solver.restore(str(path))
            assert solver.iter == int(path.name.split("_")[2].split(".")[0])
        else:
            assert sidecar.read(str(path)) is not None
    for path in folder.iterdir():
        assert path.name.startswith("s_iter_") or path.name.endswith(".tmp"), path
        path.unlink()


def test_sidecar_of_another_format_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    trained(tmp_path, FORMATS["hdf5"])
    with caplog.at_level(logging.WARNING):
        solver_of("").restore(state_of(tmp_path, 3))
    assert "it is ignored" in caplog.text


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
    rng = np.random.default_rng(4)
    for _ in range(150):
        broken = bytearray(content)
        for place in rng.integers(len(broken), size=rng.integers(1, 4)):
            broken[place] = rng.integers(256)
        path.write_bytes(broken[: rng.integers(len(broken) + 1) if rng.random() < 0.3 else None])
        with suppress(ConfigError):
            sidecar.read(str(path)) if name == "x.caffepystate" else snapshot.read_state(str(path))

"""The public names of caffepy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import caffepy
from caffepy import models


def test_dir_shows_the_public_names_alone() -> None:
    names = dir(caffepy)
    assert {"Net", "TrainOptions", "train", "ConfigError", "io", "layer_type_list"} <= {*names}
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    assert not {"os", "import_module", "add_names", "core", "TYPE_CHECKING"} & {*names}
    for name in names:
        assert getattr(caffepy, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(caffepy.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.dump(node))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: home for name, home in seen.items() if name in caffepy._homes} == caffepy._homes
    assert {
        name: f"{home}.{name}" for name, home in seen.items() if name not in caffepy._homes
    } == caffepy._MODULES


def test_a_star_leaves_a_scripts_time_alone() -> None:
    assert not {"train", "test", "time"} & {*caffepy.__all__}


def test_importing_loads_nothing_that_takes_long() -> None:
    script = "import caffepy, sys; caffepy.ConfigError; print({'numpy', 'numba', 'cv2'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_training_and_testing_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = models.path("digits", "train_val")
    Path("solver.prototxt").write_text(
        f'net: "{net}" base_lr: 0.01 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "run" '
        "test_iter: 1 test_interval: 10 random_seed: 1"
    )
    result = caffepy.train(caffepy.TrainOptions("solver.prototxt", progress=False))
    assert result.iteration == 2
    assert result.snapshot == "run_iter_2.solverstate"
    score = caffepy.test(str(net), ["run_iter_2.caffemodel"], iterations=2)
    assert score.iterations == 2
    with pytest.raises(caffepy.UsageError, match="not both"):
        caffepy.train(caffepy.TrainOptions("solver.prototxt", gpu="0", cpu=1))

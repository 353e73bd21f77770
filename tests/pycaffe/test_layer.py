import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import caffepy

NET = """
layer { name: "data" type: "Python" top: "x" top: "y" python_param { module: "mine" layer: "Pairs" param_str: "3" } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip"
  inner_product_param { num_output: 1 weight_filler { type: "gaussian" } } }
layer { name: "loss" type: "Python" bottom: "ip" bottom: "y" top: "loss" loss_weight: 1
  python_param { module: "mine" layer: "Euclidean" } }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.5 lr_policy: "fixed" display: 0 max_iter: 100 snapshot_prefix: "run"'
MINE = """
import caffe
import numpy as np


class Pairs(caffe.Layer):
    def setup(self, bottom, top):
        self.rng = np.random.default_rng(int(self.param_str))
        assert self.param_str_ == self.param_str == "3"
        assert (self.type, self.phase) == ("Python", caffe.TRAIN)
        self.slope = None

    def set_slope(self, slope):
        self.slope = slope

    def reshape(self, bottom, top):
        top[0].reshape(8, 2)
        top[1].reshape(8, 1)

    def forward(self, bottom, top):
        top[0].data[...] = self.rng.uniform(-1, 1, (8, 2))
        top[1].data[...] = top[0].data @ self.slope

    def backward(self, top, propagate_down, bottom):
        pass


class Euclidean(caffe.Layer):
    def __init__(self, param):
        super().__init__(param)
        self.name = param.name

    def reshape(self, bottom, top):
        if bottom[0].count != bottom[1].count:
            raise Exception("Inputs must have the same dimension.")
        self.diff = np.zeros_like(bottom[0].data)
        top[0].reshape(1)

    def forward(self, bottom, top):
        self.diff[...] = bottom[0].data - bottom[1].data
        top[0].data[...] = np.sum(self.diff**2) / bottom[0].num / 2

    def backward(self, top, propagate_down, bottom):
        for i, sign in enumerate((1, -1)):
            if propagate_down[i]:
                bottom[i].diff[...] = sign * top[0].diff * self.diff / bottom[i].num
"""
SCRIPT = """
import sys
import numpy as np
import caffepy as caffe

solver = caffe.get_solver("solver.prototxt")
data, ip, loss = solver.net.layers
assert isinstance(data, caffe.Layer) and isinstance(loss, caffe.Layer) and loss.name == "loss"
assert solver.net.layer_dict["data"] is data
assert ip.type == "InnerProduct" and len(ip.blobs) == 2
data.set_slope(np.array([[2], [-1]]))
solver.step(100)
np.testing.assert_allclose(solver.net.params["ip"][0].data, [[2, -1]], atol=0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"net.prototxt": NET, "solver.prototxt": SOLVER, "mine.py": MINE}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, script: str, path: str = "") -> str:
    """Return the output of a script in a process that finds caffepy and the modules in `path`."""
    root = str(Path(caffepy.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, root]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_net_of_python_layers_learns(folder: Path) -> None:
    run(folder, SCRIPT)


ALIASES = """
import caffe.proto.caffe_pb2
from caffe.proto import caffe_pb2
from caffe import proto
import caffepy.proto.caffe_pb2 as ours
assert caffe_pb2 is caffe.proto.caffe_pb2 is ours is proto.caffe_pb2
assert caffe_pb2.__spec__.name == "caffepy.proto.caffe_pb2"
try:
    import caffe.nothing
except ModuleNotFoundError as error:
    assert error.name == "caffe.nothing"
"""


def test_caffe_in_user_code_is_caffepy(folder: Path) -> None:
    (folder / "mine.py").write_text(ALIASES + MINE)
    (folder / "caffe").mkdir()  # such as a checkout of Caffe's sources
    run(folder, SCRIPT + "assert sys.modules['caffe'] is caffe\n")


def test_caffe_itself_is_left_alone(folder: Path) -> None:
    (folder / "python" / "caffe").mkdir(parents=True)
    (folder / "python" / "caffe" / "__init__.py").write_text(
        "import caffepy\nLayer, TRAIN = caffepy.Layer, 0\n"
    )
    run(folder, SCRIPT + "assert sys.modules['caffe'] is not caffe\n", str(folder / "python"))


def test_a_caffe_that_cannot_be_imported_is_passed_over(folder: Path) -> None:
    (folder / "python" / "caffe").mkdir(parents=True)
    (folder / "python" / "caffe" / "__init__.py").write_text(
        "from . import io\nfrom . import _caffe\n"
    )
    (folder / "python" / "caffe" / "io.py").touch()
    more = "assert sys.modules['caffe'] is caffe\nassert 'caffe.io' not in sys.modules\n"
    run(folder, SCRIPT + more, str(folder / "python"))


def test_the_command_says_where_user_code_failed(folder: Path) -> None:
    (folder / "mine.py").write_text(MINE.replace("self.slope = None", "self.slope = 1 / 0"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "caffepy",
            "train",
            "-solver",
            "solver.prototxt",
            "-minloglevel",
            "1",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(caffepy.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    file = folder / "mine.py"
    assert done.returncode == 3
    assert done.stderr == (
        f'caffepy: error: net.prototxt:2:1: layer "data" (Python): {file}:11: in setup: '
        "ZeroDivisionError: division by zero\n"
    )


class Failing:
    """A layer whose method named in param_str raises; "worker" is forward, in a worker only."""

    error: BaseException
    param_str: str

    def setup(self, bottom: object, top: object) -> None:
        self.fail("setup")

    def reshape(self, bottom: object, top: Any) -> None:
        self.fail("reshape")
        top[0].reshape(1)

    def forward(self, bottom: object, top: object) -> None:
        self.fail("forward")
        if threading.current_thread() is not threading.main_thread():
            self.fail("worker")

    def backward(self, top: object, propagate_down: object, bottom: object) -> None:
        self.fail("backward")

    def fail(self, method: str) -> None:
        if method == self.param_str:
            raise Failing.error


FAILING = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 1 } }
layer { name: "fail" type: "Python" bottom: "ip" top: "y" loss_weight: 1
  python_param { module: "tests.pycaffe.test_layer" layer: "Failing" param_str: "%s" } }
"""
ERRORS = [KeyError("x"), ValueError("no"), StopIteration(), SystemExit(0)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["setup", "reshape", "forward", "backward", "step", "worker"])
def test_scripts_get_the_error_that_a_layer_raised(
    method: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "error", error, raising=False)
    path, solver_path = tmp_path / "net.prototxt", tmp_path / "solver.prototxt"
    path.write_text(FAILING % method.replace("step", "backward"))
    solver_path.write_text(f'net: "{path}" base_lr: 0.1 lr_policy: "fixed" display: 0')
    with pytest.raises(type(error)) as caught:
        _run(method, path, solver_path)
    assert caught.value is error
    assert error.__cause__ is None
    assert 'layer "fail" (Python): ' in error.__notes__[-1]
    assert f"{type(error).__name__}" in error.__notes__[-1]


def _run(method: str, path: Path, solver_path: Path) -> None:
    if method in ("step", "worker"):
        solver = caffepy.get_solver(solver_path)
        if method == "step":
            solver.step(1)
        with solver.together(cpus=2):
            solver.step(1)
    net = caffepy.Net(path, caffepy.TRAIN)
    net.forward()
    net.backward()

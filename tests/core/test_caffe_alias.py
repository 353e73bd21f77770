import os
import subprocess
import sys
from pathlib import Path

import pytest

import caffepy

ROOT = Path(caffepy.__file__).parents[1]
ONE_SET = """
import pickle
import sys
import caffe
import caffe.io
import caffe.draw, caffe.coord_map
import caffe.net_spec as spec
from caffe import layers as L, params as P, to_proto
from caffe.classifier import Classifier
from caffe.proto import caffe_pb2
from caffe.pycaffe import Net, SGDSolver
from caffe._caffe import layer_type_list
import caffepy
import caffepy.coord_map, caffepy.io, caffepy.net_spec, caffepy.pycaffe.net
assert caffe is caffepy and caffe.io is caffepy.io is sys.modules["caffe.io"] and spec is caffepy.net_spec
assert caffepy.io is sys.modules["caffepy.pycaffe.io"] is sys.modules["caffepy.io"]
assert caffe_pb2 is caffepy.proto.caffe_pb2 is sys.modules["caffepy.proto.caffe_pb2"]
assert Net is caffe.Net is caffepy.pycaffe.net.Net and Classifier is caffe.Classifier and L is spec.layers
assert caffe.coord_map.crop is caffepy.coord_map.crop
assert isinstance(pickle.loads(pickle.dumps(caffe.io.Transformer({"x": (1, 3, 2, 2)}))), caffepy.io.Transformer)
assert pickle.loads(pickle.dumps(caffe_pb2.Datum(label=3))).label == 3
assert [int(x) for x in caffe.__version__.split(".")] >= [0, 1]
assert {"Net", "SGDSolver", "io", "draw", "layers", "TEST", "__version__"} <= {*dir(caffe)}
try:
    import caffe.nothing
except ModuleNotFoundError as error:
    assert error.name == "caffe.nothing"
else:
    raise AssertionError
"""


def run(
    folder: Path, *arguments: str, path: str = "", **variables: str
) -> "subprocess.CompletedProcess[str]":
    """A Python process in `folder` that finds caffepy as it lies."""
    search = os.pathsep.join(filter(None, [path, str(ROOT)]))
    environment = {key: value for key, value in os.environ.items() if key != "CAFFEPY_AS_CAFFE"}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": search, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def passes(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, done.stderr


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a `caffe` that must not be found: a checkout whose extension was never
    compiled.
    """
    (tmp_path / "caffe" / "test").mkdir(parents=True)
    (tmp_path / "caffe" / "__init__.py").write_text("from ._caffe import Net\n")
    (tmp_path / "caffe" / "io.py").write_text("raise AssertionError\n")
    return tmp_path


def test_help_tells_how_to_run_a_script(elsewhere: Path) -> None:
    done = run(elsewhere, "-m", "caffepy.as_caffe", "--help")
    passes(done)
    assert "python -m caffepy.as_caffe script.py ARGUMENTS" in done.stdout


def test_installed_by_a_call(elsewhere: Path) -> None:
    passes(
        run(
            elsewhere,
            "-c",
            "import caffepy; caffepy.install_as_caffe(); caffepy.install_as_caffe()" + ONE_SET,
        )
    )


def test_it_takes_the_place_of_a_caffe_that_was_imported(elsewhere: Path) -> None:
    (elsewhere / "caffe" / "__init__.py").write_text("")
    (elsewhere / "caffe" / "io.py").write_text("")
    passes(run(elsewhere, "-c", "import caffe.io, caffepy; caffepy.install_as_caffe()" + ONE_SET))


@pytest.mark.parametrize("value", ["1", "yes"])
def test_installed_by_the_environment_when_caffepy_is_imported(elsewhere: Path, value: str) -> None:
    passes(run(elsewhere, "-c", "import caffepy" + ONE_SET, CAFFEPY_AS_CAFFE=value))


def test_what_import_caffe_brings(tmp_path: Path) -> None:
    names = (
        "classifier detector io net_spec proto.caffe_pb2 pycaffe Net SGDSolver layers params "
        "NCCL Timer TRAIN"
    )
    for name in names.split():
        passes(run(tmp_path, "-c", f"import caffepy as caffe; caffe.{name}"))


@pytest.mark.parametrize("value", ["", "0"])
def test_otherwise_caffe_is_not_touched(elsewhere: Path, value: str) -> None:
    script = "import sys, caffepy, caffepy.io\nassert 'caffe' not in sys.modules"
    passes(run(elsewhere, "-c", script, CAFFEPY_AS_CAFFE=value))


def test_the_line_that_python_runs_at_its_start(elsewhere: Path) -> None:
    """setup.py puts it beside the package; site-packages stands for that here."""
    line = next(
        line for line in (ROOT / "setup.py").read_text().splitlines() if line.startswith("LINE")
    )
    values: dict[str, str] = {}
    exec(line, values)
    packages = elsewhere / "packages"
    packages.mkdir()
    (packages / "caffepy_as_caffe.pth").write_text(values["LINE"])
    start = f"import site; site.addsitedir({str(packages)!r})"
    passes(run(elsewhere, "-c", start + ONE_SET, CAFFEPY_AS_CAFFE="1"))
    passes(run(elsewhere, "-c", f"{start}\nimport sys; assert 'caffepy' not in sys.modules"))


def test_modules_that_others_put_into_a_caffe_are_found(elsewhere: Path) -> None:
    (elsewhere / "caffe" / "model_libs.py").write_text(
        "import caffe\nfrom caffe import layers as L\nSIZE = 3\n"
    )
    (elsewhere / "caffe" / "test" / "test_it.py").write_text("import caffe.io\n")
    more = """
from caffe.model_libs import SIZE, L
import caffe.test.test_it
assert SIZE == 3 and L is caffe.layers and caffe.test.test_it.caffe is caffe is caffepy
"""
    passes(run(elsewhere, "-c", "import caffepy; caffepy.install_as_caffe()" + ONE_SET + more))


SCRIPT = "import sys, caffe, caffepy, beside; assert caffe is caffepy; print(sys.argv, __name__)"


def test_scripts_and_modules_are_run(elsewhere: Path) -> None:
    folder = elsewhere / "scripts"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "script.py").write_text(SCRIPT)
    for variables in ({}, {"CAFFEPY_AS_CAFFE": "1"}):
        done = run(elsewhere, "-m", "caffepy.as_caffe", "scripts/script.py", "-x", "1", **variables)
        passes(done)
        assert done.stdout == "['scripts/script.py', '-x', '1'] __main__\n"
    done = run(folder, "-m", "caffepy.as_caffe", "-m", "script", "-x")
    passes(done)
    assert done.stdout == f"['{folder / 'script.py'}', '-x'] __main__\n"


def test_what_a_script_starts_knows_caffe_too(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, '-c', 'import caffepy, caffe; assert caffe "
        "is caffepy']))\n"
    )
    passes(run(tmp_path, "-m", "caffepy.as_caffe", "parent.py"))


def test_without_a_script_it_tells_how_it_is_used(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "caffepy.as_caffe")
    assert done.returncode == 1
    assert "usage: python -m caffepy.as_caffe SCRIPT" in done.stderr
    done = run(tmp_path, "-m", "caffepy.as_caffe", "gone.py")
    assert done.returncode == 1
    assert done.stderr.startswith("there is no script gone.py; usage: ")

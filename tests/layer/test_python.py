import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from caffepy.core import python_modules
from caffepy.core.errors import ConfigError, DataError
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.net.weights import load_weights, save_binary, save_hdf5
from caffepy.proto.caffe_pb2 import TEST, TRAIN
from tests.net.nets import INPUT, definition, ip

from .harness import check_gradient, random

LAYER = """
layer { name: "%s" type: "Python" %s top: "%s" %s
  python_param { module: "%s" layer: "%s" param_str: "%s" } }
"""
MODULE = """
import numpy as np


class Affine:
    '''w * x + sum of its parameters and of a constant'''

    def setup(self, bottom, top):
        self.factor = float(self.param_str or 1)
        if len(self.blobs) == 0:
            self.blobs.add_blob(2)

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = self.factor * bottom[0].data + self.blobs[0].data.sum()

    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[...] += top[0].diff.sum()
        if propagate_down[0]:
            bottom[0].diff[...] = self.factor * top[0].diff


class Loss(object):
    def reshape(self, bottom, top):
        top[0].reshape()

    def forward(self, bottom, top):
        top[0].data[...] = (bottom[0].data ** 2).sum() / 2

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff * bottom[0].data


def make():
    return 3


class Growing:
    n = 0

    def reshape(self, bottom, top):
        self.n += 1
        top[0].reshape(self.n, 1)

    def forward(self, bottom, top):
        top[0].data[...] = self.n
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules that a test imported from its folder."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.setattr(python_modules, "_beside", python_modules._Beside())
    yield
    forget(tmp_path)


def forget(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def python(
    layer: str,
    bottom: str = "x",
    top: str = "z",
    more: str = "",
    string: str = "",
    module: str = "mine",
) -> str:
    bottoms = f'bottom: "{bottom}"' if bottom else ""
    return LAYER % (layer.lower(), bottoms, top, more, module, layer, string)


def beside(
    folder: Path, text: str, code: str = MODULE, name: str = "mine.py", **kwargs: object
) -> Net:
    """The net of this text, in a file beside the module `name`."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(dedent(code))
    path = folder / "net.prototxt"
    path.write_text(text)
    return Net(definition(text), device=Device(seed=1), path=str(path), **kwargs)  # type: ignore[arg-type]


def test_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    check_gradient(
        'type: "Python" python_param { module: "mine" layer: "Affine" param_str: "3" }',
        random(2, 3),
    )
    check_gradient(
        'type: "Python" loss_weight: 2 python_param { module: "mine" layer: "Loss" }', random(2, 3)
    )


def test_a_net_with_python_layers_learns(tmp_path: Path) -> None:
    text = (
        INPUT
        + ip("a", "x", "a")
        + python("Affine", "a", string="2")
        + python("Loss", "z", "l", "loss_weight: 3")
    )
    net = beside(tmp_path, text)
    x = random(4, 3).astype(np.float32)
    net.blobs["x"].data[...] = x
    net.layers[2].blobs[0].data[...] = (0.5, 1)
    net.forward()
    weight = net.layers[1].blobs[0]
    z = 2 * x @ weight.data.T + 1.5
    assert net.loss() == pytest.approx(3 * (z**2).sum() / 2, rel=1e-5)
    net.clear_param_diffs()
    net.backward()
    net.backward()
    np.testing.assert_allclose(net.layers[2].blobs[0].diff, 2 * 3 * z.sum() * np.ones(2), rtol=1e-4)
    np.testing.assert_allclose(weight.diff, 2 * 3 * 2 * z.T @ x, rtol=1e-4)
    assert [blob.shape for blob in net.learnable_params] == [(5, 3), (5,), (2,)]


@pytest.mark.parametrize("suffix", ["caffemodel", "caffemodel.h5"])
def test_parameters_are_saved_and_loaded(suffix: str, tmp_path: Path) -> None:
    net = beside(tmp_path, INPUT + python("Affine"))
    net.layers[1].blobs[0].data[...] = (3, 4)
    path = str(tmp_path / f"net.{suffix}")
    (save_hdf5 if suffix.endswith("h5") else save_binary)(net, path)
    again = beside(tmp_path, INPUT + python("Affine"))
    load_weights(again, path)
    assert again.layers[1].blobs[0].data.tolist() == [3, 4]


def test_blobs_of_the_prototxt_are_there_before_setup(tmp_path: Path) -> None:
    net = beside(tmp_path, INPUT + python("Affine", more="blobs { shape { dim: 2 } data: [5, 6] }"))
    assert [blob.data.tolist() for blob in net.layers[1].blobs] == [[5, 6]]


def test_reshape_runs_before_every_forward(tmp_path: Path) -> None:
    net = beside(tmp_path, python("Growing", bottom=""))
    assert net.blobs["z"].shape == (1, 1)
    for n in (2, 3):
        net.forward()
        assert net.blobs["z"].data.tolist() == [[n]] * n


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_param_str_and_phase(phase: int, tmp_path: Path) -> None:
    code = """
    class Seen:
        def setup(self, bottom, top):
            assert type(self.param_str) is str
            self.seen = self.param_str, self.phase, len(bottom), [b.shape for b in bottom]
        def reshape(self, bottom, top): top[0].reshape(1)
        def forward(self, bottom, top): pass
    """
    state = "state { phase: %s } " % ("TEST" if phase == TEST else "TRAIN")
    net = beside(tmp_path, state + INPUT + python("Seen", string="{'a': [1, 2]}"), code)
    assert net.layers[1].instance.seen == ("{'a': [1, 2]}", phase, 1, [(4, 3)])  # type: ignore[attr-defined]


def test_workers_use_the_roots_object_if_told_so(tmp_path: Path) -> None:
    text = INPUT + python("Affine")
    shared = text.replace('module: "mine"', 'module: "mine" share_in_parallel: true')
    for definition_text, same in ((text, False), (shared, True)):
        root = beside(tmp_path, definition_text)
        worker = Net(
            definition(definition_text), device=Device(seed=2), path=root.path, root_net=root
        )
        assert (worker.layers[1] is root.layers[1]) == same
        assert len(worker.layers[1].blobs) == 1
        worker.blobs["x"].data[...] = 1
        worker.forward()
        assert worker.blobs["z"].data.tolist() == [[1] * 3] * 4


# where modules are found


def constant(value: int) -> str:
    return f"""
    class Constant:
        def reshape(self, bottom, top): top[0].reshape(1)
        def forward(self, bottom, top): top[0].data[...] = {value}
    """


def value_of(net: Net) -> float:
    net.forward()
    return float(net.blobs["z"].data[0])


def test_sys_path_comes_first_then_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = python("Constant", bottom="", module="mine")
    places = [tmp_path / name for name in ("python", "work")]
    for i, place in enumerate(places):
        place.mkdir()
        (place / "mine.py").write_text(dedent(constant(i)))
    assert value_of(beside(tmp_path / "net", text, constant(2))) == 2
    monkeypatch.chdir(places[1])
    forget(tmp_path)
    assert value_of(beside(tmp_path / "net", text, constant(2))) == 1
    forget(tmp_path)
    monkeypatch.syspath_prepend(str(places[0]))
    assert value_of(beside(tmp_path / "net", text, constant(2))) == 0


def test_folders_do_not_mix(tmp_path: Path) -> None:
    code = "from sibling import Constant\n"
    text = python("Constant", bottom="")
    nets = []
    path = list(sys.path)
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "sibling.py").write_text(dedent(constant(i)))
        nets.append(beside(folder, text, code))
    nets.append(Net(definition(text), path=nets[0].path))
    assert [value_of(net) for net in nets] == [0, 1, 0]
    assert nets[2].layers[0].instance.__class__ is nets[0].layers[0].instance.__class__  # type: ignore[attr-defined]
    assert sys.path == path


def test_packages_and_imports_at_run_time(tmp_path: Path) -> None:
    code = """
    class Late:
        def reshape(self, bottom, top): top[0].reshape(1)
        def forward(self, bottom, top):
            import value
            top[0].data[...] = value.VALUE
    """
    (tmp_path / "value.py").write_text("VALUE = 7")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    text = python("Late", bottom="", module="package.inner")
    assert value_of(beside(tmp_path, text, code, "package/inner.py")) == 7


def test_a_class_of_the_running_script(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, type] = {}
    exec(dedent(constant(5)), {"__name__": "__main__"}, names)
    monkeypatch.setattr(sys.modules["__main__"], "Constant", names["Constant"], raising=False)
    assert value_of(Net(definition(python("Constant", bottom="", module="__main__")))) == 5


# what can be wrong

WRONG = {
    "no such module": (
        python("Affine", module="mien"),
        r'net.prototxt:2:1: layer "affine" \(Python\): no Python module "mien", '
        r'did you mean "mine"\? '
        r"\(looked on sys.path and in .* and .*\)",
    ),
    "no such package": (python("Affine", module="min.inner"), 'no Python module "min.inner"'),
    "no module named": (
        python("Affine", module=""),
        'python_param needs "module", the name of a Python module',
    ),
    "no such class": (
        python("Afine"),
        r'module "mine" \(.*mine.py\) has no class "Afine", did you mean "Affine"\?',
    ),
    "no forward": (python("Bare"), r'class "Bare" \(.*mine.py\) has no method "forward"'),
    "a function of C": (
        python("getcwd", module="posix"),
        r'"getcwd" \(posix\) is a function, not a class',
    ),
    "a function that makes no layer": (
        python("make"),
        r'what "make" returns \(.*mine.py\) has no method "reshape"',
    ),
    "in setup": (
        python("Affine", string="three"),
        r'net.prototxt:2:1: layer "affine" \(Python\): .*mine.py:9: in setup: '
        r"ValueError: could not convert string to float: 'three'",
    ),
    "a shape that no blob has": (
        python("Bad"),
        r"mine.py:\d+: in reshape: ConfigError: blob shape -3 \(-3\)",
    ),
    "inside a library": (
        python("Deep"),
        r"mine.py:\d+: in inner: LinAlgError: .*",
    ),
}
MORE = """
class Bare:
    def reshape(self, bottom, top): pass


class Bad(Bare):
    def reshape(self, bottom, top): top[0].reshape(-3)
    def forward(self, bottom, top): pass


def inner():
    np.linalg.inv(np.zeros((2, 2)))


class Deep(Bare):
    def setup(self, bottom, top): inner()
    def forward(self, bottom, top): pass
"""


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, tmp_path: Path) -> None:
    layer, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as caught:
        beside(tmp_path, INPUT + layer, MODULE + MORE)
    assert str(caught.value).count("net.prototxt") == 1


def test_errors_of_the_module_itself(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mine.py:2: ModuleNotFoundError: No module named 'nowhere'"
    ):
        beside(tmp_path, python("A", bottom=""), "\nimport nowhere\n")
    with pytest.raises(ConfigError, match=r"mine.py:3: SyntaxError: "):
        beside(tmp_path / "other", python("A", bottom=""), "\n\nclass A(\n")


def test_the_place_is_in_user_code_though_python_goes_deeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import importlib\nimportlib.import_module('nowhere')"
    with pytest.raises(
        ConfigError, match=r"mine.py:2: ModuleNotFoundError: No module named 'nowhere'"
    ):
        beside(tmp_path, python("A", bottom=""), code)


ERRORS = [
    "KeyError('x')",
    "RuntimeError('no')",
    "StopIteration()",
    "AssertionError()",
    "SystemExit(5)",
    "GeneratorExit()",
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_while_the_net_runs_keeps_its_cause(error: str, tmp_path: Path) -> None:
    code = f"""
    class Raising:
        def reshape(self, bottom, top): top[0].reshape(1)
        def forward(self, bottom, top):
            raise {error}
        def backward(self, top, propagate_down, bottom):
            raise {error}
    """
    net = beside(tmp_path, "force_backward: true " + INPUT + python("Raising"), code)
    original = eval(error)
    said = re.escape(f": {original}" if str(original) else "")
    for run, line in ((net.forward, 5), (net.backward, 7)):
        name = type(original).__name__
        place = rf'layer "raising" \(Python\): .*mine.py:{line}: in {run.__name__}: {name}{said}$'
        with pytest.raises(RuntimeError, match=place) as caught:
            run()
        assert type(caught.value.__cause__) is type(original)


def test_caffes_own_errors_keep_their_kind(tmp_path: Path) -> None:
    code = """
    from caffepy.core.errors import DataError
    class Raising:
        def reshape(self, bottom, top):
            raise DataError("no picture")
        def forward(self, bottom, top): pass
    """
    with pytest.raises(DataError, match=r"mine.py:5: in reshape: DataError: no picture"):
        beside(tmp_path, python("Raising", bottom=""), code)


def test_no_backward_is_an_error_only_where_it_is_needed(tmp_path: Path) -> None:
    net = beside(tmp_path, INPUT + python("Growing"))
    net.forward()
    net.backward()
    net = beside(tmp_path, "force_backward: true " + INPUT + python("Growing"))
    net.forward()
    with pytest.raises(
        ConfigError,
        match=r'class "Growing" \(.*mine.py\) has no method "backward"; write one, or give',
    ):
        net.backward()

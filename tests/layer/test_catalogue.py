"""Every registered layer type is held to a numerical gradient and to a second truth, or a reason stands here."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import caffepy.layer
from caffepy.layer import registry
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import NetParameter

from .harness import GOLDEN

TESTS = {path.name: path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)}
LAYERS = {path.name: path.read_text() for path in Path(caffepy.layer.__file__).parent.glob("*.py")}

NO_GRADIENT = {
    "Accuracy": "counts",
    "ArgMax": "gives places",
    "HDF5Output": "has no top; its backward leaves diffs alone, as its own test says",
    "Input": "has no bottom",
    "Parameter": "has no bottom; its gradient is the top's, as its own test says",
    "Silence": "has no top; its gradient is 0, as its own test says",
    "Threshold": "is constant but for a step",
}
# Types without a figure of Caffe's: the test that holds them to a loop or to the formula.
NO_FIGURES = {
    "AbsVal": "test_against_the_formula",
    "Dropout": "test_dropout_keeps_the_share_and_the_mean",
    "HDF5Output": "test_one_forward_gives_the_file_of_caffe",
    "Input": "test_input_takes_its_shapes_and_keeps_what_a_user_makes_of_them",
    "LSTMUnit": "test_unit_against_the_formula",
    "Parameter": "test_parameter_is_its_top_and_adds_its_gradient",
    "Python": "test_a_net_with_python_layers_learns",
    "Silence": "test_silence_gives_zero",
}


@cache
def figures():
    """Type -> names of the golden cases for it."""
    cases = {}
    for path in sorted(GOLDEN.glob("*.npz")):
        net = text_format.Parse(str(np.load(path)["prototxt"]), NetParameter())
        (it,) = (layer for layer in net.layer if layer.name == "it")
        cases.setdefault(it.type, []).append(path.stem)
    return cases


# Layers that feed the net from outside have tests of their own and nothing to differentiate.
COMPUTING = [name for name in registry if not registry[name].is_data]


@pytest.mark.parametrize("type_", COMPUTING)
def test_gradient_is_tested(type_):
    named = re.compile(rf'"{type_}[" ]')
    tested = [name for name, text in TESTS.items() if "check_gradient(" in text and named.search(text)]
    assert tested or type_ in NO_GRADIENT, f"{type_}: no gradient test, and no reason in NO_GRADIENT"


@pytest.mark.parametrize("type_", COMPUTING)
def test_caffes_figures_are_tested(type_):
    cases = figures().get(type_, [])
    text = "\n".join(TESTS.values())
    for case in cases:
        assert f'"{case}"' in text, f"{type_}: no test replays {case}.npz"
    if not cases:
        test = NO_FIGURES[type_]
        assert f"def {test}(" in text, f"{type_}: there is no {test}"


def test_reasons_are_for_types_that_exist():
    assert set(NO_GRADIENT) | set(NO_FIGURES) <= set(registry)


@pytest.mark.parametrize("name", LAYERS)
def test_operations_of_the_layers_exist(name):
    used = set(re.findall(r"self\.ops\.(\w+)", LAYERS[name]))
    assert not {f for f in used if not hasattr(cpu, f)}


def test_every_family_is_imported_by_name():
    assert {Path(name).stem for name in LAYERS} - {"__init__", "base"} <= set(caffepy.layer.__all__)


@pytest.mark.parametrize("type_", list(registry))
def test_layers_are_documented(type_):
    assert registry[type_].__doc__

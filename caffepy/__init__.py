"""Caffe's training for today's machines: `import caffepy as caffe` gives pycaffe's names.

Names are imported when first used, so that `import caffepy` and the command line start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caffepy import io, proto
    from caffepy.classifier import Classifier
    from caffepy.detector import Detector
    from caffepy.pycaffe.layer import Layer
    from caffepy.pycaffe.mode import set_device, set_mode_cpu, set_mode_gpu, set_precision, set_random_seed
    from caffepy.pycaffe.net import Net
    from caffepy.pycaffe.solver import (
        AdaDeltaSolver,
        AdaGradSolver,
        AdamSolver,
        NesterovSolver,
        RMSPropSolver,
        SGDSolver,
        get_solver,
    )

__version__ = "0.1.0"
TRAIN = 0
TEST = 1

_homes = {
    "AdaDeltaSolver": "caffepy.pycaffe.solver",
    "AdaGradSolver": "caffepy.pycaffe.solver",
    "AdamSolver": "caffepy.pycaffe.solver",
    "Classifier": "caffepy.classifier",
    "Detector": "caffepy.detector",
    "Layer": "caffepy.pycaffe.layer",
    "NesterovSolver": "caffepy.pycaffe.solver",
    "Net": "caffepy.pycaffe.net",
    "RMSPropSolver": "caffepy.pycaffe.solver",
    "SGDSolver": "caffepy.pycaffe.solver",
    "get_solver": "caffepy.pycaffe.solver",
    "set_device": "caffepy.pycaffe.mode",
    "set_mode_cpu": "caffepy.pycaffe.mode",
    "set_mode_gpu": "caffepy.pycaffe.mode",
    "set_precision": "caffepy.pycaffe.mode",
    "set_random_seed": "caffepy.pycaffe.mode",
}

_modules = {"classifier", "detector", "draw", "io", "proto", "pycaffe"}

__all__ = [
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Classifier",
    "Detector",
    "Layer",
    "NesterovSolver",
    "Net",
    "RMSPropSolver",
    "SGDSolver",
    "__version__",
    "get_solver",
    "io",
    "layer_type_list",
    "proto",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_precision",
    "set_random_seed",
]


def layer_type_list() -> list[str]:
    """The type strings of all layers, sorted."""
    from caffepy.layer import registry

    return list(registry)


def __getattr__(name: str) -> Any:
    if name in _homes:
        return getattr(import_module(_homes[name]), name)
    if name in _modules:
        return import_module(f"caffepy.{name}")
    raise AttributeError(f"module 'caffepy' has no attribute {name!r}")

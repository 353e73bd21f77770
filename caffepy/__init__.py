"""Caffe's training for today's machines: `import caffepy as caffe` gives pycaffe's names.

Names are imported when first used, so that `import caffepy` and the command line start at once.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caffepy import io, net_spec, proto
    from caffepy.caffe_alias import install_as_caffe
    from caffepy.classifier import Classifier
    from caffepy.detector import Detector
    from caffepy.net_spec import NetSpec, layers, params, to_proto
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
    "NetSpec": "caffepy.net_spec",
    "NesterovSolver": "caffepy.pycaffe.solver",
    "Net": "caffepy.pycaffe.net",
    "RMSPropSolver": "caffepy.pycaffe.solver",
    "SGDSolver": "caffepy.pycaffe.solver",
    "get_solver": "caffepy.pycaffe.solver",
    "install_as_caffe": "caffepy.caffe_alias",
    "layers": "caffepy.net_spec",
    "params": "caffepy.net_spec",
    "set_device": "caffepy.pycaffe.mode",
    "set_mode_cpu": "caffepy.pycaffe.mode",
    "set_mode_gpu": "caffepy.pycaffe.mode",
    "set_precision": "caffepy.pycaffe.mode",
    "set_random_seed": "caffepy.pycaffe.mode",
    "to_proto": "caffepy.net_spec",
}

_modules = {"classifier", "coord_map", "detector", "draw", "io", "net_spec", "proto", "pycaffe"}

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
    "NetSpec",
    "RMSPropSolver",
    "SGDSolver",
    "__version__",
    "get_solver",
    "install_as_caffe",
    "io",
    "layer_type_list",
    "layers",
    "net_spec",
    "params",
    "proto",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_precision",
    "set_random_seed",
    "to_proto",
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


if os.environ.get("CAFFEPY_AS_CAFFE", "0") not in ("", "0"):
    import_module("caffepy.caffe_alias").install_as_caffe()

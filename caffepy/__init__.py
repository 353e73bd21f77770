"""Caffe's training for today's machines: `import caffepy as caffe` gives pycaffe's names.

Names are imported when first used, so that `import caffepy` and the command line start at once.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from caffepy.core.caffe_alias import add_names, install_as_caffe

if TYPE_CHECKING:
    from caffepy import proto
    from caffepy.pycaffe import classifier, detector, io, net_spec
    from caffepy.pycaffe import coord_map as coord_map
    from caffepy.pycaffe import draw as draw
    from caffepy.pycaffe.classifier import Classifier
    from caffepy.pycaffe.detector import Detector
    from caffepy.pycaffe.layer import Layer
    from caffepy.pycaffe.log import init_log, log
    from caffepy.pycaffe.mode import (
        set_device,
        set_mode_cpu,
        set_mode_gpu,
        set_multiprocess,
        set_precision,
        set_random_seed,
        set_solver_count,
        set_solver_rank,
        solver_count,
        solver_rank,
    )
    from caffepy.pycaffe.nccl import NCCL, has_nccl
    from caffepy.pycaffe.net import Net
    from caffepy.pycaffe.net_spec import NetSpec, layers, params, to_proto
    from caffepy.pycaffe.solver import (
        AdaDeltaSolver,
        AdaGradSolver,
        AdamSolver,
        NesterovSolver,
        RMSPropSolver,
        SGDSolver,
        get_solver,
    )
    from caffepy.pycaffe.timer import Timer

__version__ = "0.1.0"
TRAIN = 0
TEST = 1

_homes = {
    "AdaDeltaSolver": "caffepy.pycaffe.solver",
    "AdaGradSolver": "caffepy.pycaffe.solver",
    "AdamSolver": "caffepy.pycaffe.solver",
    "Classifier": "caffepy.pycaffe.classifier",
    "Detector": "caffepy.pycaffe.detector",
    "Layer": "caffepy.pycaffe.layer",
    "NCCL": "caffepy.pycaffe.nccl",
    "NesterovSolver": "caffepy.pycaffe.solver",
    "Net": "caffepy.pycaffe.net",
    "NetSpec": "caffepy.pycaffe.net_spec",
    "RMSPropSolver": "caffepy.pycaffe.solver",
    "SGDSolver": "caffepy.pycaffe.solver",
    "Timer": "caffepy.pycaffe.timer",
    "get_solver": "caffepy.pycaffe.solver",
    "has_nccl": "caffepy.pycaffe.nccl",
    "init_log": "caffepy.pycaffe.log",
    "layers": "caffepy.pycaffe.net_spec",
    "log": "caffepy.pycaffe.log",
    "params": "caffepy.pycaffe.net_spec",
    "set_device": "caffepy.pycaffe.mode",
    "set_mode_cpu": "caffepy.pycaffe.mode",
    "set_mode_gpu": "caffepy.pycaffe.mode",
    "set_multiprocess": "caffepy.pycaffe.mode",
    "set_precision": "caffepy.pycaffe.mode",
    "set_random_seed": "caffepy.pycaffe.mode",
    "set_solver_count": "caffepy.pycaffe.mode",
    "set_solver_rank": "caffepy.pycaffe.mode",
    "solver_count": "caffepy.pycaffe.mode",
    "solver_rank": "caffepy.pycaffe.mode",
    "to_proto": "caffepy.pycaffe.net_spec",
}

_modules = {
    "classifier": "caffepy.pycaffe.classifier",
    "coord_map": "caffepy.pycaffe.coord_map",
    "detector": "caffepy.pycaffe.detector",
    "draw": "caffepy.pycaffe.draw",
    "io": "caffepy.pycaffe.io",
    "net_spec": "caffepy.pycaffe.net_spec",
    "proto": "caffepy.proto",
    "pycaffe": "caffepy.pycaffe",
}

__all__ = [
    "NCCL",
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
    "Timer",
    "__version__",
    "classifier",
    "detector",
    "get_solver",
    "has_nccl",
    "init_log",
    "install_as_caffe",
    "io",
    "layer_type_list",
    "layers",
    "log",
    "net_spec",
    "params",
    "proto",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_precision",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
    "to_proto",
]


def layer_type_list() -> list[str]:
    """The type strings of all layers, sorted."""
    from caffepy.layer import registry

    return list(registry)


def __getattr__(name: str) -> Any:
    if name in _homes:
        return getattr(import_module(_homes[name]), name)
    if name == "proto":
        import_module("caffepy.proto.caffe_pb2")  # `import caffe` brings it
    if name in _modules:
        return import_module(_modules[name])
    raise AttributeError(f"module 'caffepy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_modules})


add_names(
    {f"caffepy.{name}": module for name, module in _modules.items()}
)  # `import caffepy.io` finds it, too
if os.environ.get("CAFFEPY_AS_CAFFE", "0") not in ("", "0"):
    install_as_caffe()

"""Caffe's training for today's machines, from Python: `import caffepy as caffe` gives pycaffe.

    result = caffepy.train(caffepy.TrainOptions("solver.prototxt", gpu="all"))

`train`, `test` and `time` do what the commands do and raise the errors named here, all of them
CaffeErrors. Modules are imported when one of their names is first used, so that `import caffepy`
and the command line start at once.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from caffepy.core.caffe_alias import add_names, install_as_caffe

if TYPE_CHECKING:  # what type checkers see of the tables below; a test compares them
    from caffepy import proto as proto
    from caffepy import pycaffe as pycaffe
    from caffepy.commands.test import Score as Score
    from caffepy.commands.test import test as test
    from caffepy.commands.time import Timing as Timing
    from caffepy.commands.time import time as time
    from caffepy.commands.train import TrainOptions as TrainOptions
    from caffepy.commands.train import TrainResult as TrainResult
    from caffepy.commands.train import train as train
    from caffepy.core.errors import CaffeError as CaffeError
    from caffepy.core.errors import ConfigError as ConfigError
    from caffepy.core.errors import DataError as DataError
    from caffepy.core.errors import DeviceError as DeviceError
    from caffepy.core.errors import DivergenceError as DivergenceError
    from caffepy.core.errors import RecordError as RecordError
    from caffepy.core.errors import SyncError as SyncError
    from caffepy.core.errors import UsageError as UsageError
    from caffepy.pycaffe import classifier as classifier
    from caffepy.pycaffe import coord_map as coord_map
    from caffepy.pycaffe import detector as detector
    from caffepy.pycaffe import draw as draw
    from caffepy.pycaffe import io as io
    from caffepy.pycaffe import net_spec as net_spec
    from caffepy.pycaffe.classifier import Classifier as Classifier
    from caffepy.pycaffe.detector import Detector as Detector
    from caffepy.pycaffe.layer import Layer as Layer
    from caffepy.pycaffe.log import init_log as init_log
    from caffepy.pycaffe.log import log as log
    from caffepy.pycaffe.mode import Timer as Timer
    from caffepy.pycaffe.mode import set_device as set_device
    from caffepy.pycaffe.mode import set_mode_cpu as set_mode_cpu
    from caffepy.pycaffe.mode import set_mode_gpu as set_mode_gpu
    from caffepy.pycaffe.mode import set_multiprocess as set_multiprocess
    from caffepy.pycaffe.mode import set_precision as set_precision
    from caffepy.pycaffe.mode import set_random_seed as set_random_seed
    from caffepy.pycaffe.mode import set_solver_count as set_solver_count
    from caffepy.pycaffe.mode import set_solver_rank as set_solver_rank
    from caffepy.pycaffe.mode import solver_count as solver_count
    from caffepy.pycaffe.mode import solver_rank as solver_rank
    from caffepy.pycaffe.nccl import NCCL as NCCL
    from caffepy.pycaffe.nccl import has_nccl as has_nccl
    from caffepy.pycaffe.net import Net as Net
    from caffepy.pycaffe.net_spec import NetSpec as NetSpec
    from caffepy.pycaffe.net_spec import layers as layers
    from caffepy.pycaffe.net_spec import params as params
    from caffepy.pycaffe.net_spec import to_proto as to_proto
    from caffepy.pycaffe.nodes import world as world
    from caffepy.pycaffe.solver import AdaDeltaSolver as AdaDeltaSolver
    from caffepy.pycaffe.solver import AdaGradSolver as AdaGradSolver
    from caffepy.pycaffe.solver import AdamSolver as AdamSolver
    from caffepy.pycaffe.solver import NesterovSolver as NesterovSolver
    from caffepy.pycaffe.solver import RMSPropSolver as RMSPropSolver
    from caffepy.pycaffe.solver import SGDSolver as SGDSolver
    from caffepy.pycaffe.solver import Solver as Solver
    from caffepy.pycaffe.solver import get_solver as get_solver

__version__ = "0.1.0"
TRAIN = 0
TEST = 1

_NAMES = {
    "caffepy.commands.test": "Score test",
    "caffepy.commands.time": "Timing time",
    "caffepy.commands.train": "TrainOptions TrainResult train",
    "caffepy.core.errors": (
        "CaffeError ConfigError DataError DeviceError DivergenceError RecordError "
        "SyncError UsageError"
    ),
    "caffepy.pycaffe.classifier": "Classifier",
    "caffepy.pycaffe.detector": "Detector",
    "caffepy.pycaffe.layer": "Layer",
    "caffepy.pycaffe.log": "init_log log",
    "caffepy.pycaffe.mode": (
        "Timer set_device set_mode_cpu set_mode_gpu set_multiprocess set_precision "
        "set_random_seed set_solver_count set_solver_rank solver_count solver_rank"
    ),
    "caffepy.pycaffe.nccl": "NCCL has_nccl",
    "caffepy.pycaffe.net": "Net",
    "caffepy.pycaffe.net_spec": "NetSpec layers params to_proto",
    "caffepy.pycaffe.nodes": "world",
    "caffepy.pycaffe.solver": (
        "AdaDeltaSolver AdaGradSolver AdamSolver NesterovSolver RMSPropSolver SGDSolver "
        "Solver get_solver"
    ),
}
"""The public names, by the modules that define them."""

_PYCAFFE_MODULES = ("classifier", "coord_map", "detector", "draw", "io", "net_spec")
_MODULES = {name: f"caffepy.pycaffe.{name}" for name in _PYCAFFE_MODULES}
_MODULES |= {"proto": "caffepy.proto", "pycaffe": "caffepy.pycaffe"}
"""The public modules."""

_homes = {name: home for home, names in _NAMES.items() for name in names.split()}
_here = ("TEST", "TRAIN", "__version__", "install_as_caffe", "layer_type_list")
__all__ = [  # not the commands: `from caffe import *` must not replace a script's `time`
    name for name in (*_here, *_homes, *_MODULES) if name not in ("test", "time", "train")
]


def layer_type_list() -> list[str]:
    """Return the type strings of all layers, sorted."""
    from caffepy.layer import registry

    return list(registry)


def __getattr__(name: str) -> Any:
    if name in _homes:
        return getattr(import_module(_homes[name]), name)
    if name == "proto":
        import_module("caffepy.proto.caffe_pb2")  # `import caffe` brings it
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'caffepy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_here, *_homes, *_MODULES])


# so that `import caffepy.io` finds its module, too
add_names({f"caffepy.{name}": home for name, home in _MODULES.items()})
if os.environ.get("CAFFEPY_AS_CAFFE", "0") not in ("", "0"):
    install_as_caffe()

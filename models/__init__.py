"""The bundled nets: one folder each, with the prototxts of its solver, of training and of
deployment.
"""

import os
from glob import glob

KINDS = ("solver", "train_val", "deploy")
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def names() -> list[str]:
    """The names of the bundled nets, in alphabetical order."""
    return sorted(name for name in os.listdir(_FOLDER) if os.path.isfile(_file(name, "solver")))


def with_data() -> set[str]:
    """The names of the bundled nets whose data lie beside them."""
    return {name for name in names() if glob(os.path.join(_FOLDER, name, "*", "data.mdb"))}


def path(name: str, kind: str) -> str | None:
    """The prototxt file of this kind (one of KINDS) of a bundled net; None if there is none."""
    return _file(name, kind) if kind in KINDS and name in names() else None


def _file(name: str, kind: str) -> str:
    return os.path.join(_FOLDER, name, f"{kind}.prototxt")

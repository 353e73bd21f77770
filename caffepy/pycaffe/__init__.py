"""Nets, solvers, layers and blobs as pycaffe's users see them: by name, as numpy arrays.

All public names are also in `caffepy`; `from caffe.pycaffe import Net` finds them here.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import caffepy

    if name not in caffepy.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(caffepy, name)

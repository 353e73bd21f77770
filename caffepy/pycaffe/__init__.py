"""What pycaffe's users see: nets, solvers, layers and blobs by name, as numpy arrays.

The names themselves are those of `caffepy`; `from caffe.pycaffe import Net` finds them here too.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import caffepy

    if name not in caffepy.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(caffepy, name)

"""Nets, solvers, layers and blobs as pycaffe's users see them: by name, as numpy arrays.

All public names are also in `caffepy`; `from caffe.pycaffe import Net` finds them here, and so does
`from caffe._caffe import BlobVec` with the types of C++'s vectors.
"""

from typing import Any

_LISTS = ("BoolVec", "DtypeVec", "IntVec", "NetVec", "RawBlobVec", "StringVec")


def __getattr__(name: str) -> Any:
    import caffepy

    if name in _LISTS:
        return list
    if name in ("Blob", "BlobVec"):
        from caffepy.layer import python_blob

        return getattr(python_blob, name)
    if name not in caffepy.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(caffepy, name)

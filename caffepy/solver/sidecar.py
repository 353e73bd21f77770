"""The sidecar of a snapshot: an .npz of one JSON text and its arrays, for all that Caffe's files
have no field for.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from caffepy.core.errors import CaffeError, ConfigError, reason
from caffepy.core.files import regular
from caffepy.device.blob import Array

FORMAT = 1
ARRAY = "__array__"


def checksum(path: str) -> str:
    """Return the SHA-256 of a file in hexadecimal; ConfigError if it cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable("this file of a snapshot", error, path) from None


def _unreadable(what: str, error: OSError, path: str) -> ConfigError:
    return ConfigError(f"{what} cannot be read: {reason(error)}", path)


def write(path: str, content: dict[str, Any]) -> None:
    """Write a tree of dicts with string keys, lists, numbers, strings and arrays;
    ConfigError for anything else.
    """
    arrays: list[Array] = []
    try:
        text = json.dumps({"format": FORMAT, **_pack(content, arrays)})
    except TypeError as error:  # in what a script's own classes give
        raise ConfigError(
            f"a .caffepystate file holds dicts, lists, numbers, text and arrays: {error}", path
        ) from None
    with open(path, "wb") as file:
        members: dict[str, Any] = {str(i): array for i, array in enumerate(arrays)}
        np.savez(file, json=np.frombuffer(text.encode(), np.uint8), **members)


def read(path: str) -> dict[str, Any] | None:
    """Read what `write` wrote; None without such a file, ConfigError if it is damaged."""
    if not os.path.exists(path):
        return None
    try:
        raw = open(path, "rb", opener=regular)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise _unreadable("this .caffepystate file", error, path) from None
    with reading(path), raw, np.load(raw, allow_pickle=False) as file:
        content: dict[str, Any] = _unpack(json.loads(file["json"].tobytes()), file)
        version = content["format"]
    if version != FORMAT:
        raise ConfigError(
            f"this .caffepystate file has format {version}; this version reads {FORMAT}", path
        )
    return content


def head(path: str) -> dict[str, Any]:
    """Return the entries without their arrays; none without such a file or if it is damaged."""
    with (
        suppress(Exception),
        open(path, "rb", opener=regular) as raw,
        np.load(raw, allow_pickle=False) as file,
    ):
        return dict(json.loads(file["json"].tobytes()))
    return {}


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Return a block that uses the sidecar at `path`: an error becomes a ConfigError about that
    file.
    """
    try:
        yield
    except CaffeError:
        raise
    except Exception as error:  # zip, npy, json and the users of the content fail in many ways
        raise ConfigError(
            f"this .caffepystate file is damaged ({type(error).__name__}: {str(error)[:200]}); "
            "without it the run resumes as Caffe does, with data and random numbers starting anew",
            path,
        ) from None


def _pack(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {ARRAY: len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _pack(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, arrays) for item in value]
    return value


def _unpack(value: Any, file: Any) -> Any:
    if isinstance(value, dict):
        if ARRAY in value:
            return file[str(value[ARRAY])]
        return {key: _unpack(item, file) for key, item in value.items()}
    return [_unpack(item, file) for item in value] if isinstance(value, list) else value

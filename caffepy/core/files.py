"""Files that are whole or absent."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from caffepy.core.errors import UsageError, reason

NAME_KEPT = 200  # bytes of a name that its temporary name keeps; the rest must fit into 255
STALE = re.compile(r"\.(\d+)\.[0-9a-f]{8}\.tmp$")


def temporary_name(path: str) -> str:
    """Return a new name beside `path` with the name of the file and the process id."""
    folder, name = os.path.split(path)
    kept = os.fsdecode(os.fsencode(name)[:NAME_KEPT])
    return os.path.join(folder, f".{kept}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary name beside `path`; after the block, fsync the file and rename it to
    `path`.

    If the block raises, the temporary file is removed and `path` stays as it was.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    _flush(os.path.dirname(path) or ".")


def remove_stale(prefix: str) -> list[str]:
    """Remove temporary files and folders whose names start with `prefix` and whose process no
    longer runs; return their names.
    """
    folder, name = os.path.split(prefix)
    removed = []
    for entry in os.listdir(folder or "."):
        match = STALE.search(entry)
        if match and entry.startswith(f".{name}") and not _lives(int(match[1])):
            path = os.path.join(folder, entry)
            with suppress(OSError):
                if os.path.isdir(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
                removed.append(path)
    return removed


def _lives(process: int) -> bool:
    try:
        with suppress(PermissionError):  # another user's process
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f'cannot write "{path}": {reason(error)}') from None


@contextmanager
def written(path: str) -> Iterator[str]:
    """Like `replacing`, for a file that a command line names: UsageError if it cannot be written.

    A path that exists and is no regular file, such as /dev/stdout, is written to directly.
    """
    is_special = os.path.exists(path) and not os.path.isfile(path)
    with _named(path), nullcontext(path) if is_special else replacing(path) as name:
        yield name


def check_writable(path: str) -> None:
    """Raise UsageError if `path` cannot be written, before work whose result would be lost."""
    with _named(path):
        if not os.path.exists(path) or os.path.isfile(path):
            trial = temporary_name(path)
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(trial)
        elif os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "")


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

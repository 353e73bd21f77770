"""Files that are whole or absent."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's process
        return True
    return True


@contextmanager
def written(path: str) -> Iterator[str]:
    """Like `replacing`, for a file that a command line names: UsageError if it cannot be written.

    A path that exists and is no regular file, such as /dev/stdout, is written to directly.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            yield path
        else:
            with replacing(path) as temporary:
                yield temporary
    except OSError as error:
        raise _cannot_write(path, error) from None


def check_writable(path: str) -> None:
    """Raise UsageError if `path` cannot be written, before work whose result would be lost."""
    if not os.path.exists(path) or os.path.isfile(path):
        path, named = temporary_name(path), path
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(path)
        except OSError as error:
            raise _cannot_write(named, error) from None
    elif os.path.isdir(path):
        raise _cannot_write(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))


def _cannot_write(path: str, error: OSError) -> UsageError:
    return UsageError(f'cannot write "{path}": {reason(error)}')


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

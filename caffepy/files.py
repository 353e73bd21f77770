"""Files that are whole or absent."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.errors import UsageError


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Give a temporary name beside `path`; once the block wrote it, flush it to the disk and rename it to `path`.

    If the block raises, the temporary file goes and whatever stood at `path` stays as it was.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    _flush(folder or ".")


@contextmanager
def written(path: str) -> Iterator[str]:
    """`replacing` for a file that a command line names: UsageError if it cannot be written.

    What is there and is no file, such as /dev/stdout, is written to as it is.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            yield path
        else:
            with replacing(path) as temporary:
                yield temporary
    except OSError as error:
        raise UsageError(f'cannot write "{path}": {(error.strerror or str(error)).lower()}') from None


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

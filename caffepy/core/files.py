"""Places of the files that a prototxt names, and files that are whole or absent."""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress

from caffepy.core.errors import ConfigError, UsageError, reason

log = logging.getLogger(__name__)

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""Types of a path in the Python interface; `os.fsdecode` makes a str of it."""

BUNDLED = os.path.realpath(f"{os.path.dirname(__file__)}/../models") + os.sep

READ = 1 << 24  # bytes that one call reads of a file that changes meanwhile, or is huge

NAME_KEPT = 200  # bytes of a name that its temporary name keeps; the rest must fit into 255


def locate(name: str, beside: str | None = None) -> str:
    """Return the path under which `name` exists: `name` itself, which is relative to the working
    directory as in Caffe, or a path beside the file `beside`; for a bundled net that comes first.

    A name that exists in neither place is returned unchanged, so that the caller's message shows
    what the user wrote.
    """
    if not name or os.path.isabs(name) or beside is None:
        return name
    candidate = os.path.join(os.path.dirname(beside), name)
    is_bundled = os.path.realpath(beside).startswith(BUNDLED)
    if not os.path.exists(candidate) or (os.path.exists(name) and not is_bundled):
        return name
    log.info("%s is %s", name, candidate)
    return candidate


def working_directory() -> str:
    """Return the working directory, which a layer may change later; "" if it is gone."""
    with suppress(OSError):
        return os.getcwd()
    return ""


def temporary_name(path: str) -> str:
    """Return a new name beside `path`, with the name of the file, that no other run can have."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{_kept(name)}.{secrets.token_hex(8)}.tmp")


def _kept(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:NAME_KEPT])


@contextmanager
def temporary(path: str, is_folder: bool = False) -> Iterator[str]:
    """Yield the name of a new temporary file or folder beside `path`, which is removed after the
    block unless it got another name.

    It is locked meanwhile. The lock ends with its process, whichever host or container that is on,
    so what killed processes left of `path` is found, and removed here.
    """
    folder, name = os.path.split(path)
    remove_stale(folder, re.escape(_kept(name)))
    new, descriptor = _new_locked(path, is_folder)
    try:
        yield new
    finally:
        _remove(new)
        os.close(descriptor)


def _new_locked(path: str, is_folder: bool) -> tuple[str, int]:
    """Create a temporary file or folder and lock it. Until it is locked, another process that
    writes the same `path` may remove it, as one that a killed process left.
    """
    while True:
        new = temporary_name(path)
        if is_folder:
            os.mkdir(new)
        with suppress(FileNotFoundError) if is_folder else nullcontext():
            flags = os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = os.open(new, flags, 0o666)
            _lock(descriptor)
            if os.path.lexists(new):
                return new, descriptor
            os.close(descriptor)


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary name beside `path`; after the block, fsync the file and rename it to
    `path`.

    If the block raises, the temporary file is removed and `path` stays as it was.
    """
    with replacing_all([path]) as (new,):
        yield new


@contextmanager
def replacing_all(paths: Sequence[str]) -> Iterator[list[str]]:
    """Replace several files as `replacing` does: all are brought to the disk before the first gets
    its name; they get them in this order.
    """
    with ExitStack() as stack:
        names = [stack.enter_context(temporary(path)) for path in paths]
        yield names
        for name in names:
            _flush(name)
        for name, path in zip(names, paths, strict=True):
            os.replace(name, path)
            _flush(os.path.dirname(path) or ".")


@contextmanager
def locked(path: str, holder: str, where: str) -> Iterator[None]:
    """Hold the lock file `path` for the block, with the text `holder` in it.

    ConfigError, at `where`, names who holds it. The lock ends with its process; forked ones have no
    part in it. Where files cannot be locked or written, there is none.
    """
    descriptor = None
    with suppress(OSError):
        descriptor = _take_lock(path, where)
    if descriptor is None:
        yield
        return
    try:
        with suppress(OSError):  # a full disk: the lock holds without the text
            os.truncate(descriptor, 0)
            os.write(descriptor, holder.encode(errors="surrogateescape"))
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _take_lock(path: str, where: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
            os.close(descriptor)  # its run ended in between and removed the file
        except OSError as error:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"another run writes under this snapshot_prefix: {holder}; wait until it ends, "
                    "or end it, or set another snapshot_prefix",
                    where,
                ) from None
            if error.errno != errno.ENOENT:
                raise


def find_stale(folder: str, names: str) -> list[tuple[str, str]]:
    """Return the temporary files and folders that killed processes left in a folder, each with the
    path that it was for; the names of these match the pattern `names`.

    Nothing is found where files cannot be locked.
    """
    return [found for found in _unfinished(folder, names) if _if_abandoned(found[0])]


def _unfinished(folder: str, names: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"\.({names})(\.\d+)?\.[0-9a-f]{{8,16}}\.tmp")
    matches = map(pattern.fullmatch, sorted(os.listdir(folder or ".")))
    return [(os.path.join(folder, m[0]), os.path.join(folder, m[1])) for m in matches if m]


def remove_stale(folder: str, names: str) -> list[str]:
    """Remove what `find_stale` finds; return the paths that are gone."""
    with suppress(OSError):  # no such folder, yet
        return [path for path, _ in _unfinished(folder, names) if _if_abandoned(path, _remove)]
    return []


def _remove(path: str) -> bool:
    with suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    return not os.path.lexists(path)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # file systems without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _if_abandoned(path: str, act: Callable[[str], bool] = lambda path: True) -> bool:
    """Return False if a living process has locked this file or folder, else what `act` returns for
    it while it is locked here.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return act(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def regular(path: str, flags: int) -> int:
    """Opener of `open` that refuses, with OSError, a pipe or a device: they may have no end."""
    return _opened(path, flags)[0]


def _opened(path: str, flags: int) -> tuple[int, int]:
    """Return a descriptor as of `regular`, and the size of the file."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # no wait for who writes
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        os.close(descriptor)
        raise OSError("it is a pipe or a device, not a file")
    return descriptor, status.st_size


def read_regular(path: str) -> bytes:
    """Return the content of a file; OSError as of `regular`."""
    # four calls of the system, where a file object makes eight: each releases Python's lock
    descriptor, size = _opened(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        content = os.read(descriptor, size + 1)
        if len(content) != size:  # it has changed, or is longer than what one call reads
            while more := os.read(descriptor, READ):
                content += more
        return content
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f'cannot write "{path}": {reason(error)}') from None


@contextmanager
def written(path: str) -> Iterator[str]:
    """Replace a file that a command line names as `replacing` does; UsageError if that fails.

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

"""Log records framed as glog frames them, on stderr and in files.

A line is `Lmmdd hh:mm:ss.uuuuuu tid file.py:line] message` with L one of I, W, E, F. The year is
left out, as in the glog that Caffe was built with: the known log parsers read the month from the
second and third character.
"""

import getpass
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from caffepy.core.errors import CaffeError, UsageError, reason
from caffepy.report.progress import write_line

log = logging.getLogger(__name__)

PROGRAM = "caffepy"
LETTERS = ((logging.CRITICAL, "F"), (logging.ERROR, "E"), (logging.WARNING, "W"))


class Formatter(logging.Formatter):
    """The glog prefix, then the message; the further lines of a message have no prefix."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the framed record; must run in the thread that logged, whose id it shows."""
        letter = next((letter for level, letter in LETTERS if record.levelno >= level), "I")
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        place = f"{record.filename}:{record.lineno}".replace(" ", "_")
        head = f"{letter}{stamp}.{micros:06d} {threading.get_native_id():5d} {place}]"
        text = f"{head} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


class LogFile(logging.FileHandler):
    """A log file; once it cannot be written, as when its disk is full, the log goes on without."""

    failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless an earlier one could not be written."""
        if not self.failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Warn of the file, once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.failed = True
        what = "The log file %s cannot be written: %s; the log goes on without it"
        log.warning(what, self.baseFilename, reason(error))

    def close(self) -> None:
        """Close the file; what cannot be written is lost."""
        with suppress(OSError):
            super().close()


class Together(logging.Handler):
    """Passes each record to several handlers under one lock: all have the lines in one order."""

    def __init__(self, handlers: Sequence[logging.Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on."""
        for handler in self.handlers:
            handler.handle(record)


def log_file(folder: str, program: str = PROGRAM) -> LogFile:
    """Return a handler that writes `FOLDER/PROGRAM.HOST.USER.log.INFO.DATE-TIME.PID`.

    The link `FOLDER/PROGRAM.INFO` leads to the file. UsageError if it cannot be written.
    """
    host, now, user = socket.gethostname(), time.localtime(), "invalid-user"
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    date = time.strftime("%Y%m%d-%H%M%S", now)
    name = f"{program}.{host}.{user}.log.INFO.{date}.{os.getpid()}"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(
                f"Log file created at: {time.strftime('%Y/%m/%d %H:%M:%S', now)}\n"
                f"Running on machine: {host}\n"
                "Log line format: [IWEF]mmdd hh:mm:ss.uuuuuu threadid file:line] msg\n"
            )
    except OSError as error:
        raise UsageError(f"cannot write log files in {folder!r}: {error.strerror}") from None
    link = os.path.join(folder, f"{program}.INFO")
    with suppress(OSError):  # a file system without links loses the link only
        os.symlink(name, f"{link}.{os.getpid()}")
        os.replace(f"{link}.{os.getpid()}", link)
    return LogFile(os.path.join(folder, name), encoding="utf-8")


@contextmanager
def logging_to(
    *,
    stderr: bool = True,
    log_dir: str | None = None,
    level: int = logging.INFO,
    program: str = PROGRAM,
) -> Iterator[None]:
    """Send log lines from `level` on to stderr and to a file of `program` in `log_dir` during the
    block.

    An error that ends the block is the last thing written to the file, with a traceback if it is
    not the user's. UsageError if the file cannot be written.
    """
    logger = logging.getLogger("caffepy")
    before = logger.level, logger.propagate
    handlers: list[logging.Handler] = [Stderr()] if stderr else []
    if log_dir:
        handlers.append(log_file(log_dir, program))
    for handler in handlers:
        handler.setFormatter(Formatter())
    together = Together(handlers)
    together.setLevel(level)
    logger.addHandler(together)
    logger.setLevel(level)
    logger.propagate = logger.propagate and not stderr
    try:
        yield
    except Exception as error:
        if log_dir:
            place = traceback.extract_tb(error.__traceback__)[-1]
            bug = None if isinstance(error, CaffeError) else sys.exc_info()
            line = place.filename, place.lineno or 0
            fatal = logging.LogRecord(PROGRAM, logging.CRITICAL, *line, str(error), (), bug)
            handlers[-1].handle(fatal)
        raise
    finally:
        logger.removeHandler(together)
        for handler in handlers:
            handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def quiet() -> Iterator[None]:
    """Return a block in which nothing is logged."""
    logger = logging.getLogger("caffepy")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)

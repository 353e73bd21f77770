"""pycaffe's log: Caffe's lines after `init_log`, or from the first net on by GLOG_minloglevel."""

import logging
import os
import tempfile
from contextlib import ExitStack

from caffepy.core.errors import UsageError
from caffepy.report import logging_to

LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
VARIABLE, FOLDER = "GLOG_minloglevel", "GLOG_log_dir"

logger = logging.getLogger(__name__)
_shown = ExitStack()


def init_log(level: int | None = None, to_stderr: bool = True) -> None:
    """Show Caffe's log lines on stderr, or write them to a file in GLOG_log_dir or the temporary
    folder.

    `level`: 0 for all (the default of GLOG_minloglevel), 1 for warnings and errors, 2 for errors; a
    second call changes it. Without it caffepy's lines go where Python's `logging` sends those of
    "caffepy"; with CAFFEPY_AS_CAFFE=1 they go to stderr as soon as a net is built.
    """
    chosen = os.environ.get(VARIABLE, "0") if level is None else str(level)
    if chosen not in ("0", "1", "2", "3"):
        raise UsageError(
            f"a log level is 0 (all), 1 (warnings and errors), 2 (errors) or 3 (none), not "
            f"{chosen!r}"
        )
    folder = None if to_stderr else os.environ.get(FOLDER) or tempfile.gettempdir()
    _shown.close()
    _shown.enter_context(logging_to(stderr=to_stderr, log_dir=folder, level=LEVELS[int(chosen)]))


def heed_environment() -> None:
    """Show log lines if GLOG_minloglevel or CAFFEPY_AS_CAFFE ask for it, and none are shown yet."""
    chosen = logging.getLogger("caffepy")
    asked = VARIABLE in os.environ or os.environ.get("CAFFEPY_AS_CAFFE", "0") not in ("", "0")
    if asked and not chosen.handlers and chosen.level == logging.NOTSET:
        init_log()


def log(message: str) -> None:
    """Log a line."""
    logger.info("%s", message, stacklevel=2)

"""One exception family. Every class carries the exit code with which the command line ends."""

import os

from caffepy.core.names import neighbour


class CaffeError(RuntimeError):
    """Base of all errors that a user can cause or meet.

    `where` is the place that the message speaks of, such as `net.prototxt:57:3: layer "conv2"
    (Convolution)`; the code that knows it sets it, by `at`, on the error that a deeper layer
    raised.
    """

    exit_code = 70

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def at(self, where: str) -> "CaffeError":
        """Name the place, unless deeper code named one already; return the error itself."""
        self.where = self.where or where
        return self

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class UsageError(CaffeError):
    """A command line that cannot be carried out as typed."""

    exit_code = 2


class ConfigError(CaffeError):
    """A prototxt, weights, state or log that does not fit: syntax, names, shapes, values."""

    exit_code = 3


class UserCodeError(ConfigError):
    """An exception that the code of a Python layer raised: `original`, which pycaffe's nets and
    solvers raise in turn.
    """

    def __init__(self, message: str, original: BaseException) -> None:
        super().__init__(message)
        self.args = message, original  # of which `copy` makes another
        self.original = original


class DataError(CaffeError):
    """Training data that is missing, damaged or of the wrong shape."""

    exit_code = 4


class RecordError(DataError):
    """A record, or an image, that cannot be read; a run may skip some."""


class DivergenceError(CaffeError):
    """A loss that is no longer finite."""

    exit_code = 5


class DeviceError(CaffeError):
    """A device that is missing, unsupported or out of memory."""

    exit_code = 6


class LostDeviceError(DeviceError):
    """A device whose memory cannot be read any more."""


class SyncError(CaffeError):
    """Synchronization between solvers that failed or timed out."""

    exit_code = 7


def one_or_each(channels: int) -> str:
    """Return how many values fit, as text: "3 channels; give 1 or 3"."""
    return "1 channel; give 1" if channels == 1 else f"{channels} channels; give 1 or {channels}"


def install(extra: str) -> str:
    """Return how to install an extra of caffepy, by its name and from a clone."""
    return f"pip install 'caffepy[{extra}]' (in a clone '.[{extra}]')"


STOPPED = 75
"""Exit code of a run that a signal stopped after it wrote its snapshot."""

INTERRUPTED = 130
"""Exit code of a command that a signal ended."""


def reason(error: OSError) -> str:
    """The system's message in lower case, without what libraries such as HDF5 add; for a missing
    file with the name in its folder that is nearest.
    """
    text = (os.strerror(error.errno) if error.errno else str(error)).lower()
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        text += neighbour(error.filename)
    return text

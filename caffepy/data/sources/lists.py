"""Text files that list the parts of a source."""

from collections.abc import Iterator
from itertools import islice

from caffepy.core.errors import DataError, reason
from caffepy.proto.sniff import sniff


def lines_of(path: str) -> Iterator[str]:
    """The lines without their ends, whichever system wrote them, and without a byte order mark.

    Bytes that are not UTF-8 are kept as in names of files. DataError: no such file, or not a text.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            for line in file:
                if "\0" in line:
                    raise DataError(f'source "{path}" is {sniff(path)}, not a list as UTF-8 text')
                yield line.removesuffix("\n")
    except OSError as error:
        raise DataError(f'source "{path}" cannot be read: {reason(error)}') from None


def first_words(path: str, count: int) -> list[str]:
    """The first words of a list, fewer if it has fewer."""
    return list(islice((word for line in lines_of(path) for word in line.split()), count))

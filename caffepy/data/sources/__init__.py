"""Sources of training data, one file each. Start reading in `base`: what a source is. SOURCES is
the registry that data layers and `caffepy data show` look into.

`lmdb` and `leveldb` are databases of Datums (`databases` is their base, which lets a process open
one several times; `lmdb_pages` checks an LMDB's pages before they are read).
`image_list` names image files. `hdf5` and `windows` read what HDF5Data and WindowData name: rows
of datasets, and windows of images drawn at random.
"""

import logging
import os

from caffepy.core.errors import DataError
from caffepy.core.names import neighbour
from caffepy.data.sources.base import AnySource, Source
from caffepy.data.sources.databases import Database
from caffepy.data.sources.hdf5 import HDF5Files
from caffepy.data.sources.image_list import ImageList
from caffepy.data.sources.leveldb import LevelDB
from caffepy.data.sources.lmdb import LMDB
from caffepy.data.sources.windows import WindowFile
from caffepy.proto.sniff import sniff

log = logging.getLogger(__name__)

SOURCES: tuple[type[AnySource], ...] = (LMDB, LevelDB, HDF5Files, WindowFile, ImageList)
"""The first that `holds` a path is taken: the last one takes any other text."""

_warned: set[tuple[str, str | None]] = set()


def find(path: str, layer: str = "") -> type[AnySource] | None:
    """The kind of source at `path`, of those for that type of data layer if one is named."""
    kind = sniff(path)
    for source in SOURCES:
        if layer in ("", source.layer) and source.holds(path, kind):
            return source
    return None


def open_source(path: str, backend: str | None = None) -> Source:
    """Open what the layer Data reads at `path`, by what it is; warn once if `backend` differs.

    DataError: nothing there, not a source, truncated, without records, or a LevelDB while plyvel is
    missing.
    """
    if not path:
        raise DataError("no source is given; name a database: data_param { source: ... }")
    cls = find(path, "Data")
    if cls is None and not os.path.isfile(path):
        raise _not_found(path)
    source = (cls or LMDB).open(path)  # LMDB says what is wrong with the file
    assert isinstance(source, Source)
    name = source.kind.upper()  # as DataParameter.DB has it
    if isinstance(source, Database) and backend not in (None, name):
        if (path, backend) not in _warned:
            log.warning("%s is opened as the %s it is; write backend: %s", path, source.kind, name)
        _warned.add((path, backend))
    return source


def open_database(path: str, backend: str | None = None) -> Database:
    """Open the LMDB or LevelDB at `path`, as `open_source` does."""
    source = open_source(path, backend)
    if not isinstance(source, Database):
        raise DataError(f"{path} is no database")
    return source


def _not_found(path: str) -> DataError:
    if os.path.exists(path):
        return DataError(
            f"{path} is no database: the folder holds neither data.mdb (LMDB) nor CURRENT (LevelDB)"
        )
    beside = "" if os.path.isabs(path) else f" (the working directory is {os.getcwd()})"
    return DataError(f'source "{path}" does not exist{neighbour(path)}{beside}')

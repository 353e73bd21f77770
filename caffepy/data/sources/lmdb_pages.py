"""Check the pages of an LMDB file before LMDB reads them: it trusts its file and crashes on a
damaged one.

A file (of a 64-bit LMDB) is pages of one size. Pages 0 and 1 are metas; that of the later
transaction names the root of the tree: branch pages down to leaf pages, whose nodes are records or
name the overflow pages of a large value. Page header, 16 bytes: number (8), unused (2), flags (2),
end of the node offsets (2), start of the nodes (2). Node header, 8 bytes: size or child page, low
and high (2 + 2), flags (2), key size (2). Format 1, little endian.
"""

import mmap
import os
import struct
from bisect import bisect_right
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from caffepy.core.errors import DataError
from caffepy.data.sources.base import Array
from caffepy.proto.sniff import sniff

MAGIC = 0xBEEFC0DE
META_SIZE = 152
PAGE_SIZES = [1 << n for n in range(9, 17)]
HEADER, NODE = 16, 8
BRANCH, LEAF, KINDS = 0x01, 0x02, 0x6F  # page flags: two of all kinds
BIG, DUPLICATES = 0x01, 0x04  # node flags: the value lies in overflow pages; is a page of values
SEVERAL = 0x04  # database flag (DUPSORT): a key may have several values
NO_PAGE = (1 << 64) - 1  # the root of a tree without records
BLOCK = 64  # leaf pages that are checked together
KEPT = 1 << 20  # records whose places are remembered


class Meta(NamedTuple):
    """The fields of a meta page; the later transaction has the larger number."""

    transaction: int
    page_size: int
    last_page: int
    flags: int
    depth: int
    root: int


def read_meta(path: str, file: str) -> Meta:
    """The meta of the last transaction; DataError unless the file is an LMDB with all its pages."""
    size = os.path.getsize(file)
    metas: list[Meta] = []
    with open(file, "rb") as f:
        for _ in range(2):
            f.seek(metas[0].page_size if metas else 0)
            page = f.read(META_SIZE)
            if len(page) < META_SIZE or struct.unpack_from("<I", page, 16)[0] != MAGIC:
                break
            (page_size,) = struct.unpack_from("<I", page, 40)
            flags, depth = struct.unpack_from("<HH", page, 92)
            root, last_page, transaction = struct.unpack_from("<QQQ", page, 128)
            metas.append(Meta(transaction, page_size, last_page, flags, depth, root))
    if not metas and (kind := sniff(file)) != "LMDB":
        verb = "is" if kind == "empty" else "looks like"
        raise DataError(f"{path} is not an LMDB: {file} {verb} {kind}")
    # of equal ones LMDB, too, takes the first
    meta = max(metas, default=Meta(0, 4096, 1, 0, 0, 0), key=lambda meta: meta.transaction)
    if meta.page_size not in PAGE_SIZES or any(m.page_size != meta.page_size for m in metas):
        raise DataError(f"{path} is damaged: {file} names pages of {meta.page_size} bytes")
    needed = (meta.last_page + 1) * meta.page_size
    if len(metas) < 2 or size < needed:
        sizes = f"{file} has {size} of at least {needed} bytes"
        raise DataError(f"{path} is a truncated LMDB: {sizes}; copy or create it anew")
    if meta.flags & SEVERAL:
        raise DataError(f"{path} may have several values a key (DUPSORT); create it anew without")
    return meta


def _status(file: str) -> tuple[int, ...]:
    """Identity of the file at a path, then its size and the time of its last change; () if gone."""
    with suppress(OSError):
        status = os.stat(file)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return ()


class Pages:
    """The checked tree of an LMDB: branches are checked at once, leaves before they are read.

    `file` is its file, wherever the process changes to. What was mapped stays when that is removed.
    """

    def __init__(self, path: str, file: str) -> None:
        self._path, self.file = path, os.path.abspath(file)
        self._status = _status(self.file)
        self._meta = meta = read_meta(path, file)
        self._leaves: Array = np.empty(0, np.int64)
        # number of records up to the end of each checked block of leaves
        self._ends = [0]
        self._blocks: dict[int, Array] = {}
        self._plain = True  # no node is anything but a record
        self.bytes: Array = np.empty(0, np.uint8)  # the file, if it has records
        if meta.root == NO_PAGE:
            return
        size = (meta.last_page + 1) * meta.page_size
        with open(file, "rb") as f:
            mapped = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_READ)
            self.bytes = np.frombuffer(mapped, np.uint8)
        level = np.array([min(meta.root, meta.last_page + 1)], np.int64)
        self._need(level, 1)
        for _ in range(meta.depth - 1):
            _, sizes, flags, _ = self._nodes(level, BRANCH)
            level = sizes | flags << 32
            self._need(level, 1)
            self._refuse(level[meta.last_page :])  # more pages than there are: some are named twice
        self._leaves = level

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._status[2]

    @property
    def identity(self) -> tuple[int, int]:
        """Device and number of the file."""
        device, inode, *_ = self._status
        return device, inode

    def check_unchanged(self) -> None:
        """DataError if another process writes into the file: pages that were checked change, and
        the system ends a process that reads behind the end of a file that became shorter.
        """
        status = _status(self.file)
        # another file under this name does no harm: this one stays as it is until it is closed
        if status != self._status and status[:2] == self._status[:2]:
            with suppress(DataError, OSError):
                if read_meta(self._path, self.file) == self._meta:
                    self._status = status
                    return
            remedy = "write another file, and rename it to this one's name"
            raise DataError(f"{self._path} was written to while it was read; {remedy}")

    @property
    def records(self) -> int:
        """Number of records, from the first on, in pages that were checked."""
        return self._ends[-1]

    @property
    def whole(self) -> bool:
        """True if all leaves were checked."""
        return (len(self._ends) - 1) * BLOCK >= len(self._leaves)

    def check_more(self) -> None:
        """Check the next leaves; DataError names the first damaged page."""
        self._block(len(self._ends) - 1)

    def ends(self) -> list[bytes]:
        """The first and the last key; DataError if their pages are damaged."""
        found = []
        for leaf, node in ((self._leaves[:1], 0), (self._leaves[-1:], -1)):
            nodes, _, _, sizes = self._nodes(leaf, LEAF)
            start = nodes[node] + NODE
            found.append(self.bytes[start : start + sizes[node]].tobytes())
        return found

    def places(self, index: int) -> Array:
        """Places in `bytes` of record `index` and some after it: rows of key start, key size, value
        start, value size, number of the record.

        Empty after the last record, and for nodes that are not a plain key and value.
        """
        while index >= self.records and not self.whole:
            self.check_more()
        if not self._plain or index >= self.records:
            return np.empty((0, 5), np.int64)
        number = bisect_right(self._ends, index) - 1
        return self._block(number)[index - self._ends[number] :]

    def _block(self, number: int) -> Array:
        """The places of the records of a block of leaves, which are checked."""
        if number not in self._blocks:
            page_size, leaves = self._meta.page_size, self._leaves[number * BLOCK :][:BLOCK]
            nodes, sizes, flags, keys = self._nodes(leaves, LEAF)
            big = flags & BIG != 0
            ends = nodes % page_size + NODE + keys + np.where(big, 8, sizes)
            self._refuse(nodes[(ends > page_size) | (flags & DUPLICATES != 0)] // page_size)
            self._plain &= not (flags & ~BIG).any()
            values = nodes + NODE + keys
            pages = self._at(values[big], 8).view("<i8").ravel()
            self._need(pages, -(-(sizes[big] + HEADER) // page_size))
            values[big] = pages * page_size + HEADER
            numbers = self._ends[number] + np.arange(len(nodes))
            places = np.stack([nodes + NODE, keys, values, sizes, numbers], 1)
            if number == len(self._ends) - 1:
                self._ends.append(self.records + len(places))
            if sum(map(len, self._blocks.values())) > KEPT:
                self._blocks.clear()
            self._blocks[number] = places
        return self._blocks[number]

    def _nodes(self, pages: Array, kind: int) -> tuple[Array, Array, Array, Array]:
        """Nodes of these pages: place in the file, size or child's low part, flags, key size."""
        page_size = self._meta.page_size
        start = pages * page_size
        header = self._at(start, HEADER)
        number = header[:, :8].copy().view("<i8").ravel()
        flags, lower, upper = header[:, 10:].copy().view("<u2").astype(np.int64).T
        good = (number == pages) & (flags & KINDS == kind)
        good &= (lower > HEADER) & (lower <= upper) & (upper <= page_size) & (lower % 2 == 0)
        self._refuse(pages[~good])
        counts = (lower - HEADER) // 2
        owner = np.repeat(np.arange(len(pages)), counts)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = self._at(start[owner] + HEADER + 2 * nth, 2).view("<u2").ravel()
        self._refuse(pages[owner[(offset < upper[owner]) | (offset > page_size - NODE)]])
        nodes = start[owner] + offset
        low, high, node_flags, keys = self._at(nodes, NODE).view("<u2").astype(np.int64).T
        self._refuse(pages[owner[offset + NODE + keys > page_size]])
        return nodes, low | high << 16, node_flags, keys

    def _at(self, places: Array, size: int) -> Array:
        return self.bytes[places[:, None] + np.arange(size)]

    def _need(self, pages: Array, counts: Array | int) -> None:
        """DataError unless `counts` pages from each of these on are pages behind the metas."""
        self._refuse(pages[(pages < 2) | (pages > self._meta.last_page + 1 - counts)])

    def _refuse(self, pages: Array) -> None:
        if len(pages):
            page = f"page {pages[0]} of {self._meta.last_page + 1}"
            raise DataError(f"{self._path} is damaged at {page}; copy it anew")

"""A process that decodes images for another: the far end of `caffepy.data.decoders`.

It reads jobs from a socket until the other process closes it, or is gone, and writes images one
after the other into memory that both share. Nothing else of caffepy's is in it: no device, no
source of data.
"""

import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from caffepy.core.files import read_regular
from caffepy.device.blob import Array

HEAD = struct.Struct("<Q")  # the size of a message's pickled part
ANSWER = 1 << 14  # bytes that are read at once
ORPHANED = 2.0  # seconds between looks whether the other process still lives
Make = Callable[[bytes | Array, Any], Array]
"""A function of an image file's content, or of an image (H, W, 3) that is decoded already, and an
argument, which returns an image (C, H, W), always of the same type.
"""
Made = tuple[int, tuple[int, ...], str] | None
"""Offset of an image in the shared memory, its shape and type; None if there is none."""


class Part(NamedTuple):
    """An image file within a larger file, that of this path if it is still the same one."""

    path: str
    device: int
    inode: int
    start: int
    size: int

    def read(self) -> bytes:
        """Return the content; OSError if the file is another one, or has become shorter."""
        content = os.pread(_open(*self[:3]), self.size, self.start)
        if len(content) < self.size:  # half an image might be decoded
            raise OSError(f"{self.path} ends within what was to be read")
        return content


@cache
def _open(path: str, device: int, inode: int) -> int:
    """Return a descriptor for as long as the process lives."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (device, inode):
        os.close(descriptor)
        raise OSError(f"{path} is another file now")
    return descriptor


def receive(end: socket.socket, size: int, parent: int | None = None) -> bytearray:
    """Read `size` bytes; EOFError if the other process closed the socket or is not `parent`."""
    content = bytearray(size)
    view = memoryview(content)
    while view:
        try:
            count = end.recv_into(view)
        except TimeoutError:
            if parent is not None and os.getppid() != parent:
                raise EOFError from None
            continue
        except OSError:
            raise EOFError from None
        if not count:
            raise EOFError
        view = view[count:]
    return content


def receive_message(end: socket.socket, parent: int | None = None) -> Any:
    """Read a pickled object that follows its size."""
    (size,) = HEAD.unpack(receive(end, HEAD.size, parent))
    return pickle.loads(receive(end, size, parent))


def receive_answer(end: socket.socket) -> Any:
    """Do `receive_message` where nothing comes behind the message: mostly by one call of the
    system, since each gives up Python's lock.
    """
    try:
        content = end.recv(ANSWER)
    except OSError:
        raise EOFError from None
    content += receive(end, max(0, HEAD.size - len(content)))
    (size,) = HEAD.unpack_from(content)
    content += receive(end, HEAD.size + size - len(content))
    return pickle.loads(memoryview(content)[HEAD.size :])


def message(content: Any) -> list[bytes]:
    """The parts of a pickled object that follows its size."""
    pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return [HEAD.pack(len(pickled)), pickled]


def serve(end: int, memory: int, parent: int) -> None:
    """Decode until the socket with the file descriptor `end` is closed."""
    import cv2

    cv2.setNumThreads(1)  # there is a process for each core
    shared = np.frombuffer(mmap.mmap(memory, 0), np.uint8)
    makes: dict[int, Make] = {}
    with socket.socket(fileno=end) as channel:
        channel.settimeout(ORPHANED)
        while True:
            try:
                number, make, files, arguments = receive_message(channel, parent)
                contents = [
                    bytes(receive(channel, file, parent)) if isinstance(file, int) else file
                    for file in files
                ]
            except EOFError:
                return
            if make is not None:
                makes = {number: make}
            made = _make_all(makes[number], contents, arguments, shared)
            try:
                channel.settimeout(None)
                channel.sendall(b"".join(message(made)))
                channel.settimeout(ORPHANED)
            except OSError:
                return


def _read(content: str | Part | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    return content.read() if isinstance(content, Part) else read_regular(content)


def _make_all(
    make: Make, contents: Sequence[str | Part | bytes], arguments: Sequence[Any], shared: Array
) -> list[Made]:
    made, at = list[Made](), 0
    for content, argument in zip(contents, arguments, strict=True):
        try:
            image = make(_read(content), argument)
            out = shared[at : at + image.nbytes].view(image.dtype).reshape(image.shape)
        except Exception:  # the other process makes this image, and tells what is wrong with it
            made.append(None)
            continue
        out[...] = image
        made.append((at, image.shape, image.dtype.str))
        at += image.nbytes
    return made

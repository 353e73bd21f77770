"""JPEG files decoded by a GPU, by nvJPEG through ctypes.

The engines of the GPU decode a batch of baseline JPEGs side by side, with interpolation of chroma
as libjpeg has it: values differ from libjpeg's by 1 at most. What they do not take, such as
progressive files, is left to the caller.

    files -> sizes, by parsing their heads -> a target on the device for each -> nvjpegDecodeBatched
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Array
from caffepy.device.gpus import check_gpu, cuda_library, cuda_of_cupy, import_cupy

File = bytes | memoryview

_DEFAULT, _HARDWARE = 0, 3  # nvjpegBackend_t
_INTERPOLATION = 1 << 5  # NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION
_BGR = 4  # nvjpegOutputFormat_t: three planes
_UPRIGHT = 0, 1  # nvjpegExifOrientation_t
JPEG_END = b"\xff\xd9"
_CHANNELS = 3
_NONE = 0, 0
_ALIGNED = 256

MOST = 512 << 20
"""Bytes of the images that are decoded apart at a time: a batch of photographs may have more than a
GPU. The rest is left to the caller.
"""


Decoded = tuple[int, int, int]
"""The address of three planes, their height and width."""


class _Image(ctypes.Structure):
    _fields_ = [("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4)]


@cache
def library() -> ctypes.CDLL:
    """Return nvJPEG; DeviceError says what to install without it, or without CuPy."""
    try:
        return cuda_library("nvjpeg")
    except OSError as error:
        wheel = "nvidia-nvjpeg-cu12" if cuda_of_cupy() < 13000 else "nvidia-nvjpeg"
        message = f"a GPU decodes images by nvJPEG ({error}): pip install {wheel}"
        raise DeviceError(message) from None


def _check(status: int) -> None:
    if status:
        raise DeviceError(f"nvJPEG failed with status {status}")


class JpegDecoder:
    """A decoder of a GPU, the current one for None, with memory of its own, for one thread at a
    time; DeviceError says what is missing.

    Only the decoding itself runs without Python's lock: a busy thread gives it back late, after
    each of the short calls that parse a file.
    """

    def __init__(self, device: int | None = None) -> None:
        self._cupy = import_cupy()
        check_gpu(0)
        self._long = library()
        self._short = ctypes.PyDLL(self._long._name, handle=self._long._handle)
        self.device = self._cupy.cuda.Device(device).id
        self._size = self._host_size = self._count = 0
        self._handle = self._state = self._parsed = ctypes.c_void_p()
        try:
            with self._cupy.cuda.Device(self.device):
                self.stream = self._cupy.cuda.Stream(non_blocking=True)
                self._handle = self._new_handle()
                self._state = self._new("nvjpegJpegStateCreate")
                self._parsed = self._new("nvjpegJpegStreamCreate")
        except BaseException:
            self.close()
            raise
        self._facts = [ctypes.c_int() for _ in range(5)]
        self._there_of_facts = [ctypes.byref(fact) for fact in self._facts]

    def _new_handle(self) -> ctypes.c_void_p:
        """Return a handle that has the GPU's engines decode, or its cores if it has none."""
        handle, flags = ctypes.c_void_p(), ctypes.c_uint(_INTERPOLATION)
        for backend in (_HARDWARE, _DEFAULT):
            status = self._long.nvjpegCreateEx(backend, None, None, flags, ctypes.byref(handle))
            if not status:
                break
        _check(status)
        return handle

    def _new(self, create: str) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _check(getattr(self._long, create)(self._handle, ctypes.byref(made)))
        return made

    def close(self) -> None:
        """Free what nvJPEG holds, once its work is done; no more calls then."""
        if self._handle:
            self.stream.synchronize()
        with self._cupy.cuda.Device(self.device):
            if self._parsed:
                self._long.nvjpegJpegStreamDestroy(self._parsed)
            if self._state:
                self._long.nvjpegJpegStateDestroy(self._state)
            if self._handle:
                self._long.nvjpegDestroy(self._handle)
        self._handle = self._state = self._parsed = ctypes.c_void_p()

    def decode(self, files: Sequence[File]) -> list[Array | None]:
        """Return images (3, H, W) uint8, BGR, valid until the next call; None for each file that it
        does not decode.
        """
        images, end = self.decode_apart(files)
        if end > self._host_size:
            self._here = self._cupy.cuda.alloc_pinned_memory(end)
            self._memory: Array = np.frombuffer(self._here, np.uint8, end)
            self._host_size = end
        if end:
            runtime = self._cupy.cuda.runtime
            what = (self._here.ptr, self._there.ptr, end, runtime.memcpyDeviceToHost)
            runtime.memcpyAsync(*what, self.stream.ptr)
            self.stream.synchronize()
        return [image and self._on_host(*image) for image in images]

    def _on_host(self, address: int, height: int, width: int) -> Array:
        start, count = address - self._there.ptr, _CHANNELS * height * width
        return self._memory[start : start + count].reshape(_CHANNELS, height, width)

    def decode_apart(self, files: Sequence[File]) -> tuple[list[Decoded | None], int]:
        """Decode files to memory of its own on the device, by work of `stream`; return where each
        image is, valid until the next call, None for one that it does not decode; and how many
        bytes of the memory hold all.
        """
        sizes, starts, end = [self._size_of(file) for file in files], list[int](), 0
        for i, (height, width) in enumerate(sizes):
            count = _CHANNELS * height * width
            if end + count > MOST:
                sizes[i], count = _NONE, 0
            starts.append(end)
            end += -(-count // _ALIGNED) * _ALIGNED
        if end > self._size:
            with self._cupy.cuda.Device(self.device):
                self._there = self._cupy.cuda.alloc(end)
            self._size = end
        targets = [self._there.ptr + start for start in starts] if end else []
        if not end or not self._run(files, sizes, targets):
            return [None] * len(files), 0
        placed = zip(targets, sizes, strict=True)
        return [(address, *size) if any(size) else None for address, size in placed], end

    def decode_to(
        self, files: Sequence[File], places: Sequence[int], room: Callable[[Any], Array]
    ) -> list[int]:
        """Decode files to these places of images (N, 3, H, W) on the device; return the places that
        are done: none if the images, or a file that it decodes, are others.

        `room` returns the images and makes the stream that it is given wait until they are free.
        """
        images: Any = room(self.stream)
        if images.dtype != np.uint8 or images.shape[1] != _CHANNELS:
            return []
        sizes = [self._size_of(file) for file in files]
        if set(sizes) - {_NONE, images.shape[2:]}:
            return []
        targets = [images.data.ptr + place * images.strides[0] for place in places]
        if not any(map(any, sizes)) or not self._run(files, sizes, targets):
            return []
        self.stream.synchronize()
        return [place for place, size in zip(places, sizes, strict=True) if any(size)]

    def _size_of(self, file: File) -> tuple[int, int]:
        """Return height and width of an image that the GPU decodes as libjpeg does, else zeros."""
        short, parsed, length = self._short, self._parsed, len(file)
        if bytes(file[-2:]) != JPEG_END:  # libjpeg fills up what is missing
            return _NONE
        where = ctypes.c_void_p(_address(file)), ctypes.c_size_t(length)
        channels, width, height, orientation, declined = self._there_of_facts
        failed = (
            short.nvjpegJpegStreamParse(self._handle, *where, 0, 0, parsed)
            or short.nvjpegJpegStreamGetComponentsNum(parsed, channels)
            or short.nvjpegJpegStreamGetFrameDimensions(parsed, width, height)
            or short.nvjpegJpegStreamGetExifOrientation(parsed, orientation)
            or short.nvjpegDecodeBatchedSupported(self._handle, parsed, declined)
        )
        if failed:
            return _NONE
        found, columns, rows, turned, unsupported = (fact.value for fact in self._facts)
        if found != _CHANNELS or turned not in _UPRIGHT or unsupported:
            return _NONE
        return rows, columns

    def _run(
        self, files: Sequence[File], sizes: Sequence[tuple[int, int]], targets: Sequence[int]
    ) -> bool:
        """Begin to decode the files of a size to these addresses; return False if that failed, and
        nothing writes there any more.
        """
        chosen = [i for i, size in enumerate(sizes) if any(size)]
        count, long = len(chosen), self._long
        images = (_Image * count)(*(_planes(targets[i], *sizes[i]) for i in chosen))
        with self._cupy.cuda.Device(self.device):
            failed = count != self._count and long.nvjpegDecodeBatchedInitialize(
                self._handle, self._state, count, 1, _BGR
            )
            failed = failed or long.nvjpegDecodeBatched(
                self._handle,
                self._state,
                (ctypes.c_void_p * count)(*(_address(files[i]) for i in chosen)),
                (ctypes.c_size_t * count)(*(len(files[i]) for i in chosen)),
                images,
                ctypes.c_void_p(self.stream.ptr),
            )
        self._count = 0 if failed else count
        if failed:  # some of it may have begun
            self.stream.synchronize()
        return not failed


def _address(file: File) -> int:
    return int(np.frombuffer(file, np.uint8).ctypes.data)


def _planes(target: int, height: int, width: int) -> _Image:
    plane = height * width
    return _Image((target, target + plane, target + 2 * plane), (width,) * _CHANNELS)

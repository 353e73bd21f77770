"""The frames of a video file or a camera, as OpenCV reads them, one after the other."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import cv2

from caffepy.core.errors import DataError
from caffepy.data.sources.base import Array, Items, NumberedSource, Source, State

log = logging.getLogger(__name__)

Frame = tuple[int, Array]  # its number among those that are used, and the image (H, W, 3)


class Frames(Sequence[Any]):
    """Some frames of a video."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = list(frames)

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, int):
            return self._frames[i]
        return Frames(self._frames[i] if isinstance(i, slice) else [self._frames[k] for k in i])


class _OfFrames(Source):
    """Base of sources of frames."""

    layer = "VideoData"
    take_is_cheap = False

    def decode(self, item: Frame) -> tuple[Array, int]:
        return item[1].transpose(2, 0, 1), 0

    def place(self, items: Items, i: int) -> str:
        return f"number {items[i][0]}"

    def join(self, parts: Sequence[Any]) -> Frames:
        return Frames([frame for part in parts for frame in part])


class CameraFrames(_OfFrames):
    """Frames of camera `number`, without an end: each frame, or each behind `skip` others. It has
    no place to go back to: frames that are skipped, or were before a run is resumed, are not read.
    """

    kind = "camera"
    state_keys = frozenset[str]()
    length = None

    def __init__(self, number: int, skip: int = 0) -> None:
        self.path, self._skip = f"camera {number}", skip
        self._camera = cv2.VideoCapture(number)
        if not self._camera.isOpened():
            raise DataError(f"{self.path} cannot be opened by OpenCV")
        self._taken = 0
        self._peeked: Frame | None = None
        log.info("Opened %s", self.path)

    def extent(self) -> str:
        return self.path

    def peek(self) -> Frame:
        if self._peeked is None:
            for _ in range(self._skip):
                self._camera.grab()
            good, image = self._camera.read()
            if not good:
                raise DataError(f"{self.path} gives no frame after {self._taken}")
            self._peeked = self._taken, image
        return self._peeked

    def take(self, count: int) -> Items:
        frames = []
        for _ in range(count):
            frames.append(self.peek())
            self._peeked = None
            self._taken += 1
        return Frames(frames)

    def skip(self, count: int) -> None:
        self._taken += count

    def key(self, item: Frame) -> str:
        return f"frame {item[0]}"

    def state(self) -> State:
        return {}

    def set_state(self, state: State) -> None:
        pass

    def close(self) -> None:
        self._camera.release()


class VideoFrames(_OfFrames, NumberedSource):
    """Every frame, or every one behind `skip` others; after the last one the first."""

    kind = "video"

    def __init__(self, path: str, skip: int = 0) -> None:
        self._video = cv2.VideoCapture(path)
        if not self._video.isOpened():
            raise DataError(f'video "{path}" cannot be read by OpenCV')
        self._step, self._skip = skip + 1, skip
        count = int(self._video.get(cv2.CAP_PROP_FRAME_COUNT)) // self._step
        if count < 1:
            raise DataError(f'video "{path}" has too few frames, or does not say how many')
        self._next = 0  # the frame of the file that is read next
        self._last: Frame | None = None
        super().__init__(path, count)
        log.info("Opened video %s of %d frames", path, count)

    def _frame(self, number: int) -> Frame:
        if self._last is None or self._last[0] != number:
            first = number * self._step
            if self._next != first:
                self._video.set(cv2.CAP_PROP_POS_FRAMES, first)
            for _ in range(self._skip):
                self._video.grab()
            good, image = self._video.read()
            self._next = first + self._step
            if not good:
                self._next = -1
                raise DataError(f"{self.path}: frame {first + self._skip} cannot be read")
            self._last = number, image
        return self._last

    def peek(self) -> Frame:
        return self._frame(int(super().peek()))

    def take(self, count: int) -> Items:
        return Frames([self._frame(int(number)) for number in super().take(count)])

    def once(self, size: int) -> Iterator[Items]:
        for numbers in super().once(size):
            yield Frames([self._frame(int(number)) for number in numbers])

    def key(self, item: Frame) -> str:
        return f"frame {item[0] * self._step + self._skip}"

    def close(self) -> None:
        self._video.release()

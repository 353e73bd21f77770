"""A GPU decodes what OpenCV does, to within 1, and leaves alone what it might decode otherwise."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from caffepy.core.errors import DeviceError
from caffepy.device import nvjpeg
from caffepy.device.nvjpeg import JpegDecoder

SAMPLING = {
    "4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "4:2:2": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
}
TURNED = (
    b"\xff\xe1\x00\x22Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
)
"""A segment that says: turned by 90 degrees."""


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 7, 3), np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(int)
    return np.clip(smooth + rng.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, *settings: int) -> bytes:
    return cv2.imencode(".jpg", image, settings)[1].tobytes()


@pytest.fixture(scope="module")
def decoder() -> JpegDecoder:
    pytest.importorskip("cupy")
    try:
        return JpegDecoder()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLING)
def test_as_libjpeg(decoder: JpegDecoder, sampling: str) -> None:
    sizes = [(256, 256), (33, 100), (64, 16), (375, 501)]
    settings = cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLING[sampling]
    files = [jpeg(picture(*size, seed), *settings) for seed, size in enumerate(sizes)]
    for count in (1, 4, 2):
        for file, image in zip(files, decoder.decode(files[:count]), strict=False):
            want = cv2.imdecode(np.frombuffer(file, np.uint8), 1).transpose(2, 0, 1).astype(int)
            assert image is not None
            assert image.shape == want.shape
            assert np.abs(image - want).max() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(256, 256), (33, 101), (227, 227)])
def test_images_on_the_device_are_those_on_the_host(
    decoder: JpegDecoder, size: tuple[int, int]
) -> None:
    import cupy

    files = [jpeg(picture(*size, seed)) for seed in range(5)]
    files[2] = jpeg(picture(*size)[:, :, 0])
    want = [None if image is None else image.copy() for image in decoder.decode(files)]
    images = cupy.full((7, 3, *size), 5, np.uint8)
    cupy.cuda.Device().synchronize()
    places = [1, 2, 3, 5, 6]
    assert decoder.decode_to(files, places, lambda stream: images) == [1, 2, 5, 6]
    for place, image in zip(places, want, strict=True):
        np.testing.assert_array_equal(images[place].get(), 5 if image is None else image)
    assert (images[[0, 4]] == 5).all()
    other = jpeg(picture(size[0] + 1, size[1]))
    assert decoder.decode_to([files[0], other], [0, 1], lambda stream: images) == []
    assert (images[0] == 5).all()
    assert decoder.decode_to(files[2:3], [0], lambda stream: images) == []


@pytest.mark.gpu
def test_what_memory_does_not_hold_is_left_alone(
    decoder: JpegDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [jpeg(picture(*size)) for size in ((64, 64), (200, 200), (40, 30))]
    whole = [image is not None and image.copy() for image in decoder.decode(files)]
    monkeypatch.setattr(nvjpeg, "MOST", 3 * 64 * 64 + 3 * 40 * 30)
    first, second, third = decoder.decode(files)
    assert second is None
    np.testing.assert_array_equal(first, whole[0])
    np.testing.assert_array_equal(third, whole[2])


@pytest.mark.gpu
def test_what_is_left_alone(decoder: JpegDecoder) -> None:
    image = picture(48, 64)
    good = jpeg(image)
    others = {
        "grey": jpeg(image[:, :, 0]),
        "progressive": jpeg(image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "cut": good[: len(good) // 2],
        "turned": good[:2] + TURNED + good[2:],
        "PNG": cv2.imencode(".png", image)[1].tobytes(),
        "nothing": b"",
    }
    first, *middle, last = decoder.decode([good, *others.values(), good])
    assert {name for name, found in zip(others, middle, strict=True) if found is not None} == set()
    assert first is not None
    assert last is not None
    np.testing.assert_array_equal(first, last)
    assert decoder.decode(list(others.values())) == [None] * len(others)


@pytest.mark.parametrize(("status", "waits"), [(0, 0), (8, 1)])
def test_of_a_batch_that_failed_nothing_goes_on(status: int, waits: int) -> None:
    waited: list[None] = []
    decoder: Any = object.__new__(JpegDecoder)
    decoder._cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: nullcontext()))
    decoder._long = SimpleNamespace(
        nvjpegDecodeBatchedInitialize=lambda *_: 0, nvjpegDecodeBatched=lambda *_: status
    )
    decoder.stream = SimpleNamespace(ptr=0, synchronize=lambda: waited.append(None))
    decoder._handle = decoder._state = decoder.device = None
    decoder._count = 0
    assert decoder._run([b"a", b""], [(2, 2), (0, 0)], [0, 0]) == (status == 0)
    assert len(waited) == waits


@pytest.mark.parametrize("failing", [None, "nvjpegJpegStateCreate", "nvjpegJpegStreamCreate"])
def test_what_was_made_is_freed(failing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Library:
        _name, _handle = None, None

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                calls.append(name)
                if name == failing:
                    return 1
                if "Create" in name:
                    arguments[-1]._obj.value = 1 + len(calls)
                return 0

            return call

    stream = SimpleNamespace(synchronize=lambda: calls.append("synchronize"))
    cuda = SimpleNamespace(Device=lambda _: Current(), Stream=lambda **_: stream)
    monkeypatch.setattr(nvjpeg, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(nvjpeg, "check_gpu", lambda _: None)
    monkeypatch.setattr(nvjpeg, "library", Library)
    monkeypatch.setattr(nvjpeg.ctypes, "PyDLL", lambda *_, **__: None)
    made = ["nvjpegCreateEx", "nvjpegJpegStateCreate", "nvjpegJpegStreamCreate"]
    freed = ["nvjpegJpegStreamDestroy", "nvjpegJpegStateDestroy", "nvjpegDestroy"]
    if failing:
        with pytest.raises(DeviceError, match="status 1"):
            JpegDecoder()
        made = made[: made.index(failing) + 1]
        freed = freed[4 - len(made) :]
    else:
        decoder = JpegDecoder()
        decoder.close()
        decoder.close()
    assert calls == [*made, "synchronize", *freed]


class Current:
    """A device that is the current one in a block."""

    id = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.gpu
def test_a_closed_decoder_leaves_others_alone(decoder: JpegDecoder) -> None:
    file = jpeg(picture(40, 50))
    (want,) = decoder.decode([file])
    other = JpegDecoder()
    (image,) = other.decode([file])
    assert want is not None
    assert image is not None
    np.testing.assert_array_equal(image, want)
    other.close()
    (again,) = decoder.decode([file])
    assert again is not None
    np.testing.assert_array_equal(again, image)


@pytest.mark.parametrize(
    ("cuda", "wheel"), [(12090, "nvidia-nvjpeg-cu12"), (13000, "nvidia-nvjpeg")]
)
def test_without_the_library(cuda: int, wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"no {name}")

    monkeypatch.setattr(nvjpeg, "cuda_of_cupy", lambda: cuda)
    monkeypatch.setattr(nvjpeg, "cuda_library", missing)
    with pytest.raises(DeviceError, match=rf"nvJPEG \(no nvjpeg\): pip install {wheel}$"):
        nvjpeg.library.__wrapped__()

"""WindowData: which windows come, how they are cut out and warped, what is refused."""

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.data.sources.windows import read_windows
from caffepy.data.window_loader import expand
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import TEST, BlobProto

from .test_data import Feed

pytestmark = pytest.mark.usefixtures("several")

HEIGHT, WIDTH = 12, 16


@pytest.fixture
def folder(tmp_path):
    """A folder with two noisy images and a window file: foreground of classes 3 and 7, background,
    one between.
    """
    rng = np.random.default_rng(0)
    blocks = []
    windows = [
        ["3 0.9 2 3 9 10", "5 0.1 0 0 7 7"],
        ["7 0.5 4 1 15 8", "7 0.45 0 0 3 3", "2 0.39 8 4 15 11"],
    ]
    for i, lines in enumerate(windows):
        cv2.imwrite(f"{tmp_path}/{i}.png", rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))
        blocks.append(
            f"# {i}\n{i}.png\n3\n{HEIGHT}\n{WIDTH}\n{len(lines)}\n" + "\n".join(lines) + "\n"
        )
    (tmp_path / "windows.txt").write_text("".join(blocks))
    return tmp_path


def windows(params, folder, transform="crop_size: 8", **kwargs):
    defaults = {"source": '"windows.txt"', "batch_size": 8, "bg_threshold": 0.4}
    params += "".join(f" {name}: {value}" for name, value in defaults.items() if name not in params)
    text = (
        f'layer {{ type: "WindowData" window_data_param {{ {params} }} '
        f"transform_param {{ {transform} }} }}"
    )
    return Feed(text, path=str(folder / "net.prototxt"), **kwargs)


def image(folder, i):
    return cv2.imread(f"{folder}/{i}.png").astype(np.float32)


def resized(pixels, width, height):
    """(H, W, 3) of bytes to (3, height, width) of floats."""
    return (
        cv2.resize(pixels.astype(np.uint8), (width, height)).astype(np.float32).transpose(2, 0, 1)
    )


def choices(folder):
    """Windows of 8 x 8 and the foreground one of 12 x 8, as crops of 8 pixels, by label."""
    first, second = image(folder, 0), image(folder, 1)
    return {
        0: [first[0:8, 0:8], second[4:12, 8:16]],
        3: [first[3:11, 2:10]],
        7: [second[1:9, 4:16]],
    }


def test_background_comes_before_foreground(folder, caplog):
    caplog.set_level(logging.INFO, "caffepy")
    feed = windows("fg_fraction: 0.4", folder)
    assert [t.shape for t in feed.top] == [(8, 3, 8, 8), (8,)]
    for line in (
        "Number of images: 2",
        "class 0 has 2 samples",
        "class 7 has 1 samples",
        "Crop mode: warp",
    ):
        assert line in caplog.messages
    seen = set()
    for _ in range(6):
        data, label = feed.forward()
        assert not label[:5].any()
        assert set(label[5:]) <= {3, 7}
        for crop, kind in zip(data, label, strict=True):
            fits = [np.array_equal(crop, resized(w, 8, 8)) for w in choices(folder)[int(kind)]]
            assert any(fits)
            seen.add((int(kind), fits.index(True)))
    assert seen == {(0, 0), (0, 1), (3, 0), (7, 0)}
    feed.layer.close()


@pytest.mark.parametrize("mean", ["values", "file"])
def test_mean_and_scale(mean, folder):
    whole = np.random.default_rng(1).random((3, 9, 11)).astype(np.float32)
    (folder / "mean.binaryproto").write_bytes(binary.array_to_blob(whole[None]).SerializeToString())
    text = {
        "values": "mean_value: 1 mean_value: 2 mean_value: 3",
        "file": "mean_file: 'mean.binaryproto'",
    }[mean]
    # Rows start as far into the mean as columns: (11 - 8) / 2.
    subtracted = {"values": np.reshape([1, 2, 3], (3, 1, 1)), "file": whole[:, 1:9, 1:9]}[mean]
    feed = windows(
        "batch_size: 4 fg_fraction: 1 fg_threshold: 0.6 scale: 0.5", folder, f"crop_size: 8 {text}"
    )
    data, label = feed.forward()
    assert (label == 3).all()
    expected = (choices(folder)[3][0].transpose(2, 0, 1) - subtracted) * 0.5
    np.testing.assert_allclose(data, np.broadcast_to(expected, data.shape), rtol=1e-6)
    feed.layer.close()


def test_mirrored_windows_are_subtracted_from_where_they_lie(folder):
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32), (3, 8, 8))
    (folder / "mean.binaryproto").write_bytes(binary.array_to_blob(ramp[None]).SerializeToString())
    transform = "crop_size: 8 mirror: true mean_file: 'mean.binaryproto'"
    feed = windows("batch_size: 40 fg_fraction: 1 fg_threshold: 0.6", folder, transform)
    plain = choices(folder)[3][0].transpose(2, 0, 1)
    straight, mirrored = plain - ramp, plain[:, :, ::-1] - ramp
    data, _ = feed.forward()
    sides = [np.array_equal(crop, straight) for crop in data]
    assert 0 < sum(sides) < 40
    assert all(
        np.array_equal(crop, straight if side else mirrored)
        for crop, side in zip(data, sides, strict=True)
    )
    feed.layer.close()


def naive(folder, i, corners, pad, square, mirrored=False, crop=8):
    """A window of image i with context, corner by corner."""
    pixels = image(folder, i)
    x1, y1, x2, y2 = corners
    stretch = crop / (crop - 2 * pad)
    half_w, half_h = (x2 - x1 + 1) / 2, (y2 - y1 + 1) / 2
    middle_x, middle_y = x1 + half_w, y1 + half_h
    if square:
        half_w = half_h = max(half_w, half_h)

    def away(v):
        return int(np.sign(v) * np.floor(abs(v) + 0.5))

    x1, x2 = away(middle_x - half_w * stretch), away(middle_x + half_w * stretch)
    y1, y2 = away(middle_y - half_h * stretch), away(middle_y + half_h * stretch)
    scale_x, scale_y = crop / (x2 - x1 + 1), crop / (y2 - y1 + 1)
    inside = pixels[max(y1, 0) : min(y2, HEIGHT - 1) + 1, max(x1, 0) : min(x2, WIDTH - 1) + 1]
    left, right, top = (
        away(max(0, v) * s) for v, s in ((-x1, scale_x), (x2 - WIDTH + 1, scale_x), (-y1, scale_y))
    )
    left = right if mirrored else left
    width = min(away(inside.shape[1] * scale_x), crop - left)
    height = min(away(inside.shape[0] * scale_y), crop - top)
    out = np.zeros((3, crop, crop), np.float32)
    part = resized(inside, width, height) - 100
    out[:, top : top + height, left : left + width] = part[:, :, ::-1] if mirrored else part
    return out


CONTEXT = {
    "padded": (2, False),
    "square": (0, True),
    "padded square": (1, True),
    "far beyond the image": (3, False),
}


@pytest.mark.parametrize("case", CONTEXT)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_context(case, dtype, folder):
    pad, square = CONTEXT[case]
    mode = f"context_pad: {pad} crop_mode: '{'square' if square else 'warp'}'"
    feed = windows(
        f"batch_size: 24 fg_fraction: 0.5 {mode}",
        folder,
        "crop_size: 8 mean_value: 100",
        dtype=dtype,
    )
    boxes = {
        0: [(0, (0, 0, 7, 7)), (1, (8, 4, 15, 11))],
        3: [(0, (2, 3, 9, 10))],
        7: [(1, (4, 1, 15, 8))],
    }
    data, label = feed.forward()
    assert set(label) == {0, 3, 7}
    for crop, kind in zip(data, label, strict=True):
        assert any(
            np.array_equal(crop, naive(folder, i, box, pad, square)) for i, box in boxes[int(kind)]
        )
    assert (data == 0).all(1).any()
    feed.layer.close()


def test_margins_are_mirrored_too(folder):
    params = "batch_size: 30 fg_fraction: 1 fg_threshold: 0.5 bg_threshold: 0 context_pad: 2"
    feed = windows(params, folder, "crop_size: 8 mean_value: 100 mirror: true")
    data, label = feed.forward()
    sides = set()
    for crop, kind in zip(data, label, strict=True):
        if kind == 7:
            pair = [
                naive(folder, 1, (4, 1, 15, 8), 2, False, mirrored) for mirrored in (False, True)
            ]
            sides.add([np.array_equal(crop, p) for p in pair].index(True))
    assert sides == {0, 1}
    feed.layer.close()


def test_a_sliver_of_an_image_leaves_zeros():
    span = expand(0, 0, np.float32(0.5), np.float32(300), 2, 300)
    assert span.length == 2
    assert expand(0, 99, np.float32(50), np.float32(4), 3, 4).length == 0


@pytest.mark.parametrize("cache", ["", "cache_images: true"])
def test_a_state_goes_on_exactly(cache, folder):
    first, second = (windows(cache, folder, "crop_size: 8 mirror: true", seed=s) for s in (1, 2))
    for _ in range(3):
        first.forward()
    second.layer.set_state(first.layer.state())
    for _ in range(4):
        for a, b in zip(first.forward(), second.forward(), strict=True):
            np.testing.assert_array_equal(a, b)
    first.layer.close()
    second.layer.close()


def test_the_phase_changes_nothing(folder):
    first, second = windows("", folder), windows("", folder, phase=TEST)
    for a, b in zip(first.forward(), second.forward(), strict=True):
        np.testing.assert_array_equal(a, b)
    first.layer.close()
    second.layer.close()


def test_cached_images_are_not_read_again(folder):
    feed = windows("cache_images: true", folder)
    for i in range(2):
        (folder / f"{i}.png").unlink()
    assert feed.forward()[0].any()
    feed.layer.close()


def test_root_folder_is_put_before_the_names(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for i in range(2):
        (folder / f"{i}.png").rename(elsewhere / f"{i}.png")
    feed = windows(f'root_folder: "{elsewhere}/"', folder)
    assert feed.forward()[0].any()
    feed.layer.close()


def test_a_missing_image_is_an_error_of_forward(folder):
    (folder / "1.png").unlink()
    feed = windows("batch_size: 50", folder)
    with pytest.raises(DataError, match=r"windows.txt: .*1.png cannot be read: no such file"):
        feed.forward()
    feed.layer.close()
    with pytest.raises(DataError, match=r"1.png cannot be read"):
        windows("cache_images: true", folder)
    with pytest.raises(DataError, match=r'root_folder ".*" does not end in "/"'):
        windows(f'cache_images: true root_folder: "{folder}"', folder)


def test_what_is_no_image_is_an_error_of_forward(folder):
    (folder / "0.png").write_text("hello")
    feed = windows("batch_size: 50", folder)
    with pytest.raises(DataError, match=r"0.png: its image cannot be decoded \(5 bytes\)"):
        feed.forward()
    feed.layer.close()


@pytest.mark.parametrize("context", ["", "context_pad: 1"])
def test_a_window_outside_its_image(context, folder):
    (folder / "windows.txt").write_text(
        "# 0\n0.png\n3\n12\n16\n2\n1 1 30 30 35 35\n0 0 30 30 35 35\n"
    )
    feed = windows(context, folder)
    with pytest.raises(
        DataError, match=r"0.png: window 30 30 35 35 lies outside the image, 3 12 16 \(576\)"
    ):
        feed.forward()
    feed.layer.close()


def test_fields_that_are_ignored_are_named(folder, caplog):
    feed = windows("crop_size: 4 mirror: true", folder, "crop_size: 8 scale: 2")
    assert caplog.messages == [
        (
            "window_data_param: without effect, as in Caffe: crop_size, "
            "mirror; write crop_size, mirror in transform_param"
        ),
        "transform_param's scale is ignored, as in Caffe; window_data_param has one",
    ]
    feed.layer.close()


REFUSED = {
    "no batch_size": (
        "batch_size: 0",
        "crop_size: 8",
        ConfigError,
        "window_data_param needs a batch_size",
    ),
    "no crop": ("", "", ConfigError, r"needs a crop_size of more than 2 \* context_pad = 0, not 0"),
    "larger than any blob": (
        "",
        "crop_size: 2147483647",
        ConfigError,
        r"8 windows of shape 3 2147483647 2147483647 \(\d+\) have more than 2\^31 elements",
    ),
    "more than all": (
        "fg_fraction: 1.5",
        "crop_size: 8",
        ConfigError,
        "fg_fraction must be 0 to 1, not 1.5",
    ),
    "less than none": (
        "fg_fraction: -1",
        "crop_size: 8",
        ConfigError,
        "fg_fraction must be 0 to 1, not -1",
    ),
    "no room": (
        "context_pad: 4",
        "crop_size: 8",
        ConfigError,
        r"of more than 2 \* context_pad = 8, not 8",
    ),
    "missing file": (
        "source: 'no.txt'",
        "crop_size: 8",
        DataError,
        'source "no.txt" cannot be read: no such',
    ),
    "no foreground": (
        "fg_threshold: 2",
        "crop_size: 8",
        DataError,
        "has no foreground windows, of which .* wants 2",
    ),
    "no background": (
        "bg_threshold: 0",
        "crop_size: 8",
        DataError,
        "has no background windows, of which .* wants 6",
    ),
    "two means": (
        "",
        "crop_size: 8 mean_file: 'm' mean_value: 1",
        ConfigError,
        "cannot both be given",
    ),
    "two mean values": (
        "",
        "crop_size: 8 mean_value: 1 mean_value: 2",
        ConfigError,
        r"mean of shape 2 1 1 \(2\)",
    ),
    "small mean": (
        "",
        "crop_size: 8 mean_file: 'small'",
        ConfigError,
        r"mean of shape 3 7 8 \(168\) does not fit",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, folder):
    small = BlobProto(num=1, channels=3, height=7, width=8, data=[0.0] * 168)
    (folder / "small").write_bytes(small.SerializeToString())
    params, transform, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        windows(params, folder, transform)


def test_a_kind_that_no_batch_wants_may_be_missing(folder):
    feed = windows("fg_threshold: 2 fg_fraction: 0.1", folder)
    assert not feed.forward()[1].any()
    feed.layer.close()


HEAD = "# 0\na.png\n3\n4\n5\n"
DAMAGED = {
    "empty": ("", "lists no images"),
    "bad index": (f"{HEAD}0\n# 2\n", '"# 2" where block "# 1" should start'),
    "no head": ("a.png\n", '"a.png" where block "# 0" should start'),
    "more windows than said": (
        f"{HEAD}1\n1 1 0 0 1 1\n1 1 0 0 2 2\n",
        '"1 1 0 0 2 2" where block "# 1" should start',
    ),
    "ends in a block": (f"{HEAD}2\n1 1 0 0 1 1\n", "ends within block 0"),
    "ends in a head": ("# 0\na.png\n", "ends within block 0"),
    "a word": (f"{HEAD}many\n", "block 0 is damaged"),
    "a field too few": (f"{HEAD}1\n1 1 0 0 1\n", "block 0 is damaged"),
    "a word in a window": (f"{HEAD}1\n1 1 0 0 1 x\n", "block 0 is damaged"),
    "a number of windows below 0": (f"{HEAD}-1\n1 1 0 0 1 1\n", "block 0 is damaged"),
    "a field too many": (f"{HEAD}2\n1 1 0 0 1 1 1\n1 1 0 0 1 1\n", "each a line of 6 numbers"),
    "of another kind": (f"{HEAD}1\0", "is .*, not a list as UTF-8 text"),
    "too far": (f"{HEAD}1\n1 1 0 0 1e10 1\n", "block 0 is damaged: a window needs x1 <= x2"),
    "nan": (f"{HEAD}1\n1 1 0 0 1 nan\n", "block 0 is damaged: a window needs x1 <= x2"),
    "the wrong way": (f"{HEAD}1\n1 1 4 0 1 1\n", "block 0 is damaged: a window needs x1 <= x2"),
    "no class": (
        f"{HEAD}1\n0 1 0 0 1 1\n",
        "foreground window of image 0 needs a class of 1 or more",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_window_files(case, tmp_path):
    text, message = DAMAGED[case]
    path = tmp_path / "windows.txt"
    path.write_text(text)
    with pytest.raises(CaffeError, match=message):
        read_windows(str(path), 0.5, 0.5)


def test_a_window_file_is_split_into_kinds(folder):
    file = read_windows(str(folder / "windows.txt"), 0.5, 0.4)
    assert [Path(p).name for p in file.images] == ["0.png", "1.png"]
    np.testing.assert_array_equal(file.foreground, [[0, 3, 2, 3, 9, 10], [1, 7, 4, 1, 15, 8]])
    np.testing.assert_array_equal(file.background, [[0, 0, 0, 0, 7, 7], [1, 0, 8, 4, 15, 11]])

"""DetectNetTransformation against loops over cells, and images and boxes that move together."""

from math import ceil, cos, floor, radians, sin

import cv2
import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError
from caffepy.layer.detectnet import turning
from caffepy.proto.binary import array_to_blob
from caffepy.proto.caffe_pb2 import TEST, TRAIN

from .harness import Single, seeded

OFF = "crop_prob: -1 scale_prob: -1 flip_prob: -1 rotation_prob: -1 hue_rotation_prob: -1 desaturation_prob: -1"
CLASSES = "object_class { src: 1 dst: 0 } object_class { src: 8 dst: 2 }"
SIZE = "image_size_x: 48 image_size_y: 32"


def transformation(truth="", augmentation=OFF, more=""):
    return (
        f'type: "DetectNetTransformation" detectnet_groundtruth_param {{ {SIZE} {truth} }} '
        f"detectnet_augmentation_param {{ {augmentation} }} {more}"
    )


def tables(*images, rows=8):
    """Labels (N, 1, rows, 16) of boxes (x, y, width, height, class)."""
    out = np.zeros((len(images), 1, rows, 16))
    for table, boxes in zip(out[:, 0], images, strict=True):
        table[0, :2] = len(boxes), 16
        for row, box in zip(table[1:], boxes, strict=False):
            row[:4], row[5], row[6:] = box[:4], box[4], 7
    return out


def random_boxes(seed=0, count=7):
    rng = seeded(seed)
    sides = rng.uniform(1, 30, (count, 2))
    places = rng.uniform(-15, 45, (count, 2))
    return np.column_stack([places, sides, rng.choice([1, 2, 8], count)])


def maps_of(
    boxes,
    classes,
    stride=4,
    scale=0.5,
    longest=50,
    least=None,
    norm=False,
    crop=True,
    size=(48, 32),
):
    """What the fork makes of boxes, cell by cell."""
    width, height = size[0] // stride, size[1] // stride
    out = np.zeros((8 + max(classes.values()) + 1, height, width))
    for x, y, w, h, kind in boxes:
        x2, y2 = x + w, y + h
        if crop:
            x, y, x2, y2 = max(x, 0), max(y, 0), min(x2, size[0]), min(y2, size[1])
        if kind not in classes or x2 - x <= 0 or y2 - y <= 0:
            continue
        cw, ch = (x2 - x) * scale, (y2 - y) * scale
        if least is None:
            cw, ch = min(cw, longest), min(ch, longest)
        else:
            cw, ch = min(x2 - x, max(cw, least)), min(y2 - y, max(ch, least))
        left, up = (x + x2) / 2 - cw / 2, (y + y2) / 2 - ch / 2
        for row in range(max(0, floor(up / stride)), min(height, ceil((up + ch) / stride))):
            for column in range(
                max(0, floor(left / stride)), min(width, ceil((left + cw) / stride))
            ):
                cx, cy = column * stride, row * stride
                across = min(left + cw, cx + stride) - max(left, cx)
                down = min(up + ch, cy + stride) - max(up, cy)
                if across * down / stride**2 <= 1.2e-7:
                    continue
                own = [0] * (len(out) - 8)
                own[classes[kind]] = 1
                value = max(0 if norm else 1, stride**2 / (cw * ch))
                corners = [x - cx, y - cy, x2 - cx, y2 - cy]
                out[:, row, column] = [1, *corners, 1 / (x2 - x), 1 / (y2 - y), value, *own]
    return out


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("", {}),
        ("stride: 8 scale_cvg: 0.9 max_cvg_len: 10", {"stride": 8, "scale": 0.9, "longest": 10}),
        (
            "gridbox_type: GRIDBOX_MIN min_cvg_len: 7 scale_cvg: 0.4 obj_norm: true",
            {"least": 7, "scale": 0.4, "norm": True},
        ),
        ("crop_bboxes: false stride: 16", {"crop": False, "stride": 16}),
    ],
)
@pytest.mark.parametrize("classes", ["", CLASSES])
def test_detectnet_maps(fields, expected, classes):
    """Boxes of a batch, of which later ones cover earlier ones."""
    boxes = [random_boxes(seed) for seed in range(4)]
    images = np.zeros((4, 3, 32, 48))
    single = Single(transformation(f"{fields} {classes}"), images, tables(*boxes), tops=2)
    _, maps = single.forward()
    known = {1: 0, 8: 2} if classes else {1: 0}
    assert maps[:, 0].any()
    for found, own in zip(maps, boxes, strict=True):
        np.testing.assert_allclose(found, maps_of(own, known, **expected), rtol=1e-6, atol=1e-6)


def test_images_of_the_test_phase_are_scaled_less_the_mean(tmp_path):
    images = seeded().uniform(0, 255, (2, 3, 20, 30))
    boxes = [(3, 4, 10, 6, 1)]
    text = transformation(augmentation="", more="transform_param { mean_value: 127 }")
    found, maps = Single(text, images, tables(boxes, []), tops=2, phase=TEST).forward()
    for image, own in zip(images, found, strict=True):
        wanted = cv2.resize(image.transpose(1, 2, 0) - 127, (48, 32), interpolation=cv2.INTER_CUBIC)
        np.testing.assert_allclose(own, wanted.transpose(2, 0, 1), atol=1e-4)
    scaled = (3 * 1.6, 4 * 1.6, 10 * 1.6, 6 * 1.6, 1)
    np.testing.assert_allclose(maps[0], maps_of([scaled], {1: 0}), rtol=1e-6, atol=1e-6)
    assert not maps[1].any()
    mean = seeded(1).uniform(0, 255, (1, 3, 10, 15)).astype(np.float32)
    (tmp_path / "mean.binaryproto").write_bytes(array_to_blob(mean).SerializeToString())
    text = transformation(more=f'transform_param {{ mean_file: "{tmp_path}/mean.binaryproto" }}')
    found, _ = Single(text, images, tables([], []), tops=2).forward()
    large = cv2.resize(mean[0].transpose(1, 2, 0), (30, 20), interpolation=cv2.INTER_CUBIC)
    # without changes the middle is cut, here with a border of zeros
    wanted = np.zeros((2, 3, 32, 48))
    wanted[:, :, 6:26, 9:39] = images - large.transpose(2, 0, 1)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def on(**values):
    """The fields that turn one change on and the others off."""
    fields = dict(
        field.split(": ") for field in OFF.replace(" ", "\n").replace(":\n", ": ").split("\n")
    )
    return " ".join(f"{name}: {value}" for name, value in {**fields, **values}.items())


def test_images_are_flipped():
    images = seeded().uniform(0, 255, (1, 3, 32, 48))
    text = transformation(augmentation=on(flip_prob=1))
    found, maps = Single(text, images, tables([(3, 4, 20, 16, 1)]), tops=2).forward()
    np.testing.assert_allclose(found, images[..., ::-1], atol=1e-4)
    mirrored = (48 - 3 - 20 - 1, 4, 20, 16, 1)
    np.testing.assert_allclose(maps[0], maps_of([mirrored], {1: 0}), rtol=1e-6, atol=1e-6)


def test_colours_turn_and_fade():
    image = np.zeros((1, 3, 32, 48))
    image[:, 2] = 200  # red
    fading = on(desaturation_prob=1, desaturation_max=1)
    blue, green, red = Single(
        transformation(augmentation=fading), image, tables([]), tops=2
    ).forward()[0][0, :, 0, 0]
    assert red == pytest.approx(200)
    assert 1 < blue < 199
    assert blue == pytest.approx(green)
    turning_hue = on(hue_rotation_prob=1, hue_rotation=60)
    seen = set()
    for seed in range(6):
        text = transformation(augmentation=turning_hue)
        single = Single(text, image, tables([]), tops=2, seed=seed)
        blue, green, red = single.forward()[0][0, :, 0, 0]
        assert red == pytest.approx(200)
        assert min(blue, green) == pytest.approx(0, abs=1e-3)
        seen.add(bool(blue > green))
    assert seen == {True, False}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_boxes_stay_with_what_they_hold(dtype):
    """A bright square of an image, scaled, turned, flipped and cut anywhere, fills its box."""
    image = np.zeros((1, 3, 60, 80))
    image[:, :, 20:36, 30:50] = 200
    label = tables([(30, 20, 20, 16, 1)])
    augmentation = (
        "crop_prob: 1 shift_x: 6 shift_y: 4 scale_prob: 1 scale_min: 0.6 scale_max: 1.3 "
        "flip_prob: 0.5 rotation_prob: 0.8 max_rotate_degree: 6 hue_rotation_prob: 0.5"
    )
    text = transformation("crop_bboxes: false stride: 4 scale_cvg: 0.2", augmentation)
    places, seen = set(), 0
    for seed in range(40):
        single = Single(text, image, label, tops=2, dtype=dtype, seed=seed)
        found, maps = single.forward()
        again = single.forward()
        assert (again[0] == found).all()
        assert (again[1] == maps).all()
        rows, columns = np.nonzero(maps[0, 0])
        if not len(rows):
            continue
        row, column = rows[0], columns[0]
        x, y, x2, y2 = maps[0, 1:5, row, column] + 4 * np.array([column, row, column, row])
        if min(x, y, 46 - x2, 30 - y2) < 3:
            continue
        bright = np.argwhere(found[0].mean(axis=0) > 100)
        (top, left), (bottom, right) = bright.min(axis=0), bright.max(axis=0) + 1
        np.testing.assert_allclose(
            [(x + x2) / 2, (y + y2) / 2], [(left + right) / 2, (top + bottom) / 2], atol=1.0
        )
        assert x2 - x == pytest.approx(1 / maps[0, 5, row, column], rel=1e-4)
        assert right - left >= x2 - x - 2
        places.add((left, top))
        seen += 1
    assert seen > 8
    assert len(places) > 8


def test_a_turned_image_lies_in_its_space():
    for angle in (-30, -3, 5, 90):
        matrix, (width, height) = turning((40, 21), angle)
        corners = np.array([[x, y, 1] for x in (0, 40) for y in (0, 21)]) @ matrix.T
        assert (corners.min(axis=0) > -1e-6).all()
        assert (corners.min(axis=0) < 1).all()
        assert (corners.max(axis=0) <= (width + 1e-6, height + 1e-6)).all()
        c, s = abs(cos(radians(angle))), abs(sin(radians(angle)))
        assert abs(width - (40 * c + 21 * s)) <= 3
        assert abs(height - (40 * s + 21 * c)) <= 3


REFUSED = {
    "images (N, 3, H, W)": (transformation(), [(2, 1, 4, 4), (2, 1, 3, 16)]),
    "not [2, 3, 0, 4]": (transformation(), [(2, 3, 0, 4), (2, 1, 3, 16)]),
    "2 images, but boxes": (transformation(), [(2, 3, 4, 4), (1, 1, 3, 16)]),
    "scale_cvg cannot be nan": (transformation("scale_cvg: nan"), [(2, 3, 4, 4), (2, 1, 3, 16)]),
    "max_rotate_degree cannot be inf": (
        transformation(augmentation="max_rotate_degree: inf"),
        [(2, 3, 4, 4), (2, 1, 3, 16)],
    ),
    "stride of 1": (transformation("stride: 0"), [(2, 3, 4, 4), (2, 1, 3, 16)]),
    "too large": (transformation("stride: 100"), [(2, 3, 4, 4), (2, 1, 3, 16)]),
    "3 channels, not 2": (
        transformation(more="transform_param { mean_value: 1 mean_value: 2 }"),
        [(2, 3, 4, 4), (2, 1, 3, 16)],
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    text, shapes = REFUSED[message]
    with pytest.raises(ConfigError) as error:
        Single(text, *map(np.zeros, shapes), tops=2)
    assert message in str(error.value)


@pytest.mark.parametrize("head", [(3, 16), (-1, 16), (1, 5), (np.nan, 16), (np.inf, 16)])
def test_labels_that_are_none(head):
    label = np.zeros((1, 1, 3, 16))
    label[0, 0, 0, :2] = head
    single = Single(transformation(), np.zeros((1, 3, 8, 8)), label, tops=2, phase=TRAIN)
    with pytest.raises(DataError, match="labels begin with the number of boxes"):
        single.forward()


@pytest.mark.parametrize("place", [0, 3, 5])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_boxes_that_are_none(place, number):
    label = tables([(1, 1, 4, 4, 1)])
    label[0, 0, 1, place] = number
    single = Single(transformation(), np.zeros((1, 3, 8, 8)), label, tops=2, phase=TRAIN)
    with pytest.raises(DataError, match="a box has a number that is not finite"):
        single.forward()

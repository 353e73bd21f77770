"""CPMData: people, turned, cut and mirrored with their images, and the maps of their parts and limbs,
against loops that follow Convolutional Pose Machines' and OpenPose's code.
"""

import math
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.core.errors import CaffeError
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import TEST
from tests.layer.test_data import Feed

HEIGHT, WIDTH = 60, 80
# what the forks' code has, from 1: the parts of a record that a part lies between
COCO = (
    [1, 6, 7, 9, 11, 6, 8, 10, 13, 15, 17, 12, 14, 16, 3, 2, 5, 4],
    [1, 7, 7, 9, 11, 6, 8, 10, 13, 15, 17, 12, 14, 16, 3, 2, 5, 4],
)
COCO_LIMBS = (
    [2, 9, 10, 2, 12, 13, 2, 3, 4, 3, 2, 6, 7, 6, 2, 1, 1, 15, 16],
    [9, 10, 11, 12, 13, 14, 3, 4, 5, 17, 6, 7, 8, 18, 1, 15, 16, 17, 18],
)
MPI = (
    [10, 9, 13, 12, 11, 14, 15, 16, 3, 2, 1, 4, 5, 6, 8],
    [10, 9, 13, 12, 11, 14, 15, 16, 3, 2, 1, 4, 5, 6, 7],
)
MPI_LIMBS = (
    [1, 2, 3, 4, 2, 6, 7, 2, 15, 9, 10, 15, 12, 13],
    [2, 3, 4, 5, 6, 7, 8, 15, 9, 10, 11, 12, 13, 14],
)
SIXTEEN = [10, 9, 13, 12, 11, 14, 15, 16, 3, 2, 1, 4, 5, 6]
TWENTY_EIGHT = (
    [*SIXTEEN, 8, 7, 10, 9, 13, 12, 9, 14, 15, 3, 2, 4, 5, 7],
    [*SIXTEEN, 8, 7, 9, 13, 12, 11, 14, 15, 16, 2, 1, 5, 6, 8],
)
JOINTS = {56: COCO, 43: MPI, 14: (SIXTEEN, SIXTEEN), 28: TWENTY_EIGHT}
LIMBS = {56: COCO_LIMBS, 43: MPI_LIMBS}
RIGHT_LEFT = {
    56: ([3, 4, 5, 9, 10, 11, 15, 17], [6, 7, 8, 12, 13, 14, 16, 18]),
    43: ([3, 4, 5, 9, 10, 11], [6, 7, 8, 12, 13, 14]),
    14: ([3, 4, 5, 9, 10, 11], [6, 7, 8, 12, 13, 14]),
    28: ([3, 4, 5, 9, 10, 11, 18, 19, 20, 24, 25], [6, 7, 8, 12, 13, 14, 21, 22, 23, 26, 27]),
    9: ([1, 2, 3, 7], [4, 5, 6, 8]),
}
STORED = {56: 17, 43: 16, 14: 16, 28: 16, 9: 9, 20: 20}  # np_in_lmdb


def people(rng, parts, others):
    """Made-up annotations: centre, scale, and the parts' x, y and visibility, of each person."""
    made = []
    for _ in range(1 + others):
        points = rng.uniform(1, [WIDTH, HEIGHT], (parts, 2)).astype(np.float32)
        points[0] = -3, 5  # outside
        mark = rng.integers(0, 3, parts).astype(np.float32)
        mark[3] = 3
        made.append((rng.uniform(20, 50, 2).astype(np.float32), np.float32(0.7), points, mark))
    return made


def record(rng, made, channels):
    """A record with these people, as the forks' scripts write it."""
    data = rng.integers(0, 256, (channels, HEIGHT, WIDTH), np.uint8)
    data[:3] = cv2.GaussianBlur(data[:3].transpose(1, 2, 0), (0, 0), 2).transpose(2, 0, 1)
    data[4:5] = 255
    data[4:5, 10:30, 15:50] = 0
    rows, others = data[3], len(made) - 1
    rows[...] = 7

    def put(row, values, at=0):
        packed = struct.pack(f"<{len(values)}f", *values)
        rows[row, at : at + len(packed)] = np.frombuffer(packed, np.uint8)

    rows[0, :5] = np.frombuffer(b"COCO\0", np.uint8)
    put(1, [HEIGHT, WIDTH])
    rows[2, :3] = 0, others, 0
    put(2, [4, 11, 100], at=3)
    centre, scale, points, mark = made[0]
    put(3, centre)
    put(4, [scale])
    for row, values in zip((5, 6, 7), (*points.T, mark), strict=True):
        put(row, values)
    for p, (centre, _, points, mark) in enumerate(made[1:]):
        put(8 + p, centre)
        for row, values in enumerate((*points.T, mark)):
            put(9 + others + 3 * p + row, values)
    put(8 + others, [scale for _, scale, _, _ in made[1:]])
    return data


def write(folder: Path, records) -> str:
    with write_database(f"{folder}/db") as writer:
        for i, data in enumerate(records):
            writer.put(f"{i:04d}", array_to_datum(data))
    return f"{folder}/net.prototxt"


def feed(path, parts, settings="", transform="random_seed: 3", batch=1, tops=2, **other):
    names = "".join(f'top: "t{i}" ' for i in range(tops))
    text = (
        f'layer {{ type: "CPMData" {names} transform_param {{ {transform} }} '
        f'data_param {{ source: "db" backend: LMDB batch_size: {batch} }} cpm_transform_param {{ '
        f"num_parts: {parts} np_in_lmdb: {STORED.get(parts, 16)} {settings} }} }}"
    )
    return Feed(text, tops=tops, path=path, **other)


class Loop:
    """What the forks' code makes of a record, one number after the other."""

    def __init__(self, made, parts, as_body, unlabeled):
        self.people = []
        for i, (centre, _, points, mark) in enumerate(made):
            joints = []
            for (x, y), m in zip(points - 1, mark, strict=True):
                seen = 0 if m == 0 else 1
                if x < 0 or y < 0 or x >= WIDTH or y >= HEIGHT:
                    seen = 2
                if m == 3 and i == 0 and unlabeled:
                    seen = 3
                joints.append([float(x), float(y), seen])
            if as_body and parts in JOINTS:
                joints = [
                    self.between(joints[a - 1], joints[b - 1])
                    for a, b in zip(*JOINTS[parts], strict=True)
                ]
            self.people.append([[float(centre[0]) - 1, float(centre[1]) - 1, 0], joints])
        self.parts, self.as_body = parts, as_body

    @staticmethod
    def between(a, b):
        seen = 1 if a[2] and b[2] else 0
        if 3 in (a[2], b[2]):
            seen = 3
        if 2 in (a[2], b[2]):
            seen = 2
        return [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2, seen]

    def move(self, rule):
        for centre, joints in self.people:
            for point in (centre, *joints):
                point[0], point[1] = rule(point[0], point[1])

    def change(self, image, mask, dice, scale, target, perturb, degrees, multipliers, crop, flips):
        """Scale, turn, cut and mirror; returns image and mask."""
        factor = target / scale
        if multipliers and dice[0] <= multipliers[0]:
            factor *= (multipliers[2] - multipliers[1]) * dice[1] + multipliers[1]
        layers = [(image, 128), (mask, 255)]
        layers = [
            (cv2.resize(m, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC), fill)
            for m, fill in layers
        ]
        self.move(lambda x, y: (x * factor, y * factor))
        degree = (dice[2] - 0.5) * 2 * degrees
        h, w = layers[0][0].shape[:2]
        c, s = math.cos(math.radians(degree)), math.sin(math.radians(degree))
        xs, ys = [], []
        for cx, cy in ((0, 0), (w, 0), (0, h), (w, h)):
            dx, dy = cx - w / 2, cy - h / 2
            xs.append(w / 2 + c * dx + s * dy)
            ys.append(h / 2 - s * dx + c * dy)
        wide = math.ceil(max(xs)) - math.floor(min(xs)) + 1
        high = math.ceil(max(ys)) - math.floor(min(ys)) + 1
        matrix = np.array(
            [
                [c, s, (1 - c) * w / 2 - s * h / 2 + wide / 2 - w / 2],
                [-s, c, s * w / 2 + (1 - c) * h / 2 + high / 2 - h / 2],
            ]
        )
        layers = [
            (
                cv2.warpAffine(
                    m, matrix, (wide, high), flags=cv2.INTER_CUBIC, borderValue=(fill,) * 3
                ),
                fill,
            )
            for m, fill in layers
        ]
        self.move(lambda x, y: tuple(float(np.float32(v)) for v in matrix @ np.array([x, y, 1.0])))
        off = [int((d - 0.5) * 2 * perturb) for d in dice[3:5]]
        centre = self.people[0][0]
        left = round(centre[0] + off[0]) - crop[0] // 2
        top = round(centre[1] + off[1]) - crop[1] // 2
        cuts = []
        for m, fill in layers:
            part = np.full((crop[1], crop[0], *m.shape[2:]), fill, np.uint8)
            for i in range(crop[1]):
                for j in range(crop[0]):
                    if 0 <= top + i < m.shape[0] and 0 <= left + j < m.shape[1]:
                        part[i, j] = m[top + i, left + j]
            cuts.append(part)
        self.move(lambda x, y: (x - left, y - top))
        if dice[5] <= flips:
            cuts = [m[:, ::-1].copy() for m in cuts]
            self.move(lambda x, y: (crop[0] - 1 - x, y))
            if self.as_body:
                for _, joints in self.people:
                    for a, b in zip(*RIGHT_LEFT[self.parts], strict=True):
                        joints[a - 1], joints[b - 1] = joints[b - 1], joints[a - 1]
        return cuts

    @staticmethod
    def peak(image, x, y, stride, sigma):
        for i in range(image.shape[0]):
            for j in range(image.shape[1]):
                dx, dy = stride / 2 - 0.5 + j * stride - x, stride / 2 - 0.5 + i * stride - y
                exponent = (dx * dx + dy * dy) / 2 / sigma / sigma
                if exponent <= 4.6052:
                    image[i, j] = min(1, image[i, j] + math.exp(-exponent))

    def heat(self, joints, people, shape, stride, sigma):
        maps = np.zeros((joints + 1, *shape))
        for part in range(joints):
            for _, points in people:
                if points[part][2] <= 1:
                    self.peak(maps[part], *points[part][:2], stride, sigma)
        maps[-1] = 1 - maps[:-1].max(axis=0)
        return maps

    def limbs(self, shape):
        ends = list(zip(*LIMBS[self.parts], strict=True))
        maps = np.zeros((2 * len(ends), *shape))
        for k, (first, second) in enumerate(ends):
            for _, joints in self.people:
                a, b = joints[first - 1], joints[second - 1]
                length = math.hypot(b[0] - a[0], b[1] - a[1])
                if a[2] > 1 or b[2] > 1 or not length:
                    continue
                a, b = ([v / 8 for v in end[:2]] for end in (a, b))
                ux, uy = (b[0] - a[0]) / (length / 8), (b[1] - a[1]) / (length / 8)
                for i in range(shape[0]):
                    for j in range(shape[1]):
                        # the box of the limb, one cell wider, its ends rounded
                        lows = [math.floor(min(p, q) - 1 + 0.5) for p, q in zip(a, b, strict=True)]
                        ends_ = [math.floor(max(p, q) + 1 + 0.5) for p, q in zip(a, b, strict=True)]
                        if not (lows[0] <= j < ends_[0] and lows[1] <= i < ends_[1]):
                            continue
                        if abs((j - a[0]) * uy - (i - a[1]) * ux) <= 1:
                            maps[2 * k, i, j], maps[2 * k + 1, i, j] = ux, uy
        return maps


def expected(data, made, parts, dice, settings, stride=4, sigma=7.0, center=21.0, as_body=True):
    """Data and maps of a record, from its random numbers, or as it lies."""
    loop = Loop(made, parts, as_body, parts in LIMBS)
    image = np.ascontiguousarray(data[:3].transpose(1, 2, 0))
    mask = data[4].copy() if parts in LIMBS else np.zeros(image.shape[:2], np.uint8)
    if dice is not None:
        image, mask = loop.change(image, mask, dice, float(made[0][1]), **settings)
    out = np.zeros((len(data), *image.shape[:2]))
    out[:3] = (image.transpose(2, 0, 1) - 128.0) / 256
    shape = image.shape[0] // stride, image.shape[1] // stride
    if parts not in LIMBS:
        loop.peak(out[3], *loop.people[0][0][:2], 1, center)
        own = loop.heat(parts, loop.people[:1], shape, stride, sigma)
        return out, np.concatenate([own, loop.heat(parts, loop.people, shape, stride, sigma)])
    small = cv2.resize(mask, None, fx=1 / stride, fy=1 / stride, interpolation=cv2.INTER_CUBIC)
    weights = np.stack([small[: shape[0], : shape[1]] / 255] * (parts + 1))
    joints = loop.people[0][1]
    for i, joint in enumerate(joints):
        if joint[2] == 3:
            weights[i] = 0
    heat = loop.heat(len(joints), loop.people, shape, stride, sigma)
    return out, np.concatenate([weights, loop.limbs(shape), heat])


CHANGES = {
    "target": 0.6,
    "perturb": 10.0,
    "degrees": 40.0,
    "multipliers": (1.0, 0.5, 1.1),
    "crop": (48, 40),
    "flips": 0.5,
}
CHANGED = (
    "crop_size_x: 48 crop_size_y: 40 target_dist: 0.6 max_rotate_degree: 40 scale_prob: 1 "
    "scale_min: 0.5 scale_max: 1.1 stride: {stride}"
)
DEVICES = [Device, pytest.param(CudaDevice, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [56, 43, 14, 28, 9])
def test_changed_people_against_a_loop(parts, device, tmp_path):
    rng = np.random.default_rng(parts)
    channels = 6 if parts in LIMBS else 4
    made = [people(rng, STORED[parts], others) for others in (2, 0, 1)]
    records = [record(rng, some, channels) for some in made]
    stride = 8 if parts in LIMBS else 4
    layer = feed(write(tmp_path, records), parts, CHANGED.format(stride=stride), device=device())
    dice = np.random.RandomState(3)._bit_generator.random_raw(6 * 6).reshape(6, 6) / 0xFFFFFFFF
    mirrored = set()
    for i in range(6):  # two epochs, of other random numbers
        data, maps = layer.forward()
        known = expected(records[i % 3], made[i % 3], parts, dice[i], CHANGES, stride)
        mirrored.add(bool(dice[i, 5] <= 0.5))
        # the last bit of an angle may move a value to the next of 256
        assert np.abs(data[0] - known[0]).max() <= 1 / 256 + 1e-6
        assert (np.abs(data[0] - known[0]) > 1e-6).mean() < 1e-3
        np.testing.assert_allclose(maps[0], known[1], atol=2e-5)
    assert mirrored == {True, False}
    layer.layer.close()


@pytest.mark.parametrize("parts", [56, 14])
def test_people_as_they_lie_in_the_test_phase(parts, tmp_path):
    rng = np.random.default_rng(parts)
    made = people(rng, STORED[parts], 1)
    data = record(rng, made, 6)
    layer = feed(write(tmp_path, [data]), parts, "sigma: 5 sigma_center: 9", phase=TEST)
    found = layer.forward()
    known = expected(data, made, parts, None, None, sigma=5.0, center=9.0)
    for ours, theirs in zip(found, known, strict=True):
        np.testing.assert_allclose(ours[0], theirs, atol=2e-5)


def test_hands_have_no_sides(tmp_path):
    rng = np.random.default_rng(0)
    made = people(rng, 20, 0)
    data = record(rng, made, 4)
    settings = "transform_body_joint: false flip_prob: 1 " + CHANGED.format(stride=4)
    layer = feed(write(tmp_path, [data]), 20, settings)
    dice = np.random.RandomState(3)._bit_generator.random_raw(6) / 0xFFFFFFFF
    known = expected(data, made, 20, dice, CHANGES | {"flips": 1.0}, as_body=False)
    for ours, theirs in zip(layer.forward(), known, strict=True):
        np.testing.assert_allclose(ours[0], theirs, atol=2e-5)


def test_colours(tmp_path):
    rng = np.random.default_rng(1)
    data = record(rng, people(rng, 16, 0), 4)
    path = write(tmp_path, [data])
    grey, _ = feed(path, 14, "gray: 1", phase=TEST).forward()
    image = cv2.cvtColor(data[:3].transpose(1, 2, 0), cv2.COLOR_BGR2GRAY)
    for plane in grey[0, :3]:
        np.testing.assert_array_equal(plane, (image - 128.0) / 256)
    even, _ = feed(path, 14, "do_clahe: true clahe_tile_size: 4", phase=TEST).forward()
    lab = cv2.cvtColor(data[:3].transpose(1, 2, 0), cv2.COLOR_BGR2Lab)
    lab[..., 0] = cv2.createCLAHE(4, (4, 4)).apply(np.ascontiguousarray(lab[..., 0]))
    image = cv2.cvtColor(lab, cv2.COLOR_Lab2BGR).transpose(2, 0, 1)
    np.testing.assert_array_equal(even[0, :3], (image - 128.0) / 256)


def test_a_part_that_lies_far_outside_and_an_image_far_away(tmp_path):
    rng = np.random.default_rng(1)
    made = people(rng, 16, 0)
    made[0][0][:] = -500, 900  # the centre
    data = record(rng, made, 4)
    found, maps = feed(write(tmp_path, [data]), 14, CHANGED.format(stride=4)).forward()
    assert (found[0, :3] == 0).all()  # grey
    assert (maps[0, -1] == 1).all()  # background


def test_a_resumed_run_goes_on_with_the_same_people(tmp_path):
    rng = np.random.default_rng(2)
    path = write(tmp_path, [record(rng, people(rng, 17, i % 3), 6) for i in range(5)])
    settings = CHANGED.format(stride=8)
    one = feed(path, 56, settings, transform="", batch=2)
    batches = [one.forward() for _ in range(4)]
    again = feed(path, 56, settings, transform="", batch=2)
    again.forward()
    state = again.layer.state()
    other = feed(path, 56, settings, transform="", batch=2, seed=9)
    other.layer.set_state(state)
    other.layer.skip(1)
    for batch in batches[2:]:
        for ours, theirs in zip(other.forward(), batch, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_images_without_maps(tmp_path):
    rng = np.random.default_rng(2)
    path = write(tmp_path, [record(rng, people(rng, 17, 0), 6)])
    (data,) = feed(path, 56, CHANGED.format(stride=8), tops=1).forward()
    assert data.shape == (1, 6, 40, 48)
    assert (data[:, 3:] == 0).all()


REFUSED = {
    "crop_size": (56, "crop_size: 368", "", "has crop_size_x and crop_size_y, no crop_size"),
    "a table": (56, 'aug_way: "table"', "", 'aug_way is "rand", not "table"'),
    "no stride": (56, "stride: 0", "", "needs a stride of 1 or more"),
    "a large stride": (56, "stride: 400", "", "smaller than the stride 400 leaves no map"),
    "sigma": (56, "sigma: 0", "", "needs a sigma above 0"),
    "endless": (56, "target_dist: inf", "", "needs a target_dist above 0"),
    "no angle": (56, "max_rotate_degree: nan", "", "max_rotate_degree cannot be nan"),
    "no tiles": (56, "do_clahe: true clahe_tile_size: 0", "", "a clahe_tile_size of 1 to 256"),
    "many tiles": (56, "do_clahe: true clahe_tile_size: 1e6", "", "a clahe_tile_size of 1 to 256"),
    "clip": (56, "do_clahe: true clahe_clip_limit: inf", "", "clahe_clip_limit cannot be inf"),
    "hands of bodies": (56, "transform_body_joint: false", "", "transform_body_joint is true"),
    "few parts": (57, "", "", "num_parts 57 needs an np_in_lmdb of 57, not 16"),
    "transform_param": (56, "", "crop_size: 3", "by cpm_transform_param, not by transform_param"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_refused(case, tmp_path):
    parts, settings, transform, message = REFUSED[case]
    rng = np.random.default_rng(2)
    path = write(tmp_path, [record(rng, people(rng, 17, 0), 6)])
    with pytest.raises(CaffeError) as error:
        feed(path, parts, settings, transform=transform)
    assert message in str(error.value)


def broken(case):
    """A record that cannot be read."""
    rng = np.random.default_rng(2)
    data = record(rng, people(rng, 17, 1), 6)
    if case == "others":
        data[3, 2, 1] = 200
    elif case == "many":
        data[3, 2, 1] = 15
    elif case == "scale":
        data[3, 4, :4] = 0
    elif case == "tiny":
        data[3, 4, :4] = np.frombuffer(struct.pack("<f", 1e-30), np.uint8)
    elif case == "nowhere":
        data[3, 3, :4] = np.frombuffer(struct.pack("<f", math.nan), np.uint8)
    elif case == "small":
        data = np.ascontiguousarray(data[:, :8])
    elif case == "colours":
        data = data[:3]
    else:
        data = data.astype(np.float32)
    return data


BROKEN = {
    "others": "annotations of -56 other people with 17 parts (np_in_lmdb) do not fit",
    "many": "annotations of 15 other people with 17 parts (np_in_lmdb) do not fit",
    "scale": "a person of scale 0",
    "tiny": "pixels made 6e+29 times as large",
    "nowhere": "a person at [nan",
    "small": "an image of 8 x 80 pixels has no room for annotations",
    "colours": "an image of shape 3 60 80 (14400), uint8, not 5 or more channels of 8 bits",
    "floats": "an image of shape 6 60 80 (28800), float32, not 5 or more channels of 8 bits",
}


@pytest.mark.parametrize("case", BROKEN)
def test_records_that_cannot_be_read_are_named(case, tmp_path):
    path = write(tmp_path, [broken(case)])
    settings = "target_dist: 0.6 scale_prob: 0"
    with pytest.raises(CaffeError) as error:
        feed(path, 56, settings).forward()
    assert 'record "0000"' in str(error.value)
    assert BROKEN[case] in str(error.value)


def test_images_of_several_sizes_are_for_batches_of_one(tmp_path):
    rng = np.random.default_rng(2)
    data = record(rng, people(rng, 17, 0), 6)
    path = write(tmp_path, [data, np.ascontiguousarray(data[..., :70])])
    with pytest.raises(CaffeError, match="TEST needs a batch_size of 1"):
        feed(path, 56, phase=TEST, batch=2).forward()
    one = feed(path, 56, "stride: 10", phase=TEST)
    assert [one.forward()[1].shape for _ in range(2)] == [(1, 114, 6, 8), (1, 114, 6, 7)]

"""ImageGtData: images cut around their boxes, and maps of these, against a loop that follows
MS-CNN's code.
"""

from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.core.errors import CaffeError
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from tests.layer.test_data import Feed

HEIGHT, WIDTH = 60, 90
FIELDS = [(8, 16, 20), (8, 24, 24), (16, 40, 36)]  # downsample_rate, field_w, field_h
MEANS = [104, 117, 123]


def scene(rng):
    """Image, boxes (class, ignored, x1, y1, x2, y2) and regions of no interest."""
    image = cv2.GaussianBlur(rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8), (0, 0), 1.5)
    boxes = []
    for _ in range(rng.integers(0, 5)):
        x, y = rng.integers(0, WIDTH - 12), rng.integers(0, HEIGHT - 12)
        w, h = rng.integers(6, 40, 2)
        boxes.append([rng.integers(1, 4), rng.random() < 0.2, x, y, x + w, y + h])
    x, y = rng.integers(0, WIDTH - 40), rng.integers(0, HEIGHT - 30)
    regions = [[x, y, x + 35, y + 25]] if rng.random() < 0.5 else []
    return image, np.array(boxes, float).reshape(-1, 6), np.array(regions, float).reshape(-1, 4)


def write(folder: Path, scenes) -> str:
    lines = []
    for i, (image, boxes, regions) in enumerate(scenes):
        cv2.imwrite(f"{folder}/{i}.png", image)
        lines += [f"# {i}", f"{i}.png", "3", *map(str, image.shape[:2]), str(len(boxes))]
        lines += [" ".join(str(int(v)) for v in box) for box in boxes]
        lines += [str(len(regions)), *(" ".join(str(int(v)) for v in box) for box in regions)]
    (folder / "windows.txt").write_text("\n".join(lines) + "\n")
    return f"{folder}/net.prototxt"


def feed(
    path, settings="", transform="random_seed: 5", batch=1, fields=FIELDS, boxes=True, **other
):
    rows = " ".join(f"downsample_rate: {r} field_w: {w} field_h: {h}" for r, w, h in fields)
    tops = 1 + len(fields) + boxes
    names = " ".join(f'top: "t{i}"' for i in range(tops))
    text = (
        f'layer {{ type: "ImageGtData" {names} transform_param {{ {transform} }} '
        f'image_gt_data_param {{ source: "windows.txt" batch_size: {batch} {rows} '
        f"output_gt_boxes: {'true' if boxes else 'false'} {settings} }} }}"
    )
    return Feed(text, tops=tops, path=path, **other)


def half_up(number):
    return int(np.floor(abs(number) + 0.5) * np.sign(number))


def share(a, b, of_first=False):
    """Boxes x1, y1, x2, y2."""
    areas = [max(box[2] - box[0], 0) * max(box[3] - box[1], 0) for box in (a, b)]
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if min(*areas, wide, high) <= 0:
        return 0
    return wide * high / (areas[0] if of_first else sum(areas) - wide * high)


class Cut:
    """An image with boxes and regions, mirrored, resized and cut as both of Cai's forks do."""

    def mirror(self):
        self.image = self.image[:, ::-1].copy()
        width = self.image.shape[1]
        for box in self.boxes + self.regions:
            box[0], box[2] = width - box[2], width - box[0]

    def cut(self, size, fx, fy, cx, cy, rng):
        """Resize by the factors and cut around the centre; return for each axis where the pixels
        are put, where they begin, and their number.
        """
        height, width = self.image.shape[:2]
        if fx > 1.5 or fy > 1.5:
            w, h = min(half_up(1.2 * width / fx), width), min(half_up(1.2 * height / fy), height)
            x, y = max(half_up(cx - w / 2), 0), max(half_up(cy - h / 2), 0)
            x, y = x - max(x + w - width, 0), y - max(y + h - height, 0)
            self.image = self.image[y : y + h, x : x + w]
            cx, cy = cx - x, cy - y
            self.affine(1, 1, -x, -y)
            height, width = h, w
        width, height = half_up(width * fx), half_up(height * fy)
        if (fx, fy) != (1, 1):
            self.image = cv2.resize(self.image, (width, height))
        self.affine(fx, fy, 0, 0)
        noise = rng.integers(-10, 10, 2)
        ends = []
        for side, cut, centre, off in (
            (width, size[1], cx * fx, noise[0]),
            (height, size[0], cy * fy, noise[1]),
        ):
            src = dst = 0
            if side < cut:
                src = min(max(half_up((cut - side) / 2) + off, 0), cut - side)
            elif side > cut:
                dst = min(max(half_up(centre) + off - half_up(cut / 2), 0), side - cut)
            ends.append((src, dst, min(side, cut)))
        (sx, dx, _), (sy, dy, _) = ends
        self.affine(1, 1, sx - dx, sy - dy)
        return ends

    def affine(self, fx, fy, x, y):
        for box in self.boxes + self.regions:
            box[:] = box[0] * fx + x, box[1] * fy + y, box[2] * fx + x, box[3] * fy + y


class Loop(Cut):
    """What MS-CNN's code makes of a scene with the numbers that a generator draws."""

    def __init__(self, scene, rng, size, *, mirror=False, resize=None, scales=None, aspects=None,
                 least=(0, 0), means=MEANS):  # fmt: skip
        self.image, boxes, regions = scene
        self.boxes, self.regions = boxes[:, 2:].tolist(), regions.tolist()
        self.classes, self.ignored = boxes[:, 0].tolist(), [bool(b) for b in boxes[:, 1]]
        if mirror and rng.integers(2):
            self.mirror()
        if resize:
            fx, fy = resize[1] / self.image.shape[1], resize[0] / self.image.shape[0]
            self.image = cv2.resize(self.image, resize[::-1])
            self.affine(fx, fy, 0, 0)
        height, width = self.image.shape[:2]
        fx = fy = 1.0
        if self.boxes:
            chosen = self.boxes[rng.integers(len(self.boxes))]
            cx, cy = (chosen[0] + chosen[2]) / 2, (chosen[1] + chosen[3]) / 2
            if scales and rng.integers(2):
                fx, fy = self.factors(chosen, rng, scales, aspects)
        else:
            cx, cy = (
                rng.integers(side - cut + 1) + cut / 2 if side >= cut else side / 2
                for side, cut in ((width, size[1]), (height, size[0]))
            )
        (sx, dx, w), (sy, dy, h) = self.cut(size, fx, fy, cx, cy, rng)
        self.pixels = np.zeros((3, *size))
        for c in range(3):
            for i in range(h):
                for j in range(w):
                    self.pixels[c, sy + i, sx + j] = float(self.image[dy + i, dx + j, c]) - means[c]
        self.seen = sx, sy, w, h
        for k, (x1, y1, x2, y2) in enumerate(self.boxes):
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            outside = x < 0 or x >= size[1] or y < 0 or y >= size[0]
            if outside or x2 - x1 + 1 < least[0] or y2 - y1 + 1 < least[1]:
                self.ignored[k] = True

    @staticmethod
    def factors(box, rng, scales, aspects):
        low, high = scales
        count = half_up(2 * np.log2(high / low) + 1)
        sizes = [s / 2 for s in range(count)]
        w, h = box[2] - box[0], box[3] - box[1]
        likeness = [min(w * h, (low * 2**s) ** 2) / max(w * h, (low * 2**s) ** 2) for s in sizes]
        nearest = sizes[likeness.index(max(likeness))]
        fx = fy = 2.0 ** (rng.choice(sizes) - nearest)
        if aspects and rng.integers(2):
            count = half_up((aspects[1] - aspects[0]) / 0.05)
            change = rng.choice([a * 0.05 + aspects[0] for a in range(count)]) / (w / h)
            if rng.integers(2):
                if 0.8 * low <= h * fy / change <= 1.2 * high:
                    fy /= change
            elif 0.8 * low <= w * fx * change <= 1.2 * high:
                fx *= change
        return fx, fy

    def maps(self, size, threshold):
        maps, times, best = [], [0] * len(self.boxes), [(0, 0)] * len(self.boxes)
        sx, sy, w, h = self.seen
        for k, (rate, fw, fh) in enumerate(FIELDS):
            rows, columns = half_up(size[0] / rate), half_up(size[1] / rate)
            values = np.zeros((6, rows, columns))
            x0, y0 = half_up(sx / rate), half_up(sy / rate)
            for i, j in np.ndindex(rows, columns):
                inside = x0 <= j < x0 + half_up(w / rate) and y0 <= i < y0 + half_up(h / rate)
                x, y = (j + 0.5) * rate, (i + 0.5) * rate
                field = x - fw / 2, y - fh / 2, x + fw / 2, y + fh / 2
                silent = sum(share(field, region, of_first=True) for region in self.regions)
                if not inside or silent >= 0.4:
                    values[5, i, j] = 1
                    continue
                for n, box in enumerate(self.boxes):
                    found = share(box, field)
                    if found > values[5, i, j]:
                        values[5, i, j], match = found, n
                    if found > best[n][0]:
                        best[n] = found, k
                if values[5, i, j] > threshold:
                    self.put(values, i, j, match)
                    times[match] += 1
            maps.append(values)
        for n, box in enumerate(self.boxes):
            found, k = best[n]
            if self.ignored[n] or times[n] or found < 0.2:
                continue
            rate = FIELDS[k][0]
            i = min(max(int(np.floor((box[1] + box[3]) / 2 / rate)), 0), maps[k].shape[1] - 1)
            j = min(max(int(np.floor((box[0] + box[2]) / 2 / rate)), 0), maps[k].shape[2] - 1)
            if maps[k][0, i, j] <= 0:
                self.put(maps[k], i, j, n)
        return maps

    def put(self, values, i, j, n):
        x1, y1, x2, y2 = self.boxes[n]
        values[0, i, j] = 0 if self.ignored[n] else self.classes[n]
        values[1:5, i, j] = (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1


CASES = {
    "as they lie": ("", {"size": (HEIGHT, WIDTH)}),
    "cut": ("crop_width: 48 crop_height: 40", {"size": (40, 48)}),
    "resized": (
        "resize_width: 100 resize_height: 50 crop_width: 48 min_gt_width: 12 min_gt_height: 14",
        {"size": (50, 48), "resize": (50, 100), "least": (12, 14)},
    ),
    "scaled": (
        "crop_width: 64 crop_height: 48 do_multiple_scale: true min_scale: 10 max_scale: 60",
        {"size": (48, 64), "scales": (10, 60)},
    ),
    "of other aspects": (
        "crop_width: 64 crop_height: 48 do_multiple_scale: true min_scale: 10 max_scale: 60 "
        "min_whaspect: 0.5 max_whaspect: 2",
        {"size": (48, 64), "scales": (10, 60), "aspects": (0.5, 2)},
    ),
}
TRANSFORM = "random_seed: 5 mean_value: 104 mean_value: 117 mean_value: 123"


@pytest.mark.parametrize("device", [Device, pytest.param(CudaDevice, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case, device, tmp_path):
    settings, known = CASES[case]
    mirror = case != "as they lie"
    scenes = [scene(np.random.default_rng(i)) for i in range(12)]
    transform = f"{TRANSFORM} mirror: {'true' if mirror else 'false'}"
    layer = feed(
        write(tmp_path, scenes), f"fg_threshold: 0.45 {settings}", transform, device=device()
    )
    words = np.random.RandomState(5)._bit_generator.random_raw(24).reshape(12, 2)
    places = boxes = 0
    for one, seeds in zip(scenes, words, strict=True):
        rng = np.random.Generator(np.random.PCG64(seeds.tolist()))
        loop = Loop(one, rng, mirror=mirror, **known)
        data, *maps, found = layer.forward()
        np.testing.assert_allclose(data[0], loop.pixels, atol=1e-4)
        for ours, theirs in zip(maps, loop.maps(known["size"], 0.45), strict=True):
            np.testing.assert_allclose(ours[0], theirs, rtol=1e-5, atol=1e-4)
            places += (theirs[0] > 0).sum()
        rows = [
            [0, *box, number, ignored]
            for box, number, ignored in zip(loop.boxes, loop.classes, loop.ignored, strict=True)
        ]
        wanted = rows or [[0, 1, 1, 2, 2, 1, 1]]
        np.testing.assert_allclose(found[..., 0, 0], wanted, rtol=1e-5, atol=1e-4)
        boxes += len(rows)
    assert places > 30
    assert boxes > 15
    layer.layer.close()


def test_boxes_of_a_batch_name_their_image(tmp_path):
    scenes = [scene(np.random.default_rng(i)) for i in range(6)]
    counts = [len(boxes) for _, boxes, _ in scenes]
    layer = feed(write(tmp_path, scenes), "scale: 0.5", "", batch=3)
    for i in (0, 3):
        data, *_, found = layer.forward()
        assert found[:, 0].ravel().tolist() == np.repeat(range(3), counts[i : i + 3]).tolist()
        wanted = np.stack([image for image, *_ in scenes[i : i + 3]]).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(data, wanted * 0.5)


def test_an_epoch_has_images_with_boxes_several_times(tmp_path):
    scenes = [scene(np.random.default_rng(i)) for i in range(6)]
    layer = feed(write(tmp_path, scenes), "shuffle: true fg_img_multiple: 3", "", boxes=False)
    source = layer.layer._reader._loader.source
    times = [3 if (boxes[:, 1] == 0).any() else 1 for _, boxes, _ in scenes]
    assert len(source) == sum(times)
    assert sorted(source.key(i) for i in source.take(len(source))) == sorted(
        f"{i}.png" for i, count in enumerate(times) for _ in range(count)
    )


def test_a_resumed_run_goes_on_with_the_same_images(tmp_path):
    settings = CASES["of other aspects"][0] + " shuffle: true"
    path = write(tmp_path, [scene(np.random.default_rng(i)) for i in range(5)])
    one = feed(path, settings, "mirror: true", batch=2)
    batches = [one.forward() for _ in range(5)]
    again = feed(path, settings, "mirror: true", batch=2)
    again.forward()
    other = feed(path, settings, "mirror: true", batch=2, seed=9)
    other.layer.set_state(again.layer.state())
    other.layer.skip(1)
    for batch in batches[2:]:
        for ours, theirs in zip(other.forward(), batch, strict=True):
            np.testing.assert_array_equal(ours, theirs)


SETTINGS = {
    "no field": {"settings": "field_w: 4"},
    "coord_num": {"settings": "coord_num: 5"},
    "one side": {"settings": "resize_width: 5"},
    "a large crop": {"settings": "crop_width: 500"},
    "scales": {"settings": "do_multiple_scale: true min_scale: 5 max_scale: 4"},
    "aspects": {"settings": "min_whaspect: 1 max_whaspect: 1"},
    "crop_size": {"transform": "crop_size: 5"},
    "no batch": {"batch": 0},
    "a large rate": {"fields": [(8, 16, 20), (130, 16, 20)]},
    "two means": {"transform": "mean_value: 1 mean_value: 2"},
    "endless aspects": {"settings": "min_whaspect: 1 max_whaspect: inf"},
    "no aspect": {"settings": "min_whaspect: nan max_whaspect: 1"},
}
MESSAGES = {
    "no field": "as many downsample_rate as field_w and field_h",
    "coord_num": "coord_num is 4, not 5",
    "one side": "resize_width and resize_height must both be given or neither",
    "a large crop": "a crop of 60 x 500 is larger than the image, 60 x 90",
    "scales": "no scale between 5 and 4",
    "aspects": "max_whaspect must be min_whaspect + 0.05 or more",
    "crop_size": "no mean_file and no crop_size",
    "no batch": "batch_size of 1 or more",
    "a large rate": "a downsample_rate of 130 leaves no map of images of 60 x 90",
    "two means": "2 mean_value for 3 channels",
    "endless aspects": "both above 0 and below 1000",
    "no aspect": "max_whaspect must be min_whaspect + 0.05 or more",
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_refused(case, tmp_path):
    path = write(tmp_path, [scene(np.random.default_rng(0))])
    with pytest.raises(CaffeError) as error:
        feed(path, **SETTINGS[case])
    assert MESSAGES[case] in str(error.value)


FILES = {
    "": "lists no images",
    "0 a.png": 'windows.txt: "0" where block 0 should start with "#"',
    "# 0 a.png 3 60 90 1 1 0 5 5": "block 0 is damaged",
    "# 0 a.png 3 60 90 0": "block 0 is damaged",
    "# 0 a.png 3 60 90 1 0 0 5 5 9 9 0": "a box in block 0 needs a class of 1 or more",
    "# 0 a.png 3 60 90 1 1 0 5 5 9 inf 0": "block 0 is damaged",
    "# 0 a.png 3 60 90 -1 0": "block 0 is damaged",
    "# 0 a.png 3 60 90 0 0": "a.png cannot be read",
    "# 0 a.png 3 0 0 0 0": "block 0 is damaged",
}


@pytest.mark.parametrize("text", FILES)
def test_files_that_cannot_be_read_are_named(text, tmp_path):
    (tmp_path / "windows.txt").write_text(text)
    with pytest.raises(CaffeError) as error:
        feed(f"{tmp_path}/net.prototxt").forward()
    assert FILES[text] in str(error.value)
    assert str(tmp_path) in str(error.value)

"""DetectionData and EvalData: images of many sizes with true boxes, and maps of these, against a
loop that follows Cascade R-CNN's code.
"""

from math import log2, sqrt

import cv2
import numpy as np
import pytest

from caffepy.core.errors import CaffeError
from caffepy.data.overlap import pixel_overlaps
from tests.layer.test_data import Feed
from tests.layer.test_field_data import FIELDS, MEANS, Cut, half_up

MEAN = " ".join(f"mean_value: {value}" for value in MEANS)


def scene(rng, tall):
    """Image, boxes (class, ignored, difficult, x1, y1, x2, y2) and regions of no interest."""
    height, width = (80, 60) if tall else (60, 90)
    image = cv2.GaussianBlur(rng.integers(0, 256, (height, width, 3), np.uint8), (0, 0), 1.5)
    boxes = []
    for _ in range(rng.integers(0, 5)):
        x, y = rng.integers(0, width - 12), rng.integers(0, height - 12)
        w, h = rng.integers(6, 40, 2)
        flags = rng.random(2) < 0.2
        boxes.append([rng.integers(1, 4), *flags, x, y, x + w, y + h])
    x, y = rng.integers(0, width - 40), rng.integers(0, height - 30)
    regions = [[x, y, x + 35, y + 25]] if rng.random() < 0.5 else []
    return image, np.array(boxes, float).reshape(-1, 7), np.array(regions, float).reshape(-1, 4)


SCENES = [scene(np.random.default_rng(i), i % 3 == 0) for i in range(12)]


def write(folder, scenes=SCENES):
    lines = []
    for i, (image, boxes, regions) in enumerate(scenes):
        cv2.imwrite(f"{folder}/{i}.png", image)
        lines += [f"# {i}", f"{i}.png", "3", *map(str, image.shape[:2]), str(len(boxes))]
        lines += [" ".join(str(int(v)) for v in box) for box in boxes]
        lines += [str(len(regions)), *(" ".join(str(int(v)) for v in box) for box in regions)]
    (folder / "windows.txt").write_text("\n".join(lines) + "\n")
    return f"{folder}/net.prototxt"


def feed(path, settings="", transform="", batch=1, fields=FIELDS, boxes=True, **other):
    rows = " ".join(f"stride: {r} field_w: {w} field_h: {h}" for r, w, h in fields)
    tops = 1 + len(fields) + boxes
    names = " ".join(f'top: "t{i}"' for i in range(tops))
    text = (
        f'layer {{ type: "DetectionData" {names} transform_param {{ random_seed: 5 {transform} }} '
        f'detection_data_param {{ source: "windows.txt" batch_size: {batch} {rows} '
        f"output_gt_boxes: {'true' if boxes else 'false'} {settings} }} }}"
    )
    return Feed(text, tops=tops, path=path, **other)


def share(a, b, of_first=False):
    """Boxes x1, y1, x2, y2 with their last pixels."""
    if min(a[2] - a[0], a[3] - a[1], b[2] - b[0], b[3] - b[1]) < 0:
        return 0
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = (wide + 1) * (high + 1) if wide >= 0 and high > 0 else 0
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    return both / (areas[0] if of_first else sum(areas) - both)


def test_overlaps_of_pixels():
    rng = np.random.default_rng(0)
    boxes = rng.integers(0, 9, (40, 4)).astype(float)
    for of_first in (False, True):
        ours = pixel_overlaps(boxes[:, None], boxes, of_first=of_first)
        theirs = [[share(a, b, of_first) for b in boxes] for a in boxes]
        np.testing.assert_allclose(ours, theirs)


class Loop(Cut):
    """What Cascade R-CNN's code makes of a scene with the numbers that a generator draws."""

    def __init__(self, one, rng, size, *, mirror=False, resize=None, bounds=None, of_box=False,
                 aspects=None, least=(0, 0)):  # fmt: skip
        self.image, boxes, regions = one
        self.boxes, self.regions = boxes[:, 3:].tolist(), regions.tolist()
        self.flags = boxes[:, :3].tolist()
        if mirror and rng.integers(2):
            self.mirror()
        height, width = self.image.shape[:2]
        if resize:
            new = resize(height, width)
            if new != (height, width):
                self.image = cv2.resize(self.image, new[::-1])
                self.affine(new[1] / width, new[0] / height, 0, 0)
            height, width = new
        chosen = None
        if self.boxes:
            chosen = self.boxes[rng.integers(len(self.boxes))]
            cx, cy = (chosen[0] + chosen[2]) / 2, (chosen[1] + chosen[3]) / 2
        else:
            cx, cy = (
                rng.integers(side - cut + 1) + cut / 2 if side >= cut else side / 2
                for side, cut in ((width, size[1]), (height, size[0]))
            )
        fx = fy = 1.0
        if bounds and rng.random() < 0.7:
            low, high = map(log2, bounds)
            if of_box and chosen:
                scale = log2(sqrt((chosen[2] - chosen[0] + 1) * (chosen[3] - chosen[1] + 1)))
                low, high = low - scale, high - scale
            elif of_box:
                low = high = 1
            fx = fy = 2 ** rng.uniform(low, high)
            if aspects:
                aspect = 2 ** rng.uniform(*map(log2, aspects))
                fx, fy = fx * sqrt(aspect), fy / sqrt(aspect)
        (sx, dx, w), (sy, dy, h) = self.cut(size, fx, fy, cx, cy, rng)
        self.pixels = np.zeros((3, *size))
        part = self.image[dy : dy + h, dx : dx + w].transpose(2, 0, 1)
        self.pixels[:, sy : sy + h, sx : sx + w] = part - np.array(MEANS, float)[:, None, None]
        self.seen = sx, sy, w, h
        for k, (x1, y1, x2, y2) in enumerate(self.boxes):
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            outside = x < 0 or x >= size[1] or y < 0 or y >= size[0]
            if outside or x2 - x1 + 1 < least[0] or y2 - y1 + 1 < least[1]:
                self.flags[k][1] = 1

    def maps(self, size, *, margin=None, inside=None):
        maps, times, best = [], [0] * len(self.boxes), [(0, 0)] * len(self.boxes)
        sx, sy, w, h = self.seen
        for k, (rate, fw, fh) in enumerate(FIELDS):
            rows, columns = half_up(size[0] / rate), half_up(size[1] / rate)
            values = np.zeros((6, rows, columns))
            x0, y0 = half_up(sx / rate), half_up(sy / rate)
            for i, j in np.ndindex(rows, columns):
                heeded = x0 <= j < x0 + half_up(w / rate) and y0 <= i < y0 + half_up(h / rate)
                x, y = (j + 0.5) * rate, (i + 0.5) * rate
                field = x - fw / 2, y - fh / 2, x + fw / 2, y + fh / 2
                if margin is not None:
                    mx, my = margin * fw / 2, margin * fh / 2
                    heeded &= field[0] >= sx - mx and field[2] < sx + w + mx
                    heeded &= field[1] >= sy - my and field[3] < sy + h + my
                elif inside is not None:
                    heeded &= share(field, (sx, sy, sx + w, sy + h), True) >= inside
                if not heeded:
                    values[5, i, j] = 1
                    continue
                silent = sum(share(field, region, True) for region in self.regions)
                for n, box in enumerate(self.boxes):
                    found = share(box, field)
                    if found > values[5, i, j]:
                        values[5, i, j], match = found, n
                    if found > best[n][0]:
                        best[n] = found, k
                if values[5, i, j] > 0.45:
                    self.put(values, i, j, match)
                    times[match] += 1
                elif silent >= 0.41:
                    values[5, i, j] = 1
            maps.append(values)
        for n, box in enumerate(self.boxes):
            found, k = best[n]
            if self.flags[n][1] or times[n] or found < 0.2:
                continue
            rate = FIELDS[k][0]
            i = min(max(int(np.floor((box[1] + box[3]) / 2 / rate)), 0), maps[k].shape[1] - 1)
            j = min(max(int(np.floor((box[0] + box[2]) / 2 / rate)), 0), maps[k].shape[2] - 1)
            if maps[k][0, i, j] <= 0:
                self.put(maps[k], i, j, n)
                maps[k][5, i, j] = found
        return maps

    def put(self, values, i, j, n):
        x1, y1, x2, y2 = self.boxes[n]
        values[0, i, j] = 0 if self.flags[n][1] else self.flags[n][0]
        values[1:5, i, j] = (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1 + 1, y2 - y1 + 1

    def rows(self, image=0):
        return [[image, *box, *flags] for box, flags in zip(self.boxes, self.flags, strict=True)]


def shorter(short):
    def resize(height, width):
        scale = short / min(height, width)
        return half_up(height * scale), half_up(width * scale)

    return resize


def turned(short, long):
    return lambda height, width: (long, short) if height >= width else (short, long)


CASES = {  # settings, size of the batch, what the loop knows, what its maps know
    "as they lie": ("", lambda h, w: (h, w), {}, {}),
    "sides": (
        "short_size: 64 long_size: 96 min_gt_width: 12 min_gt_height: 14",
        turned(64, 96),
        {"resize": shorter(64), "least": (12, 14)},
        {},
    ),
    "cut sides": (
        "short_size: 96 long_size: 128 crop_short_size: 50 crop_long_size: 70",
        turned(50, 70),
        {"resize": shorter(96)},
        {"margin": 1},
    ),
    "resized": (
        "resize_width: 80 resize_height: 64 crop_width: 48 crop_height: 40",
        lambda h, w: (40, 48),
        {"resize": lambda h, w: (64, 80)},
        {"inside": 0.8},
    ),
    "ratio": (
        "resize_ratio: 1.25 multiscale_prob: 0.7 low_scale_ratio: 0.5 high_scale_ratio: 2.5",
        lambda h, w: (half_up(h * 1.25), half_up(w * 1.25)),
        {"resize": lambda h, w: (half_up(h * 1.25), half_up(w * 1.25)), "bounds": (0.5, 2.5)},
        {},
    ),
    "scales of boxes": (
        "crop_width: 64 crop_height: 48 multiscale_prob: 0.7 min_scale: 8 max_scale: 40 "
        "min_whaspect: 0.5 max_whaspect: 2",
        lambda h, w: (48, 64),
        {"bounds": (8, 40), "of_box": True, "aspects": (0.5, 2)},
        {},
    ),
}
LEAST = "fg_threshold: 0.45 ignore_fg_threshold: 0.41"
EXTRA = {"margin": "anchor_ignore_margin_ratio: 1", "inside": "anchor_ignore_iou_thr: 0.8"}


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case, tmp_path):
    settings, size_of, known, of_maps = CASES[case]
    mirror = case != "as they lie"
    more = " ".join(EXTRA[name] for name in of_maps)
    transform = f"{MEAN} mirror: {'true' if mirror else 'false'}"
    layer = feed(write(tmp_path), f"{LEAST} {settings} {more}", transform)
    words = np.random.RandomState(5)._bit_generator.random_raw(24).reshape(12, 2)
    places = boxes = 0
    for one, seeds in zip(SCENES, words, strict=True):
        rng = np.random.Generator(np.random.PCG64(seeds.tolist()))
        size = size_of(*one[0].shape[:2])
        loop = Loop(one, rng, size, mirror=mirror, **known)
        data, *maps, found = layer.forward()
        np.testing.assert_allclose(data[0], loop.pixels, atol=1e-4)
        for ours, theirs in zip(maps, loop.maps(size, **of_maps), strict=True):
            np.testing.assert_allclose(ours[0], theirs, rtol=1e-5, atol=1e-4)
            places += (theirs[0] > 0).sum()
        wanted = loop.rows() or [[-1] * 8]
        np.testing.assert_allclose(found[..., 0, 0], wanted, rtol=1e-5, atol=1e-4)
        boxes += len(loop.boxes)
    assert places > 20
    assert boxes > 15
    layer.layer.close()


def test_the_first_image_of_a_batch_decides_its_size(tmp_path):
    layer = feed(write(tmp_path), "short_size: 64 long_size: 96", batch=4)
    shapes = [layer.forward()[0].shape for _ in range(3)]
    assert shapes == [(4, 3, 96, 64), (4, 3, 64, 96), (4, 3, 64, 96)]  # images 0, 4, 8
    data, first, *_, found = layer.forward()
    assert data.shape[2:] == (96, 64)
    assert first.shape == (4, 6, 12, 8)
    assert (
        found[:, 0].ravel().tolist()
        == np.repeat(range(4), [len(boxes) for _, boxes, _ in SCENES[:4]]).tolist()
    )
    layer.layer.close()


def test_template_ratios_are_of_batches(tmp_path):
    settings = "short_size: 64 long_size: 96 template_ratio: 0.5 template_ratio: 1.5"
    layer = feed(write(tmp_path), settings, batch=3, boxes=False)
    shapes = {layer.forward()[0].shape[2:] for _ in range(12)}
    assert shapes == {(64, 32), (160, 96)}  # the first images are tall
    layer.layer.close()


@pytest.mark.parametrize("kind", ["random", "random_aspect", "random_mix_aspect"])
def test_orders(kind, tmp_path):
    settings = f'shuffle: "{kind}" mix_group_size: 2'
    layer = feed(write(tmp_path), settings, boxes=False)
    source = layer.layer._reader._loader.source
    epochs = [[int(i) for i in source.take(12)] for _ in range(6)]
    assert all(sorted(order) == list(range(12)) for order in epochs)
    assert len({tuple(order) for order in epochs}) > 1
    tall = ["".join("ht"[i % 3 == 0] for i in order) for order in epochs]
    if kind == "random_aspect":
        assert set(tall) == {"tttthhhhhhhh", "hhhhhhhhtttt"}
    elif kind == "random_mix_aspect":
        assert set(tall) == {"tthhtthhhhhh", "hhtthhtthhhh"}
    layer.layer.close()


def test_a_resumed_run_goes_on_with_the_same_images(tmp_path):
    path = write(tmp_path)
    how = (
        'short_size: 64 long_size: 96 shuffle: "random_mix_aspect" mix_group_size: 2 distort_param '
    )
    how += "{ brightness_prob: 0.5 brightness_delta: 32 }"
    one = feed(path, how, "mirror: true", batch=2)
    batches = [one.forward() for _ in range(8)]
    again = feed(path, how, "mirror: true", batch=2)
    again.forward()
    other = feed(path, how, "mirror: true", batch=2, seed=9)
    other.layer.set_state(again.layer.state())
    other.layer.skip(1)
    for batch in batches[2:]:
        for ours, theirs in zip(other.forward(), batch, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_images_alone(tmp_path):
    """Without a field and without boxes."""
    layer = feed(write(tmp_path), fields=[], boxes=False)
    (data,) = layer.forward()
    np.testing.assert_array_equal(data[0], SCENES[0][0].transpose(2, 0, 1))
    layer.layer.close()


def evaluation(path, settings, tops=3, batch=1, transform=MEAN):
    names = " ".join(f'top: "t{i}"' for i in range(tops))
    text = (
        f'layer {{ type: "EvalData" {names} transform_param {{ {transform} }} eval_data_param {{ '
        f'source: "windows.txt" batch_size: {batch} {settings} }} }}'
    )
    return Feed(text, tops=tops, path=path)


@pytest.mark.parametrize(
    ("settings", "batch", "size_of"),
    [
        ("", 1, lambda h, w: (h, w)),
        ("short_size: 96 long_size: 128", 1, lambda h, w: tuple(min(s, 128) for s in shorter(96)(h, w))),
        ("resize_width: 70 resize_height: 60", 3, lambda h, w: (60, 70)),
    ],
)  # fmt: skip
def test_images_to_be_judged(settings, batch, size_of, tmp_path):
    layer = evaluation(write(tmp_path), settings, batch=batch)
    for start in range(0, 12, batch):
        data, found, sizes = layer.forward()
        rows, some = [], SCENES[start : start + batch]
        for i, (image, boxes, _) in enumerate(some):
            height, width = image.shape[:2]
            size = tuple(max(1, half_up(side / 32)) * 32 for side in size_of(height, width))
            assert sizes[i].ravel().tolist() == list(size)
            pixels = cv2.resize(image, size[::-1]) if size != (height, width) else image
            want = pixels.transpose(2, 0, 1) - np.array(MEANS, float)[:, None, None]
            np.testing.assert_allclose(data[i], want, atol=1e-4)
            factors = np.array([size[1] / width, size[0] / height] * 2)
            rows += [[i, *(box[3:] * factors), *box[:3]] for box in boxes]
        np.testing.assert_allclose(found[..., 0, 0], rows or [[-1] * 8], rtol=1e-6)
    layer.layer.close()


REFUSED = {
    "as many stride as field_w": {"settings": "field_w: 4"},
    "coord_num is 4, not 5": {"settings": "coord_num: 5"},
    "both be given or neither": {"settings": "resize_width: 5"},
    "must be above 0 and long_size no less": {"settings": "short_size: 9 long_size: 8"},
    "exclude low_scale_ratio": {
        "settings": "min_scale: 5 max_scale: 6 low_scale_ratio: 1 high_scale_ratio: 2"
    },
    "min_scale must be above 0": {"settings": "min_scale: 5 max_scale: 4"},
    "min_whaspect must be above 0": {"settings": "min_whaspect: nan max_whaspect: 1"},
    'not "sorted"': {"settings": 'shuffle: "sorted"'},
    "fg_threshold must be above 0": {"settings": "fg_threshold: 0"},
    "resize_ratio must be above 0": {"settings": "resize_ratio: 0"},
    "a template_ratio must be above 0": {"settings": "template_ratio: 0"},
    "no mean_file": {"transform": "crop_size: 5"},
    "batch_size of 1 or more": {"batch": 0},
    "2 mean_value for 3 channels": {"transform": "mean_value: 1 mean_value: 2"},
    "contrast_upper is less": {"settings": "distort_param { contrast_lower: 2 }"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_are_refused(message, tmp_path):
    path = write(tmp_path, SCENES[:1])
    with pytest.raises(CaffeError) as error:
        feed(path, **REFUSED[message])
    assert message in str(error.value)


def test_evaluations_that_are_refused(tmp_path):
    path = write(tmp_path, SCENES[:1])
    for message, how in (("a batch_size of 1", {"batch": 2}), ("no mean_file", {"transform": "crop_size: 3"})):  # fmt: skip
        with pytest.raises(CaffeError, match=message):
            evaluation(path, "", **how)
    (tmp_path / "windows.txt").write_text("# 0 a.png 3 60 90 1 1 0 5 5 9 9 0")
    with pytest.raises(CaffeError, match="boxes of 7 numbers each"):
        evaluation(path, "")

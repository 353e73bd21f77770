"""AnnotatedData, ImageSegData, DenseImageData and ImageLabelmapData: what the forks put on the tops, distributions of
random changes, and what cannot be read.
"""

import logging
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.core.errors import CaffeError
from caffepy.data import augment
from caffepy.data.decoders import decoding
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    AnnotatedDatum,
    Annotation,
    AnnotationGroup,
    Datum,
    NormalizedBBox,
)
from tests.layer.test_data import Feed

log = logging.getLogger(__name__)

GOLDEN = Path(__file__).parents[1] / "golden" / "forks"
CASES = sorted(p.stem for p in (GOLDEN / "data").glob("*.npz"))
STATS = sorted(p.stem for p in (GOLDEN / "stats").glob("*.npz"))
STANDARD_ERRORS = 4
IMAGES = int(os.environ.get("AUGMENTED_IMAGES", "1000"))  # of ours, for distributions

OBJECTS = [(1, 0, 0.1, 0.2, 0.5, 0.6, 0), (1, 1, 0.7, 0.1, 0.9, 0.4, 1), (3, 0, 0, 0.5, 1, 1, 0)]


def one_layer(text):
    """The data layer of the text, which may have others."""
    return text.split('\nlayer { name: "l"')[0]


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("device", [Device, pytest.param(CudaDevice, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_what_the_forks_put_on_the_tops(case, device):
    golden = np.load(GOLDEN / "data" / f"{case}.npz")
    text = one_layer(str(golden["prototxt"]))
    names = [name for name in ("data", "label", "data_dim") if f'top: "{name}"' in text]
    phase = {"TRAIN": TRAIN, "TEST": TEST}[str(golden["phase"])]
    path = str(GOLDEN / "data" / "net.prototxt")
    feed = Feed(text, tops=len(names), phase=phase, path=path, device=device())
    for batch in range(int(golden["batches"])):
        for name, answer in zip(names, feed.forward(), strict=True):
            expected = golden[f"{name}:{batch}"]
            if device is CudaDevice and expected.shape[-1] == 8:  # rows of -1 follow the boxes
                assert (answer[:, :, expected.shape[2] :] == -1).all()
                answer = answer[:, :, : expected.shape[2]]
            assert answer.shape == expected.shape
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-4)
    feed.layer.close()


def statistics(images, labels):
    """What the golden distributions are of: name -> a row each image, or each box."""
    counts = np.array([len(rows) for rows in labels])
    found = {"images_with_boxes": counts[:, None] == np.arange(4)}
    found["pixel"] = np.concatenate([images.mean((2, 3)), images.std((2, 3))], 1)
    for c in (1, 2):
        own = [rows[rows[:, 1] == c] for rows in labels]
        found[f"class{c}_per_image"] = np.array([[len(rows)] for rows in own])
        rows = np.concatenate(own)
        sides = rows[:, 5:7] - rows[:, 3:5]
        found[f"class{c}_box"] = np.concatenate([rows[:, 3:7], sides, rows[:, 7:]], 1)
    return {name: rows.astype(np.float64) for name, rows in found.items()}


@pytest.mark.parametrize("case", STATS)
def test_random_changes_have_the_distributions_of_the_fork(case):
    golden = np.load(GOLDEN / "stats" / f"{case}.npz")
    feed = Feed(str(golden["prototxt"]), path=str(GOLDEN / "data" / "net.prototxt"), seed=3)
    images, labels = [], []
    for _ in range(IMAGES // 25):
        data, boxes = feed.forward()
        images.append(data)
        labels += [boxes[0, 0][boxes[0, 0, :, 0] == i] for i in range(25)]
    feed.layer.close()
    for name, rows in statistics(np.concatenate(images), labels).items():
        if f"stat:{name}_mean" in golden:
            expected, std = golden[f"stat:{name}_mean"], golden[f"stat:{name}_std"]
        else:
            expected, std = golden[f"stat:{name}"], None
        if name == "images_with_boxes":
            std = np.sqrt(expected * (1 - expected))
        elif name.endswith("per_image"):
            expected, std = expected[:1], expected[1:]
        rounding = 1e-4 * np.abs(expected).max()
        difference = (np.abs(rows.mean(0) - expected) - rounding).clip(0)
        standard_error = std / np.sqrt(int(golden["images"]))
        largest = np.divide(difference, standard_error, where=difference > 0, out=0 * difference)
        log.warning("%s %s: %.2f standard errors", case, name, largest.max())
        bound = STANDARD_ERRORS * np.sqrt(1 + int(golden["images"]) / IMAGES)
        assert largest.max() <= bound, f"{name}: {rows.mean(0)}, not {expected}"


def record(image, objects=OBJECTS, **fields):
    """An AnnotatedDatum of an image (H, W, 3), a PNG, or of an array (C, H, W)."""
    groups = {}
    for label, instance, *box, difficult in objects:
        names = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        bbox = NormalizedBBox(difficult=bool(difficult), **dict(names))
        one = Annotation(instance_id=instance, bbox=bbox)
        groups.setdefault(label, AnnotationGroup(group_label=label)).annotation.append(one)
    if image.shape[0] == 3:
        datum = array_to_datum(image)
    else:
        datum = Datum(data=cv2.imencode(".png", image)[1].tobytes(), encoded=True)
    fields.setdefault("type", AnnotatedDatum.BBOX)
    return AnnotatedDatum(datum=datum, annotation_group=groups.values(), **fields)


@pytest.fixture
def folder(tmp_path):
    """The path of a prototxt beside an LMDB `db` of six images, alternately of two sizes."""
    rng = np.random.default_rng(0)
    with write_database(f"{tmp_path}/db") as writer:
        for i in range(6):
            image = rng.integers(0, 256, (40, 30 + 20 * (i % 2), 3), np.uint8)
            writer.put(f"{i}", record(image).SerializeToString())
    with write_database(f"{tmp_path}/raw") as writer:
        writer.put("0", record(rng.integers(0, 256, (3, 20, 30), np.uint8)).SerializeToString())
    with write_database(f"{tmp_path}/plain") as writer:
        writer.put("0", array_to_datum(np.zeros((3, 4, 5), np.uint8)))
    with write_database(f"{tmp_path}/untyped") as writer:
        bare = AnnotatedDatum(datum=Datum(data=b"123", channels=3, height=1, width=1))
        writer.put("0", bare.SerializeToString())
    return tmp_path / "net.prototxt"


def feed(folder, transform="", annotated="", data="batch_size: 2", **other):
    source = "" if "source" in data else 'source: "db"'
    text = (
        f'layer {{ name: "d" type: "AnnotatedData" top: "data" top: "label" '
        f"data_param {{ {source} {data} backend: LMDB }} transform_param {{ {transform} }} "
        f"annotated_data_param {{ {annotated} }} }}"
    )
    return Feed(text, path=str(folder), **other)


SIZE = "resize_param { height: 16 width: 16 }"


WHOLE = "batch_sampler { max_sample: 1 max_trials: 1 }"


def test_a_label_map_that_is_not_there_is_told(folder, caplog):
    feed(folder, annotated='label_map_file: "labelmap.prototxt"').layer.close()
    assert "label_map_file labelmap.prototxt is not there; it is not read, as rec" in caplog.text


def test_threads_decode_whatever_was_asked_for(folder, caplog):
    with decoding("processes"):
        asked = feed(folder, SIZE)
        images, _ = asked.forward()
        asked.layer.close()
    assert "db: images are decoded by threads; other ways are for Data" in caplog.text
    plain = feed(folder, SIZE)
    np.testing.assert_array_equal(images, plain.forward()[0])
    plain.layer.close()


def test_labels_of_mobilenet_yolo(folder):
    more = "yolo_data_type: 1 yolo_data_jitter: 0 "
    feeds = [feed(folder, SIZE, more), feed(folder, SIZE, more + "train_diffcult: false")]
    (_, every), (_, easy) = (made.forward() for made in feeds)
    assert every.shape == (2, 1, 300, 5)
    expected = [[0, 0.3, 0.4, 0.4, 0.4], [0, 0.8, 0.25, 0.2, 0.3], [2, 0.5, 0.75, 1, 0.5]]
    for rows in every[:, 0]:
        np.testing.assert_allclose(rows[:3], expected, atol=1e-6)
        assert not rows[3:].any()
    np.testing.assert_allclose(easy[0, 0, :3], [expected[0], expected[2], [0] * 5], atol=1e-6)
    (_, jittered) = feed(folder, SIZE, "yolo_data_type: 1").forward()
    assert (np.abs(jittered - every).max((1, 2, 3)) > 0.01).any()


def test_several_sizes_are_drawn_a_batch(folder):
    names = {"resize_param": 8, "further_resize_param": 12}
    sizes = " ".join(f"{k} {{ prob: 0.5 height: {n} width: {n} }}" for k, n in names.items())
    made = feed(folder, sizes)
    seen = [made.forward()[0].shape for _ in range(20)]
    assert set(seen) == {(2, 3, 8, 8), (2, 3, 12, 12)}


def test_boxes_in_units_of_another_size(folder):
    """FIT_SMALL_SIZE with height_scale and width_scale, then a crop of the middle."""
    resize = "resize_mode: FIT_SMALL_SIZE height: 20 width: 15 height_scale: 10 width_scale: 30"
    made = feed(folder, f"resize_param {{ {resize} }}", data="batch_size: 1", phase=TEST)
    for width in (15, 25):
        image, label = made.forward()
        assert image.shape == (1, 3, 20, width)
        units = np.array([width / 30, 20 / 10] * 2)
        boxes = np.array(OBJECTS)[:, 2:6] * units
        np.testing.assert_allclose(label[0, 0, :, 3:7], boxes, atol=1e-5)


@pytest.mark.parametrize(
    ("sampler", "least", "count"), [("", 0.9, 3), (WHOLE, 0.9, 0), (WHOLE, 0.7, 3)]
)
def test_a_sampled_box_keeps_its_area_when_bars_are_added(sampler, least, count, folder):
    """As in SSD, where MIN_OVERLAP asks for a part of it; images of 40 x 30 get bars of a fourth."""
    bars = "resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 16 width: 16 }"
    emit = f"emit_constraint {{ emit_type: MIN_OVERLAP emit_overlap: {least} }}"
    _, label = feed(folder, f"{bars} {emit}", sampler, data="batch_size: 1").forward()
    assert (label[0, 0, :, 0] >= 0).sum() == count


def test_cubics_are_those_of_any_processor():
    """Figures of OpenCV 4.6 without Intel's library, which answers three of them otherwise."""
    image = (np.arange(16) * 97 % 251).astype(np.uint8).reshape(4, 4)
    want = [
        [0, 0, 7, 30, 59, 100, 148, 187, 203, 180, 127, 67, 24, 13],
        [101, 107, 133, 170, 201, 206, 178, 135, 101, 96, 113, 138, 154, 157],
        [67, 74, 104, 145, 183, 203, 198, 177, 153, 138, 129, 124, 119, 117],
        [46, 47, 50, 50, 58, 84, 128, 172, 198, 191, 156, 113, 83, 76],
        [187, 176, 134, 75, 22, 0, 7, 40, 85, 127, 161, 190, 213, 221],
    ]
    used = cv2.ipp.useIPP()
    np.testing.assert_array_equal(augment.resample(image, 14, 5, cv2.INTER_CUBIC), want)
    assert cv2.ipp.useIPP() == used


def test_a_raw_canvas_is_blank(folder):
    transform = "expand_param { max_expand_ratio: 3 }"
    image, label = feed(folder, transform, data='source: "raw" batch_size: 1').forward()
    assert image.shape[2] > 20
    assert image.shape[3] > 30
    ys, xs = np.nonzero((image[0] != 32).any(0))
    assert ys.max() - ys.min() < 20
    assert xs.max() - xs.min() < 30
    sides = (label[0, 0, :, 5:7] - label[0, 0, :, 3:5]) * image.shape[:1:-1]
    np.testing.assert_allclose(sides, np.array([[12, 8], [6, 6], [30, 10]]), atol=1e-4)


def test_distortion_that_never_acts_leaves_a_jpeg(folder):
    plain, distorted = (
        feed(folder, SIZE + more).forward()[0] for more in ("", "distort_param { hue_prob: 0 }")
    )
    assert 0 < np.abs(plain - distorted).mean() < 50


@pytest.mark.parametrize(
    "field",
    ["decolorize", "gauss_blur", "hist_eq", "clahe", "erode", "posterize", "inverse",
     "convert_to_hsv", "jpeg", "saltpepper"],
)  # fmt: skip
def test_noise(field, folder):
    value = "20" if field == "jpeg" else "true"
    pepper = "saltpepper_param { fraction: 0.25 value: 7 }"
    plain, noisy = (
        feed(folder, SIZE + more).forward()[0]
        for more in ("", f"noise_param {{ {field}: {value} {pepper} }}")
    )
    assert noisy.shape == plain.shape
    if field == "inverse":
        np.testing.assert_array_equal(noisy, 255 - plain)
    elif field == "decolorize":
        assert (noisy[:, 0] == noisy[:, 1]).all()
    elif field == "posterize":
        assert set(np.unique(noisy)) == {32, 96, 160, 224}
    elif field == "saltpepper":
        share = (noisy == 7).all(1).mean()
        assert 0.15 < share <= 0.25  # some pixels are drawn twice
        assert ((noisy == plain).all(1) | (noisy == 7).all(1)).all()
    else:
        assert np.abs(noisy - plain).mean() > 1


def test_noise_of_all_kinds_has_one_probability(folder):
    """deepdetect's: of 1 all that can be made, of 0 none."""
    pepper = "saltpepper_param { fraction: 0.25 value: 7 }"
    plain, never, always, named = (
        feed(folder, SIZE + more).forward()[0]
        for more in (
            *("", "noise_param { all_effects: true }"),
            f"noise_param {{ all_effects: true prob: 1 {pepper} }}",
            "noise_param { decolorize: true gauss_blur: true hist_eq: true clahe: true erode: true "
            f"posterize: true inverse: true convert_to_hsv: true saltpepper: true {pepper} }}",
        )
    )
    np.testing.assert_array_equal(never, plain)
    assert np.abs(always - plain).mean() > 1
    np.testing.assert_allclose((always == named).mean(), 1, atol=0.3)  # other pixels are peppered
    without = feed(folder, SIZE + "noise_param { all_effects: true prob: 1 }").forward()[0]
    assert np.abs(without - plain).mean() > 1


def test_distortion_of_all_kinds_has_one_probability(folder):
    """deepdetect's `prob` is that of what is on."""
    bounds = "brightness_delta: 32 contrast_lower: 0.5 contrast_upper: 1.5 hue_delta: 18"
    plain, none, off, on = (
        feed(folder, SIZE + f"distort_param {{ {more} {bounds} }}").forward()[0]
        for more in (
            *("", "prob: 1", "brightness: true prob: 0"),
            "prob: 1 brightness: true contrast: true hue: true",
        )
    )
    np.testing.assert_array_equal(none, plain)
    np.testing.assert_array_equal(off, plain)
    assert np.abs(on - plain).mean() > 1
    all_on = f"distort_param {{ prob: 1 all_effects: true saturation_upper: 1 {bounds} }}"
    assert np.abs(feed(folder, SIZE + all_on).forward()[0] - plain).mean() > 1


@pytest.mark.gpu
def test_boxes_of_batches_have_one_shape_on_a_gpu(folder):
    made = feed(folder, SIZE, "batch_sampler { max_sample: 1 }", device=CudaDevice())
    assert {made.forward()[1].shape for _ in range(10)} == {(1, 1, 64, 8)}


REFUSED = {
    "sizes": ("", "", r"record \"1\" becomes 3 40 50 .*with 3 40 30 .*; resize_param makes"),
    "small size": (
        "resize_param { resize_mode: FIT_SMALL_SIZE height: 9 width: 9 }",
        "",
        "FIT_SMALL_SIZE makes images of several sizes: it needs a batch_size of 1, not 2",
    ),
    "no size": ("resize_param { height: 4 }", "", "resize_param needs a height and a width"),
    "probabilities": (
        f"{SIZE} further_{SIZE}", "", "the prob of 2 resize_param must sum to 1, not 2"
    ),
    "expansion": ("expand_param { max_expand_ratio: 1 }", "", "max_expand_ratio above 1, not 1"),
    "distortion": (
        "distort_param { contrast_lower: 2 contrast_upper: 1 }", "", "contrast_upper is less than"
    ),
    "negative": ("distort_param { hue_delta: -1 }", "", "hue_delta must be 0 or more"),
    "lab": ("noise_param { convert_to_lab: true }", "", "convert_to_lab makes floats"),
    "pepper": ("noise_param { saltpepper: true }", "", "saltpepper needs a saltpepper_param"),
    "scales": ("", "batch_sampler { sampler { min_scale: 0 } }", "scales must be above 0"),
    "ratios": ("", "batch_sampler { sampler { max_aspect_ratio: 0.1 } }", "ratios must be above 0"),
    "yolo": ("", "yolo_data_type: 2", "yolo_data_type must be 0 or 1, not 2"),
    "crop": (f"{SIZE} crop_h: 17 crop_w: 3", "", "a crop of 17 x 3 is larger than the image, 16"),
    "half a crop": ("crop_h: 17", "", "crop_h and crop_w must both be given or neither"),
    "means": (f"{SIZE} mean_value: 1 mean_value: 2", "", "2 mean_value for 3 channels"),
    "padding": (
        "resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 9 width: 9 pad_value: [1, 2] }",
        "",
        "2 pad_value for 3 channels; give 1 or 3",
    ),
}  # fmt: skip
OTHER_SOURCES = {
    "raw": (SIZE, 'record "0": resize_param is for encoded images, and this one is raw'),
    "plain": ("", "not an AnnotatedDatum, but a Datum; the layer Data reads it"),
    "untyped": ("", "the record has neither a type of annotation nor a label"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, folder):
    transform, annotated, message = REFUSED[case]
    with pytest.raises(CaffeError, match=message):
        feed(folder, transform, annotated).forward()


@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_other_records_are_refused(source, folder):
    transform, message = OTHER_SOURCES[source]
    with pytest.raises(CaffeError, match=message):
        feed(folder, transform, data=f'source: "{source}" batch_size: 1').forward()


def test_annotated_records_are_not_data(folder):
    text = 'layer { type: "Data" data_param { source: "db" batch_size: 2 backend: LMDB } }'
    with pytest.raises(CaffeError, match="an AnnotatedDatum; the layer AnnotatedData reads it"):
        Feed(text, path=str(folder))


@pytest.fixture
def pairs(tmp_path):
    """The path of a prototxt beside lists of images whose labels are their red channel."""
    rng = np.random.default_rng(0)
    for i in range(4):
        image = rng.integers(0, 256, (12, 16, 3), np.uint8)
        cv2.imwrite(f"{tmp_path}/{i}.png", image)
        cv2.imwrite(f"{tmp_path}/{i}_label.png", image[:, :, 2])
    cv2.imwrite(f"{tmp_path}/small.png", np.zeros((3, 4), np.uint8))
    lists = {
        "list": "".join(f"{i}.png {i}_label.png\n" for i in range(4)),
        "unlike": "0.png small.png\n",
        "words": "0.png 0_label.png\n1.png\n",
        "missing": "0.png gone.png\n",
        "text": "0.png net.prototxt\n",
        "alone": "0.png\n",
        "empty": "\n",
    }
    for name, lines in lists.items():
        (tmp_path / f"{name}.txt").write_text(lines)
    (tmp_path / "net.prototxt").write_text("no image")
    return tmp_path / "net.prototxt"


def segmented(pairs, kind, data="", transform="", tops=2, source="list", **other):
    field = "dense_image_data_param" if kind == "DenseImageData" else "image_data_param"
    text = (
        f'layer {{ type: "{kind}" {field} {{ source: "{source}.txt" batch_size: 2 {data} }} '
        f"transform_param {{ {transform} }} }}"
    )
    return Feed(text, tops=tops, path=str(pairs), **other)


RANDOM = {
    "ImageSegData": ("label_type: PIXEL", "crop_size: 7 mirror: true"),
    "DenseImageData": ("crop_height: 7 crop_width: 7 mirror: true", ""),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_labels_are_cut_and_mirrored_like_images(kind, pairs):
    made = segmented(pairs, kind, *RANDOM[kind])
    files = [cv2.imread(str(pairs.parent / f"{i}.png"))[:, :, 2] for i in range(4)]
    mirrored = 0
    for batch in range(20):
        images, labels = made.forward()
        np.testing.assert_array_equal(images[:, 2], labels[:, 0])
        for i, label in enumerate(labels[:, 0]):
            whole = np.lib.stride_tricks.sliding_window_view(files[(2 * batch + i) % 4], (7, 7))
            straight = (whole == label).all((2, 3)).any()
            assert straight or (whole == label[:, ::-1]).all((2, 3)).any()
            mirrored += not straight
    assert 10 <= mirrored <= 30


def test_random_scales_and_the_crop_that_they_leave(pairs):
    more = "scale_factors: 0.5 scale_factors: 1 crop_height: 10 crop_width: 10 mean_value: 104.5"
    made = segmented(pairs, "ImageSegData", "label_type: PIXEL ignore_label: 77", more, tops=3)
    small = 0
    for _ in range(10):
        images, labels, sizes = made.forward()
        assert images.shape[1:] == (3, 10, 10)
        np.testing.assert_array_equal(sizes, np.full((2, 1, 1, 2), 10))
        for image, label in zip(images, labels[:, 0], strict=True):
            if (label[6:] == 77).all():  # of an image of 6 x 8 pixels
                small += 1
                assert (image[:, 6:] == 0).all()
                assert (image[:, :, 8:] == 0).all()
                assert (label[:, 8:] == 77).all()
                assert not (label[:6, :8] == 77).all()
            else:
                np.testing.assert_array_equal(image[2] + 104.5, label)
    assert 4 <= small <= 16


def test_labels_of_enet_are_smaller(pairs):
    data = "new_height: 24 new_width: 32 label_divide_factor: 4"
    images, labels = segmented(pairs, "DenseImageData", data).forward()
    assert images.shape == (2, 3, 24, 32)
    assert labels.shape == (2, 1, 6, 8)
    first = cv2.imread(str(pairs.parent / "0_label.png"), cv2.IMREAD_GRAYSCALE)
    np.testing.assert_array_equal(labels[0, 0], first[::2, ::2])


def test_no_labels_and_sizes_without_a_crop(pairs):
    made = segmented(
        pairs, "ImageSegData", "label_type: NONE ignore_label: 9", tops=3, source="alone"
    )
    _images, labels, sizes = made.forward()
    assert (labels == 9).all()
    assert labels.shape == (2, 1, 12, 16)
    np.testing.assert_array_equal(sizes[:, 0, 0], [[12, 16]] * 2)


def test_no_labels_in_files_of_the_first_deeplab(pairs):
    data = "label_type: PIXEL has_label: false ignore_label: 9"
    _, labels, _ = segmented(pairs, "ImageSegData", data, tops=3, source="alone").forward()
    assert (labels == 9).all()


@pytest.mark.parametrize("normalize", ["true", "false"])
def test_labels_of_saliency(normalize, pairs):
    """DSS: 1 where an object is, or the numbers of the label image."""
    _, labels = segmented(pairs, "ImageLabelmapData", f"normalize: {normalize}").forward()
    for i, label in enumerate(labels):
        image = cv2.imread(str(pairs.parent / f"{i}_label.png"), cv2.IMREAD_GRAYSCALE)
        wanted = np.round(image / 255) if normalize == "true" else image
        np.testing.assert_array_equal(label[0], wanted)


@pytest.mark.parametrize("size", ["", "new_height: 6 new_width: 8"])
def test_edges_against_a_loop(size, pairs):
    folder = str(pairs.parent)
    images, labels = segmented(pairs, "ImageLabelmapData", size, "mean_value: 7").forward()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        wanted, edges = cv2.imread(f"{folder}/{i}.png"), cv2.imread(f"{folder}/{i}_label.png", 0)
        if size:
            wanted, edges = cv2.resize(wanted, (8, 6)), cv2.resize(edges, (8, 6))
        assert image.shape[1:] == label.shape[1:] == edges.shape
        for y, x in np.ndindex(edges.shape):
            assert list(image[:, y, x]) == [value - 7.0 for value in wanted[y, x]]
            assert label[0, y, x] == round(edges[y, x] / 255)
    assert 0 < labels.mean() < 1


def test_edges_are_cut_and_mirrored_like_images(pairs):
    made = segmented(pairs, "ImageLabelmapData", "", "crop_size: 7 mirror: true", phase=TEST)
    places = set()
    for _ in range(10):
        images, labels = made.forward()
        np.testing.assert_array_equal(images[:, 2] >= 128, labels[:, 0])
        assert images.shape == (2, 3, 7, 7)
        places.add(images[0].tobytes())
    assert len(places) > 2  # of two images: crops are random in the TEST phase, too


SEGMENTATION_REFUSED = {
    "label sizes": ("DenseImageData", "unlike", "", "", "image has 12 x 16 pixels, its label 3 x"),
    "a word": ("DenseImageData", "words", "", "", r'words.txt:2: "1.png" is not an image path, a'),
    "missing": ("DenseImageData", "missing", "", "", r"gone.png cannot be read: no such file"),
    "no image": ("DenseImageData", "text", "", "", "net.prototxt: its image cannot be decoded"),
    "empty": ("DenseImageData", "empty", "", "", "empty.txt lists no images"),
    "own crop": ("DenseImageData", "list", "", "mirror: true", "crops and mirrors by dense_image"),
    "half a crop": ("DenseImageData", "list", "crop_width: 3", "", "must both be given or neither"),
    "half a size": ("ImageSegData", "list", "new_width: 3", "", "must both be given or neither"),
    "large crop": (
        "DenseImageData",
        "list",
        "crop_width: 30 crop_height: 3",
        "",
        "0.png: a crop of 3 x 30 is larger than the image, 12 x 16",
    ),
    "large crop of edges": (
        "ImageLabelmapData",
        "list",
        "",
        "crop_size: 13",
        "0.png: .*13.* is larger than the image, 12 x 16",
    ),
    "edge sizes": ("ImageLabelmapData", "unlike", "", "", "image has 12 x 16 pixels, its label 3"),
    "divided": ("DenseImageData", "list", "label_divide_factor: 2", "", "needs new_height and new"),
    "number": ("ImageSegData", "list", "", "", r'"0_label.png" is no number; for label images wri'),
    "mean": ("ImageSegData", "list", "", 'mean_file: "m"', "takes a mean_value for each channel"),
    "scale": ("ImageSegData", "list", "", "scale_factors: 0", "scale_factors must be above 0"),
    "many skipped": ("ImageSegData", "alone", "label_type: NONE rand_skip: 99", "", "not enough"),
}


@pytest.mark.parametrize("case", SEGMENTATION_REFUSED)
def test_segmentation_refused(case, pairs):
    kind, source, data, transform, message = SEGMENTATION_REFUSED[case]
    with pytest.raises(CaffeError, match=message):
        segmented(pairs, kind, data, transform, source=source).forward()


VIDEO = 'video_data_param { video_type: VIDEO video_file: "video.avi" }'


def video(path, more="", transform="", **other):
    text = (
        f'layer {{ type: "VideoData" data_param {{ batch_size: 2 }} '
        f"{VIDEO[:-1]} {more} }} transform_param {{ {transform} }} }}"
    )
    return Feed(text, path=f"{path}/net.prototxt", **other)


@pytest.fixture
def film(tmp_path):
    """A folder with a video of seven frames, of grey 20, 40, ... 140."""
    made = cv2.VideoWriter(f"{tmp_path}/video.avi", cv2.VideoWriter_fourcc(*"MJPG"), 10, (32, 24))
    for i in range(7):
        made.write(np.full((24, 32, 3), 20 * (i + 1), np.uint8))
    made.release()
    return tmp_path


def greys(made, batches):
    """The number of the grey of each frame."""
    return [round(image.mean() / 20) for _ in range(batches) for image in made.forward()[0]]


def test_frames_of_a_video(film):
    made = video(film)
    assert made.top[0].shape == (2, 3, 24, 32)
    assert greys(made, 3) == [1, 2, 3, 4, 5, 6]
    state = made.layer.state()
    assert greys(made, 2) == [7, 1, 2, 3]
    again = video(film, seed=2)
    again.layer.set_state(state)
    assert greys(again, 2) == [7, 1, 2, 3]
    assert greys(video(film, "skip_frames: 1"), 3) == [2, 4, 6, 2, 4, 6]
    images, labels = video(film, transform="resize_param { height: 8 width: 10 }").forward()
    assert images.shape == (2, 3, 8, 10)
    np.testing.assert_array_equal(labels, [0, 0])
    for one in (made, again):
        one.layer.close()


class Camera:
    """Stands in for OpenCV's: its frames are grey 20, 40, ... and end after some."""

    def __init__(self, number):
        self.number, self.shown, self.open = number, 0, number < 3

    def isOpened(self):  # noqa: N802 # OpenCV's name
        return self.open

    def grab(self):
        self.shown += 1
        return True

    def read(self):
        self.grab()
        return self.shown < 12, np.full((24, 32, 3), 20 * self.shown, np.uint8)

    def release(self):
        self.open = False


def camera(more="", **other):
    text = (
        'layer { type: "VideoData" data_param { batch_size: 2 } '
        f"video_data_param {{ {more} }} }}"
    )
    return Feed(text, **other)


def test_frames_of_a_camera(monkeypatch):
    made = []
    monkeypatch.setattr(cv2, "VideoCapture", lambda number: made.append(Camera(number)) or made[-1])
    feed = camera("device_id: 2")
    assert (made[0].number, feed.layer.length, feed.top[0].shape) == (2, None, (2, 3, 24, 32))
    assert greys(feed, 2) == [1, 2, 3, 4]
    state = feed.layer.state()
    feed.layer.close()
    assert not made[0].open
    every_third = camera("video_type: WEBCAM skip_frames: 2")
    every_third.layer.set_state(state)  # it goes on with what the camera shows
    assert greys(every_third, 1) == [3, 6]
    with pytest.raises(CaffeError, match="camera 0 gives no frame after 3"):
        greys(every_third, 1)
    every_third.layer.close()
    with pytest.raises(CaffeError, match="camera 3 cannot be opened by OpenCV"):
        camera("device_id: 3")


def test_videos_refused(film):
    for old, new, message in (
        ("video_type: VIDEO", "", "a video_file needs video_type: VIDEO"),
        ('video_file: "video.avi"', "", "video_type: VIDEO needs a video_file"),
        ("video_file", "source", "lists of videos, as C3D has them, are not read"),
    ):
        text = f'layer {{ type: "VideoData" data_param {{ batch_size: 2 }} {VIDEO} }}'
        with pytest.raises(CaffeError, match=message):
            Feed(text.replace(old, new), path=f"{film}/net.prototxt")
    (film / "video.avi").write_text("no video")
    with pytest.raises(CaffeError, match=r'video.avi" cannot be read by OpenCV'):
        video(film)

"""DetectionOutput and DetectionEvaluate against loops that follow SSD's rules, and a GPU."""

import json
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core import coco
from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Blob
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.layer.detection_files import to_pixels
from caffepy.proto.caffe_pb2 import TEST, LayerParameter, ResizeParameter

from .harness import Single, seeded
from .test_multibox_loss import decode, iou

N, P, K = 2, 30, 4
CASES = {
    "ssd": "nms_param { nms_threshold: 0.45 top_k: 20 } keep_top_k: 12 confidence_threshold: 0.1 "
    "code_type: CENTER_SIZE",
    "all": "code_type: CORNER_SIZE",
    "own boxes": "share_location: false background_label_id: 2 nms_param { nms_threshold: 0.3 }",
    "eta": "nms_param { nms_threshold: 0.8 eta: 0.7 } background_label_id: -1",
    "scaled": "variance_encoded_in_target: true code_type: CENTER_SIZE keep_top_k: 3",
    "nothing": "confidence_threshold: 2",
    "none kept": "keep_top_k: 0",
}


def given(case: str) -> tuple[str, list[np.ndarray]]:
    rng = seeded(3)
    centre, size = rng.uniform(0.1, 0.9, (P, 2)), rng.uniform(0.2, 0.5, (P, 2))
    priors = np.stack([np.hstack([centre - size / 2, centre + size / 2]), np.full((P, 4), 0.1)])
    scores = rng.random((N, P, K))
    scores[:, 3] = scores[:, 7]  # ties
    groups = K if case == "own boxes" else 1
    scale = 0.1 if case == "scaled" else 1
    locations = scale * rng.normal(0, 0.6, (N, P * groups * 4))
    bottoms = [locations, scores.reshape(N, -1), priors.reshape(1, 2, -1)]
    settings = f"num_classes: {K} {CASES[case]}"
    text = f'type: "DetectionOutput" detection_output_param {{ {settings} }}'
    return text, [np.float32(b).astype(np.float64) for b in bottoms]


def found(text, bottoms, settings):
    """The rows, by the rules one after the other."""
    (priors, variances), rows = bottoms[2].reshape(2, P, 4), []
    locations, scores = bottoms[0].reshape(N, P, -1, 4), bottoms[1].reshape(N, P, K)
    coded = text.replace("variance_encoded", "encode_variance")
    nms, nothing = settings.nms_param, True
    least = settings.confidence_threshold if "confidence" in text else -np.inf
    for n in range(N):
        of_image = []
        for k in range(K):
            if k == settings.background_label_id:
                continue
            c = k if locations.shape[2] > 1 else 0
            boxes = [decode(locations[n, p, c], priors[p], variances[p], coded) for p in range(P)]
            order = np.argsort(-scores[n, :, k], kind="stable")
            order = [p for p in order if scores[n, p, k] > least]
            kept, limit = [], nms.nms_threshold
            for p in order[: nms.top_k if "top_k: 20" in text else None]:
                if all(iou(boxes[p], boxes[q]) <= limit for q in kept):
                    kept.append(p)
                    if nms.eta < 1 and limit > 0.5:
                        limit *= nms.eta
            of_image += [[n, k, scores[n, p, k], *boxes[p]] for p in kept]
        if settings.keep_top_k > -1:
            best = sorted(of_image, key=lambda row: -row[2])[: settings.keep_top_k]
            of_image = [row for row in of_image if row in best]
        rows += of_image
        nothing = nothing and not of_image
    return rows if not nothing else [[n, *[-1] * 6] for n in range(N)]


@pytest.mark.parametrize("case", CASES)
def test_detections_against_a_loop(case):
    text, bottoms = given(case)
    single = Single(text, *bottoms)
    (top,) = single.forward()
    rows = found(text, bottoms, single.layer.settings)
    assert top.shape == (1, 1, len(rows), 7)
    np.testing.assert_allclose(top[0, 0], rows, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_detections_on_gpu(case):
    held_to_the_cpu(*given(case))


def held_to_the_cpu(text, bottoms):
    (want,) = Single(text, *bottoms, dtype=np.float32).forward()
    device = CudaDevice(seed=1)
    with device.scope():
        bottom = [Blob(values.shape, device=device) for values in bottoms]
        top = [Blob(device=device)]
        layer = create_layer(text_format.Parse(text, LayerParameter()), TEST, device)
        assert not layer.on_host
        layer.setup(bottom, top)
        layer.reshape(bottom, top)
        for blob, values in zip(bottom, bottoms, strict=True):
            blob.host_data[...] = values
        layer.forward(bottom, top)
    np.testing.assert_allclose(top[0].host_data, want, 1e-5, 1e-5)


def refined(case):
    text, bottoms = given(case)
    rng = seeded(9)
    sure = rng.random((N, P, 2)).astype(np.float32)
    moves = np.float32(rng.normal(0, 0.5, (N, P * 4)))
    text = text.replace("num_classes", "objectness_score: 0.4 num_classes")
    return text, [*bottoms, np.float64(sure.reshape(N, -1)), np.float64(moves)]


REFINED = ["ssd", "all", "own boxes", "scaled"]


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("case", REFINED)
def test_boxes_of_priors_that_were_moved(case, both):
    """RefineDet's: image by image, as SSD's with priors of its own and scores of 1 for class 0."""
    text, bottoms = refined(case)
    single = Single(text, *(bottoms if both else bottoms[:4]))
    (top,) = single.forward()
    locations, scores, priors, sure, moves = bottoms
    coded, want = text.replace("variance_encoded", "encode_variance"), []
    for n in range(N):
        own = priors.reshape(2, P, 4).copy()
        if both:
            own[0] = [
                decode(moves.reshape(N, P, 4)[n, p], *priors.reshape(2, P, 4)[:, p], coded)
                for p in range(P)
            ]
        likely = scores.reshape(N, P, K).copy()
        likely[sure.reshape(N, P, 2)[..., 1] < np.float32(0.4)] = np.eye(K)[0]
        rows = found(text, [locations, likely, own], single.layer.settings)
        want += [row for row in rows if row[0] == n]
    assert len(want) > 2 * N
    assert top.shape == (1, 1, len(want), 7)
    np.testing.assert_allclose(top[0, 0], want, rtol=1e-4, atol=1e-5)


def test_an_image_beside_is_not_taken_for_scores():
    text, bottoms = given("ssd")
    (want,) = Single(text, *bottoms).forward()
    (got,) = Single(text, *bottoms, np.zeros((N, 3, 4, 5))).forward()
    np.testing.assert_array_equal(got, want)
    text, bottoms = refined("ssd")
    bottoms[4] = bottoms[4][:, :-4]
    with pytest.raises(ConfigError, match="bottom 4 must be RefineDet's locations of 30 priors"):
        Single(text, *bottoms)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REFINED)
def test_moved_priors_on_gpu(case):
    text, bottoms = refined(case)
    held_to_the_cpu(text, bottoms)


def test_a_label_map_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    text, bottoms = given("ssd")
    saved = f'save_output_param {{ label_map_file: "{tmp_path}/labels" %s }} keep_top_k'
    Single(text.replace("keep_top_k", saved % ""), *bottoms)
    assert f"{tmp_path}/labels is not there; it is not read, since" in caplog.text
    (tmp_path / "sizes").write_text("one 100 200\n")
    files = f'output_directory: "{tmp_path}/out" name_size_file: "{tmp_path}/sizes" output_format: "VOC"'
    with pytest.raises(ConfigError, match=r"labels"):
        Single(text.replace("keep_top_k", saved % files), *bottoms)
    (tmp_path / "labels").touch()
    caplog.clear()
    Single(text.replace("keep_top_k", saved % ""), *bottoms)
    assert not caplog.messages


def test_results_are_written_when_all_images_are_done(tmp_path: Path):
    labels = enumerate(["bg", "7", "b", "c"])
    (tmp_path / "labels").write_text(
        "".join(f'item {{ name: "{name}" label: {i} }}' for i, name in labels)
    )
    (tmp_path / "sizes").write_text("one 100 200\ntwo 50 40\n12 10 10\nfour 30 30\n")
    text, bottoms = given("ssd")
    for form in ("VOC", "COCO", "ILSVRC"):
        saved = (
            f'save_output_param {{ output_directory: "{tmp_path}/{form}" output_format: "{form}" '
            f'output_name_prefix: "det_" label_map_file: "{tmp_path}/labels" num_test_image: 4 '
            f'name_size_file: "{tmp_path}/sizes" }} keep_top_k'
        )
        layer = Single(text.replace("keep_top_k", saved), *bottoms)
        (top,) = layer.forward()
        assert not (tmp_path / form).exists()  # two of four images
        layer.forward()
    names, scales = ["one", "two", "12", "four"], [(100, 200), (50, 40), (10, 10), (30, 30)]
    rows = [
        (names[i], scales[i], row) for i in range(4) for row in top[0, 0] if int(row[0]) == i % 2
    ]
    listed = json.loads((tmp_path / "COCO" / "det_.json").read_text())
    assert len(listed) == len(rows) > 12
    lines = (tmp_path / "ILSVRC" / "det_.txt").read_text().splitlines()
    of_classes = {c: (tmp_path / "VOC" / f"det_{c}.txt").read_text().splitlines() for c in "7bc"}
    assert sum(map(len, of_classes.values())) == len(rows)
    for got, line, (name, (high, wide), row) in zip(listed, lines, rows, strict=True):
        box = np.round(np.clip(row[3:], 0, 1) * [wide, high, wide, high], 2)
        label = {1: "7", 2: "b", 3: "c"}[int(row[1])]
        assert got["image_id"] == (12 if name == "12" else name)
        assert got["category_id"] == (7 if label == "7" else label)
        np.testing.assert_allclose(got["bbox"], [*box[:2], *box[2:] - box[:2]], atol=1e-6)
        assert got["score"] == row[2]
        corners = " ".join(str(int(v)) for v in box)
        assert line == f"{name} {int(row[1])} {row[2]:g} {corners}"
        assert f"{name} {row[2]:g} {corners}" in of_classes[label]


@pytest.mark.parametrize(
    ("mode", "box", "want"),
    [
        ("", [0.25, 0.2, 0.8, 1.2], [50, 10, 160, 50]),
        ("resize_mode: WARP", [0.25, 0.2, 0.8, 1.2], [50, 10, 160, 50]),
        ("resize_mode: FIT_SMALL_SIZE", [0.25, 0.2, 0.8, 1.2], [50, 10, 160, 50]),
        (
            "resize_mode: FIT_SMALL_SIZE height_scale: 40 width_scale: 80",
            [0.25, 0.1, 0.8, 1.2],
            [20, 4, 64, 48],
        ),
        # 200 x 50 in 300 x 300: a strip of 75 in the middle, 0.375 to 0.625
        ("resize_mode: FIT_LARGE_SIZE_AND_PAD", [0.25, 0.3, 0.8, 0.5], [50, 0, 160, 25]),
    ],
)
def test_boxes_in_pixels(mode: str, box: list[float], want: list[float]):
    resize = text_format.Parse(f"height: 300 width: 300 {mode}", ResizeParameter())
    got = to_pixels(np.array([box]), (50, 200), resize if mode else None)
    np.testing.assert_allclose(got[0], want)


EVALUATE = 'type: "DetectionEvaluate" detection_evaluate_param { num_classes: 3 '
FOUND = np.array(
    [
        [0, 1, 0.6, 0.1, 0.1, 0.5, 0.5],
        [0, 1, 0.9, 0.1, 0.1, 0.5, 0.52],  # better, so it takes the true box
        [0, 2, 0.8, 0.6, 0.6, 0.9, 0.9],  # of a difficult box
        [1, 1, 0.7, 0.2, 0.2, 0.6, 0.6],  # overlaps too little
        [1, 2, 0.5, 0.2, 0.2, 0.6, 0.6],  # nothing of this class
    ]
)[None, None]
TRUE = np.array(
    [
        [0, 1, 0, 0.1, 0.1, 0.5, 0.5, 0],
        [0, 2, 0, 0.6, 0.6, 0.9, 0.9, 1],
        [1, 1, 0, 0.5, 0.5, 0.9, 0.9, 0],
        [-1, 1, 0, 0, 0, 1, 1, 0],
        [1, 2, 0, 0.2, 0.2, 0.6, 0.6, 0],  # behind the end
    ]
)[None, None]


@pytest.mark.parametrize("difficult", [True, False])
def test_what_is_found_is_judged(difficult: bool):
    text = EVALUATE + f"evaluate_difficult_gt: {str(difficult).lower()} }}"
    (top,) = Single(text, FOUND, TRUE).forward()
    want = [
        [-1, 1, 2, -1, -1],
        [-1, 2, int(difficult), -1, -1],
        [0, 1, 0.9, 1, 0],
        [0, 1, 0.6, 0, 1],
        [0, 2, 0.8, int(difficult), 0],
        [1, 1, 0.7, 0, 1],
        [1, 2, 0.5, 0, 1],
    ]
    np.testing.assert_allclose(top[0, 0], want)


def of_cascade(found, truths, sizes):
    """The rows of FrcnnOutput and EvalData, in pixels of images of sizes (height, width)."""
    found, truths, sizes = found[0, 0], truths[0, 0, [0, 1, 2, 4]], np.array(sizes, float)
    scale = np.tile(sizes[:, ::-1], 2)
    ours = [[i, *(box * scale[int(i)]), label, score] for i, label, score, *box in found]
    theirs = [
        [i, *(np.array(box) * scale[int(i)]), label, 0, difficult]
        for i, label, _, *box, difficult in truths
    ]
    return np.array([[0, *[-1] * 6], *ours]), np.array([*theirs, [-1] * 8]), sizes


@pytest.mark.parametrize("difficult", [True, False])
def test_what_cascade_finds_is_judged(difficult: bool, tmp_path: Path):
    """DetectionEvaluate with three bottoms, in pixels of the images themselves."""
    (tmp_path / "names.txt").write_text("a 900 1200\nb 500 300\n")
    text = EVALUATE + (
        f'evaluate_difficult_gt: {str(difficult).lower()} name_size_file: "{tmp_path}/names.txt" }}'
    )
    rows = of_cascade(FOUND, TRUE, [(300, 400), (640, 384)])
    ours, theirs, sizes = (np.reshape(row, (*row.shape, 1, 1)) for row in rows)
    (top,) = Single(text, ours, theirs, sizes).forward()
    want = [
        [-1, 1, 2, -1, -1],
        [-1, 2, 1 + int(difficult), -1, -1],
        [0, 1, 0.9, 1, 0],
        [0, 1, 0.6, 0, 1],
        [0, 2, 0.8, int(difficult), 0],
        [1, 1, 0.7, 0, 1],
        [1, 2, 0.5, 1, 0],
    ]
    assert top.shape == (7, 5, 1, 1)
    np.testing.assert_allclose(top[..., 0, 0], want, rtol=1e-6)
    with pytest.raises(DataError, match="a box of image 1, but there are sizes of 1"):
        Single(text, ours, theirs, sizes[:1]).forward()
    with pytest.raises(ConfigError, match=r"needs \(D, 7, 1, 1\)"):
        Single(text, FOUND, theirs, sizes)
    with pytest.raises(ConfigError, match=r"needs sizes \(N, 2\)"):
        Single(text, ours, theirs, sizes[:, :1])


@pytest.mark.parametrize("label", [0, 3, -1])
def test_a_true_box_of_no_class_is_no_truth(label: int):
    wrong = TRUE.copy()
    wrong[0, 0, 1, 1] = label
    with pytest.raises(DataError, match=f"a true box has class {label}; num_classes 3 has 0 to 2"):
        Single(EVALUATE + "}", FOUND, wrong).forward()


def test_nothing_found_leaves_the_numbers_of_true_boxes():
    nothing = np.array([[0.0, *[-1] * 6], [1, *[-1] * 6]])[None, None]
    (top,) = Single(EVALUATE + "}", nothing, TRUE).forward()
    np.testing.assert_array_equal(top[0, 0], [[-1, 1, 2, -1, -1], [-1, 2, 1, -1, -1]])


def test_detections_of_no_image_are_rows_of_zeros():
    stray = np.concatenate([[[[[-1, 2, 0.9, 0.1, 0.1, 0.5, 0.5], [-1] * 7]]], FOUND], axis=2)
    (top,) = Single(EVALUATE + "}", stray, TRUE).forward()
    (want,) = Single(EVALUATE + "}", FOUND, TRUE).forward()
    np.testing.assert_array_equal(top[0, 0], [*want[0, 0], [0] * 5])


def test_boxes_are_compared_in_pixels_of_their_images(tmp_path: Path):
    """With both ends inside, boxes of 3 x 3 pixels that are one apart overlap by a half."""
    (tmp_path / "sizes").write_text("a 4 4\n")
    (tmp_path / "wrong").write_text("a 4 4\nb 4\n")
    detection = np.array([[[[0, 1, 1, 0.25, 0, 0.75, 0.5]]]])
    true = np.array([[[[0, 1, 0, 0, 0, 0.5, 0.5, 0]]]])
    for file, hit in (("", 0), (f'name_size_file: "{tmp_path}/sizes"', 1)):
        text = EVALUATE + f"overlap_threshold: 0.45 {file} }}"
        (top,) = Single(text, detection, true).forward()
        assert top[0, 0, -1, 3] == hit
    with pytest.raises(ConfigError, match=r'wrong:2: .* not "b 4"'):
        Single(EVALUATE + f'name_size_file: "{tmp_path}/wrong" }}', detection, true)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "needs num_classes"),
        ("num_classes: 5", "need 2 x 150 scores"),
        ("num_classes: 4 nms_param { soft_nms: true }", "soft_nms, a field of deepdetect"),
        ("num_classes: 4 nms_param { nms_threshold: -1 }", "nms_threshold must be 0 or more"),
        ("num_classes: 4 nms_param { eta: 0 }", "eta above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: str, message: str):
    _, bottoms = given("all")
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "DetectionOutput" detection_output_param {{ {settings} }}', *bottoms)


def test_shapes_of_evaluations_are_checked():
    with pytest.raises(ConfigError, match=r"\(1, 1, G, 8\), not \[1, 1, 5, 7\]"):
        Single(EVALUATE + "}", FOUND, FOUND)
    with pytest.raises(ConfigError, match="needs num_classes"):
        Single('type: "DetectionEvaluate"', FOUND, TRUE)


@pytest.mark.parametrize("mode", ["", "resize_param { height: 300 width: 300 resize_mode: WARP }"])
def test_rows_for_cocos_figures(mode: str, tmp_path: Path):
    """Difficult boxes are crowds; boxes lie in the pixels of each image of the file, in turn."""
    (tmp_path / "sizes").write_text("a 300 200\nb 100 50\nc 80 80\n")
    single = Single(EVALUATE + f'name_size_file: "{tmp_path}/sizes" {mode} }}', FOUND, TRUE)
    for known in (True, False):
        single.layer.keep_coco_rows((lambda: 2) if known else None)
        single.forward()
        sizes = [np.array([200, 300, 200, 300]), np.array([50, 100, 50, 100])]
        want = []
        for image in range(2):
            for label in (1, 2):
                found = [row for row in FOUND[0, 0] if (row[0], row[1]) == (image, label)]
                truths = [row for row in TRUE[0, 0, :3] if (row[0], row[1]) == (image, label)]
                boxes = np.reshape([[f[2], *f[3:] * sizes[image]] for f in found], (-1, 5))
                corners = np.reshape([t[3:7] * sizes[image] for t in truths], (-1, 4))
                crowd = np.array([t[7] for t in truths], bool)
                want.append(coco.match(label, boxes, corners, crowd, known))
        np.testing.assert_allclose(single.layer.coco_rows, np.concatenate(want), rtol=1e-6)
    assert coco.summarize(single.layer.coco_rows)["AP50"] == pytest.approx(51 / 101)


def test_each_image_has_its_size_whether_or_not_it_has_boxes(tmp_path: Path):
    (tmp_path / "sizes").write_text("a 10 10\nb 10 10\nc 10 10\nd 500 500\n")
    text = EVALUATE + f'name_size_file: "{tmp_path}/sizes" }}'
    single = Single(text, np.full((1, 1, 1, 7), -1.0), TRUE[:, :, :1])
    single.layer.keep_coco_rows(lambda: 3)  # the last two have no boxes
    single.forward()
    assert single.layer.coco_rows[:, 3:7].tolist() == [[1, 1, 0, 0]]
    single.forward()
    assert single.layer.coco_rows[:, 3:7].tolist() == [[1, 0, 0, 1]]


@pytest.mark.parametrize("shapes", [((), (), ()), ((0, 7), (0, 8), ()), ((7,), (8,), (2,))])
def test_detections_of_cascade_rcnn_of_other_shapes(shapes):
    text = 'type: "DetectionEvaluate" detection_evaluate_param { num_classes: 2 }'
    with pytest.raises(ConfigError, match="DetectionEvaluate needs"):
        Single(text, *map(np.zeros, shapes))


@pytest.mark.parametrize("kind", ["DetectionOutput", "MultiBoxLoss"])
def test_locations_without_axes(kind):
    setting = "detection_output" if kind == "DetectionOutput" else "multibox_loss"
    text = f'type: "{kind}" {setting}_param {{ num_classes: 2 }}'
    bottoms = [(), (1, 2), (1, 2, 4)] + [(1, 1, 1, 8)] * (kind == "MultiBoxLoss")
    with pytest.raises(ConfigError, match="axis 0 is out of range"):
        Single(text, *map(np.zeros, bottoms))

"""DataHeatmap: images of people with maps of their joints, against loops that follow its rules."""

import cv2
import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError
from caffepy.models.synthetic import Guess, synthetic
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse

from .harness import Single

JOINTS = np.array([[10.0, 8], [4, 5], [16, 9], [6.5, 12], [13, 14]])  # x, y of five
CROP = "batchsize: 2 cropsize: 16 outsize: 32 scale: 0.5 label_width: 8 label_height: 8 multfact: 2"


@pytest.fixture
def listed(tmp_path):
    """A list of two images of random colours, 20 rows of 24 pixels."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(2):
        image = rng.integers(0, 256, (20, 24, 3), np.uint8)
        cv2.imwrite(f"{tmp_path}/{i}.png", image)
        numbers = ",".join(map(str, (JOINTS / 2 + i).ravel()))
        lines.append(f"{i}.png {numbers} 1,2,3,4,0 0")
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n\n")
    return tmp_path


def layer(folder, settings="", crop=CROP):
    return (
        f'type: "DataHeatmap" top: "data" top: "label" heatmap_data_param {{ {crop} {settings} '
        f'source: "{folder}/list.txt" root_img_dir: "{folder}/" }}'
    )


def batch(text, seed=1):
    single = Single(text, tops=2, seed=seed)
    try:
        return single.forward()
    finally:
        single.layer.close()


def peaks(joints):
    """Maps of 8 x 8 of joints in a square of 16 pixels."""
    maps = np.zeros((len(joints), 8, 8))
    for j, (x, y) in enumerate(joints):
        for row, column in np.ndindex(8, 8):
            square = (row - y / 2) ** 2 + (column - x / 2) ** 2
            maps[j, row, column] = 4 / (1.5 * np.sqrt(2 * np.pi)) * np.exp(-square / 2 / 1.5**2)
    return maps


def shrunk(image):
    """Red, green, blue of a square of 16 pixels, as 32."""
    large = cv2.resize(image[:, :, ::-1].astype(np.float32), (32, 32))
    return large.transpose(2, 0, 1) * 0.5


def test_the_middle_is_cut(listed):
    data, label = batch(layer(listed))
    for i in range(2):
        image = cv2.imread(f"{listed}/{i}.png")[2:18, 4:20]
        np.testing.assert_allclose(data[i], shrunk(image), atol=1e-4)
        np.testing.assert_allclose(label[i], peaks(JOINTS + 2 * i - (4, 2)), atol=1e-6)


def test_chosen_joints(listed):
    _, label = batch(layer(listed, 'labelinds: "3,4, 9,10"'))
    assert label.shape == (2, 2, 8, 8)
    np.testing.assert_allclose(label[0], peaks(JOINTS[[1, 4]] - (4, 2)), atol=1e-6)


def test_crops_and_mirrors_are_those_of_the_labels(listed):
    """Each image is a crop of the file or its mirror image, and its joints move with it."""
    single = Single(layer(listed, "random_crop: true"), tops=2)
    seen = set()
    for _ in range(12):
        data, label = single.forward()
        for i in range(2):
            image = cv2.imread(f"{listed}/{i}.png")
            joints = JOINTS + 2 * i
            for mirrored in (False, True):
                if mirrored:
                    image = image[:, ::-1]
                    joints = joints * (-1, 1) + (24, 0)
                    joints = joints[[0, 2, 1, 4, 3]]
                for top, left in np.ndindex(5, 9):
                    cut = image[top : top + 16, left : left + 16]
                    if np.abs(shrunk(cut) - data[i]).max() < 1e-3:
                        seen.add((mirrored, top, left))
                        np.testing.assert_allclose(label[i], peaks(joints - (left, top)), atol=1e-5)
                        break
                else:
                    continue
                break
            else:
                raise AssertionError("no part of the file")
    single.layer.close()
    assert {mirrored for mirrored, *_ in seen} == {False, True}
    assert len({(top, left) for _, top, left in seen}) > 6


def test_turned_joints_stay_on_their_pixels(tmp_path):
    """A bright pixel at the joint turns with it."""
    image = np.zeros((16, 16, 3), np.uint8)
    image[6:9, 10:13] = 255
    cv2.imwrite(f"{tmp_path}/0.png", image)
    (tmp_path / "list.txt").write_text("0.png 11,7 1,2,3,4,0 0\n")
    crop = "batchsize: 1 cropsize: 16 outsize: 16 label_width: 16 label_height: 16"
    text = layer(tmp_path, "random_crop: true angle_max: 90 dont_flip_first: true", crop)
    single = Single(text, tops=2)
    places = set()
    for _ in range(12):
        data, label = single.forward()
        bright = np.unravel_index(data[0, 0].argmax(), (16, 16))
        peak = np.unravel_index(label[0, 0].argmax(), (16, 16))
        assert np.abs(np.subtract(bright, peak)).max() <= 2
        places.add(peak)
    single.layer.close()
    assert len(places) > 5


def test_narrow_images_are_widened_by_zeros(listed):
    crop = CROP.replace("cropsize: 16", "cropsize: 20").replace("outsize: 32", "outsize: 20")
    cv2.imwrite(f"{listed}/0.png", np.full((20, 12, 3), 200, np.uint8))
    data, _ = batch(layer(listed, "", crop))
    np.testing.assert_array_equal(data[0, :, :, :12], 100)
    np.testing.assert_array_equal(data[0, :, :, 12:], 0)


@pytest.mark.parametrize(
    ("settings", "lines", "message"),
    [
        ("meanfile: 'm'", None, "meanfile is not supported"),
        ("sample_per_cluster: true", None, "sample_per_cluster is not supported"),
        ('labelinds: "one"', None, 'labelinds "one" are no numbers'),
        ('labelinds: "1,1e400"', None, 'labelinds "1,1e400" are no numbers'),
        ('labelinds: "7"', "0.png 1,2 1 0", "list.txt:1: 0 numbers of 2, by labelinds, are no x"),
        ("", "0.png 1,nan 1 0", r'list.txt:1: "0.png 1,nan 1 0" is not an image, numbers'),
        ("", "0.png 1,2,3 1 0", r"list.txt:1: 3 numbers are no x and y"),
        ("", "0.png 1,2", r'list.txt:1: "0.png 1,2" is not an image, numbers'),
        ("", "0.png a,b 1 0", r'list.txt:1: "0.png a,b 1 0" is not an image'),
        ("", "0.png 1,nan 1 0", r'list.txt:1: "0.png 1,nan 1 0" is not an image'),
        ("", "0.png 1,2 1 0\n1.png 1,2,3,4 1 0", "list.txt:2: 4 numbers, not 2 as before"),
        ("", "\n", "lists no images"),
    ],
)
def test_what_does_not_fit_is_refused(listed, settings, lines, message):
    if lines is not None:
        (listed / "list.txt").write_text(lines)
    with pytest.raises((ConfigError, DataError), match=message):
        Single(layer(listed, settings), tops=2)


def test_images_that_do_not_fit_are_named(listed):
    for side in (21, 4294967295):  # no border is made for the second
        text = layer(listed, "", CROP.replace("cropsize: 16", f"cropsize: {side}"))
        message = rf"0.png.* an image of 20 rows, from which {side} are to be cut"
        with pytest.raises(DataError, match=message):
            batch(text)
    (listed / "list.txt").write_text("0.png 1,2,3,4 1 0\n")
    text = layer(listed, "random_crop: true")
    single = Single(text.replace("batchsize: 2", "batchsize: 8"), tops=2)
    with pytest.raises(DataError, match="1 joints are no pairs of left and right"):
        single.forward()
    single.layer.close()


def test_sizes_are_needed(listed):
    with pytest.raises(ConfigError, match="cropsize must be 1 or more"):
        Single(layer(listed, "", "batchsize: 1 outsize: 8"), tops=2)
    with pytest.raises(ConfigError, match="transforms by heatmap_data_param"):
        Single(layer(listed) + " transform_param { mirror: true }", tops=2)


def test_made_up_data_have_the_maps_that_the_loss_compares(listed):
    net = parse(
        f"layer {{ {layer(listed)} }}"
        'layer { name: "c" type: "Convolution" bottom: "data" top: "c" convolution_param { '
        "num_output: 7 kernel_size: 4 stride: 4 } }"
        'layer { name: "l" type: "EuclideanLossHeatmap" bottom: "c" bottom: "label" top: "l" }',
        NetParameter(),
    )
    built = Net(synthetic(net, guess=Guess((3, 8, 8))))
    assert built.blobs["label"].shape == (2, 7, 8, 8)
    assert built.blobs["data"].shape == (2, 3, 32, 32)

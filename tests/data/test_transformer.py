"""The transformer: Caffe's order of draws, crops, mirrors, means, and sizes that do not fit."""

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError, DataError
from caffepy.data.transformer import Transformer, Twister
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import TEST, TRAIN, BlobProto, TransformationParameter

SHAPE = (3, 8, 11)
IMAGES = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), np.uint8)


def transformer(text, phase=TRAIN, seed=3, path=None):
    return Transformer(
        text_format.Parse(text, TransformationParameter()), phase, Device(seed=seed), path
    )


def apply(t, images=IMAGES):
    out = np.full((len(images), *t.output_shape(images.shape[1:])), np.nan, np.float32)
    t.apply(images, out, t.draw(len(images)))
    return out


def mean_file(folder, shape=(1, *SHAPE)):
    values = np.arange(np.prod(shape), dtype=np.float32)
    blob = BlobProto(data=values)
    blob.num, blob.channels, blob.height, blob.width = shape
    (folder / "mean.binaryproto").write_bytes(blob.SerializeToString())
    return values.reshape(shape)[0]


def test_nothing_asked_for_gives_the_image():
    np.testing.assert_array_equal(apply(transformer("")), IMAGES)


def test_scale_comes_after_the_mean():
    out = apply(transformer("mean_value: 10 mean_value: 20 mean_value: 30 scale: 0.25"))
    np.testing.assert_allclose(
        out, (IMAGES - np.array([10.0, 20, 30])[:, None, None]) * 0.25, rtol=1e-6
    )
    out = apply(transformer("mean_value: 10"))
    np.testing.assert_allclose(out, IMAGES - 10.0)


def test_a_crop_in_test_is_the_centre():
    out = apply(transformer("crop_size: 5", TEST))
    np.testing.assert_array_equal(out, IMAGES[:, :, 1:6, 3:8])


def test_draws_are_mirror_then_rows_then_columns():
    seed = Device(seed=3).draw_seed()
    numbers = [
        int(n) for n in np.random.RandomState(seed).randint(0, 2**32, 3 * len(IMAGES), np.uint32)
    ]
    out = apply(transformer("crop_size: 5 mirror: true"))
    seen = set()
    for image, result in zip(IMAGES, out, strict=True):
        mirror, h, w = numbers.pop(0) % 2, numbers.pop(0) % 4, numbers.pop(0) % 7
        expected = image[:, h : h + 5, w : w + 5]
        np.testing.assert_array_equal(result, expected[:, :, ::-1] if mirror else expected)
        seen |= {("mirror", mirror), ("h", h), ("w", w)}
    assert len(seen) == 2 + 4 + 7


def test_a_mirror_alone_draws_one_number_also_in_test():
    numbers = np.random.RandomState(Device(seed=3).draw_seed()).randint(
        0, 2**32, len(IMAGES), np.uint32
    )
    out = apply(transformer("mirror: true", TEST))
    for image, result, number in zip(IMAGES, out, numbers, strict=True):
        np.testing.assert_array_equal(result, image[:, :, ::-1] if number % 2 else image)


def test_the_same_seed_gives_the_same_and_state_goes_on():
    first, second = (transformer("crop_size: 5 mirror: true") for _ in range(2))
    np.testing.assert_array_equal(apply(first), apply(second))
    state = first.state()
    third = transformer("crop_size: 5 mirror: true", seed=99)
    third.set_state(state)
    np.testing.assert_array_equal(apply(first), apply(third))
    assert not np.array_equal(apply(first), apply(second))


def test_a_position_outside_of_the_twisters_words_is_refused():
    twister = Twister(5)
    with pytest.raises(ValueError, match="position 700 among 624 random words"):
        twister.set_state({**twister.state(), "twister_position": 700})


def test_the_state_is_that_of_numpys_twister():
    twister = Twister(5)
    for count in (0, 1, 700, 10_000):
        twister.draw(count)
        expected = twister._generator.state["state"]
        state = twister.state()
        np.testing.assert_array_equal(state["twister"], expected["key"])
        assert (state["twister"].dtype, state["twister_position"]) == (np.uint32, expected["pos"])


def test_without_draws_the_device_gives_no_seed():
    device = Device(seed=1)
    for text, phase in (("", TRAIN), ("crop_size: 5", TEST)):
        t = Transformer(text_format.Parse(text, TransformationParameter()), phase, device)
        assert t.state() == {}
    assert device.draw_seed() == Device(seed=1).draw_seed()


def test_a_seed_of_its_own():
    first, second = (transformer("mirror: true random_seed: 7", seed=s) for s in (1, 2))
    np.testing.assert_array_equal(apply(first), apply(second))


def test_fields_of_forks_without_effect_are_named(caplog):
    transformer("scale: 2 use_gpu_transform: true img_rand_resize_lower: 256 display: true")
    assert caplog.messages == [
        "transform_param's img_rand_resize_lower, known to forks of Caffe, have no effect"
    ]


def test_mean_file_is_indexed_at_the_crop_before_mirroring(tmp_path):
    mean = mean_file(tmp_path)
    out = apply(
        transformer(
            "mean_file: 'mean.binaryproto' crop_size: 5", TEST, path=str(tmp_path / "net.prototxt")
        )
    )
    np.testing.assert_array_equal(out, IMAGES[:, :, 1:6, 3:8] - mean[:, 1:6, 3:8])
    out = apply(
        transformer(
            "mean_file: 'mean.binaryproto' mirror: true", path=str(tmp_path / "net.prototxt")
        )
    )
    for result, expected in zip(out, IMAGES - mean, strict=True):
        assert (result == expected).all() or (result == expected[:, :, ::-1]).all()


REFUSED = {
    "mean file and value": ("mean_file: 'x' mean_value: 1", ConfigError, "cannot both be given"),
    "color and gray": ("force_color: true force_gray: true", ConfigError, "cannot both be set"),
    "two values for three channels": (
        "mean_value: 1 mean_value: 2",
        ConfigError,
        "2 mean_value for 3 channels; give 1 or 3",
    ),
    "large crop": ("crop_size: 9", ConfigError, "crop_size 9 is larger than the image, 8 x 11"),
    "mean of another size": (
        "mean_file: 'mean.binaryproto'",
        DataError,
        r"shape 3 5 5 \(75\), the image 3 8 11 \(264\)",
    ),
    "missing mean file": ("mean_file: 'nowhere'", DataError, "nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    mean_file(tmp_path, (1, 3, 5, 5))
    text, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        transformer(text, path=str(tmp_path / "net.prototxt")).output_shape(SHAPE)


def test_a_mean_of_several_images_is_refused(tmp_path):
    mean_file(tmp_path, (2, 3, 5, 5))
    with pytest.raises(DataError, match=r"is no mean image: its shape is 2 3 5 5 \(150\)"):
        transformer("mean_file: 'mean.binaryproto'", path=str(tmp_path / "net.prototxt"))

"""MatWrite, against scipy, which reads MATLAB's files."""

import numpy as np
import pytest
from google.protobuf import text_format
from scipy.io import loadmat

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Blob
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TEST, LayerParameter

from .harness import Single, random


def text(folder, more=""):
    return f'type: "MatWrite" mat_write_param {{ prefix: "{folder}/crf/" {more} }}'


@pytest.fixture
def names(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("2007_1.jpg more\nvoc/2007_2.jpg\n")
    return f'source: "{path}" strip: 4'


def test_files_as_matlab_reads_them(tmp_path, names):
    bottoms = random(2, 3, 4, 5), random(6)
    single = Single(text(tmp_path, names), *bottoms, tops=0)
    single.forward()
    single.inputs[0] += 1
    single.forward()
    for name, first in (("2007_1", bottoms[0]), ("voc/2007_2", bottoms[0] + 1)):
        for i, want in enumerate((first, bottoms[1].reshape(6, 1, 1, 1))):
            found = loadmat(f"{tmp_path}/crf/{name}_blob_{i}.mat")["data"]
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found.T, want.astype(np.float32).reshape(found.T.shape))
    with pytest.raises(DataError, match="names 2 images, but this is pass 3; run as many"):
        single.forward()


def test_every_period_with_numbers_for_names(tmp_path):
    single = Single(text(tmp_path, "period: 2"), random(1, 2), tops=0)
    for _ in range(4):
        single.forward()
    files = sorted(path.name for path in (tmp_path / "crf").iterdir())
    assert files == ["iter_0_blob_0.mat", "iter_2_blob_0.mat"]


def test_nets_that_are_only_looked_at_write_and_read_nothing(tmp_path):
    device = Device()
    device.writes_files = False
    param = text_format.Parse(text(tmp_path, 'source: "absent.txt"'), LayerParameter())
    layer, bottom = create_layer(param, TEST, device), [Blob((1, 2))]
    layer.setup(bottom, [])
    layer.reshape(bottom, [])
    layer.forward(bottom, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("period: 0", "period must be 1 or more"),
        ("strip: -1", "strip 0 or more, not 1 and -1"),
        ('source: "absent.txt"', r"absent\.txt: source cannot be read: no such"),
    ],
)
def test_settings_that_are_refused(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        Single(text(tmp_path, more), random(1, 2), tops=0)


def test_names_that_are_too_short(tmp_path, names):
    with pytest.raises(ConfigError, match=r"list\.txt:1: .*is left of the name '2007_1\.jpg'"):
        Single(text(tmp_path, names.replace("strip: 4", "strip: 10")), random(1, 2), tops=0)
    with pytest.raises(ConfigError, match="needs a prefix"):
        Single('type: "MatWrite" mat_write_param { }', random(1, 2), tops=0)


def test_empty_lines(tmp_path):
    (tmp_path / "list.txt").write_text("a\nb\n\n")
    source = f'source: "{tmp_path}/list.txt"'
    with pytest.raises(ConfigError, match=r"list\.txt:3: source: the line is empty; remove it"):
        Single(text(tmp_path, source), random(1, 2), tops=0)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "crf").write_text("")
    with pytest.raises(DataError, match=r"crf/iter_0_blob_0\.mat cannot be written"):
        Single(text(tmp_path), random(1, 2), tops=0).forward()

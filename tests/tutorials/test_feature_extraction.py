"""Features of images in a list, written by the tool and read again by a script."""

from pathlib import Path

import cv2
import lmdb
import numpy as np
from google.protobuf import text_format

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy.proto import caffe_pb2
from tests.tutorials.material import GOLDEN, MODELS, digits, run, written

BATCH, BATCHES = 20, 3


def test_features_of_a_list_of_images(tmp_path: Path) -> None:
    """The digits net that Caffe trained: its features tell digits apart as well as its scores."""
    images, labels = digits("test")
    lines = []
    for i, image in enumerate(images[: BATCH * BATCHES]):
        cv2.imwrite(str(tmp_path / f"{i}.png"), image)
        lines.append(f"{tmp_path / f'{i}.png'} 0\n")
    (tmp_path / "list.txt").write_text("".join(lines))
    n = caffe.NetSpec()
    n.data, n.label = L.ImageData(
        source=str(tmp_path / "list.txt"),
        batch_size=BATCH,
        is_color=False,
        transform_param={"scale": 1 / 240},
        ntop=2,
    )
    param = n.to_proto()
    deploy = text_format.Parse(
        (MODELS / "digits" / "deploy.prototxt").read_text(), caffe_pb2.NetParameter()
    )
    param.layer.extend(deploy.layer[1:])
    model = written(tmp_path / "net.prototxt", param)
    weights = str(GOLDEN / "digits" / "digits_iter_500.caffemodel")
    tool = [
        "-m",
        "caffepy",
        "extract_features",
        weights,
        model,
        "ip1,prob",
        "ip1_lmdb,prob_lmdb",
        str(BATCHES),
        "lmdb",
    ]
    run(tmp_path, *tool)

    features = {}
    for blob in ("ip1", "prob"):
        with (
            lmdb.open(str(tmp_path / f"{blob}_lmdb"), readonly=True, lock=False) as database,
            database.begin() as rows,
        ):
            items = list(rows.cursor())
        assert [key for key, _ in items] == [b"%010d" % i for i in range(BATCH * BATCHES)]
        datums = [caffe_pb2.Datum.FromString(value) for _, value in items]
        features[blob] = np.stack([caffe.io.datum_to_array(datum).ravel() for datum in datums])
    net = caffe.Net(str(MODELS / "digits" / "deploy.prototxt"), weights, caffe.TEST)
    own = net.forward_all(["ip1"], data=(images[: BATCH * BATCHES] / 240)[:, np.newaxis])
    for blob, values in features.items():
        np.testing.assert_allclose(values, own[blob], rtol=1e-4, atol=1e-6)
    shown = labels[: BATCH * BATCHES]
    assert (features["prob"].argmax(axis=1) == shown).mean() > 0.95
    distance = np.linalg.norm(features["ip1"][:, None] - features["ip1"], axis=2)
    np.fill_diagonal(distance, np.inf)
    assert (
        shown[distance.argmin(axis=1)] == shown
    ).mean() > 0.9  # what is alike has features that are alike

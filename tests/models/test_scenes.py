"""The scenes of digits_ssd and digits_seg: what lies in their databases, and that they are what the
program makes. digits_ssd: its files, and that it learns.
"""

from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

import caffepy.models
from benchmarks import make_scenes
from caffepy.data.datum import decode_annotated
from caffepy.data.sources import open_database
from caffepy.device.blob import Array
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import TRAIN, Datum, NetParameter
from caffepy.proto.text import read_net, read_solver
from caffepy.solver import Solver

FOLDER = Path(caffepy.models.__path__[0])


def values(path: Path) -> list[bytes]:
    with closing(open_database(str(path))) as source:
        return [bytes(value) for items in source.once(100) for _, value in items]


def labels_of(record: bytes) -> Array:
    datum = Datum.FromString(record)
    return cv2.imdecode(np.frombuffer(datum.data, np.uint8), cv2.IMREAD_GRAYSCALE)


@pytest.mark.parametrize("split", make_scenes.COUNTS)
def test_scenes(split: str) -> None:
    boxes = values(FOLDER / "digits_ssd" / f"scenes_{split}_lmdb")
    labels = values(FOLDER / "digits_seg" / f"labels_{split}_lmdb")
    assert len(boxes) == len(labels) == make_scenes.COUNTS[split]
    for scene, record, label in zip(make_scenes.scenes(split), boxes[:20], labels, strict=False):
        found, pixels = decode_annotated(record), labels_of(label)
        np.testing.assert_array_equal(found.image[0], scene.image)
        np.testing.assert_array_equal(pixels, scene.labels)
        assert len(found.objects) == len(scene.boxes) > 0
        for digit, _, *box, _ in found.objects:
            left, top, right, bottom = np.rint(np.array(box) * make_scenes.SIZE).astype(int)
            inside = pixels[top:bottom, left:right]
            assert set(np.unique(inside)) <= {0, digit, make_scenes.VOID}
            assert (inside == digit).any()


def read(kind: str) -> NetParameter:
    return read_net(str(caffepy.models.path("digits_ssd", kind)))


def params(net: Net) -> dict[str, list[tuple[int, ...]]]:
    layers = zip(net.layer_names, net.layers, strict=True)
    return {name: [blob.shape for blob in layer.blobs] for name, layer in layers if layer.blobs}


def test_nets_of_digits_ssd() -> None:
    trained, deployed = read("train_val"), Net(read("deploy"))
    trained.state.phase = TRAIN
    net = Net(trained, path=caffepy.models.path("digits_ssd", "train_val"))
    net.close()
    assert params(net) == params(deployed)
    learned = sum(param.blob.count for param in net.learnable if param.spec.lr_mult)
    assert learned == 275_236
    assert net.blobs["mbox_conf"].shape == (20, 1344 * 11)
    assert deployed.blobs["mbox_priorbox"].shape == (1, 2, 1344 * 4)
    assert deployed.outputs == ["detection_out"]


def test_digits_ssd_learns(tmp_path: Path) -> None:
    """A few steps of small batches: the whole way from boxes to a mean average precision."""
    path = caffepy.models.path("digits_ssd", "solver")
    param, net = read_solver(str(path)), read("train_val")
    param.ClearField("net")
    for layer in net.layer:
        if layer.type == "AnnotatedData":
            layer.data_param.source = str(FOLDER / "digits_ssd" / layer.data_param.source)
            layer.data_param.batch_size = 5
    param.net_param.CopyFrom(net)
    param.random_seed, param.max_iter, param.display, param.snapshot = 0, 12, 1, 0
    param.test_interval, param.test_iter[0], param.snapshot_after_train = 12, 2, False
    run = Solver(param)
    losses = []
    run.net.after_forward.append(
        lambda i: losses.append(run.net.loss()) if i == len(run.net.layers) - 1 else None
    )
    run.solve()
    ((name, precision, _),) = run.last_outputs[0]
    run.close()
    assert np.mean(losses[-3:]) < 0.7 * losses[0]
    assert name == "detection_eval"
    assert 0 <= float(precision) <= 1

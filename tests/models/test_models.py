"""The bundled nets: files, parameter counts, shapes, fillers, and the digits' data."""

from pathlib import Path

import lmdb
import numpy as np
import pytest

from caffepy import models
from caffepy.models.synthetic import image_shape, synthetic
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import TEST, TRAIN, Datum, NetParameter, Phase, SolverParameter
from caffepy.proto.text import read_net, read_solver
from caffepy.solver import Solver

from .naive import sizes
from .test_detectors import DETECTORS

# Published totals; of googlenet with its auxiliary classifiers, in deployment without them.
PARAMETERS = {
    "alexnet": 60_965_224,
    "caffenet": 60_965_224,
    "cifar10_quick": 145_578,
    "densenet121": 7_978_856,
    "digits": 13_706,
    "digits_seg": 123_051,
    "googlenet": 13_378_280,
    "lenet": 431_080,
    "mobilenet_v2": 3_504_872,
    "resnet50": 25_557_032,
    "se_resnet50": 28_088_024,
    "segnet": 29_441_419,
    "shufflenet_v2": 2_278_604,
    "vgg16": 138_357_544,
}
DEPLOYED = PARAMETERS | {"googlenet": 6_998_552}
SHAPES = {
    "alexnet": {
        "conv1": (96, 55, 55),
        "norm1": (96, 55, 55),
        "pool2": (256, 13, 13),
        "pool5": (256, 6, 6),
        "fc8": (1000,),
    },
    "caffenet": {
        "conv1": (96, 55, 55),
        "norm1": (96, 27, 27),
        "pool2": (256, 13, 13),
        "pool5": (256, 6, 6),
        "fc8": (1000,),
    },
    "cifar10_quick": {
        "pool1": (32, 16, 16),
        "pool2": (32, 8, 8),
        "pool3": (64, 4, 4),
        "ip2": (10,),
    },
    "densenet121": {
        "pool1": (64, 56, 56),
        "concat_2_6": (256, 56, 56),
        "concat_4_24": (1024, 14, 14),
        "pool4": (512, 7, 7),
        "concat_5_16": (1024, 7, 7),
        "fc6": (1000, 1, 1),
    },
    "digits": {"pool1": (16, 4, 4), "pool2": (32, 2, 2), "ip2": (10,)},
    "digits_seg": {
        "pool1": (16, 32, 32),
        "pool2_mask": (32, 16, 16),
        "conv5": (64, 16, 16),
        "up2": (32, 32, 32),
        "up1": (16, 64, 64),
        "score": (11, 64, 64),
    },
    "googlenet": {
        "pool1/norm1": (64, 56, 56),
        "pool2/3x3_s2": (192, 28, 28),
        "inception_3b/output": (480, 28, 28),
        "inception_4e/output": (832, 14, 14),
        "pool5/7x7_s1": (1024, 1, 1),
        "loss3/classifier": (1000,),
    },
    "lenet": {"pool1": (20, 12, 12), "pool2": (50, 4, 4), "ip2": (10,)},
    "mobilenet_v2": {
        "conv1": (32, 112, 112),
        "block_3_1": (24, 56, 56),
        "block_4_2": (32, 28, 28),
        "conv4_3/dwise": (192, 14, 14),
        "block_5_2": (96, 14, 14),
        "conv6_4": (1280, 7, 7),
        "fc7": (1000, 1, 1),
    },
    "resnet50": {
        "pool1": (64, 56, 56),
        "res2c": (256, 56, 56),
        "res3a_branch2a": (128, 28, 28),
        "res4f": (1024, 14, 14),
        "res5c": (2048, 7, 7),
        "fc1000": (1000,),
    },
    "se_resnet50": {
        "pool1/3x3_s2": (64, 56, 56),
        "conv2_3_1x1_down": (16, 1, 1),
        "conv3_4": (512, 28, 28),
        "conv5_3_1x1_up": (2048, 1, 1),
        "conv5_3": (2048, 7, 7),
        "classifier": (1000,),
    },
    "segnet": {
        "pool4": (512, 23, 30),
        "pool5_mask": (512, 12, 15),
        "pool5_D": (512, 23, 30),
        "conv4_1_D": (256, 45, 60),
        "pool1_D": (64, 360, 480),
        "conv1_1_D": (11, 360, 480),
    },
    "shufflenet_v2": {
        "pool1": (24, 56, 56),
        "shuffle4": (116, 28, 28),
        "branch6_2": (116, 14, 14),
        "shuffle16": (464, 7, 7),
        "conv5": (1024, 7, 7),
        "fc1000": (1000, 1, 1),
    },
    "vgg16": {"pool1": (64, 112, 112), "pool5": (512, 7, 7), "fc8": (1000,)},
}
NETS = sorted(PARAMETERS)
PHASES = {"train": TRAIN, "test": TEST}


def read(name: str, kind: str) -> NetParameter:
    path = models.path(name, kind)
    assert path is not None
    return read_net(path)


def solver(name: str) -> SolverParameter:
    path = models.path(name, "solver")
    assert path is not None
    return read_solver(path)


def training(name: str, phase: Phase) -> NetParameter:
    """The training net on one synthetic image. Parameters start at zero: filling 138 million takes
    a while.
    """
    net = synthetic(read(name, "train_val"), 1, image_shape(name))
    net.state.phase = phase
    return without_fillers(net)


def without_fillers(net: NetParameter) -> NetParameter:
    for layer in net.layer:
        for param in (layer.convolution_param, layer.inner_product_param):
            param.ClearField("weight_filler")
    return net


def test_names() -> None:
    assert models.names() == sorted([*NETS, *DETECTORS, "digits_ssd"])  # in test_scenes.py


@pytest.mark.parametrize("name", models.names())
def test_every_net_has_its_files(name: str) -> None:
    for kind in models.KINDS:
        path = Path(str(models.path(name, kind)))
        assert path.is_file()
        assert (path.parent / "README.md").is_file()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lenet", "mean"), ("lent", "solver"), ("../models/lenet", "solver"), ("", "solver")],
)
def test_path_of_what_is_not_there(name: str, kind: str) -> None:
    assert models.path(name, kind) is None


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", NETS)
def test_training_net_builds(name: str, phase: str) -> None:
    param = training(name, PHASES[phase])
    expected = sizes(param, PHASES[phase])
    net = Net(param)
    learned = [param.blob for param in net.learnable if param.spec.lr_mult]
    assert sum(blob.count for blob in learned) == expected.learned() == PARAMETERS[name]
    assert {n: b.shape for n, b in net.blobs.items() if n in expected.blobs} == expected.blobs
    assert {n: net.blobs[n].shape[1:] for n in SHAPES[name]} == SHAPES[name]


@pytest.mark.parametrize("name", NETS)
def test_deployed_net_builds(name: str) -> None:
    param = without_fillers(read(name, "deploy"))
    param.layer[0].input_param.shape[0].dim[0] = 1
    net = Net(param)
    learned = [param.blob for param in net.learnable if param.spec.lr_mult]
    assert sum(blob.count for blob in learned) == sizes(param, TEST).learned() == DEPLOYED[name]
    assert net.inputs == ["data"]
    assert net.outputs == ["prob"]
    scores = list(SHAPES[name].values())[-1]
    assert net.blobs["prob"].shape == (1, *scores)


@pytest.mark.parametrize("name", NETS)
def test_deployed_net_takes_the_trained_weights(name: str) -> None:
    trained = {layer.name: layer.type for layer in read(name, "train_val").layer}
    deployed = {
        layer.name: layer.type
        for layer in read(name, "deploy").layer
        if layer.type not in ("Input", "Softmax")
    }
    assert deployed.items() <= trained.items()


@pytest.mark.parametrize("name", NETS)
def test_every_weight_has_a_filler(name: str) -> None:
    for layer in read(name, "train_val").layer:
        for param in (layer.convolution_param, layer.inner_product_param):
            if param.num_output:
                assert param.weight_filler.type != "constant", layer.name


@pytest.mark.parametrize("name", NETS)
def test_solver_and_net_agree(name: str) -> None:
    param, net = solver(name), read(name, "train_val")
    assert param.net == "train_val.prototxt"
    assert param.snapshot_prefix == name
    test_batch = next(
        layer.data_param.batch_size or layer.dense_image_data_param.batch_size
        for layer in net.layer
        if layer.include and layer.include[0].phase == TEST
    )
    few = {"digits": 297, "digits_seg": 150, "lenet": 10_000, "cifar10_quick": 10_000}
    few["segnet"] = 233
    pictures = few.get(name, 50_000)
    assert param.test_iter == [pictures // test_batch]
    assert param.test_iter[0] * test_batch == pictures


def test_the_auxiliary_losses_weigh_less() -> None:
    net = Net(training("googlenet", TRAIN))
    weights = {"loss1/loss1": 0.3, "loss2/loss1": 0.3, "loss3/loss3": 1.0}
    assert net.blob_loss_weights == pytest.approx(dict.fromkeys(net.blobs, 0.0) | weights)


@pytest.mark.parametrize(("part", "count"), [("train", 1500), ("test", 297)])
def test_the_digits(part: str, count: int) -> None:
    folder = Path(str(models.path("digits", "solver"))).parent / f"digits_{part}_lmdb"
    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as transaction:
        records = [(bytes(key), Datum.FromString(value)) for key, value in transaction.cursor()]
    assert [key for key, _ in records] == [b"%08d" % i for i in range(count)]
    assert {(d.channels, d.height, d.width, len(d.data)) for _, d in records} == {(1, 8, 8, 64)}
    pixels = np.frombuffer(b"".join(d.data for _, d in records), np.uint8)
    assert set(np.unique(pixels)) == set(range(0, 241, 15))
    per_class = np.bincount([d.label for _, d in records], minlength=10)
    assert len(per_class) == 10
    assert per_class.min() > count / 15


def test_the_digits_are_learned(tmp_path: Path) -> None:
    param = solver("digits")
    param.random_seed = 0
    param.test_initialization = param.snapshot_after_train = False
    param.test_interval, param.snapshot, param.snapshot_prefix = (
        param.max_iter,
        0,
        str(tmp_path / "digits"),
    )
    run = Solver(param, path=models.path("digits", "solver"))
    run.solve()
    accuracy = {name: float(value) for name, value, _ in run.last_outputs[0]}["accuracy"]
    run.close()
    assert accuracy >= 0.97

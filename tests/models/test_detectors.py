"""The bundled detectors: files, parameter counts, shapes, settings that belong together."""

from math import prod
from pathlib import Path

import numpy as np
import pytest

from caffepy import models
from caffepy.models.synthetic import image_shape, synthetic
from caffepy.net import Net
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter, Phase
from caffepy.proto.text import read_net, read_solver

# SSD300's is the published total. MobileNet-SSD's: MobileNet without its classifier 3,206,976; the
# smaller maps 2,223,488; boxes and scores 365,625. Faster R-CNN's: VGG16 without its classifier
# 134,260,544; the proposals 2,387,510; classes and boxes 430,185.
PARAMETERS = {
    "faster_rcnn_vgg16": 137_078_239,
    "mobilenet_ssd": 5_796_089,
    "ssd300_vgg16": 26_285_486,
}
KEPT = {"faster_rcnn_vgg16": 260_160}  # that training leaves as they are: conv1, conv2
SHAPES = {
    "faster_rcnn_vgg16": {
        "conv5_3": (512, 38, 50),
        "rpn_bbox_pred": (36, 38, 50),
        "rpn_cls_prob_reshape": (18, 38, 50),
    },
    "mobilenet_ssd": {
        "conv11": (512, 19, 19),
        "conv13": (1024, 10, 10),
        "conv17_2": (128, 1, 1),
        "mbox_loc": (1917 * 4,),
        "mbox_conf": (1917 * 21,),
        "mbox_priorbox": (2, 1917 * 4),
    },
    "ssd300_vgg16": {
        "conv4_3_norm": (512, 38, 38),
        "fc7": (1024, 19, 19),
        "conv8_2": (256, 3, 3),
        "mbox_loc": (8732 * 4,),
        "mbox_conf": (8732 * 21,),
        "mbox_priorbox": (2, 8732 * 4),
    },
}
OUTPUTS = {
    "faster_rcnn_vgg16": {"bbox_pred": (1, 84), "cls_prob": (1, 21)},
    "mobilenet_ssd": {"detection_out": (1, 1, 200, 7)},
    "ssd300_vgg16": {"detection_out": (1, 1, 200, 7)},
}
LOSSES = {
    "faster_rcnn_vgg16": {"loss_bbox", "loss_cls", "rpn_cls_loss", "rpn_loss_bbox"},
    "mobilenet_ssd": {"mbox_loss"},
    "ssd300_vgg16": {"mbox_loss"},
}
DETECTORS = sorted(PARAMETERS)
SSD = ["mobilenet_ssd", "ssd300_vgg16"]


def read(name: str, kind: str) -> NetParameter:
    return read_net(str(models.path(name, kind)))


def built(param: NetParameter, phase: Phase) -> Net:
    """The net without values of its blobs."""
    param.state.phase = phase
    return Net(param, device=ShapesOnlyDevice(seed=0))


def made_up(name: str, batch: int = 1) -> NetParameter:
    return synthetic(read(name, "train_val"), batch, image_shape(name))


def weights(net: Net) -> dict[str, list[tuple[int, ...]]]:
    layers = zip(net.layer_names, net.layers, strict=True)
    return {name: [blob.shape for blob in layer.blobs] for name, layer in layers if layer.blobs}


@pytest.mark.parametrize("phase", [TRAIN, TEST])
@pytest.mark.parametrize("name", DETECTORS)
def test_training_net_builds(name: str, phase: Phase) -> None:
    net = built(made_up(name), phase)
    learned = sum(param.blob.count for param in net.learnable if param.spec.lr_mult)
    assert learned == PARAMETERS[name] - KEPT.get(name, 0)
    assert {blob: net.blobs[blob].shape[1:] for blob in SHAPES[name]} == SHAPES[name]
    losses = {blob for blob, weight in net.blob_loss_weights.items() if weight}
    evaluates = name in SSD and phase == TEST
    assert losses == (set() if evaluates else LOSSES[name])
    assert ("detection_eval" in net.outputs) == evaluates


@pytest.mark.parametrize("name", DETECTORS)
def test_deployed_net_takes_the_trained_weights(name: str) -> None:
    net, trained = built(read(name, "deploy"), TEST), built(made_up(name), TRAIN)
    assert weights(net) == weights(trained)
    kept = {layer.name for layer in read(name, "deploy").layer if layer.type == "BatchNorm"}
    sizes = [prod(s) for layer, shapes in weights(net).items() if layer not in kept for s in shapes]
    assert sum(sizes) == PARAMETERS[name]
    assert {blob: net.blobs[blob].shape for blob in net.outputs} == OUTPUTS[name]


@pytest.mark.parametrize("name", DETECTORS)
def test_every_weight_has_a_filler(name: str) -> None:
    for layer in read(name, "train_val").layer:
        for param in (layer.convolution_param, layer.inner_product_param):
            if param.num_output:
                assert param.weight_filler.type != "constant", layer.name


@pytest.mark.parametrize("name", DETECTORS)
def test_solver_and_net_agree(name: str) -> None:
    param, net = read_solver(str(models.path(name, "solver"))), read(name, "train_val")
    assert (param.net, param.snapshot_prefix) == ("train_val.prototxt", name)
    if name not in SSD:
        assert not param.test_iter
        return
    assert (param.eval_type, param.ap_version) == ("detection", "11point")
    (batch,) = (
        layer.data_param.batch_size
        for layer in net.layer
        if layer.type == "AnnotatedData" and layer.include[0].phase == TEST
    )
    assert param.test_iter[0] * batch == 4952  # VOC 2007's


@pytest.mark.parametrize("name", SSD)
def test_labels_of_the_classes(name: str) -> None:
    (layer,) = (
        layer for layer in read(name, "train_val").layer if layer.multibox_loss_param.num_classes
    )
    text = (Path(str(models.path(name, "solver"))).parent / "labelmap_voc.prototxt").read_text()
    assert text.count("item {") == layer.multibox_loss_param.num_classes == 21


@pytest.mark.parametrize("name", SSD)
def test_made_up_boxes_of_many_images(name: str) -> None:
    param = made_up(name, batch=3)
    param.state.phase = TRAIN
    del param.layer[2:]
    net = Net(param)
    net.forward()
    truths = net.blobs["label"].data
    assert truths.shape == (1, 1, 6, 8)
    image, kind, instance, *corners, difficult = truths[0, 0].T
    np.testing.assert_array_equal(image, [0, 0, 1, 1, 2, 2])
    assert np.all((kind >= 1) & (kind <= 20) & (kind == kind.astype(int)))
    assert not instance.any()
    assert not difficult.any()
    low, high = np.array(corners[:2]), np.array(corners[2:])
    assert np.all((low >= 0) & (high <= 1) & (high - low > 0.099))


def test_made_up_boxes_of_faster_rcnn() -> None:
    param = made_up("faster_rcnn_vgg16", batch=3)
    del param.layer[1:]
    net = Net(param)
    net.forward()
    assert net.blobs["data"].shape == (1, 3, 600, 800)
    np.testing.assert_array_equal(net.blobs["im_info"].data, [[600, 600, 1]])
    boxes = net.blobs["gt_boxes"].data
    assert np.all((boxes[:, :2] >= 0) & (boxes[:, 2:4] <= 599))
    assert np.all(boxes[:, 2:4] - boxes[:, :2] > 59)
    assert np.all((boxes[:, 4] >= 1) & (boxes[:, 4] <= 20))

"""Weights that learned normalized targets, from snapshots of Faster R-CNN and R-FCN into nets that
learn them and nets that do not.
"""

from pathlib import Path

import h5py
import numpy as np
import pytest

import caffepy
from caffepy.commands.weights import convert
from caffepy.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("folder")

MEANS, STDS = (0.01, -0.02, 0.0, 0.3), (0.1, 0.1, 0.2, 0.4)
SETTINGS = f"'bbox_normalize_means': {MEANS}, 'bbox_normalize_stds': {STDS}"

MAP = """
layer { name: "map" type: "Input" top: "map" input_param { shape { dim: 1 dim: 4 dim: 6 dim: 6 } } }
"""
LEARNING = f"""{MAP}
layer {{ name: "in" type: "Input" top: "found" top: "truth"
  input_param {{ shape {{ dim: 5 dim: 5 }} shape {{ dim: 2 dim: 5 }} }} }}
layer {{ name: "roi-data" type: "Python" bottom: "found" bottom: "truth"
  top: "rois" top: "labels" top: "targets" top: "inside" top: "outside"
  python_param {{ module: "rpn.proposal_target_layer" layer: "ProposalTargetLayer"
  param_str: "{{'num_classes': 3, SETTINGS}}" }} }}
"""
DEPLOY = f"""{MAP}
layer {{ name: "in" type: "Input" top: "rois" input_param {{ shape {{ dim: 5 dim: 5 }} }} }}
"""
LOSS = """
layer { name: "loss" type: "SmoothL1Loss" bottom: "boxes" bottom: "targets" bottom: "inside"
  bottom: "outside" top: "loss" loss_weight: 1 }
"""
FASTER = """
layer { name: "pool" type: "ROIPooling" bottom: "map" bottom: "rois" top: "pool"
  roi_pooling_param { pooled_w: 2 pooled_h: 2 } }
layer { name: "bbox_pred" type: "InnerProduct" bottom: "pool" top: "boxes"
  inner_product_param { num_output: 12 weight_filler { type: "gaussian" std: 1 }
  bias_filler { type: "gaussian" std: 1 } } }
"""
RFCN = """
layer { name: "rfcn_bbox" type: "Convolution" bottom: "map" top: "scores" convolution_param {
  num_output: 108 kernel_size: 1 weight_filler { type: "gaussian" std: 1 }
  bias_filler { type: "gaussian" std: 1 } } }
layer { name: "pool" type: "PSROIPooling" bottom: "scores" bottom: "rois" top: "pool"
  psroi_pooling_param { output_dim: 12 group_size: 3 spatial_scale: 1 } }
layer { name: "vote" type: "Pooling" bottom: "pool" top: "boxes"
  pooling_param { pool: AVE kernel_size: 3 stride: 3 } }
"""
NETS = {
    "Faster R-CNN": (FASTER, LOSS, "bbox_pred"),
    "R-FCN, two losses": (RFCN, LOSS + LOSS.replace('"loss"', '"again"'), "rfcn_bbox"),
    "transposed": (FASTER.replace("num_output", "transpose: true num_output"), LOSS, "bbox_pred"),
}


def net_of(text: str, settings: str = SETTINGS) -> caffepy.Net:
    Path("net.prototxt").write_text(text.replace("SETTINGS", settings))
    return caffepy.Net("net.prototxt", caffepy.TRAIN)


def arrays(net: caffepy.Net, name: str) -> list[np.ndarray]:
    return [blob.data.copy() for blob in net.params[name]]


def save(net: caffepy.Net, ending: str) -> str:
    (net.save_hdf5 if ending == "h5" else net.save)(f"w.{ending}")
    return f"w.{ending}"


def unnormalized(case: str, weights: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    """Output by output: three classes of four numbers, in R-FCN nine places of each."""
    weights, bias = weights.copy(), bias.copy()
    places = 9 if case.startswith("R-FCN") else 1
    for o in range(len(bias)):
        number = o // places % 4
        (weights[:, o] if case == "transposed" else weights[o])[...] *= STDS[number]
        bias[o] = bias[o] * STDS[number] + MEANS[number]
    return [weights, bias]


@pytest.mark.parametrize("ending", ["caffemodel", "h5"])
@pytest.mark.parametrize("case", NETS)
def test_a_net_that_does_not_learn_them_predicts_the_targets(case: str, ending: str) -> None:
    layers, losses, name = NETS[case]
    learned = net_of(LEARNING + layers + losses)
    own = arrays(learned, name)
    path = save(learned, ending)
    found = net_of(DEPLOY + layers)
    found.copy_from(path)
    for array, expected in zip(arrays(found, name), unnormalized(case, *own), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-7)
    again = net_of(LEARNING + layers + losses)
    again.copy_from(path)
    for array, expected in zip(arrays(again, name), own, strict=True):
        np.testing.assert_array_equal(array, expected)


SHARES = 'param { name: "weights" } param { name: "NAME" }'
ONE, TWO = (
    FASTER.replace("inner_product_param", f"{SHARES} inner_product_param").replace("NAME", name)
    for name in ("bias", "NAME")
)
TWICE = ONE + TWO[TWO.index('layer { name: "bbox_pred"') :].replace("bbox_pred", "again").replace(
    '"boxes"', '"boxes again"'
)
LOSSES = LOSS + LOSS.replace('"loss"', '"loss again"').replace('"boxes"', '"boxes again"')


@pytest.mark.parametrize("ending", ["caffemodel", "h5"])
@pytest.mark.parametrize("bias", ["bias", "another"], ids=["all", "weights"])
def test_weights_that_layers_share_change_once(bias: str, ending: str) -> None:
    layers = TWICE.replace("NAME", bias)
    learned = net_of(LEARNING + layers + LOSSES)
    names = "bbox_pred", "again"
    expected = [unnormalized("Faster R-CNN", *arrays(learned, name)) for name in names]
    path = save(learned, ending)
    found = net_of(DEPLOY + layers)
    found.copy_from(path)
    other = net_of(LEARNING + layers + LOSSES, "'bbox_normalize_stds': (0.2, 0.2, 0.2, 0.2)")
    other.copy_from(path)
    for name, wanted in zip(names, expected, strict=True):
        for array, plain in zip(arrays(found, name), wanted, strict=True):
            np.testing.assert_allclose(array, plain, rtol=1e-6, atol=1e-7)
        for array, plain in zip(arrays(other, name), wanted, strict=True):
            np.testing.assert_allclose(array, plain / 0.2, rtol=1e-5, atol=1e-6)


def test_other_units_of_a_net_that_learns() -> None:
    learned = net_of(LEARNING + FASTER + LOSS)
    weights, bias = arrays(learned, "bbox_pred")
    other = net_of(LEARNING + FASTER + LOSS, "'bbox_normalize_stds': (0.2, 0.2, 0.2, 0.2)")
    other.copy_from(save(learned, "caffemodel"))
    means, stds = np.tile(MEANS, 3), np.tile(STDS, 3)
    found = arrays(other, "bbox_pred")
    np.testing.assert_allclose(found[0], weights * stds[:, None] / 0.2, rtol=1e-6)
    np.testing.assert_allclose(found[1], (bias * stds + means) / 0.2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", [LEARNING + FASTER + LOSS, DEPLOY + FASTER])
def test_published_weights_stay_as_they_are(text: str) -> None:
    """Files of py-faster-rcnn do not say that their targets were normalized: they are not now."""
    published = net_of(LEARNING + FASTER, "'bbox_normalize_targets_precomputed': True")
    net = net_of(text)
    net.copy_from(save(published, "caffemodel"))
    for one, other in zip(net.params["bbox_pred"], published.params["bbox_pred"], strict=True):
        np.testing.assert_array_equal(one.data, other.data)


def test_a_net_told_not_to_normalize_learns_the_targets() -> None:
    learned = net_of(LEARNING + FASTER + LOSS, "'bbox_normalize_targets_precomputed': False")
    found = net_of(DEPLOY + FASTER)
    found.copy_from(save(learned, "caffemodel"))
    np.testing.assert_array_equal(arrays(found, "bbox_pred")[0], arrays(learned, "bbox_pred")[0])


RPN = f"""{MAP}
layer {{ name: "in" type: "Input" top: "truth" top: "info"
  input_param {{ shape {{ dim: 2 dim: 5 }} shape {{ dim: 1 dim: 3 }} }} }}
layer {{ name: "cls" type: "Convolution" bottom: "map" top: "cls"
  convolution_param {{ num_output: 18 kernel_size: 1 }} }}
layer {{ name: "rpn-data" type: "Python" bottom: "cls" bottom: "truth" bottom: "info"
  top: "labels" top: "targets" top: "inside" top: "outside"
  python_param {{ module: "rpn.anchor_target_layer" layer: "AnchorTargetLayer"
  param_str: "{{'feat_stride': 16, 'rpn_normalize_targets': True}}" }} }}
{LOSS}
"""
DELTAS = """
layer { name: "rpn_bbox_pred" type: "Convolution" bottom: "map" top: "boxes" convolution_param {
  num_output: 36 kernel_size: 1 weight_filler { type: "gaussian" std: 1 } bias_term: BIAS } }
"""


@pytest.mark.parametrize("bias", ["true", "false"])
def test_targets_of_anchors(bias: str) -> None:
    deltas = DELTAS.replace("BIAS", bias)
    learned = net_of(RPN.replace('layer { name: "loss"', deltas + 'layer { name: "loss"'))
    found = net_of(MAP + deltas)
    found.copy_from(save(learned, "caffemodel"))
    stds = np.tile([0.1, 0.1, 0.2, 0.2], 9).reshape(36, 1, 1, 1)
    own = arrays(learned, "rpn_bbox_pred")[0]
    np.testing.assert_allclose(arrays(found, "rpn_bbox_pred")[0], own * stds, rtol=1e-6)


def test_a_mean_needs_a_bias() -> None:
    bare = FASTER.replace("num_output", "bias_term: false num_output")
    path = save(net_of(LEARNING + bare + LOSS), "caffemodel")
    with pytest.raises(ConfigError, match="layer bbox_pred learned targets less a mean"):
        net_of(DEPLOY + bare).copy_from(path)


def test_units_that_do_not_fit() -> None:
    path = save(net_of(LEARNING + FASTER + LOSS), "h5")
    with h5py.File(path, "a") as file:
        file["data/bbox_pred"].attrs["target_std"] = [0.1]
    with pytest.raises(ConfigError, match="its target_units, of 1 outputs, do not fit"):
        net_of(DEPLOY + FASTER).copy_from(path)


@pytest.mark.parametrize("fork", ["faster-rcnn", "caffe"])
def test_a_file_for_a_fork_predicts_the_targets(fork: str) -> None:
    learned = net_of(LEARNING + FASTER + LOSS)
    expected = unnormalized("Faster R-CNN", *arrays(learned, "bbox_pred"))
    convert(save(learned, "caffemodel"), "for_fork.caffemodel", fork)
    again = net_of(LEARNING + FASTER + LOSS)
    again.copy_from("for_fork.caffemodel")
    for array, wanted in zip(arrays(again, "bbox_pred"), expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-7)


def test_tensors_predict_the_targets() -> None:
    pytest.importorskip("safetensors")
    learned = net_of(LEARNING + FASTER + LOSS)
    expected = unnormalized("Faster R-CNN", *arrays(learned, "bbox_pred"))
    convert(save(learned, "caffemodel"), "w.safetensors")
    convert("w.safetensors", "back.caffemodel")
    found = net_of(DEPLOY + FASTER)
    found.copy_from("back.caffemodel")
    for array, wanted in zip(arrays(found, "bbox_pred"), expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-7)


def test_hdf5_keeps_the_units() -> None:
    learned = net_of(LEARNING + FASTER + LOSS)
    own = arrays(learned, "bbox_pred")
    save(learned, "caffemodel")
    convert("w.caffemodel", "to.h5")
    convert("to.h5", "back.caffemodel")
    for path in ("to.h5", "back.caffemodel"):
        again = net_of(LEARNING + FASTER + LOSS)
        again.copy_from(path)
        np.testing.assert_array_equal(arrays(again, "bbox_pred")[0], own[0])
        found = net_of(DEPLOY + FASTER)
        found.copy_from(path)
        wanted = unnormalized("Faster R-CNN", *own)
        np.testing.assert_allclose(arrays(found, "bbox_pred")[0], wanted[0], rtol=1e-6)


SOLVER = """net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 10 random_seed: 1
test_iter: 1 test_interval: 1 display: 0 snapshot_after_train: false """


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared by a script"])
def test_a_test_net_of_a_solver_predicts_the_targets(shares: bool, gpu: bool) -> None:
    ahead = LEARNING.replace(MAP, "") + LOSS
    parts = [(ahead.split("layer {"), "TRAIN"), (DEPLOY.replace(MAP, "").split("layer {"), "TEST")]
    train, test = (
        f"layer {{ include {{ phase: {phase} }}".join(part).replace("\n", " ")
        for part, phase in parts
    )
    train, loss = train.rsplit("layer {", 1)
    text = f"{MAP}{train}\n{test}\n{FASTER}\nlayer {{ {loss}".replace("SETTINGS", SETTINGS)
    Path("net.prototxt").write_text(text)
    Path("solver.prototxt").write_text(SOLVER)
    (caffepy.set_mode_gpu if gpu else caffepy.set_mode_cpu)()
    try:
        solver = caffepy.SGDSolver("solver.prototxt")
    finally:
        caffepy.set_mode_cpu()
    learned, tested = solver.net, solver.test_nets[0]
    if shares:
        tested.share_with(learned)
    rng = np.random.default_rng(0)
    for name in ("map", "found", "truth"):
        learned.blobs[name].data[...] = rng.uniform(0, 1, learned.blobs[name].data.shape)
    learned.blobs["found"].data[:] = [[0, 0, 0, 3, 3]] * 5
    learned.blobs["truth"].data[:] = [[0, 0, 3, 4, 1], [0, 0, 3, 2, 2]]
    for _ in range(2):
        before = arrays(learned, "bbox_pred")
        solver.step(1)
        for array, wanted in zip(
            arrays(tested, "bbox_pred"), unnormalized("Faster R-CNN", *before), strict=True
        ):
            np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-7)
    assert any(
        (new != old).any() for new, old in zip(arrays(learned, "bbox_pred"), before, strict=True)
    )

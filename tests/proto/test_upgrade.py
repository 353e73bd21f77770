import logging
from pathlib import Path

import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto import text, upgrade
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter, V1LayerParameter


def net(source: str) -> NetParameter:
    return text.parse(source, NetParameter())


V0 = """
name: "old" input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8 debug_info: true
layers { layer { name: "d" type: "data" source: "db" batchsize: 4 scale: 0.5 meanfile: "m" cropsize: 6 mirror: true
  rand_skip: 3 } top: "x" top: "label" }
layers { layer { name: "p" type: "padding" pad: 2 } bottom: "x" top: "padded" }
layers { layer { name: "c" type: "conv" num_output: 5 kernelsize: 3 stride: 2 group: 1 biasterm: false
  weight_filler { type: "xavier" } blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 } bottom: "padded" top: "c" }
layers { layer { name: "m" type: "pool" pool: AVE kernelsize: 3 stride: 2 } bottom: "c" top: "m" }
layers { layer { name: "n" type: "lrn" local_size: 3 alpha: 2 beta: 0.5 k: 2 } bottom: "m" top: "n" }
layers { layer { name: "dr" type: "dropout" dropout_ratio: 0.3 } bottom: "n" top: "n" }
layers { layer { name: "i" type: "innerproduct" num_output: 2 } bottom: "n" top: "i" }
layers { layer { name: "l" type: "softmax_loss" } bottom: "i" bottom: "label" }
"""
V0_NEW = """
name: "old"
layer { name: "input" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "d" type: "Data" top: "x" top: "label" data_param { source: "db" batch_size: 4 rand_skip: 3 }
  transform_param { scale: 0.5 mean_file: "m" crop_size: 6 mirror: true } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c" param { lr_mult: 1 decay_mult: 1 }
  param { lr_mult: 2 decay_mult: 0 } convolution_param { num_output: 5 kernel_size: 3 stride: 2 pad: 2 group: 1
  bias_term: false weight_filler { type: "xavier" } } }
layer { name: "m" type: "Pooling" bottom: "c" top: "m" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "n" type: "LRN" bottom: "m" top: "n" lrn_param { local_size: 3 alpha: 2 beta: 0.5 k: 2 } }
layer { name: "dr" type: "Dropout" bottom: "n" top: "n" dropout_param { dropout_ratio: 0.3 } }
layer { name: "i" type: "InnerProduct" bottom: "n" top: "i" inner_product_param { num_output: 2 } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" }
"""
V1 = """
name: "old" force_backward: true state { phase: TRAIN }
layers { name: "d" type: DATA top: "x" data_param { source: "db" scale: 0.5 mean_file: "m" crop_size: 6 mirror: true }
  include { phase: TRAIN } }
layers { name: "c" type: CONVOLUTION bottom: "x" top: "c" param: "w" param: "b" blob_share_mode: PERMISSIVE
  blobs_lr: 1 blobs_lr: 2 weight_decay: 3 loss_weight: 0.25 convolution_param { num_output: 5 kernel_size: 3 }
  blobs { num: 1 channels: 1 height: 1 width: 2 data: [1, 2] } exclude { stage: "s" } }
layers { name: "t" type: TANH bottom: "c" top: "c" }
"""
V1_NEW = """
name: "old" force_backward: true state { phase: TRAIN }
layer { name: "d" type: "Data" top: "x" data_param { source: "db" } include { phase: TRAIN }
  transform_param { scale: 0.5 mean_file: "m" crop_size: 6 mirror: true } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c" loss_weight: 0.25
  param { name: "w" share_mode: PERMISSIVE lr_mult: 1 decay_mult: 3 } param { name: "b" lr_mult: 2 }
  blobs { num: 1 channels: 1 height: 1 width: 2 data: [1, 2] } exclude { stage: "s" }
  convolution_param { num_output: 5 kernel_size: 3 } }
layer { name: "t" type: "TanH" bottom: "c" top: "c" }
"""
INPUT = 'input: "a" input: "b" input_shape { dim: 2 } input_shape { dim: 3 dim: 4 } layer { name: "s" type: "Silence" }'
INPUT_NEW = """
layer { name: "input" type: "Input" top: "a" top: "b" input_param { shape { dim: 2 } shape { dim: 3 dim: 4 } } }
layer { name: "s" type: "Silence" }
"""
BATCH_NORM = 'layer { type: "BatchNorm" param { lr_mult: 1 } param { } param { name: "c" } }'
BATCH_NORM_NEW = """layer { type: "BatchNorm" param { lr_mult: 0 decay_mult: 0 } param { lr_mult: 0 decay_mult: 0 }
  param { name: "c" lr_mult: 0 decay_mult: 0 } }"""
C3D = """
layers { name: "d" type: VIDEO_DATA top: "x" top: "y" image_data_param { source: "l" use_image: true mean_file: "m"
  batch_size: 3 crop_size: 112 mirror: true show_data: 2 new_height: 128 new_length: 16 mean_value: 5 } }
layers { name: "c" type: CONVOLUTION3D bottom: "x" top: "c" blobs_lr: 1 convolution_param { num_output: 4 kernel_size: 3
  kernel_depth: 2 pad: 1 temporal_pad: 1 stride: 2 weight_filler { type: "xavier" } } }
layers { name: "p" type: POOLING3D bottom: "c" top: "p" pooling_param { pool: AVE kernel_size: 2 kernel_depth: 1 } }
layers { name: "u" type: DECONVOLUTION3D bottom: "p" top: "u" convolution_param { temporal_stride: 2 } }
layers { name: "l" type: VOXEL_SOFTMAX_LOSS bottom: "u" bottom: "t" }
layers { name: "s" type: VOXEL_SOFTMAX bottom: "u" top: "s" }
"""
C3D_NEW = """
layer { name: "d" type: "VideoData" top: "x" top: "y" video_data_param { source: "l" use_image: true batch_size: 3
  new_height: 128 new_length: 16 show_data: true }
  transform_param { mean_file: "m" crop_size: 112 mirror: true mean_value: 5 } }
layer { name: "c" type: "Convolution3D" bottom: "x" top: "c" param { lr_mult: 1 } convolution3d_param { num_output: 4
  kernel_size: 3 kernel_depth: 2 pad: 1 temporal_pad: 1 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "p" type: "Pooling3D" bottom: "c" top: "p"
  pooling3d_param { pool: AVE kernel_size: 2 kernel_depth: 1 } }
layer { name: "u" type: "Deconvolution3D" bottom: "p" top: "u" convolution3d_param { temporal_stride: 2 } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "u" bottom: "t" loss_param { normalization: FULL } }
layer { name: "s" type: "Softmax" bottom: "u" top: "s" }
"""
CASES = {
    "V0": (V0, V0_NEW),
    "V1": (V1, V1_NEW),
    "input_shape": (INPUT, INPUT_NEW),
    "input_shape wins over input_dim": ("input_dim: 7 " + INPUT, INPUT_NEW),
    "names of inputs only": ('input: "a" layer { name: "s" }', 'layer { name: "s" }'),
    "BatchNorm": (BATCH_NORM, BATCH_NORM_NEW),
    "BatchNorm with two params": ('layer { type: "BatchNorm" param { } param { } }',) * 2,
    "C3D 1.0": (C3D, C3D_NEW),
    "the first DeepLab's CRF": (
        'layers { name: "c" type: DENSE_CRF dense_crf_param { pos_w: 3 } } '
        'layers { name: "m" type: MAT_WRITE mat_write_param { prefix: "out/" } }',
        'layer { name: "c" type: "DenseCRF" dense_crf_param { pos_w: 3 } } '
        'layer { name: "m" type: "MatWrite" mat_write_param { prefix: "out/" } }',
    ),
    "ReLU with relu6": (
        'layer { name: "r" type: "ReLU" relu_param { relu6: true negative_slope: 0.5 } }',
        'layer { name: "r" type: "ReLU6" relu6_param { negative_slope: 0.5 } }',
    ),
    "holes": (
        'layer { type: "Convolution" convolution_param { hole: 2 } } '
        'layer { type: "Convolution" convolution_param { hole_h: 2 hole_w: 3 } }',
        'layer { type: "Convolution" convolution_param { dilation: 2 } } '
        'layer { type: "Convolution" convolution_param { dilation: [2, 3] } }',
    ),
    "SegStereo's HoleConvolution": (
        'layer { type: "HoleConvolution" convolution_param { hole: 2 } }',
        'layer { type: "Convolution" convolution_param { dilation: 2 } }',
    ),
    "video-caffe's NdConvolution": (
        'layer { type: "NdConvolution" convolution_param { kernel_shape { dim: [3, 2, 1] } '
        "pad_shape { dim: [1, 1, 0] } } }",
        'layer { type: "Convolution" convolution_param { kernel_size: [3, 2, 1] pad: [1, 1, 0] } }',
    ),
    "video-caffe's NdPooling": (
        'layer { type: "NdPooling" pooling_param { pool: AVE kernel_shape { dim: [1, 2, 2] } '
        "stride_shape { dim: [1, 2, 3] } } } "
        'layer { type: "NdPooling" pooling_param { kernel_shape { dim: [2, 3] } } }',
        'layer { type: "Pooling3D" pooling3d_param { pool: AVE kernel_l: 1 kernel_h: 2 '
        "kernel_w: 2 stride_l: 1 stride_h: 2 stride_w: 3 global_pooling: false } } "
        'layer { type: "Pooling" pooling_param { kernel_h: 2 kernel_w: 3 } }',
    ),
    "SumPooling": (
        'layer { type: "SumPooling" sum_pooling_param { pool: SUM kernel_h: 2 kernel_w: 3 } }',
        'layer { type: "Pooling" pooling_param { pool: SUM kernel_h: 2 kernel_w: 3 } }',
    ),
    "DeepLab's loss": (
        'layers { name: "l" type: SOFTMAX_LOSS softmaxloss_param { ignore_label: 255 } } ',
        'layer { name: "l" type: "SoftmaxWithLoss" loss_param { ignore_label: 255 } }',
    ),
    "DeepLab's accuracy": (
        'layers { name: "a" type: SEG_ACCURACY seg_accuracy_param { ignore_label: 255 } }',
        'layer { name: "a" type: "SegAccuracy" seg_accuracy_param { ignore_label: 255 } }',
    ),
    "DeepLab's loss in a new layer": (
        'layer { type: "SoftmaxWithLoss" softmaxloss_param { } } ',
        'layer { type: "SoftmaxWithLoss" }',
    ),
    "R-C3D's Pooling": (
        'layer { type: "Pooling" pooling_param { kernel_size: 1 further_kernel_size: [2, 3] '
        "stride: 2 further_pad: [1, 0] pad: 0 } } "
        'layer { type: "Pooling" pooling_param { kernel_size: 3 further_kernel_size: 2 } }',
        'layer { type: "Pooling3D" pooling3d_param { pool: MAX kernel_l: 1 kernel_h: 2 kernel_w: 3 '
        "stride_l: 2 stride_h: 2 stride_w: 2 pad_l: 0 pad_h: 1 pad_w: 0 global_pooling: false } } "
        'layer { type: "Pooling" pooling_param { kernel_h: 3 kernel_w: 2 } }',
    ),
    "Reshape with pixelshuffler": (
        'layer { name: "r" type: "Reshape" reshape_param { pixelshuffler: 2 } }',
        'layer { name: "r" type: "DepthToSpace" '
        'depth_to_space_param { block_size: 2 data_format: "CRD" } }',
    ),
    "data_param of a new layer stays": ('layer { type: "Data" data_param { scale: 2 } }',) * 2,
}


@pytest.mark.parametrize(("old", "new"), CASES.values(), ids=CASES)
def test_upgraded_net(old: str, new: str) -> None:
    before = net(old)
    kept = net(old)
    assert upgrade.upgrade_net(before, "old.prototxt") == net(new)
    assert before == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("pool: STOCHASTIC kernel_shape { dim: [1, 1, 1] }", "volumes take MAX and AVE alone"),
        ("kernel_shape { dim: [1, 1] } pad_shape { dim: 1 }", "pad_shape needs 2 dims, not 1"),
    ],
)
def test_pooling_that_has_no_other_name(settings: str, message: str) -> None:
    old = net(f'layer {{ name: "p" type: "NdPooling" pooling_param {{ {settings} }} }}')
    with pytest.raises(ConfigError, match=message):
        upgrade.upgrade_net(old, "net.prototxt")


def test_a_loss_that_ignores_several_labels_is_refused() -> None:
    old = net('layers { name: "l" type: SOFTMAX_LOSS softmaxloss_param { ignore_label: [1, 2] } }')
    with pytest.raises(ConfigError, match=r'"l" \(SoftmaxWithLoss\): .* has 2 ignore_label'):
        upgrade.upgrade_net(old, "net.prototxt")


def test_new_net_is_returned_as_it_is() -> None:
    new = net(V1_NEW)
    assert upgrade.upgrade_net(new, "new.prototxt") is new


def test_upgrade_is_done_once() -> None:
    once = upgrade.upgrade_net(net(V0), "old.prototxt")
    assert not upgrade.needs_upgrade(once)


def test_every_v1_type_has_a_name() -> None:
    assert set(upgrade.V1_TYPES) == set(V1LayerParameter.LayerType.keys())
    assert set(upgrade.V0_TYPES.values()) <= set(upgrade.V1_TYPES)


def test_every_v0_field_has_a_home() -> None:
    for field, (renamed, homes) in upgrade._V0_FIELDS.items():
        for kind, home in homes.items():
            old = net(f'layers {{ layer {{ type: "{kind}" }} }}')
            value = getattr(old.layers[0].layer, field)
            if isinstance(value, (bool, int, float, str)):
                setattr(old.layers[0].layer, field, value)
            else:
                getattr(old.layers[0].layer, field).type = "gaussian"
            new = getattr(upgrade.upgrade_net(old, "old").layer[0], home)
            assert [f.name for f, _ in new.ListFields()] == [renamed]


@pytest.mark.parametrize(("kind", "files"), [("hdf5_output", ["out.h5"]), ("relu", [])])
def test_v0_output_file_goes_to_its_layer_only(
    kind: str, files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    v0 = f'layers {{ layer {{ type: "{kind}" hdf5_output_param {{ file_name: "out.h5" }} }} bottom: "a" }}'
    (layer,) = upgrade.upgrade_net(net('input: "a" ' + v0), "old").layer
    assert [
        value.file_name for field, value in layer.ListFields() if field.name == "hdf5_output_param"
    ] == files
    assert ("Unknown parameter hdf5_output_param for layer type relu" in caplog.messages) == (
        not files
    )


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        upgrade.upgrade_net(
            net(V0.replace("blobs_lr: 1", "dropout_ratio: 1 blobs_lr: 1")), "old.prototxt"
        )
    assert caplog.messages == [
        "Attempting to upgrade input file specified using deprecated V0LayerParameter: old.prototxt",
        "Unknown parameter dropout_ratio for layer type conv",
        "Warning: had one or more problems upgrading V0NetParameter to NetParameter (see above); continuing anyway.",
        "Note that future Caffe releases will not support V0NetParameter; use ./build/tools/upgrade_net_proto_text for "
        "prototxt and ./build/tools/upgrade_net_proto_binary for model weights upgrade this and any other net protos "
        "to the new format.",
        "Attempting to upgrade input file specified using deprecated V1LayerParameter: old.prototxt",
        "Successfully upgraded file specified using deprecated V1LayerParameter",
        "Attempting to upgrade input file specified using deprecated input fields: old.prototxt",
        "Successfully upgraded file specified using deprecated input fields.",
        "Note that future Caffe releases will only support input layers and not input fields.",
    ]


OLD = {
    "transform_param": V1,
    "input": 'input: "a" input_dim: 1 input_dim: 1 input_dim: 1 input_dim: 1',
    "V0NetParameter": V0,
}


@pytest.mark.parametrize("what", OLD)
def test_notes_are_warnings_as_in_caffe(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        upgrade.upgrade_net(net(OLD[what]), "old.prototxt")
    notes = [r for r in caplog.records if r.message.startswith("Note that future Caffe releases")]
    assert any(what in record.message for record in notes)
    assert all(record.levelno == logging.WARNING for record in notes)


ERRORS = {
    "unknown V0 type": (
        'layers { layer { name: "x" type: "pol" } }',
        'layer "x": unknown V0 layer type "pol", did you mean "pool"?',
    ),
    "padding before something else": (
        'input: "d" layers { layer { name: "p" type: "padding" } bottom: "d" top: "e" } '
        'layers { layer { name: "r" type: "relu" } bottom: "e" }',
        'padding layer "p" leads to layer "r" (relu), but only conv and pool can pad',
    ),
    "padding of two blobs": (
        'input: "d" layers { layer { name: "p" type: "padding" } bottom: "d" bottom: "d" top: "e" } '
        'layers { layer { name: "c" type: "conv" } bottom: "e" }',
        'padding layer "p" and layer "c" behind it must have one bottom each',
    ),
    "V0 bottom that nobody makes": (
        'layers { layer { name: "c" type: "conv" } bottom: "e" }',
        'unknown bottom blob "e" of layer "c"',
    ),
    "layers and layer": (
        'layers { name: "a" } layer { name: "b" }',
        'the net has both old "layers" and new "layer" entries; use "layer" for all of them',
    ),
    "two paddings of volumes": (
        'layers { name: "c" type: CONVOLUTION3D convolution_param { pad: 1 pad: 2 } }',
        'layer "c" (Convolution3D): C3D has no convolution_param with this pad',
    ),
    "too few input_dim": ('input: "a" input_dim: 1', "1 inputs need 4 input_dim entries, not 1"),
    "too few input_shape": (
        'input: "a" input: "b" input_shape { }',
        "2 inputs need as many input_shape entries, not 1",
    ),
}


@pytest.mark.parametrize(("source", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(source: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        upgrade.upgrade_net(net(source), "old.prototxt")
    assert str(caught.value) == f"old.prototxt: {message}"


def solver(source: str) -> SolverParameter:
    return text.parse(source, SolverParameter())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SGD", "SGD"),
        ("NESTEROV", "Nesterov"),
        ("ADAGRAD", "AdaGrad"),
        ("RMSPROP", "RMSProp"),
        ("ADAM", "Adam"),
    ],
)
def test_solver_type(old: str, new: str) -> None:
    upgraded = upgrade.upgrade_solver(
        solver(f'solver_type: {old} snapshot_prefix: "p"'), "s.prototxt"
    )
    assert upgraded == solver(f'type: "{new}" snapshot_prefix: "p"')


def test_solver_types_are_all_known() -> None:
    assert set(upgrade._SOLVER_TYPES) == set(SolverParameter.SolverType.keys())


def test_both_solver_types() -> None:
    with pytest.raises(ConfigError, match='give either "type" or the old "solver_type", not both'):
        upgrade.upgrade_solver(solver('type: "SGD" solver_type: SGD'), "s.prototxt")


def test_nets_inside_a_solver() -> None:
    old, new = (
        'input: "a" input_dim: [1, 1, 1, 1]',
        upgrade.upgrade_net(net('input: "a" input_dim: [1, 1, 1, 1]'), "s"),
    )
    source = f"net_param {{ {old} }} train_net_param {{ {old} }} test_net_param {{ {old} }} test_net_param {{ }}"
    upgraded = upgrade.upgrade_solver(solver(source), "s.prototxt")
    assert upgraded.net_param == upgraded.train_net_param == upgraded.test_net_param[0] == new
    assert upgraded.test_net_param[1] == NetParameter()


def test_snapshot_prefix(tmp_path: Path) -> None:
    assert (
        upgrade.upgrade_solver(solver(""), "a.b/my.solver.prototxt").snapshot_prefix
        == "a.b/my.solver"
    )
    assert (
        upgrade.upgrade_solver(solver('snapshot_prefix: "x"'), "s.prototxt").snapshot_prefix == "x"
    )
    folder = solver(f'snapshot_prefix: "{tmp_path}"')
    assert upgrade.upgrade_solver(folder, "a/s.prototxt").snapshot_prefix == str(tmp_path / "s")


def test_a_solver_file_whose_name_is_not_utf8_needs_a_prefix() -> None:
    path = "caf\udce9.prototxt"
    with pytest.raises(ConfigError, match="set one"):
        upgrade.upgrade_solver(SolverParameter(), path)
    assert upgrade.upgrade_solver(SolverParameter(snapshot_prefix="s"), path).snapshot_prefix == "s"

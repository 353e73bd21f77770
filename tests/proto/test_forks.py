import logging

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.device.device import Device
from caffepy.layer import create_layer, registry
from caffepy.layer.filler import fill
from caffepy.proto import caffe_pb2, forks, text

MESSAGES = caffe_pb2.DESCRIPTOR.message_types_by_name


def test_fields_that_are_refused_or_ignored_belong_to_a_message() -> None:
    for fork, messages in forks._FIELDS.items():
        for message, names in messages.items():
            assert message in MESSAGES, fork
            for name in names.split():
                assert not forks.is_ignored(message, name)
    for message, names in forks._IGNORED.items():
        assert set(names.split()) <= set(MESSAGES[message].fields_by_name), message


def test_names_are_given_once() -> None:
    tables = [names for messages in forks._FIELDS.values() for names in messages.values()]
    for names in [*tables, *forks._LAYERS.values(), *forks._IGNORED.values()]:
        assert len(names.split()) == len(set(names.split()))


def test_no_layer_of_a_fork_is_listed_that_caffepy_has() -> None:
    for fork, names in forks._LAYERS.items():
        assert set(names.split()) & set(registry) == set(), fork


def test_look_ups() -> None:
    assert forks.fork_of_field("SolverParameter", "disabled_update") == "Intel Caffe"
    assert forks.fork_of_field("SolverParameter", "bn_param") is None
    assert forks.fork_of_value("SORT") == "happynear"
    assert forks.fork_of_value("CUDNN") is None
    assert forks.fork_of_layer("BiasChannel") == "PSPNet"
    assert forks.fork_of_layer("Convolution") is None
    assert forks.fork_of_filler("gabor") == "Intel Caffe"
    assert forks.fork_of_filler("xavier") is None


REFUSALS = {
    'layer { type: "DeformablePSROIPooling" }': "Deformable ConvNets",
    'layer { type: "Tiling" tiling_param { } }': "VPGNet",
    'layer { type: "GatedMaxAve" gated_param { } }': "ducha-aiki's",
    'layer { type: "KernelLoss" kernel_loss_param { } }': "AdvKin",
    'layer { type: "Transpose" transpose_param { transposetype: LSTMINPUT } }': "Charleen777",
    "layers { type: SELECT_SEG_BINARY }": "DecoupledNet",
    'layer { type: "FlowWarping" }': "caffe_video_segmentation",
    'layer { type: "BoxFeatures" box_term_param { } }': "caffe-tvg",
    'layer { name: "d" type: "Im2dist" im2dist_param { } }': "this layer type is one of SegAware",
    'layer { type: "SoftmaxWithLoss" softmaxloss_param { weight_source: "w" } }': "DeepLab",
    'layer { type: "ConvLSTM" }': "DAVSOD or convLSTM_WTA",
    'layer { type: "Convolution" convolution_param { constrain: 1 } }': "it is a field of CWIC",
    'layer { type: "MultiBoxLoss" multibox_loss_param { conf_loss_type: FocalLoss } }': (
        "SSD_windows_caffe"
    ),
}


@pytest.mark.parametrize("layer", REFUSALS)
def test_refusals_name_the_fork(layer: str) -> None:
    def build() -> None:
        net = text.parse("\n" + layer, caffe_pb2.NetParameter(), "n.prototxt")
        create_layer(net.layer[0], caffe_pb2.TRAIN, Device())

    with pytest.raises(ConfigError) as error:
        build()
    assert REFUSALS[layer] in str(error.value)
    assert "caffepy does not have" in str(error.value)


def test_fillers_of_forks_are_told() -> None:
    with pytest.raises(ConfigError, match='"gabor" is one of Intel Caffe'):
        fill(np.zeros(3), caffe_pb2.FillerParameter(type="gabor"), np.random.default_rng(0))


def test_fields_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = 'layer { engine: "MKLDNN" quantization_param { } relu_param { fuse: true } }'
    with caplog.at_level(logging.INFO):
        net = text.parse(layer * 2, caffe_pb2.NetParameter(), "n.prototxt")
    assert len(net.layer) == 2
    assert caplog.messages == [
        "n.prototxt: engine, quantization_param, fuse: of a fork of Caffe, without effect"
    ]


def test_what_saves_memory_in_forks_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    text_ = 'mem_param { optimize_test: true exclude_blob: "rois" exclude_blob: "feat" }'
    with caplog.at_level(logging.INFO):
        text.parse(text_, caffe_pb2.NetParameter(), "n.prototxt")
    assert caplog.messages == ["n.prototxt: mem_param: of a fork of Caffe, without effect"]


def test_fields_that_a_fork_has_several_times() -> None:
    resize = "resize_param { width: 3 } resize_param { width: 4 } resize_param { width: 5 }"
    transform = text.parse(resize, caffe_pb2.TransformationParameter())
    assert transform.resize_param.width == 3
    assert [resize.width for resize in transform.further_resize_param] == [4, 5]
    for ids in ("device_id: [2, 0, 1]", "device_id: 2 device_id: 0 device_id: 1"):
        solver = text.parse(ids, caffe_pb2.SolverParameter())
        assert (solver.device_id, solver.further_device_id) == (2, [0, 1])
    sizes = "kernel_size: 1 kernel_size: 2 kernel_size: 3"
    pooling = text.parse(sizes, caffe_pb2.PoolingParameter())
    assert (pooling.kernel_size, pooling.further_kernel_size) == (1, [2, 3])
    assert not text.parse("device_id: []", caffe_pb2.SolverParameter()).HasField("device_id")


def test_settings_of_data_are_refused_when_their_layer_is_made() -> None:
    transform = "transform_param { random_resize_param { min_size: 3 } }"
    param = text.parse(f'type: "Data" {transform}', caffe_pb2.LayerParameter())
    with pytest.raises(ConfigError, match=r"transform_param random_resize_param .* Intel Caffe"):
        create_layer(param, caffe_pb2.TRAIN, Device())

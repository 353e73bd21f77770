from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy import params as P  # noqa: N812
from caffepy.proto import caffe_pb2
from caffepy.pycaffe.net_spec import Function, Top, assign_proto, param_name_dict


def two_layers() -> "caffe.NetSpec":
    n = caffe.NetSpec()
    n.data, n.label = L.DummyData(shape=[{"dim": [2, 3]}, {"dim": [2]}], ntop=2)
    n.ip = L.InnerProduct(
        n.data, num_output=4, weight_filler={"type": "xavier"}, param={"lr_mult": 2}
    )
    n.relu = L.ReLU(n.ip, in_place=True)
    n["loss/all"] = L.SoftmaxWithLoss(
        n.relu, n.label, loss_weight=0.5, loss_param={"ignore_label": 3}
    )
    return n


def test_a_net_of_named_layers() -> None:
    net = two_layers().to_proto()
    assert [layer.name for layer in net.layer] == ["data", "ip", "relu", "loss/all"]
    assert [layer.type for layer in net.layer] == [
        "DummyData",
        "InnerProduct",
        "ReLU",
        "SoftmaxWithLoss",
    ]
    assert [list(layer.top) for layer in net.layer] == [
        ["data", "label"],
        ["ip"],
        ["ip"],
        ["loss/all"],
    ]
    assert [list(layer.bottom) for layer in net.layer] == [[], ["data"], ["ip"], ["ip", "label"]]
    assert [list(shape.dim) for shape in net.layer[0].dummy_data_param.shape] == [[2, 3], [2]]
    assert net.layer[1].inner_product_param.num_output == 4
    assert net.layer[1].inner_product_param.weight_filler.type == "xavier"
    assert [spec.lr_mult for spec in net.layer[1].param] == [2]
    assert list(net.layer[3].loss_weight) == [0.5]
    assert net.layer[3].loss_param.ignore_label == 3


def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(str(two_layers().to_proto()))
    net = caffe.Net(str(file), caffe.TRAIN)
    assert net.blobs["ip"].data.shape == (2, 4)
    assert list(net.forward()) == ["loss/all"]


def test_names_that_nobody_gave_are_types_and_numbers() -> None:
    data = L.Input(input_param={"shape": {"dim": [1, 3, 8, 8]}})
    one, two = (L.Convolution(data, num_output=2, kernel_size=3) for _ in range(2))
    net = caffe.to_proto(L.Eltwise(one, two), L.Silence(one, ntop=0))
    assert [layer.name for layer in net.layer] == [
        "Input1",
        "Convolution1",
        "Convolution2",
        "Eltwise1",
        "Silence1",
    ]
    assert list(net.layer[3].bottom) == ["Convolution1", "Convolution2"]
    assert [layer.name for layer in one.to_proto().layer] == ["Input1", "Convolution1"]


def test_scripts_collect_layers_themselves() -> None:
    n = two_layers()
    layers: dict[Function, caffe_pb2.LayerParameter] = {}
    names, counts = {n.ip: "mine"}, Counter[str]()
    for top in (n.relu, n.ip):
        top._to_proto(layers, names, counts)
    assert [layer.name for layer in layers.values()] == ["DummyData1", "mine", "ReLU1"]
    assert layers[n.ip.fn].bottom == ["DummyData1"]
    assert counts == {"DummyData": 2, "ReLU": 1}


def test_a_layer_without_tops_is_part_of_the_net() -> None:
    n = caffe.NetSpec()
    n.data = L.DummyData(shape={"dim": 3})
    n.quiet = L.Silence(n.data, ntop=0)
    layer = n.to_proto().layer[1]
    assert (layer.name, layer.type, list(layer.top)) == ("quiet", "Silence", [])


def test_layers_come_after_what_they_need() -> None:
    n = caffe.NetSpec()
    data = L.DummyData(shape={"dim": [1, 2]})
    n.last = L.ReLU(L.Power(data, power=2))
    n.first = data
    net = n.to_proto()
    assert [layer.name for layer in net.layer] == ["first", "Power1", "last"]


def test_nets_may_be_deep() -> None:
    top = L.DummyData(shape={"dim": [1, 2]})
    for _ in range(3000):
        top = L.ReLU(top)
    assert len(top.to_proto().layer) == 3001


def test_parameters_go_to_caffes_field_where_forks_have_more_of_its_message() -> None:
    data = L.DummyData(shape={"dim": [1, 2, 4, 4]})
    relu = L.ReLU(data, negative_slope=0.5).to_proto().layer[1]
    assert relu.relu_param.negative_slope == 0.5
    assert not relu.HasField("relu6_param")
    pooling = L.Pooling(data, kernel_size=2).to_proto().layer[1]
    assert pooling.pooling_param.kernel_size == 2
    assert not pooling.HasField("sum_pooling_param")
    assert L.Normalize(data, eps=0.5).to_proto().layer[1].norm_param.eps == 0.5


def test_parameters_go_where_they_belong() -> None:
    n = caffe.NetSpec()
    n.x = L.Input(shape={"dim": [1, 3, 8, 8]})
    n.c = L.Convolution(
        n.x,
        name="other",
        kernel_size=3,
        pad=(1, 2),
        stride=np.array([1, 2]),
        num_output=2,
        include=[{"phase": caffe.TEST}, {"stage": ["a", "b"]}],
        propagate_down=False,
        engine=P.Convolution.CAFFE,
    )
    n.d = L.Deconvolution(n.c, convolution_param={"num_output": 2, "kernel_size": 2})
    n.p = L.Python(n.d, module="m", layer="l", python_param={"param_str": "x"})
    n.f = L.Pooling(
        n.p, pool=P.Pooling.AVE, pooling_param=caffe_pb2.PoolingParameter(kernel_size=2)
    )
    x, c, d, p, f = n.to_proto().layer
    assert list(x.input_param.shape[0].dim) == [1, 3, 8, 8]
    assert c.name == "other"
    conv = c.convolution_param
    assert (list(conv.kernel_size), list(conv.pad), list(conv.stride)) == ([3], [1, 2], [1, 2])
    assert conv.engine == caffe_pb2.ConvolutionParameter.CAFFE
    assert c.include[0].phase == caffe.TEST
    assert list(c.include[1].stage) == ["a", "b"]
    assert list(c.propagate_down) == [False]
    assert list(d.convolution_param.kernel_size) == [2]
    assert (p.python_param.module, p.python_param.layer, p.python_param.param_str) == (
        "m",
        "l",
        "x",
    )
    assert f.pooling_param.kernel_size == 2


def test_empty_messages_are_set() -> None:
    assert L.ReLU(L.Input(), relu_param={}).to_proto().layer[1].HasField("relu_param")


def test_spelling_mistakes_are_named() -> None:
    n = caffe.NetSpec()
    n.data = L.DummyData(shape={"dim": 3})
    wrong = {
        'Convolution has no parameter "kernel_sise", did you mean "kernel_size"': {
            "kernel_sise": 3
        },
        'Convolution has no parameter "inner_param"': {"inner_param": {}},
        'FillerParameter has no field "typ", did you mean "type"': {
            "weight_filler": {"typ": "xavier"}
        },
    }
    for message, params in wrong.items():
        n.wrong = L.Convolution(n.data, **params)
        with pytest.raises(AttributeError, match=message):
            n.to_proto()
    with pytest.raises(AttributeError, match='no parameters "Poling", did you mean "Pooling"'):
        _ = P.Poling
    with pytest.raises(AttributeError, match='no top "dta", did you mean "data"'):
        _ = n.dta
    with pytest.raises(AttributeError, match="MAXIMUM"):
        _ = P.Pooling.MAXIMUM


def test_inputs_must_be_tops() -> None:
    both = L.DummyData(ntop=2)
    with pytest.raises(
        TypeError, match=r"^Silence input 0 is not a Top \(type is <class 'tuple'>\)$"
    ):
        L.Silence(both, ntop=0)
    n = caffe.NetSpec()
    n.data = both
    with pytest.raises(TypeError, match=r"data is not a Top \(type is <class 'tuple'>\)"):
        n.to_proto()


def test_specs_are_like_dicts() -> None:
    n = two_layers()
    assert list(n.keys()) == list(n) == ["data", "label", "ip", "relu", "loss/all"]
    assert isinstance(n["ip"], Top)
    assert isinstance(n.ip.fn, Function)
    assert "ip" in n
    assert not hasattr(n, "ip2")
    del n["loss/all"], n.relu
    assert len(n) == 3
    n.update("ip", {"num_output": 9})
    assert n.to_proto().layer[1].inner_product_param.num_output == 9


def test_assign_proto_and_the_names_of_parameters() -> None:
    net = caffe_pb2.NetParameter()
    assign_proto(net, "name", "n")
    assign_proto(net, "input_shape", {"dim": [1, 2]})
    assign_proto(net, "layer", [{"name": "a", "top": "x"}, {"name": "b"}])
    assert (net.name, list(net.input_shape[0].dim), [layer.name for layer in net.layer]) == (
        "n",
        [1, 2],
        ["a", "b"],
    )
    names = param_name_dict()
    assert names["InnerProduct"] == "inner_product"
    assert names["TanH"] == "tanh"


def test_values_of_no_use_are_named() -> None:
    data = caffe.layers.Input(shape={"dim": [1, 3, 8, 8]})
    wrong = {
        r"ConvolutionParameter.num_output: 'float' object": {"num_output": 2.5},
        r"ConvolutionParameter.kernel_size: 'str' object": {"kernel_size": ["3"]},
        r"weight_filler: FillerParameter.std: .* str": {"weight_filler": {"std": "small"}},
        r"weight_filler: a dict of fields is needed, not 'xavier'": {"weight_filler": "xavier"},
        r"LayerParameter.param: a dict of fields is needed, not 1": {"param": [1]},
    }
    for message, params in wrong.items():
        with pytest.raises(TypeError, match=message):
            caffe.layers.Convolution(data, **params).to_proto()
    with pytest.raises(ValueError, match=r"DataParameter.batch_size: Value out of range: -1"):
        caffe.layers.Data(batch_size=-1).to_proto()


def test_names_are_listed_for_completion() -> None:
    assert {"Pooling", "Data", "Eltwise"} <= {*dir(P)}
    assert {"data", "ip", "to_proto"} <= {*dir(two_layers())}

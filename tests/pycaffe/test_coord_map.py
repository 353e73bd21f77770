from typing import Any

import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy.pycaffe.coord_map import (
    AxisMismatchException,
    UndefinedMapException,
    compose,
    coord_map,
    coord_map_from_to,
    crop,
    inverse,
)


def image(size: int = 60) -> Any:
    return L.Input(shape={"dim": [1, 3, size, size]})


def numbers(mapped: Any) -> tuple[Any, list[float], list[float]]:
    axis, a, b = mapped
    return axis, np.atleast_1d(a).tolist(), np.atleast_1d(b).tolist()


def test_maps_of_layers() -> None:
    x = image()
    conv = L.Convolution(x, kernel_size=5, stride=2, pad=1, dilation=2)
    assert numbers(coord_map(conv.fn)) == (1, [0.5], [(1 - 8 / 2) / 2])
    pool = L.Pooling(x, pooling_param={"kernel_size": 3, "stride": 3})
    assert numbers(coord_map(pool.fn)) == (1, [1 / 3], [-1 / 3])
    deconv = L.Deconvolution(
        x, convolution_param={"kernel_size": [4, 8], "stride": [2, 4], "pad": [1, 0]}
    )
    assert numbers(coord_map(deconv.fn)) == (1, [2, 4], [0.5, 3.5])
    assert numbers(coord_map(L.Crop(x, x, axis=3, offset=7).fn)) == (2, [1], [-7])
    assert numbers(coord_map(L.Crop(x, x).fn)) == (1, [1], [0])
    assert coord_map(L.BatchNorm(x).fn) == (None, 1, 0)
    with pytest.raises(UndefinedMapException, match="InnerProduct"):
        coord_map(L.InnerProduct(x).fn)
    with pytest.raises(UndefinedMapException, match="Pooling has no kernel_size"):
        coord_map(L.Pooling(x, global_pooling=True).fn)
    with pytest.raises(AssertionError, match="kernel_h, kernel_w cannot be mapped"):
        coord_map(L.Convolution(x, kernel_h=3, kernel_w=4).fn)


def test_compose_and_inverse() -> None:
    f, g = (1, 2, 3), (None, 5, 7)
    assert compose(f, g) == (1, 10, 17)
    assert compose(g, f) == (1, 10, 22)
    assert numbers(compose(f, inverse(f))) == (1, [1], [0])
    with pytest.raises(AxisMismatchException, match="axis 2 is followed by one of axis 1"):
        compose(f, (2, 1, 0))


def test_the_map_says_where_a_net_puts_pixels() -> None:
    """A convolution whose kernel is 1 in the middle copies pixels; the map says which goes
    where."""
    x = image()
    down = L.Convolution(x, kernel_size=3, stride=2, pad=1)
    up = L.Deconvolution(L.ReLU(down), convolution_param={"kernel_size": 1, "stride": 2})
    axis, a, b = coord_map_from_to(down, x)
    assert (axis, a, b) == (1, 2, 0)  # pixel i of `down` has pixel 2 i in its middle
    assert numbers(coord_map_from_to(up, x)) == (1, [1], [0])
    wide = L.Convolution(x, kernel_size=3, stride=2, pad=4)
    assert numbers(coord_map_from_to(wide, x)) == (1, [2], [-3])
    assert numbers(coord_map_from_to(x, wide)) == (1, [0.5], [1.5])
    assert numbers(coord_map_from_to(wide, down)) == (1, [1], [-1.5])


def test_blobs_with_several_sources() -> None:
    x, aux = image(), image()
    one, two = L.Convolution(x, aux, ntop=2, kernel_size=3)
    both = L.Eltwise(one, L.Dropout(two))
    assert numbers(coord_map_from_to(both, aux)) == (1, [1], [1])
    assert numbers(coord_map_from_to(both, x)) == (1, [1], [1])


def test_tops_without_a_map_between_them() -> None:
    x = image()
    for top in (L.InnerProduct(L.Convolution(x, kernel_size=3)), image()):
        with pytest.raises(RuntimeError, match="no map between these tops"):
            coord_map_from_to(top, x)


def test_crop_aligns_and_runs(tmp_path: Any) -> None:
    n = caffe.NetSpec()
    n.data = image(20)
    n.conv = L.Convolution(n.data, kernel_size=3, stride=2, pad=10, num_output=1)
    n.up = L.Deconvolution(
        n.conv, convolution_param={"kernel_size": 3, "stride": 2, "num_output": 1, "pad": 1}
    )
    n.score = crop(n.up, n.data)
    layer = n.to_proto().layer[-1]
    assert layer.type == "Crop"
    assert layer.crop_param.axis == 2
    file = tmp_path / "net.prototxt"
    file.write_text(str(n.to_proto()))
    net = caffe.Net(str(file), caffe.TEST)
    assert net.blobs["score"].shape == (1, 1, 20, 20)
    assert list(crop(L.ReLU(n.data), n.data).fn.params["crop_param"]["offset"]) == [0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kernel_size": 3, "stride": 2}, "scale mismatch"),
        ({"kernel_size": 3}, "negative offset"),
        ({"kernel_size": 4, "pad": 3}, "noninteger offset"),
    ],
)
def test_crop_refuses(params: dict[str, int], message: str) -> None:
    x = image()
    with pytest.raises(AssertionError, match=message):
        crop(L.Convolution(x, **params), x)

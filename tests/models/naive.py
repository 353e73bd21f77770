"""Outputs of a net's layers by the textbook formulas, computed from the prototxt alone."""

from dataclasses import dataclass, field
from math import ceil, prod

from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, Phase

Shape = tuple[int, ...]


@dataclass
class Sizes:
    blobs: dict[str, Shape] = field(default_factory=dict)
    params: dict[str, list[Shape]] = field(default_factory=dict)

    def learned(self) -> int:
        """Learned numbers; BatchNorm's statistics are kept, not learned, and lie under their own
        key.
        """
        return sum(
            prod(s)
            for name, shapes in self.params.items()
            if not name.endswith("[kept]")
            for s in shapes
        )


def included(layer: LayerParameter, phase: Phase) -> bool:
    return not layer.include or any(rule.phase == phase for rule in layer.include)


def sizes(net: NetParameter, phase: Phase) -> Sizes:
    """Shapes of the blobs and parameters of a bundled net whose data are DummyData or Input."""
    s = Sizes()
    for layer in net.layer:
        if included(layer, phase):
            bottoms = [s.blobs[name] for name in layer.bottom]
            s.blobs.update(zip(layer.top, tops(layer, bottoms, s), strict=True))
    return s


def tops(layer: LayerParameter, bottoms: list[Shape], s: Sizes) -> list[Shape]:
    x = bottoms[0] if bottoms else ()
    match layer.type:
        case "Input" | "DummyData":
            shapes = layer.input_param.shape or layer.dummy_data_param.shape
            return [tuple(shape.dim) for shape in shapes]
        case "Convolution" | "ConvolutionDepthwise":
            p = layer.convolution_param
            (k,), o = p.kernel_size, p.num_output
            stride, pad = (p.stride or [1])[0], (p.pad or [0])[0]
            reach = (p.dilation or [1])[0] * (k - 1) + 1
            group = x[1] if layer.type == "ConvolutionDepthwise" else p.group
            s.params[layer.name] = [(o, x[1] // group, k, k)] + [(o,)] * p.bias_term
            return [(x[0], o, *((d + 2 * pad - reach) // stride + 1 for d in x[2:]))]
        case "InnerProduct":
            o = layer.inner_product_param.num_output
            s.params[layer.name] = [(o, prod(x[1:])), (o,)]
            return [(x[0], o)]
        case "Pooling":
            pool = layer.pooling_param
            if pool.global_pooling:
                return [(*x[:2], 1, 1)]
            if not pool.ceil_mode:
                size = (x[2] + 2 * pool.pad - pool.kernel_size) // pool.stride + 1
                return [(*x[:2], size, size)]
            size = [pooled(d, pool.kernel_size, pool.stride, pool.pad) for d in x[2:]]
            return [(*x[:2], *size)] * len(layer.top)
        case "Upsample":
            assert bottoms[1] == x
            p = layer.upsample_param
            size = p.upsample_h, p.upsample_w
            return [(*x[:2], *(size if all(size) else (p.scale * d for d in x[2:])))]
        case "BatchNorm":
            s.params[layer.name + "[kept]"] = [(x[1],), (x[1],), (1,)]
            return [x]
        case "Scale":
            s.params[layer.name] = [(x[1],)] * 2
            return [x]
        case "Concat":
            return [(x[0], sum(b[1] for b in bottoms), *x[2:])]
        case "Axpy":
            assert bottoms[0] == (*bottoms[1][:2], 1, 1)
            assert bottoms[1] == bottoms[2]
            return bottoms[1:2]
        case "Slice":
            if layer.slice_param.axis == 3:
                assert x[3] == len(layer.top)
                return [(*x[:3], 1)] * x[3]
            (point,) = layer.slice_param.slice_point
            return [(x[0], point, *x[2:]), (x[0], x[1] - point, *x[2:])]
        case "Eltwise":
            assert len(set(bottoms)) == 1
            return [x]
        case "ReLU" | "ReLU6" | "Sigmoid" | "ShuffleChannel" | "LRN" | "Dropout" | "Softmax":
            return [x]
        case "SoftmaxWithLoss" | "Accuracy":
            return [()]
        case "SegAccuracy":
            return [(1, 1, 1, 3)]
    raise NotImplementedError(layer.type)


def pooled(size: int, kernel: int, stride: int, pad: int) -> int:
    out = ceil((size + 2 * pad - kernel) / stride) + 1
    return out - 1 if pad and (out - 1) * stride >= size + pad else out

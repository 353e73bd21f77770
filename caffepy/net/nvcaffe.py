"""Conversion of BatchNorm blobs in NVCaffe's caffemodels to those of BVLC Caffe's layers.

NVCaffe stores mean and variance themselves, a factor that is always 1, scale and bias; DIGITS'
older files hold scale, bias, mean, variance and an unused number.
"""

from collections.abc import Iterator

from caffepy.core.errors import ConfigError
from caffepy.layer.batch_norm import BatchNorm
from caffepy.layer.scale import Scale
from caffepy.net.net import Net
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, LayerParameter, NetParameter


def adapt(source: NetParameter, net: Net) -> Iterator[LayerParameter]:
    """Yield the layers of a caffemodel, with BatchNorm layers of five blobs converted to what the
    net has.

    That is a BatchNorm with scale_bias, or one without that a Scale layer follows, which gets scale
    and bias. ConfigError if the net has neither.
    """
    stored = {layer.name for layer in source.layer if layer.blobs}
    for layer in source.layer:
        index = net.layer_names.index(layer.name) if layer.name in net.layer_names else None
        if (
            len(layer.blobs) != 5
            or index is None
            or not isinstance(net.layers[index], BatchNorm)
            or layer.type != net.layers[index].type
        ):
            yield layer
            continue
        blobs = _in_order(layer)
        if len(net.layers[index].blobs) == 5:
            yield LayerParameter(name=layer.name, type=layer.type, blobs=blobs)
            continue
        scale = _scale_after(net, index)
        if scale is None or scale in stored:
            raise ConfigError(
                f"layer {layer.name} is a BatchNorm of NVCaffe with scale and bias in the "
                "file: let a Scale layer with bias_term: true, of a name that the file has no "
                "weights for, follow it in the net, or set batch_norm_param { scale_bias: true }"
            )
        yield LayerParameter(name=layer.name, type=layer.type, blobs=blobs[:3])
        yield LayerParameter(name=scale, type="Scale", blobs=blobs[3:])


def _in_order(layer: LayerParameter) -> list[BlobProto]:
    """Return mean, variance, the factor 1, scale and bias, with one axis each."""
    arrays = [binary.blob_to_array(blob).reshape(-1) for blob in layer.blobs]
    blobs = [binary.array_to_blob(array) for array in arrays]
    if blobs[4].shape.dim == [1]:
        scale, bias, mean, variance, _ = blobs
    else:
        mean, variance, _, scale, bias = blobs
    return [mean, variance, BlobProto(shape=BlobShape(dim=[1]), data=[1]), scale, bias]


def _scale_after(net: Net, index: int) -> str | None:
    """Return the name of the Scale layer with bias that reads the top of layer `index`, if any."""
    (top,) = net.nodes[index].top_names
    for i in range(index + 1, len(net.layers)):
        if top in net.nodes[i].bottom_names:
            layer = net.layers[i]
            return net.nodes[i].name if isinstance(layer, Scale) and len(layer.blobs) == 2 else None
    return None

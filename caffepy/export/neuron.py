"""Layers that map each element to the same element of the top."""

import numpy as np

from caffepy.export.graph import InexpressibleError, Site, writers

PLAIN = {"Sigmoid": "Sigmoid", "TanH": "Tanh", "AbsVal": "Abs", "BNLL": "Softplus"}
"""Operators that do what a layer does, by the layer's type."""


@writers(*PLAIN)
def plain(site: Site) -> None:
    site.finish(PLAIN[site.layer.type], site.bottoms[0])


@writers("ReLU")
def relu(site: Site) -> None:
    if slope := site.layer.slope:
        site.finish("LeakyRelu", site.bottoms[0], alpha=slope)
    else:
        site.finish("Relu", site.bottoms[0])


@writers("NegReLU")
def negative_relu(site: Site) -> None:
    """-LeakyRelu(-x)."""
    (x,) = site.bottoms
    negative = site.node("Neg", x)
    if slope := site.layer.slope:
        site.finish("Neg", site.node("LeakyRelu", negative, alpha=slope))
    else:
        site.finish("Neg", site.node("Relu", negative))


@writers("RReLU", "Insanity")
def randomized_relu(site: Site) -> None:
    """LeakyRelu with the mean slope."""
    if site.layer.draws:
        raise InexpressibleError(f"{site.layer.type} draws random numbers in the TRAIN phase")
    site.finish("LeakyRelu", site.bottoms[0], alpha=1 / site.layer.mean)


@writers("CReLU")
def crelu(site: Site) -> None:
    """Relu of x and of -x, side by side."""
    (x,) = site.bottoms
    negative = site.node("Relu", site.node("Neg", x))
    site.finish("Concat", site.node("Relu", x), negative, axis=1)


@writers("SpatialDropout", "ChannelDropout")
def spatial_dropout(site: Site) -> None:
    """The identity in the TEST phase."""
    if site.layer.draws:
        raise InexpressibleError("SpatialDropout draws random numbers in the TRAIN phase")
    site.finish("Identity", site.bottoms[0])


@writers("ReLU6")
def relu6(site: Site) -> None:
    """Clip, of LeakyRelu if there is a slope."""
    (x,) = site.bottoms
    if slope := site.layer.slope:
        x = site.node("LeakyRelu", x, alpha=slope)
        site.finish("Min", x, site.constant(6))
    else:
        site.finish("Clip", x, site.constant(0), site.constant(6))


@writers("HardSigmoid")
def hard_sigmoid(site: Site) -> None:
    site.finish("HardSigmoid", site.bottoms[0], alpha=0.2, beta=0.5)


@writers("HSwish", "HardSwish")
def hard_swish(site: Site) -> None:
    """x * HardSigmoid(x) with slope 1/6."""
    (x,) = site.bottoms
    site.finish("Mul", x, site.node("HardSigmoid", x, alpha=1 / 6, beta=0.5))


@writers("Mish")
def mish(site: Site) -> None:
    """x * tanh(log(1 + exp(x)))."""
    (x,) = site.bottoms
    site.finish("Mul", x, site.node("Tanh", site.node("Softplus", x)))


@writers("PReLU")
def prelu(site: Site) -> None:
    """The slope broadcasts over what follows the channels."""
    spatial = len(site.bottom_shapes[0]) - 2
    shape = (1,) if site.layer.shared else (site.layer.blobs[0].count,) + (1,) * spatial
    site.finish("PRelu", site.bottoms[0], site.param(0, shape))


@writers("APL")
def apl(site: Site) -> None:
    """max(x, 0) + sum of slope * max(offset - x, 0)."""
    (x,), item = site.bottoms, site.bottom_shapes[0][1:]
    each = [
        blob.host_data.reshape(-1, site.layer.param.apl_param.sums) for blob in site.layer.blobs
    ]
    y = site.node("Relu", x)
    for slope, offset in zip(each[0].T, each[1].T, strict=True):
        hinge = site.node("Relu", site.node("Sub", site.constant(offset.reshape(item)), x))
        y = site.node("Add", y, site.node("Mul", hinge, site.constant(slope.reshape(item))))
    site.name_last()


@writers("ELU")
def elu(site: Site) -> None:
    site.finish("Elu", site.bottoms[0], alpha=site.layer.alpha)


@writers("Swish")
def swish(site: Site) -> None:
    """x * sigmoid(beta * x)."""
    (x,) = site.bottoms
    site.finish("Mul", x, site.node("Sigmoid", site.affine(x, site.layer.beta, 0)))


@writers("Clip")
def clip(site: Site) -> None:
    limits = map(site.constant, (site.layer.low, site.layer.high))
    site.finish("Clip", site.bottoms[0], *limits)


@writers("SignedSqrt")
def signed_sqrt(site: Site) -> None:
    """sign(x) * sqrt(|x|)."""
    (x,) = site.bottoms
    site.finish("Mul", site.node("Sign", x), site.node("Sqrt", site.node("Abs", x)))


@writers("Threshold")
def threshold(site: Site) -> None:
    """x > threshold as a float."""
    limit = site.constant(site.layer.param.threshold_param.threshold)
    site.finish("Cast", site.node("Greater", site.bottoms[0], limit), to=np.dtype(np.float32))


@writers("Power")
def power(site: Site) -> None:
    """(shift + scale * x)^power without what has no effect; a constant if power or scale is 0."""
    (x,) = site.bottoms
    power, scale, shift = site.layer.numbers
    if power * scale == 0:
        with np.errstate(all="ignore"):
            value = np.asarray([np.float64(shift) ** power], np.float32)
        site.finish("ConstantOfShape", site.node("Shape", x), value=value)
        return
    y = site.affine(x, scale, shift)
    if power == 2:
        site.finish("Mul", y, y)
    elif power != 1:
        site.finish("Pow", y, site.constant(power))
    else:
        _end(site, y)


@writers("Exp")
def exp(site: Site) -> None:
    """exp(x * rate) * factor."""
    y = site.node("Exp", site.affine(site.bottoms[0], site.layer.rate, 0))
    _end(site, site.affine(y, site.layer.factor, 0))


@writers("Log")
def log(site: Site) -> None:
    """log(x * scale + shift) * factor."""
    y = site.node("Log", site.affine(site.bottoms[0], site.layer.scale, site.layer.shift))
    _end(site, site.affine(y, site.layer.factor, 0))


@writers("SeLu", "SeLU")
def selu(site: Site) -> None:
    rate, alpha = site.layer.rate, site.layer.alpha
    site.finish("Selu", site.bottoms[0], alpha=alpha, gamma=rate)


@writers("SeLuDropout", "SeLUDropout")
def selu_dropout(site: Site) -> None:
    if site.layer.draws:
        raise InexpressibleError("SeLuDropout draws random numbers in the TRAIN phase")
    site.finish("Identity", site.bottoms[0])


@writers("GradientScaler")
def gradient_scaler(site: Site) -> None:
    """The identity: it changes gradients alone."""
    site.finish("Identity", site.bottoms[0])


@writers("Dropout")
def dropout(site: Site) -> None:
    """The identity in the TEST phase, times a number without scale_train."""
    (x,) = site.bottoms
    if site.layer.draws:
        x = site.affine(x, site.layer.factor, 0)
        training = site.constant(True, np.bool_)
        site.finish("Dropout", x, site.constant(site.layer.ratio), training)
    elif site.layer.is_identity:
        site.finish("Identity", x)
    else:
        site.finish("Mul", x, site.constant(site.layer.factor))


def _end(site: Site, y: str) -> None:
    """Make y the top: the output of the last node, or the bottom itself."""
    if y in site.bottoms:
        site.finish("Identity", y)
    else:
        site.name_last()

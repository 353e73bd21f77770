"""Which layers form fused groups, and the class that computes each kind of group."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from caffepy.layer.base import Layer
from caffepy.layer.convolution import Convolution
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.fused.base import FusedGroup, Member
from caffepy.layer.fused.convolution import ConvolutionReLU
from caffepy.layer.fused.inner_product import InnerProductGroup
from caffepy.layer.fused.normalization import NormGroup
from caffepy.layer.fused.pooling import PoolingReLU
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.neuron import Dropout, ReLU
from caffepy.layer.normalization import BatchNorm, Scale
from caffepy.layer.pooling import Pooling
from caffepy.layer.shape import Split

Types = tuple[type[Layer], ...]


class Pattern(NamedTuple):
    """A group begins with the types of `head`, one after the other; those of `tail` may follow, in
    this order, each at most once.
    """

    head: Types
    tail: Types


NORM = (Scale, Eltwise, ReLU, Split)
PATTERNS = (
    Pattern((Convolution, BatchNorm), NORM),
    Pattern((Convolution,), (ReLU,)),
    Pattern((BatchNorm,), NORM),
    Pattern((InnerProduct,), (ReLU, Dropout)),
    Pattern((Pooling,), (ReLU,)),
)
"""The first whose head fits counts."""

GROUPS: dict[type[Layer], Callable[[Sequence[Member]], FusedGroup]] = {
    Convolution: ConvolutionReLU,
    InnerProduct: InnerProductGroup,
    Pooling: PoolingReLU,
}
"""The class for a group without a BatchNorm, by the type of its first layer."""


def make_group(members: Sequence[Member], learns: bool, has_gradient: Sequence[bool]) -> FusedGroup:
    """Return the group of these layers; `learns` if it will run backward, `has_gradient` tells
    which tops get a gradient then.
    """
    if any(isinstance(member.layer, BatchNorm) for member in members):
        return NormGroup(members, learns, has_gradient)
    return GROUPS[type(members[0].layer)](members)

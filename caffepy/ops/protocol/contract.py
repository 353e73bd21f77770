"""The contract of a back end: the functions of all families."""

from typing import Protocol

from caffepy.ops.protocol.boxes import BoxesOps
from caffepy.ops.protocol.convolution import ConvolutionOps
from caffepy.ops.protocol.copies import CopiesOps
from caffepy.ops.protocol.ctc import CTCOps
from caffepy.ops.protocol.elementwise import ElementwiseOps
from caffepy.ops.protocol.execution import ExecutionOps
from caffepy.ops.protocol.flow import FlowOps
from caffepy.ops.protocol.loss import LossOps
from caffepy.ops.protocol.neuron import NeuronOps
from caffepy.ops.protocol.normalization import NormalizationOps
from caffepy.ops.protocol.permutohedral import PermutohedralOps
from caffepy.ops.protocol.pooling import PoolingOps
from caffepy.ops.protocol.products import ProductsOps
from caffepy.ops.protocol.recurrent import RecurrentOps
from caffepy.ops.protocol.roi import RoIOps
from caffepy.ops.protocol.sampling import SamplingOps
from caffepy.ops.protocol.selection import SelectionOps
from caffepy.ops.protocol.transform import TransformOps
from caffepy.ops.protocol.update import UpdateOps
from caffepy.ops.protocol.yolo import YoloOps


class Ops(
    ExecutionOps,
    CopiesOps,
    ElementwiseOps,
    ProductsOps,
    NeuronOps,
    NormalizationOps,
    ConvolutionOps,
    PoolingOps,
    FlowOps,
    CTCOps,
    SamplingOps,
    PermutohedralOps,
    RoIOps,
    BoxesOps,
    YoloOps,
    SelectionOps,
    RecurrentOps,
    LossOps,
    TransformOps,
    UpdateOps,
    Protocol,
):
    """Arithmetic on one kind of device; it has a method for each function of a back end."""

"""Kinds of overlap of two boxes, and the weights of the losses of YOLO, which use them."""

from typing import NamedTuple

IOU, GIOU, MSE, DIOU, CIOU = range(5)
"""Numbers of Yolov3Parameter.IOU_LOSS: intersection over union, alone with IOU and MSE, less the
share of the hull that neither box fills (Rezatofighi et al. 2019), less a power of the distance, or
distance and difference of the ratios of the sides (Zheng et al. 2020).
"""

PLAIN, RESCORE, SMOOTH = range(3)
"""Rules by which RegionLoss learns true boxes: objects are to be 1, or the overlap; SMOOTH is Intel
Caffe's, whose objects learn the less the nearer they are to 1, and moves of at most 1.
"""


class YoloWeights(NamedTuple):
    """The settings of Yolov3."""

    coord: float
    object: float
    label: float
    smooth: float  # of the labels
    focal: bool
    box: float  # of the slope of the overlap
    most: float  # size of what a box is moved by
    accumulate: bool  # add what several truths ask of a box
    least: float  # overlap of sizes from which on further anchors are trained

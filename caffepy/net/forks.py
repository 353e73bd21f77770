"""What definitions of forks and of published nets leave unsaid: layers that ours replace, kinds of
prior boxes, and warnings where a fork's program computes otherwise under the same name.
"""

import logging
from collections import defaultdict
from functools import cache
from typing import Any

from caffepy.core.errors import ConfigError
from caffepy.core.python_modules import is_there
from caffepy.device.blob import MAX_COUNT
from caffepy.layer.prior_box import boxes_of_place
from caffepy.layer.rpn import read_settings
from caffepy.net.build import located
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, PriorBoxParameter
from caffepy.proto.text import where

log = logging.getLogger(__name__)

PYTHON_LAYERS = {("spatial_dropout", "SpatialDropoutLayer"), ("pyloss", "EuclideanLossLayer")}
"""Modules and classes of Python layers that ours replace."""


def adapt_forks(param: NetParameter, path: str | None = None) -> None:
    """Write into the definition what its fork left unsaid; warn of what it computes otherwise."""
    replace_python(param, path)
    set_prior_variants(param, path)
    compare_classes(param, path)
    compare_losses(param, path)


def replace_python(param: NetParameter, path: str | None = None) -> None:
    """Make layers of ours of Python layers that compute the same, where their module, which nets
    are published without, is not there: ENet's `spatial_dropout` and `pyloss` of Caffe's examples.
    """
    for layer in param.layer:
        python = layer.python_param
        known = (python.module, python.layer) in PYTHON_LAYERS
        if layer.type != "Python" or not known or is_there(python.module, path):
            continue
        with located(path, layer):
            if python.module == "pyloss":
                layer.type = "EuclideanLoss"
            else:
                _drop_planes(layer, read_settings(python.param_str))
        log.info("%s is a %s: there is no module %s", layer.name, layer.type, python.module)
        layer.ClearField("python_param")


def _drop_planes(layer: LayerParameter, settings: dict[str, Any]) -> None:
    """Make a layer of ENet's settings: it scales in its TEST phase, too, unlike SpatialDropout."""
    try:
        ratio = float(settings["p"])
    except (KeyError, TypeError, ValueError):
        ratio = 0
    if not 0 < ratio < 1 or settings.get("phase") not in ("TRAIN", "TEST"):
        raise ConfigError(
            "param_str needs a 'phase', TRAIN or TEST, and a 'p' between 0 and 1, not "
            f"{layer.python_param.param_str!r}"
        )
    if settings["phase"] == "TRAIN":
        layer.type = "SpatialDropout"
        layer.dropout_param.dropout_ratio = ratio
    else:
        layer.type = "Power"
        layer.power_param.scale = 1 / (1 - ratio)


def set_prior_variants(param: NetParameter, path: str | None = None) -> None:
    """Set `faceboxes` or `denser_prior_boxes` of the PriorBox layers on whose map locations of as
    many boxes as FaceBoxes' or TextBoxes' layer has are predicted, with a warning: their files do
    not say whose they are. TextBoxes' are all of a net, or none.
    """
    locations = _locations(param)
    found = defaultdict[str, list[tuple[LayerParameter, int]]](list)  # by the field to be set
    for layer in param.layer:
        setting = layer.prior_box_param
        if layer.type != "PriorBox" or not layer.bottom or not setting.min_size:
            continue
        sizes = *setting.min_size, *setting.max_size, *setting.aspect_ratio
        sound = all(0 < size < MAX_COUNT for size in sizes)
        has_kind = (
            setting.faceboxes or setting.denser_prior_boxes or setting.height or setting.width
        )
        predicted = locations.get(layer.bottom[0])
        if has_kind or not sound or predicted is None:
            continue
        boxes = len(boxes_of_place(setting))
        as_faceboxes = PriorBoxParameter()
        as_faceboxes.CopyFrom(setting)
        as_faceboxes.faceboxes = True
        if len(boxes_of_place(as_faceboxes)) == predicted != boxes:
            found["faceboxes"].append((layer, boxes))
        else:
            found["denser_prior_boxes" if 2 * boxes == predicted else ""].append((layer, boxes))
    for field, whose in (("faceboxes", "FaceBoxes"), ("denser_prior_boxes", "TextBoxes")):
        if not found[field] or (field == "denser_prior_boxes" and found[""]):
            continue
        first, boxes = found[field][0]
        _warn_once(
            f"{where(path, first)}: states {boxes} boxes for each place, but locations of "
            f"{locations[first.bottom[0]]:g} are predicted. Taken for the layer of {whose}, which "
            f"makes as many; if it is, write {field}: true in each prior_box_param, else add the "
            "aspect_ratio, min_size or max_size that is missing"
        )
        for layer, _ in found[field]:
            setattr(layer.prior_box_param, field, True)


@cache
def _warn_once(message: str) -> None:
    """Warn, but not again of the same: the train and test nets of a solver have one file."""
    log.warning("%s", message)


def compare_classes(param: NetParameter, path: str | None = None) -> None:
    """Warn of each DetectionEvaluate with another number of classes, or another background, than
    the DetectionOutput whose boxes it compares.
    """
    makers = {top: layer for layer in param.layer for top in layer.top}
    for layer in param.layer:
        maker = makers.get(layer.bottom[0]) if layer.bottom else None
        if layer.type != "DetectionEvaluate" or not maker or maker.type != "DetectionOutput":
            continue
        own, given = layer.detection_evaluate_param, maker.detection_output_param
        for field in ("num_classes", "background_label_id"):
            if (number := getattr(given, field)) != getattr(own, field):
                _warn_once(
                    f"{where(path, layer)}: {field} is {getattr(own, field)}, but that of layer "
                    f'"{maker.name}" is {number}: the mean is over other classes than are found; '
                    f"write {field}: {number}"
                )


def compare_losses(param: NetParameter, path: str | None = None) -> None:
    """Warn of the first SigmoidCrossEntropyLoss with the edges of an ImageLabelmapData layer, which
    HED's program computes otherwise.
    """
    edges = {t for x in param.layer if x.type == "ImageLabelmapData" for t in x.top[1:]}
    for layer in param.layer:
        if layer.type == "SigmoidCrossEntropyLoss" and edges.intersection(layer.bottom[1:]):
            _warn_once(
                f"{where(path, layer)}: computed as in BVLC Caffe. HED's program balances edges "
                "and other pixels under this name; if the net is HED's, write "
                "SigmoidCrossEntropyBalanceLoss in all its losses"
            )
            return


def _locations(param: NetParameter) -> dict[str, float]:
    """Return the number of boxes of which convolutions of a map predict locations, by the map."""
    makers = {top: layer for layer in param.layer for top in layer.top if top not in layer.bottom}
    found: dict[str, float] = {}
    for layer in param.layer:
        shares = {
            "DetectionOutput": layer.detection_output_param.share_location,
            "MultiBoxLoss": layer.multibox_loss_param.share_location,
            "MultiBoxFocalLoss": layer.multibox_loss_param.share_location,
        }
        if not shares.get(layer.type) or not layer.bottom:
            continue
        seen, ahead = set[str](), [layer.bottom[0]]
        while ahead:
            blob = ahead.pop()
            if blob in seen or blob not in makers:
                continue
            seen.add(blob)
            maker = makers[blob]
            if maker.type != "Convolution":
                ahead += maker.bottom
            elif maker.bottom:
                found[maker.bottom[0]] = maker.convolution_param.num_output / 4
    return found

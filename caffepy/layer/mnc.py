"""The Python layers of MNC, multi-task network cascades (Dai et al. 2016), in the TEST phase, for
prototxts that name its modules where these cannot be imported; see caffepy/layer/rpn.py. To train,
MNC's own modules must be on the path.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.layer import rpn
from caffepy.layer.rpn import Blobs, RcnnLayer, moved
from caffepy.proto.caffe_pb2 import TRAIN


class _Testing(RcnnLayer):
    """Base: ConfigError in the TRAIN phase."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if self.phase == TRAIN:
            raise ConfigError(
                f"{type(self).__name__} of MNC runs in the TEST phase only; to train, put the "
                "folder of MNC's own modules (lib) on PYTHONPATH"
            )
        super().setup(bottom, top)


class ProposalLayer(_Testing, rpn.ProposalLayer):
    """Layer of py-faster-rcnn; the settings of MNC's gradient say nothing in the TEST phase."""

    defaults: Mapping[str, Any] = {
        **rpn.ProposalLayer.defaults,
        "gradient_scale": 1,
        "use_clip": 0,
        "clip_base": 256,
    }


class MaskLayer(_Testing):
    """(R, S * S) -> (R, 1, S, S): masks as images."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        count, *rest = bottom[0].shape
        number = int(np.prod(rest))
        side = isqrt(number)
        if side * side != number:
            raise ConfigError(f"MaskLayer needs masks (R, S * S), not {list(bottom[0].shape)}")
        top[0].reshape(count, 1, side, side)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        top[0].data[...] = bottom[0].data.reshape(top[0].shape)


class StageBridgeLayer(_Testing):
    """Rois (R, 5) for the next stage: each box moved by the deltas (R, 4K) of its likeliest class,
    by scores (R, K), and clipped to the image, whose size is in the last bottom.
    """

    defaults: Mapping[str, Any] = {
        "feat_stride": 16,
        "num_classes": 21,
        "use_clip": 0,
        "clip_base": 64,
    }

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        return [(bottom[0].shape[0], 5)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        rois, deltas, scores, info = (blob.data for blob in bottom)
        count, classes = len(rois), scores.size // max(len(rois), 1)
        if deltas.size != 4 * scores.size:
            raise ConfigError(
                f"{classes} scores of a box need {4 * classes} deltas, not shape "
                f"{list(bottom[1].shape)}"
            )
        best = scores.reshape(count, -1).argmax(axis=1)
        own = deltas.reshape(count, -1, 4)[np.arange(count), best]
        boxes = moved(rois[:, 1:5], own)
        most = np.tile(info.ravel()[1::-1] - 1, 2)  # width, height, width, height
        boxes = np.maximum(np.minimum(boxes, most), 0)
        self.write_tops(top, [np.hstack([np.zeros((count, 1), np.float32), boxes])])

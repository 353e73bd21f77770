"""CTPN's Python layer that proposes lines of text in pieces (Tian et al. 2016), for prototxts that
name its module where this cannot be imported; see caffepy/layer/rpn.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.layer.rpn import Blobs, RcnnLayer, check_one_image

HEIGHTS = np.array([11, 16, 23, 33, 48, 68, 97, 139, 198, 283])
"""Heights of the anchors, which are 16 pixels wide."""


class ProposalLayer(RcnnLayer):
    """Boxes (H W A, 4) = x1, y1, x2, y2, each anchor's columns with predicted rows, cut to the
    image, and their scores (H W A, 1), in the order of the places.

    Bottoms: probabilities (1, 2A, H, W), the second half of text; deltas (1, 2A, H, W), of an
    anchor the shift of the middle in heights and the logarithm of the height; height and width of
    the image.
    """

    defaults: Mapping[str, Any] = {"feat_stride": None}

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        return [(1, 4), (1, 1, 1, 1)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        count = len(HEIGHTS)
        check_one_image(bottom[0], count)
        if bottom[1].shape != bottom[0].shape:
            raise ConfigError(
                f"deltas must have the shape of the scores {list(bottom[0].shape)}, not "
                f"{list(bottom[1].shape)}"
            )
        scores, deltas, info = (blob.data for blob in bottom)
        h, w = scores.shape[2:]
        moves = deltas[0].transpose(1, 2, 0).reshape(h, w, count, 2)
        rows, columns = (np.arange(n) * self.settings["feat_stride"] for n in (h, w))
        # The middle of a cell of 16 pixels, and half a height of whole pixels, cut towards 0.
        start, end = (np.trunc(7.5 + sign * (HEIGHTS // 2)) for sign in (-1, 1))
        size = end - start + 1
        middle = rows[:, None, None] + (start + end) / 2
        high = np.exp(moves[..., 1]) * size
        top_row = moves[..., 0] * size + middle - high / 2
        left = np.broadcast_to(columns[:, None], high.shape)
        boxes = np.stack([left, top_row, left + 15, top_row + high], axis=-1).reshape(-1, 4)
        most = np.tile(info.ravel()[1::-1] - 1, 2)
        found = scores[0, count:].transpose(1, 2, 0).reshape(-1, 1)
        self.write_tops(top, [np.clip(boxes, 0, most), found])

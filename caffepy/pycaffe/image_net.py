"""The common base of Classifier and Detector: a net whose first input is an image."""

import os
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.core.paths import AnyPath
from caffepy.proto.caffe_pb2 import TEST
from caffepy.pycaffe.io import Array, Transformer
from caffepy.pycaffe.net import Net


class ImageNet(Net):
    """A net in the TEST phase whose first input takes images, and the `transformer` that prepares
    them.

    `mean` (one number a channel, or an image), `input_scale`, `raw_scale` and `channel_swap` are
    the transformer's; images are (H, W, K). Without `pretrained_file` the fillers set the weights.
    """

    def __init__(
        self,
        model_file: AnyPath,
        pretrained_file: AnyPath | None,
        mean: Array | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        if not self.inputs or len(self.blobs[self.inputs[0]].shape) != 4:
            raise ConfigError(
                "a net with an input of shape (N, C, H, W) is needed, a deploy net; this one has "
                + (
                    f"{self.inputs[0]} of {self.blobs[self.inputs[0]]!r}"
                    if self.inputs
                    else "no inputs"
                ),
                os.fsdecode(model_file),
            )
        in_ = self.inputs[0]
        self.transformer = Transformer({in_: self.blobs[in_].shape})
        self.transformer.set_transpose(in_, (2, 0, 1))
        if mean is not None:
            self.transformer.set_mean(in_, mean)
        if input_scale is not None:
            self.transformer.set_input_scale(in_, input_scale)
        if raw_scale is not None:
            self.transformer.set_raw_scale(in_, raw_scale)
        if channel_swap is not None:
            self.transformer.set_channel_swap(in_, channel_swap)

    def _scores(self, images: Sequence[Array]) -> Array:
        """Return the first output for images (H, W, K), prepared and run in batches."""
        in_ = self.inputs[0]
        prepared = np.stack([self.transformer.preprocess(in_, image) for image in images])
        return self.forward_all(None, **{in_: prepared})[self.outputs[0]]

"""pycaffe's Classifier: class scores of images; and what it has in common with a Detector."""

import os
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.core.files import AnyPath
from caffepy.proto.caffe_pb2 import TEST
from caffepy.pycaffe import io
from caffepy.pycaffe.io import Array, Transformer
from caffepy.pycaffe.net import Net

CROPS = 10
"""Crops of an image that `oversample` takes."""


class ImageNet(Net):
    """A net in the TEST phase whose first input takes images; its `transformer` prepares them.

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
        blob = self.blobs[self.inputs[0]] if self.inputs else None
        if blob is None or len(blob.shape) != 4:
            has = "no inputs" if blob is None else f"{self.inputs[0]} of {blob!r}"
            raise ConfigError(
                "a net with an input of shape (N, C, H, W) is needed, a deploy net; this one has "
                f"{has}",
                os.fsdecode(model_file),
            )
        in_ = self.inputs[0]
        self.transformer = Transformer({in_: blob.shape})
        self.transformer.set_transpose(in_, (2, 0, 1))
        given = {"mean": mean, "input_scale": input_scale, "raw_scale": raw_scale}
        for name, value in {**given, "channel_swap": channel_swap}.items():
            if value is not None:
                getattr(self.transformer, f"set_{name}")(in_, value)

    def _scores(self, images: Sequence[Array]) -> Array:
        """Return the first output for images (H, W, K), prepared and run in batches."""
        in_ = self.inputs[0]
        prepared = np.stack([self.transformer.preprocess(in_, image) for image in images])
        return self.forward_all(None, **{in_: prepared})[self.outputs[0]]


class Classifier(ImageNet):
    """Classifies images by a deploy net and its weights.

    Images are resized to `image_dims` (height, width; by default `crop_dims`, the size that the net
    takes), and crops of the net's size are taken from them. For the other arguments see ImageNet.
    """

    def __init__(
        self,
        model_file: AnyPath,
        pretrained_file: AnyPath | None,
        image_dims: Sequence[int] | None = None,
        mean: Array | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, pretrained_file, mean, input_scale, raw_scale, channel_swap)
        self.crop_dims = np.array(self.blobs[self.inputs[0]].shape[2:])
        self.image_dims: Sequence[int] | Array = self.crop_dims
        if image_dims is not None and len(image_dims):
            self.image_dims = image_dims

    def predict(self, inputs: Sequence[Array], oversample: bool = True) -> Array:
        """Return the first output, (N, classes), for N images (H, W, K) of `caffe.io.load_image`.

        It is the mean over ten crops (corners, centre, and their mirror images), or that of the
        centre without `oversample`.
        """
        images = np.stack([io.resize_image(image, self.image_dims) for image in inputs])
        if oversample:
            scores = self._scores(list(io.oversample(list(images), self.crop_dims.tolist())))
            mean: Array = scores.reshape(len(images), CROPS, -1).mean(1)
            return mean
        height, width = self.crop_dims
        y, x = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
        if min(y, x) < 0:
            raise ValueError(
                f"a crop of {height}x{width} cannot be taken from images of {self.image_dims}"
            )
        return self._scores(list(images[:, y : y + height, x : x + width]))

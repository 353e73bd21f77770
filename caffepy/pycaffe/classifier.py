"""pycaffe's Classifier: class scores of images."""

from collections.abc import Sequence

import numpy as np

from caffepy.core.paths import AnyPath
from caffepy.pycaffe import io
from caffepy.pycaffe.image_net import ImageNet
from caffepy.pycaffe.io import Array

CROPS = 10
"""Crops of an image that `oversample` takes."""


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
        self.image_dims = (
            self.crop_dims if image_dims is None or not len(image_dims) else image_dims
        )

    def predict(self, inputs: Sequence[Array], oversample: bool = True) -> Array:
        """Return the first output, (N, classes), for N images (H, W, K) as `caffe.io.load_image`
        reads them.

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

"""The Python layer of py-faster-rcnn that reads images and their boxes, for prototxts that name its
module; see `caffepy.layer.rpn`.
"""

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.python_blob import Blob
from caffepy.layer.rpn import RcnnLayer

VOC = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike "
    "person pottedplant sheep sofa train tvmonitor"
)
ENDS = "xmin", "ymin", "xmax", "ymax"
Blobs = Sequence[Blob]
Image = Mapping[str, Any]
"""image, a file; boxes (P, 4); gt_classes (P), 0 for a box that is no truth; flipped. For nets
without an RPN also max_classes, max_overlaps (P) and bbox_targets (P, 5), the class before them.
"""


def read_voc(folder: str, image_set: str, classes: Sequence[str]) -> list[Image]:
    """Return the images with objects of a folder in the form of PASCAL VOC, without objects marked
    difficult; boxes count pixels from 0. DataError for what cannot be read.
    """
    root = Path(folder)
    names = root / "ImageSets" / "Main" / f"{image_set}.txt"
    try:
        lines = names.read_text().split("\n")
    except OSError as error:
        raise DataError(
            f"{names}: {error.strerror}; give param_str of RoIDataLayer 'voc': a folder with "
            "Annotations, ImageSets and JPEGImages, or call its set_roidb"
        ) from error
    found = [
        _annotated(root, line.split()[0], {name: k for k, name in enumerate(classes, 1)})
        for line in lines
        if line.strip()
    ]
    return [image for image in found if len(image["boxes"])]


def _annotated(root: Path, name: str, number: Mapping[str, int]) -> Image:
    path = root / "Annotations" / f"{name}.xml"
    boxes, classes = [], []
    try:
        tree = ElementTree.parse(path)
        width = int(tree.findtext("size/width", ""))
        for thing in tree.iter("object"):
            if int(thing.findtext("difficult", "0")):
                continue
            kind = thing.findtext("name", "").lower().strip()
            if kind not in number:
                raise DataError(f'{path}: "{kind}" is not one of the classes {", ".join(number)}')
            box = [float(thing.findtext(f"bndbox/{end}", "")) - 1 for end in ENDS]
            boxes.append(box)
            classes.append(number[kind])
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path}: not an annotation of PASCAL VOC ({error})") from error
    return {
        "image": str(root / "JPEGImages" / f"{name}.jpg"),
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "gt_classes": np.array(classes, np.int64),
        "width": width,
        "flipped": False,
    }


def mirrored(image: Image) -> Image:
    """Return the image of `read_voc` flipped from left to right."""
    boxes = image["boxes"].copy()
    boxes[:, [0, 2]] = image["width"] - 1 - boxes[:, [2, 0]]
    return {**image, "boxes": boxes, "flipped": True}


class RoIDataLayer(RcnnLayer):
    """Images with boxes (Fast R-CNN, R-FCN).

    With three tops an image (1, 3, H, W), its height, width and scale (1, 3), true boxes with
    their class (G, 5). With more ims_per_batch images, drawn rois (R, 5), labels (R, 1, 1, 1), and
    for each class, with `agnostic` for two, targets, inside and outside weights (R, 4K) of the
    deltas.

    Images, in an order drawn for each epoch, get a shorter side of one of `scales` pixels unless
    the longer one would be over max_size, and lose pixel_means. They are those of set_roidb, or of
    `image_set` in the folder `voc`, with use_flipped each of these twice.
    """

    defaults: Mapping[str, Any] = {
        "num_classes": None,
        "agnostic": False,
        "voc": "data/VOCdevkit2007/VOC2007",
        "image_set": "trainval",
        "classes": VOC.split(),
        "scales": (600,),
        "max_size": 1000,
        "pixel_means": (102.9801, 115.9465, 122.7717),
        "use_flipped": True,
        "ims_per_batch": 2,
        "batch_size": 128,
        "fg_fraction": 0.25,
        "fg_thresh": 0.5,
        "bg_thresh_hi": 0.5,
        "bg_thresh_lo": 0.1,
        "bbox_inside_weights": (1.0, 1.0, 1.0, 1.0),
    }
    images: Sequence[Image] = ()

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if len(top) not in (3, 6):
            raise ConfigError(
                "RoIDataLayer has the tops data, im_info and gt_boxes, or data, rois, labels, "
                f"bbox_targets, bbox_inside_weights and bbox_outside_weights, not {len(top)}"
            )
        self.with_rpn = len(top) == 3
        self.kinds = 2 if self.settings["agnostic"] else self.settings["num_classes"]
        self.order: Iterator[Image] = iter(())
        self.count = 1 if self.with_rpn else self.settings["ims_per_batch"]

    def set_roidb(self, roidb: Sequence[Image]) -> None:
        """Take these images, as py-faster-rcnn's scripts prepare them."""
        self.images, self.order = roidb, iter(())

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        size, boxes = self.settings["max_size"], 4 * self.kinds
        image = (self.count, 3, max(self.settings["scales"]), size)
        if self.with_rpn:
            return [image, (1, 3), (1, 5)]
        return [image, (1, 5), (1, 1, 1, 1), (1, boxes), (1, boxes), (1, boxes)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        images = [self.next_image() for _ in range(self.count)]
        pixels, scales = zip(*(self.read(image) for image in images), strict=True)
        high, wide = np.max([p.shape[:2] for p in pixels], axis=0)
        data = np.zeros((len(images), 3, high, wide), np.float32)
        for k, p in enumerate(pixels):
            data[k, :, : p.shape[0], : p.shape[1]] = p.transpose(2, 0, 1)
        if self.with_rpn:
            (image,), (scale,) = images, scales
            true = np.flatnonzero(image["gt_classes"])
            boxes = np.asarray(image["boxes"], np.float32)[true] * scale
            truths = np.hstack([boxes, np.asarray(image["gt_classes"])[true, None]])
            self.write_tops(top, [data, np.array([[high, wide, scale]]), truths])
        else:
            parts = [self.sample(image) for image in images]
            for k, (part, scale) in enumerate(zip(parts, scales, strict=True)):
                part[0] = np.hstack([np.full((len(part[0]), 1), k), part[0] * scale])
            self.write_tops(
                top, [data, *(np.concatenate(same) for same in zip(*parts, strict=True))]
            )

    def next_image(self) -> Image:
        """Return the next image of the epoch; DataError if there are none."""
        image = next(self.order, None)
        if image is None:
            if not self.images:
                if not self.with_rpn:
                    raise DataError(
                        "RoIDataLayer without gt_boxes needs proposed boxes: call its set_roidb"
                    )
                self.images = self.read_images()
            self.order = (self.images[k] for k in self.device.rng.permutation(len(self.images)))
            image = next(self.order)
        return image

    def read_images(self) -> list[Image]:
        """Return the images of `voc`, each twice with use_flipped.

        ConfigError for another number of classes, DataError if no image has an object.
        """
        settings = self.settings
        if len(settings["classes"]) != settings["num_classes"] - 1:
            raise ConfigError(
                f"param_str: {len(settings['classes'])} classes and the background are not "
                f"num_classes {settings['num_classes']}; give 'classes': [names]"
            )
        found = read_voc(settings["voc"], settings["image_set"], settings["classes"])
        if not found:
            place = os.path.join(settings["voc"], settings["image_set"])
            raise DataError(f"{place}: no image has an object")
        return found + [mirrored(image) for image in found if settings["use_flipped"]]

    def read(self, image: Image) -> tuple[Array, float]:
        """Return the pixels (h, w, 3), less the means, and their scale; DataError if unreadable."""
        import cv2

        pixels = cv2.imread(image["image"])
        if pixels is None:
            raise DataError(f"{image['image']}: cannot be read as an image")
        pixels = pixels.astype(np.float32) - np.reshape(self.settings["pixel_means"], 3)
        if image["flipped"]:
            pixels = pixels[:, ::-1]
        short, long = sorted(pixels.shape[:2])
        scale = self.device.rng.choice(self.settings["scales"]) / short
        if round(scale * long) > self.settings["max_size"]:
            scale = self.settings["max_size"] / long
        resized = cv2.resize(
            np.ascontiguousarray(pixels), None, fx=scale, fy=scale, interpolation=cv2.INTER_LINEAR
        )
        return resized, scale

    def sample(self, image: Image) -> list[Array]:
        """Return drawn boxes (R, 4), labels (R), targets, inside and outside weights (R, 4K)."""
        settings, most = self.settings, np.asarray(image["max_overlaps"])
        batch = settings["batch_size"] // self.count
        objects = np.flatnonzero(most >= settings["fg_thresh"])
        objects = self.choose(objects, round(settings["fg_fraction"] * batch))
        others = (most < settings["bg_thresh_hi"]) & (most >= settings["bg_thresh_lo"])
        others = self.choose(np.flatnonzero(others), batch - len(objects))
        rows = np.append(objects, others)
        labels = np.asarray(image["max_classes"], np.float32)[rows]
        labels[len(objects) :] = 0
        given = np.asarray(image["bbox_targets"], np.float32)[rows]
        targets, inner = np.zeros((2, len(rows), self.kinds, 4), np.float32)
        of = np.flatnonzero(given[:, 0] > 0)
        kinds = np.minimum(given[of, 0].astype(int), self.kinds - 1)
        targets[of, kinds] = given[of, 1:]
        inner[of, kinds] = settings["bbox_inside_weights"]
        flat = (len(rows), 4 * self.kinds)
        inner = inner.reshape(flat)
        boxes = np.asarray(image["boxes"], np.float32)[rows]
        return [boxes, labels.reshape(-1, 1, 1, 1), targets.reshape(flat), inner, inner > 0]

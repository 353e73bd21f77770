"""Detections of a single-shot detector, and which of them are true (Liu et al. 2016, SSD)."""

from collections.abc import Callable
from math import prod

import numpy as np

from caffepy.core import coco
from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.detection_files import (
    NOT_SAVED,
    Images,
    ResultFiles,
    to_pixels,
    warn_of_unread,
)
from caffepy.ops.boxes import BoxCode

COLUMNS = 7
"""Of a detection: image, class, score, xmin, ymin, xmax, ymax."""


MORE_PRIORS = (
    "; a PriorBox lacks an aspect_ratio, min_size or max_size, or is that of FaceBoxes, which "
    "makes more priors: then write faceboxes: true; for that of TextBoxes denser_prior_boxes: true"
)


def count_priors(bottom: Blobs, classes: int, groups: int) -> int:
    """Return the number of priors of bottom 2; ConfigError unless bottoms 0 and 1 have as many
    locations, in `groups` groups, and scores.
    """
    locations, scores, priors = bottom[:3]
    n, count = (
        locations.shape[locations.axis(0)],
        priors.shape[2] // 4 if len(priors.shape) > 2 else 0,
    )
    if priors.shape[:3] != (1, 2, 4 * count) or priors.count != 8 * count:
        raise ConfigError(
            "bottom 2 must be priors (1, 2, P * 4), as PriorBox layers make them and a Concat "
            f"with axis: 2 joins them, not {list(priors.shape)}"
        )
    for what, blob, each in (("locations", locations, 4 * groups), ("scores", scores, classes)):
        if blob.count != n * count * each:
            of, rest = divmod(blob.count, n * count or blob.count + 1)
            remedy = (
                f"the convolutions that predict them need a num_output of {each} x the boxes that "
                "the PriorBox layer of their map makes at a place"
            )
            if what == "scores" and not rest:
                remedy = f"these are of {of} classes, but num_classes is {classes}: change one"
            elif what == "locations" and blob.count > n * count * each:
                remedy += MORE_PRIORS
            raise ConfigError(
                f"{n} images with {count} priors need {n} x {count * each} {what}, not "
                f"{list(blob.shape)}; {remedy}"
            )
    return count


def check_refinement(bottom: Blobs, first: int, n: int, count: int) -> None:
    """ConfigError unless the bottoms from `first` on, if they are there, are RefineDet's scores and
    locations of the priors of n images.
    """
    for (k, blob), each in zip(enumerate(bottom[first:], start=first), (2, 4), strict=False):
        if blob.count != n * count * each:
            raise ConfigError(
                f"bottom {k} must be RefineDet's {'scores' if each == 2 else 'locations'} of "
                f"{count} priors of {n} images, {n * count * each} numbers, not {list(blob.shape)}"
            )


def no_class(label: float, classes: int, background: int) -> DataError:
    """Return the error for a true box of the background or of no class."""
    return DataError(
        f"a true box has class {label:g}; num_classes {classes} has 0 to {classes - 1}, of which "
        f"{background} is the background: give as many classes as the label map of the data has, "
        "or mend its labels"
    )


@layer("DetectionOutput")
class DetectionOutput(Layer):
    """Rows (1, 1, D, 7) = image, class, score, xmin, ymin, xmax, ymax, by images, then classes, the
    best first; of a batch in which nothing is found a row of image, -1, -1, ... for each image.

    Bottoms: locations (N, P * L * 4), L = 1 or with share_location false the number of classes K;
    scores (N, P * K), as they are; P priors (1, 2, P * 4); perhaps an image, which is not read. Or
    RefineDet's then: scores (N, P * 2) of priors, whose second one must be objectness_score or more
    for a box to have any class but 0, and locations (N, P * 4), which move the priors of an image
    first (Zhang et al. 2018). Of each class but the background the top_k boxes with a score above
    confidence_threshold are taken in turn unless they overlap a better one by more than
    nms_threshold; of an image keep_top_k stay.

    With save_output_param what is found is written to files as well, see `ResultFiles`. The host
    reads how many there are, so a step is not captured.
    """

    on_gpu = always_reshape = stops_gradient = True
    bottoms = (3, None)
    files: ResultFiles | None = None
    started = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.detection_output_param
        self.classes = param.num_classes
        if self.classes < 1:
            raise ConfigError("detection_output_param needs num_classes, the background included")
        nms = param.nms_param
        if nms.soft_nms:
            raise ConfigError("nms_param: soft_nms, a field of deepdetect, is not supported")
        if nms.nms_threshold < 0 or not 0 < nms.eta <= 1:
            raise ConfigError(
                "detection_output_param: nms_threshold must be 0 or more and eta above 0, at most "
                f"1, not {nms.nms_threshold:g} and {nms.eta:g}"
            )
        self.code = BoxCode(param.code_type, not param.variance_encoded_in_target)
        given = param.HasField("confidence_threshold")
        lowest = float(np.finfo(np.float32).min)
        self.least = param.confidence_threshold if given else lowest
        saved = param.save_output_param
        if saved.output_directory and saved.label_map_file and saved.name_size_file:
            labels = [c for c in range(self.classes) if c != param.background_label_id]
            self.files = ResultFiles(saved, labels, self.path)
        else:
            warn_of_unread(saved.label_map_file, self.path, NOT_SAVED)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        groups = 1 if self.settings.share_location else self.classes
        count, n = count_priors(bottom, self.classes, groups), bottom[0].shape[0]
        top_k = self.settings.nms_param.top_k
        limited = self.settings.nms_param.HasField("top_k") and top_k > -1
        most = min(top_k, count) if limited else count
        self.view = (n, count, groups)
        self.boxes = self.buffer((n, groups, count, 4))
        self.found = self.buffer((n, self.classes, most, 5))
        self.refines = len(bottom) > 4, len(bottom) > 3 and bottom[3].shape == (n, 2 * count)
        if any(self.refines):
            check_refinement(bottom, 3, n, count)
            self.moved, self.own = self.buffer((n, 1, count, 4)), self.buffer((2, count, 4))
            self.scores = self.buffer((n, count, self.classes))
        self.counts = self.buffer((n, self.classes), np.int32)
        if not self.started:
            top[0].reshape((1, 1, max(1, self.settings.keep_top_k), COLUMNS))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        n, count, groups = self.view
        locations = bottom[0].data.reshape(n, count, groups, 4)
        scores = bottom[1].data.reshape(n, count, self.classes)
        priors = bottom[2].data.reshape(2, count, 4)
        if any(self.refines):
            scores = self.likely(scores, bottom[3].data.reshape(n, count, 2))
        if self.refines[0]:
            self.decode_moved(locations, bottom[4].data.reshape(n, count, 1, 4), priors)
        else:
            self.ops.decode_boxes(locations, priors, self.code, self.boxes.data)
        param, nms = self.settings, self.settings.nms_param
        boxes, found, counts = self.boxes.data, self.found.data, self.counts.data
        given = boxes, scores, param.background_label_id, self.least
        self.ops.detect(*given, nms.nms_threshold, nms.eta, found, counts)
        rows = self.rows(self.device.on_host(found), self.device.on_host(counts))
        self.started = True
        if self.files and self.device.writes_files:
            self.files.add([rows[(rows[:, 0] == i) & (rows[:, 1] >= 0)] for i in range(n)])
        top[0].reshape((1, 1, len(rows), COLUMNS))
        self.device.upload(rows.astype(self.dtype), top[0].data.reshape(rows.shape))

    def likely(self, scores: Array, of_priors: Array) -> Array:
        """Return the scores, but 1 for class 0 and 0 for others where a prior holds no object."""
        result = self.scores.data
        result.fill(0)
        result[..., 0] = 1
        least = np.float32(self.settings.objectness_score)
        result[...] = np.where(of_priors[..., 1:] >= least, scores, result)
        return result

    def decode_moved(self, locations: Array, moves: Array, priors: Array) -> None:
        """Write the boxes of locations (N, P, L, 4) from priors that moves (N, P, 1, 4) moved."""
        moved, own, boxes = self.moved.data, self.own.data, self.boxes.data
        self.ops.decode_boxes(moves, priors, self.code, moved)
        own[1] = priors[1]
        for i in range(len(moved)):
            own[0] = moved[i, 0]
            self.ops.decode_boxes(locations[i : i + 1], own, self.code, boxes[i : i + 1])

    def rows(self, found: Array, counts: Array) -> Array:
        """Return the rows (D, 7) of what was found."""
        images, labels, places = np.nonzero(np.arange(found.shape[2]) < counts[:, :, None])
        rows = np.column_stack([images, labels, found[images, labels, places]])
        if (most := self.settings.keep_top_k) > -1:
            order = np.lexsort((-rows[:, 2], rows[:, 0]))  # by images, then scores, both stable
            rank = np.arange(len(order)) - np.searchsorted(rows[order, 0], rows[order, 0])
            rows = rows[np.sort(order[rank < most])]
        if not len(rows):
            rows = np.full((len(found), COLUMNS), -1.0)
            rows[:, 0] = np.arange(len(found))
        return rows


def overlaps(box: Array, others: Array, unit: float) -> Array:
    """Return the intersection over union of a box with others (T, 4), with sides x2 - x1 + unit."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    sides = high - low + unit
    both = np.where(np.all(high > low, axis=1), np.prod(sides, axis=1), 0)
    union = area(box, unit) + area(others, unit) - both
    share: Array = np.divide(both, union, out=np.zeros_like(both), where=union > 0)
    return share


def area(boxes: Array, unit: float) -> Array:
    """Return the areas of boxes (..., 4), 0 where the ends are the wrong way round."""
    sides = boxes[..., 2:] - boxes[..., :2]
    size: Array = np.where(np.all(sides >= 0, axis=-1), np.prod(sides + unit, axis=-1), 0)
    return size


@layer("DetectionEvaluate")
class DetectionEvaluate(Layer):
    """Rows (1, 1, K - 1 + D, 5): for each class but the background -1, class, number of true boxes,
    -1, -1; then for each detection image, class, score, whether it is true, whether it is false.

    Bottoms: detections (1, 1, D, 7) of DetectionOutput, and true boxes (1, 1, G, 8) = image, class,
    instance, box, difficult, up to the first of image -1. A detection is true if the true box of
    its class that it overlaps most, by overlap_threshold or more, is no other's before, in the
    order of scores; neither true nor false if that is difficult and evaluate_difficult_gt is false.
    Detections of image -1 but not of class -1 become rows of zeros at the end, as in SSD.

    With a third bottom, heights and widths (N, 2) of the images as the net saw them, detections (D,
    7, 1, 1) are those of FrcnnOutput, true boxes (G, 8, 1, 1) those of EvalData, in its pixels
    (Cascade R-CNN); the rows are (R, 5, 1, 1).
    """

    always_reshape = stops_gradient = True
    bottoms = (2, 3)
    images: Images | None = None
    _sizes: Images | None = None
    coco_rows: Array | None = None
    """Of the last batch, see `core.coco`, once `keep_coco_rows` was called."""

    def keep_coco_rows(self, images: Callable[[], int] | None) -> None:
        """Also make the rows that COCO's figures are made of, from now on.

        `images` returns the number of images of a batch; None: up to the last with a box. With it
        and a name_size_file boxes have sizes.
        """
        self.coco_rows = np.zeros((0, coco.COLUMNS))
        self._images_of_batch = images
        sized = images and self.images
        self._sizes = Images(self.settings.name_size_file, self.path) if sized else None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.detection_evaluate_param
        if param.num_classes < 1:
            raise ConfigError("detection_evaluate_param needs num_classes, the background included")
        if param.name_size_file:
            self.images = Images(param.name_size_file, self.path)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        of_cascade = len(bottom) > 2
        for blob, columns, what in ((bottom[0], COLUMNS, "D"), (bottom[1], 8, "G")):
            count = -1 if len(blob.shape) < 2 else blob.shape[0 if of_cascade else -2]
            given = blob.shape[1:2] if of_cascade else blob.shape[-1:]
            if given != (columns,) or blob.count != columns * count:
                wanted = f"{what}, {columns}"
                wanted = f"{wanted}, 1, 1" if of_cascade else f"1, 1, {wanted}"
                raise ConfigError(f"DetectionEvaluate needs ({wanted}), not {list(blob.shape)}")
        if of_cascade and bottom[2].count != 2 * prod(bottom[2].shape[:1]):
            raise ConfigError(f"DetectionEvaluate needs sizes (N, 2), not {list(bottom[2].shape)}")
        self.shape_top(top, self.settings.num_classes - 1 + bottom[0].count // COLUMNS, of_cascade)

    def shape_top(self, top: Blobs, rows: int, of_cascade: bool) -> None:
        top[0].reshape((rows, 5, 1, 1) if of_cascade else (1, 1, rows, 5))

    def rows(self, bottom: Blobs) -> tuple[Array, Array]:
        """Return detections (D, 7) and true boxes (G, 8) in SSD's form."""
        found, truths = bottom[0].data.reshape(-1, COLUMNS), bottom[1].data.reshape(-1, 8)
        if len(bottom) == 2:
            ends = np.flatnonzero(truths[:, 0] < 0)
            return found, truths[: ends[0] if len(ends) else None]
        sizes, truths = bottom[2].data.reshape(-1, 2), truths[truths[:, 0] >= 0]
        found = found[found[:, 0] >= 0]
        images = [rows[:, 0].astype(np.int64) for rows in (found, truths)]
        last = max(int(numbers.max(initial=-1)) for numbers in images)
        if last >= len(sizes):
            raise DataError(f"a box of image {last}, but there are sizes of {len(sizes)}")
        scale = np.tile(sizes[:, ::-1], 2)  # width, height, width, height
        ours, theirs = (
            rows[:, 1:5] / scale[numbers]
            for rows, numbers in zip((found, truths), images, strict=True)
        )
        instance = np.zeros(len(truths))
        return (
            np.column_stack([images[0], found[:, 5:], ours]),
            np.column_stack([images[1], truths[:, 5], instance, theirs, truths[:, 7]]),
        )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings
        found, truths = self.rows(bottom)
        self.check_labels(truths[:, 1])
        of_none = np.sum((found[:, 0] < 0) & (found[:, 1] != -1))
        found = found[found[:, 0] >= 0]
        counted = truths if param.evaluate_difficult_gt else truths[truths[:, 7] == 0]
        labels = [c for c in range(param.num_classes) if c != param.background_label_id]
        heads = [[-1, c, np.sum(counted[:, 1] == c), -1, -1] for c in labels]
        rows = [np.reshape(heads, (-1, 5)).astype(np.float64)]
        for image in np.unique(found[:, 0]):
            size = self.images.take()[1:] if self.images else None
            of_image, known = found[found[:, 0] == image], truths[truths[:, 0] == image]
            for label in np.unique(of_image[of_image[:, 1] >= 0, 1]):
                own = of_image[of_image[:, 1] == label]
                rows.append(self.judge(own, known[known[:, 1] == label], size))
        if self.coco_rows is not None:
            self.coco_rows = self.match_as_coco(found, truths)
        all_rows = np.concatenate([*rows, np.zeros((of_none, 5))])
        self.shape_top(top, len(all_rows), len(bottom) > 2)
        top[0].data.reshape(all_rows.shape)[...] = all_rows

    def check_labels(self, labels: Array) -> None:
        """DataError for a true box of the background or of no class."""
        param = self.settings
        known = (labels >= 0) & (labels < param.num_classes)
        if len(wrong := labels[~(known & (labels != param.background_label_id))]):
            raise no_class(wrong[0], param.num_classes, param.background_label_id)

    def match_as_coco(self, found: Array, truths: Array) -> Array:
        """Return COCO's rows of a batch; difficult boxes are crowds, as SSD writes COCO's."""
        last = max((int(np.max(rows[:, 0])) for rows in (found, truths) if len(rows)), default=-1)
        count = self._images_of_batch() if self._images_of_batch else last + 1
        param = self.settings
        labels = [c for c in range(param.num_classes) if c != param.background_label_id]
        rows = [np.zeros((0, coco.COLUMNS))]
        for image in range(max(count, last + 1)):
            size = self._sizes.take()[1:] if self._sizes else None
            ours, theirs = found[found[:, 0] == image], truths[truths[:, 0] == image]
            corners = [boxes.astype(np.float64) for boxes in (ours[:, 3:], theirs[:, 3:7])]
            if size:
                resize = param.resize_param if param.HasField("resize_param") else None
                corners = [to_pixels(boxes, size, resize) for boxes in corners]
            scored = np.column_stack([ours[:, 2], corners[0]])
            for label in labels:
                own, known = ours[:, 1] == label, theirs[:, 1] == label
                if own.any() or known.any():
                    crowd = theirs[known, 7] != 0
                    rows.append(
                        coco.match(label, scored[own], corners[1][known], crowd, bool(size))
                    )
        return np.concatenate(rows)

    def judge(self, found: Array, truths: Array, size: tuple[float, float] | None) -> Array:
        """Return the rows of the detections of an image and class; `size` is (height, width) of the
        image, if boxes are compared in its pixels.
        """
        param, rows = self.settings, np.zeros((len(found), 5))
        if len(truths):
            found = found[np.argsort(-found[:, 2], kind="stable")]
        rows[:, :3] = found[:, :3]
        ours, theirs = found[:, 3:], truths[:, 3:7]
        if size:
            resize = param.resize_param if param.HasField("resize_param") else None
            ours, theirs = (to_pixels(boxes, size, resize) for boxes in (ours, theirs))
        taken = np.zeros(len(truths), bool)
        for row, box in zip(rows, ours, strict=True):
            shares = overlaps(box, theirs, float(size is not None))
            best = int(np.argmax(shares)) if len(shares) else -1
            if best < 0 or shares[best] < param.overlap_threshold:
                row[4] = 1
            elif param.evaluate_difficult_gt or not truths[best, 7]:
                row[3], row[4] = not taken[best], taken[best]
                taken[best] = True
        return rows

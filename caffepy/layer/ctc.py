"""Connectionist temporal classification: the losses of forks for sequences whose labels have no
places, CTCLoss, WarpCTCLoss and CtcLoss; and CTCGreedyDecoder, which reads labels from scores.

Scores are (T, N, C), time first; a last axis of 1 may follow. The loss is the mean over N of -log
of the probability that the labels come in their order, blanks and repetitions between them, under
the softmax of the scores (Graves et al. 2006).
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, LossLayer, layer

log = logging.getLogger(__name__)

NO_LABELS = "{type} cannot differentiate its labels; the layer that makes them needs no gradient"


class SequenceLoss(LossLayer):
    """Base: `sequences` returns the steps and labels of each item."""

    constant_bottoms: Mapping[int, str] = {1: NO_LABELS, 2: NO_LABELS, 3: NO_LABELS}
    backward_reads_top = False
    merge, collapse, delay = True, False, 0
    blank: int
    classes: int

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        log.info(
            "%s: its gradient is that of the sum over the sequences, not of the mean that it shows,"
            " as in the fork",
            self.type,
        )
        self.no_class = self.error_flag(
            lambda label: DataError(
                f"label {label:g} is not one of the {self.classes} classes 0 to {self.classes - 1}"
                f" without the blank, {self.blank}"
            )
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, labels = bottom[0].shape, bottom[-1].shape
        if len(x) < 3 or bottom[0].count != x[0] * x[1] * x[2]:
            raise ConfigError(f"{self.type} needs scores (T, N, C), not {list(x)}")
        self.times, self.items, self.classes = x[:3]
        axis = 0 if len(bottom) == 2 else 1
        if len(labels) <= axis or labels[axis] != self.items or bottom[0].count == 0:
            wanted = ["(N, L)", "(L, N)"][axis]
            raise ConfigError(
                f"{self.type} needs labels {wanted} for scores (T, N, C) of shape {list(x)}, not "
                f"{list(labels)}"
            )
        self.choose_blank()
        if not 0 <= self.blank < self.classes:
            raise ConfigError(f"the blank {self.blank} is not one of {self.classes} classes")
        longest = bottom[-1].count // self.items
        top[0].reshape(())
        self.labels = self.buffer((self.items, longest), np.int32)
        self.steps = self.buffer((self.items,), np.int32)
        self.ways = self.buffer((self.items, 2 * longest + 1), np.int32)
        self.sizes = self.buffer((self.items,), np.int32)
        self.normalizers = self.buffer((self.times, self.items), np.float64)
        self.states = self.buffer((self.items, self.times + 2, 2 * longest + 1), np.float64)
        self.losses = self.buffer((self.items,))
        self.places = self.buffer((longest, 1), np.int64)
        self.places.host_data[...] = np.arange(longest)[:, None]

    def choose_blank(self) -> None:
        """Set `blank`, the class that stands for none, once the number of classes is known."""
        raise NotImplementedError

    def sequences(self, bottom: Blobs) -> tuple[Array, Array]:
        """Return labels (L, N) and which of them count; write `steps`, how many each item has."""
        raise NotImplementedError

    def all_but_blanks(self, bottom: Blobs) -> tuple[Array, Array]:
        """`sequences` of labels (N, L) in which blanks say nothing, at all times."""
        self.steps.data.fill(self.times)
        labels = bottom[1].data.reshape(self.items, -1).T
        return labels, labels != self.blank

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        labels, counts = self.sequences(bottom)
        if self.collapse:
            counts[1:] &= labels[1:] != labels[:-1]
        bad = counts & ((labels < 0) | (labels >= self.classes) | (labels == self.blank))
        self.no_class.set_where(bad, labels)
        self.no_class.check()
        self.labels.data[...] = np.where(counts & ~bad, labels, -1).T
        x = bottom[0].data.reshape(self.times, self.items, self.classes)
        self.ops.ctc_forward(
            x,
            self.steps.data,
            self.labels.data,
            self.blank,
            self.merge,
            self.delay,
            self.ways.data,
            self.sizes.data,
            self.normalizers.data,
            self.states.data,
            self.losses.data,
        )
        np.sum(self.losses.data, out=top[0].data)
        np.divide(top[0].data, self.items, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight * (softmax - probability that a path has the class at that time), not divided
        by N, as in the forks; 0 for items whose labels need more time than there is.
        """
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            shape = self.times, self.items, self.classes
            x, dx = (array.reshape(shape) for array in (bottom[0].data, bottom[0].diff))
            self.ops.ctc_backward(
                x,
                self.steps.data,
                self.delay,
                self.ways.data,
                self.sizes.data,
                self.normalizers.data,
                self.states.data,
                top[0].diff,
                dx,
            )


@layer("CTCLoss", "WarpCTCLoss")
class CTCLoss(SequenceLoss):
    """The loss of Wick's fork; WarpCTCLoss is the same computed by Baidu's library there.

    Bottoms: scores, indicators (T, N) that are 0 where a sequence begins, labels (L, N) that end
    before the first negative one; or scores, numbers of steps and of labels (N,), labels (L, N).
    WarpCTCLoss also takes scores and labels (N, L), of which blanks say nothing.

    The blank is blank_index, by default the last class; WarpCTCLoss' is 0 by default, and three
    bottoms then have labels that count without it. Items without labels, or with more than their
    steps can have, count with a loss of 0.
    """

    bottoms = (2, 4)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.ctc_loss_param
        self.is_warp = self.type == "WarpCTCLoss"
        if not self.is_warp:
            if len(bottom) == 2:
                raise ConfigError("CTCLoss takes 3 or 4 bottoms, not 2")
            self.merge, self.collapse = (
                param.ctc_merge_repeated,
                param.preprocess_collapse_repeated,
            )
            if param.output_delay < 0:
                raise ConfigError("ctc_loss_param: output_delay must be 0 or more")
            self.delay = param.output_delay
        self.no_step = self.error_flag(
            lambda steps: DataError(f"a sequence has {steps:g} steps, but there are {self.times}")
        )

    def choose_blank(self) -> None:
        given = self.param.ctc_loss_param.blank_index
        self.blank = given if given >= 0 else 0 if self.is_warp else self.classes - 1

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        wanted = {3: [self.times * self.items], 4: [self.items] * 2}.get(len(bottom), [])
        for i, count in enumerate(wanted, 1):
            if bottom[i].count != count:
                raise ConfigError(
                    f"bottom {i} has shape {list(bottom[i].shape)}, {count} numbers are needed"
                )

    def sequences(self, bottom: Blobs) -> tuple[Array, Array]:
        if len(bottom) == 2:
            return self.all_but_blanks(bottom)
        labels = np.floor(bottom[-1].data.reshape(-1, self.items) + 0.5)
        if len(bottom) == 4:
            steps, counts = (b.data.reshape(self.items) for b in bottom[1:3])
            self.no_step.set_where((steps < 0) | (steps > self.times), steps)
            self.no_step.check()
            self.steps.data[...] = np.clip(steps, 0, self.times)
            return labels, self.places.data < counts
        over = labels < 0
        counts = np.where(np.any(over, axis=0), np.argmax(over, axis=0), len(labels))
        begins = bottom[1].data.reshape(self.times, self.items) < 0.5
        begins[0] = False  # where the next sequence begins, the first one has ended
        steps = np.where(np.any(begins, axis=0), np.argmax(begins, axis=0), self.times)
        self.steps.data[...] = np.where(counts == 0, 0, steps)
        if self.is_warp and self.param.ctc_loss_param.blank_index < 0:
            labels = labels + 1
        return labels, self.places.data < counts


@layer("CtcLoss")
class CtcLoss(SequenceLoss):
    """The loss of crnn.caffe and warpctc-caffe: bottoms scores (T, N, alphabet_size) and labels
    (N, L), of which those equal to blank_label say nothing; the first time_step steps count.
    """

    def choose_blank(self) -> None:
        param = self.param.ctc_loss_param
        self.blank = param.blank_label
        if param.alphabet_size != self.classes:
            raise ConfigError(
                f"ctc_loss_param: alphabet_size is {param.alphabet_size}, the scores have "
                f"{self.classes} classes"
            )
        if not 0 < param.time_step <= self.times:
            raise ConfigError(
                f"ctc_loss_param: time_step must be 1 to {self.times}, not {param.time_step}"
            )

    def sequences(self, bottom: Blobs) -> tuple[Array, Array]:
        found = self.all_but_blanks(bottom)
        self.steps.data.fill(self.param.ctc_loss_param.time_step)
        return found


@layer("CTCGreedyDecoder")
class CTCGreedyDecoder(Layer):
    """The labels (N, T, 1, 1) that the likeliest class of each step says, without blanks and
    repetitions, -1 behind the last (Wick's fork). Bottoms: scores (T, N, C), indicators (T, N) that
    are 0 where a sequence begins, and perhaps labels (L, N) that end before the first negative one.

    Further tops: the sum of the negative scores (N, 1, 1, 1), and with labels, as the last one, the
    accuracy: the mean of 1 - edit distance / length of the longer sequence. It runs on the host.

    Without indicators (caffe_ocr) each sequence has all steps: with the scores alone the top has
    the labels, with labels (N, L) as the second bottom it is (1, 2, 1, 1), the accuracy, of labels
    without blanks, and the share of sequences that are right.
    """

    bottoms = (1, 3)
    tops = (1, 3)
    stops_gradient = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(top) > len(bottom) or (len(bottom) == 1 and len(top) > 1):
            raise ConfigError("CTCGreedyDecoder gives an accuracy only if it gets labels")
        self.measures = len(bottom) == 3 and len(top) > 1
        self.scores = len(top) - self.measures > 1

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x = bottom[0].shape
        if len(x) < 3 or bottom[0].count != x[0] * x[1] * x[2] or not bottom[0].count:
            raise ConfigError(f"CTCGreedyDecoder needs scores (T, N, C), not {list(x)}")
        self.times, self.items, self.classes = x[:3]
        given = self.param.ctc_decoder_param.blank_index
        self.blank = self.classes - 1 if given < 0 else given
        steps = self.times, self.items
        self.indicated = len(bottom) > 2 or (len(bottom) == 2 and bottom[1].shape[:2] == steps)
        self.judges = len(bottom) == 2 and not self.indicated and bottom[1].shape[:1] == steps[1:]
        if self.judges:
            if len(top) > 1:
                raise ConfigError("CTCGreedyDecoder with labels as bottom 1 gives one top")
            top[0].reshape((1, 2, 1, 1))
            return
        if len(bottom) > 1 and bottom[1].count != self.times * self.items:
            raise ConfigError(
                f"bottom 1 has shape {list(bottom[1].shape)}, "
                f"{self.times * self.items} numbers are needed"
            )
        if len(bottom) > 2 and bottom[2].shape[1:2] != (self.items,):
            raise ConfigError(f"labels (L, {self.items}) are needed, not {list(bottom[2].shape)}")
        top[0].reshape((self.items, self.times, 1, 1))
        if self.scores:
            top[1].reshape((self.items, 1, 1, 1))
        if self.measures:
            top[-1].reshape((1, 1, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        shape = self.times, self.items
        x = bottom[0].data.reshape(*shape, self.classes)
        best, most = x.argmax(axis=2), x.max(axis=2)
        inside = np.ones(shape, np.bool_)
        if self.indicated:
            begins = bottom[1].data.reshape(shape) == 0
            begins[0] = False
            inside = begins.cumsum(axis=0) == 0
        says = inside & (best != self.blank)
        if self.param.ctc_decoder_param.ctc_merge_repeated:
            says[1:] &= best[1:] != best[:-1]
        read = [best[says[:, n], n] for n in range(self.items)]
        if self.judges:
            self.write_accuracy(read, bottom[1].data.reshape(self.items, -1), top[0].data)
            return
        top[0].data.fill(-1)
        for labels, sequence in zip(top[0].data, read, strict=True):
            labels[: len(sequence), 0, 0] = sequence
        if self.scores:
            top[1].data[...] = -np.where(inside, most, 0).sum(axis=0).reshape(-1, 1, 1, 1)
        if self.measures:
            errors = 0.0
            for sequence, column in zip(
                read, bottom[2].data.reshape(-1, self.items).T, strict=True
            ):
                over = np.flatnonzero(column < 0)
                truth = np.floor((column[: over[0]] if len(over) else column) + 0.5)
                longer = max(len(truth), len(sequence), 1)
                errors += edit_distance(truth, sequence) / longer
            top[-1].data.fill(1 - errors / self.items)

    def write_accuracy(self, read: Sequence[Array], rows: Array, y: Array) -> None:
        """Write the mean accuracy and the share of right sequences, of labels (N, L)."""
        errors, right = 0.0, 0
        for sequence, row in zip(read, rows, strict=True):
            over = np.flatnonzero(row < 0)
            truth = np.floor((row[: over[0]] if len(over) else row) + 0.5)
            truth = truth[truth != self.blank]
            longer = max(len(truth), len(sequence))
            if longer:  # the fork counts none of two empty ones as right
                wrong = edit_distance(truth, sequence)
                errors += wrong / longer
                right += wrong == 0
        y[0, :, 0, 0] = 1 - errors / self.items, right / self.items

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Write zeros: there is no gradient."""
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                blob.diff.fill(0)


@layer("LabelsequenceAccuracy")
class LabelsequenceAccuracy(Layer):
    """Scores (N, T, C), labels (N, L) -> the share of items whose labels, without the blank, are
    what the likeliest class of each step says, without blanks and repetitions (crnn.caffe).
    """

    on_gpu = True
    bottoms = 2
    stops_gradient = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, labels = bottom[0].shape, bottom[1].shape
        fits = len(x) >= 3 and bottom[0].count == x[0] * x[1] * x[2] and bottom[0].count
        if not fits or labels[:1] != x[:1] or len(labels) < 2:
            raise ConfigError(
                f"LabelsequenceAccuracy needs scores (N, T, C) and labels (N, L), not {list(x)} "
                f"and {list(labels)}"
            )
        self.view = x[:3]
        top[0].reshape(())

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        blank = self.param.labelsequence_accuracy_param.blank_label
        best = bottom[0].data.reshape(self.view).argmax(axis=2)
        labels = bottom[1].data.reshape(self.view[0], -1)
        says, counts = best != blank, labels != blank
        says[:, 1:] &= best[:, 1:] != best[:, :-1]
        same_place = says.cumsum(axis=1)[:, :, None] == counts.cumsum(axis=1)[:, None]
        meet = same_place & says[:, :, None] & counts[:, None]  # (N, T, L)
        differ = meet & (best[:, :, None] != np.trunc(labels)[:, None])
        right = (says.sum(axis=1) == counts.sum(axis=1)) & ~differ.any(axis=(1, 2))
        np.mean(right.astype(self.dtype), out=top[0].data)


def edit_distance(a: Array, b: Array) -> int:
    """Return how many labels are to be put in, left out or changed to make b (n,) of a (m,)."""
    places = np.arange(len(b) + 1)
    distances = places
    for i, label in enumerate(a, 1):
        changed = distances[:-1] + (b != label)
        nearer = np.concatenate([[i], np.minimum(changed, distances[1:] + 1)])
        distances = np.minimum.accumulate(nearer - places) + places
    return int(distances[-1])

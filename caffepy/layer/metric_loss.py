"""Losses of Caffe's forks on embeddings: L1, triplets, pairs of a batch, distance to the centre of
a class.

They are array arithmetic, the same on the CPU and a GPU; nothing is read back.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, LossLayer, layer
from caffepy.layer.flow import FlowL1Loss
from caffepy.layer.loss import EuclideanLoss, bad_labels, items

MOST_KERNELS = 1000  # of MMDLoss
FEW = -1e30
"""The logarithm of a sum without terms."""


@layer("L1Loss")
class L1Loss(EuclideanLoss):
    """Sum of |a - b| / N over two bottoms of one count; both can be differentiated (NVCaffe).

    With an l1_loss_param, or with one bottom, it is FlowNet's: see FlowL1Loss.
    """

    bottoms = (1, 2)
    of_flownet: FlowL1Loss | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if self.param.HasField("l1_loss_param") or len(bottom) == 1:
            how = self.param, self.phase, self.device, self.dtype, self.path
            self.of_flownet = FlowL1Loss(*how)
            self.of_flownet.setup(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self.of_flownet:
            self.of_flownet.reshape(bottom, top)
        else:
            super().reshape(bottom, top)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.of_flownet:
            self.of_flownet.forward(bottom, top)
            return
        difference, loss = self.difference.data, top[0].data
        np.subtract(bottom[0].data, bottom[1].data.reshape(difference.shape), out=difference)
        np.sum(np.abs(difference), out=loss)
        np.divide(loss, self.items, out=loss)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight / N * sign(a - b), db = -da."""
        if self.of_flownet:
            self.of_flownet.backward(top, propagate_down, bottom)
            return
        for b, wanted, sign in zip(bottom, propagate_down, (1, -1), strict=True):
            if wanted:
                dx = b.diff.reshape(self.difference.shape)
                factor = top[0].diff * (sign / self.items)
                np.multiply(np.sign(self.difference.data), factor, out=dx)


@layer("TripletLoss")
class TripletLoss(LossLayer):
    """Sum of max(0, margin + |a - p|^2 - |a - n|^2) / 2N (happynear's).

    Bottoms: anchors a, positives p and negatives n, (N, C) each.
    """

    bottoms = 3
    constant_bottoms: Mapping[int, str] = {}

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        for i, b in enumerate(bottom):
            if b.shape != shape:
                raise ConfigError(
                    f"bottom {i} has shape {list(b.shape)}, bottom 0 has {list(shape)}"
                )
        self.view = (items(bottom[0]), prod(shape[1:]))
        self.items = max(1, self.view[0])
        self.active = self.buffer((self.view[0], 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, p, n = (b.data.reshape(self.view) for b in bottom)
        hinge = self.param.triplet_loss_param.margin + np.sum((a - p) ** 2 - (a - n) ** 2, axis=1)
        hinge = np.maximum(hinge, 0)
        np.greater(hinge, 1e-9, out=self.active.data[:, 0], casting="unsafe")
        np.sum(hinge, out=top[0].data)
        np.divide(top[0].data, 2 * self.items, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Times weight / N where the hinge is not 0: da = n - p, dp = p - a, dn = a - n."""
        a, p, n = (b.data.reshape(self.view) for b in bottom)
        factor = self.active.data * (top[0].diff / self.items)
        pairs = ((n, p), (p, a), (a, n))
        for b, wanted, (plus, minus) in zip(bottom, propagate_down, pairs, strict=True):
            if wanted:
                np.multiply(plus - minus, factor, out=b.diff.reshape(self.view))


@layer("LiftedStructSimilaritySoftmaxLoss")
class LiftedStructSimilaritySoftmaxLoss(LossLayer):
    """Sum of max(0, J_ij)^2 / 2P over the P pairs i < j of one label (Song et al. 2016).

    Embeddings x (N, ...), labels (N). J_ij = D_ij + log(sum of exp(margin - D_ik) + sum of
    exp(margin - D_jk)), over the k of another label; D are Euclidean distances. The loss is 0 where
    the fork divides by nothing: no pair is of one label, or all are. Of two equal items of one
    label the distance has no gradient, where the fork's is not finite.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n = items(bottom[0])
        if bottom[1].count != n:
            raise ConfigError(f"{n} items need as many labels, not {bottom[1].count}")
        self.view = n, bottom[0].count // max(n, 1)
        self.distance, self.slope, self.later = (self.buffer((n, n)) for _ in range(3))
        self.later.host_data[...] = np.triu(np.ones((n, n)), 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        margin = self.param.lifted_struct_sim_softmax_loss_param.margin
        x, d = bottom[0].data.reshape(self.view), self.distance.data
        if not d.size:
            top[0].data[...] = 0
            return
        self.ops.distances(x, x, d, True)
        np.sqrt(d, out=d)
        labels = bottom[1].data.reshape(-1)
        alike = labels[:, None] == labels
        # Where a label has no others their sum is 0 and its logarithm FEW: no pair of it counts.
        most = np.max(np.where(alike, FEW, margin - d), axis=1, keepdims=True)
        away = np.where(alike, 0, np.exp(np.where(alike, 0, margin - d - most)))
        sums = np.maximum(away.sum(axis=1, keepdims=True), 1)  # its largest term is 1
        logs = most + np.log(sums)
        both = np.logaddexp(logs, logs.T)  # (N, N)
        pairs = alike & (self.later.data > 0)
        hinge = np.where(pairs, np.maximum(d + both, 0), 0)
        hinge_of_pairs = hinge / np.sqrt(np.maximum(pairs.sum(), 1))
        np.sum(hinge_of_pairs * hinge_of_pairs, out=top[0].data)
        np.multiply(top[0].data, 0.5, out=top[0].data)
        hinge = hinge / np.maximum(pairs.sum(), 1)
        own = ((hinge + hinge.T) * np.exp(logs - both)).sum(axis=1, keepdims=True)
        slope = hinge - away / sums * own  # d loss / d D_ik, of row i
        np.divide(slope + slope.T, np.where(d > 0, d, 1), out=self.slope.data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx_i = weight * sum over k of slope_ik (x_i - x_k) / D_ik."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            x, dx = (a.reshape(self.view) for a in (bottom[0].data, bottom[0].diff))
            slope = self.slope.data
            self.ops.matmul(slope, x, dx)  # (N, N) @ (N, K)
            np.subtract(slope.sum(axis=1, keepdims=True) * x, dx, out=dx)
            np.multiply(dx, top[0].diff, out=dx)


@layer("MMDLoss")
class MMDLoss(LossLayer):
    """How unlike source items (N, ...) and target items (M, ...) are distributed: the sum over
    max(N, M) draws and the kernels of k(s, s') + k(t, t') - k(s, t') - k(s', t), with two different
    items s, s' and t, t' of each (Xlearn: Long et al. 2015, Gretton et al. 2012).

    k(a, b) = exp(-g |a - b|^2), g = gamma * kernel_mul^(i - kernel_num / 2) of kernel i, gamma 1
    over the mean square of a distance in the batch, or with fix_gamma in the first one. The
    gradient is that of the mean of the draws, gamma being a number, as there; here it is of the
    draws of the loss, there of draws of its own. It is 0 for one item of a kind. The host computes.
    """

    on_gpu = False
    constant_bottoms: Mapping[int, str] = {}
    backward_reads_top = False
    first_gamma: float | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.mmd_param
        if not 0 < param.kernel_mul < np.inf:
            raise ConfigError(f"mmd_param: kernel_mul must be above 0, not {param.kernel_mul:g}")
        if param.kernel_num > MOST_KERNELS:
            raise ConfigError(
                f"mmd_param: kernel_num must be {MOST_KERNELS} or less, not {param.kernel_num}"
            )
        self.draws = 0
        self.pairs: list[tuple[Array, Array, float]] = []  # two items of each draw, and its sign

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        sizes = [(items(b), b.count // max(items(b), 1)) for b in bottom]
        if sizes[0][1] != sizes[1][1]:
            raise ConfigError(f"items of {sizes[0][1]} and of {sizes[1][1]} numbers")
        self.views = sizes
        top[0].reshape(())

    def state(self) -> dict[str, Any]:
        fixed = self.first_gamma is not None and self.param.mmd_param.fix_gamma
        return {"gamma": self.first_gamma} if fixed else {}

    def set_state(self, state: dict[str, Any]) -> None:
        self.first_gamma = state.get("gamma")

    def kernels(self, squares: Array) -> tuple[Array, Array]:
        """Return the sum of all kernels of these squares of distances, and its slope."""
        param = self.param.mmd_param
        gammas = self.gamma * float(param.kernel_mul) ** (
            np.arange(param.kernel_num) - param.kernel_num // 2
        )
        values = np.exp(-np.multiply.outer(gammas, squares))
        return values.sum(axis=0), -np.tensordot(gammas, values, 1)

    def drawn(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Return two items of `count`, not the same, for each draw."""
        one, other = (rng.integers(count, size=self.draws) for _ in range(2))
        return one, np.where(one == other, (other + 1) % count, other)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        source, target = (b.data.reshape(v) for b, v in zip(bottom, self.views, strict=True))
        both = np.concatenate([source, target]).astype(np.float64)
        n, m = len(source), len(target)
        self.draws = max(n, m)
        self.pairs = []
        top[0].data[...] = 0
        if min(n, m) < 2:
            return
        lengths = (both * both).sum(axis=1)
        total = 2 * len(both) * lengths.sum() - 2 * (both.sum(axis=0) ** 2).sum()
        self.gamma = len(both) * (len(both) - 1) / max(total, 1e-30)
        if self.param.mmd_param.fix_gamma:
            self.first_gamma = self.gamma = self.first_gamma or self.gamma
        rng = np.random.default_rng(self.device.draw_seed())
        (s, other), (t, last) = self.drawn(rng, n), self.drawn(rng, m)
        self.pairs = [
            (s, other, 1),
            (n + t, n + last, 1),
            (s, n + last, -1),
            (other, n + t, -1),
        ]
        for a, b, sign in self.pairs:
            values, _ = self.kernels(((both[a] - both[b]) ** 2).sum(axis=1))
            top[0].data[...] += sign * values.sum()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight / draws * sign * 2 k' (a - b) for each pair, db = -da."""
        source, target = (b.data.reshape(v) for b, v in zip(bottom, self.views, strict=True))
        both = np.concatenate([source, target]).astype(np.float64)
        gradient = np.zeros_like(both)
        factor = float(top[0].diff) / max(self.draws, 1)
        for a, b, sign in self.pairs:
            apart = both[a] - both[b]
            _, slope = self.kernels((apart**2).sum(axis=1))
            change = (2 * factor * sign * slope)[:, None] * apart
            np.add.at(gradient, a, change)
            np.subtract.at(gradient, b, change)
        parts = np.split(gradient, [len(source)])
        for blob, wanted, part in zip(bottom, propagate_down, parts, strict=True):
            if wanted:
                blob.diff[...] = part.reshape(blob.shape)


@layer("CenterLoss")
class CenterLoss(LossLayer):
    """Sum of |x - c_y|^2 / 2N; x (N, K), labels y (N), centres c (num_output, K) (Wen et al. 2016).

    The centres' gradient is the authors', for a step towards the mean of the class: it is not
    multiplied by the loss weight, which is 0 unless the prototxt gives one.
    """

    @property
    def default_weight(self) -> float:
        return 0

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.center_loss_param
        self.wrong = bad_labels(self, lambda: param.num_output)
        if param.num_output < 1:
            raise ConfigError("center_loss_param: num_output must be 1 or more")
        size = prod(bottom[0].shape[bottom[0].axis(param.axis) :])
        self.make_params({"centers": (param.num_output, size)}, [param.center_filler])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        x, labels = bottom
        axis = x.axis(self.param.center_loss_param.axis)
        self.view = (prod(x.shape[:axis]), prod(x.shape[axis:]))
        n, size = self.view
        if size != self.blobs[0].shape[1]:
            raise ConfigError(f"{size} features do not fit centres of {self.blobs[0].shape[1]}")
        if labels.count != n:
            raise ConfigError(f"{n} items need as many labels, not {labels.count}")
        self.items = max(1, n)
        self.difference = self.buffer(self.view)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        difference, labels = self.difference.data, bottom[1].data.reshape(-1)
        self.ops.take_rows(self.blobs[0].data, labels, True, difference, self.wrong.found)
        self.wrong.check()
        np.subtract(bottom[0].data.reshape(self.view), difference, out=difference)
        np.sum(difference * difference, out=top[0].data)
        np.divide(top[0].data, 2 * self.items, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight / N * (x - c_y), dc_k += sum over y = k of (c_k - x) / (1 + their number)."""
        self.refuse_constants(propagate_down)
        difference = self.difference.data
        if self.param_propagate_down[0]:
            labels = bottom[1].data.reshape(-1)
            alike = 1 + np.sum(labels[:, None] == labels, axis=1, keepdims=True)
            step = difference / -alike.astype(difference.dtype)
            self.ops.add_rows(step, labels, self.blobs[0].diff)
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(self.view)
            np.multiply(difference, top[0].diff / self.items, out=dx)

"""Products, biases and distances."""

from collections.abc import Sequence
from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.protocol.types import Maybe, Seed


class ProductsOps(Protocol):
    def matmul(
        self, a: Array, b: Array, out: Array, accumulate: bool = False, scale: float = 1.0
    ) -> None:
        """out = scale * a @ b, or out += scale * a @ b; (M, K) @ (K, N) -> (M, N).

        Transposed views are allowed. On a GPU a and b have one type, out has theirs or float32;
        sums are float32, or float64 for doubles.
        """

    def inner_product(
        self, x: Array, w: Array, narrow: Maybe, b: Maybe, relu: bool, y: Array
    ) -> None:
        """y = x @ w + b, at least 0 with `relu`; (M, K) @ (K, N) -> (M, N).

        If x has another type than w, `narrow`, like w, becomes w in that. w and narrow are arrays
        or transposed views of them.
        """

    def add_bias(self, y: Array, b: Array) -> None:
        """y[n, o, ...] += b[o]; y (M, O) or (N, O, P)."""

    def bias_gradient(self, dy: Array, db: Array, copy: Maybe = None) -> None:
        """db[o] += sum of dy[n, o, ...]; dy (M, O) or (N, O, P).

        If dy has rows (M, O), `copy` receives dy in its own element type.
        """

    def relu_bias_backward(self, y: Maybe, dy: Array, db: Maybe) -> None:
        """dy *= (y > 0) in place unless y is None; then db[o] += sum of dy[n, o, ...] unless db is
        None. y and dy (M, O) or (N, O, P).
        """

    def cut_relu_backward(
        self,
        dys: Sequence[Array],
        ys: Sequence[Array],
        dxs: Sequence[Array],
        dbs: Sequence[Maybe],
    ) -> None:
        """dx_i = part i of the sum of dys, which is cut as ys lie side by side along axis 1, where
        y_i > 0, else 0; then db_i[o] += sum of dx_i[n, o, ...] unless db_i is None. dys[0] may
        change.
        """

    def bias_act_forward(
        self,
        y: Array,
        b: Maybe,
        relu: bool,
        ratio: float,
        seed: Seed,
        mask: Maybe,
        step_counter: Maybe = None,
    ) -> None:
        """y = dropout(relu(y + b)) in place for y (M, O); a step that is None or False is left out.

        ratio, seed, mask and step_counter are those of `dropout_forward`.
        """

    def bias_act_backward(
        self, y: Array, dy: Array, db: Maybe, relu: bool, mask: Maybe, ratio: float
    ) -> None:
        """dy *= mask / (1 - ratio) * (y > 0) in place for y, dy (M, O); db += its column sums."""

    # Distances of rows: x, dx (M, K), w (N, K), y, dy (M, N)

    def distances(self, x: Array, w: Array, y: Array, squared: bool) -> None:
        """y[m, n] = sum over k of (x[m, k] - w[n, k])^2, or of |x[m, k] - w[n, k]|."""

    def distance_gradients(
        self, dy: Array, x: Array, w: Array, dx: Array, squared: bool, accumulate: bool
    ) -> None:
        """Write dx, or add to it: sum over n of dy[m, n] 2 (x[m, k] - w[n, k]), or of dy[m, n]
        sign(x[m, k] - w[n, k]). dy may be a transposed view.
        """

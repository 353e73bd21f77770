// Distances of the rows of x (M, K) from those of w (N, K): y[m, n] = sum over k of (x[m, k] - w[n, k])^2, or of
// |x[m, k] - w[n, k]|.

#include "pack.cuh"

template <typename T>
__global__ void distances(const T* x, const T* w, T* y, i64 rows, i64 others, i64 length, i64 squared) {
  FOR_EACH(k, rows * others) {
    const T *a = x + k / others * length, *b = w + k % others * length;
    Wide<T> sum = 0;
    for (i64 i = 0; i < length; ++i) {
      const Wide<T> gap = Wide<T>(a[i]) - Wide<T>(b[i]);
      sum += squared ? gap * gap : gap < 0 ? -gap : gap;
    }
    y[k] = T(sum);
  }
}

// dx[m, k] = sum over n of dy[m, n] times the slope of the distance by x[m, k]; dy[m, n] lies at m down + n across.
template <typename T>
__global__ void distance_gradients(const T* dy, const T* x, const T* w, T* dx, i64 rows, i64 others, i64 length, i64 down,
                                   i64 across, i64 squared, i64 accumulate) {
  FOR_EACH(k, rows * length) {
    const T* given = dy + k / length * down;
    const Wide<T> value = x[k];
    Wide<T> sum = 0;
    for (i64 n = 0; n < others; ++n) {
      const Wide<T> gap = value - Wide<T>(w[n * length + k % length]);
      sum += Wide<T>(given[n * across]) * (squared ? 2 * gap : gap > 0 ? Wide<T>(1) : gap < 0 ? Wide<T>(-1) : gap);
    }
    dx[k] = T(accumulate ? Wide<T>(dx[k]) + sum : sum);
  }
}

// Local connections: a convolution with weights (O, C * side * side, rows * columns) of its own at each output position.
// Each result is one thread's sum, in a fixed order.

#include "pack.cuh"

#define SIZES                                                                                                     \
  i64 images, i64 channels, i64 h, i64 w_, i64 outputs, i64 rows, i64 columns, i64 side, i64 stride, i64 pad

// y[n, o, r, q] = sum of x[n, c, r * stride + i - pad, q * stride + j - pad] * w[o, (c, i, j), (r, q)]
template <typename T> __global__ void local_forward(const T* x, const T* w, T* y, SIZES) {
  const i64 positions = rows * columns, inputs = channels * side * side;
  FOR_EACH(at, images * outputs * positions) {
    const i64 q = at % columns, r = at / columns % rows, o = at / positions % outputs, n = at / positions / outputs;
    Wide<T> sum = 0;
    for (i64 k = 0; k < inputs; ++k) {
      const i64 a = r * stride + k / side % side - pad, b = q * stride + k % side - pad;
      if (a < 0 || a >= h || b < 0 || b >= w_) continue;
      const T value = x[((n * channels + k / side / side) * h + a) * w_ + b];
      sum += Wide<T>(value) * Wide<T>(w[(o * inputs + k) * positions + r * columns + q]);
    }
    y[at] = T(sum);
  }
}

// dx[n, c, a, b] = the sum over o, i, j and the positions that read it.
template <typename T> __global__ void local_backward_data(const T* dy, const T* w, T* dx, SIZES) {
  const i64 positions = rows * columns, inputs = channels * side * side;
  FOR_EACH(at, images * channels * h * w_) {
    const i64 b = at % w_, a = at / w_ % h, c = at / w_ / h % channels, n = at / w_ / h / channels;
    Wide<T> sum = 0;
    for (i64 i = 0; i < side; ++i) {
      const i64 down = a + pad - i;
      if (down < 0 || down % stride || down / stride >= rows) continue;
      for (i64 j = 0; j < side; ++j) {
        const i64 across = b + pad - j;
        if (across < 0 || across % stride || across / stride >= columns) continue;
        const i64 p = down / stride * columns + across / stride, k = (c * side + i) * side + j;
        for (i64 o = 0; o < outputs; ++o)
          sum += Wide<T>(dy[(n * outputs + o) * positions + p]) * Wide<T>(w[(o * inputs + k) * positions + p]);
      }
    }
    dx[at] = T(sum);
  }
}

// dw[o, (c, i, j), (r, q)] += the sum over n.
template <typename T> __global__ void local_backward_weight(const T* dy, const T* x, T* dw, SIZES) {
  const i64 positions = rows * columns, inputs = channels * side * side;
  FOR_EACH(at, outputs * inputs * positions) {
    const i64 q = at % columns, r = at / columns % rows, k = at / positions % inputs, o = at / positions / inputs;
    const i64 a = r * stride + k / side % side - pad, b = q * stride + k % side - pad;
    if (a < 0 || a >= h || b < 0 || b >= w_) continue;
    Wide<T> sum = 0;
    for (i64 n = 0; n < images; ++n) {
      const T value = x[((n * channels + k / side / side) * h + a) * w_ + b];
      sum += Wide<T>(dy[(n * outputs + o) * positions + r * columns + q]) * Wide<T>(value);
    }
    dw[at] = T(Wide<T>(dw[at]) + sum);
  }
}

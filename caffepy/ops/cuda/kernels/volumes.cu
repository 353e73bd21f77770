// Pooling over length, height and width of volumes. In backward each element sums what the windows that it lies in give
// back, in the order of the windows.

#include "pack.cuh"

// An axis of the windows: window i has the elements `first(i)` to `behind(i)` - 1, and `count(i)` with its zeros of the
// padding.
struct Axis {
  i64 size, out, kernel, stride, pad;
  __device__ i64 first(i64 i) const { return max(i * stride - pad, i64(0)); }
  __device__ i64 behind(i64 i) const { return min(i * stride - pad + kernel, size); }
  __device__ i64 count(i64 i) const { return min(kernel, size + 2 * pad - i * stride); }
  // The windows that element a lies in: first_of(a) to behind_of(a) - 1.
  __device__ i64 first_of(i64 a) const { return a + pad < kernel ? 0 : (a + pad - kernel) / stride + 1; }
  __device__ i64 behind_of(i64 a) const { return min((a + pad) / stride + 1, out); }
};

#define SIZES                                                                                                        \
  i64 planes, i64 length, i64 h, i64 w, i64 out_l, i64 out_h, i64 out_w, i64 kl, i64 kh, i64 kw, i64 sl, i64 sh,     \
      i64 sw, i64 pl, i64 ph, i64 pw
#define AXES const Axis along = {length, out_l, kl, sl, pl}, down = {h, out_h, kh, sh, ph}, right = {w, out_w, kw, sw, pw}

__device__ i64 elements(const Axis& along, const Axis& down, const Axis& right, i64 i, i64 j, i64 k) {
  return max(along.count(i) * down.count(j) * right.count(k), i64(1));
}

// f(index) for the elements of window (i, j, k) of the plane that begins at `base`.
template <typename F>
__device__ void each_element(const Axis& along, const Axis& down, const Axis& right, i64 i, i64 j, i64 k, i64 base, F f) {
  for (i64 a = along.first(i); a < along.behind(i); ++a)
    for (i64 b = down.first(j); b < down.behind(j); ++b)
      for (i64 c = right.first(k); c < right.behind(k); ++c) f(base + (a * down.size + b) * right.size + c);
}

template <typename T> __global__ void max_pool_volumes_forward(const T* x, T* y, double least, SIZES) {
  AXES;
  FOR_EACH(at, planes * out_l * out_h * out_w) {
    const i64 k = at % out_w, j = at / out_w % out_h, i = at / out_w / out_h % out_l;
    const i64 base = at / out_w / out_h / out_l * length * h * w;
    Wide<T> best = Wide<T>(least);
    each_element(along, down, right, i, j, k, base, [&](i64 e) {
      const Wide<T> value = x[e];
      if (value > best) best = value;
    });
    y[at] = T(best);
  }
}

template <typename T> __global__ void ave_pool_volumes_forward(const T* x, T* y, SIZES) {
  AXES;
  FOR_EACH(at, planes * out_l * out_h * out_w) {
    const i64 k = at % out_w, j = at / out_w % out_h, i = at / out_w / out_h % out_l;
    const i64 base = at / out_w / out_h / out_l * length * h * w;
    Wide<T> sum = 0;
    each_element(along, down, right, i, j, k, base, [&](i64 e) { sum += Wide<T>(x[e]); });
    y[at] = T(sum / Wide<T>(elements(along, down, right, i, j, k)));
  }
}

// f(index, i, j, k) for the windows that element (a, b, c) of a plane lies in.
template <typename F>
__device__ void each_window(const Axis& along, const Axis& down, const Axis& right, i64 a, i64 b, i64 c, i64 plane, F f) {
  for (i64 i = along.first_of(a); i < along.behind_of(a); ++i)
    for (i64 j = down.first_of(b); j < down.behind_of(b); ++j)
      for (i64 k = right.first_of(c); k < right.behind_of(c); ++k)
        f(((plane * along.out + i) * down.out + j) * right.out + k, i, j, k);
}

template <typename T> __global__ void max_pool_volumes_backward(const T* x, const T* y, const T* dy, T* dx, SIZES) {
  AXES;
  FOR_EACH(at, planes * length * h * w) {
    const i64 c = at % w, b = at / w % h, a = at / w / h % length, plane = at / w / h / length;
    const Wide<T> value = x[at];
    Wide<T> sum = 0;
    each_window(along, down, right, a, b, c, plane, [&](i64 e, i64, i64, i64) {
      if (Wide<T>(y[e]) == value) sum += Wide<T>(dy[e]);
    });
    dx[at] = T(sum);
  }
}

template <typename T> __global__ void ave_pool_volumes_backward(const T* dy, T* dx, SIZES) {
  AXES;
  FOR_EACH(at, planes * length * h * w) {
    const i64 c = at % w, b = at / w % h, a = at / w / h % length, plane = at / w / h / length;
    Wide<T> sum = 0;
    each_window(along, down, right, a, b, c, plane, [&](i64 e, i64 i, i64 j, i64 k) {
      sum += Wide<T>(dy[e]) / Wide<T>(elements(along, down, right, i, j, k));
    });
    dx[at] = T(sum);
  }
}

// Columns of one image, for convolutions that cuDNN has no plan for. Three spatial axes; missing ones have size 1.

#include "pack.cuh"

struct Axis {
  int size, kernel, stride, pad, dilation, out;
};

#define AXIS(a) int a##_size, int a##_kernel, int a##_stride, int a##_pad, int a##_dilation, int a##_out
#define AXIS_OF(a) {a##_size, a##_kernel, a##_stride, a##_pad, a##_dilation, a##_out}

// col[c, tap, p] = x[c, p * stride - pad + tap * dilation], 0 outside
template <typename T> __global__ void im2col(const T* x, T* col, int channels, AXIS(a), AXIS(b), AXIS(c)) {
  const Axis a = AXIS_OF(a), b = AXIS_OF(b), c = AXIS_OF(c);
  const int positions = a.out * b.out * c.out, taps = a.kernel * b.kernel * c.kernel;
  const i64 size = i64(channels) * taps * positions;
  FOR_EACH(i, size) {
    const int p = int(i % positions), tap = int(i / positions % taps);
    const i64 channel = i / positions / taps;
    const int u = p / (b.out * c.out) * a.stride - a.pad + tap / (b.kernel * c.kernel) * a.dilation;
    const int v = p / c.out % b.out * b.stride - b.pad + tap / c.kernel % b.kernel * b.dilation;
    const int w = p % c.out * c.stride - c.pad + tap % c.kernel * c.dilation;
    const bool inside = u >= 0 && u < a.size && v >= 0 && v < b.size && w >= 0 && w < c.size;
    col[i] = inside ? x[((channel * a.size + u) * b.size + v) * c.size + w] : T(0);
  }
}

// The position that reads element i of an axis with a tap, or -1.
__device__ inline int position(const Axis& a, int i, int tap) {
  const int at = i + a.pad - tap * a.dilation;
  if (at < 0 || at % a.stride != 0) return -1;
  const int p = at / a.stride;
  return p < a.out ? p : -1;
}

// x[c, i] = sum over the taps and positions that read it of col[c, tap, p]
template <typename T> __global__ void col2im(const T* col, T* x, int channels, AXIS(a), AXIS(b), AXIS(c)) {
  const Axis a = AXIS_OF(a), b = AXIS_OF(b), c = AXIS_OF(c);
  const int positions = a.out * b.out * c.out, taps = a.kernel * b.kernel * c.kernel;
  const i64 size = i64(channels) * a.size * b.size * c.size;
  FOR_EACH(i, size) {
    const int w = int(i % c.size), v = int(i / c.size % b.size), u = int(i / c.size / b.size % a.size);
    const i64 channel = i / c.size / b.size / a.size;
    Wide<T> sum = 0;
    for (int e = 0; e < a.kernel; ++e) {
      const int p = position(a, u, e);
      if (p < 0) continue;
      for (int f = 0; f < b.kernel; ++f) {
        const int q = position(b, v, f);
        if (q < 0) continue;
        for (int g = 0; g < c.kernel; ++g) {
          const int r = position(c, w, g);
          if (r < 0) continue;
          const int tap = (e * b.kernel + f) * c.kernel + g;
          sum += col[(channel * taps + tap) * positions + (i64(p) * b.out + q) * c.out + r];
        }
      }
    }
    x[i] = T(sum);
  }
}

// Optical flow. Correlation: a, b (N, C, H, W) with their padding, y (N, P O, Ho, Wo):
//   y[n, (p, o), r, q] = mean over c and the window (i, j) of a[r s + row + i, q s + column + j] times
//                        b[r s + row + (p + top) step + i, q s + column + (o + left) step + j]; or of |a - b|.
// In backward each element looks for the outputs that read it, so that sums have one order.

#include "pack.cuh"
#include "fixed_point.cuh"

constexpr int CHUNK = 7;  // displacements of a thread, which share what it reads of a

template <typename T>
__global__ void correlate(const T* a, const T* b, T* y, i64 images, i64 channels, i64 h, i64 w, i64 ho, i64 wo,
                          i64 size, i64 stride, i64 step, i64 rows, i64 columns, i64 top, i64 left, i64 row, i64 column,
                          i64 differ) {
  const i64 chunks = (columns + CHUNK - 1) / CHUNK;
  FOR_EACH(k, images * rows * chunks * ho * wo) {
    const i64 q = k % wo, r = k / wo % ho, chunk = k / wo / ho % chunks;
    const i64 p = k / wo / ho / chunks % rows, n = k / wo / ho / chunks / rows;
    const i64 first = chunk * CHUNK, upper = r * stride + row, begin = q * stride + column;
    const i64 lower = upper + (p + top) * step;
    const int count = int(columns - first < CHUNK ? columns - first : CHUNK);
    Wide<T> sums[CHUNK] = {};
    for (i64 c = 0; c < channels; ++c) {
      const i64 plane = (n * channels + c) * h;
      for (i64 i = 0; i < size; ++i)
        for (i64 j = 0; j < size; ++j) {
          const Wide<T> u = a[(plane + upper + i) * w + begin + j];
          const T* v = b + (plane + lower + i) * w + begin + (first + left) * step + j;
#pragma unroll
          for (int o = 0; o < CHUNK; ++o) {
            if (o >= count) break;
            const Wide<T> other = v[o * step];
            sums[o] += differ ? (u > other ? u - other : other - u) : u * other;
          }
        }
    }
    const Wide<T> share = Wide<T>(1) / Wide<T>(size * size * channels);
#pragma unroll
    for (int o = 0; o < CHUNK; ++o)
      if (o < count) y[(((n * rows + p) * columns + first + o) * ho + r) * wo + q] = T(sums[o] * share);
  }
}

// dx of the first map (sign 1), or with the maps changed over that of the second one (sign -1).
template <typename T>
__global__ void correlate_back(const T* x, const T* other, const T* dy, T* dx, i64 images, i64 channels, i64 h, i64 w,
                               i64 ho, i64 wo, i64 size, i64 stride, i64 step, i64 rows, i64 columns, i64 top, i64 left,
                               i64 row, i64 column, i64 differ, i64 sign) {
  FOR_EACH(k, images * channels * h * w) {
    const i64 b = k % w, a = k / w % h, plane = k / w / h, n = plane / channels;
    Wide<T> sum = 0;
    for (i64 p = 0; p < rows; ++p)
      for (i64 o = 0; o < columns; ++o) {
        const i64 down = (p + top) * step, right = (o + left) * step;
        // where the other map was read together with this element
        const i64 there = a + sign * down, beside = b + sign * right;
        if (there < 0 || there >= h || beside < 0 || beside >= w) continue;
        const Wide<T> v = other[(plane * h + there) * w + beside];
        const Wide<T> slope = !differ ? v : (sign > 0 ? Wide<T>(x[k]) >= v : v < Wide<T>(x[k])) ? 1 : -1;
        const T* d = dy + ((n * rows + p) * columns + o) * ho * wo;
        const i64 upper = a - row - (sign < 0 ? down : 0), begin = b - column - (sign < 0 ? right : 0);
        for (i64 i = 0; i < size; ++i) {
          const i64 r = (upper - i) / stride;
          if (upper < i || r * stride != upper - i || r >= ho) continue;
          for (i64 j = 0; j < size; ++j) {
            const i64 q = (begin - j) / stride;
            if (begin < j || q * stride != begin - j || q >= wo) continue;
            sum += Wide<T>(d[r * wo + q]) * slope;
          }
        }
      }
    dx[k] = T(sum / Wide<T>(size * size * channels));
  }
}

// Where a flow (N, 2, H, W) leads from column j and row i: the four elements around, and the shares of the second ones.
template <typename T> struct Target {
  i64 left, right, top, bottom;
  Wide<T> s, t;
  bool inside;
  __device__ Target(const T* flow, i64 n, i64 i, i64 j, i64 h, i64 w) {
    const Wide<T> across = Wide<T>(flow[(2 * n * h + i) * w + j]) + j;
    const Wide<T> down = Wide<T>(flow[((2 * n + 1) * h + i) * w + j]) + i;
    inside = across >= 0 && down >= 0 && across < w && down < h;
    if (!inside) return;
    left = i64(across);
    top = i64(down);
    right = min(left + 1, w - 1);
    bottom = min(top + 1, h - 1);
    s = across - left;
    t = down - top;
  }
};

// y = x at the places where the flow leads, bilinear; `fill` outside
template <typename T>
__global__ void warp(const T* x, const T* flow, T* y, i64 images, i64 channels, i64 h, i64 w, double fill) {
  FOR_EACH(k, images * h * w) {
    const i64 j = k % w, i = k / w % h, n = k / w / h;
    const Target<T> to(flow, n, i, j, h, w);
    for (i64 c = 0; c < channels; ++c) {
      const T* u = x + (n * channels + c) * h * w;
      T& out = y[((n * channels + c) * h + i) * w + j];
      if (!to.inside) {
        out = T(fill);
        continue;
      }
      const Wide<T> upper = (1 - to.s) * Wide<T>(u[to.top * w + to.left]) + to.s * Wide<T>(u[to.top * w + to.right]);
      const Wide<T> lower =
          (1 - to.s) * Wide<T>(u[to.bottom * w + to.left]) + to.s * Wide<T>(u[to.bottom * w + to.right]);
      out = T((1 - to.t) * upper + to.t * lower);
    }
  }
}

// dflow, and the sums of dx in whole numbers, whose order does not matter
template <typename T>
__global__ void warp_back(const T* x, const T* flow, const T* dy, T* dflow, unsigned long long* sums,
                          const double* largest, i64 images, i64 channels, i64 h, i64 w) {
  const double unit = fixed_unit(largest);
  FOR_EACH(k, images * h * w) {
    const i64 j = k % w, i = k / w % h, n = k / w / h;
    const Target<T> to(flow, n, i, j, h, w);
    Wide<T> across = 0, down = 0;
    for (i64 c = 0; to.inside && c < channels; ++c) {
      const i64 plane = (n * channels + c) * h;
      const i64 tl = (plane + to.top) * w + to.left, tr = (plane + to.top) * w + to.right;
      const i64 bl = (plane + to.bottom) * w + to.left, br = (plane + to.bottom) * w + to.right;
      const Wide<T> d = dy[(plane + i) * w + j], s = to.s, t = to.t;
      add(sums + tl, unit * d * (1 - s) * (1 - t));
      add(sums + tr, unit * d * s * (1 - t));
      add(sums + bl, unit * d * (1 - s) * t);
      add(sums + br, unit * d * s * t);
      const Wide<T> a = x[tl], b = x[tr], e = x[bl], f = x[br];
      across += d * ((1 - t) * (b - a) + t * (f - e));
      down += d * ((1 - s) * (e - a) + s * (f - b));
    }
    dflow[(2 * n * h + i) * w + j] = T(across);
    dflow[((2 * n + 1) * h + i) * w + j] = T(down);
  }
}

// y[i, j] = sum of down[i, a] across[j, b] x[rows[i] + a, columns[j] + b] / sum of the weights; with `skip` without the
// NaNs, and NaN where they weigh more than half of the others
template <typename T>
__global__ void resample(const T* x, T* y, const int* rows, const T* down, const int* columns, const T* across, i64 h,
                         i64 w, i64 planes, i64 ho, i64 wo, i64 high, i64 wide, i64 skip) {
  FOR_EACH(k, planes * ho * wo) {
    const i64 j = k % wo, i = k / wo % ho, p = k / wo / ho;
    Wide<T> total = 0, weight = 0, missing = 0;
    for (i64 a = 0; a < high; ++a)
      for (i64 b = 0; b < wide; ++b) {
        const Wide<T> value = x[(p * h + rows[i] + a) * w + columns[j] + b];
        const Wide<T> share = Wide<T>(down[i * high + a]) * Wide<T>(across[j * wide + b]);
        if (skip && value != value) {
          missing += share;
        } else {
          total += share * value;
          weight += share;
        }
      }
    const Wide<T> none = skip && missing > weight / 2 ? Wide<T>(__int_as_float(0x7fffffff)) : Wide<T>(0);
    y[k] = T(none != none || weight == 0 ? none : total / weight);
  }
}

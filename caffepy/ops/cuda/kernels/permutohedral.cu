// Filters on a permutohedral lattice: x, y (channels, points), values of corners (channels, count). Each result is one
// thread's sum, in a fixed order.

#include "pack.cuh"

#define SIZES i64 channels, i64 points, i64 count, i64 ends

// values[c, m] = the sum over the points p of corner m of x[c, p] * weights[p, j]; order[starts[m] ...] has p * ends + j.
template <typename T>
__global__ void splat(const T* x, const int* order, const int* starts, const float* weights, T* values, SIZES) {
  FOR_EACH(at, channels * count) {
    const i64 m = at % count, c = at / count;
    T sum = 0;
    for (int k = starts[m]; k < starts[m + 1]; ++k) sum += T(weights[order[k]]) * x[c * points + order[k] / ends];
    values[at] = sum;
  }
}

// blurred[c, m] = values[c, m] + half of its two neighbours along an axis, 0 where there is none.
template <typename T> __global__ void blur(const T* values, const int* neighbours, T* blurred, SIZES) {
  FOR_EACH(at, channels * count) {
    const i64 m = at % count;
    const T* own = values + at / count * count;
    const int a = neighbours[2 * m], b = neighbours[2 * m + 1];
    blurred[at] = own[m] + ((a >= 0 ? own[a] : T(0)) + (b >= 0 ? own[b] : T(0))) / 2;
  }
}

// y[c, p] = (y[c, p] if add) + the sum over its corners of weights * values / (1 + 2^-(ends - 1)).
template <typename T>
__global__ void slice(const T* values, const int* corners, const float* weights, T* y, SIZES, i64 add) {
  const T scale = T(1) / (T(1) + T(1) / T(i64(1) << (ends - 1)));
  FOR_EACH(at, channels * points) {
    const i64 p = at % points, c = at / points;
    T sum = add ? y[at] : T(0);
    for (i64 j = 0; j < ends; ++j)
      sum += T(weights[p * ends + j]) * scale * values[c * count + corners[p * ends + j]];
    y[at] = sum;
  }
}

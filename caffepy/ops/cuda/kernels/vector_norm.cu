// Vectors across the channels of (outer, C, inner), divided by their norms:
// y = x / n, n = sqrt(sum of x^2 + eps) or sum of |x| + eps;  dx = (dy - s * sum of y * dy) / n + s * dn, s = y or sign(y).
// With LINES a block takes a vector, whose elements follow each other; else a thread does.

#include "pack.cuh"
#include "reduce.cuh"

// The elements of a vector that a thread takes: from `first` in steps, `stride` apart in memory.
template <bool LINES> struct Vector {
  i64 start, stride, channels;
  __device__ Vector(i64 vector, i64 channels, i64 inner)
      : start(vector / inner * channels * inner + vector % inner), stride(inner), channels(channels) {}
  template <typename F> __device__ void each(F f) const {
    for (i64 c = LINES ? threadIdx.x : 0; c < channels; c += LINES ? blockDim.x : 1) f(start + c * stride);
  }
  // The sum of f over the whole vector, for all its threads.
  template <typename A, typename F> __device__ A sum(F f) const {
    A total = 0;
    each([&](i64 at) { total += f(at); });
    return LINES ? block_sum(total) : total;
  }
};

// f(number of the vector, its elements) for the vectors of a thread.
template <bool LINES, typename F> __device__ void vectors(i64 outer, i64 channels, i64 inner, F f) {
  if constexpr (LINES) {
    for (i64 i = blockIdx.x; i < outer; i += gridDim.x) f(i, Vector<LINES>(i, channels, 1));
  } else {
    FOR_EACH(i, outer * inner) f(i, Vector<LINES>(i, channels, inner));
  }
}

template <typename T, bool LINES>
__global__ void normalize_forward(const T* x, T* y, Wide<T>* norm, double eps, i64 absolute, i64 outer, i64 channels,
                                  i64 inner) {
  using A = Wide<T>;
  vectors<LINES>(outer, channels, inner, [=](i64 i, const Vector<LINES>& vector) {
    const A total = A(eps) + vector.template sum<A>([=](i64 at) {
      const A v = A(x[at]);
      return absolute ? abs(v) : v * v;
    });
    const A n = absolute ? total : sqrt(total);
    if (!LINES || threadIdx.x == 0) norm[i] = n;
    vector.each([=](i64 at) { y[at] = T(A(x[at]) / n); });
  });
}

template <typename T, bool LINES>
__global__ void normalize_backward(const T* y, const Wide<T>* norm, const T* dy, const Wide<T>* dnorm, T* dx,
                                   i64 absolute, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  vectors<LINES>(outer, channels, inner, [=](i64 i, const Vector<LINES>& vector) {
    const A n = norm[i];
    const A total = vector.template sum<A>([=](i64 at) { return A(y[at]) * A(dy[at]); }) / n - (dnorm ? dnorm[i] : A(0));
    vector.each([=](i64 at) {
      const A v = A(y[at]);
      const A slope = absolute ? A(v > 0) - A(v < 0) : v;
      dx[at] = T(A(dy[at]) / n - slope * total);
    });
  });
}

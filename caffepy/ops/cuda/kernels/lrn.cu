// Local response normalization across channels of (N, C, P):
// s_c = k + alpha/size * sum of x^2 over the window of c;  y = x * s^-beta;
// dx = dy * s^-beta - 2*alpha*beta/size * x * sum over the window of dy * y / s.
// A thread takes one pixel through a run of channels and keeps the terms of the window of 2*HALF + 1 in registers;
// with HALF 0 it reads them anew for every channel.

#include "pack.cuh"

constexpr int RUN = 16, AHEAD = 4;  // channels of a thread, and those whose elements it loads at a time

template <typename A> __device__ A power(A s, A beta) {
  if (beta != A(0.75)) return pow(s, -beta);
  const A root = rsqrt(s);
  return root * sqrt(root);
}

// Calls f(channel, sum of term over its window) for a run of channels; term(channel) is 0 outside.
template <int HALF, typename A, typename Term, typename F>
__device__ void windows(int lo, int hi, int channels, int half, Term term, F f) {
  if constexpr (HALF == 0) {
    for (int c = lo; c < hi; ++c) {
      A total = 0;
      for (int d = max(0, c - half); d < min(channels, c + half + 1); ++d) total += term(d);
      f(c, total);
    }
  } else {
    constexpr int SIZE = 2 * HALF;  // terms of channels c - HALF .. c + HALF - 1
    A held[SIZE + AHEAD];
#pragma unroll
    for (int i = 0; i < SIZE; ++i) held[i] = lo - HALF + i >= 0 && lo - HALF + i < channels ? term(lo - HALF + i) : A(0);
    for (int c = lo; c < hi; c += AHEAD) {
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) held[SIZE + k] = c + k + HALF < channels ? term(c + k + HALF) : A(0);
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        A total = 0;
#pragma unroll
        for (int i = 0; i <= SIZE; ++i) total += held[k + i];
        if (c + k < hi) f(c + k, total);
      }
#pragma unroll
      for (int i = 0; i < SIZE; ++i) held[i] = held[i + AHEAD];
    }
  }
}

// f(first channel, last + 1, offset of channel 0 of the pixel) for every run of a thread.
template <typename F> __device__ void runs(i64 n, i64 channels, i64 pixels, F f) {
  const i64 count = (channels + RUN - 1) / RUN;
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n * count * pixels; i += gridDim.x * i64(blockDim.x)) {
    const unsigned plane = unsigned(i / pixels), p = unsigned(i - plane * pixels);
    const int image = int(plane / unsigned(count)), lo = int(plane % unsigned(count)) * RUN;
    f(lo, min(lo + RUN, int(channels)), i64(image) * channels * pixels + p);
  }
}

template <typename T, int HALF>
__device__ void forward(const T* __restrict__ x, T* __restrict__ y, T* __restrict__ scale, i64 n, i64 channels,
                        i64 pixels, i64 half, double alpha, double beta, double k) {
  using A = Wide<T>;
  const A a = A(alpha), b = A(beta), first = A(k);
  runs(n, channels, pixels, [=](int lo, int hi, i64 start) {
    auto square = [=](int c) {
      const A v = A(x[start + c * pixels]);
      return v * v;
    };
    auto write = [=](int c, A total) {
      const i64 at = start + c * pixels;
      const A s = first + a * total;
      scale[at] = T(s);
      y[at] = T(A(x[at]) * power(s, b));
    };
    windows<HALF, A>(lo, hi, int(channels), int(half), square, write);
  });
}

template <typename T, int HALF>
__device__ void backward(const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ scale,
                         const T* __restrict__ dy, T* __restrict__ dx, i64 n, i64 channels, i64 pixels, i64 half,
                         double factor, double beta) {
  using A = Wide<T>;
  const A a = A(factor), b = A(beta);
  runs(n, channels, pixels, [=](int lo, int hi, i64 start) {
    auto ratio = [=](int c) {
      const i64 at = start + c * pixels;
      return A(dy[at]) * A(y[at]) / A(scale[at]);
    };
    auto write = [=](int c, A total) {
      const i64 at = start + c * pixels;
      dx[at] = T(A(dy[at]) * power(A(scale[at]), b) - a * A(x[at]) * total);
    };
    windows<HALF, A>(lo, hi, int(channels), int(half), ratio, write);
  });
}

#define FOR_HALF(call)       \
  switch (half) {            \
    case 1: return call(1);  \
    case 2: return call(2);  \
    case 3: return call(3);  \
    case 4: return call(4);  \
    default: return call(0); \
  }

template <typename T>
__global__ void lrn_forward(const T* x, T* y, T* scale, i64 n, i64 channels, i64 pixels, i64 half, double alpha,
                            double beta, double k) {
#define CALL(h) forward<T, h>(x, y, scale, n, channels, pixels, half, alpha, beta, k)
  FOR_HALF(CALL)
#undef CALL
}

template <typename T>
__global__ void lrn_backward(const T* x, const T* y, const T* scale, const T* dy, T* dx, i64 n, i64 channels,
                             i64 pixels, i64 half, double factor, double beta) {
#define CALL(h) backward<T, h>(x, y, scale, dy, dx, n, channels, pixels, half, factor, beta)
  FOR_HALF(CALL)
#undef CALL
}

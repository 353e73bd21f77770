// Activations and their gradients, element by element; the output may be the input, dx may be dy.

#include "pack.cuh"
#include "reduce.cuh"
#include "channels.cuh"

#define PACK (16 / sizeof(T))

// y = x > 0 ? x : slope * x; a slope of 0 gives 0 for -inf too, NaN stays NaN
template <typename T>
__global__ void relu_forward(const T* x, T* y, i64 n, double slope) {
  using A = Wide<T>;
  const A s = A(slope);
  each<PACK>(n, [=](i64, T x, T& y) { y = A(x) <= 0 ? T(s == 0 ? A(0) : A(x) * s) : x; }, in(x), out(y));
}

// dx = dy * (x > 0 ? 1 : slope)
template <typename T>
__global__ void relu_backward(const T* x, const T* dy, T* dx, i64 n, double slope) {
  using A = Wide<T>;
  const A s = A(slope);
  each<PACK>(n, [=](i64, T x, T dy, T& dx) { dx = T(A(dy) * (A(x) <= 0 ? s : A(1))); }, in(x), in(dy), out(dx));
}

// y = x > 0 ? x : slope_c * x
template <typename T>
__global__ void prelu_forward(const T* x, const T* slope, T* y, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  Channel channel(channels, inner);
  each<PACK>(
      outer * channels * inner,
      [=](i64 i, T x, T& y) mutable {
        const A s = A(slope[channel.at(i)]);
        y = A(x) <= 0 ? T(A(x) * s) : x;
      },
      in(x), out(y));
}

// dx = dy * (x > 0 ? 1 : slope_c), where there is a dx; sums of dy * x over x <= 0
template <typename T>
__global__ void __launch_bounds__(256)
prelu_backward(const T* x, const T* dy, const T* slope, T* dx, double* partial, i64 outer, i64 channels, i64 inner,
               i64 splits) {
  using A = Wide<T>;
  channel_sums<PACK>(
      Shape{outer, channels, inner, splits}, partial,
      [=](i64 c, double& first, double&, i64, T x, T dy, T& dx) {
        const bool negative = A(x) <= 0;
        first += double(dy) * (negative ? double(x) : 0.0);
        dx = T(A(dy) * (negative ? A(slope[c]) : A(1)));
      },
      in(x), in(dy), maybe_out(dx));
}

// dslope_c += sum
template <typename T>
__global__ void prelu_finish(const double* partial, T* dslope, i64 channels, i64 splits) {
  finish_channels(partial, channels, splits, [=](i64 c, double sum, double) { dslope[c] = T(double(dslope[c]) + sum); });
}

// y = 1 / (1 + exp(-x)) = tanh(x / 2) / 2 + 1 / 2
template <typename T>
__global__ void sigmoid_forward(const T* x, T* y, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T& y) { y = T(tanh(A(x) * A(0.5)) * A(0.5) + A(0.5)); }, in(x), out(y));
}

// dx = dy * y * (1 - y)
template <typename T>
__global__ void sigmoid_backward(const T* y, const T* dy, T* dx, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T y, T dy, T& dx) { dx = T(A(dy) * (A(y) * (1 - A(y)))); }, in(y), in(dy), out(dx));
}

// y = tanh(x)
template <typename T>
__global__ void tanh_forward(const T* x, T* y, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T& y) { y = T(tanh(A(x))); }, in(x), out(y));
}

// dx = dy * (1 - y^2)
template <typename T>
__global__ void tanh_backward(const T* y, const T* dy, T* dx, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T y, T dy, T& dx) { dx = T(A(dy) * (1 - A(y) * A(y))); }, in(y), in(dy), out(dx));
}

template <typename A> __device__ A raised(A x, A power) {
  if (power == 1) return x;
  if (power == 2) return x * x;
  if (power == A(0.5)) return sqrt(x);
  return pow(x, power);
}

// y = (shift + scale * x)^power
template <typename T>
__global__ void power_forward(const T* x, T* y, i64 n, double power, double scale, double shift) {
  using A = Wide<T>;
  const A p = A(power), s = A(scale), b = A(shift);
  each<PACK>(n, [=](i64, T x, T& y) { y = T(raised(A(x) * s + b, p)); }, in(x), out(y));
}

// dx = dy * power * scale * (shift + scale * x)^(power - 1)
template <typename T>
__global__ void power_backward(const T* x, const T* dy, T* dx, i64 n, double power, double scale, double shift) {
  using A = Wide<T>;
  const A p = A(power - 1), s = A(scale), b = A(shift), factor = A(power * scale);
  each<PACK>(n, [=](i64, T x, T dy, T& dx) { dx = T(A(dy) * (raised(A(x) * s + b, p) * factor)); }, in(x), in(dy), out(dx));
}

// y = x > 0 ? x : alpha * (exp(x) - 1)
template <typename T>
__global__ void elu_forward(const T* x, T* y, i64 n, double alpha) {
  using A = Wide<T>;
  const A a = A(alpha);
  each<PACK>(n, [=](i64, T x, T& y) { y = A(x) > 0 ? x : T(a * expm1(A(x))); }, in(x), out(y));
}

// dx = dy * (x > 0 ? 1 : alpha + y)
template <typename T>
__global__ void elu_backward(const T* x, const T* y, const T* dy, T* dx, i64 n, double alpha) {
  using A = Wide<T>;
  const A a = A(alpha);
  each<PACK>(
      n, [=](i64, T x, T y, T dy, T& dx) { dx = T(A(dy) * (A(x) > 0 ? A(1) : a + A(y))); }, in(x), in(y), in(dy), out(dx));
}

// sigmoid = 1 / (1 + exp(-beta * x)), y = x * sigmoid
template <typename T>
__global__ void swish_forward(const T* x, T* y, T* sigmoid, i64 n, double beta) {
  using A = Wide<T>;
  const A half = A(beta / 2);
  each<PACK>(
      n,
      [=](i64, T x, T& y, T& sigmoid) {
        const A s = tanh(A(x) * half) * A(0.5) + A(0.5);
        sigmoid = T(s);
        y = T(A(x) * s);
      },
      in(x), out(y), out(sigmoid));
}

// dx = dy * (beta * y + sigmoid * (1 - beta * y))
template <typename T>
__global__ void swish_backward(const T* y, const T* sigmoid, const T* dy, T* dx, i64 n, double beta) {
  using A = Wide<T>;
  const A b = A(beta);
  each<PACK>(
      n,
      [=](i64, T y, T sigmoid, T dy, T& dx) { dx = T(A(dy) * (b * A(y) + A(sigmoid) * (1 - b * A(y)))); },
      in(y), in(sigmoid), in(dy), out(dx));
}

// The finalizer of MurmurHash3: every bit of the result hangs on every bit of h.
__device__ inline unsigned mix(unsigned h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// mask_i = mix(mix(seed + i) + mix(seed)) >= threshold, y = mask ? x * scale : x * 0
template <typename T>
__global__ void dropout_forward(const T* x, T* y, unsigned char* mask, i64 n, i64 threshold, double scale, i64 seed,
                                const void* seed_at, i64 seed_kind) {
  using A = Wide<T>;
  const unsigned start = bits(seed, seed_at, seed_kind), second = mix(start), bound = unsigned(threshold);
  const A s = A(scale);
  each<PACK>(
      n,
      [=](i64 i, T x, T& y, unsigned char& mask) {
        mask = mix(mix(start + unsigned(i)) + second) >= bound;
        y = T(A(x) * (mask ? s : A(0)));
      },
      in(x), out(y), out(mask));
}

// dx = mask ? dy * scale : dy * 0
template <typename T>
__global__ void dropout_backward(const T* dy, const unsigned char* mask, T* dx, i64 n, double scale) {
  using A = Wide<T>;
  const A s = A(scale);
  each<PACK>(
      n, [=](i64, T dy, unsigned char mask, T& dx) { dx = T(A(dy) * (mask ? s : A(0))); }, in(dy), in(mask), out(dx));
}

// Activations and their gradients, element by element; the output may be the input, dx may be dy. Arrays are flat: they
// lie alike, in whatever order. Parameters, their gradients and what only backward reads are in the type of sums.

#include "pack.cuh"
#include "reduce.cuh"
#include "channels.cuh"
#include "columns.cuh"
#include "random.cuh"

// y = x > 0 ? x : slope * x; a slope of 0 gives 0 for -inf too, NaN stays NaN
template <typename T> __global__ void relu_forward(const T* x, T* y, i64 n, double slope) {
  using A = Wide<T>;
  const A s = A(slope);
  each<PACK>(n, [=](i64, T x, T& y) { y = A(x) <= 0 ? T(s == 0 ? A(0) : A(x) * s) : x; }, in(x), out(y));
}

// dx = dy * (x > 0 ? 1 : slope)
template <typename T> __global__ void relu_backward(const T* x, const T* dy, T* dx, i64 n, double slope) {
  using A = Wide<T>;
  const A s = A(slope);
  each<PACK>(n, [=](i64, T x, T dy, T& dx) { dx = T(A(dy) * (A(x) <= 0 ? s : A(1))); }, in(x), in(dy), out(dx));
}

// y = min(x > 0 ? x : slope * x, 6); NaN stays NaN
template <typename T> __global__ void relu6_forward(const T* x, T* y, i64 n, double slope) {
  using A = Wide<T>;
  const A s = A(slope);
  each<PACK>(
      n, [=](i64, T x, T& y) { y = A(x) <= 0 ? T(A(x) * s) : A(x) > 6 ? T(A(6)) : x; }, in(x), out(y));
}

// dx = dy * (x <= 0 ? slope : x < 6 ? 1 : 0)
template <typename T> __global__ void relu6_backward(const T* x, const T* dy, T* dx, i64 n, double slope) {
  using A = Wide<T>;
  const A s = A(slope);
  each<PACK>(
      n, [=](i64, T x, T dy, T& dx) { dx = T(A(dy) * (A(x) <= 0 ? s : A(x) >= 6 ? A(0) : A(1))); }, in(x), in(dy),
      out(dx));
}

// y = x > 0 ? x : slope_c * x
template <typename T>
__global__ void prelu_forward(const T* x, const Wide<T>* slope, T* y, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  Channel channel(channels, inner);
  each<PACK>(
      outer * channels * inner,
      [=](i64 i, T x, T& y) mutable {
        const A s = slope[channel.at(i)];
        y = A(x) <= 0 ? T(A(x) * s) : x;
      },
      in(x), out(y));
}

// dx = dy * (x > 0 ? 1 : slope_c), where there is a dx; sums of dy * x over x <= 0
template <typename T> __global__ void __launch_bounds__(256)
prelu_backward(const T* x, const T* dy, const Wide<T>* slope, T* dx, double* partial, i64 outer, i64 channels,
               i64 inner, i64 splits, i64 period) {
  using A = Wide<T>;
  channel_sums<PACK>(
      Shape{outer, channels, inner, splits, period}, partial,
      [=](i64 c, double& first, double&, T x, T dy, T& dx) {
        const bool negative = A(x) <= 0;
        first += double(dy) * (negative ? double(x) : 0.0);
        dx = T(A(dy) * (negative ? slope[c] : A(1)));
      },
      in(x), in(dy), maybe_out(dx));
}

// dslope_c += sum
template <typename T> __global__ void prelu_finish(const double* partial, Wide<T>* dslope, i64 channels, i64 splits) {
  finish_channels(partial, channels, splits, [=](i64 c, double sum, double) { dslope[c] += sum; });
}

// y = 1 / (1 + exp(-x)) = tanh(x / 2) / 2 + 1 / 2
template <typename T> __global__ void sigmoid_forward(const T* x, T* y, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T& y) { y = T(tanh(A(x) * A(0.5)) * A(0.5) + A(0.5)); }, in(x), out(y));
}

// dx = dy * y * (1 - y)
template <typename T> __global__ void sigmoid_backward(const T* y, const T* dy, T* dx, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T y, T dy, T& dx) { dx = T(A(dy) * (A(y) * (1 - A(y)))); }, in(y), in(dy), out(dx));
}

// y = tanh(x)
template <typename T> __global__ void tanh_forward(const T* x, T* y, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T& y) { y = T(tanh(A(x))); }, in(x), out(y));
}

// dx = dy * (1 - y^2)
template <typename T> __global__ void tanh_backward(const T* y, const T* dy, T* dx, i64 n) {
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
template <typename T> __global__ void power_forward(const T* x, T* y, i64 n, double power, double scale, double shift) {
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
template <typename T> __global__ void elu_forward(const T* x, T* y, i64 n, double alpha) {
  using A = Wide<T>;
  const A a = A(alpha);
  each<PACK>(n, [=](i64, T x, T& y) { y = A(x) > 0 ? x : T(a * expm1(A(x))); }, in(x), out(y));
}

// dx = dy * (x > 0 ? 1 : alpha + y)
template <typename T> __global__ void elu_backward(const T* x, const T* y, const T* dy, T* dx, i64 n, double alpha) {
  using A = Wide<T>;
  const A a = A(alpha);
  each<PACK>(
      n, [=](i64, T x, T y, T dy, T& dx) { dx = T(A(dy) * (A(x) > 0 ? A(1) : a + A(y))); }, in(x), in(y), in(dy), out(dx));
}

// sigmoid = 1 / (1 + exp(-beta * x)), y = x * sigmoid
template <typename T> __global__ void swish_forward(const T* x, T* y, i64 n, double beta, Wide<T>* sigmoid) {
  using A = Wide<T>;
  const A half = A(beta / 2);
  each<PACK>(
      n,
      [=](i64, T x, T& y, A& sigmoid) {
        sigmoid = tanh(A(x) * half) * A(0.5) + A(0.5);
        y = T(A(x) * sigmoid);
      },
      in(x), out(y), out(sigmoid));
}

// dx = dy * (beta * y + sigmoid * (1 - beta * y))
template <typename T>
__global__ void swish_backward(const T* y, const T* dy, T* dx, i64 n, double beta, const Wide<T>* sigmoid) {
  using A = Wide<T>;
  const A b = A(beta);
  each<PACK>(
      n,
      [=](i64, T y, T dy, T& dx, A sigmoid) { dx = T(A(dy) * (b * A(y) + sigmoid * (1 - b * A(y)))); },
      in(y), in(dy), out(dx), in(sigmoid));
}

struct Keep {
  Draw draw;
  unsigned threshold;
  __device__ Keep(i64 threshold, i64 seed, const i64* step_counter) : draw(seed, step_counter), threshold(unsigned(threshold)) {}
  __device__ bool operator()(i64 i) const { return draw(i) >= threshold; }
};

// mask_i = keep(i), y = mask ? x * scale : x * 0
template <typename T>
__global__ void dropout_forward(const T* x, T* y, i64 n, unsigned char* mask, i64 threshold, double scale, i64 seed,
                                const i64* step_counter) {
  using A = Wide<T>;
  const Keep keep(threshold, seed, step_counter);
  const A s = A(scale);
  each<PACK>(
      n,
      [=](i64 i, T x, T& y, unsigned char& mask) {
        mask = keep(i);
        y = T(A(x) * (mask ? s : A(0)));
      },
      in(x), out(y), out(mask));
}

// slope = x > 0 ? 1 : 1 / (low + width * u), u uniform from 0 to 1; y = x * slope
template <typename T>
__global__ void rrelu_forward(const T* x, T* y, T* slope, i64 n, double low, double width, i64 seed,
                              const i64* step_counter) {
  using A = Wide<T>;
  const Draw draw(seed, step_counter);
  FOR_EACH(i, n) {
    const A value = x[i], share = A(draw(i)) * A(1.0 / 4294967296.0);
    const A s = value > 0 ? A(1) : A(1) / (A(low) + A(width) * share);
    slope[i] = T(s);
    y[i] = T(value * s);
  }
}

// dx = mask ? dy * scale : dy * 0
template <typename T>
__global__ void dropout_backward(const T* dy, T* dx, i64 n, const unsigned char* mask, double scale) {
  using A = Wide<T>;
  const A s = A(scale);
  each<PACK>(
      n, [=](i64, T dy, T& dx, unsigned char mask) { dx = T(A(dy) * (mask ? s : A(0))); }, in(dy), out(dx), in(mask));
}

// y = dropout(relu(y + b)) for y (M, O): without a bias if there is no b, without dropout if there is no mask.
template <typename T>
__global__ void bias_act_forward(T* y, const Wide<T>* b, unsigned char* mask, i64 rows, i64 columns, i64 relu,
                                 i64 threshold, double scale, i64 seed, const i64* step_counter) {
  using A = Wide<T>;
  const Keep keep(threshold, seed, step_counter);
  const A s = A(scale);
  const bool drops = mask;
  Channel channel(columns, 1);
  each<PACK>(
      rows * columns,
      [=](i64 i, T& y, unsigned char& mask) mutable {
        A z = A(y);
        if (b) z += b[channel.at(i)];
        if (relu && z <= 0) z = 0;
        if (drops) {
          mask = keep(i);
          z *= mask ? s : A(0);
        }
        y = T(z);
      },
      both(y), maybe_out(mask));
}

// dy = dy * (mask ? scale : 0) * (y > 0) with the factors of which there is an array, and its column sums; columns.cuh
template <typename T> __global__ void __launch_bounds__(512)
bias_act_backward(const T* y, T* dy, const unsigned char* mask, double scale, i64 rows, i64 columns, Wide<T>* db,
                  Wide<T>* part, i64 shares) {
  over_columns<T, T>(dy, y, mask, Wide<T>(scale), dy, Sums<Wide<T>>{db, part, shares}, rows, columns);
}

// Normalization by statistics of each channel of (outer, C, inner), and scales and biases of each channel. Sums are in
// double precision.

#include "pack.cuh"
#include "reduce.cuh"
#include "channels.cuh"

#define PACK (16 / sizeof(T))

// sums of x - k and (x - k)^2, k the channel's first element: no cancellation where the mean is large
template <typename T>
__global__ void __launch_bounds__(256)
statistics(const T* x, double* partial, i64 outer, i64 channels, i64 inner, i64 splits) {
  channel_sums<PACK>(
      Shape{outer, channels, inner, splits}, partial,
      [=](i64 c, double& first, double& second, i64, T v) {
        const double d = double(v) - double(x[c * inner]);
        first += d;
        second += d * d;
      },
      in(x));
}

template <typename T>
__global__ void statistics_finish(const double* partial, const T* x, T* mean, T* variance, i64 outer, i64 channels,
                                  i64 inner, i64 splits) {
  const double count = double(outer) * double(inner);
  finish_channels(partial, channels, splits, [=](i64 c, double first, double second) {
    const double shift = first / count, v = second / count - shift * shift;
    mean[c] = T(count > 0 ? double(x[c * inner]) + shift : shift);
    variance[c] = T(v < 0 ? 0.0 : v);
  });
}

// y = (x - mean) * inverse
template <typename T>
__global__ void normalize(const T* x, const T* mean, const T* inverse, T* y, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  Channel channel(channels, inner);
  each<PACK>(
      outer * channels * inner,
      [=](i64 i, T x, T& y) mutable {
        const unsigned c = channel.at(i);
        y = T((A(x) - A(mean[c])) * A(inverse[c]));
      },
      in(x), out(y));
}

// sums of dy and dy * (x - mean)
template <typename T>
__global__ void __launch_bounds__(256)
gradient_sums(const T* x, const T* mean, const T* dy, double* partial, i64 outer, i64 channels, i64 inner, i64 splits) {
  channel_sums<PACK>(
      Shape{outer, channels, inner, splits}, partial,
      [=](i64 c, double& first, double& second, i64, T x, T dy) {
        first += double(dy);
        second += double(dy) * (double(x) - double(mean[c]));
      },
      in(x), in(dy));
}

// a = mean(dy), b = inverse * mean(dy * (x - mean) * inverse), as means (2, C)
template <typename T>
__global__ void gradient_finish(const double* partial, const T* inverse, double* means, i64 outer, i64 channels,
                                i64 inner, i64 splits) {
  const double count = double(outer) * double(inner);
  finish_channels(partial, channels, splits, [=](i64 c, double first, double second) {
    means[c] = first / count;
    means[channels + c] = second / count * double(inverse[c]) * double(inverse[c]);
  });
}

// dx = (dy - a - (x - mean) * b) * inverse
template <typename T>
__global__ void gradient(const T* x, const T* mean, const T* inverse, const double* means, const T* dy, T* dx,
                         i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  Channel channel(channels, inner);
  each<PACK>(
      outer * channels * inner,
      [=](i64 i, T x, T dy, T& dx) mutable {
        const unsigned c = channel.at(i);
        const A a = A(means[c]), b = A(means[channels + c]);
        dx = T((A(dy) - a - (A(x) - A(mean[c])) * b) * A(inverse[c]));
      },
      in(x), in(dy), out(dx));
}

// y = x * scale + bias, bias 0 where there is none
template <typename T>
__global__ void scale_forward(const T* x, const T* scale, const T* bias, T* y, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  Channel channel(channels, inner);
  each<PACK>(
      outer * channels * inner,
      [=](i64 i, T x, T& y) mutable {
        const unsigned c = channel.at(i);
        y = T(A(x) * A(scale[c]) + (bias ? A(bias[c]) : A(0)));
      },
      in(x), out(y));
}

// sums of dy * x and dy; dx = dy * scale where there is a dx
template <typename T>
__global__ void __launch_bounds__(256)
scale_backward(const T* x, const T* scale, const T* dy, T* dx, double* partial, i64 outer, i64 channels, i64 inner,
               i64 splits) {
  using A = Wide<T>;
  channel_sums<PACK>(
      Shape{outer, channels, inner, splits}, partial,
      [=](i64 c, double& first, double& second, i64, T x, T dy, T& dx) {
        first += double(dy) * double(x);
        second += double(dy);
        dx = T(A(dy) * A(scale[c]));
      },
      in(x), in(dy), maybe_out(dx));
}

// dscale += first sum, dbias += second, where there are such
template <typename T>
__global__ void scale_finish(const double* partial, T* dscale, T* dbias, i64 channels, i64 splits) {
  finish_channels(partial, channels, splits, [=](i64 c, double first, double second) {
    if (dscale) dscale[c] = T(double(dscale[c]) + first);
    if (dbias) dbias[c] = T(double(dbias[c]) + second);
  });
}

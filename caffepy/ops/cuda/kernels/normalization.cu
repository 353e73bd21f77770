// Normalization by statistics of each channel of (outer, C, inner), and scales and biases of each channel. Numbers of
// channels are float, or double for arrays of double. A thread adds up its few elements of a channel in that type; what
// comes after is in double precision.

#include "pack.cuh"
#include "reduce.cuh"
#include "channels.cuh"
#include "statistics.cuh"
#include "rectify.cuh"
#include "shares.cuh"
#include "windows.cuh"

// sums of x and x^2, from those of x - k and (x - k)^2 with k the first x of the thread: no cancellation in float
template <typename T, int V> struct Moments {
  using A = Wide<T>;
  A k[V] = {}, first[V] = {}, second[V] = {};
  __device__ void start(const T* x, Channels, i64 at) {
    const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(x + at);
#pragma unroll
    for (int v = 0; v < V; ++v) k[v] = A(pack.v[v]);
  }
  __device__ void operator()(int v, T x) {
    const A d = A(x) - k[v];
    first[v] += d;
    second[v] += d * d;
  }
  __device__ void sums(int v, unsigned count, double& a, double& b) const {
    const double shift = double(k[v]), d = double(first[v]);
    a = d + count * shift;
    b = double(second[v]) + (2 * d + count * shift) * shift;
  }
};

template <typename T> __global__ void __launch_bounds__(256, 3)
moments(const T* x, double* partial, i64 outer, i64 channels, i64 inner, i64 splits, i64 period) {
  channel_sums_of<Moments, T, PACK, 4>(Shape{outer, channels, inner, splits, period}, partial, x, in(x));
}

// From sums of x and of x^2; `share` is 1 over their number.
struct Normal {
  double mean, variance;
  __device__ Normal(double first, double second, double share) : mean(first * share) {
    const double v = second * share - mean * mean;
    variance = v < 0 ? 0.0 : v;
  }
};

template <typename T>
__global__ void statistics_finish(const double* partial, Wide<T>* mean, Wide<T>* variance, i64 outer, i64 channels,
                                  i64 inner, i64 splits) {
  const double share = 1 / (double(outer) * double(inner));
  finish_channels(partial, channels, splits, [=](i64 c, double first, double second) {
    const Normal of(first, second, share);
    mean[c] = of.mean;
    variance[c] = of.variance;
  });
}

// Numbers of a batch, and its running sums.
template <typename T>
__global__ void prepare_finish(const double* partial, Wide<T>* mean, Wide<T>* variance, Wide<T>* weight,
                               const Wide<T>* scale, const Wide<T>* bias, Wide<T>* numbers, double fraction, double eps,
                               i64 outer, i64 channels, i64 inner, i64 splits) {
  const double count = double(outer) * double(inner), share = 1 / count, by = unbiased(count);
  expect_channels(channels, mean, variance, scale, bias);
  finish_channels(partial, channels, splits, [=](i64 c, double first, double second) {
    const Normal of(first, second, share);
    write_numbers(numbers, c, channels, of.mean, of.variance, eps, scale, bias);
    update_running(mean, variance, weight, c, of.mean, of.variance * by, fraction);
  });
}

// Numbers of running sums.
template <typename T>
__global__ void stored(const T* mean, const T* variance, const T* weight, const T* scale, const T* bias, T* numbers,
                       i64 channels, double eps) {
  const i64 c = blockIdx.x * i64(blockDim.x) + threadIdx.x;
  if (c >= channels) return;
  const double factor = *weight == 0 ? 0.0 : 1 / double(*weight);
  write_numbers(numbers, c, channels, double(mean[c]) * factor, double(variance[c]) * factor, eps, scale, bias);
}

// y = (x - mean) * inverse
template <typename A> struct Statistics { const A *mean, *inverse; };

template <typename T, int V> struct Normalize {
  using A = Wide<T>;
  A mean[V], inverse[V];
  __device__ void start(const Statistics<A>& s, Channels c, i64) {
    take(mean, s.mean, c, A(0));
    take(inverse, s.inverse, c, A(1));
  }
  __device__ void operator()(int v, T x, T& y) const { y = T((A(x) - mean[v]) * inverse[v]); }
};

template <typename T> __global__ void __launch_bounds__(256, 4)
normalize(const T* x, const Wide<T>* mean, const Wide<T>* inverse, T* y, i64 outer, i64 channels, i64 inner,
          i64 splits, i64 period) {
  channel_pass<Normalize, T, PACK, 4>(Shape{outer, channels, inner, splits, period}, Statistics<Wide<T>>{mean, inverse}, in(x),
                                      out(y));
}

template <typename A> struct Affine {
  const A *factor, *shift;
  A ceiling;
};

// y = x * factor + shift [+ other], shift 0 where there is none; NaN stays NaN in the ReLU, whose bits may be kept
template <int OTHER, int AFTER> struct Forward {
  template <typename T, int V> struct Op {
    using A = Wide<T>;
    A factor[V], shift[V], ceiling;
    __device__ void start(const Affine<A>& a, Channels c, i64) {
      ceiling = a.ceiling;
      take(factor, a.factor, c, A(1));
      take(shift, a.shift, c, A(0));
    }
    __device__ void operator()(int v, T x, T other, T& y, bool& passes) const {
      A z = fma(A(x), factor[v], shift[v]);
      if (OTHER) z += A(other);
      if (AFTER && z <= 0) z = 0;
      if (AFTER == CLIPPED && z > ceiling) z = ceiling;
      y = T(z);
      passes = !passes_nothing<AFTER>(A(y), ceiling);
    }
  };
};

template <typename T, int OTHER, int AFTER, int KEEPS> __global__ void __launch_bounds__(256, 4)
forward(const T* x, const Wide<T>* factor, const Wide<T>* shift, double ceiling, const T* other, T* y,
        unsigned char* bits, i64 outer, i64 channels, i64 inner, i64 splits, i64 period) {
  channel_pass<Forward<OTHER, AFTER>::template Op, T, PACK, OTHER ? 2 : 4>(
      Shape{outer, channels, inner, splits, period}, Affine<Wide<T>>{factor, shift, Wide<T>(ceiling)}, in(x),
      in_if<OTHER>(other), out(y), Bits<KEEPS ? WRITE : NEITHER>{bits});
}

template <typename A> struct Gradient {
  const A *mean, *factor, *shift;
  A ceiling;
};

// g = (dy [+ more]) * mask; its sums and those of g * (x - mean); masked = g and dx = g * factor where they are kept
template <int MASK, int AFTER, int MORE, int MASKED, int DX> struct Summing {
  template <typename T, int V> struct Op {
    using A = Wide<T>;
    A mean[V], factor[V], shift[V], ceiling, first[V] = {}, second[V] = {};
    __device__ void start(const Gradient<A>& a, Channels c, i64) {
      ceiling = a.ceiling;
      take(mean, a.mean, c, A(0));
      if (MASK == BY_X || DX) take(factor, a.factor, c, A(1));
      if (MASK == BY_X) take(shift, a.shift, c, A(0));
    }
    __device__ void operator()(int v, T x, T dy, T more, T y, bool passes, T& masked, T& dx) {
      A g = A(dy);
      if (MORE) g += A(more);
      if (MASK == BY_X && passes_nothing<AFTER>(fma(A(x), factor[v], shift[v]), ceiling)) g = 0;
      if (MASK == BY_Y && passes_nothing<AFTER>(A(y), ceiling)) g = 0;
      if (MASK == BY_BITS && !passes) g = 0;
      first[v] += g;
      second[v] += g * (A(x) - mean[v]);
      if (MASKED) masked = T(g);
      if (DX) dx = T(g * factor[v]);
    }
    __device__ void sums(int v, unsigned, double& a, double& b) const {
      a = double(first[v]);
      b = double(second[v]);
    }
  };
};

template <typename T, int MASK, int AFTER, int MORE, int MASKED, int DX> __global__ void __launch_bounds__(256, 3)
backward_sums(const T* x, const Wide<T>* mean, const Wide<T>* factor, const Wide<T>* shift, double ceiling, const T* dy,
              const T* more, const T* y, unsigned char* bits, T* masked, T* dx, double* partial, i64 outer,
              i64 channels, i64 inner, i64 splits, i64 period) {
  channel_sums_of<Summing<MASK, AFTER, MORE, MASKED, DX>::template Op, T, PACK, 2>(
      Shape{outer, channels, inner, splits, period}, partial, Gradient<Wide<T>>{mean, factor, shift, Wide<T>(ceiling)}, in(x),
      in(dy), in_if<MORE>(more), in_if<MASK == BY_Y>(y), Bits<MASK == BY_BITS ? READ : NEITHER>{bits},
      out_if<MASKED>(masked), out_if<DX>(dx));
}

// What blocks behind those that finish sums add meanwhile: to (size) += the sums of shares of part, which lie `pitch` floats
// apart; number i goes to place i % across * down + i / across.
struct Addition {
  const float* part;
  float* to;
  i64 shares, pitch, size, across, down;
  __device__ void add(i64 block) const {
    const i64 mine = block * 32 + threadIdx.x / 32;
    const float sum = sum_of_all(part, shares, pitch, block * 32, size);
    if (threadIdx.x % 32 == 0 && mine < size) to[mine % across * down + mine / across] += sum;
  }
};

// With p = sum of g and q = sum of g * (x - mean): dscale += q * inverse, dbias += p; and for
// dx = factor * (g - p/m - (x - mean) * inverse^2 * q/m) = factor * g + slope * x + rest the line's numbers (2, C)
template <typename T>
__global__ void backward_finish(const double* partial, const Wide<T>* mean, const Wide<T>* inverse,
                                const Wide<T>* factor, Wide<T>* dscale, Wide<T>* dbias, Wide<T>* line, i64 outer,
                                i64 channels, i64 inner, i64 splits, const float* part, float* to, i64 shares, i64 pitch,
                                i64 size, i64 across, i64 down) {
  using A = Wide<T>;
  const i64 finishing = (channels + 7) / 8;
  if (blockIdx.x >= finishing) {
    Addition{part, to, shares, pitch, size, across, down}.add(blockIdx.x - finishing);
    return;
  }
  const double share = 1 / (double(outer) * double(inner));
  expect_channels(channels, mean, inverse, factor, dscale, dbias);
  finish_channels(partial, channels, splits, [=](i64 c, double p, double q) {
    const double r = inverse ? double(inverse[c]) : 1.0;
    if (dscale) dscale[c] = A(double(dscale[c]) + q * r);
    if (dbias) dbias[c] = A(double(dbias[c]) + p);
    if (!line) return;
    const double f = double(factor[c]) * share;
    const A slope = A(-f * r * r * q);
    line[c] = slope;
    line[channels + c] = A(-f * p - double(slope) * double(mean[c]));
  });
}

template <typename A> struct Line {
  const A *factor, *shift, *slope, *rest;
  A ceiling;
};

// dx = factor * g + slope * x + rest, g = dy * mask; AFTER is NO_RELU where dy is masked already
template <int AFTER> struct Straight {
  template <typename T, int V> struct Op {
    using A = Wide<T>;
    A factor[V], shift[V], slope[V], rest[V], ceiling;
    __device__ void start(const Line<A>& a, Channels c, i64) {
      ceiling = a.ceiling;
      take(factor, a.factor, c, A(1));
      if (AFTER) take(shift, a.shift, c, A(0));
      take(slope, a.slope, c, A(0));
      take(rest, a.rest, c, A(0));
    }
    __device__ void operator()(int v, T x, T dy, T& dx) const {
      A g = A(dy);
      if (passes_nothing<AFTER>(fma(A(x), factor[v], shift[v]), ceiling)) g = 0;
      dx = T(fma(factor[v], g, fma(slope[v], A(x), rest[v])));
    }
  };
};

template <typename T, int AFTER> __global__ void __launch_bounds__(256, 3)
backward(const T* x, const Wide<T>* factor, const Wide<T>* shift, const Wide<T>* line, double ceiling, const T* dy, T* dx,
         i64 outer, i64 channels, i64 inner, i64 splits, i64 period) {
  channel_pass<Straight<AFTER>::template Op, T, PACK, 2>(
      Shape{outer, channels, inner, splits, period}, Line<Wide<T>>{factor, shift, line, line + period, Wide<T>(ceiling)},
      in(x), in(dy), out(dx));
}

// The gradient of maxima over windows, as an array that is read: images lie with their channels last, in whole packs.
template <typename T, int W> struct OfMaxima {
  using Element = T;
  const T* dy;
  const unsigned char* index;
  Windows s;
  template <int V> __device__ bool fits() const { return true; }
  template <int V> __device__ Pack<T, V> load(i64 i) const { return of_maxima<V, W>(s, i, dy, index); }
  template <int V> __device__ void store(i64, const Pack<T, V>&) const {}
};

// backward_sums and backward for the gradient of maxima; its sums with dx of frozen numbers, or without by going through
// the maxima, which are fewer.
template <typename T, int W> __global__ void __launch_bounds__(256, 3)
maxima_frozen(const T* x, const Wide<T>* mean, const Wide<T>* factor, const T* dy, const unsigned char* index, T* dx, WINDOWS,
              double* partial, i64 outer, i64 channels, i64 inner, i64 splits, i64 period) {
  channel_sums_of<Summing<NO_MASK, NO_RELU, 0, 0, 1>::template Op, T, PACK, 2>(
      Shape{outer, channels, inner, splits, period}, partial, Gradient<Wide<T>>{mean, factor, nullptr, 0}, in(x),
      OfMaxima<T, W>{dy, index, NUMBERS}, in_if<0>(x), in_if<0>(x), Bits<NEITHER>{}, out_if<0>(dx), out(dx));
}

// The gradients of maxima, 0 for one that is no element.
template <typename T> struct OfElements {
  using Element = T;
  const T* dy;
  const unsigned char* index;
  template <int V> __device__ bool fits() const { return true; }
  template <int V> __device__ Pack<T, V> load(i64 i) const {
    Pack<T, V> pack = reinterpret_cast<const Pack<T, V>*>(dy)[i];
    const Pack<unsigned char, V> named = reinterpret_cast<const Pack<unsigned char, V>*>(index)[i];
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (named.v[v] == 255) pack.v[v] = T(0);
    return pack;
  }
  template <int V> __device__ void store(i64, const Pack<T, V>&) const {}
};

// The elements that maxima are, as an array that is read.
template <typename T> struct Elements {
  using Element = T;
  const T* x;
  const unsigned char* index;
  Windows s;
  template <int V> __device__ bool fits() const { return true; }
  template <int V> __device__ Pack<T, V> load(i64 i) const {
    const Place at(s, i, s.ho, s.wo);
    const Pack<unsigned char, V> named = reinterpret_cast<const Pack<unsigned char, V>*>(index)[i];
    const T* image = x + at.image * s.large() * V + at.pack * V;
    const int top = at.row * s.sh - s.ph, left = at.column * s.sw - s.pw;
    const int by_kw = (65535 + s.kw) / s.kw;  // of numbers below 256
    Pack<T, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int number = named.v[v], down = number * by_kw >> 16;
      const int row = min(max(top + down, 0), s.h - 1), column = min(max(left + number - down * s.kw, 0), s.w - 1);
      pack.v[v] = image[(row * s.w + column) * s.packs * V + v];
    }
    return pack;
  }
  template <int V> __device__ void store(i64, const Pack<T, V>&) const {}
};

template <typename T> __global__ void __launch_bounds__(256, 3)
maxima_sums(const T* x, const Wide<T>* mean, const T* dy, const unsigned char* index, WINDOWS, double* partial, i64 outer,
            i64 channels, i64 inner, i64 splits, i64 period) {
  T* const none = nullptr;
  channel_sums_of<Summing<NO_MASK, NO_RELU, 0, 0, 0>::template Op, T, PACK, 1>(
      Shape{outer, channels, inner, splits, period}, partial, Gradient<Wide<T>>{mean, nullptr, nullptr, 0},
      Elements<T>{x, index, NUMBERS}, OfElements<T>{dy, index}, in_if<0>(x), in_if<0>(x), Bits<NEITHER>{}, out_if<0>(none),
      out_if<0>(none));
}

template <typename T, int W> __global__ void __launch_bounds__(256, 3)
maxima_backward(const T* x, const Wide<T>* factor, const Wide<T>* line, const T* dy, const unsigned char* index, T* dx,
                WINDOWS, i64 outer, i64 channels, i64 inner, i64 splits, i64 period) {
  channel_pass<Straight<NO_RELU>::template Op, T, PACK, 2>(
      Shape{outer, channels, inner, splits, period}, Line<Wide<T>>{factor, nullptr, line, line + period, 0}, in(x),
      OfMaxima<T, W>{dy, index, NUMBERS}, out(dx));
}

// The same where windows are 3 x 3 with a stride of 2: over two rows by two columns, of which the first is that of a window,
// are no more than four windows. A thread has those pixels of one pack of channels, in turn; blocks have whole pixels.
template <typename T> __global__ void __launch_bounds__(256, 2)
maxima_fours(const T* x, const Wide<T>* factors, const Wide<T>* line, const T* dy, const unsigned char* index, T* dx,
             i64 images, i64 packs, i64 height, i64 width, i64 high, i64 wide, i64 top, i64 left, i64 by_down, i64 by_across) {
  using A = Wide<T>;
  constexpr int V = PACK;
  const Divisor of_down{by_down}, of_across{by_across};
  const int h = int(height), w = int(width), ho = int(high), wo = int(wide), ph = int(top), pw = int(left);
  const unsigned down = unsigned(h + ph + 1) / 2, across = unsigned(w + pw + 1) / 2, of_line = unsigned(packs);
  const unsigned lanes = blockDim.x / of_line, pack = threadIdx.x % of_line, all = unsigned(images) * down * across;
  A factor[V], slope[V], rest[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    factor[v] = factors[pack * V + v];
    slope[v] = line[pack * V + v];
    rest[v] = line[(of_line + pack) * V + v];
  }
  for (unsigned k = blockIdx.x * lanes + threadIdx.x / of_line; k < all; k += gridDim.x * lanes) {
    const unsigned row = of_across.quotient(k), n = of_down.quotient(row);
    const int c = int(k - row * across), b = int(row - n * down);
    Pack<T, V> of_x[2][2], gradients[2][2];
    Pack<unsigned char, V> named[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int i = b - 1 + r, j = c - 1 + q, y = 2 * b - ph + r, z = 2 * c - pw + q;
        const bool is = i >= 0 && i < ho && j >= 0 && j < wo, there = y >= 0 && y < h && z >= 0 && z < w;
        const i64 window = (i64(n * ho + (is ? i : 0)) * wo + (is ? j : 0)) * of_line + pack;
        gradients[r][q] = reinterpret_cast<const Pack<T, V>*>(dy)[window];
        named[r][q] = reinterpret_cast<const Pack<unsigned char, V>*>(index)[window];
        if (!is)
#pragma unroll
          for (int v = 0; v < V; ++v) named[r][q].v[v] = 255;
        of_x[r][q] = reinterpret_cast<const Pack<T, V>*>(x)[there ? (i64(n * h + y) * w + z) * of_line + pack : 0];
      }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int y = 2 * b - ph + r, z = 2 * c - pw + q;
        if (y < 0 || y >= h || z < 0 || z >= w) continue;
        Pack<T, V> pixel;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          A sum = 0;
#pragma unroll
          for (int i = r; i < 2; ++i)
#pragma unroll
            for (int j = q; j < 2; ++j)
              if (named[i][j].v[v] == (r + 2 - 2 * i) * 3 + q + 2 - 2 * j) sum += A(gradients[i][j].v[v]);
          pixel.v[v] = T(fma(factor[v], A(T(sum)), fma(slope[v], A(of_x[r][q].v[v]), rest[v])));
        }
        reinterpret_cast<Pack<T, V>*>(dx)[(i64(n * h + y) * w + z) * of_line + pack] = pixel;
      }
  }
}

// Local response normalization across channels of (N, C, P):
// s_c = k + alpha/size * sum of x^2 over the window of c;  y = x * s^-beta;
// dx = dy * s^-beta - 2*alpha*beta/size * x * sum over the window of dy * y / s.
// A thread takes one pixel through a run of channels and keeps the terms of the window of 2*HALF + 1 in registers;
// with HALF 0 it reads them anew for every channel. Where channels lie last it takes a pack of them and those around,
// which its neighbours have just read too, and s is not kept but computed again.

#include "pack.cuh"
#include "lrn.cuh"

constexpr int RUN = 16, AHEAD = 4;  // channels of a thread, and those whose elements it loads at a time

template <typename A> __device__ A power(A s, A beta) {
  return beta == A(0.75) ? Power<true, A>(s, beta).of : Power<false, A>(s, beta).of;
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
  FOR_EACH(i, n * count * pixels) {
    const unsigned plane = unsigned(i / pixels), p = unsigned(i - plane * pixels);
    const int image = int(plane / unsigned(count)), lo = int(plane % unsigned(count)) * RUN;
    f(lo, min(lo + RUN, int(channels)), i64(image) * channels * pixels + p);
  }
}

template <typename T, int HALF>
__device__ void forward(const T* __restrict__ x, T* __restrict__ y, Wide<T>* __restrict__ scale, i64 n, i64 channels,
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
      scale[at] = s;
      y[at] = T(A(x[at]) * power(s, b));
    };
    windows<HALF, A>(lo, hi, int(channels), int(half), square, write);
  });
}

template <typename T, int HALF>
__device__ void backward(const T* __restrict__ x, const T* __restrict__ y, const Wide<T>* __restrict__ scale,
                         const T* __restrict__ dy, T* __restrict__ dx, i64 n, i64 channels, i64 pixels, i64 half,
                         double factor, double beta) {
  using A = Wide<T>;
  const A a = A(factor), b = A(beta);
  runs(n, channels, pixels, [=](int lo, int hi, i64 start) {
    auto ratio = [=](int c) {
      const i64 at = start + c * pixels;
      return A(dy[at]) * A(y[at]) / scale[at];
    };
    auto write = [=](int c, A total) {
      const i64 at = start + c * pixels;
      dx[at] = T(A(dy[at]) * power(scale[at], b) - a * A(x[at]) * total);
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
__global__ void lrn_forward(const T* x, T* y, Wide<T>* scale, i64 n, i64 channels, i64 pixels, i64 half, double alpha,
                            double beta, double k) {
#define CALL(h) forward<T, h>(x, y, scale, n, channels, pixels, half, alpha, beta, k)
  FOR_HALF(CALL)
#undef CALL
}

template <typename T>
__global__ void lrn_backward(const T* x, const T* y, const Wide<T>* scale, const T* dy, T* dx, i64 n, i64 channels,
                             i64 pixels, i64 half, double factor, double beta) {
#define CALL(h) backward<T, h>(x, y, scale, dy, dx, n, channels, pixels, half, factor, beta)
  FOR_HALF(CALL)
#undef CALL
}

// Elements of channels first .. first + COUNT - 1 of a line, 0 outside; `first` is a multiple of V.
template <int V, int COUNT, typename T>
__device__ void read(Wide<T> (&to)[COUNT], const T* line, int first, int channels) {
#pragma unroll
  for (int i = 0; i < COUNT; i += V) {
    Pack<T, V> pack{};
    if (first + i >= 0 && first + i < channels) pack = *reinterpret_cast<const Pack<T, V>*>(line + first + i);
#pragma unroll
    for (int v = 0; v < V; ++v) to[i + v] = Wide<T>(pack.v[v]);
  }
}

// f(line, first channel) for every pack of V channels of all lines.
template <int V, typename F> __device__ void packs_of_lines(i64 lines, i64 channels, F f) {
  const unsigned packs = unsigned(channels / V), total = unsigned(lines) * packs;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x)
    f(i64(i / packs) * channels, int(i % packs) * V);
}

template <int V, typename T, int HALF, int THREE_QUARTERS>
__device__ void forward_lines(const T* x, T* y, i64 lines, i64 channels, Wide<T> alpha, Wide<T> beta, Wide<T> k) {
  using A = Wide<T>;
  constexpr int SIDE = (HALF + V - 1) / V * V;
  packs_of_lines<V>(lines, channels, [=](i64 line, int c) {
    A u[2 * SIDE + V], squares[2 * SIDE + V];
    read<V>(u, x + line, c - SIDE, int(channels));
#pragma unroll
    for (int i = 0; i < 2 * SIDE + V; ++i) squares[i] = u[i] * u[i];
    Pack<T, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A s = k + alpha * window<HALF>(squares, SIDE + v);
      pack.v[v] = T(u[SIDE + v] * Power<THREE_QUARTERS, A>(s, beta).of);
    }
    *reinterpret_cast<Pack<T, V>*>(y + line + c) = pack;
  });
}

// dx may be dy: a block reads all of its lines before it writes, unless a line is longer than its threads.
template <int V, typename T, int HALF, int THREE_QUARTERS, int R>
__device__ void backward_lines(const T* x, const T* dy, T* dx, i64 lines, i64 channels, Wide<T> alpha, Wide<T> factor,
                               Wide<T> beta, Wide<T> k) {
  using A = Wide<T>;
  constexpr int SIDE = (2 * HALF + V - 1) / V * V;  // terms of the window need s, which has a window of its own
  const unsigned packs = unsigned(channels / V), together = max(1u, blockDim.x / packs);
  const unsigned step = min(packs, blockDim.x), own = threadIdx.x / step;
  for (i64 first = blockIdx.x * i64(together); first < lines; first += gridDim.x * i64(together)) {
    const bool there = own < together && first + own < lines;
    const i64 line = (first + own) * channels;
    for (unsigned pack = threadIdx.x % step; pack < packs; pack += step) {
      const int c = int(pack) * V;
      A u[2 * SIDE + V], du[2 * SIDE + V], squares[2 * SIDE + V], terms[2 * SIDE + V], powers[V];
      if (there) {
        read<V>(u, x + line, c - SIDE, int(channels));
        read<V>(du, dy + line, c - SIDE, int(channels));
      }
      if (packs <= blockDim.x) __syncthreads();
      if (!there) break;
#pragma unroll
      for (int i = 0; i < 2 * SIDE + V; ++i) squares[i] = u[i] * u[i];
#pragma unroll
      for (int i = -HALF; i < V + HALF; ++i) {
        const Power<THREE_QUARTERS, A> power(k + alpha * window<HALF>(squares, SIDE + i), beta);
        const bool inside = c + i >= 0 && c + i < channels;
        terms[SIDE + i] = inside ? du[SIDE + i] * u[SIDE + i] * power.of * power.inverse : A(0);
        if (i >= 0 && i < V) powers[i] = power.of;
      }
      Pack<T, V> total;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const A d = du[SIDE + v] * powers[v] - factor * u[SIDE + v] * window<HALF>(terms, SIDE + v);
        total.v[v] = T(R && u[SIDE + v] <= 0 ? A(0) : d);
      }
      *reinterpret_cast<Pack<T, V>*>(dx + line + c) = total;
    }
  }
}

// Lines of channels, whose windows are 2*HALF + 1 wide.
template <typename T, int HALF, int THREE_QUARTERS>
__global__ void lrn_forward_lines(const T* x, T* y, i64 lines, i64 channels, double alpha, double beta, double k) {
  using A = Wide<T>;
  constexpr int V = PACK;
  if (channels % V == 0 && aligned(x, 16) && aligned(y, 16))
    forward_lines<V, T, HALF, THREE_QUARTERS>(x, y, lines, channels, A(alpha), A(beta), A(k));
  else
    forward_lines<1, T, HALF, THREE_QUARTERS>(x, y, lines, channels, A(alpha), A(beta), A(k));
}

// R: dx = 0 where x <= 0
template <typename T, int HALF, int THREE_QUARTERS, int R>
__global__ void lrn_backward_lines(const T* x, const T* dy, T* dx, i64 lines, i64 channels, double alpha,
                                   double factor, double beta, double k) {
  using A = Wide<T>;
  constexpr int V = PACK;
  if (channels % V == 0 && aligned(x, 16) && aligned(dy, 16) && aligned(dx, 16))
    backward_lines<V, T, HALF, THREE_QUARTERS, R>(x, dy, dx, lines, channels, A(alpha), A(factor), A(beta), A(k));
  else
    backward_lines<1, T, HALF, THREE_QUARTERS, R>(x, dy, dx, lines, channels, A(alpha), A(factor), A(beta), A(k));
}

// Lines of at most 32 packs of V channels: a warp takes as many lines as it has lanes for, a lane a pack of one, and gets
// the HALF values to either side of its own, 0 outside the line, from the lanes beside it.
template <int V, int HALF> struct Lanes {
  unsigned packs, lines, pack, own;  // packs of a line and lines of a warp; what this lane takes
  __device__ Lanes(i64 channels)
      : packs(unsigned(channels / V)), lines(32 / packs), pack(threadIdx.x % 32 % packs), own(threadIdx.x % 32 / packs) {}
  template <typename A> __device__ void surround(A (&values)[V + 2 * HALF]) const {
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const A before = __shfl_up_sync(~0u, values[V + i], 1), after = __shfl_down_sync(~0u, values[HALF + i], 1);
      values[i] = pack > 0 ? before : A(0);
      values[HALF + V + i] = pack + 1 < packs ? after : A(0);
    }
  }
  // f(offset of the lane's pack, whether there is one) in all lanes of a warp, until all lines are done.
  template <typename F> __device__ void each(i64 total, i64 channels, F f) const {
    const i64 warps = gridDim.x * i64(blockDim.x / 32), warp = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
    for (i64 first = warp * lines; first < total; first += warps * lines)
      f((first + own) * channels + pack * V, own < lines && first + own < total);
  }
};

template <int V, int HALF, typename A, typename T>
__device__ void read_pack(A (&to)[V + 2 * HALF], const T* from, bool there) {
  Pack<T, V> pack{};
  if (there) pack = *reinterpret_cast<const Pack<T, V>*>(from);
#pragma unroll
  for (int v = 0; v < V; ++v) to[HALF + v] = A(pack.v[v]);
}

// dx may be dy, and is 0 where x <= 0 if R; if R is 2, part (channels, blocks) has the sums of dx.
template <typename T, int HALF, int THREE_QUARTERS, int R>
__global__ void __launch_bounds__(256, 4)
lrn_backward_warps(const T* x, const T* dy, T* dx, i64 lines, i64 channels, double alpha, double factor, double beta,
                   double k, Wide<T>* part) {
  using A = Wide<T>;
  constexpr int V = PACK;
  const Lanes<V, HALF> lanes(channels);
  const A a = A(alpha), b = A(beta), first = A(k), by = A(factor);
  A sum[V] = {};
  lanes.each(lines, channels, [=, &sum](i64 at, bool there) {
    A u[V + 2 * HALF], du[V + 2 * HALF], squares[V + 2 * HALF], terms[V + 2 * HALF], powers[V];
    read_pack<V, HALF>(u, x + at, there);
    read_pack<V, HALF>(du, dy + at, there);
    lanes.surround(u);
#pragma unroll
    for (int i = 0; i < V + 2 * HALF; ++i) squares[i] = u[i] * u[i];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Power<THREE_QUARTERS, A> power(first + a * window<HALF>(squares, HALF + v), b);
      terms[HALF + v] = du[HALF + v] * u[HALF + v] * power.of * power.inverse;
      powers[v] = power.of;
    }
    lanes.surround(terms);
    Pack<T, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A d = du[HALF + v] * powers[v] - by * u[HALF + v] * window<HALF>(terms, HALF + v);
      pack.v[v] = T(R && u[HALF + v] <= 0 ? A(0) : d);
      if (R == 2 && there) sum[v] += A(pack.v[v]);
    }
    if (there) *reinterpret_cast<Pack<T, V>*>(dx + at) = pack;
  });
  if constexpr (R == 2) {
    __shared__ A sums[256 * V];
    const unsigned line = threadIdx.x / 32 * lanes.lines + lanes.own, all = blockDim.x / 32 * lanes.lines;
    if (lanes.own < lanes.lines)
      for (int v = 0; v < V; ++v) sums[line * unsigned(channels) + lanes.pack * V + v] = sum[v];
    __syncthreads();
    for (unsigned c = threadIdx.x; c < unsigned(channels); c += blockDim.x) {
      A total = 0;
      for (unsigned i = 0; i < all; ++i) total += sums[i * unsigned(channels) + c];
      part[c * gridDim.x + blockIdx.x] = total;
    }
  }
}

// The same for windows of any width, all of which is read for every element.
template <typename A, typename T> __device__ A scale_at(const T* line, i64 c, i64 channels, i64 half, A alpha, A k) {
  A total = 0;
  for (i64 d = max(i64(0), c - half); d < min(channels, c + half + 1); ++d) total += A(line[d]) * A(line[d]);
  return k + alpha * total;
}

template <typename T>
__global__ void lrn_forward_wide(const T* x, T* y, i64 lines, i64 channels, i64 half, double alpha, double beta,
                                 double k) {
  using A = Wide<T>;
  packs_of_lines<1>(lines, channels, [=](i64 line, int c) {
    const A s = scale_at(x + line, c, channels, half, A(alpha), A(k));
    y[line + c] = T(A(x[line + c]) * power(s, A(beta)));
  });
}

template <typename T>
__global__ void lrn_backward_wide(const T* x, const T* dy, T* dx, i64 lines, i64 channels, i64 half, double alpha,
                                  double factor, double beta, double k) {
  using A = Wide<T>;
  packs_of_lines<1>(lines, channels, [=](i64 line, int c) {
    A total = 0;
    for (i64 d = max(i64(0), c - half); d < min(channels, c + half + 1); ++d) {
      const A s = scale_at(x + line, d, channels, half, A(alpha), A(k));
      total += A(dy[line + d]) * A(x[line + d]) * power(s, A(beta)) / s;
    }
    const A s = scale_at(x + line, c, channels, half, A(alpha), A(k));
    dx[line + c] = T(A(dy[line + c]) * power(s, A(beta)) - A(factor) * A(x[line + c]) * total);
  });
}

// Convolutions of each channel by itself with a kernel of 3 x 3, channels last, weights float32 (C, 1, 3, 3):
//   y[n, i, j, c] = sum over r, s of x[n, i * S + r - top, j * S + s - left, c] * w[c, r, s]
// A thread takes V channels of a strip: some columns of a run of lines. It goes down the strip, reads each line of the
// other array once and adds it to all that need it; the next line is on its way meanwhile. Sums are in a fixed order.

#include "pack.cuh"

constexpr int TAPS = 9;

// An array (N, height, width, C).
template <typename T> struct Image {
  const T* p;
  int height, width, channels;
};

template <typename T, int V, int N> struct Line { Pack<T, V> pixels[N]; };

// N pixels of a line, from a column on; zeros outside.
template <int N, int V, typename T>
__device__ Line<T, V, N> read(const Image<T>& from, int n, int line, int column, int channel) {
  Line<T, V, N> got;
  const bool inside = line >= 0 && line < from.height;
  const T* at = from.p + ((n * from.height + line) * from.width + column) * from.channels + channel;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (inside && column + i >= 0 && column + i < from.width) {
      got.pixels[i] = *reinterpret_cast<const Pack<T, V>*>(at + i * from.channels);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) got.pixels[i].v[v] = T(0.0f);
    }
  }
  return got;
}

template <int V> struct Weights {
  float tap[TAPS][V];
  __device__ Weights(const float* w, int channel) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int t = 0; t < TAPS; ++t) tap[t][v] = w[(channel + v) * TAPS + t];
  }
};

template <int V, int N> struct Sums {
  float of[N][V];
  __device__ Sums(const float (&start)[V]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int v = 0; v < V; ++v) of[j][v] = start[v];
  }
};

// N pixels of a line of all lines of all images, without those outside.
template <int N, int V, typename T>
__device__ void write(T* p, const Sums<V, N>& sums, int width, int channels, int line, int column, int channel) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (column + j < 0 || column + j >= width) continue;
    Pack<T, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) pack.v[v] = T(sums.of[j][v]);
    *reinterpret_cast<Pack<T, V>*>(p + (line * width + column + j) * channels + channel) = pack;
  }
}

// The strip of a thread: `down` runs and `across` groups of columns in each image, packs of channels the fastest.
struct Strip {
  int n, run, group, pack;
  __device__ Strip(unsigned k, unsigned packs, unsigned across, unsigned down) {
    const unsigned place = k / packs, rest = place / across;
    pack = int(k % packs);
    group = int(place % across);
    run = int(rest % down);
    n = int(rest / down);
  }
};

__device__ inline unsigned strips(i64 height, i64 run) { return unsigned((height + run - 1) / run); }

// sums += line * tap row R
template <int R, int S, int FLIP, int V, int N, int M, typename T>
__device__ void add_line(Sums<V, N>& sums, const Line<T, V, M>& line, const Weights<V>& w) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int s = 0; s < 3; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v)
        sums.of[j][v] += float(line.pixels[j * S + s].v[v]) * w.tap[FLIP ? 8 - (3 * R + s) : 3 * R + s][v];
}

// y (images, height, width, C) of x (images, lines, columns, C). FLIP: the gradient of x for a stride of 1 is the same
// of dy with the kernel turned around.
template <typename T, int V, int S, int FLIP>
__global__ void __launch_bounds__(256)
depthwise(const T* x, const float* w, const float* b, T* y, i64 relu, i64 images, i64 height, i64 width, i64 channels,
          i64 lines, i64 columns, i64 top, i64 left, i64 run) {
  constexpr int N = 4, M = (N - 1) * S + 3;
  const unsigned packs = unsigned(channels / V), across = strips(width, N), down = strips(height, run);
  const Image<T> source{x, int(lines), int(columns), int(channels)};
  FOR_EACH(k, images * down * across * packs) {
    const Strip at(unsigned(k), packs, across, down);
    const int channel = at.pack * V, column = at.group * N, first = at.run * int(run);
    const int end = min(first + int(run), int(height)), from = column * S - int(left);
    const Weights<V> weights(w, channel);
    float start[V];
#pragma unroll
    for (int v = 0; v < V; ++v) start[v] = b ? b[channel + v] : 0.0f;
    int line = first * S - int(top);
    const auto next = [&] { return read<M, V>(source, at.n, line++, from, channel); };
    Sums<V, N> open(start), below(start);
    Line<T, V, M> here = next(), coming = next();
    add_line<0, S, FLIP>(open, here, weights);
    if (S == 1) {
      here = coming;
      coming = next();
      add_line<1, S, FLIP>(open, here, weights);
      add_line<0, S, FLIP>(below, here, weights);
    }
    for (int i = first; i < end; ++i) {
      here = coming;
      coming = next();
      if (S == 2) {
        add_line<1, S, FLIP>(open, here, weights);
        here = coming;
        coming = next();
      }
      add_line<2, S, FLIP>(open, here, weights);
      Sums<V, N> fresh(start);
      add_line<0, S, FLIP>(fresh, here, weights);
      if (S == 1) add_line<1, S, FLIP>(below, here, weights);
      if (relu) {
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) open.of[j][v] = open.of[j][v] < 0 ? 0.0f : open.of[j][v];
      }
      write<N, V>(y, open, int(width), int(channels), at.n * int(height) + i, column, channel);
      open = S == 1 ? below : fresh;
      below = fresh;
    }
  }
}

// sums = line * tap row R, for dx with its columns 2 q - left and those that follow, and dy from column q - 1 on
template <int R, int V, int N, typename T>
__device__ void spread_line(Sums<V, N>& sums, const Line<T, V, N / 2 + 1>& line, const Weights<V>& w) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float mine = float(line.pixels[j / 2 + 1].v[v]);
      if (j % 2)
        sums.of[j][v] += mine * w.tap[3 * R + 1][v];
      else
        sums.of[j][v] += mine * w.tap[3 * R][v] + float(line.pixels[j / 2].v[v]) * w.tap[3 * R + 2][v];
    }
  }
}

// dx (images, height, width, C) of dy (images, lines, columns, C) for a stride of 2. Line q of dy adds to the lines
// 2 q - top to 2 q - top + 2 of dx; a run counts pairs of lines of dx.
template <typename T, int V>
__global__ void __launch_bounds__(256)
depthwise_spread(const T* dy, const float* w, T* dx, i64 images, i64 height, i64 width, i64 channels, i64 lines,
                 i64 columns, i64 top, i64 left, i64 run) {
  constexpr int N = 4;
  const int above = int(top) / 2, before = int(left) / 2;
  const int pairs = int(height + top + 1) / 2 - above;
  const unsigned packs = unsigned(channels / V), across = strips(width + left - 2 * before, N), down = strips(pairs, run);
  const Image<T> source{dy, int(lines), int(columns), int(channels)};
  const float zero[V] = {};
  FOR_EACH(k, images * down * across * packs) {
    const Strip at(unsigned(k), packs, across, down);
    const int channel = at.pack * V, from = before + at.group * (N / 2), column = 2 * from - int(left);
    const int first = above + at.run * int(run), end = min(first + int(run), above + pairs);
    const Weights<V> weights(w, channel);
    int line = first - 1;
    const auto next = [&] { return read<N / 2 + 1, V>(source, at.n, line++, from - 1, channel); };
    const auto put = [&](const Sums<V, N>& sums, int to) {
      if (to < 0 || to >= int(height)) return;
      write<N, V>(dx, sums, int(width), int(channels), at.n * int(height) + to, column, channel);
    };
    Sums<V, N> open(zero);
    Line<T, V, N / 2 + 1> here = next(), coming = next();
    spread_line<2>(open, here, weights);
    for (int q = first; q < end; ++q) {
      here = coming;
      coming = next();
      spread_line<0>(open, here, weights);
      put(open, 2 * q - int(top));
      Sums<V, N> between(zero), fresh(zero);
      spread_line<1>(between, here, weights);
      put(between, 2 * q - int(top) + 1);
      spread_line<2>(fresh, here, weights);
      open = fresh;
    }
  }
}

// total row R += x * dy, for a line of dy and the line of x that tap row R has there
template <int R, int S, int V, int N, int M, typename T>
__device__ void add_products(float (&total)[TAPS + 1][V], const Line<T, V, M>& x, const Line<T, V, N>& dy) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int s = 0; s < 3; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v)
        total[3 * R + s][v] += float(x.pixels[j * S + s].v[v]) * float(dy.pixels[j].v[v]);
}

// Sums over a share of the strips of dy (images, height, width, C): part (shares, 10, C), of the nine weights and of the
// bias. A block takes blockDim.x packs of channels; its threads in y take strips in turn.
template <typename T, int V, int S>
__global__ void __launch_bounds__(256)
depthwise_gradient(const T* x, const T* dy, float* part, i64 images, i64 height, i64 width, i64 channels, i64 lines,
                   i64 columns, i64 top, i64 left, i64 run) {
  constexpr int N = S == 1 ? 4 : 2, M = (N - 1) * S + 3;
  extern __shared__ float sums[];  // (blockDim.y, blockDim.x * V)
  const int channel = int(blockIdx.x * blockDim.x + threadIdx.x) * V;
  const unsigned across = strips(width, N), down = strips(height, run), count = unsigned(images) * down * across;
  const Image<T> source{x, int(lines), int(columns), int(channels)};
  float total[TAPS + 1][V] = {};
  for (unsigned k = blockIdx.y * blockDim.y + threadIdx.y; channel < channels && k < count;
       k += gridDim.y * blockDim.y) {
    const Strip at(k, 1, across, down);
    const int first = at.run * int(run), end = min(first + int(run), int(height)), column = at.group * N;
    const Image<T> target{dy + i64(at.n) * height * width * channels, end, int(width), int(channels)};
    int line = first * S - int(top), own = first;
    const auto next = [&] { return read<M, V>(source, at.n, line++, column * S - int(left), channel); };
    const auto next_own = [&] { return read<N, V>(target, 0, own++, column, channel); };
    Line<T, V, M> here, coming = next();
    Line<T, V, N> d0, d1 = read<N, V>(target, 0, -1, 0, 0), d2 = d1, coming_own = next_own();
    for (int i = first; i < end + (S == 1 ? 2 : 1); ++i) {
      d0 = coming_own;
      here = coming;
      coming = next();
      coming_own = next_own();
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int v = 0; v < V; ++v) total[TAPS][v] += float(d0.pixels[j].v[v]);
      add_products<0, S>(total, here, d0);
      if (S == 1) {
        add_products<1, S>(total, here, d1);
        add_products<2, S>(total, here, d2);
      } else {
        add_products<2, S>(total, here, d1);
        here = coming;
        coming = next();
        add_products<1, S>(total, here, d0);
      }
      d2 = d1;
      d1 = d0;
    }
  }
  const int across_block = blockDim.x * V, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int t = 0; t <= TAPS; ++t) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.y * across_block + threadIdx.x * V + v] = total[t][v];
    __syncthreads();
    for (int c = thread; c < across_block; c += blockDim.x * blockDim.y) {
      const i64 to = blockIdx.x * i64(across_block) + c;
      if (to >= channels) continue;
      float sum = 0;
      for (int row = 0; row < blockDim.y; ++row) sum += sums[row * across_block + c];
      part[(blockIdx.y * i64(TAPS + 1) + t) * channels + to] = sum;
    }
  }
}

// Adds the shares to the gradients of the weights and, unless it is null, of the bias, by blocks of (32, 8) threads.
__global__ void __launch_bounds__(256) add_depthwise(const float* part, float* dw, float* db, i64 shares, i64 channels) {
  __shared__ float sums[8][32];
  const i64 k = blockIdx.x * 32ll + threadIdx.x, size = (TAPS + 1) * channels;
  float sum = 0;
  if (k < size) {
#pragma unroll 4
    for (i64 share = threadIdx.y; share < shares; share += 8) sum += part[share * size + k];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || k >= size) return;
#pragma unroll
  for (int row = 1; row < 8; ++row) sum += sums[row][threadIdx.x];
  const i64 t = k / channels, c = k % channels;
  float* to = t < TAPS ? dw + c * TAPS + t : db ? db + c : nullptr;
  if (to) *to += sum;
}

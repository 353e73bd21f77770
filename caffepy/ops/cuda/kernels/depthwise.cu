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

// N pixels of a line as they lie in memory, as words, and as numbers.
template <typename T, int V, int N> struct Line {
  static_assert(sizeof(T) * V % 4 == 0);
  using Words = Pack<unsigned, sizeof(T) * V / 4>;
  Words pixels[N];
};
template <int V, int N> struct Numbers { float of[N][V]; };

template <typename T, int V, int N> __device__ Numbers<V, N> numbers(const Line<T, V, N>& line) {
  Numbers<V, N> x;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int v = 0; v < V; ++v) x.of[i][v] = float(reinterpret_cast<const T*>(line.pixels[i].v)[v]);
  return x;
}

// bfloat16 is the upper half of a float.
template <int V, int N> __device__ Numbers<V, N> numbers(const Line<bf16_t, V, N>& line) {
  Numbers<V, N> x;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int v = 0; v < V; v += 2) {
      x.of[i][v] = __uint_as_float(line.pixels[i].v[v / 2] << 16);
      x.of[i][v + 1] = __uint_as_float(line.pixels[i].v[v / 2] & 0xffff0000u);
    }
  return x;
}

// Reads N pixels of one line after the other, from a column on; zeros outside the image.
template <typename T, int V, int N> struct Lines {
  const T* at;  // the first of the pixels
  int line, height, channels, pitch;
  bool in[N];
  __device__ Lines(const Image<T>& from, int n, int first, int column, int channel)
      : at(from.p + i64((n * from.height + first) * from.width + column) * from.channels + channel),
        line(first),
        height(from.height),
        channels(from.channels),
        pitch(from.width * from.channels) {
#pragma unroll
    for (int i = 0; i < N; ++i) in[i] = column + i >= 0 && column + i < from.width;
  }
  __device__ Line<T, V, N> next() {
    Line<T, V, N> got;
    const bool inside = line >= 0 && line < height;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      got.pixels[i] = {};
      if (inside && in[i])
        got.pixels[i] = *reinterpret_cast<const typename Line<T, V, N>::Words*>(at + i * channels);
    }
    ++line;
    at += pitch;
    return got;
  }
};

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
template <int R, int S, int FLIP, int V, int N, int M>
__device__ void add_line(Sums<V, N>& sums, const Numbers<V, M>& line, const Weights<V>& w) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int s = 0; s < 3; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v)
        sums.of[j][v] += line.of[j * S + s][v] * w.tap[FLIP ? 8 - (3 * R + s) : 3 * R + s][v];
}

// y (images, height, width, C) of x (images, lines, columns, C). FLIP: the gradient of x for a stride of 1 is the same
// of dy with the kernel turned around.
template <typename T, int V, int S, int FLIP>
__global__ void __launch_bounds__(256, 3)
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
    Lines<T, V, M> lines_of_x(source, at.n, first * S - int(top), from, channel);
    const auto next = [&] { return lines_of_x.next(); };
    Sums<V, N> open(start), below(start);
    Numbers<V, M> here = numbers(next());
    Line<T, V, M> coming = next();
    add_line<0, S, FLIP>(open, here, weights);
    if (S == 1) {
      here = numbers(coming);
      coming = next();
      add_line<1, S, FLIP>(open, here, weights);
      add_line<0, S, FLIP>(below, here, weights);
    }
    for (int i = first; i < end; ++i) {
      here = numbers(coming);
      coming = next();
      if (S == 2) {
        add_line<1, S, FLIP>(open, here, weights);
        here = numbers(coming);
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
template <int R, int V, int N>
__device__ void spread_line(Sums<V, N>& sums, const Numbers<V, N / 2 + 1>& line, const Weights<V>& w) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float mine = line.of[j / 2 + 1][v];
      if (j % 2)
        sums.of[j][v] += mine * w.tap[3 * R + 1][v];
      else
        sums.of[j][v] += mine * w.tap[3 * R][v] + line.of[j / 2][v] * w.tap[3 * R + 2][v];
    }
  }
}

// dx (images, height, width, C) of dy (images, lines, columns, C) for a stride of 2. Line q of dy adds to the lines
// 2 q - top to 2 q - top + 2 of dx; a run counts pairs of lines of dx.
template <typename T, int V>
__global__ void __launch_bounds__(256, 3)
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
    Lines<T, V, N / 2 + 1> lines_of_dy(source, at.n, first - 1, from - 1, channel);
    const auto next = [&] { return lines_of_dy.next(); };
    const auto put = [&](const Sums<V, N>& sums, int to) {
      if (to < 0 || to >= int(height)) return;
      write<N, V>(dx, sums, int(width), int(channels), at.n * int(height) + to, column, channel);
    };
    Sums<V, N> open(zero);
    Numbers<V, N / 2 + 1> here = numbers(next());
    Line<T, V, N / 2 + 1> coming = next();
    spread_line<2>(open, here, weights);
    for (int q = first; q < end; ++q) {
      here = numbers(coming);
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
template <int R, int S, int V, int N, int M>
__device__ void add_products(float (&total)[TAPS + 1][V], const Numbers<V, M>& x, const Numbers<V, N>& dy) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int s = 0; s < 3; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v)
        total[3 * R + s][v] += x.of[j * S + s][v] * dy.of[j][v];
}

// Sums over a share of the strips of dy (images, height, width, C): part (shares, 10, C), of the nine weights and of the
// bias. A block takes blockDim.x packs of channels; its threads in y take strips in turn.
template <typename T, int V, int S>
__global__ void __launch_bounds__(256, 3)
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
    Lines<T, V, M> lines_of_x(source, at.n, first * S - int(top), column * S - int(left), channel);
    Lines<T, V, N> lines_of_dy(target, 0, first, column, channel);
    Numbers<V, M> here;
    Numbers<V, N> d0, d1 = {}, d2 = {};
    Line<T, V, M> coming = lines_of_x.next();
    Line<T, V, N> coming_own = lines_of_dy.next();
    for (int i = first; i < end + (S == 1 ? 2 : 1); ++i) {
      d0 = numbers(coming_own);
      here = numbers(coming);
      coming = lines_of_x.next();
      coming_own = lines_of_dy.next();
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int v = 0; v < V; ++v) total[TAPS][v] += d0.of[j][v];
      add_products<0, S>(total, here, d0);
      if (S == 1) {
        add_products<1, S>(total, here, d1);
        add_products<2, S>(total, here, d2);
      } else {
        add_products<2, S>(total, here, d1);
        here = numbers(coming);
        coming = lines_of_x.next();
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

// Convolutions of each channel by itself with a kernel of 3 x 3, channels last, weights float32 (C, 1, 3, 3):
//   y[n, i, j, c] = sum over r, s of x[n, i * S + r - top, j * S + s - left, c] * w[c, r, s]
// A thread takes V channels of a strip: some columns of a run of lines. It goes down the strip, reads each line of the
// other array once and adds it to all that need it; the next line is on its way meanwhile. Sums are in a fixed order.

#include "pack.cuh"
#include "rectify.cuh"
#include "shares.cuh"

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

// Reads N pixels of one line after the other, from a column on; zeros outside the image. The compiler knows the number C of
// channels, unless it is 0: then pixels have one address with offsets in the instructions, which saves registers.
template <typename T, int V, int N, int C = 0> struct Lines {
  const T* at;  // the first of the pixels
  int line, height, channels, pitch;
  unsigned columns = 0;  // a bit for each that is inside the image
  __device__ Lines(const Image<T>& from, int n, int first, int column, int channel)
      : at(from.p + i64((n * from.height + first) * from.width + column) * from.channels + channel),
        line(first),
        height(from.height),
        channels(from.channels),
        pitch(from.width * from.channels) {
#pragma unroll
    for (int i = 0; i < N; ++i) columns |= unsigned(column + i >= 0 && column + i < from.width) << i;
  }
  // The columns that are inside, of the next line.
  __device__ unsigned there() const { return line >= 0 && line < height ? columns : 0; }
  __device__ Line<T, V, N> next() {
    Line<T, V, N> got;
    const unsigned inside = there();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      got.pixels[i] = {};
      if (inside >> i & 1)
        got.pixels[i] = *reinterpret_cast<const typename Line<T, V, N>::Words*>(at + i * (C ? C : channels));
    }
    ++line;
    at += pitch;
    return got;
  }
};

// Lines as they lie.
template <typename T, int V, int N, int C> struct PlainLines {
  using Words = Line<T, V, N>;
  Lines<T, V, N, C> x;
  __device__ Words next() { return x.next(); }
  __device__ Numbers<V, N> numbers(const Words& words) const { return ::numbers(words); }
};

// Lines of what a normalization makes of x, with what follows it: x * by + plus, 0 outside the image.
template <typename T, int V, int N, int C, int AFTER> struct NormalizedLines {
  struct Words {
    Line<T, V, N> x;
    unsigned inside;
  };
  Lines<T, V, N, C> x;
  float by[V], plus[V], most;
  __device__ Words next() {
    const unsigned inside = x.there();
    return {x.next(), inside};
  }
  __device__ Numbers<V, N> numbers(const Words& words) const {
    Numbers<V, N> y = ::numbers(words.x);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float z = fmaf(y.of[i][v], by[v], plus[v]);
        if (AFTER && z <= 0) z = 0;
        if (AFTER == CLIPPED && z > most) z = most;
        y.of[i][v] = words.inside >> i & 1 ? z : 0.0f;
      }
    return y;
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
template <int N, int C = 0, int V, typename T>
__device__ void write(T* p, const Sums<V, N>& sums, int width, int channels, int line, int column, int channel) {
  T* const to = p + ((line * width + column) * channels + channel);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (column + j < 0 || column + j >= width) continue;
    Pack<T, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) pack.v[v] = T(sums.of[j][v]);
    *reinterpret_cast<Pack<T, V>*>(to + j * (C ? C : channels)) = pack;
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

// Pixels of a line of x for four sums with a stride of S.
template <int S> constexpr int ACROSS = 3 * S + 3;

// Lines of y (images, height, width, C) of x (images, lines, columns, C) in a strip: put(line, column, sums); lines(n, line,
// column) gives those of x from a place on. FLIP: the gradient of x for a stride of 1 is the same of dy with the kernel
// turned around.
template <int S, int FLIP, int V, typename From, typename Put>
__device__ void convolve(const From& lines, const Strip& at, const Weights<V>& weights, const float (&start)[V], int height,
                         int top, int left, int run, const Put& put) {
  constexpr int N = 4, M = ACROSS<S>;
  const int column = at.group * N, first = at.run * run, end = min(first + run, height);
  auto lines_of_x = lines(at.n, first * S - top, column * S - left);
  const auto next = [&] { return lines_of_x.next(); };
  const auto numbers = [&](const auto& words) { return lines_of_x.numbers(words); };
  Sums<V, N> open(start), below(start);
  Numbers<V, M> here = numbers(next());
  auto coming = next();
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
    put(i, column, open);
    open = S == 1 ? below : fresh;
    below = fresh;
  }
}

template <typename T, int V, int S, int FLIP>
__global__ void __launch_bounds__(256, 3)
depthwise(const T* x, const float* w, const float* b, T* y, i64 relu, i64 images, i64 height, i64 width, i64 channels,
          i64 lines, i64 columns, i64 top, i64 left, i64 run) {
  constexpr int N = 4;
  const unsigned packs = unsigned(channels / V), across = strips(width, N), down = strips(height, run);
  const Image<T> source{x, int(lines), int(columns), int(channels)};
  FOR_EACH(k, images * down * across * packs) {
    const Strip at(unsigned(k), packs, across, down);
    const int channel = at.pack * V;
    const Weights<V> weights(w, channel);
    float start[V];
#pragma unroll
    for (int v = 0; v < V; ++v) start[v] = b ? b[channel + v] : 0.0f;
    const auto from = [&](int n, int line, int column) {
      return PlainLines<T, V, ACROSS<S>, 0>{{source, n, line, column, channel}};
    };
    convolve<S, FLIP>(from, at, weights, start, int(height), int(top), int(left), int(run),
                      [&](int i, int column, Sums<V, N>& sums) {
                        if (relu) {
#pragma unroll
                          for (int j = 0; j < N; ++j)
#pragma unroll
                            for (int v = 0; v < V; ++v) sums.of[j][v] = sums.of[j][v] < 0 ? 0.0f : sums.of[j][v];
                        }
                        write<N>(y, sums, int(width), int(channels), at.n * int(height) + i, column, channel);
                      });
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
      write<N>(dx, sums, int(width), int(channels), at.n * int(height) + to, column, channel);
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

// Adds up what the threads of a block have of its channels: to[row * by_row + share * by_share + channel].
template <int ROWS, int V, typename B, typename A>
__device__ void block_sums(const B (*total)[V], B* shared, A* to, i64 by_row, i64 by_share, i64 channels) {
  const int across_block = blockDim.x * V, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int t = 0; t < ROWS; ++t) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) shared[threadIdx.y * across_block + threadIdx.x * V + v] = total[t][v];
    __syncthreads();
    for (int c = thread; c < across_block; c += blockDim.x * blockDim.y) {
      const i64 channel = blockIdx.x * i64(across_block) + c;
      if (channel >= channels) continue;
      B sum = 0;
      for (int row = 0; row < blockDim.y; ++row) sum += shared[row * across_block + c];
      to[t * by_row + blockIdx.y * by_share + channel] = A(sum);
    }
  }
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
  block_sums<TAPS + 1, V>(total, sums, part, channels, (TAPS + 1) * channels, channels);
}

// y without a bias, and partial sums (2, shares, C) of y and y^2, from those of y - k and (y - k)^2 with k the first y of
// the thread: no cancellation in float. Blocks as for depthwise_gradient. NORMED: what is convolved is what a normalization
// makes of x, with what follows it.
template <typename T, int V, int S, int C, int NORMED, int AFTER>
__global__ void __launch_bounds__(256, 3)
depthwise_moments(const T* x, const float* w, const float* factor, const float* shift, double ceiling, T* y, double* partial,
                  i64 images, i64 height, i64 width, i64 channels, i64 lines, i64 columns, i64 top, i64 left, i64 run) {
  constexpr int N = 4;
  extern __shared__ double parts[];  // (blockDim.y, blockDim.x * V)
  const int channel = int(blockIdx.x * blockDim.x + threadIdx.x) * V;
  const unsigned across = strips(width, N), down = strips(height, run), count = unsigned(images) * down * across;
  const Image<T> source{x, int(lines), int(columns), int(channels)};
  const float zero[V] = {};
  float k[V] = {}, first[V] = {}, second[V] = {};
  int seen = 0;
  if (channel < channels) {
    const Weights<V> weights(w, channel);
    NormalizedLines<T, V, ACROSS<S>, C, AFTER> of_x{{source, 0, 0, 0, channel}, {}, {}, float(ceiling)};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      of_x.by[v] = NORMED ? factor[channel + v] : 1;
      of_x.plus[v] = NORMED ? shift[channel + v] : 0;
    }
    const auto from = [&](int n, int line, int column) {
      const Lines<T, V, ACROSS<S>, C> x(source, n, line, column, channel);
      if constexpr (NORMED) {
        of_x.x = x;
        return of_x;
      } else {
        return PlainLines<T, V, ACROSS<S>, C>{x};
      }
    };
    for (unsigned i = blockIdx.y * blockDim.y + threadIdx.y; i < count; i += gridDim.y * blockDim.y) {
      const Strip at(i, 1, across, down);
      convolve<S, 0>(from, at, weights, zero, int(height), int(top), int(left), int(run),
                     [&](int line, int column, Sums<V, N>& sums) {
                       const int there = min(N, int(width) - column);
#pragma unroll
                       for (int v = 0; v < V; ++v) {
                         if (seen == 0) k[v] = float(T(sums.of[0][v]));
#pragma unroll
                         for (int j = 0; j < N; ++j) {
                           const float d = j < there ? float(T(sums.of[j][v])) - k[v] : 0.0f;
                           first[v] += d;
                           second[v] += d * d;
                         }
                       }
                       seen += there;
                       write<N, C>(y, sums, int(width), C, at.n * int(height) + line, column, channel);
                     });
    }
  }
  double total[2][V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const double shift = double(k[v]), d = double(first[v]);
    total[0][v] = d + seen * shift;
    total[1][v] = double(second[v]) + (2 * d + seen * shift) * shift;
  }
  block_sums<2, V>(total, parts, partial, gridDim.y * channels, channels, channels);
}

// Lines of the gradient factor * g + slope * z + rest of a normalization, 0 outside the image.
template <typename T, int V, int N, int C> struct NormLines {
  struct Words {
    Line<T, V, N> g, z;
    unsigned inside;
  };
  Lines<T, V, N, C> g, z;
  float factor[V], slope[V], rest[V];
  __device__ NormLines(const Image<T>& of_g, const Image<T>& of_z, const float* factors, const float* line, int n,
                       int first, int column, int channel)
      : g(of_g, n, first, column, channel), z(of_z, n, first, column, channel) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      factor[v] = factors[channel + v];
      slope[v] = line[channel + v];
      rest[v] = line[C + channel + v];
    }
  }
  __device__ Words next() {
    const unsigned inside = g.there();
    return {g.next(), z.next(), inside};
  }
  __device__ Numbers<V, N> numbers(const Words& words) const {
    Numbers<V, N> d = ::numbers(words.g);
    const Numbers<V, N> of_z = ::numbers(words.z);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int v = 0; v < V; ++v)
        d.of[i][v] = fmaf(factor[v], d.of[i][v], fmaf(slope[v], of_z.of[i][v], words.inside >> i & 1 ? rest[v] : 0.0f));
    return d;
  }
};

// For a line of x and one of the gradient dy of the output that tap row R reaches from there: sums += dx, total += dw.
// With a stride of 1 tap row R is that of the kernel turned around; with 2 the columns are those of depthwise_spread.
template <int R, int S, int V, int N, int M>
__device__ void add_both(Sums<V, N>& sums, float (&total)[TAPS + 2][V], const Numbers<V, N>& x, const Numbers<V, M>& dy,
                         const Weights<V>& w) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      if (S == 2 && (j + s) % 2) continue;
      const int tap = S == 1 ? TAPS - 1 - (3 * R + s) : 3 * R + s, from = S == 1 ? j + s : (j - s) / 2 + 1;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sums.of[j][v] += dy.of[from][v] * w.tap[tap][v];
        total[tap][v] += dy.of[from][v] * x.of[j][v];
      }
    }
}

// Both gradients of a convolution, in one pass: from dy = factor * g + slope * z + rest (images, lines, columns, C), which
// a normalization behind it would write, and x (images, height, width, C), dx and partial sums of dw as by
// depthwise_gradient. MASK: BY_Y, x is what a ReLU gave, whose gradient is written; BY_X, x is what a normalization got
// whose result, with the ReLU, is convolved: its sums for the gradient of that normalization go to sums (2, shares, C).
template <typename T, int V, int S, int C, int MASK, int AFTER>
__global__ void __launch_bounds__(MASK == BY_X ? 128 : 256, MASK == BY_X ? 3 : 2)
depthwise_both(const T* x, const float* w, const T* g, const T* z, const float* factors, const float* line,
               const float* mean, const float* factor, const float* shift, double ceiling, T* dx, float* part, double* sums,
               i64 images, i64 height, i64 width, i64 channels, i64 lines, i64 columns, i64 top, i64 left, i64 run) {
  constexpr int N = 4, M = S == 1 ? N + 2 : N / 2 + 1;
  extern __shared__ float shared[];  // (blockDim.y, blockDim.x * V)
  const int channel = int(blockIdx.x * blockDim.x + threadIdx.x) * V;
  const int above = S == 1 ? 0 : int(top) / 2, before = S == 1 ? 0 : int(left) / 2;
  const int steps = S == 1 ? int(height) : int(height + top + 1) / 2 - above;  // lines, or pairs of lines
  const unsigned across = strips(width + (S == 1 ? 0 : left - 2 * before), N), down = strips(steps, run);
  const unsigned count = unsigned(images) * down * across;
  const Image<T> of_x{x, int(height), int(width), int(channels)}, of_g{g, int(lines), int(columns), int(channels)};
  const Image<T> of_z{z, int(lines), int(columns), int(channels)};
  const float zero[V] = {}, most = float(ceiling);
  float total[TAPS + 2][V] = {};  // the last two: sums of d and of d * (x - mean)
  if (channel < channels) {
    const Weights<V> weights(w, channel);
    float mu[V], by[V], plus[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      mu[v] = MASK == BY_X ? mean[channel + v] : 0;
      by[v] = MASK == BY_X ? factor[channel + v] : 1;
      plus[v] = MASK == BY_X ? shift[channel + v] : 0;
    }
    for (unsigned k = blockIdx.y * blockDim.y + threadIdx.y; k < count; k += gridDim.y * blockDim.y) {
      const Strip at(k, 1, across, down);
      const int first = above + at.run * int(run), end = min(first + int(run), above + steps);
      const int from = S == 1 ? at.group * N - int(left) : before + at.group * (N / 2) - 1;  // column of dy
      const int column = S == 1 ? at.group * N : 2 * (from + 1) - int(left);
      NormLines<T, V, M, C> lines_of_dy(of_g, of_z, factors, line, at.n, S == 1 ? first - int(top) : first - 1, from, channel);
      Lines<T, V, N, C> lines_of_x(of_x, at.n, S == 1 ? first : 2 * first - int(top), column, channel);
      const auto next = [&] { return lines_of_dy.numbers(lines_of_dy.next()); };
      // A line of dx, of which the first argument is the number, and the line of x there.
      const auto make = [&](int to, const Line<T, V, N>& words, const auto& add) {
        const Numbers<V, N> given = numbers(words);
        Numbers<V, N> here = given;
        if (MASK == BY_X) {
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int v = 0; v < V; ++v) {
              float y = fmaf(given.of[j][v], by[v], plus[v]);
              if (AFTER && y <= 0) y = 0;
              if (AFTER == CLIPPED && y > most) y = most;
              here.of[j][v] = lines_of_x.columns >> j & 1 ? y : 0.0f;
            }
        }
        Sums<V, N> of_line(zero);
        add(of_line, here);
        if (MASK != NO_MASK) {
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int v = 0; v < V; ++v) {
              if (passes_nothing<AFTER>(here.of[j][v], most)) of_line.of[j][v] = 0;
              if (MASK != BY_X) continue;
              const float d = lines_of_x.columns >> j & 1 ? of_line.of[j][v] : 0.0f;
              total[TAPS][v] += d;
              total[TAPS + 1][v] += d * (given.of[j][v] - mu[v]);
            }
        }
        write<N, C>(dx, of_line, int(width), C, at.n * int(height) + to, column, channel);
      };
      if constexpr (S == 1) {
        Numbers<V, M> d0 = next(), d1 = next();
        auto coming = lines_of_dy.next();
        Line<T, V, N> coming_own = lines_of_x.next();
        for (int i = first; i < end; ++i) {
          const Numbers<V, M> d2 = lines_of_dy.numbers(coming);
          const Line<T, V, N> own = coming_own;
          coming = lines_of_dy.next();
          coming_own = lines_of_x.next();
          make(i, own, [&](Sums<V, N>& of_line, const Numbers<V, N>& here) {
            add_both<0, S>(of_line, total, here, d0, weights);
            add_both<1, S>(of_line, total, here, d1, weights);
            add_both<2, S>(of_line, total, here, d2, weights);
          });
          d0 = d1;
          d1 = d2;
        }
      } else {
        Numbers<V, M> d0 = next();
        auto coming = lines_of_dy.next();
        Line<T, V, N> coming_even = lines_of_x.next(), coming_odd = lines_of_x.next();
        for (int q = first; q < end; ++q) {
          const Numbers<V, M> d1 = lines_of_dy.numbers(coming);
          const Line<T, V, N> even = coming_even, odd = coming_odd;
          const int to = 2 * q - int(top);
          coming = lines_of_dy.next();
          coming_even = lines_of_x.next();
          coming_odd = lines_of_x.next();
          if (to >= 0)
            make(to, even, [&](Sums<V, N>& of_line, const Numbers<V, N>& here) {
              add_both<0, S>(of_line, total, here, d1, weights);
              add_both<2, S>(of_line, total, here, d0, weights);
            });
          if (to + 1 < int(height))
            make(to + 1, odd, [&](Sums<V, N>& of_line, const Numbers<V, N>& here) {
              add_both<1, S>(of_line, total, here, d1, weights);
            });
          d0 = d1;
        }
      }
    }
  }
  block_sums<TAPS, V>(total, shared, part, channels, (TAPS + 1) * channels, channels);
  if (MASK == BY_X) block_sums<2, V>(total + TAPS, shared, sums, gridDim.y * channels, channels, channels);
}

// Adds the shares to the gradients of the weights and, unless it is null, of the bias, by blocks of (32, 32) threads.
__global__ void __launch_bounds__(1024) add_depthwise(const float* part, float* dw, float* db, i64 shares, i64 channels) {
  const i64 mine = blockIdx.x * 32ll + threadIdx.y, size = (TAPS + 1) * channels;
  const float sum = sum_of_all(part, shares, size, blockIdx.x * 32ll, size);
  if (threadIdx.x || mine >= size) return;
  const i64 t = mine / channels, c = mine % channels;
  float* to = t < TAPS ? dw + c * TAPS + t : db ? db + c : nullptr;
  if (to) *to += sum;
}

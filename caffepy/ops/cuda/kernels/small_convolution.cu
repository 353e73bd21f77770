// Convolutions of small images, channels last, weights float32 in Caffe's order (O, C, kh, kw):
//   y[n, p, q, o] = sum over c, r, s of x[n, p * sh + r * dh - ph, q * sw + s * dw - pw, c] * w[o, c, r, s]
// A block keeps a piece of images with all channels that it needs in shared memory, so that elements are fetched and
// converted once for all taps, and multiplies by tensor cores, whose operands it reads from there at
// (offset of a position) + (offset of a tap and channel). Everything is in words of 32 bits: one number of 32 bits, or
// two of 16. All sums are in a fixed order.

#include "pack.cuh"
#include "mma.cuh"
#include "shares.cuh"

constexpr int MOST_THREADS = 512;
constexpr int AT_ONCE = 8;  // loads under way in a thread

template <typename T> constexpr int PER_WORD = 4 / sizeof(T);

// What a block keeps of images: `lines` lines of `columns` pixels for each of its images. A pixel is `depth` words;
// `pitch`, how many words pixels lie apart, is odd, so that neighbours lie in different banks.
struct Piece {
  int lines, columns, depth, pitch;
  Divisor by_depth, by_columns, by_lines;

  // Word j of each pixel becomes word(image, line, column, j).
  template <typename F> __device__ void fill(unsigned* piece, int images, F word) const {
    const int words = images * lines * columns * depth, step = blockDim.x;
    for (int first = threadIdx.x; first < words; first += AT_ONCE * step) {
      unsigned values[AT_ONCE];
      int places[AT_ONCE];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int i = first + u * step;
        if (i >= words) continue;
        const int pixel = by_depth.quotient(i), j = i - pixel * depth;
        const int line = by_columns.quotient(pixel), image = by_lines.quotient(line);
        places[u] = pixel * pitch + j;
        values[u] = word(image, line - image * lines, pixel - line * columns, j);
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u)
        if (first + u * step < words) piece[places[u]] = values[u];
    }
  }
};

// Whether there is something at a place that counts from the first of `size` elements which lie `spread` apart; it
// becomes the element's number.
__device__ inline bool inside(int& place, int size, int spread) {
  if (place < 0) return false;
  if (spread > 1) {
    const int element = place / spread;
    if (element * spread != place) return false;
    place = element;
  }
  return place < size;
}

// Word j of a pixel with so many channels; in_words: all pixels begin and end with a whole word.
template <typename T> __device__ unsigned word_of(const T* pixel, int j, int channels, bool in_words) {
  if constexpr (PER_WORD<T> == 1) {
    return tf32(pixel[j]);
  } else {
    if (in_words) return reinterpret_cast<const unsigned*>(pixel)[j];
    const unsigned low = pixel[2 * j].bits, high = 2 * j + 1 < channels ? pixel[2 * j + 1].bits : 0;
    return high << 16 | low;
  }
}

// A word of as many numbers as are in one
template <typename T> __device__ unsigned word_from(const float (&values)[PER_WORD<T>]) {
  if constexpr (PER_WORD<T> == 1)
    return tf32(values[0]);
  else
    return unsigned(T(values[1]).bits) << 16 | T(values[0]).bits;
}

// Where a block of 8 * N columns keeps column n, so that a thread's results are of 2 * N neighbours: column n of it is
// result (n / 2 % N, n % 2) of the threads with t = n / (2 * N).
template <int N> __device__ int place_of(int n) { return n / 2 % N * 8 + n / (2 * N) * 2 + n % 2; }

// Weights to shared memory, in lines of `line` words for each of the columns first ... first + columns: word
// (c / PER_WORD) * taps + tap holds those of channels c. w is (all columns, channels, taps), or turned (channels, all
// columns, taps). The rest of the last 8 words is 0.
template <typename T, int N>
__device__ void fill_weights(unsigned* weights, const float* w, int first, int columns, int all, int channels, int taps,
                             Divisor by_taps, int line, bool turned) {
  constexpr int E = PER_WORD<T>;
  const int words = (channels + E - 1) / E, depth = words * taps, apart = turned ? all * taps : channels * taps;
  const float* begin = w + first * (turned ? taps : apart);
  if (E == 1 && !turned && depth % 4 == 0 && aligned(begin, 16)) {
    constexpr int HALF = AT_ONCE / 2;
    const int packs = columns * (depth / 4);
    for (int i = threadIdx.x; i < packs; i += HALF * blockDim.x) {
      Pack<float, 4> values[HALF];
#pragma unroll
      for (int u = 0; u < HALF; ++u)
        if (i + u * int(blockDim.x) < packs) values[u] = reinterpret_cast<const Pack<float, 4>*>(begin)[i + u * blockDim.x];
#pragma unroll
      for (int u = 0; u < HALF; ++u) {
        const int at = i + u * blockDim.x, row = at / (depth / 4);
        if (at >= packs) continue;
        Pack<unsigned, 4> four;
#pragma unroll
        for (int v = 0; v < 4; ++v) four.v[v] = tf32(values[u].v[v]);
        reinterpret_cast<Pack<unsigned, 4>*>(weights + place_of<N>(row) * line)[at - row * (depth / 4)] = four;
      }
    }
  } else {
    // Neighbours of a row of w go to neighbours of a column: word `at` of the words of a row, or of rows for 16 bits.
    const int rows = turned ? words : columns, length = turned ? columns * taps : depth;
    int row = threadIdx.x / length, at = threadIdx.x - row * length;
    while (row < rows) {
      float values[AT_ONCE][E];
      int places[AT_ONCE];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        places[u] = -1;
        if (row >= rows) continue;
        const int across = by_taps.quotient(at), c = (turned ? row : across) * E;
        const float* from = begin + (turned ? row * E * apart + at : row * apart + at + across * taps * (E - 1));
        places[u] = place_of<N>(turned ? across : row) * line + (turned ? row * taps + at - across * taps : at);
#pragma unroll
        for (int e = 0; e < E; ++e) values[u][e] = c + e < channels ? from[e * (turned ? apart : taps)] : 0;
        for (at += blockDim.x; at >= length; at -= length) ++row;
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u)
        if (places[u] >= 0) weights[places[u]] = word_from<T>(values[u]);
    }
  }
  const int rest = (depth + 7) / 8 * 8 - depth;
  for (int i = threadIdx.x; i < columns * rest; i += blockDim.x)
    weights[place_of<N>(i / rest) * line + depth + i % rest] = 0;
}

// Results of a thread in one row: columns first ... first + 2 * N of rows of `all`, with bias and ReLU.
template <typename T, int N> struct Results {
  T* y;
  int first, all;
  float bias[2 * N];
  bool relu, whole, pairs;
  __device__ Results(T* y, const float* b, int first, int all, bool relu)
      : y(y), first(first), all(all), relu(relu), whole(false), pairs(all % 2 == 0 && aligned(y, 2 * sizeof(T))) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) bias[i] = b && first + i < all ? b[first + i] : 0.0f;
    if constexpr ((N & (N - 1)) == 0 && N <= 4) whole = all % (2 * N) == 0 && aligned(y, 2 * N * sizeof(T));
  }
  __device__ void write(int row, float (&sums)[2 * N]) const {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      sums[i] += bias[i];
      if (relu && sums[i] <= 0) sums[i] = 0;
    }
    T* to = y + i64(row) * all + first;
    if (whole) {
      if (first < all) write_packs<(N & (N - 1)) == 0 && N <= 4 ? 2 * N : 2>(to, sums);
    } else if (pairs) {
      write_packs<2>(to, sums);
    } else {
      write_packs<1>(to, sums);
    }
  }
  template <int V> __device__ void write_packs(T* to, const float (&sums)[2 * N]) const {
#pragma unroll
    for (int i = 0; i < 2 * N; i += V) {
      if (first + i >= all) break;
      Pack<T, V> pack;
#pragma unroll
      for (int v = 0; v < V; ++v) pack.v[v] = T(sums[i + v]);
      *reinterpret_cast<Pack<T, V>*>(to + i) = pack;
    }
  }
};

// sums (16 * M x 8 * N) += products over the steps of 8 words lo ... hi. The left factor at(m, half, k) is
// piece[rows[m][half] + depths[k]], the right one load_right(step, n, words).
template <typename T, int M, int N, typename D, typename F>
__device__ void accumulate(float (&sums)[M][N][4], const unsigned* piece, const int (&rows)[M][2], int lo, int hi,
                           D depths, F load_right) {
#pragma unroll 2
  for (int step = lo; step < hi; ++step) {
    const Pack<int, 2> depth = depths(step);
    unsigned right[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n) load_right(step, n, right[n]);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const unsigned left[4] = {piece[rows[m][0] + depth.v[0]], piece[rows[m][1] + depth.v[0]],
                                piece[rows[m][0] + depth.v[1]], piece[rows[m][1] + depth.v[1]]};
#pragma unroll
      for (int n = 0; n < N; ++n) multiply<T>(sums[m][n], left, right[n]);
    }
  }
}

// Sums of a warp to shared memory, thread by thread
template <int M, int N> __device__ void put_aside(float* parts, const float (&sums)[M][N][4]) {
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) parts[(((warp * M + m) * N + n) * 4 + j) * 32 + lane_id] = sums[m][n][j];
}

// y = relu(w * x + b), b and the relu may be missing; or, `turned`, dx from dy: x is what is read, y what is written,
// channels and outputs theirs. A pixel of y sees x in steps of (step_h, step_w) from -top, -left on, where rows of x lie
// spread_h and columns spread_w apart with zeros between them; dx sees dy spread by the stride, in steps of 1, with
// the taps in reverse.
//
// A block makes 8 * N columns (outputs) of `lines` lines of `images` images, a warp 16 * M rows (positions) of them;
// `split` warps share the depth. Grid (any number up to that of pieces, ceil(outputs / (8 * N))). Shared memory: offsets
// of words of the depth, weights, and in one place the piece of x and then the sums of warps.
template <typename T, int M, int N> __global__ void __launch_bounds__(MOST_THREADS)
small_convolution(const T* x, const float* w, const float* b, T* y, int number, int channels, int height, int width,
                  int outputs, int out_height, int out_width, int taps_h, int taps_w, int dilation_h, int dilation_w,
                  int step_h, int step_w, int spread_h, int spread_w, int top, int left, int turned, int relu,
                  int images, int lines, int split, i64 by_depth, i64 by_columns, i64 by_lines, i64 by_taps) {
  extern __shared__ __align__(16) unsigned room[];
  constexpr int E = PER_WORD<T>;
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane_id / 4, t = lane_id % 4;
  const int group = warp / split, share = warp % split, groups = warps / split;
  const int words = (channels + E - 1) / E, taps = taps_h * taps_w, depth = words * taps, steps = (depth + 7) / 8;
  const int line = (steps | 1) * 8, first = blockIdx.y * 8 * N;
  const Piece from{(lines - 1) * step_h + (taps_h - 1) * dilation_h + 1,
                   (out_width - 1) * step_w + (taps_w - 1) * dilation_w + 1,
                   words, words | 1, Divisor(by_depth), Divisor(by_columns), Divisor(by_lines)};
  int* offsets = reinterpret_cast<int*>(room);
  unsigned *weights = room + 8 * steps, *piece = weights + 8 * N * line;
  float* parts = reinterpret_cast<float*>(piece);

  for (int i = threadIdx.x; i < 8 * steps; i += blockDim.x) {
    const int c = i / taps, tap = turned ? taps - 1 - i % taps : i % taps, r = tap / taps_w, s = tap % taps_w;
    offsets[i] = i < depth ? (r * dilation_h * from.columns + s * dilation_w) * from.pitch + c : 0;
  }
  fill_weights<T, N>(weights, w, first, min(8 * N, outputs - first), outputs, channels, taps, Divisor(by_taps), line,
                     turned);
  int rows[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (group * M + m) * 16 + half * 8 + g, at = row / out_width, image = at / lines;
      const int pixel = (image * from.lines + at % lines * step_h) * from.columns + row % out_width * step_w;
      rows[m][half] = image < images ? pixel * from.pitch : 0;
    }
  const bool in_words = channels % E == 0 && aligned(x, 4);
  const int lo = steps * share / split, hi = steps * (share + 1) / split;
  const int pieces = (out_height + lines - 1) / lines, tiles = (number + images - 1) / images * pieces;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int n0 = tile / pieces * images, p0 = tile % pieces * lines;
    from.fill(piece, images, [=](int image, int row, int column, int j) -> unsigned {
      row += p0 * step_h - top;
      column -= left;
      if (n0 + image >= number || !inside(row, height, spread_h) || !inside(column, width, spread_w)) return 0;
      return word_of(x + i64((n0 + image) * height + row) * width * channels + column * channels, j, channels, in_words);
    });
    __syncthreads();
    float sums[M][N][4] = {};
    accumulate<T>(
        sums, piece, rows, lo, hi,
        [=](int step) { return reinterpret_cast<const Pack<int, 2>*>(offsets)[step * 4 + t]; },
        [=](int step, int n, unsigned(&right)[2]) {
          const auto pair = reinterpret_cast<const Pack<unsigned, 2>*>(weights + (n * 8 + g) * line)[step * 4 + t];
          right[0] = pair.v[0];
          right[1] = pair.v[1];
        });
    const Results<T, N> results(y, b, first + t * 2 * N, outputs, relu);
    const int start = (n0 * out_height + p0) * out_width;
    const int limit = out_width * (images > 1 ? min(images, number - n0) * out_height : min(lines, out_height - p0));
    if (split == 1) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (group * M + m) * 16 + half * 8 + g;
          float mine[2 * N];
#pragma unroll
          for (int i = 0; i < 2 * N; ++i) mine[i] = sums[m][i / 2][half * 2 + i % 2];
          if (row < limit) results.write(start + row, mine);
        }
    } else {
      __syncthreads();
      put_aside(parts, sums);
      __syncthreads();
      for (int item = warp; item < groups * M * 2; item += warps) {
        const int half = item % 2, m = item / 2 % M, of = item / 2 / M, row = (of * M + m) * 16 + half * 8 + g;
        float mine[2 * N] = {};
        for (int k = 0; k < split; ++k)
#pragma unroll
          for (int i = 0; i < 2 * N; ++i)
            mine[i] += parts[((((of * split + k) * M + m) * N + i / 2) * 4 + half * 2 + i % 2) * 32 + lane_id];
        if (row < limit) results.write(start + row, mine);
      }
    }
    __syncthreads();
  }
}

// Shares of dw[o, c, r, s] = sum over n, p, q of dy[n, p, q, o] * x[n, p * sh + r * dh - ph, ..., c], and of
// db[o] = sum of dy[..., o] if `with_bias`.
//
// The depth is of positions, words of pairs of them for 16 bits; x has a word for each pixel and channel then, of it and
// the pixel that the next position sees. A block makes columns (outputs) 8 * N * z ... of rows (c, r, s) from
// 16 * M * groups * y on, of every gridDim.x-th piece; `split` warps share the depth. Part (gridDim.x, sums) gets
// its sums as threads have them, those of db last. Shared memory: dy, offsets of positions, sums of db, the piece of x,
// whose place and what follows then are the sums of warps'.
template <typename T, int M, int N> __global__ void __launch_bounds__(MOST_THREADS)
small_gradient(const T* x, const T* dy, float* part, int number, int channels, int height, int width, int outputs,
               int out_height, int out_width, int taps_h, int taps_w, int dilation_h, int dilation_w, int step_h,
               int step_w, int top, int left, int images, int lines, int split, int most_channels, int with_bias,
               i64 by_depth, i64 by_columns, i64 by_lines, i64 by_pairs) {
  extern __shared__ __align__(16) unsigned room[];
  constexpr int E = PER_WORD<T>;
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane_id / 4, t = lane_id % 4;
  const int group = warp / split, share = warp % split, groups = warps / split;
  const int taps = taps_h * taps_w, height_of_block = 16 * M * groups, first_row = blockIdx.y * height_of_block;
  const int first_channel = first_row / taps, first = blockIdx.z * 8 * N, columns = min(8 * N, outputs - first);
  const int across = (out_width + E - 1) / E, depth = images * lines * across, steps = (depth + 7) / 8;
  constexpr int LINE = (N | 1) * 8;
  const Piece from{(lines - 1) * step_h + (taps_h - 1) * dilation_h + 1,
                   ((across * E - 1) * step_w + (taps_w - 1) * dilation_w + 1),
                   most_channels, most_channels | 1, Divisor(by_depth), Divisor(by_columns), Divisor(by_lines)};
  const Divisor by_across(by_pairs);
  unsigned* right = room;
  int* offsets = reinterpret_cast<int*>(right + 8 * steps * LINE);
  float* bias_sums = reinterpret_cast<float*>(offsets + 8 * steps);
  unsigned* piece = reinterpret_cast<unsigned*>(bias_sums + blockDim.x);

  for (int i = threadIdx.x; i < 8 * steps; i += blockDim.x) {
    const int at = i / across, image = at / lines;
    const int pixel = (image * from.lines + at % lines * step_h) * from.columns + i % across * E * step_w;
    offsets[i] = i < depth ? pixel * from.pitch : 0;
  }
  int rows[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + (group * M + m) * 16 + half * 8 + g, c = row / taps, tap = row % taps;
      const int pixel = tap / taps_w * dilation_h * from.columns + tap % taps_w * dilation_w;
      rows[m][half] = c < channels ? pixel * from.pitch + c - first_channel : 0;
    }
  const int at_once = blockDim.x / columns, column = threadIdx.x % columns, mine = threadIdx.x / columns;
  const int lo = steps * share / split, hi = steps * (share + 1) / split;
  const int pieces = (out_height + lines - 1) / lines, tiles = (number + images - 1) / images * pieces;
  float sums[M][N][4] = {}, bias_sum = 0;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int n0 = tile / pieces * images, p0 = tile % pieces * lines;
    from.fill(piece, images, [=](int image, int row, int at, int j) -> unsigned {
      const int c = first_channel + j;
      row += p0 * step_h - top;
      at -= left;
      if (c >= channels || n0 + image >= number || row < 0 || row >= height) return 0;
      const T* from_line = x + i64((n0 + image) * height + row) * width * channels + c;
      const bool there = at >= 0 && at < width;
      if constexpr (E == 1) {
        return there ? tf32(from_line[at * channels]) : 0;
      } else {
        const int next = at + step_w;
        const unsigned low = there ? from_line[at * channels].bits : 0;
        const unsigned high = next >= 0 && next < width ? from_line[next * channels].bits : 0;
        return high << 16 | low;
      }
    });
    const T* begin = dy + i64(n0 * out_height + p0) * out_width * outputs + first + column;
    const int there = images > 1 ? min(images, number - n0) * out_height : min(lines, out_height - p0);
    for (int i = mine; i < 8 * steps && mine < at_once; i += AT_ONCE * at_once) {
      T values[AT_ONCE][E];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int k = i + u * at_once, p = by_across.quotient(k), q = (k - p * across) * E;
#pragma unroll
        for (int e = 0; e < E; ++e)
          values[u][e] = p < there && q + e < out_width ? begin[i64(p * out_width + q + e) * outputs] : T(0.0f);
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int k = i + u * at_once;
        if (k >= 8 * steps) continue;
        bias_sum += float(values[u][0]);
        if constexpr (E == 1) {
          right[k * LINE + column] = tf32(values[u][0]);
        } else {
          bias_sum += float(values[u][1]);
          right[k * LINE + column] = unsigned(values[u][1].bits) << 16 | values[u][0].bits;
        }
      }
    }
    __syncthreads();
    accumulate<T>(
        sums, piece, rows, lo, hi,
        [=](int step) { return Pack<int, 2>{offsets[step * 8 + t], offsets[step * 8 + t + 4]}; },
        [=](int step, int n, unsigned(&words)[2]) {
          words[0] = right[(step * 8 + t) * LINE + n * 8 + g];
          words[1] = right[(step * 8 + t + 4) * LINE + n * 8 + g];
        });
    __syncthreads();
  }

  const int of_block = groups * M * N * 128, blocks = gridDim.y * gridDim.z;
  float* to = part + i64(blockIdx.x) * (i64(blocks) * of_block + (with_bias ? outputs : 0));
  float *own = to + i64(blockIdx.z * gridDim.y + blockIdx.y) * of_block, *parts = reinterpret_cast<float*>(piece);
  bias_sums[threadIdx.x] = bias_sum;
  if (split == 1)
    put_aside(own, sums);
  else
    put_aside(parts, sums);
  __syncthreads();
  if (split > 1)
    for (int i = threadIdx.x; i < of_block; i += blockDim.x) {
      const int of = i / (M * N * 128), rest = i % (M * N * 128);
      float sum = 0;
      for (int k = 0; k < split; ++k) sum += parts[(of * split + k) * (M * N * 128) + rest];
      own[i] = sum;
    }
  if (with_bias && blockIdx.y == 0 && threadIdx.x < columns) {
    float sum = 0;
    for (int k = 0; k < at_once; ++k) sum += bias_sums[k * columns + threadIdx.x];
    to[i64(blocks) * of_block + first + threadIdx.x] = sum;
  }
}

// dw += sums of what small_gradient made, db likewise unless there is none. m, n, groups and down (gridDim.y) as they were
// there.
__global__ void add_gradient(const float* part, float* dw, float* db, int shares, int sums, int length, int outputs,
                             int m, int n, int groups, int down) {
  const int i = blockIdx.x * 32 + threadIdx.x % 32;
  const float sum = sum_of_shares(part, shares, sums, i < sums);
  if (threadIdx.x >= 32 || i >= sums) return;
  const int all = db ? sums - outputs : sums;
  if (i >= all) {
    db[i - all] += sum;
    return;
  }
  const int from = i % 32, j = i / 32 % 4, tile = i / 128, column = tile % n, row = tile / n % (groups * m);
  const int block = tile / n / (groups * m);
  const int k = (block % down * groups * m + row) * 16 + from / 4 + j / 2 * 8;
  const int o = (block / down * n + column) * 8 + from % 4 * 2 + j % 2;
  if (k < length && o < outputs) dw[i64(o) * length + k] += sum;
}

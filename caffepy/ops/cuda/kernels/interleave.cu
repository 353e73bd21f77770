// Channels of two arrays of numbers of 16 bits in turn, as ShuffleNet deals them out, and back, with what normalizations
// before them compute: a pass for each would read and write all of it again.

#include "pack.cuh"
#include "gather.cuh"
#include "rectify.cuh"

// What a normalization makes of elements of a channel, with what follows it.
struct Normalization {
  const float *factor, *shift;
  int after;
  float ceiling;
  template <typename T> __device__ T of(T x, unsigned channel) const {
    float z = fmaf(float(x), factor[channel], shift[channel]);
    if (after && z <= 0) z = 0;
    if (after == CLIPPED && z > ceiling) z = ceiling;
    return T(z);
  }
};

// Channel k of two arrays (lines, 2 words) of numbers of 16 bits as channels 2 k and 2 k + 1 of one, in words of two: its
// lines lie in `first`, or if CUT the first half of each there and the second in `second`. n words of each target. GIVEN: 1 if
// the first of the two is to be normalized, 2 the second, 3 both.
template <typename T, int CUT, int GIVEN>
__global__ void interleave_pairs(const unsigned* one, const unsigned* two, unsigned* first, unsigned* second, i64 n,
                                 i64 words, i64 by_line, const float* factor_1, const float* shift_1, i64 after_1,
                                 double ceiling_1, const float* factor_2, const float* shift_2, i64 after_2,
                                 double ceiling_2) {
  const Divisor by{by_line};
  const unsigned width = unsigned(words), line = CUT ? width : 2 * width;
  const Normalization of_one{factor_1, shift_1, int(after_1), float(ceiling_1)};
  const Normalization of_two{factor_2, shift_2, int(after_2), float(ceiling_2)};
  const auto part = [=](unsigned start) {
    return [=](unsigned i) {
      return [=, place = Along(i, by, line)]() mutable {
        const unsigned at = start + place.at, from = place.row * width + at / 2;
        place.step();
        const unsigned word = __byte_perm(one[from], two[from], at & 1 ? 0x7632 : 0x5410);
        if (!GIVEN) return word;
        Pack<T, 2> pair = reinterpret_cast<const Pack<T, 2>&>(word);
        if (GIVEN & 1) pair.v[0] = of_one.of(pair.v[0], at);
        if (GIVEN & 2) pair.v[1] = of_two.of(pair.v[1], at);
        return reinterpret_cast<const unsigned&>(pair);
      };
    };
  };
  gather(first, unsigned(n), part(0));
  if (CUT) gather(second, unsigned(n), part(width));
}

// First half of the gradient of a normalization of x (lines, 2 words), in two channels of a thread: g, 0 where what follows it
// passes nothing, and sums of g and of g * (x - mean).
template <typename T> struct Half {
  const unsigned* x;
  float mean[2], factor[2], shift[2], ceiling, first[2] = {}, second[2] = {};
  int after;
  __device__ Half(const unsigned* x, const float* means, const float* factors, const float* shifts, i64 after, double ceiling,
                  unsigned word)
      : x(x), ceiling(float(ceiling)), after(int(after)) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      mean[v] = means ? means[2 * word + v] : 0;
      factor[v] = means ? factors[2 * word + v] : 0;
      shift[v] = means ? shifts[2 * word + v] : 0;
    }
  }
  __device__ unsigned of(unsigned gradient, unsigned of_x) {
    Pack<T, 2> g = reinterpret_cast<const Pack<T, 2>&>(gradient);
    const Pack<T, 2> xs = reinterpret_cast<const Pack<T, 2>&>(of_x);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float value = float(xs.v[v]), z = fmaf(value, factor[v], shift[v]);
      const bool none = after && (z <= 0 || (after == CLIPPED && z >= ceiling));
      if (none) g.v[v] = T(0.0f);
      first[v] += float(g.v[v]);
      second[v] += float(g.v[v]) * (value - mean[v]);
    }
    return reinterpret_cast<const unsigned&>(g);
  }
  // Adds up the threads of a block that have the same word: partial (2, gridDim.x, 2 words).
  __device__ void finish(double* partial, unsigned word, bool mine, i64 words) {
    __shared__ float parts[8][4][32];
    const int lane = threadIdx.x, row = threadIdx.y;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      parts[row][v][lane] = first[v];
      parts[row][2 + v][lane] = second[v];
    }
    __syncthreads();
    if (row >= 4 || !mine) return;
    double sum = 0;
    for (int other = 0; other < 8; ++other) sum += double(parts[other][row][lane]);
    partial[(row / 2 * i64(gridDim.x) + blockIdx.x) * 2 * words + 2 * word + row % 2] = sum;
  }
};

// interleave_pairs the other way, to those of the two that are not null. SUMS: 1 if the first of the two is half the
// gradient of a normalization, 2 the second, 3 both. Blocks of (32, 8) threads: a word of each of every 8 * gridDim.x-th line.
template <typename T, int CUT, int SUMS> __global__ void __launch_bounds__(256)
separate_pairs(const unsigned* first, const unsigned* second, unsigned* one, unsigned* two, i64 lines, i64 words,
               const unsigned* x_1, const float* mean_1, const float* factor_1, const float* shift_1, i64 after_1,
               double ceiling_1, double* partial_1, const unsigned* x_2, const float* mean_2, const float* factor_2,
               const float* shift_2, i64 after_2, double ceiling_2, double* partial_2) {
  constexpr int U = 4;
  const unsigned width = unsigned(words), across = (width + gridDim.y - 1) / gridDim.y;
  const unsigned word = blockIdx.y * across + threadIdx.x, count = unsigned(lines), step = gridDim.x * 8;
  const bool mine = threadIdx.x < across && word < width;
  const unsigned known = mine ? word : 0;
  Half<T> of_one(x_1, SUMS & 1 ? mean_1 : nullptr, factor_1, shift_1, after_1, ceiling_1, known);
  Half<T> of_two(x_2, SUMS & 2 ? mean_2 : nullptr, factor_2, shift_2, after_2, ceiling_2, known);
  for (unsigned line = blockIdx.x * 8 + threadIdx.y; mine && line < count; line += U * step) {
    unsigned low[U], high[U], xs_1[U], xs_2[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const unsigned row = min(line + u * step, count - 1);
      const auto found = [&](unsigned at) {
        if (!CUT) return first[row * 2 * width + at];
        return at < width ? first[row * width + at] : second[row * width + at - width];
      };
      low[u] = found(2 * word);
      high[u] = found(2 * word + 1);
      if (SUMS & 1) xs_1[u] = x_1[row * width + word];
      if (SUMS & 2) xs_2[u] = x_2[row * width + word];
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const unsigned row = line + u * step;
      if (row >= count) break;
      unsigned mine_1 = __byte_perm(low[u], high[u], 0x5410), mine_2 = __byte_perm(low[u], high[u], 0x7632);
      if (SUMS & 1) mine_1 = of_one.of(mine_1, xs_1[u]);
      if (SUMS & 2) mine_2 = of_two.of(mine_2, xs_2[u]);
      if (one) one[row * width + word] = mine_1;
      if (two) two[row * width + word] = mine_2;
    }
  }
  if (SUMS & 1) of_one.finish(partial_1, word, mine, words);
  if (SUMS & 2) of_two.finish(partial_2, word, mine, words);
}

// A convolution of images with few channels, such as a net's first one, and the ReLU behind it; channels last, numbers of
// 16 bits:
//   y[n, p, q, o] = relu(b[o] + sum over c, r, s of x[n, p * sh + r * dh - ph, q * sw + s * dw - pw, c] * w[o, c, r, s])
//   g[n, p, q, o] = dy[n, p, q, o] where y[n, p, q, o] > 0, else 0
//   dw[o, c, r, s] += sum over n, p, q of g[n, p, q, o] * x[n, p * sh + r * dh - ph, q * sw + s * dw - pw, c]
//   db[o] += sum of g[..., o]
// dy and y are large beside all else: y is written as threads have it, and both are read once and go from memory to the
// operands of tensor cores in registers; g is not written.
//
// In a gradient, a product of a warp is (32 rows (c, r, s), 16 positions) x (16 positions, 64 outputs). A thread loads 8 neighbouring
// outputs of the 4 positions that it has in the right factor: output 8 * g + j is column g of tile j. The left factor comes
// from shared memory, where there is a word for each pixel and channel, of it and the pixel that the next position sees.
// The row behind the last one is of ones: its sums are those of the bias.

#include "pack.cuh"
#include "mma.cuh"
#include "ahead.cuh"
#include "lines.cuh"
#include "shares.cuh"

constexpr int ROWS = 32, OUTPUTS = 64, WARPS = 8;
constexpr int STAGES = 2, EIGHTS = 8;  // of the gradient: steps whose dy and y are on their way, and what each loads

struct alignas(16) Eight { unsigned words[4]; };

// A word whose halves have all bits where the numbers of 16 bits in y are above 0, else none
template <typename T> __device__ unsigned above_zero(unsigned y);
template <> __device__ inline unsigned above_zero<half_t>(unsigned y) {
  unsigned mask;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(y), "r"(0));
  return mask;
}
template <> __device__ inline unsigned above_zero<bf16_t>(unsigned y) {
#if __CUDA_ARCH__ >= 900
  unsigned mask;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(y), "r"(0));
  return mask;
#else
  return __vcmpgts2(y, 0) & __vcmpleu2(y & 0x7fff7fff, 0x7f807f80);  // NaN is not
#endif
}

__device__ inline int column_of(int j, int n) { return j / 4 * 32 + n / 2 * 8 + j % 4 * 2 + n % 2; }

// y; b and the ReLU may be missing, and dilation_w is 1. A product of a warp is (16 positions, 16 * DEEP weights) x (16 *
// DEEP weights, 64 outputs). The weights, in the order r, s, c with an even number for each r, stay in registers. A
// thread's results of a position are of twice 8 neighbouring outputs: column 2 * t + i of tile j is output column_of(j, 2 * t
// + i).
template <typename T, int DEEP> __global__ void __launch_bounds__(256, 2)
few_channels(const T* x, const float* w, const float* b, T* y, int relu, int number, int channels, int height, int width,
             int outputs, int out_height, int out_width, int taps_h, int taps_w, int dilation_h, int dilation_w,
             int step_h, int step_w, int top, int left, int lines, int pitch, i64 by_pitch, i64 by_steps) {
  extern __shared__ __align__(16) unsigned piece[];
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane_id / 4, t = lane_id % 4;
  const int taps = taps_h * taps_w, along = taps_w * channels, even = (along + 1) / 2 * 2;
  const int steps = (out_width + 15) / 16, first = blockIdx.y * OUTPUTS, next = step_w * channels;
  const int words = ((lines - 1) * step_h + (taps_h - 1) * dilation_h + 1) * pitch;
  const Divisor of_pitch(by_pitch), of_steps(by_steps);
  unsigned weights[DEEP][8][2], keeps[DEEP][2];
  int offsets[DEEP][2];
  float* here = reinterpret_cast<float*>(piece);  // all at once, since each load has to be waited for
  for (int i = threadIdx.x; i < OUTPUTS * channels * taps; i += 256) here[i] = w[i64(first) * channels * taps + i];
  __syncthreads();
#pragma unroll
  for (int d = 0; d < DEEP; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = d * 16 + half * 8 + 2 * t, r = k / even, e = k % even;
      const int low_at = e % channels * taps + e / channels, high_at = (e + 1) % channels * taps + (e + 1) / channels;
      const bool there = r < taps_h, both = e + 1 < along;
      offsets[d][half] = there ? r * dilation_h * pitch + e : 0;
      keeps[d][half] = !there ? 0 : both ? ~0u : 0xffffu;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float* from = here + column_of(j, g) * channels * taps + r * taps_w;
        const unsigned low = there ? T(from[low_at]).bits : 0;
        const unsigned high = there && both ? T(from[high_at]).bits : 0;
        weights[d][j][half] = high << 16 | low;
      }
    }
  __syncthreads();
  float bias[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) bias[i] = b ? b[first + column_of(i / 2, 2 * t + i % 2)] : 0;
  const int pieces = (out_height + lines - 1) / lines, tiles = number * pieces;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int n = tile / pieces, p0 = tile % pieces * lines;
    fill_lines<8>(piece, words, pitch, of_pitch, x + i64(n) * height * width * channels, height, width * channels,
               p0 * step_h - top, left * channels, 1);
    __syncthreads();
    for (int unit = warp; unit < lines * steps; unit += WARPS) {
      const int line = of_steps.quotient(unit), q0 = (unit - line * steps) * 16;
      if (p0 + line >= out_height) break;
      const unsigned* from = piece + line * step_h * pitch + (q0 + g) * next;
      float sums[8][4];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[j][k] = bias[2 * j + k % 2];
#pragma unroll
      for (int d = 0; d < DEEP; ++d) {
        unsigned left_words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) left_words[k] = from[offsets[d][k / 2] + k % 2 * 8 * next] & keeps[d][k / 2];
#pragma unroll
        for (int j = 0; j < 8; ++j) multiply<T>(sums[j], left_words, weights[d][j]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q = q0 + half * 8 + g;
        if (q >= out_width) continue;
        Pack<T, 8> packs[2];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float sum = sums[i / 2][half * 2 + i % 2];
          packs[i / 8].v[i % 8] = T(relu && sum <= 0 ? 0.0f : sum);
        }
        T* to = y + ((i64(n) * out_height + p0 + line) * out_width + q) * outputs + first + t * 8;
        *reinterpret_cast<Pack<T, 8>*>(to) = packs[0];
        *reinterpret_cast<Pack<T, 8>*>(to + 32) = packs[1];
      }
    }
    __syncthreads();
  }
}

// Shares of the sums: part (gridDim.x, gridDim.y, ROWS, OUTPUTS). A block takes `lines` lines of y at a time, and of x the
// lines that they see, of `pitch` words. Shared memory: what each thread loads of dy and y for its next STAGES steps; those
// lines, in whose place the sums of warps are added later.
template <typename T> __global__ void __launch_bounds__(256, 2)
few_channels_gradient(const T* x, const T* y, const T* dy, float* part, int number, int channels, int height, int width,
                      int outputs, int out_height, int out_width, int taps_h, int taps_w, int dilation_h,
                      int dilation_w, int step_h, int step_w, int top, int left, int lines, int pitch, i64 by_pitch,
                      i64 by_steps) {
  extern __shared__ __align__(16) Eight ahead[];
  unsigned* piece = reinterpret_cast<unsigned*>(ahead + STAGES * EIGHTS * 256);
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane_id / 4, t = lane_id % 4;
  const int taps = taps_h * taps_w, length = channels * taps, steps = (out_width + 15) / 16, first = blockIdx.y * OUTPUTS;
  const int words = ((lines - 1) * step_h + (taps_h - 1) * dilation_h + 1) * pitch, next = step_w * channels;
  const Divisor of_pitch(by_pitch), of_steps(by_steps);
  int rows[2][2];
  unsigned keeps[2][2], ones[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + g, c = row / taps, tap = row % taps;
      const bool there = row < length;
      rows[m][half] = there ? tap / taps_w * dilation_h * pitch + tap % taps_w * dilation_w * channels + c : 0;
      keeps[m][half] = there ? ~0u : 0;
      ones[m][half] = row == length ? unsigned(T(1.0f).bits) * 0x10001u : 0;
    }
  const int pieces = (out_height + lines - 1) / lines, tiles = number * pieces;
  float sums[2][8][4] = {};

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int n = tile / pieces, p0 = tile % pieces * lines;
    const auto load = [&](int unit) {
      const int line = of_steps.quotient(unit), q0 = (unit - line * steps) * 16;
      const bool there = unit < lines * steps && p0 + line < out_height;
      const i64 begin = ((i64(n) * out_height + p0 + line) * out_width + q0) * outputs + first + g * 8;
      Eight* to = ahead + unit / WARPS % STAGES * EIGHTS * 256 + threadIdx.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = 2 * t + i % 2 + i / 2 * 8;
        const bool inside = there && q0 + q < out_width;
        const i64 from = inside ? begin + i64(q) * outputs : 0;
        copy_ahead<16>(to + i * 256, dy + from, inside);
        copy_ahead<16>(to + (4 + i) * 256, y + from, inside);
      }
      close_group();
    };
    load(warp);
    fill_lines<8>(piece, words, pitch, of_pitch, x + i64(n) * height * width * channels, height, width * channels,
               p0 * step_h - top, left * channels, next);
    __syncthreads();
    for (int unit = warp; unit < lines * steps; unit += WARPS) {
      const int line = of_steps.quotient(unit), q0 = (unit - line * steps) * 16;
      if (p0 + line >= out_height) break;
      load(unit + WARPS);
      wait_for_groups<1>();
      const Eight* own = ahead + unit / WARPS % STAGES * EIGHTS * 256 + threadIdx.x;
      Eight right[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        right[i] = own[i * 256];
        const Eight result = own[(4 + i) * 256];
#pragma unroll
        for (int k = 0; k < 4; ++k) right[i].words[k] &= above_zero<T>(result.words[k]);
      }
      const unsigned* from = piece + line * step_h * pitch + (q0 + 2 * t) * next;
      unsigned left_words[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          left_words[m][k] = from[rows[m][k % 2] + k / 2 * 8 * next] & keeps[m][k % 2] | ones[m][k % 2];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned select = j % 2 ? 0x7632 : 0x5410;
        const unsigned pair[2] = {__byte_perm(right[0].words[j / 2], right[1].words[j / 2], select),
                                  __byte_perm(right[2].words[j / 2], right[3].words[j / 2], select)};
        multiply<T>(sums[0][j], left_words[0], pair);
        multiply<T>(sums[1][j], left_words[1], pair);
      }
    }
    wait_for_groups<0>();
    __syncthreads();
  }

  float* total = reinterpret_cast<float*>(piece);
  for (int w = 0; w < WARPS; ++w) {
    if (warp == w) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float& sum = total[(m * 16 + k / 2 * 8 + g) * OUTPUTS + (2 * t + k % 2) * 8 + j];
            sum = w == 0 ? sums[m][j][k] : sum + sums[m][j][k];
          }
    }
    __syncthreads();
  }
  float* to = part + (i64(blockIdx.x) * gridDim.y + blockIdx.y) * (ROWS * OUTPUTS);
  for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += 256) to[i] = total[i];
}

// dw += sums of what few_channels_gradient made in so many shares; db likewise unless there is none.
__global__ void add_few_channels(const float* part, float* dw, float* db, int shares, int length, int outputs) {
  const int i = blockIdx.x * 32 + threadIdx.x % 32;
  const float sum = sum_of_shares(part, shares, outputs * ROWS, true);
  if (threadIdx.x >= 32) return;
  const int row = i / OUTPUTS % ROWS, o = i / (ROWS * OUTPUTS) * OUTPUTS + i % OUTPUTS;
  if (row < length)
    dw[o * length + row] += sum;
  else if (row == length && db)
    db[o] += sum;
}

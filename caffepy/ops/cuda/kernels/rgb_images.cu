// Convolutions of images with three channels, 3 x 3 with a stride of 2, to up to 32 outputs, channels last, in numbers of 16
// bits: forward with the sums of each channel, and the gradient of the weights.
//
// The nine numbers of a line of a window lie side by side, and windows six numbers apart: with `pad` pixels of zeros before
// each line they begin at even places, so that words of two numbers of a line in shared memory are words of a fragment
// (mma.cuh). A window is 16 words: five of each of its three lines, with a number of the next window behind the nine, whose
// weight is 0, and one more, whose weights are 0. A block takes bands of lines of y; a warp has 16 pixels at a time.

#include "pack.cuh"
#include "mma.cuh"
#include "shares.cuh"

constexpr int CHANNELS = 3, TAPS = 9, BAND = 8, LINES = 2 * BAND + 1, OF_LINE = 5, PIXELS = 16, WARPS = 8;

struct Sizes {
  int height, width, high, wide, top, left;  // of x, of y, pads
  __device__ int tiles() const { return (wide + PIXELS - 1) / PIXELS; }
  __device__ int pitch() const { return ((tiles() * PIXELS - 1) * CHANNELS + OF_LINE + 3) / 4 * 4; }  // words of a line
  __device__ int bands() const { return (high + BAND - 1) / BAND; }
};

#define SIZES i64 height, i64 width, i64 high, i64 wide, i64 top, i64 left
#define OF_SIZES Sizes{int(height), int(width), int(high), int(wide), int(top), int(left)}

// Lines of image n for the band of lines of y from one on, as words from the padding on.
template <typename T> __device__ void stage(unsigned* lines, const T* x, const Sizes& s, int n, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = s.pitch(), numbers = s.width * CHANNELS;
  const unsigned short* const image = reinterpret_cast<const unsigned short*>(x) + i64(n) * s.height * numbers;
  for (int line = warp; line < LINES; line += WARPS) {
    const int row = 2 * first - s.top + line;
    const bool inside = row >= 0 && row < s.height;
    const unsigned short* const from = image + i64(inside ? row : 0) * numbers;
    if (s.left == 1 && numbers % 8 == 0 && aligned(image, 16)) {  // three numbers of zeros, then whole packs
      const uint4* const packs = reinterpret_cast<const uint4*>(from);
      const uint4 zeros = make_uint4(0, 0, 0, 0);
#pragma unroll 3
      for (int pack = lane; pack < pitch / 4; pack += 32) {
        const uint4 before = inside && pack > 0 && pack <= numbers / 8 ? packs[pack - 1] : zeros;
        const uint4 here = inside && pack < numbers / 8 ? packs[pack] : zeros;
        reinterpret_cast<uint4*>(lines + line * pitch)[pack] =
            make_uint4(__byte_perm(before.z, before.w, 0x5432), __byte_perm(before.w, here.x, 0x5432),
                       __byte_perm(here.x, here.y, 0x5432), __byte_perm(here.y, here.z, 0x5432));
      }
      continue;
    }
#pragma unroll 4
    for (int word = lane; word < pitch; word += 32) {
      const int at = 2 * word - CHANNELS * s.left;
      const unsigned low = inside && at >= 0 && at < numbers ? from[at] : 0;
      const unsigned high = inside && at + 1 >= 0 && at + 1 < numbers ? from[at + 1] : 0;
      lines[line * pitch + word] = low | high << 16;
    }
  }
}

// Where word `of` of a window lies behind its first one.
__device__ inline int place(int of, int pitch) {
  const int word = min(of, 3 * OF_LINE - 1);
  return word / OF_LINE * pitch + word % OF_LINE;
}

// The place of a number of a window, with two to a word, among the weights (3, 3, 3) of an output; -1 where it has none.
__device__ inline int weight_of(int number) {
  const int word = number / 2, line = word / OF_LINE, at = word % OF_LINE * 2 + number % 2;
  return word < 3 * OF_LINE && at < TAPS ? at % CHANNELS * TAPS + line * 3 + at / CHANNELS : -1;
}

// f(tile of pixels in y: its line, its first column, words of the windows of pixels g and g + 8) for those of a warp; a window
// has words t, t + 4, t + 8 and t + 12.
template <typename T, typename F>
__device__ void each_tile(unsigned* lines, const T* x, const Sizes& s, i64 images, const F& f) {
  const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32, pitch = s.pitch();
  const int across = s.tiles(), bands = s.bands();
  int places[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) places[k] = place(t + 4 * k, pitch);
  for (int band = blockIdx.x; band < images * bands; band += gridDim.x) {
    const int n = band / bands, first = band % bands * BAND;
    __syncthreads();
    stage(lines, x, s, n, first);
    __syncthreads();
    for (int tile = warp; tile < BAND * across; tile += WARPS) {
      const int line = tile / across, column = tile % across * PIXELS;
      if (first + line >= s.high) break;
      unsigned words[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          words[half][k] = lines[2 * line * pitch + (column + row + 8 * half) * CHANNELS + places[k]];
      f(n * s.high + first + line, column, words);
    }
  }
}

// y, and partial sums (2, gridDim.x, N) of y and y^2, from those of y - k and (y - k)^2 with k the first y of the thread: no
// cancellation in float. Of each pixel a thread has the outputs from 2 * TILES * t on.
template <typename T, int N> __global__ void __launch_bounds__(256, 3)
rgb_moments(const T* x, const float* w, T* y, double* partial, i64 images, SIZES) {
  constexpr int TILES = N / 8;
  extern __shared__ __align__(16) unsigned lines[];
  __shared__ double parts[WARPS][2][N];
  const Sizes s = OF_SIZES;
  const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
  unsigned of_w[TILES][4];
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Pack<T, 2> pair;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int at = weight_of(2 * (t + 4 * k) + v), output = row / 2 * (2 * TILES) + 2 * j + row % 2;
        pair.v[v] = T(at < 0 ? 0.0f : w[output * CHANNELS * TAPS + at]);
      }
      of_w[j][k] = reinterpret_cast<const unsigned&>(pair);
    }
  float start[2 * TILES], first[2 * TILES] = {}, second[2 * TILES] = {};
  int seen = 0;
  each_tile(lines, x, s, images, [&](int line, int column, const unsigned (&words)[2][4]) {
    float sum[TILES][4] = {};
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const unsigned a[4] = {words[0][k], words[1][k], words[0][k + 1], words[1][k + 1]};
        const unsigned b[2] = {of_w[j][k], of_w[j][k + 1]};
        multiply<T>(sum[j], a, b);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = column + row + 8 * half;
      if (at >= s.wide) continue;
      unsigned of_y[TILES];
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        Pack<T, 2> pair;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          pair.v[v] = T(sum[j][2 * half + v]);
          const float value = float(pair.v[v]);
          if (seen == 0) start[2 * j + v] = value;
          const float d = value - start[2 * j + v];
          first[2 * j + v] += d;
          second[2 * j + v] += d * d;
        }
        of_y[j] = reinterpret_cast<const unsigned&>(pair);
      }
      unsigned* const to = reinterpret_cast<unsigned*>(y + (i64(line) * s.wide + at) * N) + t * TILES;
      if constexpr (TILES == 4)
        *reinterpret_cast<uint4*>(to) = make_uint4(of_y[0], of_y[1], of_y[2], of_y[3]);
      else
#pragma unroll
        for (int j = 0; j < TILES; ++j) to[j] = of_y[j];
      ++seen;
    }
  });
#pragma unroll
  for (int v = 0; v < 2 * TILES; ++v) {
    const double k = seen ? double(start[v]) : 0.0, d = double(first[v]);
    double total = d + seen * k, squares = double(second[v]) + (2 * d + seen * k) * k;
#pragma unroll
    for (int between = 4; between < 32; between *= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, between);
      squares += __shfl_xor_sync(0xffffffffu, squares, between);
    }
    if (row == 0) {
      parts[warp][0][t * 2 * TILES + v] = total;
      parts[warp][1][t * 2 * TILES + v] = squares;
    }
  }
  __syncthreads();
  const int which = threadIdx.x / N, channel = threadIdx.x % N;
  if (which > 1) return;
  double all = 0;
  for (int other = 0; other < WARPS; ++other) all += parts[other][which][channel];
  partial[(i64(which) * gridDim.x + blockIdx.x) * N + channel] = all;
}

// The transpose of a matrix of 8 x 8 numbers of 16 bits, of which thread (g, t) has two of row g, from column 2 t on.
__device__ inline unsigned transposed(unsigned words) {
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(words));
  return turned;
}

// part (gridDim.x, 32, N): sums over the pixels of a block of the numbers of windows times dy.
template <typename T, int N> __global__ void __launch_bounds__(256, 3)
rgb_gradient(const T* x, const T* dy, float* part, i64 images, SIZES) {
  constexpr int TILES = N / 8, NUMBERS = 32;
  extern __shared__ __align__(16) unsigned lines[];  // then products (WARPS, NUMBERS, N)
  const Sizes s = OF_SIZES;
  const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
  float product[2][TILES][4] = {};
  each_tile(lines, x, s, images, [&](int line, int column, const unsigned (&words)[2][4]) {
    unsigned of_dy[2][TILES];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = column + row + 8 * half;
      const unsigned* const from = reinterpret_cast<const unsigned*>(dy + (i64(line) * s.wide + at) * N) + t * TILES;
      if constexpr (TILES == 4) {
        const uint4 words = at < s.wide ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        of_dy[half][0] = words.x, of_dy[half][1] = words.y, of_dy[half][2] = words.z, of_dy[half][3] = words.w;
      } else {
#pragma unroll
        for (int j = 0; j < TILES; ++j) of_dy[half][j] = at < s.wide ? from[j] : 0;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < TILES; ++j) of_dy[half][j] = transposed(of_dy[half][j]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const unsigned a[4] = {transposed(words[0][2 * m]), transposed(words[0][2 * m + 1]), transposed(words[1][2 * m]),
                             transposed(words[1][2 * m + 1])};
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const unsigned b[2] = {of_dy[0][j], of_dy[1][j]};
        multiply<T>(product[m][j], a, b);
      }
    }
  });
  __syncthreads();
  float* const products = reinterpret_cast<float*>(lines);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int number = 16 * m + row + i / 2 * 8, output = t * 2 * TILES + 2 * j + i % 2;
        products[(warp * NUMBERS + number) * N + output] = product[m][j][i];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < NUMBERS * N; i += 256) {
    float all = 0;
    for (int other = 0; other < WARPS; ++other) all += products[other * NUMBERS * N + i];
    part[i64(blockIdx.x) * NUMBERS * N + i] = all;
  }
}

// dw (outputs, 3, 3, 3) += the shares of part (shares, 32, outputs), by blocks of (32, 32) threads.
__global__ void __launch_bounds__(1024) rgb_add(const float* part, float* dw, i64 shares, i64 outputs) {
  const i64 size = 32 * outputs, mine = blockIdx.x * 32ll + threadIdx.y;
  const float sum = sum_of_all(part, shares, size, blockIdx.x * 32ll, size);
  const int at = weight_of(int(mine / outputs));
  if (threadIdx.x == 0 && mine < size && at >= 0) dw[mine % outputs * (CHANNELS * TAPS) + at] += sum;
}

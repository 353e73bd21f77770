// A convolution of images of few channels with 64 outputs, its bias, ReLU and MAX pooling over 3 x 3 with a stride of 2, in
// numbers of 16 bits with the channels last (compute capability 9.0). The output of the convolution is in shared memory
// only: forward writes maxima, backward makes its gradient of those of the maxima again.
//
// S pixels of a line of the image, C * S <= 8 numbers, fill a chunk of 16 bytes, with zeros behind. A window covers CHUNKS of
// them in each of K lines, from chunk `column` on: LEAD pixels more than it has, before it, so that chunks begin with
// words. So a row of the matrix that tensor cores multiply begins one chunk behind the row of the pixel before, and
// ldmatrix reads it where it lies. Weights are rows (outputs, K, CHUNKS, 8).
//
// A block of four warps goes down a part of an image, STEP lines of the convolution at a time; lines of chunks lie in a
// ring. Two blocks share a multiprocessor: one multiplies while the other one pools.

#include "pack.cuh"
#include "mma.cuh"
#include "pairs.cuh"

constexpr int THREADS = 128, OUTPUTS = 64, STEP = 4, CHUNK = 16, LINE = OUTPUTS * 2;
constexpr int RING = 16;  // lines of chunks
constexpr int KEPT = 6;   // lines of the convolution that pooling reads, two of which are those of the step before

// Lines and columns of the image, the convolution and the maxima; lines of the convolution, or of maxima, for a block.
struct Shape {
  int h, w, ho, wo, high, wide, share;
  __device__ int tiles() const { return (wo + 15) / 16; }  // of 16 columns in a line of the convolution
  __device__ int parts(int lines) const { return (lines + share - 1) / share; }
};
#define SHAPE int h, int w, int ho, int wo, int high, int wide, int share
#define OF_SHAPE Shape{h, w, ho, wo, high, wide, share}

template <int C, int K, int S, int P> struct Window {
  static constexpr int LEAD = (S - P % S) % S, CHUNKS = (K + LEAD + S - 1) / S, WORDS = C * S / 2;
  static constexpr int DEPTH = K * CHUNKS * 8, NEW = STEP * S;
  static_assert(C * S <= 8 && C * S % 2 == 0 && CHUNKS % 2 == 0 && NEW + K - S <= RING);

  // What is at place n of a row of weights: the place among (C, K, K) of an output, or -1.
  static __device__ int weight_at(int n) {
    const int u = n / (CHUNKS * 8), chunk = n / 8 % CHUNKS, pixel = n % 8 / C, v = chunk * S + pixel - LEAD;
    return pixel < S && v >= 0 && v < K ? (n % 8 % C * K + u) * K + v : -1;
  }
};

// Lines of the image as chunks in shared memory, a thread for each chunk of a line. Line y of the image with its padding,
// from 0 on, lies in place y % RING.
template <typename T, int C, int K, int S, int P> struct Lines {
  using W = Window<C, K, S, P>;
  const T* image;
  unsigned char* ring;
  Shape s;
  unsigned pitch;  // bytes of a line
  unsigned words[W::NEW][W::WORDS];

  __device__ Lines(const T* image, unsigned char* ring, const Shape& s)
      : image(image), ring(ring), s(s), pitch((s.tiles() * 16 + W::CHUNKS - 1) * CHUNK) {}

  // Begin to read W::NEW lines from `first` on.
  __device__ void read(int first) {
    const int x = int(threadIdx.x) * S - P - W::LEAD;
#pragma unroll
    for (int i = 0; i < W::NEW; ++i) {
      const int y = first + i - P;
      const bool there = y >= 0 && y < s.h && x >= 0 && x < s.w;
      const unsigned* from = reinterpret_cast<const unsigned*>(image + (y * s.w + x) * C);
#pragma unroll
      for (int k = 0; k < W::WORDS; ++k) words[i][k] = there ? from[k] : 0;
    }
  }
  // Write those that were read.
  __device__ void write(int first) {
    if (threadIdx.x * CHUNK >= pitch) return;
#pragma unroll
    for (int i = 0; i < W::NEW; ++i) {
      unsigned all[4] = {};
#pragma unroll
      for (int k = 0; k < W::WORDS; ++k) all[k] = words[i][k];
      *reinterpret_cast<uint4*>(ring + unsigned(first + i) % RING * pitch + threadIdx.x * CHUNK) =
          make_uint4(all[0], all[1], all[2], all[3]);
    }
  }
  // The lines that the step of this line of the convolution reads.
  __device__ void begin(int line) {
    read(line * S);
    write(line * S);
    read(line * S + W::NEW);
    write(line * S + W::NEW);
  }
  // Those that the step after it reads, too.
  __device__ int after(int line) const { return (line + STEP) * S + K - S; }
  __device__ unsigned at(unsigned line, unsigned chunk) const {
    return shared_address(ring) + line % RING * pitch + chunk * CHUNK;
  }
};

// Byte of a chunk of 8 outputs of a pixel: chunks change places so that those of eight pixels lie in different banks.
__device__ inline unsigned at_pixel(unsigned pixel, unsigned chunk) { return pixel * LINE + (chunk ^ pixel % 8) * CHUNK; }

// y, index = the maxima of relu(w * x + b), as max_pool_forward with R. Grid (images * parts), of `share` lines of maxima.
template <typename T, int C, int K, int S, int P> __global__ void __launch_bounds__(THREADS, 2)
convolve_and_pool(const T* x, const T* filters, const float* b, T* y, unsigned char* index, SHAPE) {
  using W = Window<C, K, S, P>;
  using Words = Pack<unsigned, 4>;
  constexpr int STEPS = W::DEPTH / 16, ACROSS = W::CHUNKS / 2, N = OUTPUTS / 16;  // N tiles of 8 outputs for a warp
  extern __shared__ __align__(128) unsigned char memory[];
  const Shape s = OF_SHAPE;
  const unsigned t = threadIdx.x, lane = t % 32, half = t / 32 % 2, group = t / 64, tiles = s.tiles(), width = tiles * 16;
  const int parts = s.parts(s.high), image = blockIdx.x / parts, part = blockIdx.x % parts;
  const int from = part * s.share, to = min(from + s.share, s.high);
  const int end = min(2 * to + 1, s.ho);
  unsigned char* kept = memory;
  Lines<T, C, K, S, P> lines(x + i64(image) * s.h * s.w * C, memory + KEPT * width * LINE, s);

  unsigned weights[STEPS][N][2];
  float bias[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int first = half * (OUTPUTS / 2) + n * 8;
    const T* row = filters + (first + lane / 4) * W::DEPTH + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      weights[k][n][0] = *reinterpret_cast<const unsigned*>(row + k * 16);
      weights[k][n][1] = *reinterpret_cast<const unsigned*>(row + k * 16 + 8);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) bias[n][i] = b ? b[first + lane % 4 * 2 + i] : 0.0f;
  }

  lines.begin(2 * from);
  __syncthreads();
  for (int base = 2 * from, next = from; base < end; base += STEP) {
    const int now = min(STEP, end - base) * tiles;
    lines.read(lines.after(base));
    for (int first = group * 2; first < now; first += 4) {
      float sum[2][N][4] = {};
      unsigned line[2], column[2], from[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const unsigned tile = min(first + m, now - 1);
        line[m] = base + tile / tiles;
        column[m] = tile % tiles * 16;
        from[m] = column[m] + lane % 16 + lane / 16;
      }
#pragma unroll
      for (int u = 0; u < K; ++u)
#pragma unroll
        for (int k = 0; k < ACROSS; ++k) {
          unsigned a[2][4];
#pragma unroll
          for (int m = 0; m < 2; ++m) matrices<false>(a[m], lines.at(line[m] * S + u, from[m]) + 2 * k * CHUNK);
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int m = 0; m < 2; ++m) multiply<T>(sum[m][n], a[m], weights[u * ACROSS + k][n]);
        }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (first + m >= now) break;
        unsigned char* of_line = kept + line[m] % unsigned(KEPT) * width * LINE;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Pack<T, 2> pair;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              const float value = sum[m][n][2 * i + v] + bias[n][v];
              pair.v[v] = T(value <= 0 ? 0.0f : value);
            }
            const unsigned pixel = column[m] + lane / 4 + 8 * i;
            *reinterpret_cast<Pack<T, 2>*>(of_line + at_pixel(pixel, half * N + n) + lane % 4 * 4) = pair;
          }
      }
    }
    __syncthreads();
    lines.write(lines.after(base));

    // The lines of maxima that are complete; a thread takes 8 channels, always the same ones.
    const int until = base + STEP < end ? base / 2 + 1 : to;
    const unsigned chunk = t % 8;
    for (; next < until; ++next) {
      const unsigned char* of_lines[3];
#pragma unroll
      for (int r = 0; r < 3; ++r) of_lines[r] = kept + unsigned(min(2 * next + r, s.ho - 1)) % KEPT * width * LINE;
      for (int j = t / 8; j < s.wide; j += THREADS / 8) {
        Words taken[9], best, where;
#pragma unroll
        for (int n = 0; n < 9; ++n) {
          const bool in = 2 * next + n / 3 < s.ho && 2 * j + n % 3 < s.wo;
          taken[n] = *reinterpret_cast<const Words*>(of_lines[n / 3] + at_pixel(2 * j + n % 3, chunk));
#pragma unroll
          for (int v = 0; v < 4; ++v) taken[n].v[v] = in ? taken[n].v[v] : 0;
        }
        Pack<unsigned char, 8> places;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          unsigned largest = taken[0].v[v], place = 0;
#pragma unroll
          for (int n = 1; n < 9; ++n) largest = Pair<T>::largest(largest, taken[n].v[v]);
#pragma unroll
          for (int n = 8; n >= 0; --n) {
            const unsigned here = Pair<T>::equal(taken[n].v[v], largest);
            place = (here & (n * 0x10001u)) | (~here & place);
          }
          const unsigned none = Pair<T>::at_most(largest, 0);
          best.v[v] = largest & ~none;
          where.v[v] = place | none;
          places.v[2 * v] = (unsigned char)where.v[v];
          places.v[2 * v + 1] = (unsigned char)(where.v[v] >> 16);
        }
        const i64 place = ((i64(image) * s.high + next) * s.wide + j) * (OUTPUTS / 8) + chunk;
        reinterpret_cast<Words*>(y)[place] = best;
        reinterpret_cast<Pack<unsigned char, 8>*>(index)[place] = places;
      }
    }
    __syncthreads();
  }
}

// All bits of a number for each of two bytes of a word whose highest bit is set: of the first two, or of the others.
__device__ inline unsigned where_high(unsigned word, bool others) {
  unsigned found;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(found) : "r"(word), "r"(others ? 0xbbaa : 0x9988));
  return found;
}

// Gradients of 8 channels of a maximum and where they go, 127 if nowhere. A byte below 128, plus 127, has its highest bit
// unless it is 0.
struct Maxima {
  Pack<unsigned, 4> d;
  Pack<unsigned, 2> where;
  __device__ void load(const void* dy, const void* index, const Shape& s, int image, int i, int j, int chunk) {
    const bool in = i >= 0 && i < s.high && j >= 0 && j < s.wide;
    const i64 place = in ? ((i64(image) * s.high + i) * s.wide + j) * (OUTPUTS / 8) + chunk : 0;
    d = static_cast<const Pack<unsigned, 4>*>(dy)[place];
    where = static_cast<const Pack<unsigned, 2>*>(index)[place];
#pragma unroll
    for (int v = 0; v < 2; ++v) where.v[v] = in ? where.v[v] & 0x7f7f7f7f : 0x7f7f7f7f;
  }
  // Those that go to this place of their windows.
  __device__ Pack<unsigned, 4> at(unsigned place) const {
    Pack<unsigned, 4> found;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const unsigned others = (where.v[v / 2] ^ place * 0x01010101) + 0x7f7f7f7f;
      found.v[v] = d.v[v] & ~where_high(others, v % 2);
    }
    return found;
  }
  // Those of windows with a maximum above 0.
  __device__ Pack<unsigned, 4> all() const {
    Pack<unsigned, 4> found;
#pragma unroll
    for (int v = 0; v < 4; ++v) found.v[v] = d.v[v] & ~where_high(where.v[v / 2] + 0x01010101, v % 2);
    return found;
  }
};

// Both numbers of a word.
template <typename T> __device__ inline float2 numbers(unsigned word) {
  Pack<T, 2> pair;
  *reinterpret_cast<unsigned*>(&pair) = word;
  return make_float2(float(pair.v[0]), float(pair.v[1]));
}

// partial (blocks, outputs, depth) and sums (blocks, outputs) of the gradients of weights and bias. Grid (images * parts),
// of `share` lines of the convolution, a multiple of STEP.
template <typename T, int C, int K, int S, int P> __global__ void __launch_bounds__(THREADS, 2)
pooled_gradient(const T* x, const T* dy, const unsigned char* index, float* partial, float* sums, SHAPE) {
  using W = Window<C, K, S, P>;
  constexpr int PAIRS = K * W::CHUNKS / 4;  // of chunks of a row of weights, for each half of the warps
  static_assert(K * W::CHUNKS % 4 == 0);
  extern __shared__ __align__(128) unsigned char memory[];
  const Shape s = OF_SHAPE;
  const unsigned t = threadIdx.x, lane = t % 32, half = t / 32 % 2, group = t / 64, tiles = s.tiles(), width = tiles * 16;
  const int parts = s.parts(s.ho), image = blockIdx.x / parts, part = blockIdx.x % parts;
  const int from = part * s.share, end = min(from + s.share, s.ho), chunk = t % 8;
  unsigned char* gradient = memory;
  Lines<T, C, K, S, P> lines(x + i64(image) * s.h * s.w * C, memory + STEP * width * LINE, s);
  float sum[2][2 * PAIRS][4] = {}, of_bias[8] = {};

  lines.begin(from);
  for (int base = from; base < end; base += STEP) {
    // The gradient of the convolution's lines, two lines and columns at a time.
    Maxima of[4], next[4];
    const int half_width = width / 2, count = STEP / 2 * half_width;
    int i = base / 2, j = t / 8;  // the next
    const auto load = [&]() {
      for (; j >= half_width; j -= half_width) ++i;
#pragma unroll
      for (int n = 0; n < 4; ++n) next[n].load(dy, index, s, image, i - 1 + n / 2, j - 1 + n % 2, chunk);
    };
    load();
    for (int e = t / 8; e < count; e += THREADS / 8) {
      unsigned char* to = gradient + (2 * i - base) * width * LINE;
      const int column = 2 * j;
#pragma unroll
      for (int n = 0; n < 4; ++n) of[n] = next[n];
      j += THREADS / 8;
      if (e + THREADS / 8 < count) load();
      const Pack<unsigned, 4> a = of[0].at(8), b = of[1].at(6), c = of[2].at(2), d = of[3].at(0), all = of[3].all();
      const Pack<unsigned, 4> above = of[1].at(7), left = of[2].at(5), right_of_above = of[3].at(1), below = of[3].at(3);
      Pack<T, 8> first, right, down;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float2 na = numbers<T>(a.v[v]), nb = numbers<T>(b.v[v]), nc = numbers<T>(c.v[v]), nd = numbers<T>(d.v[v]);
        first.v[2 * v] = T(na.x + nb.x + nc.x + nd.x);
        first.v[2 * v + 1] = T(na.y + nb.y + nc.y + nd.y);
        const float2 r0 = numbers<T>(above.v[v]), r1 = numbers<T>(right_of_above.v[v]);
        right.v[2 * v] = T(r0.x + r1.x);
        right.v[2 * v + 1] = T(r0.y + r1.y);
        const float2 d0 = numbers<T>(left.v[v]), d1 = numbers<T>(below.v[v]);
        down.v[2 * v] = T(d0.x + d1.x);
        down.v[2 * v + 1] = T(d0.y + d1.y);
        const float2 both = numbers<T>(all.v[v]);
        of_bias[2 * v] += both.x;
        of_bias[2 * v + 1] += both.y;
      }
      *reinterpret_cast<Pack<T, 8>*>(to + at_pixel(column, chunk)) = first;
      *reinterpret_cast<Pack<T, 8>*>(to + at_pixel(column + 1, chunk)) = right;
      *reinterpret_cast<Pack<T, 8>*>(to + width * LINE + at_pixel(column, chunk)) = down;
      *reinterpret_cast<Pack<unsigned, 4>*>(to + width * LINE + at_pixel(column + 1, chunk)) = of[3].at(4);
    }
    __syncthreads();
    lines.read(lines.after(base));
    for (int line = 0; line < STEP; ++line) {
      unsigned from[2], of_lines[PAIRS];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        from[m] = shared_address(gradient + line * width * LINE) +
                  at_pixel(lane % 8 + lane / 16 * 8, group * 4 + m * 2 + lane / 8 % 2);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const unsigned pair = half * PAIRS + i, u = pair / (W::CHUNKS / 2), first = pair % (W::CHUNKS / 2) * 2;
        of_lines[i] = lines.at((base + line) * S + u, lane % 16 + lane / 16 + first);
      }
      for (unsigned column = 0; column < width; column += 16) {
        unsigned a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) matrices<true>(a[m], from[m] + column * LINE);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          unsigned b[4];
          matrices<true>(b, of_lines[i] + column * CHUNK);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const unsigned of[2] = {b[2 * n], b[2 * n + 1]};
#pragma unroll
            for (int m = 0; m < 2; ++m) multiply<T>(sum[m][2 * i + n], a[m], of);
          }
        }
      }
    }
    __syncthreads();
    lines.write(lines.after(base));
  }

#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int output = group * 32 + m * 16 + lane / 4 + 8 * i, place = (half * 2 * PAIRS + n) * 8 + lane % 4 * 2;
        float* to = partial + (i64(blockIdx.x) * OUTPUTS + output) * W::DEPTH + place;
        *reinterpret_cast<float2*>(to) = make_float2(sum[m][n][2 * i], sum[m][n][2 * i + 1]);
      }
  float* of_threads = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int v = 0; v < 8; ++v) of_threads[t * 8 + v] = of_bias[v];
  __syncthreads();
  if (t < OUTPUTS) {
    float total = 0;
    for (int i = 0; i < THREADS / 8; ++i) total += of_threads[i * OUTPUTS + t];
    sums[i64(blockIdx.x) * OUTPUTS + t] = total;
  }
}

// dw += the sums of `partial` over the blocks, db += those of `sums`, of which there may be one only. Grid (outputs, DEPTH / 32), 256
// threads: 32 places of a row by eight shares of the blocks.
template <int C, int K, int S, int P> __global__ void __launch_bounds__(256)
add_pooled_gradient(const float* partial, const float* sums, float* dw, float* db, int blocks) {
  using W = Window<C, K, S, P>;
  __shared__ float shares[8][32];
  const int output = blockIdx.x, lane = threadIdx.x % 32, share = threadIdx.x / 32, place = blockIdx.y * 32 + lane;
  const int from = blocks * share / 8, to = blocks * (share + 1) / 8;
  float sum = 0;
#pragma unroll 8
  for (int i = from; i < to; ++i) sum += partial[(i64(i) * OUTPUTS + output) * W::DEPTH + place];
  shares[share][lane] = sum;
  __syncthreads();
  if (share == 0) {
    for (int i = 1; i < 8; ++i) sum += shares[i][lane];
    const int at = W::weight_at(place);
    if (dw && at >= 0) dw[output * C * K * K + at] += sum;
  } else if (db && blockIdx.y == 0 && share == 1) {
    float of_bias = 0;
    for (int i = lane; i < blocks; i += 32) of_bias += sums[i * OUTPUTS + output];
#pragma unroll
    for (int offset = 16; offset; offset /= 2) of_bias += __shfl_xor_sync(0xffffffffu, of_bias, offset);
    if (lane == 0) db[output] += of_bias;
  }
}

// The gradient of the weights of a convolution, channels last, in float with factors rounded to tf32, by tensor cores: of
// images with few channels (line_gradient), and, by wgmma, of others (filter_gradient).
//
// It is a product whose depth is the pixels of y: dw (outputs; line and column of the kernel, channels) = sum over pixels of
// dy (pixel, outputs) * x (pixel moved by line and column, channels). A block has a tile of dw, and sums it over a share of
// the pixels, piece by piece: copies ahead bring pieces of dy, and what they see of x, to shared memory. Another kernel adds
// the shares up.
//
// A piece is four runs of pixels, each WIDTH of HIGH lines of y. The four threads t of a fragment (mma.cuh) have a run each,
// so the depth of a product is pixels of four runs: two neighbours of each, of which the first stands for t and the second for
// t + 4. The columns of the kernel then see the same pixels of x, which stay in registers. Runs lie 8 floats apart in shared
// memory, modulo 32, so that threads that read together read from different banks.

#include "pack.cuh"
#include "mma.cuh"
#include "ahead.cuh"
#include "pointwise.cuh"

struct Sizes {
  int images, height, width, channels;  // of x
  int high, wide, outputs;              // of y
  int of_group, to_group;               // channels and outputs of a group
  int kernel_high, kernel_wide;
  int stride, dilation, top, left;      // from line to line; the padding
  int shares;
};

#define SIZES                                                                                                              \
  i64 images, i64 height, i64 width, i64 channels, i64 high, i64 wide, i64 outputs, i64 of_group, i64 to_group,            \
      i64 kernel_high, i64 kernel_wide, i64 stride, i64 dilation, i64 top, i64 left, i64 shares
#define OF_SIZES                                                                                                           \
  Sizes{int(images),   int(height),   int(width),       int(channels),    int(high),   int(wide),     int(outputs), \
        int(of_group), int(to_group), int(kernel_high), int(kernel_wide), int(stride), int(dilation), int(top),     \
        int(left),     int(shares)}

__device__ constexpr int apart(int floats) { return (floats + 23) / 32 * 32 + 8; }  // from run to run

// A run of the next piece: every fourth of all runs, which follow each other in the lines of y.
template <typename G> struct Run {
  int across, column, line, n;  // runs of a line; which one of its line it is, its line and image
  __device__ Run(const Sizes& s, int number) {
    across = (s.wide + G::WIDTH - 1) / G::WIDTH;
    column = number % across;
    const int all = number / across * G::HIGH;
    n = all / s.high, line = all % s.high;
  }
  __device__ void advance(const Sizes& s) {
    for (column += 4; column >= across; column -= across) line += G::HIGH;
    for (; line >= s.high; line -= s.high) ++n;
  }
};

// The pieces of a block's share.
template <typename G> struct Share {
  int first, end;
  __device__ Share(const Sizes& s) {
    const int lines = (s.images * s.high + G::HIGH - 1) / G::HIGH, runs = lines * ((s.wide + G::WIDTH - 1) / G::WIDTH);
    const i64 pieces = (runs + 3) / 4;
    first = int(pieces * blockIdx.y / s.shares), end = int(pieces * (blockIdx.y + 1) / s.shares);
  }
};

// Begins to copy a run of dy and what it sees of x, by 4 * OF_RUN threads of which this is one. G::copy_line does a line of x.
template <typename G, typename Tile>
__device__ void copy_run(int of, float* to_x, float* to_dy, const float* x, const float* dy, const Sizes& s, const Tile& tile,
                         const Run<G>& run) {
  constexpr int PACKS = G::OUTPUTS / 4;
  const int number = of / G::OF_RUN, thread = of % G::OF_RUN, column = run.column * G::WIDTH;
  to_dy += number * G::DY_RUN, to_x += number * G::X_RUN;
#pragma unroll
  for (int h = 0; h < G::HIGH; ++h) {
    const int over = G::HIGH == 1 ? 0 : (run.line + h) / s.high, n = run.n + over, line = run.line + h - over * s.high;
    const bool there = n < s.images;
    const int all = (h == G::HIGH - 1 ? G::WIDTH + G::OF_DY - G::RUN : G::WIDTH) * PACKS, wide = there ? s.wide - column : 0;
    const float* const from = dy + ((i64(n) * s.high + line) * s.wide + column) * s.outputs + tile.first_output(s);
#pragma unroll
    for (int i = 0; i < all; i += G::OF_RUN) {
      const int p = (i + thread) / PACKS, o = (i + thread) % PACKS * 4;
      if (all % G::OF_RUN == 0 || i + thread < all)
        copy_ahead<16>(to_dy + (h * G::WIDTH + p) * G::OUTPUTS + o, from + p * s.outputs + o,
                       p < min(wide, G::WIDTH) && tile.output + o < s.to_group);
    }
#pragma unroll
    for (int k = 0; k < G::LINES; ++k) {
      const int row = line * s.stride + (tile.line + k) * s.dilation - s.top;
      const bool seen = there && row >= 0 && row < s.height && tile.line + k < s.kernel_high;
      const float* const from = x + (i64(n) * s.height + row) * s.width * s.channels;
      G::copy_line(thread, to_x + k * 4 * G::X_RUN + h * G::LINE, from, column * G::STRIDE - s.left, seen, s, tile);
    }
  }
}

// The place of an element of dw (outputs, channels of a group, kernel); -1 where there is none.
__device__ inline i64 place(const Sizes& s, int group, int output, int channel, int line, int column) {
  if (output >= s.to_group || channel >= s.of_group || line >= s.kernel_high || column >= s.kernel_wide) return -1;
  return ((i64(group * s.to_group + output) * s.of_group + channel) * s.kernel_high + line) * s.kernel_wide + column;
}

// Keeps a thread's sums in part (shares, tiles, SUMS, THREADS), by blocks (tiles, shares).
template <typename G> __device__ void keep(float* part, const float* sums) {
  part += (i64(blockIdx.y) * gridDim.x + blockIdx.x) * G::SUMS * G::THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < G::SUMS; ++i) part[i * G::THREADS] = sums[i];
}

// An element of dw += the shares of a thread's sum blockIdx.y, of tile blockIdx.x, LOADS on their way at a time.
template <typename G> __device__ void add_shares(const float* part, float* dw, const Sizes& s, i64 at) {
  constexpr int LOADS = 16;
  if (at < 0) return;
  const i64 pitch = i64(gridDim.x) * G::SUMS * G::THREADS;
  part += (i64(blockIdx.x) * G::SUMS + blockIdx.y) * G::THREADS + threadIdx.x;
  const float before = dw[at];
  float sum = 0;
  for (int first = 0; first < s.shares; first += LOADS) {
    float shares[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) shares[i] = first + i < s.shares ? part[(first + i) * pitch] : 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) sum += shares[i];
  }
  dw[at] = before + sum;
}

// ---- few channels

// A block has 16 * M outputs and the whole kernel, a warp of it one line: what that sees of x is one row of 8 * J numbers or
// fewer, which take the place of channels.
template <int WIDTH_, int HIGH_, int M_, int LINES_, int J_, int CHANNELS_, int STRIDE_, int STAGES_> struct FewTiling {
  static constexpr int WIDTH = WIDTH_, HIGH = HIGH_, M = M_, LINES = LINES_, J = J_, CHANNELS = CHANNELS_, STRIDE = STRIDE_,
                       STAGES = STAGES_;
  static constexpr int THREADS = 32 * LINES, OF_RUN = THREADS / 4, OUTPUTS = 16 * M, SUMS = 4 * M * J;
  static constexpr int RUN = WIDTH * HIGH, STEPS = (RUN + 1) / 2, OF_DY = 2 * STEPS;  // the last pixel of dy perhaps zeros
  static constexpr int LINE = (WIDTH - 1) * STRIDE * CHANNELS + 8 * J;  // numbers that a line of a run sees
  static constexpr int DY_RUN = apart(OF_DY * OUTPUTS), X_RUN = apart(HIGH * LINE);
  static constexpr int STAGE = 4 * (DY_RUN + LINES * X_RUN);
  struct Tile {
    int output, line;
    __device__ Tile(int tile) : output(tile * OUTPUTS), line(0) {}
    __device__ int first_output(const Sizes&) const { return output; }
  };
  static __device__ void copy_line(int thread, float* to, const float* from, int left, bool seen, const Sizes& s, const Tile&) {
    const int begin = left * CHANNELS, numbers = seen ? s.width * CHANNELS : 0;
#pragma unroll
    for (int i = 0; i < LINE; i += OF_RUN)
      if (i + thread < LINE)
        copy_ahead<4>(to + i + thread, from + begin + i + thread, unsigned(begin + i + thread) < unsigned(numbers));
  }
};

template <int WIDTH, int HIGH, int M, int LINES, int J, int CHANNELS, int STRIDE, int STAGES>
__global__ void __launch_bounds__(32 * LINES) line_gradient(const float* x, const float* dy, float* part, SIZES) {
  using G = FewTiling<WIDTH, HIGH, M, LINES, J, CHANNELS, STRIDE, STAGES>;
  extern __shared__ __align__(16) float buffers[];
  const Sizes s = OF_SIZES;
  const typename G::Tile mine(blockIdx.x);
  const Share<G> share(s);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, line = threadIdx.x / 32;
  const int of_dy = t * G::DY_RUN + 2 * g, of_x = 4 * G::DY_RUN + (4 * line + t) * G::X_RUN + g;
  float sum[M][J][4] = {};
  Run<G> next(s, 4 * share.first + threadIdx.x / G::OF_RUN);
  const auto copy = [&](int piece) {
    if (piece < share.end) {
      float* const to = buffers + (piece - share.first) % STAGES * G::STAGE;
      copy_run<G>(threadIdx.x, to + 4 * G::DY_RUN, to, x, dy, s, mine, next);
      next.advance(s);
    }
    close_group();
  };
  for (int i = 0; i < STAGES - 1; ++i) copy(share.first + i);
  for (int i = share.first; i < share.end; ++i) {
    wait_for_groups<STAGES - 2>();
    __syncthreads();
    copy(i + STAGES - 1);
    const float* const piece = buffers + (i - share.first) % STAGES * G::STAGE;
#pragma unroll
    for (int step = 0; step < G::STEPS; ++step) {
      unsigned a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8 are outputs that are neighbours
          const float2 pair = *reinterpret_cast<const float2*>(piece + of_dy + (2 * step + half) * G::OUTPUTS + 16 * m);
          a[m][2 * half] = tf32(pair.x), a[m][2 * half + 1] = tf32(pair.y);
        }
#pragma unroll
      for (int j = 0; j < J; ++j) {
        unsigned b[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int pixel = min(2 * step + half, G::RUN - 1);  // behind an odd number dy has zeros
          b[half] = tf32(piece[of_x + pixel / WIDTH * G::LINE + pixel % WIDTH * STRIDE * CHANNELS + 8 * j]);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) multiply<float>(sum[m][j], a[m], b);
      }
    }
  }
  keep<G>(part, &sum[0][0][0]);
}

// dw += the shares of part, by blocks (tiles, SUMS).
template <int WIDTH, int HIGH, int M, int LINES, int J, int CHANNELS, int STRIDE, int STAGES>
__global__ void __launch_bounds__(32 * LINES) add_line_gradient(const float* part, float* dw, SIZES) {
  using G = FewTiling<WIDTH, HIGH, M, LINES, J, CHANNELS, STRIDE, STAGES>;
  const Sizes s = OF_SIZES;
  const int i = blockIdx.y, q = i % 4, j = i / 4 % J, m = i / 4 / J, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int output = blockIdx.x * G::OUTPUTS + 16 * m + 2 * g + q / 2, number = 8 * j + 2 * t + q % 2;
  add_shares<G>(part, dw, s, place(s, 0, output, number % CHANNELS, threadIdx.x / 32, number / CHANNELS));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- wgmma

#define WGMMA_SUMS_64                                                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "                                  \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_SUMS_128                                                                                                     \
  WGMMA_SUMS_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "        \
                "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// sum (64, N) += a (64, 8), in fragments of four warps, * b (8, N), in shared memory
__device__ inline void multiply_8(float (&sum)[8][4], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" WGMMA_SUMS_64
               "}, {%32, %33, %34, %35}, %36, p, 1, 1; }"
               : SUMS_32(sum, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void multiply_8(float (&sum)[16][4], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" WGMMA_SUMS_128
               "}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
               : SUMS_32(sum, 0), SUMS_32(sum, 8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// A block has OUTPUTS of a group, LINES of the kernel with all its COLUMNS, and 64 * BLOCKS channels.
template <int WIDTH_, int HIGH_, int LINES_, int BLOCKS_, int COLUMNS_, int OUTPUTS_, int DILATION_> struct WideTiling {
  static constexpr int WIDTH = WIDTH_, HIGH = HIGH_, LINES = LINES_, BLOCKS = BLOCKS_, COLUMNS = COLUMNS_, OUTPUTS = OUTPUTS_,
                       DILATION = DILATION_, STRIDE = 1;
  static constexpr int GROUPS = LINES * BLOCKS, THREADS = 128 * GROUPS, OF_RUN = 32;  // THREADS multiply, 128 others copy
  static constexpr int CHANNELS = 64 * BLOCKS, SUMS = COLUMNS * OUTPUTS / 2;
  static constexpr int RUN = WIDTH * HIGH, OF_DY = RUN, SEEN = WIDTH + (COLUMNS - 1) * DILATION, LINE = SEEN * CHANNELS;
  static constexpr int PAIRS = (SEEN + 1) / 2;                    // of pixels of a line
  static constexpr int AT_ONCE = SUMS < 192 ? 2 : 1;              // pairs in registers
  static constexpr int DY_RUN = apart(RUN * OUTPUTS), X_RUN = apart(HIGH * LINE);
  static constexpr int DY_SIZE = 4 * DY_RUN, X_SIZE = 4 * LINES * X_RUN;
  static constexpr int TRANSPOSED = (HIGH * (WIDTH + 1) + 1) * OUTPUTS * 4;
  struct Tile {
    int channel, line, output, group;  // the first of each, that of outputs and channels within the group
    __device__ Tile(const Sizes& s, int tile) {
      const int across = (s.of_group + CHANNELS - 1) / CHANNELS, lines = (s.kernel_high + LINES - 1) / LINES;
      const int down = (s.to_group + OUTPUTS - 1) / OUTPUTS;
      output = tile % down * OUTPUTS, tile /= down;
      line = tile % lines * LINES, tile /= lines;
      channel = tile % across * CHANNELS, group = tile / across;
    }
    __device__ int first_output(const Sizes& s) const { return group * s.to_group + output; }
  };
  static __device__ void copy_line(int thread, float* to, const float* from, int left, bool seen, const Sizes& s,
                                   const Tile& tile) {
    constexpr int PACKS = CHANNELS / 4;
    from += i64(left) * s.channels + tile.group * s.of_group + tile.channel;
    const int width = seen ? s.width : 0;
#pragma unroll
    for (int i = 0; i < SEEN * PACKS; i += OF_RUN) {
      const int p = (i + thread) / PACKS, c = (i + thread) % PACKS * 4;
      if (SEEN * PACKS % OF_RUN == 0 || i + thread < SEEN * PACKS)
        copy_ahead<16>(to + p * CHANNELS + c, from + p * s.channels + c,
                       unsigned(left + p) < unsigned(width) && tile.channel + c < s.of_group);
    }
  }
};

// Writes dy of a piece, rounded, as wgmma reads it, with its depth side by side: (places, outputs, 4 runs), a place for each
// pixel of a run, and places of zeros before and behind each of its lines.
template <typename G> __device__ void transpose(int thread, float* to, const float* dy) {
#pragma unroll
  for (int i = 0; i < G::RUN * G::OUTPUTS; i += 128) {
    const int output = (i + thread) % G::OUTPUTS, pixel = (i + thread) / G::OUTPUTS;
    if (pixel >= G::RUN) break;
    unsigned v[4];
#pragma unroll
    for (int run = 0; run < 4; ++run) v[run] = tf32(dy[run * G::DY_RUN + pixel * G::OUTPUTS + output]);
    const int place = 1 + pixel / G::WIDTH * (G::WIDTH + 1) + pixel % G::WIDTH;
    *reinterpret_cast<uint4*>(to + (place * G::OUTPUTS + output) * 4) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Barriers of some threads of a block: wait for the others, or only let them know.
__device__ inline void sync_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive_barrier(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The last four warps copy two pieces ahead and transpose one ahead. Each other four multiply for a line of the kernel and 64
// channels: a pair of pixels of x, from registers, by the pairs of dy that see it at each column of the kernel, which may
// begin before a line's first pixel or end behind its last.
template <int WIDTH, int HIGH, int LINES, int BLOCKS, int COLUMNS, int OUTPUTS, int DILATION>
__global__ void __launch_bounds__(128 * (LINES * BLOCKS + 1), 1)
filter_gradient(const float* x, const float* dy, float* part, SIZES) {
  using G = WideTiling<WIDTH, HIGH, LINES, BLOCKS, COLUMNS, OUTPUTS, DILATION>;
  extern __shared__ __align__(16) float buffers[];  // dy transposed, of two pieces; dy, of two; x, of three
  float* const of_dy = buffers + 2 * G::TRANSPOSED;
  float* const of_x = of_dy + 2 * G::DY_SIZE;
  const Sizes s = OF_SIZES;
  const typename G::Tile mine(s, blockIdx.x);
  const Share<G> share(s);
  const int total = share.end - share.first, thread = threadIdx.x % 128, group = threadIdx.x / 128;
  constexpr int FULL = 1, FREE = FULL + 2 * G::GROUPS, COPIED = FREE + 2 * G::GROUPS;  // barriers: two of each group
  constexpr int FOR_COPIES = G::GROUPS == 2 ? 40 : 56, FOR_SUMS = G::GROUPS == 2 ? 232 : 152;  // registers of a thread
  if (group == G::GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FOR_COPIES));
    for (int i = thread; i < 2 * (HIGH + 1) * OUTPUTS * 4; i += 128) {
      const int place = i / (OUTPUTS * 4) % (HIGH + 1) * (WIDTH + 1), piece = i / (OUTPUTS * 4) / (HIGH + 1);
      buffers[piece * G::TRANSPOSED + place * OUTPUTS * 4 + i % (OUTPUTS * 4)] = 0;
    }
    Run<G> next(s, 4 * share.first + thread / G::OF_RUN);
    const auto copy = [&](int i) {
      if (i < total) {
        copy_run<G>(thread, of_x + i % 3 * G::X_SIZE, of_dy + i % 2 * G::DY_SIZE, x, dy, s, mine, next);
        next.advance(s);
      }
      close_group();
    };
    copy(0), copy(1);
    for (int i = 0; i < total; ++i) {
      wait_for_groups<1>();
      sync_barrier(COPIED, 128);
      transpose<G>(thread, buffers + i % 2 * G::TRANSPOSED, of_dy + i % 2 * G::DY_SIZE);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
      for (int other = 0; other < G::GROUPS; ++other) arrive_barrier(FULL + 2 * other + i % 2, 256);
      if (i > 0)
#pragma unroll
        for (int other = 0; other < G::GROUPS; ++other) sync_barrier(FREE + 2 * other + (i - 1) % 2, 256);
      sync_barrier(COPIED, 128);
      copy(i + 2);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FOR_SUMS));
  const int g = thread % 32 / 4, t = thread % 4, warp = thread / 32;
  const int at_x = (group % LINES * 4 + t) * G::X_RUN + group / LINES * 64 + warp * 16 + 2 * g;
  float sum[COLUMNS][OUTPUTS / 8][4] = {};
  for (int i = 0; i < total; ++i) {
    sync_barrier(FULL + 2 * group + i % 2, 256);
    const float* const piece = of_x + i % 3 * G::X_SIZE + at_x;
    const unsigned by_outputs = shared_address(buffers + i % 2 * G::TRANSPOSED);
    unsigned a[2][G::AT_ONCE][4];
#pragma unroll
    for (int from = 0; from < HIGH * G::PAIRS; from += G::AT_ONCE) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the last but one are done with their registers
#pragma unroll
      for (int k = from; k < min(from + G::AT_ONCE, HIGH * G::PAIRS); ++k)
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const int pixel = k % G::PAIRS * 2 + p;
          const float2 pair = pixel < G::SEEN
                                  ? *reinterpret_cast<const float2*>(piece + k / G::PAIRS * G::LINE + pixel * G::CHANNELS)
                                  : make_float2(0, 0);
          unsigned(&to)[4] = a[from / G::AT_ONCE % 2][k - from];
          to[2 * p] = tf32(pair.x), to[2 * p + 1] = tf32(pair.y);
        }
      before_products();
#pragma unroll
      for (int k = from; k < min(from + G::AT_ONCE, HIGH * G::PAIRS); ++k)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int pixel = k % G::PAIRS * 2 - c * DILATION;  // of dy, the first of the pair
          if (pixel < -1 || pixel >= WIDTH) continue;
          const unsigned place = (1 + k / G::PAIRS * (WIDTH + 1) + pixel) * OUTPUTS * 16;
          multiply_8(sum[c], a[from / G::AT_ONCE % 2][k - from], matrix(by_outputs + place, OUTPUTS * 16, 128, 0));
        }
      begin_products();
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) end_products(sum[c]);
    if (i + 1 < total) arrive_barrier(FREE + 2 * group + i % 2, 256);
  }
  keep<G>(part, &sum[0][0][0]);
}

// dw += the shares of part, by blocks (tiles, SUMS).
template <int WIDTH, int HIGH, int LINES, int BLOCKS, int COLUMNS, int OUTPUTS, int DILATION>
__global__ void __launch_bounds__(128 * LINES * BLOCKS) add_filter_gradient(const float* part, float* dw, SIZES) {
  using G = WideTiling<WIDTH, HIGH, LINES, BLOCKS, COLUMNS, OUTPUTS, DILATION>;
  const Sizes s = OF_SIZES;
  const typename G::Tile mine(s, blockIdx.x);
  const int i = blockIdx.y, q = i % 4, n = i / 4 % (OUTPUTS / 8), column = i / 4 / (OUTPUTS / 8);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
  const int channel = mine.channel + group / LINES * 64 + warp * 16 + 2 * g + q / 2;
  const int output = mine.output + 8 * n + 2 * t + q % 2;
  add_shares<G>(part, dw, s, place(s, mine.group, output, channel, mine.line + group % LINES, column));
}

#endif

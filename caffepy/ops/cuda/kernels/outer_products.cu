// Sums of few outer products, such as the gradient of a fully connected layer's weight: what is done with them takes longer
// than to make them. out (rows, columns) = sum over d of outer(a_d, b_d), with a (depth, rows) and b (depth, columns) in
// numbers of 16 bits, C-contiguous, rows and columns multiples of 8.
//
// A block makes ROWS x COLUMNS sums by tensor cores; lines of a and b come to shared memory by cp.async, CHUNK of the depth
// at a time, those of the next STAGES - 1 chunks while one is multiplied. Then the sums go there, so that a warp takes whole
// lines of 512 bytes of what lies in device memory. The order of a sum is that of the depth.

#include "pack.cuh"
#include "mma.cuh"
#include "pointwise.cuh"
#include "rules.cuh"

constexpr int CHUNK = 64, LINES = 8, PART = 128;  // a warp takes LINES lines of PART numbers at a time

template <int ROWS, int COLUMNS> struct Tile {
  static constexpr int THREADS = ROWS * COLUMNS / 64, WARPS = THREADS / 32, RESIDENT = 512 / THREADS;
  static constexpr int PITCH = COLUMNS + 8;  // of sums in shared memory
};

using Four = Pack<float, 4>;

// A piece of LENGTH numbers of CHUNK lines of a factor in shared memory: its bytes, and where 8 numbers of a line lie.
// Sums of a block's threads: add() those of a chunk, each(f) calls f(row, column, two sums side by side).
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Blocks of 64 numbers of each line, in the swizzle of 128 bytes. Four warps make 64 x 128 sums by wgmma.
template <int LENGTH> struct Piece {
  static constexpr int BYTES = CHUNK * LENGTH * 2;
  __device__ static int at(int line, int eight) {
    return eight / 8 * (CHUNK * 128) + line * 128 + (eight ^ line) % 8 * 16;
  }
};

template <typename T, int ROWS, int COLUMNS> struct Sums {
  float sums[16][4] = {};
  __device__ static int down() { return threadIdx.x / 128 / (COLUMNS / 128) * 64; }
  __device__ static int across() { return threadIdx.x / 128 % (COLUMNS / 128) * 128; }
  __device__ static void arrived() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  __device__ void add(unsigned a, unsigned b) {
    a += down() / 64 * (CHUNK * 128);
    b += across() / 64 * (CHUNK * 128);
    before_products();
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16)
      multiply_16<T, true, true>(sums, matrix(a + k * 128, CHUNK * 128, 8 * 128, 1),
                                 matrix(b + k * 128, CHUNK * 128, 8 * 128, 1));
    begin_products();
    end_products(sums);
  }
  template <typename F> __device__ void each(F f) const {
    const int row = down() + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = across() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int k = 0; k < 4; k += 2) f(row + k * 4, column + n * 8, Pack<float, 2>{sums[n][k], sums[n][k + 1]});
  }
};

#else

// Lines that begin in different banks. A warp makes 64 x 32 sums by mma.
template <int LENGTH> struct Piece {
  static constexpr int BYTES = CHUNK * (LENGTH + 8) * 2;
  __device__ static int at(int line, int eight) { return line * (LENGTH + 8) * 2 + eight * 16; }
};

template <typename T, int ROWS, int COLUMNS> struct Sums {
  float sums[4][4][4] = {};
  __device__ static int down() { return threadIdx.x / 32 / (COLUMNS / 32) * 64; }
  __device__ static int across() { return threadIdx.x / 32 % (COLUMNS / 32) * 32; }
  __device__ static void arrived() {}
  __device__ void add(unsigned a, unsigned b) {
    const int lane_id = threadIdx.x % 32, near = lane_id % 8, half = lane_id / 8 % 2, far = lane_id / 16;
    a += Piece<ROWS>::at(far * 8 + near, down() / 8 + half);
    b += Piece<COLUMNS>::at(half * 8 + near, across() / 8 + far);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
      unsigned left_words[4][4], right_words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) matrices<true>(left_words[i], a + Piece<ROWS>::at(k, i * 2));
#pragma unroll
      for (int j = 0; j < 2; ++j) matrices<true>(right_words[j], b + Piece<COLUMNS>::at(k, j * 2));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned words[2] = {right_words[j / 2][j % 2 * 2], right_words[j / 2][j % 2 * 2 + 1]};
          multiply<T>(sums[i][j], left_words[i], words);
        }
    }
  }
  template <typename F> __device__ void each(F f) const {
    const int row = down() + threadIdx.x % 32 / 4, column = across() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int k = 0; k < 4; k += 2)
          f(row + i * 16 + k * 4, column + j * 8, Pack<float, 2>{sums[i][j][k], sums[i][j][k + 1]});
  }
};

#endif

// CHUNK lines of a factor, from `first` on, to shared memory: LENGTH numbers of each from `start` on; zeros where there is
// nothing.
template <typename T, int LENGTH, int THREADS>
__device__ void fetch_lines(unsigned to, const T* from, int first, int depth, int start, int length) {
  constexpr int OF_LINE = LENGTH / 8;
#pragma unroll
  for (int i = 0; i < CHUNK * OF_LINE / THREADS; ++i) {
    const int p = i * THREADS + threadIdx.x, line = p / OF_LINE, eight = p % OF_LINE, d = first + line;
    const bool there = d < depth && start + eight * 8 < length;
    fetch(to + Piece<LENGTH>::at(line, eight), there ? from + i64(d) * length + start + eight * 8 : from, there);
  }
}

// The packs of four neighbours that a thread takes at a time, one of each of LINES lines.
struct Packs {
  const float* sums;          // in shared memory, lines of `pitch`
  i64 at;                     // of the first pack in out
  int pitch, lines, columns;  // the last two that are there
  __device__ bool there(int i) const { return i < lines; }
  __device__ Four sum(int i) const { return *reinterpret_cast<const Four*>(sums + i * pitch); }
  __device__ Four load(const float* array, int i) const {
    return *reinterpret_cast<const Four*>(array + at + i * columns);
  }
  __device__ void store(float* array, int i, const Four& four) const {
    *reinterpret_cast<Four*>(array + at + i * columns) = four;
  }
};

// Calls finish(packs) until all of out had its turn.
template <typename T, int ROWS, int COLUMNS, int STAGES, typename F>
__device__ void sum_products(const T* a, const T* b, int depth, int rows, int columns, F finish) {
  using Of = Tile<ROWS, COLUMNS>;
  constexpr int PITCH = Of::PITCH, STAGE = Piece<ROWS>::BYTES + Piece<COLUMNS>::BYTES, PARTS = COLUMNS / PART;
  extern __shared__ __align__(1024) unsigned char room[];
  const unsigned stages = shared_address(room);
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS, chunks = (depth + CHUNK - 1) / CHUNK;
  const auto load = [&](int chunk) {
    if (chunk < chunks) {
      const unsigned to = stages + chunk % STAGES * STAGE;
      fetch_lines<T, ROWS, Of::THREADS>(to, a, chunk * CHUNK, depth, top, rows);
      fetch_lines<T, COLUMNS, Of::THREADS>(to + Piece<ROWS>::BYTES, b, chunk * CHUNK, depth, left, columns);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  Sums<T, ROWS, COLUMNS> sums;
  for (int chunk = 0; chunk < STAGES - 1; ++chunk) load(chunk);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    sums.arrived();
    __syncthreads();
    load(chunk + STAGES - 1);  // to where the chunk before was, which all have multiplied
    const unsigned stage = stages + chunk % STAGES * STAGE;
    sums.add(stage, stage + Piece<ROWS>::BYTES);
  }
  __syncthreads();
  float* tile = reinterpret_cast<float*>(room);
  sums.each([=](int row, int column, Pack<float, 2> pair) {
    *reinterpret_cast<Pack<float, 2>*>(tile + row * PITCH + column) = pair;
  });
  __syncthreads();
#pragma unroll 1
  for (int unit = warp; unit < ROWS / LINES * PARTS; unit += Of::WARPS) {
    const int line = unit / PARTS * LINES, column = unit % PARTS * PART + lane_id * 4;
    if (left + column < columns)
      finish(Packs{tile + line * PITCH + column, i64(top + line) * columns + left + column, PITCH, rows - top - line, columns});
  }
}

// out = scale * sums, added to what is there if `adds`
template <typename T, int ROWS, int COLUMNS, int STAGES>
__global__ void __launch_bounds__(Tile<ROWS, COLUMNS>::THREADS, Tile<ROWS, COLUMNS>::RESIDENT)
outer_products(const T* a, const T* b, float* out, int depth, int rows, int columns, int adds, float scale) {
  sum_products<T, ROWS, COLUMNS, STAGES>(a, b, depth, rows, columns, [=](const Packs& packs) {
    Four before[LINES] = {};
#pragma unroll
    for (int i = 0; i < LINES; ++i)
      if (adds && packs.there(i)) before[i] = packs.load(out, i);
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      if (!packs.there(i)) continue;
      const Four sum = packs.sum(i);
#pragma unroll
      for (int v = 0; v < 4; ++v) before[i].v[v] += scale * sum.v[v];
      packs.store(out, i, before[i]);
    }
  });
}

// w and the histories h and u (nothing if the rule has one) are updated with the sums as gradient; rates and decays have
// the factors of w. If `go` is 0 nothing is written.
template <typename T, typename RULE, int ROWS, int COLUMNS, int STAGES>
__global__ void __launch_bounds__(Tile<ROWS, COLUMNS>::THREADS, Tile<ROWS, COLUMNS>::RESIDENT)
outer_update(const T* a, const T* b, float* w, float* h, float* u, int depth, int rows, int columns, const float* rates,
             const float* decays, int l1, NUMBER(scale), NUMBER(rate), NUMBER(decay), NUMBER(go), NUMBER(a_), NUMBER(b_),
             NUMBER(c_), NUMBER(d_)) {
  if (VALUE(go) == 0) return;
  constexpr bool TWO = RULE::HISTORIES == 2;
  const RULE rule(float(VALUE(a_)), float(VALUE(b_)), float(VALUE(c_)), float(VALUE(d_)));
  const float factor = float(VALUE(scale)), step = float(VALUE(rate)) * *rates, shrink = float(VALUE(decay)) * *decays;
  sum_products<T, ROWS, COLUMNS, STAGES>(a, b, depth, rows, columns, [=](const Packs& packs) {
    constexpr int MANY = TWO ? LINES / 2 : LINES;  // that registers hold
#pragma unroll
    for (int begin = 0; begin < LINES; begin += MANY) {
      Four weights[MANY], first[MANY], second[MANY];
#pragma unroll
      for (int i = 0; i < MANY; ++i) {
        if (!packs.there(begin + i)) continue;
        weights[i] = packs.load(w, begin + i);
        first[i] = packs.load(h, begin + i);
        if (TWO) second[i] = packs.load(u, begin + i);
      }
#pragma unroll
      for (int i = 0; i < MANY; ++i) {
        if (!packs.there(begin + i)) continue;
        const Four gradient = packs.sum(begin + i);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float& x = weights[i].v[v];
          const float r = regularized(factor, shrink, l1 != 0, x, gradient.v[v]);
          if constexpr (TWO)
            x -= rule(step, r, first[i].v[v], second[i].v[v]);
          else
            x -= rule(step, r, first[i].v[v]);
        }
        packs.store(w, begin + i, weights[i]);
        packs.store(h, begin + i, first[i]);
        if (TWO) packs.store(u, begin + i, second[i]);
      }
    }
  });
}

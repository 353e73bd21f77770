// Sums of few outer products, such as the gradient of a fully connected layer's weight: what is done with them takes longer
// than to make them. out (rows, columns) = sum over d of outer(a_d, b_d), with a (depth, rows) and b (depth, columns) in
// numbers of 16 bits, C-contiguous, rows and columns multiples of 8.
//
// A block makes ROWS x COLUMNS sums by tensor cores, a warp 64 x 32 of them; lines of a and b come to shared memory by
// cp.async, CHUNK of the depth at a time, the next ones while these are multiplied. Then the sums go there, so that a warp
// takes whole lines of 512 bytes of what lies in device memory. The order of a sum is that of the depth.

#include "pack.cuh"
#include "mma.cuh"
#include "rules.cuh"

constexpr int CHUNK = 64, LINES = 8, PART = 128;  // a warp takes LINES lines of PART numbers at a time

template <int ROWS, int COLUMNS> struct Tile {
  static constexpr int WARPS = ROWS / 64 * (COLUMNS / 32), THREADS = 32 * WARPS, RESIDENT = 512 / THREADS;
  static constexpr int A_PITCH = ROWS + 8, PITCH = COLUMNS + 8;  // lines in shared memory begin in different banks
  static constexpr int PIECES = CHUNK * (A_PITCH + PITCH);       // numbers of a piece of both factors
};

using Four = Pack<float, 4>;

// 16 bytes to shared memory; zeros unless they are there
__device__ inline void fetch(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// CHUNK lines of a factor, from `first` on, to shared memory: LENGTH numbers of each from `start` on.
template <typename T, int LENGTH, int THREADS>
__device__ void fetch_lines(T* to, const T* from, int first, int depth, int start, int length) {
  constexpr int OF_LINE = LENGTH / 8;
#pragma unroll
  for (int i = 0; i < CHUNK * OF_LINE / THREADS; ++i) {
    const int p = i * THREADS + threadIdx.x, line = p / OF_LINE, at = p % OF_LINE * 8, d = first + line;
    const bool there = d < depth && start + at < length;
    fetch(shared_address(to + line * (LENGTH + 8) + at), there ? from + i64(d) * length + start + at : from, there);
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
template <typename T, int ROWS, int COLUMNS, typename F>
__device__ void sum_products(const T* a, const T* b, int depth, int rows, int columns, F finish) {
  using Of = Tile<ROWS, COLUMNS>;
  constexpr int A_PITCH = Of::A_PITCH, PITCH = Of::PITCH, PIECES = Of::PIECES, PARTS = COLUMNS / PART;
  extern __shared__ __align__(16) unsigned char room[];
  T* pieces = reinterpret_cast<T*>(room);  // two of each factor
  static_assert(ROWS * PITCH * sizeof(float) <= 2 * PIECES * sizeof(T), "sums take no more than pieces");
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, near = lane_id % 8, half = lane_id / 8 % 2 * 8;
  const int far = lane_id / 16 * 8, across = warp % (COLUMNS / 32) * 32, down = warp / (COLUMNS / 32) * 64;
  const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
  const auto load = [&](int first, int buffer) {
    T* to = pieces + buffer * PIECES;
    fetch_lines<T, ROWS, Of::THREADS>(to, a, first, depth, top, rows);
    fetch_lines<T, COLUMNS, Of::THREADS>(to + CHUNK * A_PITCH, b, first, depth, left, columns);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sums[4][4][4] = {};
  load(0, 0);
  for (int first = 0, buffer = 0; first < depth; first += CHUNK, buffer ^= 1) {
    if (first + CHUNK < depth) {
      load(first + CHUNK, buffer ^ 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();
    const T* piece = pieces + buffer * PIECES;
    const unsigned from_a = shared_address(piece + (far + near) * A_PITCH + down + half);
    const unsigned from_b = shared_address(piece + CHUNK * A_PITCH + (half + near) * PITCH + across + far);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
      unsigned left_words[4][4], right_words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) matrices<true>(left_words[i], from_a + unsigned(sizeof(T)) * (k * A_PITCH + i * 16));
#pragma unroll
      for (int j = 0; j < 2; ++j) matrices<true>(right_words[j], from_b + unsigned(sizeof(T)) * (k * PITCH + j * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned words[2] = {right_words[j / 2][j % 2 * 2], right_words[j / 2][j % 2 * 2 + 1]};
          multiply<T>(sums[i][j], left_words[i], words);
        }
    }
    __syncthreads();
  }
  float* tile = reinterpret_cast<float*>(room);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const int row = down + i * 16 + lane_id / 4 + k * 4, column = across + j * 8 + lane_id % 4 * 2;
        *reinterpret_cast<Pack<float, 2>*>(tile + row * PITCH + column) = {sums[i][j][k], sums[i][j][k + 1]};
      }
  __syncthreads();
#pragma unroll 1
  for (int unit = warp; unit < ROWS / LINES * PARTS; unit += Of::WARPS) {
    const int line = unit / PARTS * LINES, column = unit % PARTS * PART + lane_id * 4;
    if (left + column < columns)
      finish(Packs{tile + line * PITCH + column, i64(top + line) * columns + left + column, PITCH, rows - top - line, columns});
  }
}

// out = scale * sums, added to what is there if `adds`
template <typename T, int ROWS, int COLUMNS>
__global__ void __launch_bounds__(Tile<ROWS, COLUMNS>::THREADS, Tile<ROWS, COLUMNS>::RESIDENT)
outer_products(const T* a, const T* b, float* out, int depth, int rows, int columns, int adds, float scale) {
  sum_products<T, ROWS, COLUMNS>(a, b, depth, rows, columns, [=](const Packs& packs) {
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
template <typename T, typename RULE, int ROWS, int COLUMNS>
__global__ void __launch_bounds__(Tile<ROWS, COLUMNS>::THREADS, Tile<ROWS, COLUMNS>::RESIDENT)
outer_update(const T* a, const T* b, float* w, float* h, float* u, int depth, int rows, int columns, const float* rates,
             const float* decays, int l1, NUMBER(scale), NUMBER(rate), NUMBER(decay), NUMBER(go), NUMBER(a_), NUMBER(b_),
             NUMBER(c_), NUMBER(d_)) {
  if (VALUE(go) == 0) return;
  constexpr bool TWO = RULE::HISTORIES == 2;
  const RULE rule(float(VALUE(a_)), float(VALUE(b_)), float(VALUE(c_)), float(VALUE(d_)));
  const float factor = float(VALUE(scale)), step = float(VALUE(rate)) * *rates, shrink = float(VALUE(decay)) * *decays;
  sum_products<T, ROWS, COLUMNS>(a, b, depth, rows, columns, [=](const Packs& packs) {
    Four weights[LINES], first[LINES], second[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      if (!packs.there(i)) continue;
      weights[i] = packs.load(w, i);
      first[i] = packs.load(h, i);
      if (TWO) second[i] = packs.load(u, i);
    }
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      if (!packs.there(i)) continue;
      const Four gradient = packs.sum(i);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        float& x = weights[i].v[v];
        const float r = regularized(factor, shrink, l1 != 0, x, gradient.v[v]);
        if constexpr (TWO)
          x -= rule(step, r, first[i].v[v], second[i].v[v]);
        else
          x -= rule(step, r, first[i].v[v]);
      }
      packs.store(w, i, weights[i]);
      packs.store(h, i, first[i]);
      if (TWO) packs.store(u, i, second[i]);
    }
  });
}

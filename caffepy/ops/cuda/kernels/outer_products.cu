// Sums of few outer products, such as the gradient of a fully connected layer's weight: what is done with them takes longer
// than to make them. out (rows, columns) = sum over d of outer(a_d, b_d), with a (depth, rows) and b (depth, columns) in
// numbers of 16 bits, C-contiguous, rows and columns multiples of 8.
//
//                 columns          A block makes 128 x 128 sums by tensor cores, a warp 64 x 32 of them; lines of a and b
//           +----+----+----+----+  come to shared memory by cp.async, CHUNK of the depth at a time, the next ones while
//   128     | w0 | w1 | w2 | w3 |  these are multiplied. Then the sums go there, so that a warp takes whole lines of 512
//   rows    +----+----+----+----+  bytes of what lies in device memory, which the cache fetches in the meantime.
//           | w4 | w5 | w6 | w7 |
//           +----+----+----+----+  The order of a sum is that of the depth.

#include "pack.cuh"
#include "mma.cuh"
#include "rules.cuh"

constexpr int EDGE = 128, HALF = 64, CHUNK = 64;
constexpr int PITCH = EDGE + 8, LINE = EDGE + 8;  // lines in shared memory begin in different banks
constexpr int LINES = 8;                           // of a warp at a time

constexpr int NEXT = LINE / 4;

using Four = Pack<float, 4>;

// 16 bytes to shared memory; zeros unless they are there
__device__ inline void fetch(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Calls finish(sums, at, there) for packs of four neighbours, of LINES lines at a time, those of sums NEXT packs apart:
// where the first is in out, and how many of the lines are there.
template <typename T, typename F>
__device__ void sum_products(const T* a, const T* b, int depth, int rows, int columns, F finish) {
  extern __shared__ __align__(16) unsigned char room[];
  T(*pieces)[2][CHUNK * PITCH] = reinterpret_cast<T(*)[2][CHUNK * PITCH]>(room);  // two pieces of each factor
  static_assert(EDGE * LINE * sizeof(float) <= 4 * CHUNK * PITCH * sizeof(T), "sums take no more than pieces");
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, near = lane_id % 8, half = lane_id / 8 % 2 * 8;
  const int far = lane_id / 16 * 8, down = warp / 4 * HALF, across = warp % 4 * 32;
  const int top = blockIdx.y * EDGE, left = blockIdx.x * EDGE;
  const auto load = [&](int first, int buffer) {
    constexpr int PACKS = EDGE / 8;  // of a line
#pragma unroll
    for (int i = 0; i < CHUNK * PACKS / 256; ++i) {
      const int p = i * 256 + threadIdx.x, line = p / PACKS, at = p % PACKS * 8, d = first + line;
      const bool in_a = d < depth && top + at < rows, in_b = d < depth && left + at < columns;
      fetch(shared_address(&pieces[buffer][0][line * PITCH + at]), in_a ? a + i64(d) * rows + top + at : a, in_a);
      fetch(shared_address(&pieces[buffer][1][line * PITCH + at]), in_b ? b + i64(d) * columns + left + at : b, in_b);
    }
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
    const unsigned from_a = shared_address(&pieces[buffer][0][(far + near) * PITCH + down + half]);
    const unsigned from_b = shared_address(&pieces[buffer][1][(half + near) * PITCH + across + far]);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
      unsigned left_words[4][4], right_words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) matrices<true>(left_words[i], from_a + unsigned(sizeof(T)) * (k * PITCH + i * 16));
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
        *reinterpret_cast<Pack<float, 2>*>(tile + row * LINE + column) = {sums[i][j][k], sums[i][j][k + 1]};
      }
  __syncthreads();
  const int column = left + lane_id * 4;
  if (column >= columns) return;
#pragma unroll 1
  for (int line = warp * LINES; line < EDGE; line += 8 * LINES) {
    const Four* found = reinterpret_cast<const Four*>(tile + line * LINE + lane_id * 4);
    finish(found, i64(top + line) * columns + column, rows - top - line);
  }
}

// Lets the cache fetch the block's part of an array (rows, columns).
__device__ inline void fetch_ahead(const float* array, int rows, int columns) {
  constexpr int PIECES = EDGE * sizeof(float) / 128;  // of a line
  for (int i = threadIdx.x; i < EDGE * PIECES; i += 256) {
    const int row = blockIdx.y * EDGE + i / PIECES, column = blockIdx.x * EDGE + i % PIECES * 32;
    if (row < rows && column < columns)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(array + i64(row) * columns + column));
  }
}

// out = scale * sums, added to what is there if `adds`
template <typename T> __global__ void __launch_bounds__(256, 2)
outer_products(const T* a, const T* b, float* out, int depth, int rows, int columns, int adds, float scale) {
  if (adds) fetch_ahead(out, rows, columns);
  sum_products(a, b, depth, rows, columns, [=](const Four* sums, i64 at, int there) {
    Four before[LINES] = {};
#pragma unroll
    for (int i = 0; i < LINES; ++i)
      if (adds && i < there) before[i] = *reinterpret_cast<const Four*>(out + at + i * columns);
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) before[i].v[v] += scale * sums[i * NEXT].v[v];
      if (i < there) *reinterpret_cast<Four*>(out + at + i * columns) = before[i];
    }
  });
}

// w and the histories h and u (nothing if the rule has one) are updated with the sums as gradient; rates and decays have
// the factors of w. If `go` is 0 nothing is written.
template <typename T, typename RULE> __global__ void __launch_bounds__(256, 2)
outer_update(const T* a, const T* b, float* w, float* h, float* u, int depth, int rows, int columns, const float* rates,
             const float* decays, int l1, NUMBER(scale), NUMBER(rate), NUMBER(decay), NUMBER(go), NUMBER(a_), NUMBER(b_),
             NUMBER(c_), NUMBER(d_)) {
  if (VALUE(go) == 0) return;
  constexpr bool TWO = RULE::HISTORIES == 2;
  const RULE rule(float(VALUE(a_)), float(VALUE(b_)), float(VALUE(c_)), float(VALUE(d_)));
  fetch_ahead(w, rows, columns);
  fetch_ahead(h, rows, columns);
  if (TWO) fetch_ahead(u, rows, columns);
  const float factor = float(VALUE(scale)), step = float(VALUE(rate)) * *rates, shrink = float(VALUE(decay)) * *decays;
  sum_products(a, b, depth, rows, columns, [=](const Four* sums, i64 at, int there) {
    Four weights[LINES], first[LINES], second[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      if (i >= there) continue;
      weights[i] = *reinterpret_cast<const Four*>(w + at + i * columns);
      first[i] = *reinterpret_cast<const Four*>(h + at + i * columns);
      if (TWO) second[i] = *reinterpret_cast<const Four*>(u + at + i * columns);
    }
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      if (i >= there) continue;
      const Four gradient = sums[i * NEXT];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        float& x = weights[i].v[v];
        const float r = regularized(factor, shrink, l1 != 0, x, gradient.v[v]);
        if constexpr (TWO)
          x -= rule(step, r, first[i].v[v], second[i].v[v]);
        else
          x -= rule(step, r, first[i].v[v]);
      }
      *reinterpret_cast<Four*>(w + at + i * columns) = weights[i];
      *reinterpret_cast<Four*>(h + at + i * columns) = first[i];
      if (TWO) *reinterpret_cast<Four*>(u + at + i * columns) = second[i];
    }
  });
}

// Products of small matrices, for which the tiles of a library are too few to occupy a device.

#include "pack.cuh"
#include "mma.cuh"

constexpr int TILE = 16, DEEP = 16, WARPS = 8;
constexpr int LINE = TILE + 4;  // lines of a tile lie apart, so that the threads of a warp use different banks
constexpr int EACH = DEEP * TILE / 32;

// A warp's view of a matrix (rows, columns): DEEP rows of the first TILE columns at a time. A thread has every second
// element of a column if the elements of columns lie side by side, else of a row.
template <typename T> struct Piece {
  const T* x;
  int rows, columns, row, column, row_step, column_step, start, step, down;
  __device__ Piece(const T* x, int rows, int columns, int down, int across)
      : x(x), rows(rows), columns(columns), down(down) {
    const int lane_id = threadIdx.x % 32, near = lane_id % 16, far = lane_id / 16;
    const bool by_columns = down == 1;
    row = by_columns ? near : far;
    column = by_columns ? far : near;
    row_step = by_columns ? 0 : 2;
    column_step = by_columns ? 2 : 0;
    start = row * down + column * across;
    step = row_step * down + column_step * across;
  }
  __device__ void load(T (&elements)[EACH], int first) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const bool there = first + row + i * row_step < rows && column + i * column_step < columns;
      elements[i] = there ? x[first * down + start + i * step] : T(0.0f);
    }
  }
  __device__ void store(const T (&elements)[EACH], float* tile) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      tile[(row + i * row_step) * LINE + column + i * column_step] = float(elements[i]);
  }
};

// out[r, c] = sum over k of a[r, k] * b[k, c], added to what is there if `adds`; `down` and `across` say how far apart
// elements lie. A block of 256 threads makes 16 x 16 sums: a warp its share of each, a thread 2 x 4 of them.
template <typename T, typename U> __global__ void __launch_bounds__(256)
small_product(const T* a, const T* b, U* out, int rows, int columns, int depth, int adds, int a_down, int a_across,
              int b_down, int b_across, int out_down, int out_across) {
  __shared__ __align__(16) float tiles[WARPS][2][DEEP * LINE];
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane_id / 4 * 2, column = lane_id % 4 * 4;
  const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
  const Piece<T> left_factor(a + i64(top) * a_down, depth, rows - top, a_across, a_down);
  const Piece<T> right_factor(b + i64(left) * b_across, depth, columns - left, b_down, b_across);
  float *p = tiles[warp][0], *q = tiles[warp][1], sum[2][4] = {};
  T x[EACH], y[EACH];
  int first = warp * DEEP;
  left_factor.load(x, first);
  right_factor.load(y, first);
  for (; first < depth; first += WARPS * DEEP) {
    left_factor.store(x, p);
    right_factor.store(y, q);
    __syncwarp();
    left_factor.load(x, first + WARPS * DEEP);
    right_factor.load(y, first + WARPS * DEEP);
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      const Pack<float, 2> u = *reinterpret_cast<const Pack<float, 2>*>(p + d * LINE + row);
      const Pack<float, 4> v = *reinterpret_cast<const Pack<float, 4>*>(q + d * LINE + column);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += u.v[i] * v.v[j];
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) p[(row + i) * LINE + column + j] = sum[i][j];
  __syncthreads();
  const int near = threadIdx.x % TILE, far = threadIdx.x / TILE;
  const int r = out_across == 1 ? far : near, c = out_across == 1 ? near : far;
  if (top + r >= rows || left + c >= columns) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += tiles[w][0][r * LINE + c];
  U& place = out[i64(top + r) * out_down + i64(left + c) * out_across];
  place = U(adds ? total + float(place) : total);
}

// The same by tensor cores, of numbers of 16 bits: a block makes 32 x 32 sums, a warp those of every eighth CHUNK of the
// depth. Lines of a factor, which lie `pitch` apart, are along the depth if A_DEEP or B_DEEP, else across; V and W
// numbers of them are loaded at a time, and divide their length. b may be of another type S, then `narrow`, unless it is
// null, gets it as it is multiplied. There may be a bias for each column, and a relu.
constexpr int EDGE = 32, CHUNK = 32, PITCH = CHUNK + 8;  // lines of a piece in shared memory begin in different banks

// A warp's view of a factor, whose numbers are of type S, in pieces of 32 x 32; `copy` gets what it loads.
template <typename T, typename S, int V> struct Square {
  static constexpr int EACH = EDGE / V;  // packs of a line, and of a thread
  const S* x;
  T* copy;
  int pitch, lines, length;
  Pack<T, V> packs[EACH];
  __device__ Square(const S* x, T* copy, int pitch, int lines, int length)
      : x(x), copy(copy), pitch(pitch), lines(lines), length(length) {}
  __device__ void load(int line, int at) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int p = i * 32 + threadIdx.x % 32, r = line + p / EACH, c = at + p % EACH * V;
      if (r < lines && c < length) {
        const Pack<S, V> taken = *reinterpret_cast<const Pack<S, V>*>(x + i64(r) * pitch + c);
#pragma unroll
        for (int v = 0; v < V; ++v) packs[i].v[v] = T(taken.v[v]);
        if (copy) *reinterpret_cast<Pack<T, V>*>(copy + i64(r) * pitch + c) = packs[i];
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) packs[i].v[v].bits = 0;
      }
    }
  }
  __device__ void store(T* piece) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int p = i * 32 + threadIdx.x % 32;
      *reinterpret_cast<Pack<T, V>*>(piece + p / EACH * PITCH + p % EACH * V) = packs[i];
    }
  }
};

template <typename T, typename U, typename S, bool A_DEEP, int V, bool B_DEEP, int W>
__global__ void __launch_bounds__(256)
square_product(const T* a, const S* b, U* out, T* narrow, const float* bias, int rows, int columns, int depth, int adds,
               int a_pitch, int b_pitch, int out_down, int out_across, int relu) {
  __shared__ __align__(16) T pieces[WARPS][2][EDGE * PITCH];
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, near = lane_id % 8, half = lane_id / 8 % 2 * 8;
  const int far = lane_id / 16 * 8, top = blockIdx.y * EDGE, left = blockIdx.x * EDGE;
  const i64 corner = B_DEEP ? i64(left) * b_pitch : left;
  Square<T, T, V> x(a + (A_DEEP ? i64(top) * a_pitch : top), nullptr, a_pitch, A_DEEP ? rows - top : depth,
                    A_DEEP ? depth : rows - top);
  Square<T, S, W> y(b + corner, narrow && blockIdx.y == 0 ? narrow + corner : nullptr, b_pitch,
                    B_DEEP ? columns - left : depth, B_DEEP ? depth : columns - left);
  T *p = pieces[warp][0], *q = pieces[warp][1];
  // Where the rows of matrices begin of which a thread tells one, in a piece for 16 of the depth.
  const unsigned from_p = shared_address(p + (A_DEEP ? (half + near) * PITCH + far : (far + near) * PITCH + half));
  const unsigned from_q = shared_address(q + (B_DEEP ? (far + near) * PITCH + half : (half + near) * PITCH + far));
  float sum[2][4][4] = {};
  int first = warp * CHUNK;
  const auto load = [&] {
    x.load(A_DEEP ? 0 : first, A_DEEP ? first : 0);
    y.load(B_DEEP ? 0 : first, B_DEEP ? first : 0);
  };
  load();
  while (first < depth) {
    x.store(p);
    y.store(q);
    __syncwarp();
    first += WARPS * CHUNK;
    if (first < depth) load();
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
      unsigned left_words[2][4], right_words[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        matrices<!A_DEEP>(left_words[i], from_p + unsigned(sizeof(T) * (A_DEEP ? i * 16 * PITCH + k : k * PITCH + i * 16)));
        matrices<!B_DEEP>(right_words[i], from_q + unsigned(sizeof(T) * (B_DEEP ? i * 16 * PITCH + k : k * PITCH + i * 16)));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned words[2] = {right_words[j / 2][j % 2 * 2], right_words[j / 2][j % 2 * 2 + 1]};
          multiply<T>(sum[i][j], left_words[i], words);
        }
    }
    __syncwarp();
  }
  // The warps' sums in place of the pieces
  constexpr int LINE = EDGE + 1;
  float* parts = reinterpret_cast<float*>(pieces);
  static_assert(WARPS * EDGE * LINE * sizeof(float) <= sizeof(pieces), "sums take less than pieces");
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        parts[(warp * EDGE + i * 16 + lane_id / 4 + k / 2 * 8) * LINE + j * 8 + lane_id % 4 * 2 + k % 2] = sum[i][j][k];
  __syncthreads();
  const int warps = min(WARPS, (depth + CHUNK - 1) / CHUNK);
#pragma unroll
  for (int i = 0; i < EDGE * EDGE; i += 256) {
    const int slow = (i + threadIdx.x) / EDGE, fast = (i + threadIdx.x) % EDGE;
    const int r = out_across == 1 ? slow : fast, c = out_across == 1 ? fast : slow;
    if (top + r >= rows || left + c >= columns) continue;
    float total = 0;
    for (int w = 0; w < warps; ++w) total += parts[(w * EDGE + r) * LINE + c];
    U& place = out[i64(top + r) * out_down + i64(left + c) * out_across];
    if (adds) total += float(place);
    if (bias) total += bias[left + c];
    place = U(relu && total <= 0 ? 0.0f : total);
  }
}

// Products of small matrices, for which the tiles of a library are too few to occupy a device.

#include "pack.cuh"

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

// Copies into another element type or another order of axes.

#include "pack.cuh"

// y = x
template <typename S, typename T> __global__ void cast(const S* x, T* y, i64 n) {
  each<16 / (sizeof(S) < sizeof(T) ? sizeof(S) : sizeof(T))>(n, [=](i64, S x, T& y) { y = T(x); }, in(x), out(y));
}

// y[n, c, r] = x[n, r, c] for `rows` x `columns` numbers of each image. A block of 256 threads takes 2^down rows and
// 2^across columns at a time, neither more than 256: it reads them along the rows and writes them along the columns.
template <typename S, typename T>
__global__ void __launch_bounds__(256) transpose(const S* __restrict__ x, T* __restrict__ y, i64 images, i64 rows,
                                                 i64 columns, i64 down, i64 across) {
  __shared__ S tile[256 * 18];  // 4096 numbers, the rows kept apart so that a warp meets different banks either way
  const int row_bits = int(down), column_bits = int(across), thread = threadIdx.x;
  const int stride = (1 << column_bits) + max(sizeof(S) < 4 ? 2 : 1, 32 >> row_bits);
  const unsigned high = unsigned(((rows - 1) >> down) + 1), wide = unsigned(((columns - 1) >> across) + 1);
  for (unsigned job = blockIdx.x; job < unsigned(images) * high * wide; job += gridDim.x) {
    const unsigned image = job / (high * wide), row = job / wide % high << row_bits, column = job % wide << column_bits;
    const int height = min(int(rows - row), 1 << row_bits), width = min(int(columns - column), 1 << column_bits);
    const S* source = x + (image * rows + row) * columns + column;
    T* target = y + (image * columns + column) * rows + row;
    if (const int c = thread & ((1 << column_bits) - 1); c < width)
#pragma unroll 8
      for (int r = thread >> column_bits; r < height; r += 256 >> column_bits)
        tile[r * stride + c] = source[r * columns + c];
    __syncthreads();
    if (const int r = thread & ((1 << row_bits) - 1); r < height)
#pragma unroll 8
      for (int c = thread >> row_bits; c < width; c += 256 >> row_bits) target[c * rows + r] = T(tile[r * stride + c]);
    __syncthreads();
  }
}

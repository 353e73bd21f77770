// Rows of a table picked by number, sums of such rows, places of the largest values.

#include "pack.cuh"
#include "reduce.cuh"
#include "block_reduce.cuh"

// y_m = x_index(m), 0 where there is no such row; an index is cut off as C does, after a look at it unless `cut`
template <typename T>
__global__ void take_rows(const T* x, const T* index, T* y, i64 count, i64 rows, i64 columns, i64 cut, double* wrong,
                          double* partial, unsigned long long* arrived) {
  Found found;
  FOR_EACH(i, count * columns) {
    const unsigned m = unsigned(i) / unsigned(columns), c = unsigned(i) - m * unsigned(columns);
    const double v = double(index[m]);
    const bool good = (cut ? v > -1 : v >= 0) && v < rows;
    y[i] = good ? x[i64(v) * columns + c] : T(0);
    if (!good && found.place == NONE) found.place = -double(m);
  }
  if (concludes(found, partial, arrived)) put_down(found, index, wrong);
}

// dx_index(m) += dy_m in the order of m, by the block of the first m with that index; indices without a row are skipped
template <typename T> __global__ void add_rows(const T* dy, const T* index, T* dx, i64 count, i64 rows, i64 columns) {
  __shared__ unsigned hits[32];
  const double value = double(index[blockIdx.x]);
  if (!(value > -1 && value < rows)) return;
  const i64 row = i64(value);
  const auto is_row = [=](i64 m) { return i64(double(index[m])) == row; };
  for (i64 start = 0; start < blockIdx.x; start += blockDim.x) {
    const i64 m = start + threadIdx.x;
    if (__syncthreads_or(m < blockIdx.x && is_row(m))) return;
  }
  for (i64 start = blockIdx.x; start < count; start += blockDim.x) {
    const i64 m = start + threadIdx.x;
    const bool hit = m < count && is_row(m);
    const unsigned votes = __ballot_sync(0xffffffffu, hit);
    if (threadIdx.x % 32 == 0) hits[threadIdx.x / 32] = votes;
    if (!__syncthreads_or(hit)) continue;
    for (i64 c = blockIdx.y * i64(blockDim.x) + threadIdx.x; c < columns; c += gridDim.y * i64(blockDim.x)) {
      Wide<T> sum = dx[row * columns + c];
      for (int w = 0; w < blockDim.x / 32; ++w)
        for (unsigned bits = hits[w]; bits; bits &= bits - 1)
          sum += dy[(start + 32 * w + __ffs(bits) - 1) * columns + c];
      dx[row * columns + c] = T(sum);
    }
    __syncthreads();
  }
}

// A value and where it stands; below 0: none.
template <typename T> struct Placed {
  T value;
  i64 place;
};

// Whether a comes before b: the larger value, of equal ones the larger place; NaN is above all, none below.
template <typename T> __device__ bool before(Placed<T> a, Placed<T> b) {
  if (a.place < 0 || b.place < 0) return b.place < 0;
  const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  if (a_is_nan != b_is_nan) return a_is_nan;
  return a.value > b.value || (!(a.value < b.value) && a.place > b.place);
}

// Of the values at first, first + step, ... the one that comes next after `last`.
template <typename T> __device__ Placed<T> next(const T* x, i64 inner, i64 n, i64 first, i64 step, Placed<T> last) {
  Placed<T> best{T(0), -1};
  for (i64 c = first; c < n; c += step) {
    const Placed<T> one{x[c * inner], c};
    if ((last.place < 0 || before(last, one)) && before(one, best)) best = one;
  }
  return best;
}

// What comes first among those of all threads of a block of whole warps, to all of them.
template <typename T> __device__ Placed<T> block_first(Placed<T> best) {
  __shared__ T values[32];
  __shared__ i64 places[32];
  for (int offset = 16; offset; offset /= 2) {
    const Placed<T> other{__shfl_xor_sync(0xffffffffu, best.value, offset),
                          __shfl_xor_sync(0xffffffffu, best.place, offset)};
    if (before(other, best)) best = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    values[threadIdx.x / 32] = best.value;
    places[threadIdx.x / 32] = best.place;
  }
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; ++i)
    if (before(Placed<T>{values[i], places[i]}, best)) best = Placed<T>{values[i], places[i]};
  return best;
}

// y (outer, top_k or 2 * top_k, inner) = the places, then the values, as far as wanted
template <typename T>
__device__ void put(Placed<T> best, T* y, i64 inner, i64 rank, i64 top_k, i64 places, i64 values) {
  if (places) y[rank * inner] = T(best.place);
  if (values) y[(places ? top_k + rank : rank) * inner] = best.value;
}

// The top_k largest of each row of (outer, n), a block a row.
template <typename T>
__global__ void top_rows(const T* x, T* y, i64 outer, i64 n, i64 inner, i64 top_k, i64 places, i64 values) {
  for (i64 o = blockIdx.x; o < outer; o += gridDim.x) {
    Placed<T> last{T(0), -1};
    for (i64 rank = 0; rank < top_k; ++rank) {
      last = block_first(next(x + o * n, 1, n, threadIdx.x, blockDim.x, last));
      if (threadIdx.x == 0) put(last, y + o * (places + values) * top_k, 1, rank, top_k, places, values);
    }
  }
}

// The same for (outer, n, inner), a thread for each of the others.
template <typename T>
__global__ void top_planes(const T* x, T* y, i64 outer, i64 n, i64 inner, i64 top_k, i64 places, i64 values) {
  FOR_EACH(i, outer * inner) {
    const i64 o = i / inner, p = i - o * inner;
    Placed<T> last{T(0), -1};
    for (i64 rank = 0; rank < top_k; ++rank) {
      last = next(x + o * n * inner + p, inner, n, 0, 1, last);
      put(last, y + o * (places + values) * top_k * inner + p, inner, rank, top_k, places, values);
    }
  }
}

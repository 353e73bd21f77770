// Connectionist temporal classification (Graves 2012). Labels l of an item, with blanks around them, are a path p of
// states; alpha[t, u] is the log probability of all ways to p[u] at time t, beta[t, u] that of all ways from there on.
// x (T, N, C), steps (N) of each item, labels (N, L) with -1 for none, path (N, 2 L + 1), states (N, T + 2, 2 L + 1):
// alpha, later exp(alpha + beta - log p), and two rows of beta. Sizes are those of the paths, 0 for an item that has no
// way; all is reckoned in double.

#include "pack.cuh"
#include "reduce.cuh"

__device__ double none() { return -__longlong_as_double(0x7ff0000000000000ll); }

// log(exp(a) + exp(b))
__device__ double plus(double a, double b) {
  const double most = a > b ? a : b, least = a > b ? b : a;
  return least == none() ? most : most + log1p(exp(least - most));
}

// log of the sum of exp(x), a block for each time and item
template <typename T> __global__ void ctc_normalizers(const T* x, double* normalizers, i64 classes) {
  const T* row = x + blockIdx.x * classes;
  double most = none(), total = 0;
  for (i64 c = threadIdx.x; c < classes; c += blockDim.x) most = max(most, double(row[c]));
  most = block_max(most);
  for (i64 c = threadIdx.x; c < classes; c += blockDim.x) total += exp(double(row[c]) - most);
  total = block_sum(total);
  if (threadIdx.x == 0) normalizers[blockIdx.x] = most + log(total);
}

// A block for each item, a thread for each state of a time.
template <typename T>
__global__ void ctc_states(const T* x, const int* steps, const int* labels, const double* normalizers, int* path,
                           int* sizes, double* states, T* losses, i64 times, i64 items, i64 classes, i64 longest,
                           i64 blank, i64 merge, i64 delay) {
  const i64 n = blockIdx.x, width = 2 * longest + 1, end = steps[n];
  int* p = path + n * width;
  double* s = states + n * (times + 2) * width;
  __shared__ int shared_size;
  if (threadIdx.x == 0) {
    int size = 0, repeats = 0, last = -1;
    for (i64 i = 0; i < longest; ++i) {
      const int c = labels[n * longest + i];
      if (c < 0) continue;
      p[size] = int(blank);
      p[size + 1] = c;
      size += 2;
      repeats += c == last;
      last = c;
    }
    p[size] = int(blank);
    const i64 needed = size / 2 + (merge ? repeats : 0);
    shared_size = end - delay < max(needed, i64(1)) ? 0 : size + 1;
    sizes[n] = shared_size;
    losses[n] = T(0);
  }
  __syncthreads();
  const int size = shared_size;
  if (size == 0) return;
  for (i64 t = delay; t < end; ++t) {
    const T* row = x + (t * items + n) * classes;
    const double* before = s + (t - 1) * width;
    for (int u = threadIdx.x; u < size; u += blockDim.x) {
      double ways = none();
      if (t == delay) {
        if (u < 2) ways = 0;
      } else {
        if (merge || u % 2 == 0) ways = before[u];
        if (u > 0) ways = plus(ways, before[u - 1]);
        if (u > 1 && u % 2 && !(merge && p[u] == p[u - 2])) ways = plus(ways, before[u - 2]);
      }
      s[t * width + u] = ways + double(row[p[u]]) - normalizers[t * items + n];
    }
    __syncthreads();
  }
  const double* last = s + (end - 1) * width;
  const double total = size > 1 ? plus(last[size - 1], last[size - 2]) : last[0];
  if (threadIdx.x == 0) losses[n] = T(-total);
  __syncthreads();  // all threads have read the last row before it is overwritten
  double *now = s + times * width, *after = now + width;
  for (int u = threadIdx.x; u < size; u += blockDim.x) now[u] = u >= size - 2 ? 0 : none();
  for (i64 t = end - 1; t >= delay; --t) {
    const T* row = x + (t * items + n) * classes;
    for (int u = threadIdx.x; u < size; u += blockDim.x) {  // now holds what this thread wrote
      s[t * width + u] = exp(s[t * width + u] + now[u] - total);
      now[u] += double(row[p[u]]) - normalizers[t * items + n];
    }
    double* other = after;
    after = now;
    now = other;
    __syncthreads();
    for (int u = threadIdx.x; u < size; u += blockDim.x) {
      double ways = merge || u % 2 == 0 ? after[u] : none();
      if (u + 1 < size) ways = plus(ways, after[u + 1]);
      if (u + 2 < size && u % 2 && !(merge && p[u] == p[u + 2])) ways = plus(ways, after[u + 2]);
      now[u] = ways;
    }
    __syncthreads();
  }
}

// dx = scale * softmax of x, 0 where an item has no way or no time
template <typename T>
__global__ void ctc_softmax(const T* x, const int* steps, const int* sizes, const double* normalizers, const T* scale,
                            T* dx, i64 times, i64 items, i64 classes, i64 delay) {
  FOR_EACH(i, times * items * classes) {
    const i64 row = i / classes, t = row / items, n = row % items;
    const bool counts = sizes[n] > 0 && t >= delay && t < steps[n];
    dx[i] = T(counts ? double(*scale) * exp(double(x[i]) - normalizers[row]) : 0.0);
  }
}

// dx -= scale * probability of the states of each class, a thread for each time and item
template <typename T>
__global__ void ctc_subtract(const int* steps, const int* path, const int* sizes, const double* states, const T* scale,
                             T* dx, i64 times, i64 items, i64 classes, i64 width, i64 delay) {
  FOR_EACH(row, times * items) {
    const i64 t = row / items, n = row % items;
    if (t < delay || t >= steps[n]) continue;
    for (int u = 0; u < sizes[n]; ++u) {
      T& d = dx[row * classes + path[n * width + u]];
      d = T(double(d) - double(*scale) * states[(n * (times + 2) + t) * width + u]);
    }
  }
}

// Softmax over the channels of (outer, C, inner), losses over labels (outer, inner), accuracy. A label is a number cut
// off as C does; one that names no class does not count, and the first of them is pointed at.

#include "pack.cuh"
#include "reduce.cuh"

#define NUMBER(name) double name, const void *name##_at, i64 name##_kind
#define VALUE(name) A(number(name, name##_at, name##_kind))
#define FOR_EACH(i, n) \
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < (n); i += gridDim.x * i64(blockDim.x))

constexpr double NONE = -1e300;  // below minus any position
constexpr double SMALLEST = 1.17549435082228750797e-38;  // FLT_MIN: no loss of a label is larger than -log of it

template <typename A> __device__ A minus_infinity() { return A(-__int_as_float(0x7f800000)); }

// y = exp(x - max) / sum of that; inner is 1, a block a row
template <typename T>
__global__ void softmax_rows(const T* x, T* y, i64 outer, i64 channels) {
  using A = Wide<T>;
  for (i64 n = blockIdx.x; n < outer; n += gridDim.x) {
    const T* u = x + n * channels;
    T* v = y + n * channels;
    A most = minus_infinity<A>(), total = 0;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) most = A(u[c]) > most ? A(u[c]) : most;
    most = block_max(most);
    for (int c = threadIdx.x; c < channels; c += blockDim.x) total += exp(A(u[c]) - most);
    total = block_sum(total);
    for (int c = threadIdx.x; c < channels; c += blockDim.x) v[c] = T(exp(A(u[c]) - most) / total);
  }
}

// The same with a thread for each pixel.
template <typename T>
__global__ void softmax_planes(const T* x, T* y, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  FOR_EACH(i, outer * inner) {
    const i64 n = i / inner, start = (n * channels) * inner + (i - n * inner), end = start + channels * inner;
    A most = minus_infinity<A>(), total = 0;
    for (i64 at = start; at < end; at += inner) most = A(x[at]) > most ? A(x[at]) : most;
    for (i64 at = start; at < end; at += inner) total += exp(A(x[at]) - most);
    for (i64 at = start; at < end; at += inner) y[at] = T(exp(A(x[at]) - most) / total);
  }
}

// dx = y * (dy - sum of dy * y); inner is 1, a block a row
template <typename T>
__global__ void softmax_gradient_rows(const T* y, const T* dy, T* dx, i64 outer, i64 channels) {
  using A = Wide<T>;
  for (i64 n = blockIdx.x; n < outer; n += gridDim.x) {
    const i64 start = n * channels;
    A product = 0;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) product += A(y[start + c]) * A(dy[start + c]);
    product = block_sum(product);
    for (int c = threadIdx.x; c < channels; c += blockDim.x)
      dx[start + c] = T((A(dy[start + c]) - product) * A(y[start + c]));
  }
}

// The same with a thread for each pixel.
template <typename T>
__global__ void softmax_gradient_planes(const T* y, const T* dy, T* dx, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  FOR_EACH(i, outer * inner) {
    const i64 n = i / inner, start = (n * channels) * inner + (i - n * inner), end = start + channels * inner;
    A product = 0;
    for (i64 at = start; at < end; at += inner) product += A(y[at]) * A(dy[at]);
    for (i64 at = start; at < end; at += inner) dx[at] = T((A(dy[at]) - product) * A(y[at]));
  }
}

// Writes what a block found, or, if there is one block only, what all found; place is minus the first wrong position.
__device__ void conclude(double sum, double count, double place, double* partial, double* sum_at, i64* count_at,
                         i64* wrong_at) {
  sum = block_sum(sum);
  count = block_sum(count);
  place = block_max(place);
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    partial[blockIdx.x] = sum;
    partial[gridDim.x + blockIdx.x] = count;
    partial[2 * gridDim.x + blockIdx.x] = place;
  } else {
    *sum_at = sum;
    *count_at = i64(count);
    if (wrong_at) *wrong_at = place == NONE ? -1 : i64(-place);
  }
}

// What all blocks found, by one block.
template <typename T>
__global__ void loss_finish(const double* partial, i64 blocks, double* sum_at, i64* count_at, i64* wrong_at) {
  double sum = 0, count = 0, place = NONE;
  for (i64 i = threadIdx.x; i < blocks; i += blockDim.x) {
    sum += partial[i];
    count += partial[blocks + i];
    place = partial[2 * blocks + i] > place ? partial[2 * blocks + i] : place;
  }
  conclude(sum, count, place, nullptr, sum_at, count_at, wrong_at);
}

// -log(max(probability of the label, FLT_MIN)), labels that count, the first wrong one
template <typename T>
__global__ void softmax_loss(const T* prob, const T* label, i64 channels, i64 inner, i64 labels, i64 skip, i64 ignore,
                             double* partial, double* sum_at, i64* count_at, i64* wrong_at) {
  double sum = 0, count = 0, place = NONE;
  FOR_EACH(i, labels) {
    const double t = double(label[i]);
    if (skip && i64(t) == ignore) continue;
    if (!(t > -1 && t < channels)) {
      if (place == NONE) place = -double(i);
      continue;
    }
    const i64 n = i / inner;
    const double likelihood = double(prob[(n * channels + i64(t)) * inner + (i - n * inner)]);
    sum -= log(likelihood < SMALLEST ? SMALLEST : likelihood);
    count += 1;
  }
  conclude(sum, count, place, partial, sum_at, count_at, wrong_at);
}

// dx = scale * (prob - 1 at the label), 0 where the label is to be ignored
template <typename T>
__global__ void softmax_loss_gradient(const T* prob, const T* label, T* dx, i64 outer, i64 channels, i64 inner, i64 skip,
                                      i64 ignore, NUMBER(scale)) {
  using A = Wide<T>;
  const A s = VALUE(scale);
  FOR_EACH(i, outer * channels * inner) {
    const unsigned plane = unsigned(i) / unsigned(inner), p = unsigned(i) - plane * unsigned(inner);
    const unsigned n = plane / unsigned(channels), c = plane - n * unsigned(channels);
    const i64 t = i64(double(label[n * inner + p]));
    const A v = A(prob[i]) * s;
    dx[i] = T(skip && t == ignore ? A(0) : t == c ? v - s : v);
  }
}

// max(x, 0) - x * target + log(1 + exp(-|x|)), targets that count
template <typename T>
__global__ void sigmoid_loss(const T* x, const T* target, i64 n, i64 skip, i64 ignore, double* partial, double* sum_at,
                             i64* count_at) {
  double sum = 0, count = 0;
  FOR_EACH(i, n) {
    const double v = double(x[i]), t = double(target[i]);
    if (skip && i64(t) == ignore) continue;
    sum += (v > 0 ? v : 0) - v * t + log1p(exp(-fabs(v)));
    count += 1;
  }
  conclude(sum, count, NONE, partial, sum_at, count_at, nullptr);
}

// dx = scale * (sigmoid(x) - target), 0 where the target is to be ignored
template <typename T>
__global__ void sigmoid_loss_gradient(const T* x, const T* target, T* dx, i64 n, i64 skip, i64 ignore, NUMBER(scale)) {
  using A = Wide<T>;
  const A s = VALUE(scale);
  each<16 / sizeof(T)>(
      n,
      [=](i64, T x, T target, T& dx) {
        const bool ignored = skip && i64(double(target)) == ignore;
        dx = T(ignored ? A(0) : s * (A(0.5) * tanh(A(0.5) * A(x)) + A(0.5) - A(target)));
      },
      in(x), in(target), out(dx));
}

// counts of labels and of those with fewer than top_k other scores not below; `lanes` (1 or 32) threads a label
template <typename T>
__global__ void accuracy(const T* x, const T* label, i64 channels, i64 inner, i64 labels, i64 top_k, i64 skip,
                         i64 ignore, unsigned long long* hits, unsigned long long* counts, unsigned long long* wrong,
                         i64 lanes) {
  using A = Wide<T>;
  const i64 first = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / lanes, step = gridDim.x * i64(blockDim.x) / lanes;
  const int lane = int(threadIdx.x % lanes);
  for (i64 i = first; i < labels; i += step) {
    const double value = double(label[i]);
    if (skip && i64(value) == ignore) continue;
    if (!(value > -1 && value < channels)) {
      if (lane == 0) atomicMin(wrong, (unsigned long long)i);  // which began as -1, the largest of all
      continue;
    }
    const i64 n = i / inner, t = i64(value);
    const T* scores = x + n * channels * inner + (i - n * inner);
    const A own = A(scores[t * inner]);
    int better = 0;
    for (i64 c = lane; c < channels; c += lanes) better += A(scores[c * inner]) < own ? 0 : 1;
    if (lanes == 32) better = warp_sum(better);
    if (lane == 0) {
      atomicAdd(counts + t, 1ull);
      if (better - 1 < top_k) atomicAdd(hits + t, 1ull);  // the label itself is not below its own score
    }
  }
}

// Softmax over the channels of (outer, C, inner), losses over labels (outer, inner), accuracy. A label is a number cut
// off as C does; one that names no class does not count, and the first of them is put down.

#include "pack.cuh"
#include "reduce.cuh"
#include "block_reduce.cuh"

constexpr double SMALLEST = 1.17549435082228750797e-38;  // FLT_MIN: no loss of a label is larger than -log of it

template <typename A> __device__ A minus_infinity() { return A(-__int_as_float(0x7f800000)); }

// y = exp(x - max) / sum of that; inner is 1, a block a row
template <typename T> __global__ void softmax_rows(const T* x, T* y, i64 outer, i64 channels) {
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
template <typename T> __global__ void softmax_planes(const T* x, T* y, i64 outer, i64 channels, i64 inner) {
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
template <typename T> __global__ void softmax_gradient_rows(const T* y, const T* dy, T* dx, i64 outer, i64 channels) {
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

// Takes in one label: whether it counts, where it stands, its class, and then the likelihood of that.
struct Labels {
  i64 channels, skip, ignore;
  template <typename F> __device__ void add(Found& found, double value, i64 i, F likelihood) const {
    if ((skip && i64(value) == ignore) || !names_class(value, channels, i, found)) return;
    const double p = likelihood(i64(value));
    found.sum -= log(p < SMALLEST ? SMALLEST : p);
    found.count += 1;
  }
};

#define LOSS_ARGUMENTS                                                                                            \
  const T *x, const T *label, T *prob, i64 outer, i64 channels, i64 inner, i64 skip, i64 ignore, double divisor, \
      T *loss, double *norm, double *wrong, double *partial, unsigned long long *arrived

// prob = softmax of x, loss = sum of -log(max(prob of the label, FLT_MIN)) / norm; inner is 1, THREADS threads a row
template <int THREADS, typename T>
__device__ void softmax_loss(const T* x, const T* label, T* prob, i64 outer, Labels labels, Found& found) {
  using A = Wide<T>;
  const int lane_id = int(threadIdx.x % THREADS);
  const i64 first = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / THREADS, step = gridDim.x * i64(blockDim.x) / THREADS;
  const i64 channels = labels.channels;
  for (i64 n = first; n < outer; n += step) {
    const T* u = x + n * channels;
    A most = minus_infinity<A>(), total = 0;
    for (i64 c = lane_id; c < channels; c += THREADS) most = A(u[c]) > most ? A(u[c]) : most;
    most = THREADS == 32 ? warp_max(most) : block_max(most);
    for (i64 c = lane_id; c < channels; c += THREADS) total += exp(A(u[c]) - most);
    total = THREADS == 32 ? warp_sum(total) : block_sum(total);
    const auto p = [=](i64 c) { return T(exp(A(u[c]) - most) / total); };
    for (i64 c = lane_id; c < channels; c += THREADS) prob[n * channels + c] = p(c);
    if (lane_id == 0) labels.add(found, double(label[n]), n, p);
  }
}

template <typename T> __global__ void softmax_loss_rows(LOSS_ARGUMENTS) {
  Found found;
  softmax_loss<32>(x, label, prob, outer, Labels{channels, skip, ignore}, found);
  conclude(found, divisor, label, loss, norm, wrong, partial, arrived);
}

// The same with 256 threads, which must be the whole block, for each row.
template <typename T> __global__ void softmax_loss_long_rows(LOSS_ARGUMENTS) {
  Found found;
  softmax_loss<256>(x, label, prob, outer, Labels{channels, skip, ignore}, found);
  conclude(found, divisor, label, loss, norm, wrong, partial, arrived);
}

// The same with a thread for each pixel.
template <typename T> __global__ void softmax_loss_planes(LOSS_ARGUMENTS) {
  using A = Wide<T>;
  Found found;
  FOR_EACH(i, outer * inner) {
    const i64 n = i / inner, start = (n * channels) * inner + (i - n * inner), end = start + channels * inner;
    A most = minus_infinity<A>(), total = 0;
    for (i64 at = start; at < end; at += inner) most = A(x[at]) > most ? A(x[at]) : most;
    for (i64 at = start; at < end; at += inner) total += exp(A(x[at]) - most);
    for (i64 at = start; at < end; at += inner) prob[at] = T(exp(A(x[at]) - most) / total);
    const auto p = [=](i64 c) { return prob[start + c * inner]; };
    Labels{channels, skip, ignore}.add(found, double(label[i]), i, p);
  }
  conclude(found, divisor, label, loss, norm, wrong, partial, arrived);
}

// dx = weight / norm * (prob - 1 at the label), 0 where the label is to be ignored
template <typename T>
__global__ void softmax_loss_gradient(const T* prob, const T* label, T* dx, i64 outer, i64 channels, i64 inner, i64 skip,
                                      i64 ignore, NUMBER(weight), NUMBER(norm)) {
  using A = Wide<T>;
  const A s = A(VALUE(weight) / VALUE(norm));
  FOR_EACH(i, outer * channels * inner) {
    const unsigned plane = unsigned(i) / unsigned(inner), p = unsigned(i) - plane * unsigned(inner);
    const unsigned n = plane / unsigned(channels), c = plane - n * unsigned(channels);
    const i64 t = i64(double(label[n * inner + p]));
    const A v = A(prob[i]) * s;
    dx[i] = T(skip && t == ignore ? A(0) : t == c ? v - s : v);
  }
}

// loss = sum of max(x, 0) - x * target + log(1 + exp(-|x|)) / norm over the targets that count
template <typename T>
__global__ void sigmoid_loss(const T* x, const T* target, i64 n, i64 skip, i64 ignore, double divisor, T* loss,
                             double* norm, double* partial, unsigned long long* arrived) {
  Found found;
  FOR_EACH(i, n) {
    const double v = double(x[i]), t = double(target[i]);
    if (skip && i64(t) == ignore) continue;
    found.sum += (v > 0 ? v : 0) - v * t + log1p(exp(-fabs(v)));
    found.count += 1;
  }
  if (concludes(found, partial, arrived)) divide(found, divisor, loss, norm);
}

// dx = weight / norm * (sigmoid(x) - target), 0 where the target is to be ignored
template <typename T>
__global__ void sigmoid_loss_gradient(const T* x, const T* target, T* dx, i64 n, i64 skip, i64 ignore, NUMBER(weight),
                                      NUMBER(norm)) {
  using A = Wide<T>;
  const A s = A(VALUE(weight) / VALUE(norm));
  each<PACK>(
      n,
      [=](i64, T x, T target, T& dx) {
        const bool ignored = skip && i64(double(target)) == ignore;
        dx = T(ignored ? A(0) : s * (A(0.5) * tanh(A(0.5) * A(x)) + A(0.5) - A(target)));
      },
      in(x), in(target), out(dx));
}

// d = x - target, loss = sum of d^2 / 2 / divisor
template <typename T>
__global__ void euclidean_loss(const T* x, const T* target, T* d, i64 n, double divisor, T* loss, double* partial,
                               unsigned long long* arrived) {
  using A = Wide<T>;
  Found found;
  double& sum = found.sum;
  each<PACK>(
      n,
      [&sum](i64, T x, T target, T& d) {
        d = T(A(x) - A(target));
        sum += double(d) * double(d);
      },
      in(x), in(target), out(d));
  if (concludes(found, partial, arrived)) *loss = T(found.sum / 2 / divisor);
}

// dx = weight / divisor * d
template <typename T>
__global__ void euclidean_loss_gradient(const T* d, T* dx, i64 n, NUMBER(weight), double divisor) {
  using A = Wide<T>;
  const A s = A(VALUE(weight) / divisor);
  each<PACK>(
      n, [=](i64, T d, T& dx) { dx = T(s * A(d)); }, in(d), out(dx));
}

// share of the labels with fewer than top_k other scores not below theirs, and of those of each class where there is
// room to count them; `threads` (1 or 32) of them a label
template <typename T>
__global__ void accuracy(const T* x, const T* label, i64 channels, i64 inner, i64 labels, i64 top_k, i64 skip,
                         i64 ignore, i64 threads, unsigned long long* hits, unsigned long long* counts, T* shares,
                         T* share, double* wrong, double* partial, unsigned long long* arrived) {
  using A = Wide<T>;
  const i64 first = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / threads, step = gridDim.x * i64(blockDim.x) / threads;
  const int lane_id = int(threadIdx.x % threads);
  Found found;
  for (i64 i = first; i < labels; i += step) {
    const double value = double(label[i]);
    if (skip && i64(value) == ignore) continue;
    if (!names_class(value, channels, i, found)) continue;
    const i64 n = i / inner, t = i64(value);
    const T* scores = x + n * channels * inner + (i - n * inner);
    const A own = A(scores[t * inner]);
    int better = 0;
    for (i64 c = lane_id; c < channels; c += threads) better += A(scores[c * inner]) < own ? 0 : 1;
    if (threads == 32) better = warp_sum(better);
    if (lane_id) continue;
    const bool hit = better - 1 < top_k;  // the label itself is not below its own score
    found.count += 1;
    found.sum += hit;
    if (!shares) continue;
    atomicAdd(counts + t, 1ull);
    if (hit) atomicAdd(hits + t, 1ull);
  }
  __threadfence();
  __shared__ bool concluding;
  const bool one = concludes(found, partial, arrived);
  if (threadIdx.x == 0) concluding = one;
  __syncthreads();
  if (!concluding) return;
  if (one) {
    *share = T(found.sum / (found.count > 1 ? found.count : 1));
    put_down(found, label, wrong);
  }
  if (!shares) return;
  for (i64 c = threadIdx.x; c < channels; c += blockDim.x) {
    const unsigned long long all = ((volatile unsigned long long*)counts)[c];
    shares[c] = T(double(((volatile unsigned long long*)hits)[c]) / double(all > 1 ? all : 1));
    hits[c] = counts[c] = 0;
  }
}

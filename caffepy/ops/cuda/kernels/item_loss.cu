// Losses that are rarer than those of loss.cu. A label is a number cut off as C does; one that names no class does not
// count, and the first of them is put down.

#include "pack.cuh"
#include "reduce.cuh"
#include "block_reduce.cuh"

constexpr double THRESHOLD = 1e-20;  // no likelihood counts as smaller

template <typename T> __device__ T likelihood(T p) { return p < T(THRESHOLD) ? T(THRESHOLD) : p; }

// loss = -sum over the classes of matrix[label] * log of the likelihood / norm; `threads` (1 or 32) of them a label
template <typename T>
__global__ void infogain_loss(const T* prob, const T* label, const T* matrix, i64 labels, i64 channels, i64 inner,
                              i64 skip, i64 ignore, i64 threads, double divisor, T* loss, double* norm, double* wrong,
                              double* partial, unsigned long long* arrived) {
  const i64 first = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / threads, step = gridDim.x * i64(blockDim.x) / threads;
  const int lane_id = int(threadIdx.x % threads);
  Found found;
  for (i64 i = first; i < labels; i += step) {
    const double value = double(label[i]);
    if (skip && i64(value) == ignore) continue;
    if (!names_class(value, channels, i, found)) continue;
    const T *p = prob + i / inner * channels * inner + i % inner, *row = matrix + i64(value) * channels;
    for (i64 c = lane_id; c < channels; c += threads)
      found.sum -= double(row[c]) * log(double(likelihood(p[c * inner])));
    if (lane_id == 0) found.count += 1;
  }
  conclude(found, divisor, label, loss, norm, wrong, partial, arrived);
}

// dx = weight / norm * (prob * sum of matrix[label] - matrix[label]), 0 where the label does not count
template <typename T>
__global__ void infogain_loss_gradient(const T* prob, const T* label, const T* matrix, T* dx, i64 labels, i64 channels,
                                       i64 inner, i64 skip, i64 ignore, i64 threads, NUMBER(weight), NUMBER(norm)) {
  using A = Wide<T>;
  const A s = A(VALUE(weight) / VALUE(norm));
  const i64 first = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / threads, step = gridDim.x * i64(blockDim.x) / threads;
  const int lane_id = int(threadIdx.x % threads);
  for (i64 i = first; i < labels; i += step) {
    const double value = double(label[i]);
    const bool counts = !(skip && i64(value) == ignore) && value > -1 && value < channels;
    const i64 start = i / inner * channels * inner + i % inner;
    const T* row = counts ? matrix + i64(value) * channels : matrix;
    A total = 0;
    for (i64 c = lane_id; c < channels; c += threads) total += A(row[c]);
    if (threads == 32) total = warp_sum(total);
    for (i64 c = lane_id; c < channels; c += threads) {
      const i64 at = start + c * inner;
      dx[at] = counts ? T((A(prob[at]) * total - A(row[c])) * s) : T(0);
    }
  }
}

// loss = -sum of log of the likelihood of the label / divisor
template <typename T>
__global__ void multinomial_loss(const T* prob, const T* label, i64 items, i64 channels, double divisor, T* loss,
                                 double* wrong, double* partial, unsigned long long* arrived) {
  Found found;
  FOR_EACH(n, items) {
    const double value = double(label[n]);
    if (names_class(value, channels, n, found))
      found.sum -= log(double(likelihood(prob[n * channels + i64(value)])));
  }
  if (concludes(found, partial, arrived)) {
    *loss = T(found.sum / divisor);
    put_down(found, label, wrong);
  }
}

// dx = -weight / divisor / likelihood at the label, else 0
template <typename T>
__global__ void multinomial_loss_gradient(const T* prob, const T* label, T* dx, i64 items, i64 channels, NUMBER(weight),
                                          double divisor) {
  using A = Wide<T>;
  const A s = A(-VALUE(weight) / divisor);
  FOR_EACH(i, items * channels) {
    const unsigned n = unsigned(i) / unsigned(channels), c = unsigned(i) - n * unsigned(channels);
    const double value = double(label[n]);
    dx[i] = value > -1 && value < channels && i64(value) == c ? T(s / A(likelihood(prob[i]))) : T(0);
  }
}

// m = max(0, 1 + x), at the label max(0, 1 - x); slack = m, at the label -m; loss = sum of m or m^2 / divisor
template <typename T>
__global__ void hinge_loss(const T* x, const T* label, T* slack, i64 items, i64 channels, i64 squares, double divisor,
                           T* loss, double* wrong, double* partial, unsigned long long* arrived) {
  using A = Wide<T>;
  Found found;
  FOR_EACH(i, items * channels) {
    const unsigned n = unsigned(i) / unsigned(channels), c = unsigned(i) - n * unsigned(channels);
    const double value = double(label[n]);
    const bool own = names_class(value, channels, n, found) && i64(value) == c;
    const A v = A(1) + (own ? -A(x[i]) : A(x[i])), m = v < 0 ? A(0) : v;
    found.sum += squares ? double(m) * double(m) : double(m);
    slack[i] = T(own ? -m : m);
  }
  if (concludes(found, partial, arrived)) {
    *loss = T(found.sum / divisor);
    put_down(found, label, wrong);
  }
}

// dx = weight / divisor * sign of the slack, or times twice the slack
template <typename T>
__global__ void hinge_loss_gradient(const T* slack, T* dx, i64 n, i64 squares, NUMBER(weight), double divisor) {
  using A = Wide<T>;
  const A s = A((squares ? 2 : 1) * VALUE(weight) / divisor);
  each<PACK>(
      n,
      [=](i64, T slack, T& dx) {
        const A v = A(slack);
        dx = T((squares ? v : v > 0 ? A(1) : v < 0 ? A(-1) : v) * s);
      },
      in(slack), out(dx));
}

// d = a - b; by rows loss = sum of d^2 where `similar`, else max(margin - |d|, 0)^2, legacy max(margin - d^2, 0) / 2 /
// divisor, and factor = what d is multiplied by in the gradient; a warp a row
template <typename T>
__global__ void contrastive_loss(const T* a, const T* b, const T* similar, T* d, T* factor, i64 items, i64 channels,
                                 double margin, i64 legacy, double divisor, T* loss, double* partial,
                                 unsigned long long* arrived) {
  using A = Wide<T>;
  const i64 first = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32, step = gridDim.x * i64(blockDim.x) / 32;
  const int lane_id = threadIdx.x % 32;
  Found found;
  for (i64 n = first; n < items; n += step) {
    double sum = 0;
    for (i64 i = n * channels + lane_id; i < (n + 1) * channels; i += 32) {
      const A v = A(a[i]) - A(b[i]);
      d[i] = T(v);
      sum += double(v) * double(v);
    }
    const A square = A(warp_sum(sum)), distance = sqrt(square);
    if (lane_id) continue;
    const A left = A(margin) - (legacy ? square : distance), far = left < 0 ? A(0) : left;
    if (i64(double(similar[n])) != 0) {
      found.sum += square;
      factor[n] = T(1);
    } else if (legacy) {
      found.sum += far;
      factor[n] = T(left > 0 ? -1 : 0);
    } else {
      found.sum += double(far) * double(far);
      factor[n] = T(-far / (distance + A(1e-4)));
    }
  }
  if (concludes(found, partial, arrived)) *loss = T(found.sum / 2 / divisor);
}

// dx = weight / divisor * factor * d
template <typename T>
__global__ void contrastive_loss_gradient(const T* d, const T* factor, T* dx, i64 items, i64 channels, NUMBER(weight),
                                          double divisor) {
  using A = Wide<T>;
  const A s = A(VALUE(weight) / divisor);
  FOR_EACH(i, items * channels) dx[i] = T(A(d[i]) * (A(factor[unsigned(i) / unsigned(channels)]) * s));
}

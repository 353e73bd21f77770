// One result of all blocks of a launch: sums, which the last block to finish adds, and the first invalid label.

constexpr double NONE = -1e300;  // below minus any position

// The partial result of a thread or block: a sum, a count, minus the position of the first invalid label.
struct Found {
  double sum = 0, count = 0, place = NONE;
  __device__ void reduce() {
    sum = block_sum(sum);
    count = block_sum(count);
    place = block_max(place);
  }
};

// Reduces the partial results of all blocks, in the order of blocks. True in one thread of the last block that comes
// here: its `found` is then the result.
__device__ bool concludes(Found& found, double* partial, unsigned long long* arrived) {
  found.reduce();
  if (gridDim.x == 1) return threadIdx.x == 0;
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = found.sum;
    partial[gridDim.x + blockIdx.x] = found.count;
    partial[2 * gridDim.x + blockIdx.x] = found.place;
    __threadfence();
    last = atomicAdd(arrived, 1ull) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();
  const volatile double* all = partial;
  found = Found();
  for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    found.sum += all[i];
    found.count += all[gridDim.x + i];
    const double place = all[2 * gridDim.x + i];
    found.place = place > found.place ? place : found.place;
  }
  found.reduce();
  if (threadIdx.x == 0) *arrived = 0;
  return threadIdx.x == 0;
}

// Writes the first invalid label to `wrong`, unless an earlier launch has.
template <typename T> __device__ void put_down(const Found& found, const T* label, double* wrong) {
  if (found.place == NONE || wrong[0] != 0) return;
  wrong[1] = double(label[i64(-found.place)]);
  wrong[0] = 1;
}

// Whether a label names a class; if not it is taken down, at place i.
__device__ bool names_class(double label, i64 channels, i64 i, Found& found) {
  if (label > -1 && label < channels) return true;
  if (found.place == NONE) found.place = -double(i);
  return false;
}

// The loss over the number of labels, or over the divisor unless that is below 0.
template <typename T> __device__ void divide(const Found& found, double divisor, T* loss, double* norm) {
  const double by = divisor < 0 ? found.count : divisor;
  *norm = by > 1 ? by : 1;
  *loss = T(found.sum / *norm);
}

// The same, and the first invalid label, by the last block.
template <typename T>
__device__ void conclude(Found& found, double divisor, const T* label, T* loss, double* norm, double* wrong,
                         double* partial, unsigned long long* arrived) {
  if (!concludes(found, partial, arrived)) return;
  divide(found, divisor, loss, norm);
  put_down(found, label, wrong);
}

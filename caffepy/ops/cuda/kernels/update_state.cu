// The check before an update, one block each, and sums over passes. Two rings of rows lie in pinned host memory: the host
// writes `hyperparams` before it enqueues an iteration, and reads `results` when the device has written them.

#include "pack.cuh"
#include "reduce.cuh"

// Numbers of an iteration, as ops/cuda/update_state.py has them.
enum { RATE, DECAY, CORRECTION, SCALE, GO, LAST, TOTAL, LOSS_SCALE, GOOD, STOPPED, CHECKED };
enum { HYPERPARAMS = 3, RESULTS = 5 };  // numbers in a row
enum { STEP_DONE, STEP_SKIPPED, STEP_STOPPED };

// A blob: data, then diff or where sums go; kinds are those of number() in pack.cuh, 5 half_t, 6 bf16_t.
struct Place {
  const void* data;
  void* other;
  i64 count, kind;
};

__device__ double element(const void* p, i64 i, i64 kind) {
  switch (kind) {
    case 1: return static_cast<const float*>(p)[i];
    case 2: return static_cast<const double*>(p)[i];
    case 5: return float(static_cast<const half_t*>(p)[i]);
    default: return float(static_cast<const bf16_t*>(p)[i]);
  }
}

__device__ void multiply(void* p, i64 i, i64 kind, double by) {
  switch (kind) {
    case 1: static_cast<float*>(p)[i] *= float(by); break;
    case 2: static_cast<double*>(p)[i] *= by; break;
    case 5: static_cast<half_t*>(p)[i] = half_t(float(static_cast<half_t*>(p)[i]) * float(by)); break;
    default: static_cast<bf16_t*>(p)[i] = bf16_t(float(static_cast<bf16_t*>(p)[i]) * float(by));
  }
}

// The losses' diffs *= by
__device__ void rescale(const Place* losses, i64 count, double by) {
  if (by == 1) return;
  for (i64 k = 0; k < count; ++k)
    for (i64 i = threadIdx.x; i < losses[k].count; i += blockDim.x)
      multiply(losses[k].other, i, losses[k].kind, by);
}

__device__ bool is_finite(double x) { return x - x == 0; }

// Loss of a pass: sum of data * diff over the losses / loss_scale; added to that of earlier passes if `add`.
__global__ void accumulate_loss(const Place* losses, i64 count, i64 add, double* numbers, i64* step_counter) {
  float total = 0;
  for (i64 k = 0; k < count; ++k) {
    const Place p = losses[k];
    double sum = 0;
    for (i64 i = threadIdx.x; i < p.count; i += blockDim.x)
      sum += element(p.data, i, p.kind) * element(p.other, i, p.kind);
    total += float(block_sum(sum) / numbers[LOSS_SCALE]);
  }
  if (threadIdx.x != 0) return;
  numbers[LAST] = total;
  numbers[TOTAL] = total + (add ? numbers[TOTAL] : 0);
  ++*step_counter;
}

// metrics_0 = loss of all passes, or NaN if an error flag is set
__global__ void pack_metrics(const double* error_flags, i64 places, const double* numbers, float* metrics) {
  double errors = 0;
  for (i64 i = threadIdx.x; i < places; i += blockDim.x) errors += error_flags[2 * i];
  errors = block_sum(errors);
  if (threadIdx.x == 0) metrics[0] = errors != 0 ? nanf("") : float(numbers[TOTAL]);
}

// spare_0 = the loss scale
__global__ void pack_scale(const double* numbers, float* spare) { spare[0] = float(numbers[LOSS_SCALE]); }

// loss_scale = spare_0; the losses' diffs are multiplied by new / old
__global__ void unpack_scale(const float* spare, Place* losses, i64 count, double* numbers) {
  __shared__ double ratio;
  if (threadIdx.x == 0) {
    ratio = spare[0] / numbers[LOSS_SCALE];
    numbers[LOSS_SCALE] = spare[0];
  }
  __syncthreads();
  rescale(losses, count, ratio);
}

// partial_b = sum over block b's share of g * g
template <typename T> __global__ void __launch_bounds__(256) squares(const T* g, double* partial, i64 n) {
  double sum = 0;
  each<PACK>(
      n, [&sum](i64, T g) { sum += double(g) * double(g); }, in(g));
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// total = metrics_0 if there are metrics, or NaN if the all-reduce was aborted
// norm = sqrt(sum of partial) / loss_scale
// scale = min(1, clip / norm) / passes / loss_scale
// SKIPPED if there is a loss scale and the norm is not finite; STOPPED, as are all later iterations, if the loss is not
// finite, an error flag is set, or the loss scale cannot be halved again. A new loss scale is multiplied into the losses'
// diffs.
__global__ void check_and_scale(const double* partial, i64 parts, const float* metrics, const volatile int* abort_flag,
                                double clip, i64 passes, i64 scaled, double least, double most, i64 patience,
                                const double* error_flags, i64 places, Place* losses, i64 count, double* numbers,
                                const volatile double* hyperparams, double* results, i64 rows) {
  __shared__ double ratio;
  __shared__ bool aborted;
  const i64 checked = i64(numbers[CHECKED]), row = checked % rows;
  // The host's memory is far: what is read of it is read by two warps at the same time.
  if (threadIdx.x < HYPERPARAMS) numbers[RATE + threadIdx.x] = hyperparams[HYPERPARAMS * row + threadIdx.x];
  if (threadIdx.x == 32) aborted = metrics && abort_flag && *abort_flag;
  double square = 0;
  bool error = false;
  for (i64 i = threadIdx.x; i < parts; i += blockDim.x) square += partial[i];
  for (i64 i = threadIdx.x; i < places; i += blockDim.x) error |= error_flags[2 * i] != 0;
  if (parts) square = block_sum(square);
  error = __syncthreads_or(error);
  if (threadIdx.x == 0) {
    if (metrics) numbers[TOTAL] = aborted ? nanf("") : metrics[0];
    const double scale = numbers[LOSS_SCALE], loss = numbers[TOTAL] / double(passes), norm = sqrt(square) / scale;
    const bool overflow = scaled && !is_finite(norm);
    const bool stops = numbers[STOPPED] != 0 || error || !is_finite(loss) || (overflow && scale <= least);
    double next = scale;
    if (scaled && !stops) {
      numbers[GOOD] = overflow ? 0 : numbers[GOOD] + 1;
      if (overflow) next = scale / 2;
      if (numbers[GOOD] >= double(patience)) {
        numbers[GOOD] = 0;
        next = scale < most ? scale * 2 : scale;
      }
    }
    const double factor = clip < 0 || norm <= clip ? 1 : clip / norm;
    numbers[SCALE] = factor / double(passes) / scale;
    numbers[GO] = !(stops || overflow);
    numbers[LOSS_SCALE] = next;
    numbers[STOPPED] = stops;
    numbers[CHECKED] = double(checked + 1);
    double* result = results + RESULTS * row;
    result[0] = loss;
    result[1] = norm;
    result[2] = factor;
    result[3] = next;
    result[4] = stops ? STEP_STOPPED : overflow ? STEP_SKIPPED : STEP_DONE;
    ratio = next / scale;
  }
  __syncthreads();
  rescale(losses, count, ratio);
}

// saved = data; data = saved if an iteration was STOPPED. One column of blocks a float32 blob
__global__ void save_stats(const Place* blobs, const double* numbers) {
  const Place p = blobs[blockIdx.y];
  float *data = static_cast<float*>(const_cast<void*>(p.data)), *saved = static_cast<float*>(p.other);
  const bool back = numbers[STOPPED] != 0;
  FOR_EACH(i, p.count) {
    if (back)
      data[i] = saved[i];
    else
      saved[i] = data[i];
  }
}

// sums += data; one column of blocks a blob
__global__ void add_up(const Place* blobs) {
  const Place p = blobs[blockIdx.y];
  double* sums = static_cast<double*>(p.other);
  FOR_EACH(i, p.count)
    sums[i] += element(p.data, i, p.kind);
}

// What decides on an update, by one block each, and sums over passes. Nothing of it needs the host: it says beforehand
// what it wants in `orders` and looks up afterwards what came of it in `reports`, rings of rows in its own memory.

#include "pack.cuh"
#include "reduce.cuh"

// Numbers of an iteration, as ops/cuda/update_state.py has them.
enum { RATE, DECAY, CORRECTION, SCALE, GO, LAST, TOTAL, LOSS_SCALE, GOOD, STOPPED, JUDGED };
enum { ORDERS = 3, REPORTS = 5 };  // numbers in a row
enum { UPDATED, SKIPPED, STOPS };

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

__device__ bool is_finite(double x) { return x - x == 0; }

// The loss of a pass: sums of data * diff, without the loss scale; added to that of the passes before if `add`.
__global__ void note(const Place* losses, i64 count, i64 add, double* numbers, i64* tick) {
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
  ++*tick;
}

// notes_0 = the loss of all passes, or no number if there is a problem
__global__ void tell(const double* problems, i64 places, const double* numbers, float* notes) {
  double problem = 0;
  for (i64 i = threadIdx.x; i < places; i += blockDim.x) problem += problems[2 * i];
  problem = block_sum(problem);
  if (threadIdx.x == 0) notes[0] = problem != 0 ? nanf("") : float(numbers[TOTAL]);
}

// The loss is what came back of it, and no number if what came back may be anything.
__global__ void hear(const float* notes, const volatile int* given_up, double* numbers) {
  numbers[TOTAL] = given_up && *given_up ? nanf("") : notes[0];
}

// told_0 = the loss scale
__global__ void pack_scale(const double* numbers, float* told) { told[0] = float(numbers[LOSS_SCALE]); }

// The loss scale becomes told_0, and the losses' diffs follow it.
__global__ void unpack_scale(const float* told, Place* losses, i64 count, double* numbers) {
  __shared__ double ratio;
  if (threadIdx.x == 0) {
    ratio = told[0] / numbers[LOSS_SCALE];
    numbers[LOSS_SCALE] = told[0];
  }
  __syncthreads();
  if (ratio == 1) return;
  for (i64 k = 0; k < count; ++k)
    for (i64 i = threadIdx.x; i < losses[k].count; i += blockDim.x)
      multiply(losses[k].other, i, losses[k].kind, ratio);
}

// partial_b = sum over block b's share of g * g
template <typename T>
__global__ void __launch_bounds__(256) squares(const T* g, double* partial, i64 n) {
  double sum = 0;
  each<16 / sizeof(T)>(
      n, [&sum](i64, T g) { sum += double(g) * double(g); }, in(g));
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// norm = sqrt(sum of partial) / loss scale. The update is left out if the norm is not finite and there is a loss scale,
// and from now on if the loss is not finite, if there is a problem, or if the loss scale can become no smaller. The
// gradients' scale is clip / norm if that is below 1, over passes and loss scale. A new loss scale is put into the
// losses' diffs.
__global__ void judge(const double* partial, i64 parts, double clip, i64 passes, i64 scaled, double least, double most,
                      i64 patience, const double* problems, i64 places, Place* losses, i64 count, double* numbers,
                      const volatile double* orders, double* reports, i64 rows) {
  __shared__ double ratio;
  double square = 0, problem = 0;
  for (i64 i = threadIdx.x; i < parts; i += blockDim.x) square += partial[i];
  for (i64 i = threadIdx.x; i < places; i += blockDim.x) problem += problems[2 * i];
  square = block_sum(square);
  problem = block_sum(problem);
  if (threadIdx.x == 0) {
    const double scale = numbers[LOSS_SCALE], loss = numbers[TOTAL] / double(passes), norm = sqrt(square) / scale;
    const bool overflow = scaled && !is_finite(norm);
    const bool stops = numbers[STOPPED] != 0 || problem != 0 || !is_finite(loss) || (overflow && scale <= least);
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
    const i64 judged = i64(numbers[JUDGED]), row = judged % rows;
    for (int i = 0; i < ORDERS; ++i) numbers[RATE + i] = orders[ORDERS * row + i];
    numbers[SCALE] = factor / double(passes) / scale;
    numbers[GO] = !(stops || overflow);
    numbers[LOSS_SCALE] = next;
    numbers[STOPPED] = stops;
    numbers[JUDGED] = double(judged + 1);
    double* report = reports + REPORTS * row;
    report[0] = loss;
    report[1] = norm;
    report[2] = factor;
    report[3] = next;
    report[4] = stops ? STOPS : overflow ? SKIPPED : UPDATED;
    ratio = next / scale;
  }
  __syncthreads();
  if (ratio == 1) return;
  for (i64 k = 0; k < count; ++k)
    for (i64 i = threadIdx.x; i < losses[k].count; i += blockDim.x)
      multiply(losses[k].other, i, losses[k].kind, ratio);
}

// kept = data, and from an iteration that was stopped on data = kept; a column of blocks for each blob of floats
__global__ void keep(const Place* blobs, const double* numbers) {
  const Place p = blobs[blockIdx.y];
  float *data = static_cast<float*>(const_cast<void*>(p.data)), *kept = static_cast<float*>(p.other);
  const bool back = numbers[STOPPED] != 0;
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < p.count; i += gridDim.x * i64(blockDim.x)) {
    if (back)
      data[i] = kept[i];
    else
      kept[i] = data[i];
  }
}

// sums += data; a column of blocks for each blob
__global__ void add_up(const Place* blobs) {
  const Place p = blobs[blockIdx.y];
  double* sums = static_cast<double*>(p.other);
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < p.count; i += gridDim.x * i64(blockDim.x))
    sums[i] += element(p.data, i, p.kind);
}

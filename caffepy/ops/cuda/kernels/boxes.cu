// Boxes of detectors (SSD): xmin, ymin, xmax, ymax, in units of the image. Reckoned in float, each operation rounded by
// itself, as on the CPU: which box is matched must not depend on it. Formulas in Ops.decode_boxes, match_boxes,
// location_losses.

#include "pack.cuh"
#include "reduce.cuh"

using u64 = unsigned long long;

enum Kind { CORNER = 1, CENTER_SIZE, CORNER_SIZE };  // as in ops/boxes.py
enum Crossing { NOWHERE, PRIORS, PREDICTIONS };

constexpr float LEAST = 1e-6f;  // an overlap that counts is larger

struct Box {
  float v[4];
  template <typename T> __device__ explicit Box(const T* p) : v{float(p[0]), float(p[1]), float(p[2]), float(p[3])} {}
  __device__ Box(float a, float b, float c, float d) : v{a, b, c, d} {}
  __device__ float wide() const { return __fsub_rn(v[2], v[0]); }
  __device__ float high() const { return __fsub_rn(v[3], v[1]); }
  __device__ float across() const { return __fmul_rn(__fadd_rn(v[0], v[2]), 0.5f); }
  __device__ float down() const { return __fmul_rn(__fadd_rn(v[1], v[3]), 0.5f); }
  __device__ float area() const { return wide() >= 0 && high() >= 0 ? __fmul_rn(wide(), high()) : 0.0f; }
  __device__ bool crosses() const {
    bool outside = false;
    for (float x : v) outside |= x < 0 || x > 1;
    return outside;
  }
};

// Intersection over union; 0 for boxes that only touch.
__device__ float overlap(const Box& a, const Box& b) {
  const float wide = __fsub_rn(fminf(a.v[2], b.v[2]), fmaxf(a.v[0], b.v[0]));
  const float high = __fsub_rn(fminf(a.v[3], b.v[3]), fmaxf(a.v[1], b.v[1]));
  if (!(wide > 0 && high > 0)) return 0;
  const float both = __fmul_rn(wide, high);
  return __fdiv_rn(both, __fsub_rn(__fadd_rn(a.area(), b.area()), both));
}

template <typename T> __device__ Box variances(const T* row, bool scaled) {
  return scaled ? Box(row) : Box(1, 1, 1, 1);
}

template <typename T> __device__ Box decoded(const T* locations, const T* prior, const T* variance, i64 kind, bool scaled) {
  const Box x(locations), p(prior), v = variances(variance, scaled);
  float d[4];
  for (int k = 0; k < 4; ++k) d[k] = __fmul_rn(v.v[k], x.v[k]);
  const float wide = p.wide(), high = p.high();
  if (kind == CENTER_SIZE) {
    const float across = __fadd_rn(__fmul_rn(d[0], wide), p.across()), down = __fadd_rn(__fmul_rn(d[1], high), p.down());
    const float reach = __fmul_rn(__fmul_rn(expf(d[2]), wide), 0.5f), rise = __fmul_rn(__fmul_rn(expf(d[3]), high), 0.5f);
    return {__fsub_rn(across, reach), __fsub_rn(down, rise), __fadd_rn(across, reach), __fadd_rn(down, rise)};
  }
  if (kind == CORNER_SIZE)
    for (int k = 0; k < 4; ++k) d[k] = __fmul_rn(d[k], k % 2 ? high : wide);
  return {__fadd_rn(p.v[0], d[0]), __fadd_rn(p.v[1], d[1]), __fadd_rn(p.v[2], d[2]), __fadd_rn(p.v[3], d[3])};
}

// The four locations of a true box.
template <typename T> __device__ Box encoded(const T* truth, const T* prior, const T* variance, i64 kind, bool scaled) {
  const Box g(truth), p(prior), v = variances(variance, scaled);
  const float wide = p.wide(), high = p.high();
  float d[4];
  if (kind == CENTER_SIZE) {
    d[0] = __fdiv_rn(__fsub_rn(g.across(), p.across()), wide);
    d[1] = __fdiv_rn(__fsub_rn(g.down(), p.down()), high);
    d[2] = logf(__fdiv_rn(g.wide(), wide));
    d[3] = logf(__fdiv_rn(g.high(), high));
  } else {
    for (int k = 0; k < 4; ++k) {
      d[k] = __fsub_rn(g.v[k], p.v[k]);
      if (kind == CORNER_SIZE) d[k] = __fdiv_rn(d[k], k % 2 ? high : wide);
    }
  }
  return {__fdiv_rn(d[0], v.v[0]), __fdiv_rn(d[1], v.v[1]), __fdiv_rn(d[2], v.v[2]), __fdiv_rn(d[3], v.v[3])};
}

template <typename T>
__global__ void decode_boxes(const T* locations, const T* priors, T* boxes, i64 images, i64 classes, i64 count, i64 kind,
                             i64 scaled) {
  FOR_EACH(i, images * classes * count) {
    const i64 p = i % count, c = i / count % classes, n = i / count / classes;
    const T* x = locations + ((n * count + p) * classes + c) * 4;
    const Box box = decoded(x, priors + 4 * p, priors + 4 * (count + p), kind, scaled);
    for (int k = 0; k < 4; ++k) boxes[4 * i + k] = T(box.v[k]);
  }
}

// True boxes: rows (G, 8) = image, class, instance, box, whether it is difficult; and which of them count.
template <typename T> struct Truths {
  const T* rows;
  i64 count, label, difficult;
  __device__ bool of(i64 t, i64 image) const {
    return i64(rows[8 * t]) == image && float(rows[8 * t]) >= 0 && (difficult || float(rows[8 * t + 7]) == 0);
  }
  __device__ bool wanted(i64 t) const { return label < 0 || i64(rows[8 * t + 1]) == label; }
  __device__ Box box(i64 t) const { return Box(rows + 8 * t + 3); }
};

// For each box: -1, or -2 where it crosses the edge and that leaves it out, its largest overlap, and with which.
template <typename T>
__global__ void compare_boxes(const T* boxes, const T* rows, int* matches, T* overlaps, int* nearest, i64 own, i64 images,
                              i64 count, i64 known, i64 label, i64 difficult, i64 inside) {
  const Truths<T> truths{rows, known, label, difficult};
  FOR_EACH(i, images * count) {
    const i64 n = i / count;
    const Box a(boxes + 4 * (own ? i : i % count));
    float largest = LEAST;
    int at = -1;
    bool any = false;
    for (i64 t = 0; t < known; ++t) {
      if (!truths.of(t, n) || !truths.wanted(t)) continue;
      any = true;
      const float both = overlap(a, truths.box(t));
      if (both > largest) {
        largest = both;
        at = int(t);
      }
    }
    const bool left_out = inside && any && a.crosses();
    matches[i] = left_out ? -2 : -1;
    overlaps[i] = T(at < 0 || left_out ? 0.0f : largest);
    nearest[i] = left_out ? -1 : at;
  }
}

// The larger of two pairs: overlap, then the earlier box, in one word; 0 is none.
__device__ u64 pair(float both, i64 place) { return u64(__float_as_uint(both)) << 32 | (0xffffffffu - unsigned(place)); }
__device__ i64 place_of(u64 found) { return i64(0xffffffffu - unsigned(found)); }

// The largest word of a block of whole warps, for all its threads.
__device__ u64 block_largest(u64 x) {
  __shared__ u64 parts[32];
  for (int offset = 16; offset; offset /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < blockDim.x / 32; ++i) x = max(x, parts[i]);
  return x;
}

// The box that overlaps a true one most, of those of an image that have no match.
template <typename T>
__device__ u64 best_box(const T* boxes, const int* matches, const Box& truth, i64 count) {
  u64 found = 0;
  for (i64 p = threadIdx.x; p < count; p += blockDim.x) {
    if (matches[p] != -1) continue;
    const float both = overlap(Box(boxes + 4 * p), truth);
    if (both > LEAST) found = max(found, pair(both, p));
  }
  return block_largest(found);
}

// A block for each true box.
template <typename T>
__global__ void best_boxes(const T* boxes, const T* rows, const int* matches, u64* best, i64 own, i64 images, i64 count,
                           i64 known, i64 label, i64 difficult) {
  const Truths<T> truths{rows, known, label, difficult};
  for (i64 t = blockIdx.x; t < known; t += gridDim.x) {
    const i64 n = i64(rows[8 * t]);
    u64 found = 0;
    if (n < images && truths.of(t, n) && truths.wanted(t))
      found = best_box(boxes + (own ? 4 * n * count : 0), matches + n * count, truths.box(t), count);
    if (threadIdx.x == 0) best[t] = found;
  }
}

// A block for each image: the best pair of those left, as long as there is one; then with `every` the nearest.
template <typename T>
__global__ void match_pairs(const T* boxes, const T* rows, int* matches, T* overlaps, const int* nearest, u64* best,
                            int* counts, i64 own, i64 count, i64 known, i64 label, i64 difficult, double threshold,
                            i64 every) {
  const Truths<T> truths{rows, known, label, difficult};
  const i64 n = blockIdx.x;
  boxes += own ? 4 * n * count : 0;
  matches += n * count;
  overlaps += n * count;
  nearest += n * count;
  int any = 0;
  for (i64 t = threadIdx.x; t < known; t += blockDim.x) any += truths.of(t, n);
  any = int(block_sum(float(any)));
  while (true) {
    u64 most = 0;
    for (i64 t = threadIdx.x; t < known; t += blockDim.x)
      if (truths.of(t, n)) most = max(most, best[t]);
    most = block_largest(most);
    if (!most) break;
    u64 first = 0;  // of the true boxes with this pair
    for (i64 t = threadIdx.x; t < known; t += blockDim.x)
      if (truths.of(t, n) && best[t] == most) first = max(first, u64(known - t));
    const i64 truth = known - i64(block_largest(first)), place = place_of(most);
    if (threadIdx.x == 0) {
      matches[place] = int(truth);
      overlaps[place] = T(__uint_as_float(unsigned(most >> 32)));
      best[truth] = 0;
    }
    __syncthreads();
    for (i64 t = 0; t < known; ++t) {  // those whose best is gone look for another
      const bool lost = truths.of(t, n) && best[t] && place_of(best[t]) == place;
      if (!lost) continue;  // the same for all threads
      const u64 next = best_box(boxes, matches, truths.box(t), count);
      if (threadIdx.x == 0) best[t] = next;
      __syncthreads();
    }
  }
  float found = 0;
  for (i64 p = threadIdx.x; p < count; p += blockDim.x) {
    if (every && matches[p] == -1 && nearest[p] >= 0 && float(overlaps[p]) >= float(threshold)) matches[p] = nearest[p];
    found += matches[p] > -1;
  }
  found = block_sum(found);
  if (threadIdx.x == 0) {
    counts[2 * n] = any;
    counts[2 * n + 1] = int(found);
  }
}

// How far four locations are from those of the true box; 0 where that costs nothing.
template <typename T>
__device__ void differences(const T* locations, const T* prior, const T* variance, const T* truth, i64 kind, bool scaled,
                            i64 crossing, float (&d)[4]) {
  const Box target = encoded(truth, prior, variance, kind, scaled);
  const Box box = crossing == PREDICTIONS ? decoded(locations, prior, variance, kind, scaled) : Box(prior);
  for (int k = 0; k < 4; ++k) {
    d[k] = float(locations[k]) - target.v[k];
    if (!scaled) d[k] /= float(variance[k]);
    if (crossing != NOWHERE && (box.v[k] < 0 || box.v[k] > 1)) d[k] = 0;
  }
}

template <typename T>
__global__ void location_losses(const T* locations, const T* priors, const T* truths, const int* matches, T* losses,
                                i64 images, i64 classes, i64 count, i64 kind, i64 scaled, i64 square, i64 crossing) {
  FOR_EACH(i, images * classes * count) {
    const i64 p = i % count, c = i / count % classes, n = i / count / classes;
    float loss = 0, d[4];
    if (matches[i] >= 0) {
      const T* x = locations + ((n * count + p) * classes + c) * 4;
      const T* truth = truths + 8 * i64(matches[i]) + 3;
      differences(x, priors + 4 * p, priors + 4 * (count + p), truth, kind, scaled, crossing, d);
      for (float v : d) loss += square || fabsf(v) < 1 ? 0.5f * v * v : fabsf(v) - 0.5f;
    }
    losses[i] = T(loss);
  }
}

template <typename T>
__global__ void location_gradients(const T* locations, const T* priors, const T* truths, const int* matches,
                                   const T* factor, T* gradients, i64 images, i64 classes, i64 count, i64 kind, i64 scaled,
                                   i64 square, i64 crossing) {
  const float by = float(*factor);
  FOR_EACH(i, images * count * classes) {
    const i64 c = i % classes, p = i / classes % count, n = i / classes / count;
    const int match = matches[(n * classes + c) * count + p];
    float d[4] = {0, 0, 0, 0};
    if (match >= 0) {
      const T* truth = truths + 8 * i64(match) + 3;
      differences(locations + 4 * i, priors + 4 * p, priors + 4 * (count + p), truth, kind, scaled, crossing, d);
    }
    for (int k = 0; k < 4; ++k) gradients[4 * i + k] = T(by * (square ? d[k] : fmaxf(-1.0f, fminf(d[k], 1.0f))));
  }
}

// Larger floats have larger keys.
__device__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A block for each row: the digits of the key of the last value that is chosen, the highest first; then those above it,
// and of those with this key the first.
template <typename T>
__global__ void choose_largest(const T* values, const int* allowed, const int* numbers, int* chosen, i64 count) {
  __shared__ unsigned histogram[256], shared[2], warps[32];
  const i64 n = blockIdx.x;
  values += n * count;
  allowed += n * count;
  chosen += n * count;
  unsigned found = 0, known = 0, left = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int k = threadIdx.x; k < 256; k += blockDim.x) histogram[k] = 0;
    __syncthreads();
    for (i64 p = threadIdx.x; p < count; p += blockDim.x) {
      const unsigned key = ordered(float(values[p]));
      if (allowed[p] && (key & known) == found) atomicAdd(&histogram[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (shift == 24) {
        unsigned total = 0;
        for (unsigned c : histogram) total += c;
        left = numbers[n] < 0 ? 0 : min(unsigned(numbers[n]), total);
      }
      int digit = 255;
      while (digit > 0 && histogram[digit] < left) left -= histogram[digit--];
      shared[0] = unsigned(digit) << shift;
      shared[1] = left;
    }
    __syncthreads();
    found |= shared[0];
    left = shared[1];
    known |= 255u << shift;
    __syncthreads();
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned passed = 0;  // values with this key before
  for (i64 start = 0; start < count; start += blockDim.x) {
    const i64 p = start + threadIdx.x;
    const bool may = left && p < count && allowed[p];
    const unsigned key = may ? ordered(float(values[p])) : 0;
    const bool equal = may && key == found;
    const unsigned votes = __ballot_sync(0xffffffffu, equal);
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    unsigned before = passed + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < blockDim.x / 32; ++w) {
      if (w < warp) before += warps[w];
      passed += warps[w];
    }
    if (p < count) chosen[p] = may && (key > found || (equal && before < left));
    __syncthreads();
  }
}

// A warp for each row of scores: -log(softmax at the label), at most that of the least normal float.
template <typename T> __device__ float maximum(const T* row, i64 count) {
  float most = float(row[0]);
  for (i64 k = threadIdx.x % 32; k < count; k += 32) most = fmaxf(most, float(row[k]));
  return warp_max(most);
}

template <typename T> __device__ float total(const T* row, i64 count, float most) {
  float sum = 0;
  for (i64 k = threadIdx.x % 32; k < count; k += 32) sum += expf(float(row[k]) - most);
  return warp_sum(sum);
}

template <typename T>
__global__ void class_losses(const T* x, const int* labels, T* losses, i64 rows, i64 count, double least) {
  for (i64 r = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; r < rows; r += gridDim.x * i64(blockDim.x) / 32) {
    float loss = 0;
    if (labels[r] >= 0) {
      const T* row = x + r * count;
      const float most = maximum(row, count), sum = total(row, count, most);
      const float share = expf(float(row[labels[r]]) - most) / sum;
      loss = -logf(share > float(least) || share != share ? share : float(least));
    }
    if (threadIdx.x % 32 == 0) losses[r] = T(loss);
  }
}

template <typename T>
__global__ void class_gradients(const T* x, const int* labels, const T* factor, T* gradients, i64 rows, i64 count) {
  const float by = float(*factor);
  for (i64 r = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; r < rows; r += gridDim.x * i64(blockDim.x) / 32) {
    const T* row = x + r * count;
    const i64 label = labels[r];
    const float most = label < 0 ? 0 : maximum(row, count), sum = label < 0 ? 1 : total(row, count, most);
    for (i64 k = threadIdx.x % 32; k < count; k += 32) {
      const float share = label < 0 ? 0 : expf(float(row[k]) - most) / sum;
      gradients[r * count + k] = T(by * (share - float(k == label)));
    }
  }
}

// A block for each image and class takes the boxes in the order of their scores: those that overlap no earlier one of the
// kept by more than the threshold, which falls by eta with each while it is above 1/2.
template <typename T>
__global__ void detect(const T* boxes, const T* scores, const i64* order, const int* numbers, T* found, int* counts,
                       i64 groups, i64 count, i64 classes, i64 most, i64 background, double threshold, double eta) {
  const i64 row = blockIdx.x, n = row / classes, k = row % classes;
  const T* of_class = boxes + (n * groups + (groups > 1 ? k : 0)) * count * 4;
  T* kept = found + row * most * 5;
  float limit = float(threshold);
  int known = 0;
  const int candidates = k == background ? 0 : numbers[row];
  for (int c = 0; c < candidates; ++c) {
    const i64 p = order[row * most + c];
    const Box box(of_class + 4 * p);
    bool covered = false;
    for (int j = threadIdx.x; j < known && !covered; j += blockDim.x) covered = overlap(box, Box(kept + 5 * j + 1)) > limit;
    if (__syncthreads_or(covered)) continue;
    if (threadIdx.x < 4) kept[5 * known + 1 + threadIdx.x] = T(box.v[threadIdx.x]);
    if (threadIdx.x == 4) kept[5 * known] = scores[(n * count + p) * classes + k];
    ++known;
    if (float(eta) < 1 && limit > 0.5f) limit = __fmul_rn(limit, float(eta));
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[row] = known;
}

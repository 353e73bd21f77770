// Boxes that a region proposal network proposes: x1, y1, x2, y2 in pixels, both ends inside. Each operation is rounded
// by itself, as on the CPU: which box wins must not depend on it.

#include "pack.cuh"

using u64 = unsigned long long;

// The ends of a box along an axis after its deltas, cut to the image.
struct Ends {
  float low, high;
  __device__ Ends(float begin, float end, float shift, float grow, float size) {
    const float length = __fadd_rn(__fsub_rn(end, begin), 1.0f);
    const float centre = __fadd_rn(__fadd_rn(begin, __fmul_rn(0.5f, length)), __fmul_rn(shift, length));
    const float reach = __fmul_rn(0.5f, __fmul_rn(expf(grow), length));
    const float most = size - 1.0f;
    low = fmaxf(fminf(__fsub_rn(centre, reach), most), 0.0f);
    high = fmaxf(fminf(__fadd_rn(centre, reach), most), 0.0f);
  }
  __device__ float length() const { return __fadd_rn(__fsub_rn(high, low), 1.0f); }
};

// boxes (N, H W A, 4) and objects (N, H W A) from scores (N, 2A, H, W), deltas (N, 4A, H, W), anchors (A, 4); info holds
// height, width and scale of the image, or a scale for each direction
template <typename T>
__global__ void decode_proposals(const T* scores, const T* deltas, const float* anchors, const T* info, T* boxes,
                                 T* objects, i64 images, i64 h, i64 w, i64 count, i64 numbers, i64 stride,
                                 double least) {
  FOR_EACH(k, images * h * w * count) {
    const i64 a = k % count, j = k / count % w, i = k / count / w % h, n = k / count / w / h;
    const T* d = deltas + ((n * count + a) * 4 * h + i) * w + j;
    const float* anchor = anchors + 4 * a;
    const float x = float(j * stride), y = float(i * stride);
    const Ends across(x + anchor[0], x + anchor[2], float(d[0]), float(d[2 * h * w]), float(info[1]));
    const Ends down(y + anchor[1], y + anchor[3], float(d[h * w]), float(d[3 * h * w]), float(info[0]));
    T* box = boxes + 4 * k;
    box[0] = T(across.low);
    box[1] = T(down.low);
    box[2] = T(across.high);
    box[3] = T(down.high);
    const float scale = float(info[numbers > 3 ? 3 : 2]);
    const bool fits = across.length() >= __fmul_rn(float(least), scale) &&
                      down.length() >= __fmul_rn(float(least), float(info[2]));
    objects[k] = fits ? scores[((n * 2 + 1) * count + a) * h * w + i * w + j] : T(0);
  }
}

// A box and its area.
struct Area {
  float v[4], size;
  Area() = default;
  template <typename T> __device__ Area(const T* p, float unit) {
    for (int k = 0; k < 4; ++k) v[k] = float(p[k]);
    size = __fmul_rn(__fadd_rn(__fsub_rn(v[2], v[0]), unit), __fadd_rn(__fsub_rn(v[3], v[1]), unit));
  }
};

// Whether the intersection over the union, rounded, is above a threshold.
struct Limit {
  float threshold, above, below, unit;
  __device__ Limit(double threshold, double unit)
      : threshold(float(threshold)), above(float(threshold) * 1.00001f), below(float(threshold) * 0.99999f), unit(float(unit)) {}
  __device__ float both(const Area& a, const Area& b) const {
    const float wide = __fadd_rn(__fsub_rn(fminf(a.v[2], b.v[2]), fmaxf(a.v[0], b.v[0])), unit);
    const float high = __fadd_rn(__fsub_rn(fminf(a.v[3], b.v[3]), fmaxf(a.v[1], b.v[1])), unit);
    return __fmul_rn(fmaxf(wide, 0.0f), fmaxf(high, 0.0f));
  }
  __device__ float either(const Area& a, const Area& b, float both) const { return __fsub_rn(__fadd_rn(a.size, b.size), both); }
  __device__ bool passes(const Area& a, const Area& b) const {
    const float overlap = both(a, b);
    return __fdiv_rn(overlap, either(a, b, overlap)) > threshold;
  }
  // The same without a division; `near` where that is not sure.
  __device__ bool guess(const Area& a, const Area& b, bool& near) const {
    const float overlap = both(a, b), all = either(a, b, overlap), least = below * all;
    const bool over = overlap > above * all;
    near = !(least > 1e-30f && (over || overlap < least));
    return over;
  }
};

constexpr int LINE = 128;  // boxes p of a block

// Bit b of word (n, q, p): another box, 64 q + b, overlaps p, which is no later than the last of these. Blocks (of boxes p,
// q from `first` on, n), a thread a box p. Nothing unless `counts` (N) are below `most`, where there are some.
template <typename T>
__global__ void __launch_bounds__(LINE)
find_overlaps(const T* boxes, const int* counts, u64* words, i64 count, i64 columns, i64 first, i64 most, double threshold,
              double unit) {
  __shared__ Area others[64];
  const i64 n = blockIdx.z, q = first + blockIdx.y, start = 64 * q, p = blockIdx.x * i64(LINE) + threadIdx.x;
  if (blockIdx.x * i64(LINE) > start + 63 || (first && counts[n] >= most)) return;
  const T* all = boxes + n * count * 4;
  const int here = int(min(count - start, i64(64)));
  const Limit limit(threshold, unit);
  if (threadIdx.x < 64) others[threadIdx.x] = Area(all + 4 * (start + min(int(threadIdx.x), here - 1)), limit.unit);
  __syncthreads();
  if (p >= count || p > start + 63) return;
  const Area own(all + 4 * p, limit.unit);
  u64 word = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned bits = 0, unsure = 0;
#pragma unroll
    for (int b = 0; b < 32; ++b) {
      bool near;
      if (limit.guess(own, others[32 * half + b], near)) bits |= 1u << b;
      if (near) unsure |= 1u << b;
    }
    for (; unsure; unsure &= unsure - 1) {
      const int b = __ffs(unsure) - 1;
      bits &= ~(1u << b);
      if (limit.passes(own, others[32 * half + b])) bits |= 1u << b;
    }
    word |= u64(bits) << (32 * half);
  }
  if (here < 64) word &= (u64(1) << here) - 1;
  if (p >= start) word &= ~(u64(1) << (p - start));
  words[(n * columns + q) * count + p] = word;
}

// Of the boxes of a word that may stay those that no kept one before overlaps, at most `most`, by a warp; `pairs` are the
// words of lane and lane + 32. All boxes that nothing undecided before them overlaps are decided at once.
__device__ u64 decide(u64 undecided, const u64 (&pairs)[2], i64 most) {
  const unsigned lane = threadIdx.x % 32;
  u64 before[2], kept = 0;
#pragma unroll
  for (int k = 0; k < 2; ++k) before[k] = pairs[k] & ((u64(1) << (lane + 32 * k)) - 1);
  while (undecided) {
    u64 stay = 0, go = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const bool open = undecided >> (lane + 32 * k) & 1;
      stay |= u64(__ballot_sync(0xffffffffu, open && !(before[k] & undecided))) << (32 * k);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) go |= u64(__ballot_sync(0xffffffffu, (before[k] & stay) != 0)) << (32 * k);
    kept |= stay;
    undecided &= ~(stay | go);
  }
  while (__popcll(kept) > most) kept &= ~(u64(1) << (63 - __clzll(kept)));
  return kept;
}

__device__ unsigned warp_or(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(0xffffffffu, x);
#else
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x |= __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
#endif
}

// A block for each image takes the boxes of columns `first` to `last` in turn, 64 at a time: those that no earlier one of
// the kept overlaps, until `most` are kept. The first warp decides about a column, while the others look what boxes kept
// before overlap in the next one; what those just kept overlap there the first warp has read ahead.
__global__ void __launch_bounds__(1024)
keep_boxes(const u64* words, int* kept, int* counts, i64 count, i64 columns, i64 first, i64 last, i64 most) {
  constexpr int ROOM = 2048;
  __shared__ unsigned gone[3][2];  // halves of a column, the next one, and that after it
  __shared__ int room[ROOM], shared_found[2];
  const i64 n = blockIdx.x;
  const int lane = threadIdx.x % 32;
  words += n * columns * count;
  kept += n * most;
  int* list = most <= ROOM ? room : kept;
  int found = first ? counts[n] : 0;
  if (found >= most) return;
  for (int k = threadIdx.x; k < found; k += blockDim.x) list[k] = kept[k];
  if (threadIdx.x < 6) gone[threadIdx.x / 2][threadIdx.x % 2] = 0;
  __syncthreads();
  const auto look = [&](i64 q, int from, int step) {
    constexpr int U = 4;  // words of a thread on their way
    u64 bits = 0;
    for (int start = from; start < found; start += U * step) {
      u64 got[U];
#pragma unroll
      for (int u = 0; u < U; ++u) got[u] = start + u * step < found ? words[q * count + list[start + u * step]] : 0;
#pragma unroll
      for (int u = 0; u < U; ++u) bits |= got[u];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned all = warp_or(unsigned(bits >> (32 * half)));
      if (lane == 0 && all) atomicOr(&gone[q % 3][half], all);
    }
  };
  look(first, threadIdx.x, blockDim.x);
  u64 pairs[2], next[2], late = 0;  // of the first warp: words of a column's boxes with it, and with the next column
  const auto load = [&](i64 q) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const i64 p = 64 * q + lane + 32 * k;
      const bool here = q < last && p < count;
      pairs[k] = here ? words[q * count + p] : 0;
      next[k] = here && q + 1 < last ? words[(q + 1) * count + p] : 0;
    }
  };
  if (threadIdx.x < 32) load(first);
  __syncthreads();
  for (i64 q = first; q < last && found < most; ++q) {
    if (threadIdx.x < 32) {
      const i64 start = 64 * q, here = min(count - start, i64(64));
      const u64 all = here < 64 ? (u64(1) << here) - 1 : ~u64(0);
      const u64 words_of[2] = {pairs[0], pairs[1]}, words_with[2] = {next[0], next[1]};
      load(q + 1);  // on its way meanwhile
      const u64 stay = decide(~(u64(gone[q % 3][1]) << 32 | gone[q % 3][0] | late) & all, words_of, most - found);
      u64 bits = 0;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int b = lane + 32 * k, rank = __popcll(stay & ((u64(1) << b) - 1));
        if (!(stay >> b & 1)) continue;
        bits |= words_with[k];
        list[found + rank] = kept[found + rank] = int(start + b);
      }
      late = u64(warp_or(unsigned(bits >> 32))) << 32 | warp_or(unsigned(bits));
      if (lane == 0) {
        shared_found[q % 2] = found + __popcll(stay);
        gone[(q + 2) % 3][0] = gone[(q + 2) % 3][1] = 0;
      }
    } else if (q + 1 < last) {
      look(q + 1, threadIdx.x - 32, blockDim.x - 32);
    }
    __syncthreads();
    found = shared_found[q % 2];
  }
  if (threadIdx.x == 0) counts[n] = found;
}

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
struct alignas(16) Area {
  float v[4], size;
  Area() = default;
  template <typename T> __device__ Area(const T* p, float unit) {
    for (int k = 0; k < 4; ++k) v[k] = float(p[k]);
    size = __fmul_rn(__fadd_rn(__fsub_rn(v[2], v[0]), unit), __fadd_rn(__fsub_rn(v[3], v[1]), unit));
  }
  // Whether areas of this size can be compared without a division; false for what is no number.
  __device__ bool plain() const {
    bool finite = true;
    for (float x : v) finite &= fabsf(x) < 1e15f;
    return finite && size > 1e-20f && v[2] >= v[0] && v[3] >= v[1];
  }
};

// Whether the intersection over the union, rounded, is above a threshold.
struct Limit {
  float threshold, above, below, unit;
  __device__ Limit(double threshold, double unit)
      : threshold(float(threshold)), above(float(threshold) * 1.00001f), below(float(threshold) * 0.99999f), unit(float(unit)) {}
  __device__ float length(float low, float high) const { return __fadd_rn(__fsub_rn(high, low), unit); }
  __device__ bool passes(const Area& a, const Area& b) const {
    const float wide = length(fmaxf(a.v[0], b.v[0]), fminf(a.v[2], b.v[2]));
    const float high = length(fmaxf(a.v[1], b.v[1]), fminf(a.v[3], b.v[3]));
    const float both = __fmul_rn(fmaxf(wide, 0.0f), fmaxf(high, 0.0f));
    return __fdiv_rn(both, __fsub_rn(__fadd_rn(a.size, b.size), both)) > threshold;
  }
  // Shifts a bit into each of two words: it is not above the threshold, it is below, both for sure; if neither, that is not
  // sure. For plain areas and a threshold that is above 0: without a division, by the signs of two sums.
  __device__ void guess(const Area& a, const Area& b, unsigned& not_above, unsigned& is_below) const {
    const float wide = length(fmaxf(a.v[0], b.v[0]), fminf(a.v[2], b.v[2]));
    const float high = length(fmaxf(a.v[1], b.v[1]), fminf(a.v[3], b.v[3]));
    const float both = __fmul_rn(fmaxf(wide, 0.0f), high);  // 0 or less unless both are above 0
    const float either = __fsub_rn(__fadd_rn(a.size, b.size), both);
    not_above = __funnelshift_l(__float_as_uint(fmaf(-above, either, both)), not_above, 1);
    is_below = __funnelshift_l(__float_as_uint(fmaf(-below, either, both)), is_below, 1);
  }
};

constexpr int COLUMN = 128;           // boxes of a column, a bit each
constexpr int WORDS = COLUMN / 32;

struct alignas(16) Bits {
  unsigned v[WORDS];
  __device__ void operator|=(const Bits& other) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) v[w] |= other.v[w];
  }
  __device__ bool any() const {
    unsigned all = 0;
    for (unsigned word : v) all |= word;
    return all;
  }
  __device__ int count() const {
    int all = 0;
    for (unsigned word : v) all += __popc(word);
    return all;
  }
  // Those of the first `number` boxes of a column alone.
  __device__ void cut(i64 number) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const i64 here = number - 32 * w;
      if (here < 32) v[w] &= here > 0 ? (1u << here) - 1 : 0;
    }
  }
};

// Bit b of (n, q, p): another box, COLUMN * q + b, overlaps p, which is no later than the last of these. Blocks (of boxes p,
// q from `first` on, n), a thread a box p. Nothing unless `counts` (N) are below `most`, where there are some.
template <typename T>
__global__ void __launch_bounds__(COLUMN)
find_overlaps(const T* boxes, const int* counts, Bits* overlaps, i64 count, i64 columns, i64 first, i64 most,
              double threshold, double unit) {
  __shared__ Area others[COLUMN];
  __shared__ unsigned odd[WORDS];
  const i64 n = blockIdx.z, q = first + blockIdx.y, start = COLUMN * q, p = blockIdx.x * i64(COLUMN) + threadIdx.x;
  if (blockIdx.x > q || (first && counts[n] >= most)) return;
  const T* all = boxes + n * count * 4;
  const int here = int(min(count - start, i64(COLUMN)));
  const Limit limit(threshold, unit);
  const bool quick = limit.threshold > 1e-6f && limit.threshold < 1e6f && limit.unit >= 0;
  const Area other(all + 4 * (start + min(int(threadIdx.x), here - 1)), limit.unit);
  others[threadIdx.x] = other;
  const unsigned votes = __ballot_sync(0xffffffffu, !other.plain());
  if (threadIdx.x % 32 == 0) odd[threadIdx.x / 32] = votes;
  __syncthreads();
  if (p >= count) return;
  const Area own(all + 4 * p, limit.unit);
  const unsigned none = quick && own.plain() ? 0 : 0xffffffffu;
  Bits bits;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    unsigned not_above = 0, is_below = 0;
#pragma unroll
    for (int b = 31; b >= 0; --b) limit.guess(own, others[32 * w + b], not_above, is_below);
    unsigned unsure = (not_above & ~is_below) | odd[w] | none, over = ~not_above & ~unsure;
    for (; unsure; unsure &= unsure - 1) {
      const int b = __ffs(unsure) - 1;
      if (limit.passes(own, others[32 * w + b])) over |= 1u << b;
    }
    bits.v[w] = over;
  }
  bits.cut(here);
  if (blockIdx.x == q) bits.v[threadIdx.x / 32] &= ~(1u << threadIdx.x % 32);
  overlaps[(n * columns + q) * count + p] = bits;
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

// Of the boxes of a column that may stay those that no kept one before overlaps, at most `most`, by a warp; `overlaps` are
// those of boxes lane, lane + 32, ... with the column. All boxes that nothing undecided before them overlaps are decided at
// once.
__device__ Bits decide(Bits undecided, const Bits (&overlaps)[WORDS], i64 most) {
  const unsigned before = (1u << threadIdx.x % 32) - 1;
  Bits kept = {};
  // Whether one of these boxes lies before box lane + 32 w and overlaps it.
  const auto meets = [&](int w, const Bits& boxes) {
    unsigned met = overlaps[w].v[w] & boxes.v[w] & before;
#pragma unroll
    for (int v = 0; v < w; ++v) met |= overlaps[w].v[v] & boxes.v[v];
    return met != 0;
  };
  while (undecided.any()) {
    Bits stay, go;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const bool open = undecided.v[w] >> threadIdx.x % 32 & 1;
      stay.v[w] = __ballot_sync(0xffffffffu, open && !meets(w, undecided));
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      go.v[w] = __ballot_sync(0xffffffffu, meets(w, stay));
      kept.v[w] |= stay.v[w];
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w) undecided.v[w] &= ~(stay.v[w] | go.v[w]);
  }
  i64 room = most;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    while (__popc(kept.v[w]) > room) kept.v[w] &= ~(0x80000000u >> __clz(kept.v[w]));
    room -= __popc(kept.v[w]);
  }
  return kept;
}

// A block for each image takes the boxes of columns `first` to `last` in turn, a column at a time: those that no earlier
// one of the kept overlaps, until `most` are kept. The first warp decides about a column, while the others look what boxes
// kept before overlap in the next one; what those just kept overlap there the first warp has read ahead.
__global__ void __launch_bounds__(1024)
keep_boxes(const Bits* overlaps, int* kept, int* counts, i64 count, i64 columns, i64 first, i64 last, i64 most) {
  constexpr int ROOM = 2048;
  __shared__ Bits gone[3];  // of a column, the next one, and that after it
  __shared__ int room[ROOM], shared_found[2];
  const i64 n = blockIdx.x;
  const int lane = threadIdx.x % 32;
  overlaps += n * columns * count;
  kept += n * most;
  int* list = most <= ROOM ? room : kept;
  int found = first ? counts[n] : 0;
  if (found >= most) return;
  for (int k = threadIdx.x; k < found; k += blockDim.x) list[k] = kept[k];
  if (threadIdx.x < 3) gone[threadIdx.x] = {};
  __syncthreads();
  const auto look = [&](i64 q, int from, int step) {
    constexpr int U = 4;  // of a thread on their way
    const Bits* of_column = overlaps + q * count;
    Bits bits = {};
    for (int start = from; start < found; start += U * step) {
      Bits got[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        got[u] = {};
        if (start + u * step < found) got[u] = of_column[list[start + u * step]];
      }
#pragma unroll
      for (int u = 0; u < U; ++u) bits |= got[u];
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const unsigned all = warp_or(bits.v[w]);
      if (lane == 0 && all) atomicOr(&gone[q % 3].v[w], all);
    }
  };
  look(first, threadIdx.x, blockDim.x);
  Bits with[WORDS], next[WORDS], late = {};  // of the first warp: a column's boxes with it, and with the next column
  const auto load = [&](i64 q) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const i64 p = COLUMN * q + lane + 32 * w;
      const bool here = q < last && p < count;
      with[w] = next[w] = {};
      if (here) with[w] = overlaps[q * count + p];
      if (here && q + 1 < last) next[w] = overlaps[(q + 1) * count + p];
    }
  };
  if (threadIdx.x < 32) load(first);
  __syncthreads();
  for (i64 q = first; q < last && found < most; ++q) {
    if (threadIdx.x < 32) {
      Bits open;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) open.v[w] = ~(gone[q % 3].v[w] | late.v[w]);
      open.cut(count - COLUMN * q);
      const Bits stay = decide(open, with, most - found);
      Bits bits = {};
      int rank = found;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        if (stay.v[w] >> lane & 1) {
          bits |= next[w];
          const int k = rank + __popc(stay.v[w] & ((1u << lane) - 1));
          list[k] = kept[k] = int(COLUMN * q + lane + 32 * w);
        }
        rank += __popc(stay.v[w]);
      }
#pragma unroll
      for (int w = 0; w < WORDS; ++w) late.v[w] = warp_or(bits.v[w]);
      if (lane == 0) {
        shared_found[q % 2] = rank;
        gone[(q + 2) % 3] = {};
      }
      load(q + 1);
    } else if (q + 1 < last) {
      look(q + 1, threadIdx.x - 32, blockDim.x - 32);
    }
    __syncthreads();
    found = shared_found[q % 2];
  }
  if (threadIdx.x == 0) counts[n] = found;
}

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

template <typename T> __device__ bool overlaps(const T* a, const T* b, float threshold, float unit) {
  const float ax = float(a[0]), ay = float(a[1]), bx = float(b[0]), by = float(b[1]);
  const float aX = float(a[2]), aY = float(a[3]), bX = float(b[2]), bY = float(b[3]);
  const float wide = __fadd_rn(__fsub_rn(fminf(aX, bX), fmaxf(ax, bx)), unit);
  const float high = __fadd_rn(__fsub_rn(fminf(aY, bY), fmaxf(ay, by)), unit);
  const float both = __fmul_rn(fmaxf(wide, 0.0f), fmaxf(high, 0.0f));
  const float first = __fmul_rn(__fadd_rn(__fsub_rn(aX, ax), unit), __fadd_rn(__fsub_rn(aY, ay), unit));
  const float second = __fmul_rn(__fadd_rn(__fsub_rn(bX, bx), unit), __fadd_rn(__fsub_rn(bY, by), unit));
  return __fdiv_rn(both, __fsub_rn(__fadd_rn(first, second), both)) > threshold;
}

// Bit b of word (n, p, q): another box, 64 q + b, overlaps p. Blocks (of boxes p, q, n), a thread a box p; words of q below
// p / 64 are not written.
template <typename T>
__global__ void __launch_bounds__(64)
find_overlaps(const T* boxes, u64* words, i64 count, i64 columns, double threshold, double unit) {
  __shared__ T others[64][4];
  if (blockIdx.y < blockIdx.x) return;
  const i64 n = blockIdx.z, p = blockIdx.x * i64(64) + threadIdx.x, first = blockIdx.y * i64(64);
  const T* all = boxes + n * count * 4;
  const int here = int(min(count - first, i64(64)));
  for (int k = threadIdx.x; k < 4 * here; k += 64) others[k / 4][k % 4] = all[4 * first + k];
  __syncthreads();
  if (p >= count) return;
  T own[4];
  for (int k = 0; k < 4; ++k) own[k] = all[4 * p + k];
  u64 bits = 0;
  for (int b = 0; b < here; ++b)
    if (first + b != p && overlaps(own, others[b], float(threshold), float(unit))) bits |= u64(1) << b;
  words[(n * count + p) * columns + blockIdx.y] = bits;
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

// A block for each image takes the boxes in turn, 64 at a time: those that no earlier one of the kept overlaps, until
// `most` are kept. removed (N, columns) is for more columns than shared memory has room for.
template <typename T>
__global__ void __launch_bounds__(1024)
keep_boxes(const T*, const u64* words, u64* removed, int* kept, int* counts, i64 count, i64 columns, i64 most) {
  constexpr int ROOM = 2048;
  __shared__ u64 room[ROOM], chosen;
  __shared__ int places[64];
  const i64 n = blockIdx.x;
  const int lane = threadIdx.x % 32;
  words += n * count * columns;
  kept += n * most;
  u64* gone = columns <= ROOM ? room : removed + n * columns;
  for (i64 q = threadIdx.x; q < columns; q += blockDim.x) gone[q] = 0;
  i64 found = 0;
  u64 next[2];  // of a warp: the words of the boxes to come with each other
  const auto load = [&](i64 q) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const i64 p = 64 * q + lane + 32 * k;
      next[k] = p < count ? words[p * columns + q] : 0;
    }
  };
  if (threadIdx.x < 32) load(0);
  for (i64 q = 0; q < columns && found < most; ++q) {
    const i64 first = 64 * q;
    __syncthreads();
    if (threadIdx.x < 32) {
      const u64 pairs[2] = {next[0], next[1]};
      load(q + 1);  // on its way meanwhile
      const i64 here = min(count - first, i64(64));
      const u64 all = here < 64 ? (u64(1) << here) - 1 : ~u64(0), stay = decide(~gone[q] & all, pairs, most - found);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int b = lane + 32 * k, rank = __popcll(stay & ((u64(1) << b) - 1));
        if (!(stay >> b & 1)) continue;
        places[rank] = b;
        kept[found + rank] = int(first + b);
      }
      if (lane == 0) chosen = stay;
    }
    __syncthreads();
    const int taken = __popcll(chosen);
    // Threads beside each other take columns, those behind each other the rows of what stays.
    const i64 rest = columns - q - 1;
    const int across = int(min(i64(blockDim.x), (rest + 31) / 32 * 32)), rows = across ? blockDim.x / across : 0;
    if (threadIdx.x < across * rows) {
      const int row = threadIdx.x / across;
      for (i64 k = q + 1 + threadIdx.x % across; k < columns; k += across) {
        u64 bits = 0;
#pragma unroll 8
        for (int b = row; b < taken; b += rows) bits |= words[(first + places[b]) * columns + k];
        if (bits) atomicOr(&gone[k], bits);
      }
    }
    found += taken;
  }
  if (threadIdx.x == 0) counts[n] = int(found);
}

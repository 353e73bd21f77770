// Boxes that a region proposal network proposes: x1, y1, x2, y2 in pixels, both ends inside. Each operation is rounded
// by itself, as on the CPU: which box wins must not depend on it.

#include "pack.cuh"
#include "arrive.cuh"

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
    if (aligned(p, sizeof(Pack<T, 4>))) {
      const Pack<T, 4> pack = *reinterpret_cast<const Pack<T, 4>*>(p);
      for (int k = 0; k < 4; ++k) v[k] = float(pack.v[k]);
    } else {
      for (int k = 0; k < 4; ++k) v[k] = float(p[k]);
    }
    size = __fmul_rn(__fadd_rn(__fsub_rn(v[2], v[0]), unit), __fadd_rn(__fsub_rn(v[3], v[1]), unit));
  }
  // Whether it can be far from others; false for what is no number.
  __device__ bool plain() const {
    bool finite = true;
    for (float x : v) finite &= fabsf(x) < 1e15f;
    return finite && size > 1e-20f && v[2] >= v[0] && v[3] >= v[1];
  }
};

// Whether the intersection over the union, rounded, is above a threshold.
struct Limit {
  float threshold, unit;
  __device__ Limit(double threshold, double unit) : threshold(float(threshold)), unit(float(unit)) {}
  __device__ float length(float low, float high) const { return __fadd_rn(__fsub_rn(high, low), unit); }
  __device__ bool passes(const Area& a, const Area& b) const {
    const float wide = length(fmaxf(a.v[0], b.v[0]), fminf(a.v[2], b.v[2]));
    const float high = length(fmaxf(a.v[1], b.v[1]), fminf(a.v[3], b.v[3]));
    const float both = __fmul_rn(fmaxf(wide, 0.0f), fmaxf(high, 0.0f));
    return __fdiv_rn(both, __fsub_rn(__fadd_rn(a.size, b.size), both)) > threshold;
  }
};

// Where a box is: boxes whose centres are further apart along an axis than they reach together do not overlap by more than
// the threshold, since what they share of an axis is at least what they share of their areas.
struct alignas(16) Near {
  float x, wide, y, high;
  Near() = default;
  __device__ Near(const Area& of, const Limit& limit) {
    const float t = limit.threshold, part = (1 - t) / (2 * (1 + t)) * 1.0001f + 1e-5f;
    const bool known = of.plain() && t > 1e-6f && t < 1 && limit.unit >= 0;
    const auto reach = [=](float low, float high) {  // with room for what rounding does
      return part * limit.length(low, high) + 4e-7f * (fabsf(low) + fabsf(high));
    };
    x = known ? 0.5f * (of.v[0] + of.v[2]) : 0;
    y = known ? 0.5f * (of.v[1] + of.v[3]) : 0;
    wide = known ? reach(of.v[0], of.v[2]) : __uint_as_float(0x7f800000u);
    high = known ? reach(of.v[1], of.v[3]) : __uint_as_float(0x7f800000u);
  }
};

// A bit for each of 32 other boxes, whether it may overlap: from the signs of sums.
__device__ unsigned near(const Near& own, const Near* others) {
  unsigned level = 0, vertical = 0;
#pragma unroll
  for (int b = 31; b >= 0; --b) {
    const Near other = others[b];
    level = __funnelshift_l(__float_as_uint(fabsf(other.x - own.x) - other.wide - own.wide), level, 1);
    vertical = __funnelshift_l(__float_as_uint(fabsf(other.y - own.y) - other.high - own.high), vertical, 1);
  }
  return level & vertical;
}

constexpr int WARPS = 32, LINE = 32;           // of a block; boxes of a warp, beside 32 others
constexpr int MOST = 5120, WORDS = MOST / 32;  // boxes that are looked at, and words of them, a bit each
constexpr int GROUPS = 4;                      // lists that a warp looks at, at most
constexpr int HEADS = 2;                       // words of entries of each list that are read before it is known how long it is
constexpr int BATCH = 4;                       // entries that a thread reads at a time

// What the last block is told of the others: bits of the boxes that one kept before overlaps; the blocks that are done; all 0
// before and after.
struct Notes {
  u64 done;
  unsigned gone[WORDS];
};

struct alignas(16) Corners { float v[4]; };

// What warps know of 32 boxes while they compare; then of each box the entries that it waits for.
union Shared {
  struct {
    Near near[WARPS][32];
    Corners corners[WARPS][32];
  } of;
  unsigned waits[MOST];
};

// `size` boxes of an image from `first` on. Lists (blocks, room) hold entries: a box, in the lowest 16 bits, overlaps those of
// a word, in the next ones, whose bits are in the upper half; they come before it.
template <typename T> struct Segment {
  const T* boxes;
  int first, size;
  Notes* notes;
  u64* lists;
  int* lengths;  // of the lists
  i64 room;
  Limit limit;
  Shared* shared;
  __device__ Area area(int p) const { return {boxes + 4ll * p, limit.unit}; }

  // By a warp: LINE boxes of the segment from `row` on, one a lane, beside 32 others, of which this lane knows the place of one,
  // below 0: none. They are those of a word, or below 0 such as were kept before.
  struct Unit {
    int row, word, place;
    Area own, other;
  };
  __device__ Unit unit(int row, int word, int place) const {
    return {row, word, place, area(first + min(row + int(threadIdx.x % 32), size - 1)), area(max(place, 0))};
  }

  // `length`: of the list of this block.
  __device__ void compare(const Unit& unit, int* length) const {
    const int lane = threadIdx.x % 32, word = unit.word, k = unit.row + lane;
    Near* near_of = shared->of.near[threadIdx.x / 32];
    Corners* corners_of = shared->of.corners[threadIdx.x / 32];
    const unsigned there = __ballot_sync(0xffffffffu, unit.place >= 0);
    corners_of[lane] = {unit.other.v[0], unit.other.v[1], unit.other.v[2], unit.other.v[3]};
    near_of[lane] = Near(unit.other, limit);
    __syncwarp();
    unsigned over = 0;
    for (unsigned may = k < size ? near(Near(unit.own, limit), near_of) & there : 0; may; may &= may - 1) {
      const int b = __ffs(may) - 1;
      if (limit.passes(unit.own, Area(corners_of[b].v, limit.unit))) over |= 1u << b;
    }
    if (word >= 0 && k < 32 * word + 32) over &= (1u << max(k - 32 * word, 0)) - 1;  // those before this one
    const unsigned some = __ballot_sync(0xffffffffu, over != 0);
    if (!some) return;
    if (word < 0) {
      if (lane == 0) atomicOr(notes->gone + unit.row / 32, some);
      return;
    }
    int start = 0;
    if (lane == 0) start = atomicAdd(length, __popc(some));
    start = __shfl_sync(0xffffffffu, start, 0) + __popc(some & ((1u << lane) - 1));
    if (over) lists[blockIdx.x * room + start] = u64(over) << 32 | unsigned(word << 16 | k);
  }

  // By the last block: the boxes that no earlier one of the kept overlaps, up to `most` with those found before. A box goes as
  // soon as one that overlaps it is known to stay, and stays as soon as all its entries are known to tell nothing. Nothing that
  // is known changes any more, so that no warp waits for another: each looks at its own entries again and again, up to `own`
  // of them in shared memory, where those are kept that may still tell something, the others where they are, with 0 for one
  // that cannot. Returns how many boxes are kept.
  __device__ int decide(int* kept, int found, int most, u64* entries, int own) const {
    struct alignas(8) State { unsigned stay, gone; };
    __shared__ State states[WORDS];
    __shared__ int before[WORDS], shared_found;
    unsigned* waits = shared->waits;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = int(gridDim.x);
    const unsigned gone = threadIdx.x < WORDS ? __ldcg(notes->gone + threadIdx.x) : 0;
    u64 begins[GROUPS][HEADS];  // of the lists of this warp
    int heads[GROUPS], tails[GROUPS], all_heads = 0, total = 0;  // where they end if all beginnings come first, then the rest
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int block = warp + WARPS * g;
#pragma unroll
      for (int c = 0; c < HEADS; ++c) begins[g][c] = block < blocks ? __ldcg(lists + block * room + 32 * c + lane) : 0;
      tails[g] = block < blocks ? __ldcg(lengths + block) : 0;
    }
    for (int k = threadIdx.x; k < MOST; k += 32 * WARPS) waits[k] = 0;
    if (threadIdx.x < WORDS) {
      const int word = threadIdx.x, whole = size / 32;
      const unsigned there = word < whole ? 0xffffffffu : word > whole ? 0u : (1u << size % 32) - 1;
      states[word] = {0, gone | ~there};
      notes->gone[word] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) heads[g] = all_heads += min(tails[g], 32 * HEADS);
    total = all_heads;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) tails[g] = total += max(tails[g] - 32 * HEADS, 0);
    // Where entry i lies.
    const auto place_of = [&](int i) {
      const bool head = i < all_heads;
      int block = warp, start = head ? 0 : all_heads;
#pragma unroll
      for (int g = 0; g + 1 < GROUPS; ++g) {
        const int end = head ? heads[g] : tails[g];
        if (i < end) continue;
        block = warp + WARPS * (g + 1);
        start = end;
      }
      return lists + block * room + (head ? 0 : 32 * HEADS) + i - start;
    };
    const auto box_of = [](u64 entry) { return unsigned(entry) & 0xffff; };
    entries += own * warp;
    const int apart = own = min(total, own);
    const auto keep = [&](int i, u64 entry) {
      if (i < own) entries[i] = entry;
      atomicAdd(waits + box_of(entry), 1u);
    };
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int c = 0; c < HEADS; ++c) {
        const int i = (g ? heads[g - 1] : 0) + 32 * c + lane;
        if (i < heads[g]) keep(i, begins[g][c]);
      }
#pragma unroll 1
    for (int start = all_heads + lane; start < total; start += 32 * BATCH) {
      u64 more[BATCH];
#pragma unroll
      for (int s = 0; s < BATCH; ++s) more[s] = start + 32 * s < total ? __ldcg(place_of(start + 32 * s)) : 0;
#pragma unroll
      for (int s = 0; s < BATCH; ++s)
        if (more[s]) keep(start + 32 * s, more[s]);
    }
    __syncthreads();
    for (int word = warp; word < WORDS; word += WARPS) {
      const unsigned free = __ballot_sync(0xffffffffu, !waits[32 * word + lane]);
      if (lane == 0) states[word].stay = free & ~states[word].gone;
    }
    __syncthreads();
    const auto read = [&](unsigned word) {
      const u64 both = *reinterpret_cast<const volatile u64*>(states + word);
      return State{unsigned(both), unsigned(both >> 32)};
    };
    // Looks at an entry, with what is known of the boxes that it tells of and of its own: whether it may still tell something.
    const auto look = [&](u64 entry, const State& of, const State& of_own) {
      const unsigned k = box_of(entry), over = unsigned(entry >> 32), bit = 1u << k % 32;
      if (of_own.gone & bit) return false;
      if (of.stay & over) {
        atomicOr(&states[k / 32].gone, bit);
        return false;
      }
      if (over & ~of.gone) return true;
      if (atomicSub(waits + k, 1u) == 1) atomicOr(&states[k / 32].stay, bit);
      return false;
    };
    const auto word_of = [](u64 entry) { return unsigned(entry) >> 16; };
    // Few instructions, since all warps take turns with them.
    for (bool more = true; more;) {
      int telling = 0;
#pragma unroll 1
      for (int start = 0; start < own; start += 32) {
        const bool is = start + lane < own;
        const u64 some = is ? entries[start + lane] : 0;
        const bool tells = is && look(some, read(word_of(some)), read(box_of(some) / 32));
        const unsigned votes = __ballot_sync(0xffffffffu, tells);
        if (tells) entries[telling + __popc(votes & ((1u << lane) - 1))] = some;
        telling += __popc(votes);
        __syncwarp();
      }
      own = telling;
      bool tells = false;
#pragma unroll 1
      for (int i = apart + lane; i < total; i += 32) {
        u64* at = place_of(i);
        const u64 entry = __ldcg(at);
        if (!entry) continue;
        if (look(entry, read(word_of(entry)), read(box_of(entry) / 32)))
          tells = true;
        else
          *at = 0;
      }
      more = own || __any_sync(0xffffffffu, tells);
    }
    __syncthreads();
    if (warp == 0) {
      constexpr int EACH = WORDS / 32;
      int own = 0;
      for (int e = 0; e < EACH; ++e) own += __popc(states[EACH * lane + e].stay);
      int all = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, all, offset);
        if (lane >= offset) all += other;
      }
      int rank = found + all - own;
      for (int e = 0; e < EACH; ++e) {
        before[EACH * lane + e] = rank;
        rank += __popc(states[EACH * lane + e].stay);
      }
      if (lane == 31) shared_found = min(rank, most);
    }
    __syncthreads();
    for (int word = warp; word < WORDS; word += WARPS) {
      const unsigned stay = states[word].stay;
      const int rank = before[word] + __popc(stay & ((1u << lane) - 1));
      if (stay >> lane & 1 && rank < most) kept[rank] = first + 32 * word + lane;
    }
    return shared_found;
  }
};

// Of the boxes `first` to first + size - 1 of each image, those that no earlier one of the kept overlaps, until `most` are
// kept: blocks (shares of the comparisons, an image), no more than GROUPS * WARPS, the last of which decides.
template <typename T>
__global__ void __launch_bounds__(32 * WARPS, 1)
suppress_overlaps(const T* boxes, int* kept, int* counts, Notes* notes, u64* lists, int* lengths, i64 count, i64 first,
                  i64 size, i64 most, i64 room, i64 entries_of_warp, double threshold, double unit) {
  extern __shared__ u64 entries[];  // of the last block
  __shared__ Shared shared;
  __shared__ bool last;
  __shared__ int length;
  const i64 n = blockIdx.y;
  const int found = first ? counts[n] : 0, lines = int(size + LINE - 1) / LINE, words = (found + 31) / 32, lane = threadIdx.x % 32;
  if (first && found >= most) return;
  kept += n * most;
  lengths += n * gridDim.x;
  const Segment<T> segment{boxes + 4 * n * count, int(first), int(size), notes + n, lists + n * gridDim.x * room,
                           lengths,               room,       Limit(threshold, unit), &shared};
  if (threadIdx.x == 0) length = 0;
  __syncthreads();
  const int own = lines * (lines + 1) / 2, all = own + lines * words;
  const auto unit_of = [&](int u) {
    if (u < own) {  // line k has k + 1 words
      int k = int((sqrtf(8.0f * float(u) + 1.0f) - 1.0f) * 0.5f);
      while (k * (k + 1) / 2 > u) --k;
      while ((k + 1) * (k + 2) / 2 <= u) ++k;
      const int word = u - k * (k + 1) / 2, b = 32 * word + lane;
      return segment.unit(LINE * k, word, b < size ? int(first) + b : -1);
    }
    const int k = (u - own) / words, b = 32 * (u - own - k * words) + lane;
    return segment.unit(LINE * k, -1, b < found ? kept[b] : -1);
  };
  const int step = gridDim.x * WARPS;
  int u = blockIdx.x + gridDim.x * (threadIdx.x / 32);
  typename Segment<T>::Unit next;
  if (u < all) next = unit_of(u);
  for (; u < all; u += step) {
    const typename Segment<T>::Unit now = next;
    if (u + step < all) next = unit_of(u + step);  // on its way meanwhile
    segment.compare(now, &length);
    __syncwarp();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    lengths[blockIdx.x] = length;
    last = arrive(&notes[n].done, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  const int now = segment.decide(kept, found, int(most), entries, int(entries_of_warp));
  if (threadIdx.x > 0) return;
  counts[n] = now;
  notes[n].done = 0;
}

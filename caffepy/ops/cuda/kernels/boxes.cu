// Boxes of detectors (SSD): xmin, ymin, xmax, ymax, in units of the image. Reckoned in float, each operation rounded by
// itself, as on the CPU: which box is matched must not depend on it. Formulas in Ops.decode_boxes, match_boxes,
// location_losses.

#include "pack.cuh"
#include "reduce.cuh"
#include "block_reduce.cuh"
#include "arrive.cuh"
#include "flags.cuh"

using u64 = unsigned long long;

enum Kind { CORNER = 1, CENTER_SIZE, CORNER_SIZE };  // as in ops/boxes.py
enum Crossing { NOWHERE, PRIORS, PREDICTIONS };

constexpr float LEAST = 1e-6f;  // an overlap that counts is larger

struct Box {
  float v[4];
  Box() = default;
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

// The area that two boxes share; 0 if they only touch.
__device__ float shared_area(const Box& a, const Box& b) {
  const float wide = __fsub_rn(fminf(a.v[2], b.v[2]), fmaxf(a.v[0], b.v[0]));
  const float high = __fsub_rn(fminf(a.v[3], b.v[3]), fmaxf(a.v[1], b.v[1]));
  return wide > 0 && high > 0 ? __fmul_rn(wide, high) : 0.0f;
}

// Intersection over union, of boxes of these areas.
__device__ float share(float both, float area, float other) {
  return both > 0 ? __fdiv_rn(both, __fsub_rn(__fadd_rn(area, other), both)) : 0.0f;
}

__device__ float overlap(const Box& a, const Box& b) { return share(shared_area(a, b), a.area(), b.area()); }

// A box from its four locations x and its prior p, scaled by v.
__device__ Box decoded(const Box& x, const Box& p, const Box& v, i64 kind) {
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

// The four locations of a true box g.
__device__ Box encoded(const Box& g, const Box& p, const Box& v, i64 kind) {
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

// Where item i of (outer, middle, inner) lies; divisions of 32 bits where they do.
struct Place {
  i64 outer, middle, inner;
  __device__ Place(i64 i, i64 middles, i64 inners) {
    const i64 line = quotient(i, inners);
    inner = i - line * inners;
    outer = quotient(line, middles);
    middle = line - outer * middles;
  }
  static __device__ i64 quotient(i64 n, i64 d) { return (n | d) >> 32 ? n / d : i64(unsigned(n) / unsigned(d)); }
};

template <typename T> __device__ void write_four(T* to, const float (&values)[4]) {
  Pack<T, 4> pack;
  for (int k = 0; k < 4; ++k) pack.v[k] = T(values[k]);
  if (aligned(to, sizeof pack))
    *reinterpret_cast<Pack<T, 4>*>(to) = pack;
  else
    for (int k = 0; k < 4; ++k) to[k] = pack.v[k];
}

template <typename T> __device__ Box read_four(const T* from) {
  if (!aligned(from, sizeof(Pack<T, 4>))) return Box(from);
  const Pack<T, 4> pack = *reinterpret_cast<const Pack<T, 4>*>(from);
  return Box(pack.v);
}

template <typename T>
__global__ void decode_boxes(const T* locations, const T* priors, T* boxes, i64 images, i64 classes, i64 count, i64 kind,
                             i64 scaled) {
  FOR_EACH(i, images * classes * count) {
    const Place at(i, classes, count);
    const T* x = locations + ((at.outer * count + at.inner) * classes + at.middle) * 4;
    const i64 p = at.inner;
    const Box by = scaled ? Box(priors + 4 * (count + p)) : Box(1, 1, 1, 1);
    write_four(boxes + 4 * i, decoded(Box(x), Box(priors + 4 * p), by, kind).v);
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
  // By a block: notes those that are of no class or of the background, and those that are not finite.
  __device__ void check(i64 classes, i64 background, i64 any_class, double* bad_label, double* bad_box) const {
    Bad labels, boxes;
    for (i64 t = threadIdx.x; t < count; t += blockDim.x) {
      const T* row = rows + 8 * t;
      const float image = float(row[0]), label = float(row[1]);
      const bool counts = image >= 0 && (difficult || float(row[7]) == 0);
      const bool inside = label > -1 && (any_class || label < float(classes)) && label != float(background);
      bool finite = true;
      for (int k = 3; k < 7; ++k) finite &= fabsf(float(row[k])) < __uint_as_float(0x7f800000u);
      labels.add(counts && !inside, label);
      boxes.add(counts && !finite, image);
    }
    labels.put_down(bad_label);
    boxes.put_down(bad_box);
  }
};

// Larger floats have larger keys, none of them 0; -0 has that of 0.
__device__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}

// The largest float of a warp, none of which is NaN.
__device__ float largest_of(float x) {
  const unsigned key = warp_max(ordered(x));
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The sum over a block of up to 1024 threads, for all of them; calls take turns with `odd`.
__device__ unsigned block_total(unsigned x, int odd) {
  __shared__ unsigned parts[2][32];
  const int lane = threadIdx.x % 32;
  x = warp_sum(x);
  if (lane == 0) parts[odd][threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / 32 ? parts[odd][lane] : 0);
}

// Writes a pack to an array from p on, but for what would lie behind `count`.
template <typename T, int V> __device__ void write_up_to(T* to, i64 p, i64 count, const Pack<T, V>& pack) {
  if (p + V <= count && aligned(to + p, sizeof pack)) {
    *reinterpret_cast<Pack<T, V>*>(to + p) = pack;
    return;
  }
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (p + v < count) to[p + v] = pack.v[v];
}

// The larger of two pairs: overlap, then the earlier box, in one word; 0 is none.
__device__ u64 pair(unsigned both, i64 place) { return u64(both) << 32 | (0xffffffffu - unsigned(place)); }
__device__ i64 place_of(u64 found) { return i64(0xffffffffu - unsigned(found)); }

constexpr int TILE = 256, EACH = 4;  // threads of match_boxes, and true boxes that it takes at a time; boxes of a thread
constexpr int LINE = 32 * EACH;       // boxes of a warp
constexpr int AHEAD = 4;              // best pairs of lines on their way to a lane

// The best pair of a true box with the boxes of a line, of those below `limit`, by a warp.
template <typename T>
__device__ u64 best_below(const T* boxes, const Box& truth, i64 line, i64 count, bool inside, u64 limit) {
  const i64 start = line * LINE + threadIdx.x % 32 * EACH;
  Box of[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) of[e] = read_four(boxes + 4 * min(start + e, count - 1));
  u64 found = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const i64 p = start + e;
    const float both = p >= count || (inside && of[e].crosses()) ? 0.0f : overlap(of[e], truth);
    const u64 next = both > LEAST ? pair(__float_as_uint(both), p) : 0;
    if (next > found && next < limit) found = next;
  }
  return warp_max(found);
}

// By the block: each of `count` true boxes, of these rows, keeps its best pair unless another's with that box is larger, or
// as large and earlier; then it turns to the next one, until all pairs are of different boxes. That gives what taking the
// best pair of those left in turn would give. `tops` (known, lines): the best pair of each true box with the boxes of a
// line. `best` and `next` have room for a pair each.
template <typename T>
__device__ void settle(const T* boxes, const Truths<T>& truths, const u64* tops, i64 lines, i64 boxes_count, bool inside,
                       u64* best, u64* next, const int* row, int count) {
  const int lane = threadIdx.x % 32;
  bool any;
  do {
    any = false;
    for (int k = threadIdx.x / 32; k < count; k += TILE / 32) {
      const u64 own = best[k];
      bool lost = false;
      for (int other = lane; own && other < count; other += 32) {
        const u64 of_other = best[other];
        lost |= other != k && of_other && place_of(of_other) == place_of(own) && (of_other > own || (of_other == own && other < k));
      }
      u64 found = own;
      if (__any_sync(0xffffffffu, lost)) {
        any = true;
        found = 0;
        const Box truth = truths.box(row[k]);
        for (i64 start = 0; start < lines; start += 32 * AHEAD) {
          u64 top[AHEAD];
          unsigned lost_tops = 0;  // a bit for each of them that is not below
#pragma unroll
          for (int a = 0; a < AHEAD; ++a) {
            const i64 of = start + 32 * a + lane;
            top[a] = of < lines ? __ldcg(tops + row[k] * lines + of) : 0;
          }
#pragma unroll
          for (int a = 0; a < AHEAD; ++a) {
            if (top[a] < own)
              found = max(found, top[a]);
            else
              lost_tops |= 1u << a;
          }
          while (const unsigned lanes = __ballot_sync(0xffffffffu, lost_tops)) {
            const int of_lane = __ffs(lanes) - 1, a = __ffs(__shfl_sync(0xffffffffu, lost_tops, of_lane)) - 1;
            found = max(found, best_below(boxes, truth, start + 32 * a + of_lane, boxes_count, inside, own));
            if (lane == of_lane) lost_tops &= lost_tops - 1;
          }
        }
        found = warp_max(found);
      }
      if (lane == 0) next[k] = found;
    }
    any = __syncthreads_or(any);
    u64* const before = best;
    best = next;
    next = before;
  } while (any);
}

// The boxes of an image that have a match, as they are found: some of them twice.
struct Matched {
  int* boxes;
  u64* number;
  __device__ void add(i64 place) const {
    if (boxes) boxes[atomicAdd(number, 1ull)] = int(place);
  }
};

// By a block, tile `tile` of `tiles` of the boxes of image n, EACH boxes a thread: -2 where one crosses the edge and that leaves
// it out, with `every` the true box of the image that it overlaps most, the threshold or more, else -1; and its largest
// overlap. The last block of an image to finish then takes the best pairs, of those left, as long as there are any, and
// returns true. `tops` (known, lines of boxes) and `matched` (images, tiles) are what blocks know; `pairs` (images, known, 3) is for
// images with more than TILE true boxes; `arrived` (images) is 0 before and after. The first block also checks the true
// boxes, unless `bad_label` is null.
template <typename T>
__device__ bool match_tile(i64 n, i64 tile, i64 tiles, const Matched& list, const T* boxes, const T* rows, int* matches, T* overlaps,
                           int* counts, u64* tops, int* matched, u64* pairs, u64* arrived, i64 own, i64 count, i64 known, i64 label,
                           i64 difficult, i64 inside, double threshold, i64 every, i64 classes, i64 background, i64 any_class,
                           double* bad_label, double* bad_box) {
  __shared__ float corners[TILE][4], areas[TILE];
  __shared__ int row_of[TILE];
  __shared__ u64 shared_pairs[2][TILE];
  __shared__ bool last;
  const Truths<T> truths{rows, known, label, difficult};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (tile * TILE + threadIdx.x) * EACH, lines = tiles * (TILE / 32), line = tile * (TILE / 32) + warp;
  boxes += own ? 4 * n * count : 0;
  matches += n * count;
  overlaps += n * count;
  Box a[EACH];
  bool crosses[EACH], may[EACH];
  float largest[EACH], area[EACH];
  int at[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    a[e] = read_four(boxes + 4 * min(first + e, count - 1));
    area[e] = a[e].area();
    crosses[e] = inside && a[e].crosses();
    may[e] = first + e < count && !crosses[e];
    largest[e] = LEAST;
    at[e] = -1;
  }
  // Around all boxes of a warp, with the lower ends negated: a true box outside shares nothing with any of them.
  float around[4];
  bool known_all = true;
#pragma unroll
  for (int k = 0; k < 4; ++k) around[k] = -__uint_as_float(0x7f800000u);
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (!may[e]) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      around[k] = fmaxf(around[k], k < 2 ? -a[e].v[k] : a[e].v[k]);
      known_all &= a[e].v[k] == a[e].v[k];
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) around[k] = largest_of(around[k]);
  const Box all(-around[0], -around[1], around[2], around[3]);
  const bool everywhere = !__all_sync(0xffffffffu, known_all);
  int mine = 0;  // true boxes of this image that are wanted
  for (i64 start = 0; start < known; start += TILE) {
    const i64 t = start + threadIdx.x;
    bool here = false;
    Box truth;
    if (t < known) {
      const Box left = read_four(rows + 8 * t), right = read_four(rows + 8 * t + 4);
      here = i64(left.v[0]) == n && left.v[0] >= 0 && (difficult || right.v[3] == 0) && (label < 0 || i64(left.v[1]) == label);
      truth = Box(left.v[3], right.v[0], right.v[1], right.v[2]);
    }
    const Rank rank(here);
    if (here) {
      for (int k = 0; k < 4; ++k) corners[rank.before][k] = truth.v[k];
      areas[rank.before] = truth.area();
      row_of[rank.before] = int(t);
    }
    __syncthreads();
    mine += int(rank.all);
    // Of the 32 true boxes from `base` on those that may share something with boxes of this warp, a bit each.
    const auto near_truths = [&](unsigned base) {
      const unsigned k = base + lane;
      const bool is = k < rank.all, near = is && (everywhere || shared_area(all, Box(corners[k])) > 0);
      if (is && !near) tops[row_of[k] * lines + line] = 0;
      return __ballot_sync(0xffffffffu, near);
    };
    const auto meet = [&](unsigned k) {
      const Box truth(corners[k]);
      u64* top = tops + row_of[k] * lines + line;
      float both[EACH];
      bool any = false;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        both[e] = may[e] ? shared_area(a[e], truth) : 0.0f;
        any |= both[e] > 0;
      }
      if (!__any_sync(0xffffffffu, any)) {
        if (lane == 0) *top = 0;
        return;
      }
      unsigned bits = 0;
      i64 place = 0;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const float part = share(both[e], area[e], areas[k]);
        if (part > largest[e]) {
          largest[e] = part;
          at[e] = row_of[k];
        }
        const unsigned of_box = part > LEAST ? __float_as_uint(part) : 0;
        if (of_box > bits) {
          bits = of_box;
          place = first + e;
        }
      }
      const unsigned most = warp_max(bits);
      const int best = __ffs(__ballot_sync(0xffffffffu, bits == most)) - 1;
      if (lane == best) *top = most ? pair(most, place) : 0;
    };
    for (unsigned base = 0; base < rank.all; base += 32)
      for (unsigned near = near_truths(base); near; near &= near - 1) meet(base + __ffs(near) - 1);
    __syncthreads();
  }
  Pack<int, EACH> match;
  Pack<T, EACH> most;
  int found = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const bool is = every && at[e] >= 0 && largest[e] >= float(threshold);
    match.v[e] = crosses[e] && mine ? -2 : is ? at[e] : -1;
    most.v[e] = T(at[e] < 0 ? 0.0f : largest[e]);
    if (is) list.add(first + e);
    found += is;
  }
  write_up_to(matches, first, count, match);
  write_up_to(overlaps, first, count, most);
  found = int(block_total(unsigned(found), 0));
  if (threadIdx.x == 0) {
    matched[n * tiles + tile] = found;
    last = arrive(arrived + n, 1) == tiles - 1;
  }
  __syncthreads();
  if (bad_label && tile + n == 0) truths.check(classes, background, any_class, bad_label, bad_box);
  if (!last) return false;
  u64 *best = shared_pairs[0], *next = shared_pairs[1];
  int* row = row_of;
  if (mine > TILE) {
    best = pairs + 3 * n * known;
    next = best + known;
    row = reinterpret_cast<int*>(next + known);
  }
  int any = mine;  // true boxes of any class
  if (known > TILE || label >= 0) {
    any = 0;
    for (i64 start = 0, listed = 0; start < known; start += TILE) {
      const i64 t = start + threadIdx.x;
      const bool here = t < known && truths.of(t, n), wanted = here && truths.wanted(t);
      any += __syncthreads_count(here);
      const Rank rank(wanted);
      if (wanted) row[listed + rank.before] = int(t);
      listed += rank.all;
    }
    __syncthreads();
  }
  found = 0;
  for (i64 t = lane; warp == 0 && t < tiles; t += 32) found += __ldcg(matched + n * tiles + t);
  for (int k = warp; k < mine; k += TILE / 32) {
    u64 most = 0;
#pragma unroll 4
    for (i64 of = lane; of < lines; of += 32) most = max(most, __ldcg(tops + row[k] * lines + of));
    most = warp_max(most);
    if (lane == 0) best[k] = most;
  }
  __syncthreads();
  settle(boxes, truths, tops, lines, count, inside != 0, best, next, row, mine);
  if (warp == 0) found = int(warp_sum(unsigned(found)));
  for (int start = 0; start < mine; start += TILE) {
    const int k = start + int(threadIdx.x);
    const u64 got = k < mine ? best[k] : 0;
    const i64 place = got ? place_of(got) : 0;
    found += __syncthreads_count(got && __ldcg(matches + place) == -1);
    if (got) {
      matches[place] = row[k];
      overlaps[place] = T(__uint_as_float(unsigned(got >> 32)));
      list.add(place);
    }
  }
  if (threadIdx.x == 0) {
    counts[2 * n] = any;
    counts[2 * n + 1] = found;
    arrived[n] = 0;
  }
  return true;
}

// Blocks (tiles, images).
template <typename T>
__global__ void __launch_bounds__(TILE)
match_boxes(const T* boxes, const T* rows, int* matches, T* overlaps, int* counts, u64* tops, int* matched, u64* pairs,
            u64* arrived, i64 own, i64 count, i64 known, i64 label, i64 difficult, i64 inside, double threshold, i64 every,
            i64 classes, i64 background, i64 any_class, double* bad_label, double* bad_box) {
  match_tile(blockIdx.y, blockIdx.x, gridDim.x, Matched{nullptr, nullptr}, boxes, rows, matches, overlaps, counts, tops, matched,
             pairs, arrived, own, count, known, label, difficult, inside, threshold, every, classes, background, any_class, bad_label,
             bad_box);
}

struct LocationRule {
  i64 kind;
  bool scaled, square;
  i64 crossing;
  __device__ LocationRule(i64 kind, i64 scaled, i64 square, i64 crossing)
      : kind(kind), scaled(scaled), square(square), crossing(crossing) {}
};

// The four locations of a box, its prior with variances and its true box: all are read at once.
struct Met {
  Box locations, prior, variance, truth;
  Met() = default;
  template <typename T>
  __device__ Met(const T* locations, const T* priors, const T* truths, i64 match, i64 p, i64 count)
      : locations(read_four(locations)),
        prior(read_four(priors + 4 * p)),
        variance(read_four(priors + 4 * (count + p))),
        truth(truths + 8 * match + 3) {}
};

// How far four locations are from those of the true box; 0 where that costs nothing.
__device__ void differences(const Met& box, const LocationRule& rule, float (&d)[4]) {
  const Box by = rule.scaled ? box.variance : Box(1, 1, 1, 1), target = encoded(box.truth, box.prior, by, rule.kind);
  const Box at = rule.crossing == PREDICTIONS ? decoded(box.locations, box.prior, by, rule.kind) : box.prior;
  for (int k = 0; k < 4; ++k) {
    d[k] = box.locations.v[k] - target.v[k];
    if (!rule.scaled) d[k] /= box.variance.v[k];
    if (rule.crossing != NOWHERE && (at.v[k] < 0 || at.v[k] > 1)) d[k] = 0;
  }
}

__device__ float location_loss(const Met& box, const LocationRule& rule) {
  float loss = 0, d[4];
  differences(box, rule, d);
  for (float v : d) loss += rule.square || fabsf(v) < 1 ? 0.5f * v * v : fabsf(v) - 0.5f;
  return loss;
}

// The gradient, `by` times the slope.
__device__ void location_gradient(const Met& box, const LocationRule& rule, float by, float (&d)[4]) {
  differences(box, rule, d);
  for (float& v : d) v = by * (rule.square ? v : fmaxf(-1.0f, fminf(v, 1.0f)));
}

template <typename T>
__global__ void location_losses(const T* locations, const T* priors, const T* truths, const int* matches, T* losses,
                                i64 images, i64 classes, i64 count, i64 kind, i64 scaled, i64 square, i64 crossing) {
  const LocationRule rule(kind, scaled, square, crossing);
  FOR_EACH(i, images * classes * count) {
    float loss = 0;
    if (matches[i] >= 0) {
      const Place at(i, classes, count);
      const T* x = locations + ((at.outer * count + at.inner) * classes + at.middle) * 4;
      loss = location_loss({x, priors, truths, matches[i], at.inner, count}, rule);
    }
    losses[i] = T(loss);
  }
}

template <typename T>
__global__ void location_gradients(const T* locations, const T* priors, const T* truths, const int* matches,
                                   const T* factor, T* gradients, i64 images, i64 classes, i64 count, i64 kind, i64 scaled,
                                   i64 square, i64 crossing) {
  const LocationRule rule(kind, scaled, square, crossing);
  const float by = float(*factor);
  FOR_EACH(i, images * count * classes) {
    const Place at(i, count, classes);
    float d[4] = {};
    const i64 match = matches[(at.outer * classes + at.inner) * count + at.middle];
    if (match >= 0) location_gradient({locations + 4 * i, priors, truths, match, at.middle, count}, rule, by, d);
    write_four(gradients + 4 * i, d);
  }
}

// The sum over the threads of a block before this one.
__device__ unsigned block_before(unsigned x) {
  __shared__ unsigned parts[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned all = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, all, offset);
    if (lane >= offset) all += other;
  }
  if (lane == 31) parts[warp] = all;
  __syncthreads();
  return warp_sum(lane < warp ? parts[lane] : 0) + all - x;
}

// Keys of a row, four of a thread side by side, 0 for what cannot be chosen. HELD is a multiple of 4.
template <int HELD> struct Keys {
  static constexpr int UNROLL = HELD <= 64 ? HELD : 4;
  unsigned of[HELD];
  // The place of element i of this thread, which grows with i.
  static __device__ int place(int i) { return int(4 * threadIdx.x) + (i / 4 * 4 * int(blockDim.x) + i % 4); }
  Keys() = default;
  template <typename F> __device__ Keys(i64 count, F key) {
#pragma unroll UNROLL
    for (int i = 0; i < HELD; ++i) {
      const i64 p = place(i);
      of[i] = p < count ? key(p) : 0;
    }
  }
  __device__ u64 pair_of(int i) const { return pair(of[i], place(i)); }
  __device__ unsigned largest() const {
    unsigned most = 0;
#pragma unroll UNROLL
    for (int i = 0; i < HELD; ++i) most = max(most, of[i]);
    return most;
  }
  __device__ unsigned above(unsigned key) const {
    unsigned found = 0;
#pragma unroll UNROLL
    for (int i = 0; i < HELD; ++i) found += of[i] > key;
    return found;
  }
};

// The pair of key and place of the last of the `wanted` largest keys, where there are more keys than that; 0 if more than ROOM
// keys are in its bin. A block of 1024 threads counts keys by how far they are below the largest one, `most`, 128 bins for a
// factor of two, and compares those of one bin. `bins` and `number` are 0.
constexpr int BINS = 2048;

template <int HELD> __device__ u64 last_pair(const Keys<HELD>& keys, unsigned wanted, unsigned most, unsigned* bins, unsigned& number) {
  constexpr int SHIFT = 16, ROOM = 1024;
  __shared__ uint3 cut;  // a bin, the keys in bins before it, the keys in it
  __shared__ u64 pairs[ROOM], last;
  const auto bin_of = [=](unsigned key) { return min((most - key) >> SHIFT, BINS - 1u); };
#pragma unroll Keys<HELD>::UNROLL
  for (int i = 0; i < HELD; ++i)
    if (keys.of[i]) atomicAdd(bins + bin_of(keys.of[i]), 1u);
  __syncthreads();
  const unsigned first = bins[2 * threadIdx.x], second = bins[2 * threadIdx.x + 1];
  const unsigned before = block_before(first + second);
  if (before < wanted && wanted <= before + first)
    cut = {2 * threadIdx.x, before, first};
  else if (before + first < wanted && wanted <= before + first + second)
    cut = {2 * threadIdx.x + 1, before + first, second};
  __syncthreads();
  const auto [bin, better, count] = cut;
  if (count > ROOM) return 0;
#pragma unroll Keys<HELD>::UNROLL
  for (int i = 0; i < HELD; ++i)
    if (keys.of[i] && bin_of(keys.of[i]) == bin) pairs[atomicAdd(&number, 1u)] = keys.pair_of(i);
  __syncthreads();
  if (threadIdx.x < count) {
    const u64 mine = pairs[threadIdx.x];
    unsigned above = better;
    for (unsigned k = 0; k < count; ++k) above += pairs[k] > mine;
    if (above == wanted - 1) last = mine;
  }
  __syncthreads();
  return last;
}

// f(element, whether it is one of the `number` largest, of equal ones the first). Where too many keys are alike: bit by bit the
// largest key from which on there are as many; if there are more, only the first of those with this key count.
template <int HELD, typename F> __device__ void largest(const Keys<HELD>& keys, i64 number, F f) {
  __shared__ unsigned bins[BINS], in_bin, counts[32], mosts[32];
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x; k < BINS; k += blockDim.x) bins[k] = 0;
  if (threadIdx.x == 0) in_bin = 0;
  const unsigned count = warp_sum(keys.above(0)), own_most = warp_max(keys.largest());
  if (lane == 0) {
    counts[threadIdx.x / 32] = count;
    mosts[threadIdx.x / 32] = own_most;
  }
  __syncthreads();
  const bool of_warp = lane < blockDim.x / 32;
  unsigned found = warp_sum(of_warp ? counts[lane] : 0), least = 1;  // found: keys of `least` or more
  const unsigned wanted = number < 0 ? 0 : number < found ? unsigned(number) : found;
  if (found > wanted && wanted) {
    if (const u64 last = last_pair(keys, wanted, warp_max(of_warp ? mosts[lane] : 0), bins, in_bin)) {
#pragma unroll Keys<HELD>::UNROLL
      for (int i = 0; i < HELD; ++i) f(i, keys.of[i] && keys.pair_of(i) >= last);
      return;
    }
  }
  __syncthreads();
  if (found > wanted) least = 0;
  for (int bit = 31; bit >= 0 && found > wanted; --bit) {
    const unsigned next = least | 1u << bit, from_next = block_total(keys.above(next - 1), bit & 1);
    if (from_next < wanted) continue;
    least = next;
    found = from_next;
  }
  __syncthreads();
  const unsigned left = found > wanted ? wanted - block_total(keys.above(least), 0) : 0;
  unsigned passed = 0;  // keys equal to `least` before
  constexpr int FOURS = Keys<HELD>::UNROLL / 4;
#pragma unroll FOURS
  for (int i = 0; i < HELD; i += 4) {
    unsigned equal = 0, next = 0;
    if (wanted && found > wanted) {
#pragma unroll
      for (int k = i; k < i + 4; ++k) equal += keys.of[k] == least;
      next = passed + block_before(equal);
      passed += block_total(equal, 0);
    }
#pragma unroll
    for (int k = i; k < i + 4; ++k) {
      bool chosen = wanted && keys.of[k] >= least;
      if (chosen && found > wanted && keys.of[k] == least) chosen = next++ < left;
      f(k, chosen);
    }
  }
}

// A block for each row.
template <typename T, int HELD>
__global__ void __launch_bounds__(1024)
choose_largest(const T* values, const int* allowed, const int* numbers, int* chosen, i64 count) {
  const i64 n = blockIdx.x, start = n * count;
  const Keys<HELD> keys(count, [=](i64 p) { return allowed[start + p] ? ordered(float(values[start + p])) : 0; });
  largest(keys, numbers[n], [=](int i, bool is) {
    const i64 p = keys.place(i);
    if (p < count) chosen[start + p] = is;
  });
}

// Rows of scores in shared memory, one for each thread, an odd number of words apart: threads read different banks.
struct Rows {
  float* words;
  unsigned count, pitch;
  Divisor by;
  __device__ Rows(float* words, i64 count, i64 ready) : words(words), count(count), pitch(count | 1), by(ready) {}
  __device__ float* row(unsigned r) const { return words + r * pitch; }
  // f(v, row, word) for the elements of pack p, those of the rows in turn.
  template <int V, typename F> __device__ void elements(unsigned p, F f) const {
    unsigned r = by.quotient(p * V), k = p * V - r * count;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      f(v, r, words[r * pitch + k]);
      if (++k == count) {
        k = 0;
        ++r;
      }
    }
  }
  // Reads the rows in packs of V elements, U of a thread at a time; zeros for a pack of rows none of which is wanted.
  template <int V, int U, typename T, typename F> __device__ void read(const T* x, unsigned rows, F wanted) const {
    const unsigned packs = rows * count / V;
    for (unsigned start = threadIdx.x; start < packs; start += U * blockDim.x) {
      Pack<T, V> got[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const unsigned p = start + u * blockDim.x;
        got[u] = {};
        if (p >= packs) continue;
        bool any = false;
        for (unsigned r = by.quotient(p * V); r <= by.quotient(p * V + V - 1); ++r) any |= wanted(r);
        if (any) got[u] = reinterpret_cast<const Pack<T, V>*>(x)[p];
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (start + u * blockDim.x < packs)
          elements<V>(start + u * blockDim.x, [&](int v, unsigned, float& word) { word = float(got[u].v[v]); });
    }
  }
  template <typename T> __device__ void read_all(const T* x, unsigned rows) const {
    const auto all = [](unsigned) { return true; };
    if (whole(x, rows))
      read<PACK, 6>(x, rows, all);
    else
      read<1, 4>(x, rows, all);
  }
  template <int V, typename T, typename F> __device__ void write(T* y, unsigned rows, F wanted) const {
    const unsigned packs = rows * count / V;
    for (unsigned p = threadIdx.x; p < packs; p += blockDim.x) {
      Pack<T, V> pack;
      elements<V>(p, [&](int v, unsigned r, const float& word) { pack.v[v] = wanted(r) ? T(word) : T(0); });
      reinterpret_cast<Pack<T, V>*>(y)[p] = pack;
    }
  }
  // Whether these rows are whole packs of 16 bytes.
  template <typename T> __device__ bool whole(const T* p, unsigned rows) const {
    return aligned(p, 16) && rows * count % PACK == 0;
  }
};

__device__ float maximum(const float* row, unsigned count) {
  float most = row[0];
  for (unsigned k = 1; k < count; ++k) most = fmaxf(most, row[k]);
  return most;
}

// -log(softmax at the label), at most that of the least normal float.
__device__ float class_loss(const float* row, unsigned count, int label, float least) {
  if (unsigned(label) >= count) return 0;  // a GPU goes on until the error of a wrong one is seen
  const float most = maximum(row, count);
  float sum = 0;
  for (unsigned k = 0; k < count; ++k) sum += expf(row[k] - most);
  const float share = expf(row[label] - most) / sum;
  return -logf(share > least || share != share ? share : least);
}

// f(index of a row of x, the row in shared memory), a thread a row.
template <typename T, typename F> __device__ void each_row(const T* x, const Rows& scores, i64 rows, F f) {
  for (i64 first = blockIdx.x * i64(blockDim.x); first < rows; first += gridDim.x * i64(blockDim.x)) {
    const unsigned here = unsigned(min(rows - first, i64(blockDim.x)));
    __syncthreads();
    scores.read_all(x + first * scores.count, here);
    __syncthreads();
    if (threadIdx.x < here) f(first + threadIdx.x, scores.row(threadIdx.x));
  }
}

template <typename T>
__global__ void class_losses(const T* x, const int* labels, T* losses, i64 rows, i64 count, i64 ready, double least) {
  extern __shared__ float words[];
  const Rows scores(words, count, ready);
  each_row(x, scores, rows, [&](i64 i, const float* row) { losses[i] = T(class_loss(row, scores.count, labels[i], float(least))); });
}

// The class of a box: that of its true box, or the background.
template <typename T>
__device__ int label_of(const T* truths, i64 match, i64 background, i64 one_class) {
  return int(match < 0 ? background : one_class ? background + 1 : i64(truths[8 * match + 1]));
}

// label_matches, location_losses and class_losses of boxes whose images share `boxes` priors.
template <typename T>
__global__ void box_losses(const T* x, const T* locations, const T* priors, const T* truths, const int* matches,
                           int* labels, T* of_location, T* of_class, i64 rows, i64 count, i64 ready, double least,
                           i64 boxes, i64 background, i64 one_class, i64 kind, i64 scaled, i64 square, i64 crossing) {
  extern __shared__ float words[];
  const Rows scores(words, count, ready);
  const LocationRule rule(kind, scaled, square, crossing);
  each_row(x, scores, rows, [&](i64 i, const float* row) {
    const int match = matches[i], label = label_of(truths, match, background, one_class);
    labels[i] = label;
    of_class[i] = T(class_loss(row, scores.count, label, float(least)));
    const i64 p = i - Place::quotient(i, boxes) * boxes;
    of_location[i] = T(match < 0 ? 0.0f : location_loss({locations + 4 * i, priors, truths, match, p, boxes}, rule));
  });
}

// match_boxes and box_losses of boxes whose images share `count` priors: first come blocks that match a tile of boxes each, then
// blocks that read `tall` rows of scores meanwhile. These take all their boxes for the background unless the matches of the image
// are known by then. If some did, the last block of the image to finish writes the losses of the boxes that have a match, which
// are in `lists` (images, room). `numbers` (3, images) are 0 before and after: blocks that have matched, boxes in the list, blocks
// that have finished, with SETTLED and UNSETTLED.
constexpr u64 SETTLED = 1u << 31, UNSETTLED = 1ull << 32;  // beside the blocks of an image that have finished

template <typename T>
__global__ void __launch_bounds__(TILE, 4)
match_with_losses(const T* x, const T* locations, const T* priors, const T* truths, int* matches, T* overlaps, int* counts,
                  int* labels, T* of_location, T* of_class, u64* tops, int* matched, u64* pairs, int* lists, u64* numbers, i64 room,
                  i64 images, i64 count, i64 known, i64 difficult, i64 inside, double threshold, i64 every, i64 classes,
                  i64 background, i64 any_class, double* bad_label, double* bad_box, i64 scores_of_row, i64 ready, i64 tall,
                  double least, i64 kind, i64 scaled, i64 square, i64 crossing) {
  extern __shared__ float words[];
  __shared__ u64 before;
  __shared__ int places[TILE];
  const int tiles = int((count + EACH * TILE - 1) / (EACH * TILE)), parts = int(count + tall - 1) / int(tall);
  const int all_tiles = tiles * int(images);
  const bool of_match = blockIdx.x < all_tiles;
  const int block = int(blockIdx.x) - (of_match ? 0 : all_tiles);
  const i64 n = block / (of_match ? tiles : parts);
  const Matched list{lists + n * room, numbers + images + n};
  u64* finished = numbers + 2 * images + n;
  const Rows scores(words, scores_of_row, ready);
  const LocationRule rule(kind, scaled, square, crossing);
  const auto met = [&](i64 p, int match) { return Met(locations + 4 * (n * count + p), priors, truths, match, p, count); };
  const auto lose = [&](i64 p, int match, auto find) {
    const i64 i = n * count + p;
    const int label = label_of(truths, match, background, any_class);
    labels[i] = label;
    of_class[i] = T(class_loss(scores.row(threadIdx.x), scores.count, label, float(least)));
    of_location[i] = T(match < 0 ? 0.0f : location_loss(find(), rule));
  };
  u64 done = 1;
  if (of_match) {
    if (!match_tile(n, block - n * tiles, tiles, list, priors, truths, matches, overlaps, counts, tops, matched, pairs, numbers, 0,
                    count, known, -1, difficult, inside, threshold, every, classes, background, any_class, bad_label, bad_box))
      return;
    done += SETTLED;
  } else {
    const i64 start = (block - n * parts) * tall, p = start + threadIdx.x;
    const unsigned here = unsigned(min(count - start, tall));
    const u64 known_by_now = threadIdx.x == 0 ? __ldcg(finished) : 0;  // on its way with the scores
    scores.read_all(x + (n * count + start) * scores_of_row, here);
    if (threadIdx.x == 0) {
      before = known_by_now;
      if (known_by_now & SETTLED) order_memory();
    }
    __syncthreads();
    const bool settled = before & SETTLED;
    const int match = settled && threadIdx.x < here ? __ldcg(matches + n * count + p) : -1;
    if (threadIdx.x < here) lose(p, match, [&] { return met(p, match); });
    if (!settled) done += UNSETTLED;
  }
  __syncthreads();
  if (threadIdx.x == 0) before = arrive(finished, done);
  __syncthreads();
  if ((before & (SETTLED - 1)) != parts) return;
  if ((before + done) / UNSETTLED) {
    int place = threadIdx.x < room ? __ldcg(list.boxes + threadIdx.x) : 0;  // on its way with the number of them
    const int found = int(__ldcg(list.number));
    for (int start = 0; start < found; start += int(tall)) {
      const int here = min(found - start, int(tall));
      const bool is = threadIdx.x < here;
      if (is && start) place = __ldcg(list.boxes + start + threadIdx.x);
      if (is) places[threadIdx.x] = place;
      __syncthreads();
      const int match = is ? __ldcg(matches + n * count + place) : 0;
#pragma unroll 8
      for (unsigned e = threadIdx.x; e < here * scores.count; e += TILE) {
        const unsigned row = scores.by.quotient(e), k = e - row * scores.count;
        scores.row(row)[k] = float(x[(n * count + places[row]) * scores_of_row + k]);
      }
      const Met box = is ? met(place, max(match, 0)) : Met();
      __syncthreads();
      if (is) lose(place, match, [&] { return box; });
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) *list.number = *finished = 0;
}

// Up to four of the rows that learn, of up to 32 scores each, by a warp: read, then their gradients written.
template <typename T> struct ShortRows {
  int rows[4];  // below 0: none
  float score[4];
  __device__ ShortRows(const T* x, unsigned& left, unsigned count) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      rows[r] = __ffs(left) - 1;
      left &= left - 1;
      score[r] = rows[r] >= 0 && lane < count ? float(x[rows[r] * count + lane]) : -__uint_as_float(0x7f800000u);
    }
  }
  __device__ void write(T* gradients, int label, unsigned count, float by) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (rows[r] < 0) return;
      const float most = warp_max(score[r]), share = lane < count ? expf(score[r] - most) : 0.0f, sum = warp_sum(share);
      const int own = __shfl_sync(0xffffffffu, label, rows[r]);
      if (lane < count) gradients[rows[r] * count + lane] = T(by * (share / sum - float(int(lane) == own)));
    }
  }
};

// Gradients of up to 32 rows few of which learn, by a warp, whose lanes know the label of a row each: those of the rows that
// learn, and zeros in packs around them, which are written while the first rows are on their way.
template <typename T>
__device__ void few_gradients(const T* x, T* gradients, unsigned here, int label, unsigned count, const Divisor& by_count, float by) {
  const unsigned lane = threadIdx.x % 32, learn = __ballot_sync(0xffffffffu, label >= 0);
  unsigned left = count <= 32 ? learn : 0;
  ShortRows<T> first(x, left, count);
  const unsigned all = here * count, whole = aligned(gradients, 16) ? all / PACK * PACK : 0;
  for (unsigned i = lane * PACK; i < whole; i += 32 * PACK) {
    const unsigned row = by_count.quotient(i), behind = by_count.quotient(i + PACK - 1) - row;
    const unsigned rows = (2u << behind) - 1, of = learn >> row & rows;
    if (!of)
      *reinterpret_cast<Pack<T, PACK>*>(gradients + i) = {};
    else if (of != rows)
      for (unsigned v = i; v < i + PACK; ++v)
        if (!(learn >> by_count.quotient(v) & 1)) gradients[v] = T(0);
  }
  for (unsigned v = whole + lane; v < all; v += 32)
    if (!(learn >> by_count.quotient(v) & 1)) gradients[v] = T(0);
  if (count <= 32) {
    if (learn) first.write(gradients, label, count, by);
    while (left) ShortRows<T>(x, left, count).write(gradients, label, count, by);
    return;
  }
  for (left = learn; left; left &= left - 1) {
    const int r = __ffs(left) - 1, own = __shfl_sync(0xffffffffu, label, r);
    const T* row = x + r * count;
    float most = -__uint_as_float(0x7f800000u), sum = 0;
    for (unsigned k = lane; k < count; k += 32) most = fmaxf(most, float(row[k]));
    most = warp_max(most);
    for (unsigned k = lane; k < count; k += 32) sum += expf(float(row[k]) - most);
    sum = warp_sum(sum);
    for (unsigned k = lane; k < count; k += 32)
      gradients[r * count + k] = T(by * (expf(float(row[k]) - most) / sum - float(int(k) == own)));
  }
}

// Gradients of the rows of a block from x and `gradients` on, a thread a row with its label. If many learn, in shared memory:
// scores are read for rows alone that have a label. All threads of the block come here.
template <typename T>
__device__ void row_gradients(const T* x, T* gradients, unsigned here, int label, const Rows& scores, float by) {
  int* of = reinterpret_cast<int*>(scores.words + blockDim.x * scores.pitch);
  of[threadIdx.x] = label;
  const unsigned learners = __syncthreads_count(label >= 0);
  if (learners * 6 <= here) {
    const unsigned first = threadIdx.x / 32 * 32;
    if (first < here)
      few_gradients(x + first * scores.count, gradients + first * scores.count, min(here - first, 32u), label, scores.count, scores.by, by);
    __syncthreads();
    return;
  }
  const auto learns = [=](unsigned r) { return of[r] >= 0; };
  const bool whole = scores.whole(x, here) && aligned(gradients, 16);
  if (whole)
    scores.read<PACK, 6>(x, here, learns);
  else
    scores.read<1, 4>(x, here, learns);
  __syncthreads();
  if (label >= 0) {
    float* row = scores.row(threadIdx.x);
    const float most = maximum(row, scores.count);
    float sum = 0;
    for (unsigned k = 0; k < scores.count; ++k) sum += row[k] = expf(row[k] - most);
    for (unsigned k = 0; k < scores.count; ++k) row[k] = by * (row[k] / sum - float(int(k) == label));
  }
  __syncthreads();
  if (whole)
    scores.write<PACK>(gradients, here, learns);
  else
    scores.write<1>(gradients, here, learns);
  __syncthreads();
}

template <typename T>
__global__ void class_gradients(const T* x, const int* labels, const T* factor, T* gradients, i64 rows, i64 count,
                                i64 ready) {
  extern __shared__ float words[];
  const Rows scores(words, count, ready);
  const float by = float(*factor);
  for (i64 first = blockIdx.x * i64(blockDim.x); first < rows; first += gridDim.x * i64(blockDim.x)) {
    const unsigned here = unsigned(min(rows - first, i64(blockDim.x)));
    const int label = threadIdx.x < here ? labels[first + threadIdx.x] : -1;
    row_gradients(x + first * count, gradients + first * count, here, label, scores, by);
  }
}

// location_gradients and class_gradients of boxes whose images share `boxes` priors. One block writes the gradients of the
// locations of SHARE rows a thread, SHARE blocks those of the scores of one row a thread. The former come first, since they wait
// for one read after the other, and are few, since each takes the place of one of the others. The factors are dloss / norm, that
// of locations `weight` times as large.
constexpr int SHARE = 16, PART = 8;  // PART: rows on their way at once

template <typename T>
__global__ void __launch_bounds__(128, 10)
box_gradients(const T* x, const T* locations, const T* priors, const T* truths, const int* matches, const int* labels,
              const T* dloss, const T* norm, T* to_locations, T* gradients, i64 rows, i64 count, i64 ready, double weight,
              i64 boxes, i64 kind, i64 scaled, i64 square, i64 crossing) {
  extern __shared__ float words[];
  const Rows scores(words, count, ready);
  const LocationRule rule(kind, scaled, square, crossing);
  // A quotient taken ahead of a loop would be waited for before the first rows are on their way.
  const auto stay = [] { asm volatile("" ::: "memory"); };
  const i64 threads = blockDim.x;
  const int groups = int(gridDim.x) / (1 + SHARE), behind = int(blockIdx.x) - groups;
  if (behind >= 0) {
    for (i64 k = behind; k * threads < rows; k += groups * SHARE) {
      stay();
      const i64 first = k * threads;
      const unsigned here = unsigned(min(rows - first, threads));
      const int label = threadIdx.x < here ? labels[first + threadIdx.x] : -1;
      row_gradients(x + first * count, gradients + first * count, here, label, scores, float(*dloss) / float(*norm));
    }
    return;
  }
  for (i64 start = blockIdx.x * SHARE * threads + threadIdx.x; start - threadIdx.x < rows; start += groups * SHARE * threads) {
    stay();
    const float of_loss = float(*dloss), of_norm = float(*norm);
    unsigned matched = 0;  // a bit for each of the rows
#pragma unroll 1
    for (int first = 0; first < SHARE; first += PART) {
      int match[PART];
#pragma unroll
      for (int e = 0; e < PART; ++e) {
        const i64 i = start + (first + e) * threads;
        match[e] = i < rows ? matches[i] : -1;
      }
#pragma unroll
      for (int e = 0; e < PART; ++e) {
        const i64 i = start + (first + e) * threads;
        if (match[e] >= 0)
          matched |= 1u << (first + e);
        else if (i < rows)
          write_four(to_locations + 4 * i, {0, 0, 0, 0});
      }
    }
    for (; matched; matched &= matched - 1) {
      const i64 i = start + (__ffs(matched) - 1) * threads, p = i - Place::quotient(i, boxes) * boxes;
      float d[4];
      location_gradient({locations + 4 * i, priors, truths, matches[i], p, boxes}, rule, of_loss / of_norm * float(weight), d);
      write_four(to_locations + 4 * i, d);
    }
  }
}

// Rows too long for that, a warp each.
template <typename T> __device__ float long_maximum(const T* row, i64 count) {
  float most = float(row[0]);
  for (i64 k = threadIdx.x % 32; k < count; k += 32) most = fmaxf(most, float(row[k]));
  return warp_max(most);
}

template <typename T> __device__ float long_total(const T* row, i64 count, float most) {
  float sum = 0;
  for (i64 k = threadIdx.x % 32; k < count; k += 32) sum += expf(float(row[k]) - most);
  return warp_sum(sum);
}

template <typename T> __device__ float long_class_loss(const T* row, i64 count, i64 label, float least) {
  if (label < 0 || label >= count) return 0;
  const float most = long_maximum(row, count), sum = long_total(row, count, most);
  const float share = expf(float(row[label]) - most) / sum;
  return -logf(share > least || share != share ? share : least);
}

template <typename T>
__global__ void long_class_losses(const T* x, const int* labels, T* losses, i64 rows, i64 count, double least) {
  for (i64 r = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; r < rows; r += gridDim.x * i64(blockDim.x) / 32) {
    const float loss = long_class_loss(x + r * count, count, labels[r], float(least));
    if (threadIdx.x % 32 == 0) losses[r] = T(loss);
  }
}

template <typename T>
__global__ void long_class_gradients(const T* x, const int* labels, const T* factor, T* gradients, i64 rows, i64 count) {
  const float by = float(*factor);
  for (i64 r = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; r < rows; r += gridDim.x * i64(blockDim.x) / 32) {
    const T* row = x + r * count;
    const i64 label = labels[r];
    const float most = label < 0 ? 0 : long_maximum(row, count), sum = label < 0 ? 1 : long_total(row, count, most);
    for (i64 k = threadIdx.x % 32; k < count; k += 32) {
      const float share = label < 0 ? 0 : expf(float(row[k]) - most) / sum;
      gradients[r * count + k] = T(by * (share - float(k == label)));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(1024)
check_truths(const T* rows, i64 known, i64 difficult, i64 classes, i64 background, i64 any_class, double* bad_label,
             double* bad_box) {
  Truths<T>{rows, known, -1, difficult}.check(classes, background, any_class, bad_label, bad_box);
}

// The class of each box: that of its true box in the last of `groups` that has one, or the background.
template <typename T>
__global__ void label_matches(const T* rows, const int* matches, int* labels, i64 images, i64 groups, i64 count,
                              i64 background, i64 one_class) {
  FOR_EACH(i, images * count) {
    const i64 n = i / count, p = i - n * count;
    i64 last = -1;
    for (i64 c = 0; c < groups; ++c) {
      const int match = matches[(n * groups + c) * count + p];
      if (match >= 0) last = match;
    }
    labels[i] = label_of(rows, last, background, one_class);
  }
}

// Four elements of an array from p on, of which those behind `count` are not read; WHOLE: all are there or none, in one pack.
template <bool WHOLE, typename T> __device__ Pack<T, 4> read_up_to(const T* from, int p, int count) {
  Pack<T, 4> four;
  if constexpr (WHOLE) {
    if (p < count) four = *reinterpret_cast<const Pack<T, 4>*>(from + p);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (p + k < count) four.v[k] = from[p + k];
  }
  return four;
}

template <bool V> struct Constant { static constexpr bool value = V; };

// A block for each image: boxes without a match keep the label of the background if they are among those with the
// largest losses, `ratio` as many as there are matches, of those that overlap less than `most`; else they get -1.
// visit(place of a box) of every box with a match, then taken(loss) of those that keep the label.
template <int HELD, typename T, typename V, typename F>
__device__ void mine_image(const T* losses, const int* matches, const T* overlaps, const int* counts, int* labels, i64 boxes,
                           double ratio, double most, V visit, F taken) {
  constexpr bool FEW = HELD <= 32;              // a bit for each box of a thread
  constexpr int AHEAD = HELD <= 12 ? HELD : 4;  // on their way at once
  const i64 n = blockIdx.x;
  const int count = int(boxes), any = counts[2 * n], known = counts[2 * n + 1];  // on their way with the boxes
  losses += n * boxes;
  matches += n * boxes;
  overlaps += n * boxes;
  labels += n * boxes;
  const float below = float(most);
  unsigned drops = 0, keeps = 0;  // boxes without a match, and those of them that keep the label
  Keys<HELD> keys;
  const auto fill = [&](auto whole) {
#pragma unroll Keys<HELD>::UNROLL
    for (int i = 0; i < HELD; i += AHEAD) {
      Pack<T, 4> loss[AHEAD / 4], overlap[AHEAD / 4];
      Pack<int, 4> match[AHEAD / 4];
      unsigned matched = 0;  // a bit for each of these
#pragma unroll
      for (int g = 0; g < AHEAD / 4; ++g) {
        const int p = keys.place(i + 4 * g);
        match[g] = read_up_to<whole.value>(matches, p, count);
        loss[g] = read_up_to<whole.value>(losses, p, count);
        overlap[g] = read_up_to<whole.value>(overlaps, p, count);
      }
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        const int at = i + k, g = k / 4, e = k % 4;
        const bool there = keys.place(whole.value ? at - e : at) < count, is = there && match[g].v[e] >= 0;
        const bool may = there && match[g].v[e] == -1 && float(overlap[g].v[e]) < below;
        keys.of[at] = may ? ordered(float(loss[g].v[e])) : 0u;
        if (is) matched |= 1u << k;
        if (FEW && there && !is) drops |= 1u << at % 32;
      }
      for (; matched; matched &= matched - 1) visit(keys.place(i + __ffs(matched) - 1));
    }
  };
  const bool packs = aligned(losses, sizeof(Pack<T, 4>)) && aligned(overlaps, sizeof(Pack<T, 4>)) && aligned(matches, 16);
  if (packs && count % 4 == 0)
    fill(Constant<true>());
  else
    fill(Constant<false>());
  const i64 number = any > 0 ? i64(__fmul_rn(float(known), float(ratio))) : 0;
  largest(keys, number, [&](int i, bool is) {
    const int p = keys.place(i);
    if (FEW)
      keeps |= unsigned(is) << i % 32;
    else if (is)
      taken(float(losses[p]));
    else if (p < count && matches[p] < 0)
      labels[p] = -1;
  });
  drops &= ~keeps;
  for (; keeps; keeps &= keeps - 1) taken(float(losses[keys.place(__ffs(keeps) - 1)]));
#pragma unroll
  for (int i = 0; FEW && i < HELD; i += 4) {
    const unsigned four = drops >> i % 32 & 15;
    int* to = labels + keys.place(i);
    if (four == 15 && aligned(to, 16)) {
      *reinterpret_cast<Pack<int, 4>*>(to) = {-1, -1, -1, -1};
    } else if (four) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (four >> k & 1) to[k] = -1;
    }
  }
}

template <typename T, int HELD>
__global__ void __launch_bounds__(1024)
mine_negatives(const T* losses, const int* matches, const T* overlaps, const int* counts, int* labels, i64 count,
               double ratio, double most) {
  mine_image<HELD>(losses, matches, overlaps, counts, labels, count, ratio, most, [](int) {}, [](float) {});
}

// loss = (by_location * sum of location losses of matches + by_class * sum of class losses of labels) / norm, the norm
// the number of matches, or the divisor unless that is below 0
template <typename T> __device__ void divide_multibox(double sum, double count, double divisor, T* norm, T* loss) {
  const double by = divisor >= 0 ? divisor : count > 1 ? count : 1;
  *norm = T(by);
  *loss = T(sum / by);
}

template <typename T>
__global__ void multibox_loss(const T* location, const int* matches, const T* of_class, const int* labels, T* norm,
                              T* loss, i64 places, i64 count, double by_location, double by_class, double divisor,
                              double* partial, u64* arrived) {
  Found found;
  FOR_EACH(i, places) {
    if (matches[i] >= 0) {
      found.sum += by_location * double(location[i]);
      found.count += 1;
    }
    if (i < count && labels[i] >= 0) found.sum += by_class * double(of_class[i]);
  }
  if (concludes(found, partial, arrived)) divide_multibox(found.sum, found.count, divisor, norm, loss);
}

// The same after mine_negatives, of boxes with one match each, a block for each image; matches have a label. `partial`
// (2, images): sums and numbers of matches, which the last block adds up.
template <typename T, int HELD>
__global__ void __launch_bounds__(1024)
mined_multibox_loss(const T* location, const int* matches, const T* of_class, int* labels, const T* overlaps,
                    const int* counts, T* norm, T* loss, i64 count, double ratio, double most, double by_location,
                    double by_class, double divisor, double* partial, u64* arrived) {
  __shared__ double sums[32];
  __shared__ unsigned numbers[32];
  double sum = 0;
  unsigned number = 0;
  const i64 start = blockIdx.x * count;
  const auto visit = [&](int p) {
    sum += by_location * double(location[start + p]) + by_class * double(float(of_class[start + p]));
    ++number;
  };
  const auto taken = [&](float of_box) { sum += by_class * double(of_box); };
  mine_image<HELD>(of_class, matches, overlaps, counts, labels, count, ratio, most, visit, taken);
  const int lane = threadIdx.x % 32, images = gridDim.x;
  sum = warp_sum(sum);
  number = warp_sum(number);
  if (lane == 0) {
    sums[threadIdx.x / 32] = sum;
    numbers[threadIdx.x / 32] = number;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const bool there = lane < blockDim.x / 32;
  sum = warp_sum(there ? sums[lane] : 0.0);
  double all = warp_sum(there ? numbers[lane] : 0u);
  bool last = false;
  if (lane == 0) {
    partial[blockIdx.x] = sum;
    partial[images + blockIdx.x] = all;
    last = arrive(arrived, 1) == images - 1;
  }
  if (!__any_sync(0xffffffffu, last)) return;
  sum = all = 0;
  for (int n = lane; n < images; n += 32) {
    sum += __ldcg(partial + n);
    all += __ldcg(partial + images + n);
  }
  sum = warp_sum(sum);
  all = warp_sum(all);
  if (lane > 0) return;
  *arrived = 0;
  divide_multibox(sum, all, divisor, norm, loss);
}

// Boxes of an image and class with the best scores, the best first, in shared memory.
constexpr int BEST = 1024;

// Of `candidates` boxes, taken in turn, those that overlap no earlier one of the kept by more than the threshold, which
// falls by eta with each while it is above 1/2. 32 at a time: the block compares them with those kept before, then a
// warp takes them in turn. place(c) is that of candidate c.
template <typename T, typename Place>
__device__ int keep_apart(const T* boxes, const T* scores, i64 classes, int candidates, Place place, double threshold,
                          double eta, T* kept) {
  __shared__ unsigned most[32];
  __shared__ int shared_known;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float limit = float(threshold);
  int known = 0;
  for (int start = 0; start < candidates; start += 32) {
    const bool is = start + lane < candidates;
    const i64 p = is ? place(start + lane) : 0;
    const Box box(boxes + 4 * p);
    if (warp == 0) most[lane] = 0;
    __syncthreads();
    unsigned largest = 0;
    for (int j = warp; j < known; j += warps) {
      const float both = overlap(box, Box(kept + 5 * j + 1));
      if (both > 0) largest = max(largest, __float_as_uint(both));
    }
    if (largest) atomicMax(&most[lane], largest);
    __syncthreads();
    if (warp == 0) {
      float overlapped = __uint_as_float(most[lane]);
      int mine = -1;
      for (int c = 0; c < 32 && start + c < candidates; ++c) {
        if (__shfl_sync(0xffffffffu, overlapped, c) > limit) continue;
        Box other = box;
        for (float& v : other.v) v = __shfl_sync(0xffffffffu, v, c);
        const float both = overlap(box, other);
        if (both > overlapped) overlapped = both;
        if (lane == c) mine = known;
        ++known;
        if (float(eta) < 1 && limit > 0.5f) limit = __fmul_rn(limit, float(eta));
      }
      if (mine >= 0) {
        kept[5 * mine] = scores[p * classes];
        for (int k = 0; k < 4; ++k) kept[5 * mine + 1 + k] = T(box.v[k]);
      }
      if (lane == 0) shared_known = known;
    }
    __syncthreads();
    known = shared_known;
  }
  return known;
}

// A block for each image and class: the best of its boxes, at most `most`, up to BEST, in the order of scores, then those
// apart.
template <typename T, int HELD>
__global__ void __launch_bounds__(1024, 1)
detect(const T* boxes, const T* scores, T* found, int* counts, i64 groups, i64 count, i64 classes, i64 most,
       i64 background, double least, double threshold, double eta) {
  __shared__ u64 best[BEST], sorted[BEST];
  __shared__ int number;
  const i64 row = blockIdx.x, n = row / classes, k = row % classes;
  if (k == background) {
    if (threadIdx.x == 0) counts[row] = 0;
    return;
  }
  const T* of_class = scores + n * count * classes + k;
  if (threadIdx.x == 0) number = 0;
  const Keys<HELD> keys(count, [=](i64 p) {
    const float score = float(of_class[p * classes]);
    return score > float(least) ? ordered(score) : 0;
  });
  largest(keys, most, [&](int i, bool is) {
    if (is) best[atomicAdd(&number, 1)] = keys.pair_of(i);
  });
  __syncthreads();
  for (int c = threadIdx.x; c < number; c += blockDim.x) {
    int before = 0;
    for (int j = 0; j < number; ++j) before += best[j] > best[c];
    sorted[before] = best[c];
  }
  __syncthreads();
  const T* of_boxes = boxes + (n * groups + (groups > 1 ? k : 0)) * count * 4;
  const auto place = [&](int c) { return place_of(sorted[c]); };
  const int known = keep_apart(of_boxes, of_class, classes, number, place, threshold, eta, found + row * most * 5);
  if (threadIdx.x == 0) counts[row] = known;
}

// The same of boxes that are sorted already: `numbers` places in `order`.
template <typename T>
__global__ void __launch_bounds__(1024)
detect_sorted(const T* boxes, const T* scores, const i64* order, const int* numbers, T* found, int* counts, i64 groups,
              i64 count, i64 classes, i64 most, i64 background, double threshold, double eta) {
  const i64 row = blockIdx.x, n = row / classes, k = row % classes;
  const T *of_boxes = boxes + (n * groups + (groups > 1 ? k : 0)) * count * 4, *of_class = scores + n * count * classes + k;
  const auto place = [=](int c) { return order[row * most + c]; };
  const int candidates = k == background ? 0 : numbers[row];
  const int known = keep_apart(of_boxes, of_class, classes, candidates, place, threshold, eta, found + row * most * 5);
  if (threadIdx.x == 0) counts[row] = known;
}

// Boxes of detectors (SSD): xmin, ymin, xmax, ymax, in units of the image. Reckoned in float, each operation rounded by
// itself, as on the CPU: which box is matched must not depend on it. Formulas in Ops.decode_boxes, match_boxes,
// location_losses.

#include "pack.cuh"
#include "reduce.cuh"
#include "block_reduce.cuh"
#include "flags.cuh"

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

template <typename T>
__global__ void decode_boxes(const T* locations, const T* priors, T* boxes, i64 images, i64 classes, i64 count, i64 kind,
                             i64 scaled) {
  FOR_EACH(i, images * classes * count) {
    const Place at(i, classes, count);
    const T* x = locations + ((at.outer * count + at.inner) * classes + at.middle) * 4;
    const i64 p = at.inner;
    write_four(boxes + 4 * i, decoded(x, priors + 4 * p, priors + 4 * (count + p), kind, scaled).v);
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

// The larger of two pairs: overlap, then the earlier box, in one word; 0 is none.
__device__ u64 pair(unsigned both, i64 place) { return u64(both) << 32 | (0xffffffffu - unsigned(place)); }
__device__ i64 place_of(u64 found) { return i64(0xffffffffu - unsigned(found)); }

constexpr int TILE = 256;  // threads of compare_boxes, and true boxes that it takes at a time

// Blocks (of boxes, of images), a thread a box: -2 where it crosses the edge and that leaves it out, with `every` the
// true box of the image that it overlaps most, the threshold or more, else -1; and its largest overlap. `best` gets the
// best pair of each true box, and after those the number of matches of each image; they start at 0.
template <typename T>
__global__ void __launch_bounds__(TILE)
compare_boxes(const T* boxes, const T* rows, int* matches, T* overlaps, u64* best, i64 own, i64 count, i64 known,
              i64 label, i64 difficult, i64 inside, double threshold, i64 every) {
  __shared__ float corners[TILE][4];
  __shared__ int row_of[TILE];
  __shared__ u64 top[TILE];
  const Truths<T> truths{rows, known, label, difficult};
  const i64 n = blockIdx.y, p = blockIdx.x * i64(TILE) + threadIdx.x, i = n * count + p;
  const i64 readable = min(p, count - 1);
  const Box a(boxes + 4 * (own ? n * count + readable : readable));
  const bool crosses = inside && a.crosses(), may = p < count && !crosses;
  float largest = LEAST;
  int at = -1;
  bool any = false;
  for (i64 start = 0; start < known; start += TILE) {
    const i64 t = start + threadIdx.x;
    const bool mine = t < known && truths.of(t, n) && truths.wanted(t);
    const Rank rank(mine);
    if (mine) {
      const Box truth = truths.box(t);
      for (int k = 0; k < 4; ++k) corners[rank.before][k] = truth.v[k];
      row_of[rank.before] = int(t);
      top[rank.before] = 0;
    }
    __syncthreads();
    any |= rank.all > 0;
    for (unsigned k = 0; k < rank.all; ++k) {
      const float both = may ? overlap(a, Box(corners[k])) : 0.0f;
      if (both > largest) {
        largest = both;
        at = row_of[k];
      }
      const unsigned bits = both > LEAST ? __float_as_uint(both) : 0, most = warp_max(bits);
      const unsigned first = __ffs(__ballot_sync(0xffffffffu, bits == most)) - 1;
      if (most && threadIdx.x % 32 == first) atomicMax(&top[k], pair(most, p));
    }
    __syncthreads();
    if (threadIdx.x < rank.all && top[threadIdx.x]) atomicMax(best + row_of[threadIdx.x], top[threadIdx.x]);
    __syncthreads();
  }
  const bool matched = every && at >= 0 && largest >= float(threshold);
  if (p < count) {
    matches[i] = crosses && any ? -2 : matched ? at : -1;
    overlaps[i] = T(at < 0 ? 0.0f : largest);
  }
  const int found = __syncthreads_count(matched);
  if (threadIdx.x == 0 && found) atomicAdd(best + known + n, u64(found));
}

// What match_pairs knows of the true boxes of its image: their rows, best pairs, and the pairs that they have got.
struct Pairs {
  u64 *best, *got;
  int* row;
};

// Whether a box is none of those that are got.
__device__ bool is_free(const Pairs& pairs, i64 own, i64 place) {
  for (i64 k = 0; k < own; ++k)
    if (pairs.got[k] && place_of(pairs.got[k]) == place) return false;
  return true;
}

// A block for each image: the best pair of those left, as long as there is one. `pairs` (images, known, 3) is for more
// true boxes than shared memory has room for.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
match_pairs(const T* boxes, const T* rows, int* matches, T* overlaps, const u64* best, u64* pairs, int* counts, i64 own,
            i64 count, i64 known, i64 label, i64 difficult, i64 inside) {
  constexpr int ROOM = 1024, U = 3;  // U: boxes of a thread on their way
  __shared__ u64 room[2][ROOM];
  __shared__ int room_of_rows[ROOM];
  const Truths<T> truths{rows, known, label, difficult};
  const i64 n = blockIdx.x;
  const int lane = threadIdx.x % 32;
  boxes += own ? 4 * n * count : 0;
  matches += n * count;
  overlaps += n * count;
  pairs += 3 * n * known;
  const bool fits = known <= ROOM;
  const Pairs of{fits ? room[0] : pairs, fits ? room[1] : pairs + known,
                 fits ? room_of_rows : reinterpret_cast<int*>(pairs + 2 * known)};
  i64 mine = 0;  // true boxes of this image that are wanted
  int any = 0;
  for (i64 start = 0; start < known; start += blockDim.x) {
    const i64 t = start + threadIdx.x;
    const bool here = t < known && truths.of(t, n), wanted = here && truths.wanted(t);
    any += __syncthreads_count(here);
    const Rank rank(wanted);
    if (wanted) {
      const i64 k = mine + rank.before;
      of.row[k] = int(t);
      of.best[k] = best[t];
      of.got[k] = 0;
    }
    mine += rank.all;
  }
  __syncthreads();
  while (true) {
    u64 most = 0;  // each warp finds it for itself
    for (i64 k = lane; k < mine; k += 32) most = max(most, of.best[k]);
    most = warp_max(most);
    if (!most) break;
    unsigned first = 0xffffffffu;  // of the true boxes with this pair
    for (i64 k = lane; k < mine; k += 32)
      if (of.best[k] == most) first = min(first, unsigned(k));
    first = 0xffffffffu - warp_max(0xffffffffu - first);
    __syncthreads();
    if (threadIdx.x == 0) {
      of.got[first] = most;
      of.best[first] = 0;
    }
    __syncthreads();
    for (i64 start = 0; start < mine; start += 32) {  // those whose best is gone look for another
      const i64 k = start + lane;
      const bool lost = k < mine && of.best[k] && place_of(of.best[k]) == place_of(most);
      for (unsigned left = __ballot_sync(0xffffffffu, lost); left; left &= left - 1) {
        const i64 truth = start + __ffs(left) - 1;
        const Box b = truths.box(of.row[truth]);
        u64 found = 0;
        for (i64 start = threadIdx.x; start < count; start += U * blockDim.x) {
          float both[U];
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const i64 p = start + u * blockDim.x;
            const Box a(boxes + 4 * min(p, count - 1));
            both[u] = p < count && !(inside && a.crosses()) ? overlap(a, b) : 0.0f;
          }
#pragma unroll
          for (int u = 0; u < U; ++u) {
            if (!(both[u] > LEAST)) continue;
            const i64 p = start + u * blockDim.x;
            const u64 next = pair(__float_as_uint(both[u]), p);
            if (next > found && is_free(of, mine, p)) found = next;
          }
        }
        found = block_max(found);
        if (threadIdx.x == 0) of.best[truth] = found;
      }
    }
    __syncthreads();
  }
  int added = 0;
  for (i64 start = 0; start < mine; start += blockDim.x) {
    const i64 k = start + threadIdx.x;
    const u64 got = k < mine ? of.got[k] : 0;
    const i64 place = place_of(got);
    added += __syncthreads_count(got && matches[place] == -1);
    if (got) {
      matches[place] = of.row[k];
      overlaps[place] = T(__uint_as_float(unsigned(got >> 32)));
    }
  }
  if (threadIdx.x == 0) {
    counts[2 * n] = any;
    counts[2 * n + 1] = int(best[known + n]) + added;
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
    float loss = 0, d[4];
    if (matches[i] >= 0) {
      const Place at(i, classes, count);
      const i64 p = at.inner;
      const T* x = locations + ((at.outer * count + p) * classes + at.middle) * 4;
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
    const Place at(i, count, classes);
    const i64 p = at.middle;
    const int match = matches[(at.outer * classes + at.inner) * count + p];
    float d[4] = {0, 0, 0, 0};
    if (match >= 0) {
      const T* truth = truths + 8 * i64(match) + 3;
      differences(locations + 4 * i, priors + 4 * p, priors + 4 * (count + p), truth, kind, scaled, crossing, d);
    }
    for (float& v : d) v = by * (square ? v : fmaxf(-1.0f, fminf(v, 1.0f)));
    write_four(gradients + 4 * i, d);
  }
}

// Larger floats have larger keys, none of them 0; -0 has that of 0.
__device__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
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

// Keys of a row, of which element i of a thread is that at place i * blockDim.x + threadIdx.x; 0 for what cannot be chosen.
template <int HELD> struct Keys {
  static constexpr int UNROLL = HELD <= 64 ? HELD : 4;
  unsigned of[HELD];
  template <typename F> __device__ Keys(i64 count, F key) {
#pragma unroll UNROLL
    for (int i = 0; i < HELD; ++i) {
      const i64 p = i * i64(blockDim.x) + threadIdx.x;
      of[i] = p < count ? key(p) : 0;
    }
  }
  __device__ u64 pair_of(int i) const { return pair(of[i], i * i64(blockDim.x) + threadIdx.x); }
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

// Bit by bit a word that `wanted` threads of a block reach, or more that have the same; 0 if there are not so many.
__device__ unsigned reached(unsigned x, unsigned wanted) {
  unsigned least = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const unsigned next = least | 1u << bit, found = __syncthreads_count(x >= next);
    if (found < wanted) continue;
    least = next;
    if (found == wanted) break;
  }
  return least;
}

// The pair of key and place that the `wanted` largest reach, of those keys that are `least` or more: no more than there are
// threads.
template <int HELD> __device__ u64 last_pair(const Keys<HELD>& keys, unsigned least, unsigned count, unsigned wanted) {
  __shared__ u64 pairs[1024];
  __shared__ unsigned filled;
  if (threadIdx.x == 0) filled = 0;
  __syncthreads();
#pragma unroll Keys<HELD>::UNROLL
  for (int i = 0; i < HELD; ++i)
    if (keys.of[i] >= least) pairs[atomicAdd(&filled, 1)] = keys.pair_of(i);
  __syncthreads();
  const u64 own = threadIdx.x < count ? pairs[threadIdx.x] : 0;
  const unsigned key = unsigned(own >> 32), last = reached(key, wanted);
  const unsigned above = __syncthreads_count(key > last), equal = __syncthreads_count(key == last);
  const unsigned place = above + equal > wanted ? reached(key == last ? unsigned(own) : 0, wanted - above) : 0;
  return max(u64(last) << 32 | place, u64(least) << 32);
}

// f(element, whether it is one of the `number` largest, of equal ones the first). As many threads as are wanted reach a
// key with their largest; those that reach it at all are few, and a thread each finds out which of them are wanted. Where they
// are more than threads: bit by bit the largest key from which on there are as many; if there are more, only the first
// of those with this key count.
template <int HELD, typename F> __device__ void largest(const Keys<HELD>& keys, i64 number, F f) {
  unsigned found = block_total(keys.above(0), 0), least = 1;  // found: keys of `least` or more
  const unsigned wanted = number < 0 ? 0 : number < found ? unsigned(number) : found;
  if (found > wanted && wanted) {
    const unsigned near = wanted <= blockDim.x ? reached(keys.largest(), wanted) : 0;
    const unsigned few = near ? block_total(keys.above(near - 1), 1) : found;
    if (few <= blockDim.x) {
      const u64 last = last_pair(keys, max(near, 1u), few, wanted);
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
#pragma unroll Keys<HELD>::UNROLL
  for (int i = 0; i < HELD; ++i) {
    bool chosen = wanted && keys.of[i] >= least;
    if (wanted && found > wanted) {
      const bool equal = keys.of[i] == least;
      const Rank rank(equal);
      chosen = keys.of[i] > least || (equal && passed + rank.before < left);
      passed += rank.all;
    }
    f(i, chosen);
  }
}

// A block for each row.
template <typename T, int HELD>
__global__ void __launch_bounds__(1024)
choose_largest(const T* values, const int* allowed, const int* numbers, int* chosen, i64 count) {
  const i64 n = blockIdx.x, start = n * count;
  const Keys<HELD> keys(count, [=](i64 p) { return allowed[start + p] ? ordered(float(values[start + p])) : 0; });
  largest(keys, numbers[n], [=](int i, bool is) {
    const i64 p = i * i64(blockDim.x) + threadIdx.x;
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
template <typename T>
__global__ void class_losses(const T* x, const int* labels, T* losses, i64 rows, i64 count, i64 ready, double least) {
  extern __shared__ float words[];
  const Rows scores(words, count, ready);
  for (i64 first = blockIdx.x * i64(blockDim.x); first < rows; first += gridDim.x * i64(blockDim.x)) {
    const unsigned here = unsigned(min(rows - first, i64(blockDim.x)));
    const auto all = [](unsigned) { return true; };
    const T* from = x + first * count;
    __syncthreads();
    if (scores.whole(from, here))
      scores.read<PACK, 6>(from, here, all);
    else
      scores.read<1, 4>(from, here, all);
    __syncthreads();
    if (threadIdx.x >= here) continue;
    const int label = labels[first + threadIdx.x];
    float loss = 0;
    if (unsigned(label) < scores.count) {  // a GPU goes on until the error of a wrong one is seen
      const float* row = scores.row(threadIdx.x);
      const float most = maximum(row, scores.count);
      float sum = 0;
      for (unsigned k = 0; k < scores.count; ++k) sum += expf(row[k] - most);
      const float share = expf(row[label] - most) / sum;
      loss = -logf(share > float(least) || share != share ? share : float(least));
    }
    losses[first + threadIdx.x] = T(loss);
  }
}

// Scores are read for rows alone that have a label.
template <typename T>
__global__ void class_gradients(const T* x, const int* labels, const T* factor, T* gradients, i64 rows, i64 count,
                                i64 ready) {
  extern __shared__ float words[];
  const Rows scores(words, count, ready);
  int* of = reinterpret_cast<int*>(words + blockDim.x * scores.pitch);
  const float by = float(*factor);
  for (i64 first = blockIdx.x * i64(blockDim.x); first < rows; first += gridDim.x * i64(blockDim.x)) {
    const unsigned here = unsigned(min(rows - first, i64(blockDim.x)));
    const int label = threadIdx.x < here ? labels[first + threadIdx.x] : -1;
    of[threadIdx.x] = label;
    __syncthreads();
    const auto learns = [=](unsigned r) { return of[r] >= 0; };
    const T* from = x + first * count;
    T* to = gradients + first * count;
    const bool whole = scores.whole(from, here) && aligned(to, 16);
    if (whole)
      scores.read<PACK, 6>(from, here, learns);
    else
      scores.read<1, 4>(from, here, learns);
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
      scores.write<PACK>(to, here, learns);
    else
      scores.write<1>(to, here, learns);
    __syncthreads();
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

template <typename T>
__global__ void long_class_losses(const T* x, const int* labels, T* losses, i64 rows, i64 count, double least) {
  for (i64 r = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; r < rows; r += gridDim.x * i64(blockDim.x) / 32) {
    float loss = 0;
    if (labels[r] >= 0 && labels[r] < count) {
      const T* row = x + r * count;
      const float most = long_maximum(row, count), sum = long_total(row, count, most);
      const float share = expf(float(row[labels[r]]) - most) / sum;
      loss = -logf(share > float(least) || share != share ? share : float(least));
    }
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

// A block: true boxes of images that are of no class or of the background, and those that are not finite.
template <typename T>
__global__ void __launch_bounds__(1024)
check_truths(const T* rows, double* bad_label, double* bad_box, i64 known, i64 classes, i64 background, i64 any_class,
             i64 difficult) {
  Bad labels, boxes;
  for (i64 t = threadIdx.x; t < known; t += blockDim.x) {
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

// The class of each box: that of its true box in the last of `groups` that has one, or the background.
template <typename T>
__global__ void label_matches(const T* rows, const int* matches, int* labels, i64 images, i64 groups, i64 count,
                              i64 background, i64 one_class) {
  FOR_EACH(i, images * count) {
    const i64 n = i / count, p = i - n * count;
    i64 label = background;
    for (i64 c = 0; c < groups; ++c) {
      const int match = matches[(n * groups + c) * count + p];
      if (match >= 0) label = one_class ? background + 1 : i64(rows[8 * i64(match) + 1]);
    }
    labels[i] = int(label);
  }
}

// A block for each image: boxes without a match keep the label of the background if they are among those with the
// largest losses, `ratio` as many as there are matches, of those that overlap less than `most`; else they get -1.
template <typename T, int HELD>
__global__ void __launch_bounds__(1024)
mine_negatives(const T* losses, const int* matches, const T* overlaps, const int* counts, int* labels, i64 count,
               double ratio, double most) {
  const i64 n = blockIdx.x, start = n * count;
  const Keys<HELD> keys(count, [=](i64 p) {
    const i64 i = start + p;
    const float overlap = float(overlaps[i]), loss = float(losses[i]);  // all on their way at once
    return (matches[i] == -1) & (overlap < float(most)) ? ordered(loss) : 0u;
  });
  const i64 number = counts[2 * n] > 0 ? i64(__fmul_rn(float(counts[2 * n + 1]), float(ratio))) : 0;
  largest(keys, number, [=](int i, bool is) {
    const i64 p = i * i64(blockDim.x) + threadIdx.x;
    if (p < count && !is && matches[start + p] < 0) labels[start + p] = -1;
  });
}

// loss = (by_location * sum of location losses of matches + by_class * sum of class losses of labels) / norm, the norm
// the number of matches, or the divisor unless that is below 0
template <typename T>
__global__ void multibox_loss(const T* location, const int* matches, const T* of_class, const int* labels, T* norm,
                              T* loss, i64 places, i64 count, double by_location, double by_class, double divisor,
                              double* partial, unsigned long long* arrived) {
  Found found;
  FOR_EACH(i, places) {
    if (matches[i] >= 0) {
      found.sum += by_location * double(location[i]);
      found.count += 1;
    }
    if (i < count && labels[i] >= 0) found.sum += by_class * double(of_class[i]);
  }
  if (!concludes(found, partial, arrived)) return;
  const double by = divisor >= 0 ? divisor : found.count > 1 ? found.count : 1;
  *norm = T(by);
  *loss = T(found.sum / by);
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
__global__ void __launch_bounds__(1024)
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
    if (is) best[atomicAdd(&number, 1)] = pair(keys.of[i], i * i64(blockDim.x) + threadIdx.x);
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

// The same of boxes that are sorted already: places in `order`, so many as `numbers` tells.
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

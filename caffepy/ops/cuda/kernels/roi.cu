// Pooling of regions of interest: rois (R, 5) = image, x1, y1, x2, y2. Places are reckoned in float, as on the CPU, each
// operation rounded by itself. A block takes one plane, or a few channels side by side, and all boxes of its image: in
// forward it reads them once, into shared memory where they fit; in backward it adds up what the boxes give, in one order.

#include "pack.cuh"
#include "reduce.cuh"
#include "flags.cuh"

// The conversion goes no further than integers do, and makes 0 of what is no number.
__device__ int cut(float place, i64 size) { return min(max(__float2int_rz(place), 0), int(size)); }

// Cells begin to end - 1 of a bin.
struct Cells {
  int begin, end;
};

// A box of ROIPooling along an axis, cut into bins.
struct Span {
  float first, bin;
  __device__ Span(float begin, float end, float scale, i64 bins) {
    first = roundf(__fmul_rn(begin, scale));
    bin = __fdiv_rn(fmaxf(roundf(__fmul_rn(end, scale)) - first + 1, 1.0f), float(bins));
  }
  __device__ Cells cells(i64 i, i64 size) const {
    return {cut(floorf(__fmul_rn(float(i), bin)) + first, size), cut(ceilf(__fmul_rn(float(i + 1), bin)) + first, size)};
  }
};

// A box of PSROIPooling along an axis, which is rounded before it is scaled.
struct Part {
  float start, bin;
  __device__ Part(float begin, float end, float scale, i64 bins) {
    start = __fmul_rn(roundf(begin), scale);
    const float stop = __fmul_rn(roundf(end) + 1, scale);
    bin = __fdiv_rn(fmaxf(__fsub_rn(stop, start), 0.1f), float(bins));
  }
  __device__ Cells cells(i64 i, i64 size) const {
    return {cut(floorf(__fadd_rn(__fmul_rn(float(i), bin), start)), size),
            cut(ceilf(__fadd_rn(__fmul_rn(float(i + 1), bin), start)), size)};
  }
};

// Boxes as they are given: those of images that there are not are of image 0, and all are larger on all sides by `pad` of
// themselves.
template <typename T> struct Boxes {
  const T* rows;
  i64 images;
  float pad;
  __device__ explicit Boxes(const T* taken) : rows(taken), images(1ll << 30), pad(0) {}
  __device__ Boxes(const T* given, i64 images, double pad) : rows(given), images(images), pad(float(pad)) {}
  __device__ Wide<T> given_image(i64 r) const { return rows[5 * r]; }
  __device__ bool has_image(i64 r) const { return given_image(r) > -1 && given_image(r) < Wide<T>(images); }
  __device__ i64 image(i64 r) const { return has_image(r) ? i64(float(given_image(r))) : 0; }
  struct Ends {
    T low, high;
  };
  // Of box r across (axis 0) or down (axis 1).
  __device__ Ends ends(i64 r, int axis) const {
    const Ends given{rows[5 * r + 1 + axis], rows[5 * r + 3 + axis]};
    if (pad == 0) return given;
    const float low = float(given.low), high = float(given.high), by = __fmul_rn(__fadd_rn(__fsub_rn(high, low), 1.0f), pad);
    return {T(__fsub_rn(low, by)), T(__fadd_rn(high, by))};
  }
  template <typename P> __device__ P along(i64 r, int axis, float scale, i64 bins) const {
    const Ends of = ends(r, axis);
    return P(float(of.low), float(of.high), scale, bins);
  }
  // By a block: writes the boxes that are taken, and notes the largest image that there is not.
  __device__ void take(T* taken, double* bad_image, i64 count) const {
    Bad found;
    for (i64 r = threadIdx.x; r < count; r += blockDim.x) {
      T* to = taken + 5 * r;
      found.add(!has_image(r), float(given_image(r)));
      to[0] = has_image(r) ? rows[5 * r] : T(0);
      for (int axis = 0; axis < 2; ++axis) {
        const Ends of = ends(r, axis);
        to[1 + axis] = of.low;
        to[3 + axis] = of.high;
      }
    }
    found.put_down(bad_image);
  }
};

template <typename T>
__global__ void __launch_bounds__(1024)
take_rois(const T* given, T* taken, double* bad_image, i64 count, i64 images, double pad) {
  Boxes<T>(given, images, pad).take(taken, bad_image, count);
}

__device__ bool first_block() { return blockIdx.x + blockIdx.y + blockIdx.z == 0; }

// Begins to copy BYTES (4 or 16), aligned so, to shared memory, where the device can; all of a thread are there after
// `await_copies`.
template <int BYTES, typename T> __device__ void begin_copy(T* to, const T* from) {
#if __CUDA_ARCH__ >= 800
  const unsigned at = unsigned(__cvta_generic_to_shared(to));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
#else
  *reinterpret_cast<Pack<T, BYTES / sizeof(T)>*>(to) = *reinterpret_cast<const Pack<T, BYTES / sizeof(T)>*>(from);
#endif
}

__device__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Channels blockIdx.x * K and those that follow of image blockIdx.y, side by side at each cell: in shared memory, or
// unless STAGED where they are. The block waits before it reads them, as `wait` does. A single plane of words begins in shared
// memory as far behind 16 bytes as where it is, and is copied 16 bytes at a time.
template <typename T, int K, int STAGED> struct Planes {
  using A = Wide<T>;
  static constexpr bool WORDS = STAGED && K == 1 && sizeof(T) == 4 && sizeof(A) == 4;
  const T* from;
  Pack<A, K>* kept;
  int plane, count;
  __device__ Planes(const T* x, void* memory, i64 channels, i64 plane)
      : Planes(x + (blockIdx.y * channels + blockIdx.x * i64(K)) * plane, int(plane),
               int(min(i64(K), channels - blockIdx.x * i64(K))), memory) {}
  __device__ Planes(const T* from, int plane, int count, void* memory)
      : from(from),
        kept(static_cast<Pack<A, K>*>(memory) + (WORDS ? words_behind(from) : 0)),
        plane(plane),
        count(count) {
    if (!STAGED) return;
    if constexpr (WORDS) {  // all on their way at once
      const int head = min(-words_behind(from) & 3, plane), packs = (plane - head) / 4, behind = head + 4 * packs;
      A* to = kept->v;
      for (int p = threadIdx.x; p < packs; p += blockDim.x) begin_copy<16>(to + head + 4 * p, from + head + 4 * p);
      if (threadIdx.x < head) begin_copy<4>(to + threadIdx.x, from + threadIdx.x);
      if (threadIdx.x < plane - behind) begin_copy<4>(to + behind + threadIdx.x, from + behind + threadIdx.x);
      return;
    }
#pragma unroll 4
    for (int p = threadIdx.x; p < plane; p += blockDim.x) kept[p] = read(p);
  }
  static __device__ int words_behind(const T* from) { return int(reinterpret_cast<unsigned long long>(from) / 4 % 4); }
  __device__ void wait() const {
    if (WORDS) await_copies();
    __syncthreads();
  }
  __device__ Pack<A, K> read(int p) const {
    Pack<A, K> pack;
#pragma unroll
    for (int k = 0; k < K; ++k) pack.v[k] = k < count ? A(from[k * plane + p]) : A(0);
    return pack;
  }
  __device__ Pack<A, K> operator[](int p) const {
    if constexpr (STAGED)
      return kept[p];
    else
      return read(p);
  }
};

// Those of image blockIdx.y among the boxes from begin on, in their order, up to LIST at a time: f(number of them, entry(r) of
// each box r), by a whole block.
constexpr int LIST = 1024;

template <typename T, typename E, typename F> __device__ void each_tile(const Boxes<T>& boxes, i64 begin, i64 end, E entry, F f) {
  __shared__ int list[LIST];
  i64 start = begin;
  do {
    unsigned known = 0;
    for (; start < end && known + blockDim.x <= LIST; start += blockDim.x) {
      const i64 r = start + threadIdx.x;
      const int of_box = r < end ? entry(r) : 0;  // on its way with the image
      const bool here = r < end && boxes.image(r) == blockIdx.y;
      const Rank rank(here);
      if (here) list[known + rank.before] = of_box;
      known += rank.all;
    }
    __syncthreads();
    f(known, list);
    __syncthreads();
  } while (start < end);
}

template <typename T, typename F> __device__ void each_tile(const Boxes<T>& boxes, i64 begin, i64 end, F f) {
  each_tile(boxes, begin, end, [](i64 r) { return int(r); }, f);
}

// The largest value so far, the first of equal ones, and its place.
template <typename A, typename P> struct Largest {
  A value;
  P place;
  __device__ void take(A x, P p) {
    if (x > value) {
      value = x;
      place = p;
    }
  }
};

// Places of planes in shared memory are exact as floats. Selections would go through a pipe of half the rate of additions.
template <> struct Largest<float, float> {
  float value, place;
  __device__ void take(float x, float p) {
    asm("{ .reg .pred larger; setp.gt.f32 larger, %2, %0; @larger add.f32 %0, %2, 0f80000000; "
        "@larger fma.rn.f32 %1, %1, 0f00000000, %3; }"
        : "+f"(value), "+f"(place)
        : "f"(x), "f"(p));
  }
};

template <int STAGED> struct PlaceOf { using type = int; };
template <> struct PlaceOf<1> { using type = float; };

// Blocks (K channels, an image, a share of the boxes), `most` boxes at a time: first the cells of their bins, then a thread
// for each bin.
template <typename T, int K, int STAGED>
__global__ void __launch_bounds__(512, 4)
roi_pool_forward(const T* x, const T* given, T* taken, double pad, double* bad_image, T* y, int* index, i64 channels,
                 i64 rows, i64 columns, i64 h, i64 w, double scale, i64 count, i64 share, i64 most, i64 room, i64 by_axes,
                 i64 by_bins, i64 by_columns) {
  constexpr int THREADS = 512;
  extern __shared__ __align__(16) double shared[];
  const Boxes<T> boxes(given, gridDim.y, pad);
  const Planes<T, K, STAGED> planes(x, shared, channels, h * w);
  Cells* cells = reinterpret_cast<Cells*>(reinterpret_cast<char*>(shared) + room);  // of rows, then columns, of each box
  const unsigned bins = unsigned(rows * columns), axes = unsigned(rows + columns), wide = unsigned(columns);
  const Divisor over_axes(by_axes), over_bins(by_bins), over_columns(by_columns);
  const int pitch = int(w);
  const unsigned of_box = unsigned(channels * bins);  // elements: a product of 32 bits
  T* of_y = y + blockIdx.x * i64(K) * bins;
  int* of_index = index + blockIdx.x * i64(K) * bins;
  const i64 first = blockIdx.z * share;
  if (first_block()) boxes.take(taken, bad_image, count);
  each_tile(boxes, first, min(first + share, count), [&](unsigned known, const int* list) {
    for (unsigned done = 0; done < known; done += unsigned(most)) {
      const unsigned here = min(known - done, unsigned(most));
      __syncthreads();
      for (unsigned k = threadIdx.x; k < here * axes; k += THREADS) {
        const unsigned b = over_axes.quotient(k), i = k - b * axes;
        const bool down = i < rows;
        const Span span = boxes.template along<Span>(list[done + b], down, float(scale), down ? rows : columns);
        cells[k] = span.cells(down ? i : i - rows, down ? h : w);
      }
      __syncthreads();
      for (unsigned k = threadIdx.x; k < here * bins; k += THREADS) {
        const unsigned b = over_bins.quotient(k), bin = k - b * bins, i = over_columns.quotient(bin);
        const Cells down = cells[b * axes + i], across = cells[b * axes + unsigned(rows) + (bin - i * wide)];
        const int start = down.begin * pitch + across.begin;
        const bool any = down.begin < down.end && across.begin < across.end;
        using Place = typename PlaceOf<STAGED>::type;
        Largest<Wide<T>, Place> best[K];
        Pack<Wide<T>, K> value = {};
        if (any) value = planes[start];
#pragma unroll
        for (int c = 0; c < K; ++c) best[c] = {value.v[c], Place(any ? start : -1)};
        for (int a = down.begin; a < down.end; ++a) {
          const int end = a * pitch + across.end;
          Place place = Place(a * pitch + across.begin);
#pragma unroll 1  // else lanes whose rows are of other lengths would wait for each other
          for (int p = a * pitch + across.begin; p < end; ++p, ++place) {
            value = planes[p];
#pragma unroll
            for (int c = 0; c < K; ++c) best[c].take(value.v[c], place);
          }
        }
        const i64 to = i64(unsigned(list[done + b])) * of_box + bin;
#pragma unroll
        for (int c = 0; c < K; ++c) {
          if (c >= planes.count) continue;
          of_y[to + c * bins] = T(best[c].value);
          of_index[to + c * bins] = int(best[c].place);
        }
      }
    }
  });
}

constexpr int WARPS = 4;  // of a block in the gradient of maxima

// The cells of a plane, or of a band of one, that a block sums up: blocks (of bands of all channels, an image). Its warps
// share out the elements, each with sums of its own, which are added up in the end.
template <typename A> struct Band {
  A* sums;  // of this warp
  i64 channel, band;
  int first, cells;
  __device__ Band(A* shared, i64 plane, i64 band, i64 bands)
      : sums(shared + threadIdx.x / 32 * band),
        channel(blockIdx.x / unsigned(bands)),
        band(band),
        first(int(blockIdx.x % unsigned(bands) * band)),
        cells(int(min(band, plane - first))) {
    for (int p = threadIdx.x % 32; p < cells; p += 32) sums[p] = 0;
    __syncwarp();
  }
  __device__ bool has(int place) const { return unsigned(place - first) < unsigned(cells); }
  // Adds the values of the lanes at their cells, below 0: none, those at one cell in the order of lanes: the first of these
  // lanes takes the values of the others, whose bits are in `peers`.
  __device__ static unsigned peers_of(int cell) {
    return __match_any_sync(0xffffffffu, cell >= 0 ? cell : -1 - int(threadIdx.x % 32));
  }
  __device__ void add(int cell, A value, unsigned peers) {
    const unsigned lane = threadIdx.x % 32;
    const bool first = cell >= 0 && !(peers & ((1u << lane) - 1));
    A sum = first ? sums[cell] : A(0);
    do {
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const A other = __shfl_sync(0xffffffffu, value, __ffs(peers) - 1);
        if (peers) sum += other;
        peers &= peers - 1;
      }
    } while (__any_sync(0xffffffffu, peers));
    if (first) sums[cell] = sum;
    __syncwarp();
  }
  template <typename T> __device__ void write(T* dx, i64 channels, i64 plane) const {
    __syncthreads();
    const A* all = sums - threadIdx.x / 32 * band;
    T* to = dx + (blockIdx.y * channels + channel) * plane + first;
#pragma unroll 4
    for (int p = threadIdx.x; p < cells; p += 32 * WARPS) {
      A sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += all[w * band + p];
      to[p] = T(sum);
    }
  }
};

// A warp takes a box at a time, 64 of its elements, a lane two that follow each other. Bins of a cell or more do not overlap
// unless they are next to each other: what two of a row have at one place is added up first, then those of even rows and those
// of odd ones can each be added at once. Those of smaller boxes may share any cell.
template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
roi_pool_backward(const T* dy, const T* rois, const int* index, T* dx, i64 channels, i64 plane, i64 rows, i64 columns,
                  i64 boxes, double scale, i64 band, i64 bands, i64 by_columns) {
  constexpr int U = 8, E = 2;  // boxes on their way while as many are added, elements of a lane
  constexpr unsigned ALL = 0xffffffffu;
  extern __shared__ __align__(16) double shared[];
  using A = Wide<T>;
  Band<A> sums(reinterpret_cast<A*>(shared), plane, band, bands);
  const Divisor over_columns(by_columns);
  const int lane = threadIdx.x % 32, bins = int(rows * columns), parts = (bins + 32 * E - 1) / (32 * E);
  const unsigned of_box = unsigned(channels * bins);  // elements: bytes are a product of 32 bits
  const char* of_index = reinterpret_cast<const char*>(index + sums.channel * bins + lane * E);
  const char* of_dy = reinterpret_cast<const char*>(dy + sums.channel * bins + lane * E);
  const auto entry = [=](i64 r) {  // ~r where bins are smaller than a cell
    const T* roi = rois + 5 * r;
    const float high = Span(float(roi[2]), float(roi[4]), float(scale), rows).bin;
    const float wide = Span(float(roi[1]), float(roi[3]), float(scale), columns).bin;
    return high >= 1 && wide >= 1 ? int(r) : ~int(r);
  };
  each_tile(Boxes<T>(rois), 0, boxes, entry, [&](unsigned known, const int* list) {
    const int total = int(known) * parts;
    int place[U][E];
    T value[U][E];
    bool tiny[U];
    const auto load = [&](int start) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int item = start + WARPS * u, b = parts == 1 ? item : item / parts, before = (item - b * parts) * 32 * E;
        const int r = item < total ? list[b] : 0;
        const unsigned long long box = unsigned(r < 0 ? ~r : r);
        const int* places = reinterpret_cast<const int*>(of_index + box * (of_box * 4)) + before;
        const T* values = reinterpret_cast<const T*>(of_dy + box * (of_box * unsigned(sizeof(T)))) + before;
        tiny[u] = r < 0;
#pragma unroll
        for (int e = 0; e < E; ++e) {
          place[u][e] = -1;
          if (item < total && before + lane * E + e < bins) {
            place[u][e] = places[e];
            value[u][e] = values[e];
          }
        }
      }
    };
    // Of the lane's two elements of a part: whether the one behind each is of the same row, and the one before the first; and
    // whether their rows are odd.
    bool follows[E], continues, odd[E];
    const auto find = [&](int part) {
      const unsigned bin = (part * 32 + lane) * E, wide = unsigned(columns);
      unsigned row[E], column[E];
#pragma unroll
      for (int e = 0; e < E; ++e) {
        row[e] = over_columns.quotient(bin + e);
        column[e] = bin + e - row[e] * wide;
        odd[e] = row[e] % 2;
      }
      follows[0] = column[0] + 1 < wide;
      follows[1] = column[1] + 1 < wide && lane < 31;
      continues = column[0] > 0 && lane > 0;
    };
    find(0);
    int start = threadIdx.x / 32;
    load(start);
    for (; start < total; start += WARPS * U) {
      int here[U][E];
      A by[U][E];
      bool small[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        small[u] = tiny[u];
#pragma unroll
        for (int e = 0; e < E; ++e) {
          here[u][e] = sums.has(place[u][e]) ? place[u][e] - sums.first : -1;
          by[u][e] = A(value[u][e]);
        }
      }
      load(start + WARPS * U);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int item = start + WARPS * u;
        if (item >= total) break;
        if (small[u]) {
          const unsigned of_first = sums.peers_of(here[u][0]), of_second = sums.peers_of(here[u][1]);
          sums.add(here[u][0], by[u][0], of_first);
          sums.add(here[u][1], by[u][1], of_second);
          continue;
        }
        if (parts > 1) find(item % parts);
        int first = here[u][0], second = here[u][1];
        A by_first = by[u][0], by_second = by[u][1];
        const int before = __shfl_up_sync(ALL, second, 1), behind = __shfl_down_sync(ALL, first, 1);
        const A by_behind = __shfl_down_sync(ALL, by_first, 1);
        if (follows[1] && second == behind) by_second += by_behind;
        if (follows[0] && first == second) {
          by_first += by_second;
          second = -1;
        }
        if (continues && first == before) first = -1;
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const bool one = odd[0] == bool(turn) && first >= 0, other = odd[1] == bool(turn) && second >= 0;
          const A of_first = one ? sums.sums[first] : A(0), of_second = other ? sums.sums[second] : A(0);
          if (one) sums.sums[first] = of_first + by_first;
          if (other) sums.sums[second] = of_second + by_second;
          __syncwarp();
        }
      }
    }
  });
  sums.write(dx, channels, plane);
}

// A block for K channels of an image, whose planes lie behind each other; channel c belongs to bin (i, j). A thread takes boxes.
template <typename T, int K, int STAGED>
__global__ void __launch_bounds__(256 * K, 8 / K)
psroi_pool_forward(const T* x, const T* given, T* taken, double pad, double* bad_image, T* y, i64 channels, i64 bins, i64 h,
                   i64 w, double scale, i64 count) {
  extern __shared__ __align__(16) double shared[];
  const Boxes<T> boxes(given, gridDim.y, pad);
  const i64 first = blockIdx.x * i64(K);
  const int own = int(min(i64(K), channels - first)), k = threadIdx.x % K, start = k * int(h * w);
  const Planes<T, 1, STAGED> planes(x + (blockIdx.y * channels + first) * h * w, own * int(h * w), 1, shared);
  const int side = int(bins), c = int(first) + k, i = c / side % side, j = c % side;
  struct Part_of_box {
    bool here = false;
    Cells down, across;
  };
  const auto find = [=](i64 r) {
    Part_of_box found;
    if (r >= count) return found;
    found.down = boxes.template along<Part>(r, 1, float(scale), bins).cells(i, h);
    found.across = boxes.template along<Part>(r, 0, float(scale), bins).cells(j, w);
    found.here = k < own && boxes.image(r) == blockIdx.y;  // read at the same time
    return found;
  };
  Part_of_box part = find(threadIdx.x / K);  // while the planes are on their way
  if (first_block()) boxes.take(taken, bad_image, count);
  planes.wait();
  for (i64 r = threadIdx.x / K; r < count; r += blockDim.x / K, part = find(r)) {
    if (!part.here) continue;
    const Cells down = part.down, across = part.across;
    Wide<T> sum = 0;
    for (int a = down.begin; a < down.end; ++a)
#pragma unroll 2
      for (int b = across.begin; b < across.end; ++b) sum += planes[start + a * int(w) + b].v[0];
    const int area = max(down.end - down.begin, 0) * max(across.end - across.begin, 0);
    y[r * channels + c] = T(sum / Wide<T>(max(area, 1)));
  }
}

// A box of ROIAlign, or of PSROIAlign (`sensitive`), along an axis of `size` pixels, cut into bins.
constexpr int MOST = 1024;  // samples of a part in a direction, whatever the size of its box

struct Samples {
  float start, bin;
  i64 size, n;
  bool sensitive;
  __device__ Samples(float begin, float end, float scale, i64 bins, i64 size, i64 samples, i64 beyond, bool sensitive)
      : size(size), sensitive(sensitive) {
    start = __fmul_rn(begin, scale);
    const float length = __fsub_rn(__fmul_rn(__fadd_rn(end, float(beyond)), scale), start);
    bin = __fdiv_rn(fmaxf(length, sensitive ? 0.1f : 1.0f), float(bins));
    n = samples > 0 ? samples : i64(fminf(ceilf(bin), float(MOST)));
  }
  // Where sample i of bin p lies, in pixels; -1 if it does not count.
  __device__ float at(i64 p, i64 i) const {
    const float first = __fadd_rn(__fmul_rn(float(p), bin), start);
    if (sensitive) {
      const float most = float(size - 1), last = __fadd_rn(__fmul_rn(float(p + 1), bin), start);
      const float step = __fmul_rn(float(i + 1), __fdiv_rn(bin, float(n + 1)));
      const float place = __fadd_rn(fminf(fmaxf(first, 0.0f), most), step);
      return place < fminf(fmaxf(last, 0.0f), most) ? place : -1.0f;
    }
    const float place = __fadd_rn(first, __fdiv_rn(__fmul_rn(float(i) + 0.5f, bin), float(n)));
    return place >= -1.0f && place <= float(size) ? fmaxf(place, 0.0f) : -1.0f;
  }
};

// The pixel before a place, and the share of the next one.
template <typename A> struct Between {
  int low;
  A share;
  __device__ Between(float place, i64 size)
      : low(int(min(i64(place), size - 1))), share(low >= size - 1 ? A(0) : A(__fsub_rn(place, float(low)))) {}
};

// PSROIAlign likewise.
template <typename T, int STAGED>
__global__ void __launch_bounds__(256)
psroi_align_forward(const T* x, const T* given, T* taken, double pad, double* bad_image, T* y, i64 channels, i64 bins, i64 h,
                    i64 w, double scale, i64 samples, i64 beyond, i64 count) {
  using A = Wide<T>;
  extern __shared__ __align__(16) double shared[];
  const Boxes<T> boxes(given, gridDim.y, pad);
  const Planes<T, 1, STAGED> plane(x, shared, channels, h * w);
  const i64 j = blockIdx.x % bins, i = blockIdx.x / bins % bins;
  if (first_block()) boxes.take(taken, bad_image, count);
  plane.wait();
  for (i64 r = threadIdx.x; r < count; r += blockDim.x) {
    if (boxes.image(r) != blockIdx.y) continue;
    const auto down = boxes.ends(r, 1), across = boxes.ends(r, 0);
    const Samples vertical(float(down.low), float(down.high), float(scale), bins, h, samples, beyond, true);
    const Samples level(float(across.low), float(across.high), float(scale), bins, w, samples, beyond, true);
    A sum = 0;
    for (i64 s = 0; s < vertical.n; ++s) {
      const float v = vertical.at(i, s);
      if (v < 0) continue;
      const Between<A> row(v, h);
      for (i64 t = 0; t < level.n; ++t) {
        const float u = level.at(j, t);
        if (u < 0) continue;
        const Between<A> column(u, w);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const A by = (q / 2 ? row.share : 1 - row.share) * (q % 2 ? column.share : 1 - column.share);
          if (by != 0) sum += by * plane[(row.low + q / 2) * int(w) + column.low + q % 2].v[0];
        }
      }
    }
    y[r * channels + blockIdx.x] = T(sum / A(vertical.n * level.n));
  }
}

// What the boxes of ROIAlign and PSROIAlign weigh, a table for each. Places grow with the samples, so that bin k of an
// axis reads `count` pixels from `first` on, with the weights from `start` on; all bins together have no more than size +
// 3 * bins, since none reads more than two that its length does not have.
struct alignas(16) Bin { int first, count, start, none; };

template <typename A> struct Table {
  Bin *down, *across;
  A *of_down, *of_across;
  __device__ Table(char* memory, i64 rows, i64 columns, i64 h, i64 w)
      : down(reinterpret_cast<Bin*>(memory)),
        across(down + rows),
        of_down(reinterpret_cast<A*>(across + columns)),
        of_across(of_down + h + 3 * rows) {}
};

// The same for ROIAlign's gradient: the bins that read each pixel, `low` and those that follow, and their weights, pixel
// behind pixel, of the rows and columns that are read at all.
struct alignas(8) Pixel {
  unsigned short low, count;
  int start;
};

template <typename A> struct Readers {
  int4* range;  // rows from x to y, columns from z to w
  int* bytes;   // of all of it
  Pixel* pixels;
  __device__ explicit Readers(char* memory)
      : range(reinterpret_cast<int4*>(memory)), bytes(reinterpret_cast<int*>(range + 1)), pixels(reinterpret_cast<Pixel*>(range + 2)) {}
  __device__ A* weights(int4 range) const { return reinterpret_cast<A*>(pixels + range.y - range.x + range.w - range.z); }
};

// The bins of an axis by threads k = 0, 1, ... of `bins`, in two steps. LEARNS: without the pixels behind a part, to which
// PSROIAlign gives no gradient.
__device__ void find_pixels(const Samples& samples, int k, Bin& bin) {
  int low = int(samples.size), high = low - 1;
  for (i64 i = 0; i < samples.n; ++i) {
    const float place = samples.at(k, i);
    if (place < 0) continue;
    const int pixel = int(min(i64(place), samples.size - 1));
    if (high < low) low = pixel;
    high = int(min(i64(pixel) + 1, samples.size - 1));
  }
  bin = {low, max(high - low + 1, 0), 0, 0};
}

template <typename A> __device__ void weigh(const Samples& samples, int k, Bin* bins, A* weights, bool learns, A over) {
  int start = 0;
  for (int q = 0; q < k; ++q) start += bins[q].count;
  const Bin bin = bins[k];
  A* of = weights + start;
  for (int p = 0; p < bin.count; ++p) of[p] = 0;
  const float end = __fadd_rn(__fmul_rn(float(k + 1), samples.bin), samples.start);
  for (i64 i = 0; i < samples.n; ++i) {
    const float place = samples.at(k, i);
    if (place < 0) continue;
    const Between<A> at(place, samples.size);
    of[at.low - bin.first] += 1 - at.share;
    const bool counts = !learns || !samples.sensitive || float(at.low + 1) < ceilf(end);
    if (at.low + 1 < samples.size && counts) of[at.low + 1 - bin.first] += at.share;
  }
  for (int p = 0; p < bin.count; ++p) of[p] /= over;
  bins[k].start = start;
}

// The pixels that an axis reads; bins without any have their `first` behind all others.
__device__ int2 extent(const Bin* bins, int count) {
  int2 range{bins[0].first, 0};
  for (int k = 0; k < count; ++k) {
    range.x = min(range.x, bins[k].first);
    if (bins[k].count) range.y = bins[k].first + bins[k].count;
  }
  return range;
}

// By a whole block, after the table.
template <typename A>
__device__ void write_readers(const Table<A>& table, const Readers<A>& readers, int rows, int columns) {
  const int2 down = extent(table.down, rows), across = extent(table.across, columns);
  const int4 range{down.x, max(down.x, down.y), across.x, max(across.x, across.y)};
  const int lines = range.y - range.x, all = lines + range.w - range.z;
  A* weights = readers.weights(range);
  for (int q = threadIdx.x; q < all; q += blockDim.x) {
    const Bin* bins = q < lines ? table.down : table.across;
    const int p = q < lines ? range.x + q : range.z + q - lines, count = q < lines ? rows : columns;
    int low = 0, high = -1;
    for (int k = 0; k < count; ++k)
      if (unsigned(p - bins[k].first) < unsigned(bins[k].count)) {
        if (high < 0) low = k;
        high = k;
      }
    readers.pixels[q] = {static_cast<unsigned short>(low), static_cast<unsigned short>(high - low + 1), 0};
  }
  if (threadIdx.x == 0) {
    *readers.range = range;
    *readers.bytes = 32;
  }
  __syncthreads();
  for (int q = threadIdx.x; q < all; q += blockDim.x) {
    const Bin* bins = q < lines ? table.down : table.across;
    const A* of = q < lines ? table.of_down : table.of_across;
    const int p = q < lines ? range.x + q : range.z + q - lines;
    int start = 0;
#pragma unroll 8
    for (int t = 0; t < q; ++t) start += readers.pixels[t].count;
    const Pixel pixel = readers.pixels[q];
    for (int k = 0; k < pixel.count; ++k) {
      const Bin bin = bins[pixel.low + k];
      const bool reads = unsigned(p - bin.first) < unsigned(bin.count);
      weights[start + k] = reads ? of[bin.start + p - bin.first] : A(0);
    }
    readers.pixels[q].start = start;
    if (q == all - 1) *readers.bytes = int(reinterpret_cast<char*>(weights + start + pixel.count) - reinterpret_cast<char*>(readers.range));
  }
}

// A block for each box: its table, the weights of rows over the number of samples of a bin; behind it, at `readers` unless
// that is 0, the same for ROIAlign's gradient. Both are made in shared memory where they fit (STAGED).
template <typename T, int LEARNS, int STAGED>
__global__ void roi_align_tables(const T* rois, char* tables, i64 size, i64 readers, i64 rows, i64 columns, i64 h, i64 w,
                                 double scale, i64 samples, i64 beyond, i64 sensitive) {
  using A = Wide<T>;
  const T* roi = rois + blockIdx.x * i64(5);
  extern __shared__ __align__(16) double shared[];
  int4* to = reinterpret_cast<int4*>(tables + blockIdx.x * size);
  char* memory = reinterpret_cast<char*>(STAGED ? reinterpret_cast<int4*>(shared) : to);
  const Table<A> table(memory, rows, columns, h, w);
  const Samples vertical(float(roi[2]), float(roi[4]), float(scale), rows, h, samples, beyond, sensitive);
  const Samples level(float(roi[1]), float(roi[3]), float(scale), columns, w, samples, beyond, sensitive);
  for (int k = threadIdx.x; k < rows + columns; k += blockDim.x) {
    if (k < rows)
      find_pixels(vertical, k, table.down[k]);
    else
      find_pixels(level, k - int(rows), table.across[k - rows]);
  }
  __syncthreads();
  for (int k = threadIdx.x; k < rows + columns; k += blockDim.x) {
    if (k < rows)
      weigh(vertical, k, table.down, table.of_down, LEARNS, A(vertical.n * level.n));
    else
      weigh(level, k - int(rows), table.across, table.of_across, LEARNS, A(1));
  }
  __syncthreads();
  if (readers) write_readers(table, Readers<A>(memory + readers), int(rows), int(columns));
  if (!STAGED) return;
  __syncthreads();
  for (int k = threadIdx.x; k < size / 16; k += blockDim.x) to[k] = reinterpret_cast<const int4*>(memory)[k];
}

// Blocks (K channels, an image, a share of the boxes), a thread for each bin.
template <typename T, int K, int STAGED>
__global__ void __launch_bounds__(512)
roi_align_forward(const T* x, const T* rois, char* tables, T* y, i64 size, i64 rows, i64 columns, i64 channels, i64 h,
                  i64 w, i64 boxes, i64 share, i64 by_bins, i64 by_columns) {
  using A = Wide<T>;
  extern __shared__ __align__(16) double shared[];
  const Planes<T, K, STAGED> planes(x, shared, channels, h * w);
  const unsigned bins = unsigned(rows * columns), wide = unsigned(columns);
  const Divisor over_bins(by_bins), over_columns(by_columns);
  const int pitch = int(w);
  const i64 first = blockIdx.z * share;
  each_tile(Boxes<T>(rois), first, min(first + share, boxes), [&](unsigned known, const int* list) {
    for (unsigned k = threadIdx.x; k < known * bins; k += blockDim.x) {
      const unsigned b = over_bins.quotient(k), bin = k - b * bins, i = over_columns.quotient(bin);
      const Table<A> table(tables + list[b] * size, rows, columns, h, w);
      const Bin down = table.down[i], across = table.across[bin - i * wide];
      const A *by_row = table.of_down + down.start, *by_column = table.of_across + across.start;
      Pack<A, K> sum = {};
      for (int a = 0; a < down.count; ++a) {
        const A row = by_row[a];
        const int corner = (down.first + a) * pitch + across.first;
        for (int c = 0; c < across.count; ++c) {
          const A by = row * by_column[c];
          if (by == 0) continue;
          const Pack<A, K> value = planes[corner + c];
#pragma unroll
          for (int q = 0; q < K; ++q) sum.v[q] += by * value.v[q];
        }
      }
      const i64 to = (list[b] * channels + blockIdx.x * i64(K)) * bins + bin;
#pragma unroll
      for (int q = 0; q < K; ++q)
        if (q < planes.count) y[to + q * bins] = T(sum.v[q]);
    }
  });
}

// Blocks (K channels, an image, an area of the map of `lines` rows and `across` columns): a warp has `own` rows of it, and
// takes the boxes in their order, a lane a column, two rows at a time. `most` boxes have their dy and their readers in
// shared memory at a time, or unless STAGED all where they are.
template <typename T, int K, int STAGED>
__global__ void __launch_bounds__(1024)
roi_align_backward(const T* dy, const T* rois, const char* readers, T* dx, i64 size, i64 slot, i64 columns, i64 bins,
                   i64 channels, i64 h, i64 w, i64 boxes, i64 most, i64 lines, i64 across, i64 own, i64 by_bins) {
  using A = Wide<T>;
  extern __shared__ __align__(16) double shared[];
  const i64 areas = (w + across - 1) / across;
  const int top = int(blockIdx.z / areas * lines), left = int(blockIdx.z % areas * across);
  const int end = int(min(top + lines, h)), right = int(min(left + across, w)), pitch = right - left;
  const int mine = min(top + int(threadIdx.x / 32 * own), end), until = min(mine + int(own), end);
  Pack<A, K>* sums = reinterpret_cast<Pack<A, K>*>(shared);
  Pack<A, K>* given = sums + lines * across;
  char* slots = reinterpret_cast<char*>(given + most * bins);
  const Divisor over_bins(by_bins);
  const i64 channel = blockIdx.x * i64(K);
  const int count = int(min(i64(K), channels - channel)), lane = threadIdx.x % 32;
  for (int p = (mine - top) * pitch + lane; p < (until - top) * pitch; p += 32) sums[p] = {};
  each_tile(Boxes<T>(rois), 0, boxes, [&](unsigned known, const int* list) {
    for (unsigned done = 0; done < known; done += unsigned(most)) {
      const unsigned here = min(known - done, unsigned(most));
      const auto read = [=](unsigned b, int bin) {
        const T* from = dy + (list[done + b] * channels + channel) * bins + bin;
        Pack<A, K> pack;
#pragma unroll
        for (int q = 0; q < K; ++q) pack.v[q] = q < count ? A(from[q * bins]) : A(0);
        return pack;
      };
      const auto readers_of = [=](unsigned b) {
        return Readers<A>(STAGED ? slots + b * slot : const_cast<char*>(readers) + list[done + b] * size);
      };
      __syncthreads();
      for (unsigned b = threadIdx.x / 32; STAGED && b < here; b += blockDim.x / 32) {
        const int4* from = reinterpret_cast<const int4*>(readers + list[done + b] * size);
        int4* to = reinterpret_cast<int4*>(slots + b * slot);
        const int packs = (from[1].x + 15) / 16;
        for (int k = lane; k < packs; k += 32) to[k] = from[k];
      }
#pragma unroll 4
      for (unsigned k = threadIdx.x; STAGED && k < here * unsigned(bins); k += blockDim.x) {
        const unsigned b = over_bins.quotient(k);
        given[k] = read(b, int(k - b * unsigned(bins)));
      }
      __syncthreads();
      for (unsigned base = 0; base < here; base += 32) {
        bool reads = false;
        if (base + lane < here) {
          const int4 range = *readers_of(base + lane).range;
          reads = max(range.x, mine) < min(range.y, until) && max(range.z, left) < min(range.w, right);
        }
        for (unsigned some = __ballot_sync(0xffffffffu, reads); some; some &= some - 1) {
          const unsigned box = base + __ffs(some) - 1;
          const Readers<A> of = readers_of(box);
          const int4 range = *of.range;
          const Pixel *rows_of = of.pixels - range.x, *columns_of = of.pixels + range.y - range.x - range.z;
          const A* weights = of.weights(range);
          const Pack<A, K>* of_box = given + box * bins;
          const int last = min(range.y, until);
          for (int a = max(range.x, mine); a < last; a += 2) {
            const bool two = a + 1 < last;
            const Pixel row = rows_of[a], next = two ? rows_of[a + 1] : row;
            const int first = min(row.low, next.low), behind = max(row.low + row.count, next.low + next.count);
            for (int b = max(range.z, left) + lane; b < min(range.w, right); b += 32) {
              const Pixel column = columns_of[b];
              Pack<A, K> sum[2] = {};
              for (int i = first; i < behind; ++i) {
                const int line = i * int(columns) + column.low;
                Pack<A, K> along = {};
                for (int j = 0; j < column.count; ++j) {
                  const A by = weights[column.start + j];
                  const Pack<A, K> value = STAGED ? of_box[line + j] : read(box, line + j);
#pragma unroll
                  for (int q = 0; q < K; ++q) along.v[q] += by * value.v[q];
                }
                const A by = unsigned(i - row.low) < row.count ? weights[row.start + i - row.low] : A(0);
                const A by_next = unsigned(i - next.low) < next.count ? weights[next.start + i - next.low] : A(0);
#pragma unroll
                for (int q = 0; q < K; ++q) {
                  sum[0].v[q] += by * along.v[q];
                  sum[1].v[q] += by_next * along.v[q];
                }
              }
              Pack<A, K>* to = sums + (a - top) * pitch + b - left;
#pragma unroll
              for (int q = 0; q < K; ++q) to->v[q] += sum[0].v[q];
              if (!two) continue;
              to += pitch;
#pragma unroll
              for (int q = 0; q < K; ++q) to->v[q] += sum[1].v[q];
            }
          }
          __syncwarp();
        }
      }
    }
  });
  T* to = dx + (blockIdx.y * channels + channel) * h * w + i64(top) * w + left;
  for (int k = threadIdx.x; k < (end - top) * pitch; k += blockDim.x) {
    const int a = k / pitch;
    const Pack<A, K> sum = sums[k];
#pragma unroll
    for (int q = 0; q < K; ++q)
      if (q < count) to[q * h * w + a * w + (k - a * pitch)] = T(sum.v[q]);
  }
}

// What a box gives each cell of its bin, for G outputs.
template <typename A, int G> struct alignas(16) Shares { A of[G]; };

// Blocks (a bin (i, j), an image, a group of G outputs). Each box gives the cells of its bin a share of dy. A warp has a row at a
// time, a lane M columns: it asks all boxes whether they reach the row, and adds up what those give that do, in their order.
// More boxes than threads add to dx in turns.
template <typename T, int G>
__global__ void __launch_bounds__(512, 3)
psroi_pool_backward(const T* dy, const T* rois, T* dx, i64 outputs, i64 h, i64 w, i64 bins, i64 boxes, double scale) {
  using A = Wide<T>;
  constexpr int ROOM = 512, M = 2;
  __shared__ Cells downs[ROOM], acrosses[ROOM];  // rows from begin to end - 1; `end` columns from begin on
  __shared__ Shares<A, G> shares[ROOM];
  const int lines = int(h), width = int(w), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int square = int(gridDim.x), bin = int(blockIdx.x), first = int(blockIdx.z) * G, own = min(G, int(outputs) - first);
  const Boxes<T> given(rois);
  const T* of_bin = dy + first * square + bin;
  T* to = dx + ((blockIdx.y * outputs + first) * square + bin) * h * w;
  const int output = square * lines * width;  // from a cell to that of the next output
  for (int start = 0; start == 0 || start < int(boxes); start += ROOM) {
    const int known = min(int(boxes) - start, ROOM), r = start + int(threadIdx.x);
    if (r < int(boxes)) {
      Shares<A, G> share;
      const T* of_box = of_bin + i64(r) * outputs * square;
#pragma unroll
      for (int g = 0; g < G; ++g) share.of[g] = g < own ? A(of_box[g * square]) : A(0);
      const int i = bin / int(bins), j = bin - i * int(bins);
      Cells down = given.template along<Part>(r, 1, float(scale), bins).cells(i, h);
      const Cells across = given.template along<Part>(r, 0, float(scale), bins).cells(j, w);
      const A area = A((down.end - down.begin) * (across.end - across.begin));
      if (given.image(r) != blockIdx.y) down = {0, 0};  // read at the same time
#pragma unroll
      for (int g = 0; g < G; ++g) share.of[g] /= area;
      shares[threadIdx.x] = share;
      downs[threadIdx.x] = down;
      acrosses[threadIdx.x] = {across.begin, max(across.end - across.begin, 0)};
    }
    __syncthreads();
    for (int left = lane; left - lane < width; left += 32 * M)
      for (int line = warp; line < lines; line += ROOM / 32) {
        T* cell = to + line * width + left;
        A sum[M][G];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int g = 0; g < G; ++g) {
            const bool more = start > 0 && left + 32 * m < width && g < own;
            sum[m][g] = more ? A(cell[i64(g) * output + 32 * m]) : A(0);
          }
        for (int base = 0; base < known; base += 32) {
          const Cells range = downs[base + lane];
          const bool reaches = base + lane < known && range.begin <= line && line < range.end;
          for (unsigned some = __ballot_sync(0xffffffffu, reaches); some; some &= some - 1) {
            const int k = base + __ffs(some) - 1;
            const Cells across = acrosses[k];
            const Shares<A, G> share = shares[k];
#pragma unroll
            for (int m = 0; m < M; ++m) {
              if (unsigned(left + 32 * m - across.begin) >= unsigned(across.end)) continue;
#pragma unroll
              for (int g = 0; g < G; ++g) sum[m][g] += share.of[g];
            }
          }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int g = 0; g < G; ++g)
            if (left + 32 * m < width && g < own) cell[i64(g) * output + 32 * m] = T(sum[m][g]);
      }
    __syncthreads();
  }
}

// A block for each channel of an image, which belongs to bin (i, j). Each box gives the pixels of its bin what they
// weigh. A warp takes a row, a lane two columns, and the boxes in their order; more than ROOM boxes of an image add to dx in
// turns.
template <typename T>
__global__ void __launch_bounds__(256, 8)
psroi_align_backward(const T* dy, const T* rois, char* tables, T* dx, i64 size, i64 channels, i64 h, i64 w, i64 bins,
                     i64 boxes) {
  using A = Wide<T>;
  constexpr int ROOM = 512, M = 2;
  __shared__ int4 cells[ROOM];  // rows from x to y, columns from z to w
  __shared__ A shares[ROOM];
  __shared__ const A* weights[ROOM][2];  // of row 0 and column 0, if they were read
  const int lane = threadIdx.x % 32, j = int(blockIdx.x % bins), i = int(blockIdx.x / bins % bins);
  T* to = dx + (blockIdx.y * channels + blockIdx.x) * h * w;
  i64 start = 0;
  bool again = false;
  do {
    int known = 0;
    for (; start < boxes && known + int(blockDim.x) <= ROOM; start += blockDim.x) {
      const i64 r = start + threadIdx.x;
      int4 range{0, 0, 0, 0};
      A share = 0;
      const A *by_row = nullptr, *by_column = nullptr;
      if (r < boxes && i64(float(rois[5 * r])) == blockIdx.y) {
        share = A(dy[r * channels + blockIdx.x]);
        const Table<A> table(tables + r * size, bins, bins, h, w);
        const Bin down = table.down[i], across = table.across[j];
        range = {down.first, down.first + down.count, across.first, across.first + across.count};
        by_row = table.of_down + down.start - down.first;
        by_column = table.of_across + across.start - across.first;
      }
      const bool here = range.x < range.y && range.z < range.w;
      const Rank rank(here);
      if (here) {
        const int k = known + int(rank.before);
        cells[k] = range;
        shares[k] = share;
        weights[k][0] = by_row;
        weights[k][1] = by_column;
      }
      known += int(rank.all);
    }
    __syncthreads();
    for (int a = threadIdx.x / 32; a < h; a += blockDim.x / 32)
      for (int left = lane; left - lane < w; left += 32 * M) {
        A sum[M];
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const int b = left + 32 * m;
          sum[m] = again && b < w ? A(to[a * w + b]) : A(0);
        }
        for (int base = 0; base < known; base += 32) {
          const int4 own = cells[min(base + lane, ROOM - 1)];
          const bool covers = base + lane < known && own.x <= a && a < own.y;
          for (unsigned some = __ballot_sync(0xffffffffu, covers); some; some &= some - 1) {
            const int k = base + __ffs(some) - 1;
            const int4 range = cells[k];
            const A value = shares[k] * weights[k][0][a];
#pragma unroll
            for (int m = 0; m < M; ++m) {
              const int b = left + 32 * m;
              if (b >= range.z && b < range.w) sum[m] += value * weights[k][1][b];
            }
          }
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const int b = left + 32 * m;
          if (b < w) to[a * w + b] = T(sum[m]);
        }
      }
    __syncthreads();
    again = true;
  } while (start < boxes);
}

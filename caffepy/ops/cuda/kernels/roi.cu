// Pooling of regions of interest: rois (R, 5) = image, x1, y1, x2, y2. Places are reckoned in float, as on the CPU, each
// operation rounded by itself. In backward the warps of a block share out the boxes and add what they give to a plane, or
// to a band of one, each in shared memory of its own; then these are added up. So sums have one order.

#include "pack.cuh"
#include "reduce.cuh"

__device__ int cut(float place, i64 size) { return int(min(max(i64(place), i64(0)), size)); }

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

// Blocks (a box, some of the channels): first the cells of its bins, then a thread for each bin of a channel.
template <typename T>
__global__ void roi_pool_forward(const T* x, const T* rois, T* y, int* index, i64 channels, i64 rows, i64 columns, i64 h,
                                 i64 w, double scale, i64 chunk, i64 by_bins, i64 by_columns) {
  extern __shared__ Cells cells[];  // of the rows, then of the columns
  const T* roi = rois + blockIdx.x * i64(5);
  for (int k = threadIdx.x; k < rows + columns; k += blockDim.x)
    cells[k] = k < rows ? Span(float(roi[2]), float(roi[4]), float(scale), rows).cells(k, h)
                        : Span(float(roi[1]), float(roi[3]), float(scale), columns).cells(k - rows, w);
  __syncthreads();
  const unsigned bins = unsigned(rows * columns), wide = unsigned(columns), pitch = unsigned(w);
  const i64 first = blockIdx.y * chunk, start = (blockIdx.x * channels + first) * bins;
  const T* planes = x + (i64(float(roi[0])) * channels + first) * h * w;
  const unsigned count = unsigned(min(chunk, channels - first)) * bins;
  const Divisor over_bins(by_bins), over_columns(by_columns);
  for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
    const unsigned c = over_bins.quotient(k), bin = k - c * bins, i = over_columns.quotient(bin);
    const Cells down = cells[i], across = cells[rows + (bin - i * wide)];
    const T* plane = planes + i64(c) * h * w;
    Wide<T> best = 0;
    int place = -1;
    for (int a = down.begin; a < down.end; ++a)
      for (int b = across.begin; b < across.end; ++b) {
        const Wide<T> value = plane[a * pitch + b];
        if (place < 0 || value > best) {
          best = value;
          place = int(a * pitch + b);
        }
      }
    y[start + k] = T(best);
    index[start + k] = place;
  }
}

constexpr int WARPS = 4;  // of a block in backward

// The boxes of image blockIdx.y in their order, as many as the block has threads at a time: f(number of them, their numbers).
template <typename T, typename F> __device__ void each_tile(const T* rois, i64 boxes, F f) {
  __shared__ int tile[32 * WARPS];
  for (i64 start = 0; start < boxes; start += blockDim.x) {
    const i64 r = start + threadIdx.x;
    const bool here = r < boxes && i64(float(rois[5 * r])) == blockIdx.y;
    const Rank rank(here);
    if (here) tile[rank.before] = int(r);
    __syncthreads();
    f(rank.all, tile);
    __syncthreads();
  }
}

// The cells of a plane, or of a band of one, that a block sums up: blocks (of bands of all channels, an image).
template <typename A> struct Band {
  A* sums;  // of this warp
  i64 channel, band;
  int first, cells;
  __device__ Band(A* shared, i64 plane, i64 band, i64 bands)
      : sums(shared + threadIdx.x / 32 * band),
        channel(blockIdx.x / bands),
        band(band),
        first(int(blockIdx.x % bands * band)),
        cells(int(min(band, plane - first))) {
    for (int p = threadIdx.x % 32; p < cells; p += 32) sums[p] = 0;
    __syncwarp();
  }
  __device__ bool has(int place) const { return unsigned(place - first) < unsigned(cells); }
  // Adds the values of the lanes at their places, those at one place in the order of lanes.
  __device__ void add(int place, A value) {
    const int lane = threadIdx.x % 32;
    const bool inside = has(place);
    const unsigned peers = __match_any_sync(0xffffffffu, inside ? place : -1 - lane);
    const int rank = __popc(peers & ((1u << lane) - 1));
    for (int turn = 0; __any_sync(0xffffffffu, rank >= turn); ++turn) {
      if (inside && rank == turn) sums[place - first] += value;
      __syncwarp();
    }
  }
  template <typename T> __device__ void write(T* dx, i64 channels, i64 plane) const {
    __syncthreads();
    const A* all = sums - threadIdx.x / 32 * band;
    T* to = dx + (blockIdx.y * channels + channel) * plane + first;
    for (int p = threadIdx.x; p < cells; p += 32 * WARPS) {
      A sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += all[w * band + p];
      to[p] = T(sum);
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
roi_pool_backward(const T* dy, const T* rois, const int* index, T* dx, i64 channels, i64 plane, i64 bins, i64 boxes,
                  i64 band, i64 bands, i64 by_bins) {
  constexpr int U = 4;  // loads on their way
  extern __shared__ double shared[];
  using A = Wide<T>;
  Band<A> sums(reinterpret_cast<A*>(shared), plane, band, bands);
  const Divisor over_bins(by_bins);
  each_tile(rois, boxes, [&](unsigned count, const int* tile) {
    const unsigned total = count * unsigned(bins);
    for (unsigned start = threadIdx.x / 32 * 32 * U; start < total; start += 32 * U * WARPS) {
      int place[U];
      T value[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const unsigned k = start + 32 * u + threadIdx.x % 32, r = over_bins.quotient(k);
        place[u] = -1;
        if (k < total) {
          const i64 at = (tile[r] * channels + sums.channel) * bins + (k - r * unsigned(bins));
          place[u] = index[at];
          value[u] = dy[at];
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) sums.add(place[u], A(value[u]));
    }
  });
  sums.write(dx, channels, plane);
}

// A block for each box, a thread for each of its outputs.
template <typename T>
__global__ void psroi_pool_forward(const T* x, const T* rois, T* y, i64 outputs, i64 bins, i64 h, i64 w, double scale,
                                   i64 by_bins) {
  extern __shared__ Cells cells[];  // of the rows, then of the columns
  const T* roi = rois + blockIdx.x * i64(5);
  for (int k = threadIdx.x; k < 2 * bins; k += blockDim.x)
    cells[k] = k < bins ? Part(float(roi[2]), float(roi[4]), float(scale), bins).cells(k, h)
                        : Part(float(roi[1]), float(roi[3]), float(scale), bins).cells(k - bins, w);
  __syncthreads();
  const unsigned count = unsigned(outputs * bins * bins), pitch = unsigned(w);
  const Divisor over_bins(by_bins);
  const T* planes = x + i64(float(roi[0])) * count * h * w;
  for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
    const unsigned line = over_bins.quotient(k), i = line - over_bins.quotient(line) * unsigned(bins);
    const Cells down = cells[i], across = cells[bins + (k - line * unsigned(bins))];
    const T* plane = planes + i64(k) * h * w;
    Wide<T> sum = 0;
    for (int a = down.begin; a < down.end; ++a)
      for (int b = across.begin; b < across.end; ++b) sum += Wide<T>(plane[a * pitch + b]);
    const int area = max(down.end - down.begin, 0) * max(across.end - across.begin, 0);
    y[blockIdx.x * i64(count) + k] = T(sum / Wide<T>(max(area, 1)));
  }
}

// A channel belongs to one bin. Each lane finds the bin of a box, then the warp adds to the cells of one after the other.
template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
psroi_pool_backward(const T* dy, const T* rois, T* dx, i64 channels, i64 h, i64 w, i64 bins, i64 boxes, double scale,
                    i64 band, i64 bands) {
  extern __shared__ double shared[];
  using A = Wide<T>;
  const int lane = threadIdx.x % 32;
  Band<A> sums(reinterpret_cast<A*>(shared), h * w, band, bands);
  const i64 j = sums.channel % bins, i = sums.channel / bins % bins;
  each_tile(rois, boxes, [&](unsigned count, const int* tile) {
    for (unsigned start = threadIdx.x / 32 * 32; start < count; start += 32 * WARPS) {
      Cells down{0, 0}, across{0, 0};
      A share = 0;
      if (start + lane < count) {
        const i64 r = tile[start + lane];
        const T* roi = rois + 5 * r;
        down = Part(float(roi[2]), float(roi[4]), float(scale), bins).cells(i, h);
        across = Part(float(roi[1]), float(roi[3]), float(scale), bins).cells(j, w);
        share = A(dy[r * channels + sums.channel]) / A((down.end - down.begin) * (across.end - across.begin));
      }
      for (unsigned left = __ballot_sync(0xffffffffu, down.end > down.begin && across.end > across.begin); left;
           left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int top = __shfl_sync(0xffffffffu, down.begin, from), end = __shfl_sync(0xffffffffu, down.end, from);
        const int before = __shfl_sync(0xffffffffu, across.begin, from);
        const int wide = __shfl_sync(0xffffffffu, across.end, from) - before;
        const A value = __shfl_sync(0xffffffffu, share, from);
        int a = top + lane / wide, b = lane % wide;
        for (; a < end; a += (b + 32) / wide, b = (b + 32) % wide) {
          const int place = int(a * w) + before + b;
          if (sums.has(place)) sums.sums[place - sums.first] += value;
        }
        __syncwarp();
      }
    }
  });
  sums.write(dx, channels, h * w);
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

// The weights of the pixels in the samples of each bin of a box along an axis, one bin behind the other. Places grow with
// the samples, so that bin p has the `first` pixel of its first sample to that behind the last one's; all bins together
// have no more than size + 3 * bins, since none reads more than two that its length does not have.
template <typename A> struct Weights {
  A* of;
  int *first, *count, *start;  // of each bin

  __device__ Weights(char* memory, i64 bins, i64 size)
      : of(reinterpret_cast<A*>(memory)),
        first(reinterpret_cast<int*>(of + room(bins, size))),
        count(first + bins),
        start(count + bins) {}
  static __device__ i64 room(i64 bins, i64 size) { return size + 3 * bins; }

  // By a whole block; LEARNS: without the pixels behind a part, to which PSROIAlign gives no gradient.
  __device__ void fill(const Samples& samples, i64 bins, bool learns) const {
    __syncthreads();
    for (int p = threadIdx.x; p < bins; p += blockDim.x) {
      int low = 1, high = 0;
      for (i64 i = 0; i < samples.n; ++i) {
        const float place = samples.at(p, i);
        if (place < 0) continue;
        const int pixel = int(min(i64(place), samples.size - 1));
        if (high < low) low = pixel;
        high = int(min(i64(pixel) + 1, samples.size - 1));
      }
      first[p] = low;
      count[p] = max(high - low + 1, 0);
    }
    __syncthreads();
    for (int p = threadIdx.x; p < bins; p += blockDim.x) {
      int at = 0;
      for (int q = 0; q < p; ++q) at += count[q];
      start[p] = at;
      for (int k = 0; k < count[p]; ++k) of[at + k] = 0;
      const float end = __fadd_rn(__fmul_rn(float(p + 1), samples.bin), samples.start);
      for (i64 i = 0; i < samples.n; ++i) {
        const float place = samples.at(p, i);
        if (place < 0) continue;
        const int low = int(min(i64(place), samples.size - 1));
        const A share = low >= samples.size - 1 ? A(0) : A(__fsub_rn(place, float(low)));
        of[at + low - first[p]] += 1 - share;
        const bool counts = !learns || !samples.sensitive || float(low + 1) < ceilf(end);
        if (low + 1 < samples.size && counts) of[at + low + 1 - first[p]] += share;
      }
    }
    __syncthreads();
  }
  __device__ A weight(int p, int pixel) const {
    const int k = pixel - first[p];
    return unsigned(k) < unsigned(count[p]) ? of[start[p] + k] : A(0);
  }
};

// Bytes of the weights of an axis, as in roi.py.
template <typename A> __device__ i64 bytes_of(i64 bins, i64 size) {
  return (Weights<A>::room(bins, size) * i64(sizeof(A)) + 12 * bins + 15) / 16 * 16;
}

// Blocks (a box, some of the outputs): first the weights of its bins, then a thread for each bin of an output.
template <typename T>
__global__ void roi_align_forward(const T* x, const T* rois, T* y, i64 outputs, i64 rows, i64 columns, i64 channels, i64 h,
                                  i64 w, double scale, i64 samples, i64 beyond, i64 sensitive, i64 chunk, i64 by_bins,
                                  i64 by_columns) {
  using A = Wide<T>;
  extern __shared__ double shared[];
  char* memory = reinterpret_cast<char*>(shared);
  const T* roi = rois + blockIdx.x * i64(5);
  const Weights<A> down(memory, rows, h), across(memory + bytes_of<A>(rows, h), columns, w);
  const Samples vertical(float(roi[2]), float(roi[4]), float(scale), rows, h, samples, beyond, sensitive);
  const Samples level(float(roi[1]), float(roi[3]), float(scale), columns, w, samples, beyond, sensitive);
  down.fill(vertical, rows, false);
  across.fill(level, columns, false);
  const A all = A(vertical.n * level.n);
  const unsigned bins = unsigned(rows * columns), wide = unsigned(columns), pitch = unsigned(w);
  const i64 first = blockIdx.y * chunk;
  const unsigned count = unsigned(min(chunk, outputs - first)) * bins;
  const Divisor over_bins(by_bins), over_columns(by_columns);
  const T* image = x + i64(float(roi[0])) * channels * h * w;
  for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
    const unsigned o = over_bins.quotient(k), bin = k - o * bins, i = over_columns.quotient(bin), j = bin - i * wide;
    const T* plane = image + (sensitive ? (first + o) * bins + bin : first + o) * h * w;
    const A *by_row = down.of + down.start[i], *by_column = across.of + across.start[j];
    const T* corner = plane + down.first[i] * pitch + across.first[j];
    A sum = 0;
    for (int a = 0; a < down.count[i]; ++a) {
      A along = 0;
      if (by_row[a] == 0) continue;
      for (int b = 0; b < across.count[j]; ++b)
        if (by_column[b] != 0) along += by_column[b] * A(corner[a * pitch + b]);
      sum += by_row[a] * along;
    }
    y[(blockIdx.x * outputs + first) * bins + k] = T(sum / all);
  }
}

// A block for each box: its weights for roi_align_backward, those of the rows, then those of the columns, over the number
// of samples of a bin.
template <typename T>
__global__ void roi_align_weights(const T* rois, char* tables, i64 rows, i64 columns, i64 h, i64 w, double scale,
                                  i64 samples, i64 beyond, i64 sensitive) {
  using A = Wide<T>;
  const T* roi = rois + blockIdx.x * i64(5);
  const i64 before = bytes_of<A>(rows, h);
  char* table = tables + blockIdx.x * (before + bytes_of<A>(columns, w));
  const Weights<A> down(table, rows, h), across(table + before, columns, w);
  const Samples vertical(float(roi[2]), float(roi[4]), float(scale), rows, h, samples, beyond, sensitive);
  const Samples level(float(roi[1]), float(roi[3]), float(scale), columns, w, samples, beyond, sensitive);
  down.fill(vertical, rows, true);
  across.fill(level, columns, true);
  const A all = A(vertical.n * level.n);
  for (int i = 0; i < rows; ++i)
    for (int k = threadIdx.x; k < down.count[i]; k += blockDim.x) down.of[down.start[i] + k] /= all;
}

// A lane takes a column of the plane.
template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
roi_align_backward(const T* dy, const T* rois, const char* tables, T* dx, i64 channels, i64 h, i64 w, i64 outputs,
                   i64 rows, i64 columns, i64 sensitive, i64 boxes, i64 band, i64 bands) {
  using A = Wide<T>;
  constexpr int GROUP = 8;  // rows of bins at a time
  extern __shared__ double shared[];
  const int lane = threadIdx.x % 32;
  Band<A> sums(reinterpret_cast<A*>(shared), h * w, band, bands);
  const i64 bins = rows * columns, before = bytes_of<A>(rows, h), size = before + bytes_of<A>(columns, w);
  // PSROIAlign's channel belongs to one bin.
  const i64 o = sensitive ? sums.channel / bins : sums.channel, bin = sensitive ? sums.channel % bins : 0;
  const int i0 = int(bin / columns), i1 = sensitive ? i0 + 1 : int(rows);
  const int j0 = int(bin % columns), j1 = sensitive ? j0 + 1 : int(columns);
  const int top = int(sums.first / w), end = int((sums.first + sums.cells + w - 1) / w);
  each_tile(rois, boxes, [&](unsigned count, const int* tile) {
    for (unsigned r = threadIdx.x / 32; r < count; r += WARPS) {
      char* table = const_cast<char*>(tables) + tile[r] * size;
      const Weights<A> down(table, rows, h), across(table + before, columns, w);
      const T* of = dy + (tile[r] * outputs + o) * bins;
      int low = int(w), high = 0;
      for (int j = j0; j < j1; ++j)
        if (across.count[j]) {
          low = min(low, across.first[j]);
          high = max(high, across.first[j] + across.count[j]);
        }
      for (int g = i0; g < i1; g += GROUP) {
        const int rest = min(GROUP, i1 - g);
        for (int b = low + lane; b < high; b += 32) {
          A along[GROUP] = {};
          for (int j = j0; j < j1; ++j) {
            const A by = across.weight(j, b);
            if (by == 0) continue;
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
              if (i < rest) along[i] += by * A(of[(g + i) * columns + j]);
          }
#pragma unroll
          for (int i = 0; i < GROUP; ++i) {
            if (i >= rest || along[i] == 0) continue;
            const int row = down.first[g + i], until = min(row + down.count[g + i], end);
            const A* by_row = down.of + down.start[g + i] - row;
            for (int a = max(row, top); a < until; ++a) {
              const int place = int(a * w) + b;
              if (sums.has(place)) sums.sums[place - sums.first] += by_row[a] * along[i];
            }
          }
        }
      }
    }
  });
  sums.write(dx, channels, h * w);
}

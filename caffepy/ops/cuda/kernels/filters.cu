// Weights, and images of few channels, arranged for cuDNN with the channels last.

#include "pack.cuh"

// Weights are (O, C, taps) in Caffe's order. For cuDNN the weights of an output are a row, in which those of tap t
// begin at place[t], one for each channel; after every `share` outputs they move on by `shift`. The rest of a row is
// not written. A block of 256 threads takes a tile of one output.
struct Weights {
  i64 outputs, channels, taps, row, share, shift, tile_channels, tile_taps, even, by_pairs;
};

#define WEIGHTS                                                                                                      \
  i64 outputs, i64 channels, i64 taps, i64 row, i64 share, i64 shift, i64 tile_channels, i64 tile_taps, i64 even, \
      i64 by_pairs
#define NUMBERS Weights{outputs, channels, taps, row, share, shift, tile_channels, tile_taps, even, by_pairs}

constexpr int TILE = 4096, FOURS = TILE / 4 / 256;  // floats of a tile; packs of four for a thread
constexpr int AT_ONCE = 8;                          // elements that a thread loads before it stores them

struct Tile {
  i64 ours, theirs;  // its first weight here, its first channel there
  int tap, taps, channels, pitch, line;
  bool whole, pairs;  // its weights lie together here; pairs of channels lie at whole words there
  Divisor by_pairs;
  __device__ Tile(const Weights& w) : by_pairs(w.by_pairs) {
    const unsigned all = unsigned(w.taps), wide = unsigned(w.tile_taps), across = (all + wide - 1) / wide;
    const unsigned deep = unsigned(w.tile_channels), down = (unsigned(w.channels) + deep - 1) / deep;
    const unsigned part = blockIdx.x / across, o = part / down, c = (part - o * down) * deep;
    tap = int((blockIdx.x - part * across) * wide);
    taps = int(min(wide, all - tap));
    channels = int(min(deep, unsigned(w.channels) - c));
    pitch = int(wide | 1);  // odd, so that the channels of a tap lie in different banks
    line = int(all);
    ours = (i64(o) * w.channels + c) * w.taps + tap;
    theirs = o * w.row + o / unsigned(w.share) * w.shift + c;
    whole = taps == line && pitch == line && channels % 4 == 0 && ours % 4 == 0;
    pairs = w.even && channels == int(deep);
  }
  // f(index here, index in the tile) for all of its weights
  template <typename F> __device__ void each(F f) const {
#pragma unroll 4
    for (int i = threadIdx.x; i < channels * taps; i += 256) {
      const int c = i / taps, t = i - c * taps;
      f(ours + c * line + t, c * pitch + t);
    }
  }
  // tap and channel number i, of a tap's channels one after the other, COUNT of them at a time
  template <int COUNT> __device__ void split(int i, int& t, int& c) const {
    t = COUNT > 1 ? int(by_pairs.quotient(i)) : i / channels;
    c = i * COUNT - t * channels;
  }
};

template <int COUNT, typename T>
__device__ void write_turned(const Tile& at, const float* tile, T* turned, const int* place) {
#pragma unroll 4
  for (int i = threadIdx.x; i < at.channels * at.taps / COUNT; i += 256) {
    int t, c;
    at.split<COUNT>(i, t, c);
    Pack<T, COUNT> pack;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) pack.v[k] = T(tile[(c + k) * at.pitch + t]);
    *reinterpret_cast<Pack<T, COUNT>*>(turned + at.theirs + place[at.tap + t] + c) = pack;
  }
}

template <int COUNT, typename T>
__device__ void read_turned(const Tile& at, float* tile, const T* turned, const int* place) {
  const int count = at.channels * at.taps / COUNT;
  for (int i0 = threadIdx.x; i0 < count; i0 += 256 * AT_ONCE) {
    Pack<T, COUNT> packs[AT_ONCE];
    int to[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int i = i0 + u * 256;
      if (i >= count) break;
      int t, c;
      at.split<COUNT>(i, t, c);
      to[u] = c * at.pitch + t;
      packs[u] = *reinterpret_cast<const Pack<T, COUNT>*>(turned + at.theirs + place[at.tap + t] + c);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (i0 + u * 256 >= count) break;
#pragma unroll
      for (int k = 0; k < COUNT; ++k) tile[to[u] + k * at.pitch] = float(packs[u].v[k]);
    }
  }
}

// turned = w; b_turned = b unless there is none
template <typename T> __global__ void __launch_bounds__(256)
turn(const float* w, T* turned, const float* b, T* b_turned, i64 biases, const int* place, WEIGHTS) {
  __shared__ __align__(16) float tile[TILE];
  const Tile at(NUMBERS);
  using Four = Pack<float, 4>;
  if (at.whole && aligned(w, 16)) {
    const int count = at.channels * at.taps / 4;
    const Four* from = reinterpret_cast<const Four*>(w + at.ours);
    Four four[FOURS];
#pragma unroll
    for (int u = 0; u < FOURS; ++u)
      if (const int i = threadIdx.x + u * 256; i < count) four[u] = from[i];
#pragma unroll
    for (int u = 0; u < FOURS; ++u)
      if (const int i = threadIdx.x + u * 256; i < count) reinterpret_cast<Four*>(tile)[i] = four[u];
  } else {
    at.each([&](i64 ours, int here) { tile[here] = w[ours]; });
  }
  __syncthreads();
  if (at.pairs)
    write_turned<2>(at, tile, turned, place);
  else
    write_turned<1>(at, tile, turned, place);
  if (b)
    for (i64 o = blockIdx.x * 256ll + threadIdx.x; o < biases; o += gridDim.x * 256ll) b_turned[o] = T(b[o]);
}

// w += turned
template <typename T> __global__ void __launch_bounds__(256)
add_turned(const T* turned, float* w, const int* place, WEIGHTS) {
  __shared__ __align__(16) float tile[TILE];
  const Tile at(NUMBERS);
  using Four = Pack<float, 4>;
  if (at.pairs)
    read_turned<2>(at, tile, turned, place);
  else
    read_turned<1>(at, tile, turned, place);
  __syncthreads();
  if (at.whole && aligned(w, 16)) {
    const int count = at.channels * at.taps / 4;
    Four* to = reinterpret_cast<Four*>(w + at.ours);
    Four four[FOURS];
#pragma unroll
    for (int u = 0; u < FOURS; ++u)
      if (const int i = threadIdx.x + u * 256; i < count) four[u] = to[i];
#pragma unroll
    for (int u = 0; u < FOURS; ++u)
      if (const int i = threadIdx.x + u * 256; i < count) {
        const Four more = reinterpret_cast<const Four*>(tile)[i];
#pragma unroll
        for (int k = 0; k < 4; ++k) four[u].v[k] += more.v[k];
        to[i] = four[u];
      }
  } else {
    at.each([&](i64 ours, int here) { w[ours] += tile[here]; });
  }
}

// w += turned, for weights in the same order
template <typename T> __global__ void add_same(const T* turned, float* w, i64 n) {
  each<4>(n, [=](i64, T x, float& sum) { sum += float(x); }, in(turned), both(w));
}

// Pixel (r, j) of an image of blocks has the pixels of a block of x, line by line, then zeros up to its `depth`:
// out[n, r, j, (u * across + v) * C + c] = x[n, r * down + u - pad, j * across + v - pad_v, c], 0 outside.
// `line` counts the elements of a line of x, `run` those of a line of a block (across * C), `before` is pad_v * C.
template <typename T>
__global__ void gather_blocks(const T* x, T* out, i64 size, i64 height, i64 line, i64 down, i64 run, i64 pad,
                              i64 before, i64 rows, i64 columns, i64 depth, i64 by_packs, i64 by_columns, i64 by_rows,
                              i64 by_run) {
  constexpr int V = PACK;
  const unsigned packs = unsigned(depth / V), width = unsigned(columns), tall = unsigned(rows), along = unsigned(run);
  const Divisor of_packs(by_packs), of_columns(by_columns), of_rows(by_rows), of_run(by_run);
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < unsigned(size / V); i += gridDim.x * blockDim.x) {
    const unsigned pixel = of_packs.quotient(i), channel = (i - pixel * packs) * V, r = of_columns.quotient(pixel);
    const unsigned j = pixel - r * width, image_number = of_rows.quotient(r), first = of_run.quotient(channel);
    int u = int(first), rest = int(channel - first * along);
    const int top = int((r - image_number * tall) * unsigned(down)) - int(pad), left = int(j * along) - int(before);
    const T* image = x + i64(image_number) * height * line;
    Pack<T, V> pack{};
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = top + u, from = left + rest;
      const bool inside = u < int(down) && at >= 0 && at < int(height) && from >= 0 && from < int(line);
      if (inside) pack.v[k] = image[at * int(line) + from];
      if (++rest == int(run)) {
        rest = 0;
        ++u;
      }
    }
    both(out).template store<V>(i, pack);
  }
}

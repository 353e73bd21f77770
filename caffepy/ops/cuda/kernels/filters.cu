// Weights, and images of few channels, arranged for cuDNN with the channels last.

#include "pack.cuh"

// Weights are (O, C, taps) in Caffe's order. For cuDNN the weights of an output are a row, in which those of tap t
// begin at place[t], one for each channel; after every `share` outputs they move on by `shift`. The rest of a row is
// not written. A block of 256 threads takes a tile of one output.
struct Weights {
  i64 outputs, channels, taps, row, share, shift, tile_channels, tile_taps;
};

constexpr int TILE = 4096;  // floats of a tile

struct Tile {
  i64 ours, theirs;  // its first weight here, its first channel there
  int tap, taps, channels, pitch;
  __device__ Tile(const Weights& w) {
    const unsigned across = unsigned((w.taps + w.tile_taps - 1) / w.tile_taps);
    const unsigned down = unsigned((w.channels + w.tile_channels - 1) / w.tile_channels);
    const unsigned o = blockIdx.x / (across * down), c = blockIdx.x / across % down * unsigned(w.tile_channels);
    tap = int(blockIdx.x % across * w.tile_taps);
    taps = int(min(w.tile_taps, w.taps - tap));
    channels = int(min(w.tile_channels, w.channels - c));
    pitch = int(w.tile_taps | 1);  // odd, so that the channels of a tap lie in different banks
    ours = (o * w.channels + c) * w.taps + tap;
    theirs = o * w.row + o / w.share * w.shift + c;
  }
};

// turned = w; b_turned = b unless there is none
template <typename T> __global__ void __launch_bounds__(256)
turn(const float* w, T* turned, const float* b, T* b_turned, i64 biases, const int* place, i64 outputs, i64 channels,
     i64 taps, i64 row, i64 share, i64 shift, i64 tile_channels, i64 tile_taps) {
  __shared__ float tile[TILE];
  const Tile at(Weights{outputs, channels, taps, row, share, shift, tile_channels, tile_taps});
#pragma unroll 4
  for (int i = threadIdx.x; i < at.channels * at.taps; i += 256) {
    const int c = i / at.taps, t = i % at.taps;
    tile[c * at.pitch + t] = w[at.ours + c * taps + t];
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < at.channels * at.taps; i += 256) {
    const int t = i / at.channels, c = i % at.channels;
    turned[at.theirs + place[at.tap + t] + c] = T(tile[c * at.pitch + t]);
  }
  if (b)
    for (i64 o = blockIdx.x * 256ll + threadIdx.x; o < biases; o += gridDim.x * 256ll) b_turned[o] = T(b[o]);
}

// w += turned
template <typename T> __global__ void __launch_bounds__(256)
add_turned(const T* turned, float* w, const int* place, i64 outputs, i64 channels, i64 taps, i64 row, i64 share,
           i64 shift, i64 tile_channels, i64 tile_taps) {
  __shared__ float tile[TILE];
  const Tile at(Weights{outputs, channels, taps, row, share, shift, tile_channels, tile_taps});
#pragma unroll 4
  for (int i = threadIdx.x; i < at.channels * at.taps; i += 256) {
    const int t = i / at.channels, c = i % at.channels;
    tile[c * at.pitch + t] = float(turned[at.theirs + place[at.tap + t] + c]);
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < at.channels * at.taps; i += 256) {
    const int c = i / at.taps, t = i % at.taps;
    w[at.ours + c * taps + t] += tile[c * at.pitch + t];
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
                              i64 before, i64 rows, i64 columns, i64 depth) {
  constexpr int V = PACK;
  const unsigned per = unsigned(depth / V);
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < unsigned(size / V); i += gridDim.x * blockDim.x) {
    const unsigned pixel = i / per, channel = i % per * V, j = pixel % unsigned(columns), r = pixel / unsigned(columns);
    int u = int(channel / unsigned(run)), rest = int(channel % unsigned(run));
    const int top = int(r % unsigned(rows) * down - pad), left = int(j * run - before);
    const T* image = x + i64(r / unsigned(rows)) * height * line;
    Pack<T, V> pack;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = top + u, from = left + rest;
      const bool inside = u < int(down) && at >= 0 && at < int(height) && from >= 0 && from < int(line);
      pack.v[k] = inside ? image[i64(at) * line + from] : T(0.0f);
      if (++rest == int(run)) {
        rest = 0;
        ++u;
      }
    }
    both(out).template store<V>(i, pack);
  }
}

// One rank's side of an all-reduce schedule over the flat float buffers of all ranks, which it reads through peer access.
//
// The buffer is cut into chunks. Each action of the rank (to add or copy the chunks of another rank's buffer) has
// `blocks` blocks of its own, and block b takes chunks b, b + blocks, ...; so the levels of a schedule, up and down, run
// at the same time, each on chunks that the levels before it are done with. A word for each rank, level and b counts the
// chunks that are done, in all launches so far. A block waits for what it reads to be written, and for those to be done
// who still read what it writes, always in lower levels; blocks of lower levels have lower numbers. The first block
// tells that the rank's buffer may be read (level 0); the last one waits until nobody reads it any more, and counts for
// itself in a level behind all others.
//
// buffers and progress: by rank. progress[r]: (levels + 2, blocks). actions: one for each `blocks` blocks, then one with
// the waits of the last block. All ranks must run the same launches.

#include "progress.cuh"

struct Action { int operation, source, level, first_wait, waits, total; };  // operation: 0 none, 1 add, 2 copy
struct Wait { int rank, level; };

// to = from, or to = (to + from) * scale, for n floats of which others may have written any since the launch.
template <bool ADD> __device__ void move(float* to, const float* from, int n, float scale) {
  constexpr int U = 8;
  const int packs = n / 4;
  float4* to4 = reinterpret_cast<float4*>(to);
  const float4* from4 = reinterpret_cast<const float4*>(from);
  for (int i = threadIdx.x; i < packs; i += blockDim.x * U) {
    float4 x[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int j = i + u * blockDim.x;
      if (j < packs) x[u] = __ldcv(from4 + j);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int j = i + u * blockDim.x;
      if (j < packs) {
        if (ADD) {
          const float4 y = __ldcg(to4 + j);
          x[u].x = (y.x + x[u].x) * scale;
          x[u].y = (y.y + x[u].y) * scale;
          x[u].z = (y.z + x[u].z) * scale;
          x[u].w = (y.w + x[u].w) * scale;
        }
        to4[j] = x[u];
      }
    }
  }
  for (int i = packs * 4 + threadIdx.x; i < n; i += blockDim.x) {
    const float x = __ldcv(from + i);
    to[i] = ADD ? (__ldcg(to + i) + x) * scale : x;
  }
}

// scale: what complete sums are multiplied by.
extern "C" __global__ void __launch_bounds__(512, 2)
    run_schedule(int rank, float* const* buffers, u64* const* progress, const Action* actions, const Wait* waits, int blocks,
                 int levels, i64 size, int chunk, float scale, const volatile int* abort_flag) {
  const i64 chunks = (size + chunk - 1) / chunk;
  const bool opens = blockIdx.x == 0, closes = blockIdx.x == gridDim.x - 1;
  if (opens || closes) {
    const int b = threadIdx.x;
    if (b >= blocks) return;
    u64* own = progress[rank] + (opens ? 0 : i64(levels + 1) * blocks) + b;
    const u64 end = *own + (b < chunks ? (chunks - b + blocks - 1) / blocks : 0);
    if (closes) {
      const Action last = actions[(gridDim.x - 2) / blocks];
      for (int w = 0; w < last.waits; ++w) {
        const Wait wait = waits[last.first_wait + w];
        if (reach(progress[wait.rank] + i64(wait.level) * blocks + b, end, abort_flag) < end) return;
      }
    }
    release(own, end);
    return;
  }

  const Action action = actions[(blockIdx.x - 1) / blocks];
  const int b = (blockIdx.x - 1) % blocks;
  u64* own = progress[rank] + i64(action.level) * blocks + b;
  const u64* other = nullptr;  // what this thread waits for
  if (threadIdx.x < action.waits) {
    const Wait wait = waits[action.first_wait + threadIdx.x];
    other = progress[wait.rank] + i64(wait.level) * blocks + b;
  }
  float* mine = buffers[rank];
  const float* theirs = buffers[action.source];
  u64 done = *own, seen = 0;
  for (i64 c = b; c < chunks; c += blocks) {
    ++done;
    if (other && seen < done) seen = reach(other, done, abort_flag);
    if (!__syncthreads_and(!other || seen >= done)) return;
    const i64 first = c * chunk;
    const int n = int(size - first < chunk ? size - first : chunk);
    if (action.operation == 1)
      move<true>(mine + first, theirs + first, n, action.total ? scale : 1.0f);
    else
      move<false>(mine + first, theirs + first, n, 1.0f);
    __syncthreads();
    if (threadIdx.x == 0) release(own, done);
  }
}

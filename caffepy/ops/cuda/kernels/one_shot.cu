// One rank's side of a one-shot all-reduce: it writes chunks of its own floats into the memory of all other ranks, and
// adds up what they have written into its own, in the order of ranks, so that all get the same bits.
//
// A launch may write some chunks, add up some, or both. To write waits for nobody. A rank has room for two turns of each
// other rank, which it uses in alternation, so nobody need tell when it has read: before a rank writes turn t + 2 of a
// chunk it has added up turn t + 1, for which each other rank had to write that, after it had added up turn t.
//
// inboxes[r]: (2, ranks - 1, room) floats, without a row for r itself. arrived[r]: (ranks, all), the turns that each rank
// has written there. sent, added: (all), the turns that this rank has written and added up.

#include "progress.cuh"

struct Chunk { i64 offset, place, count; };  // where it begins in the floats, and in a row of an inbox: a multiple of 4

// The row of an inbox for a chunk that `source` gives `destination`.
__device__ inline float* row(float* const* inboxes, int source, int destination, int ranks, u64 turn, i64 room) {
  return inboxes[destination] + (i64(turn & 1) * (ranks - 1) + source - (source > destination)) * room;
}

__device__ void write(const float* own, const Chunk chunk, float* const* inboxes, int rank, int ranks, u64 turn, i64 room) {
  constexpr int U = 4;
  const i64 packs = chunk.offset % 4 ? 0 : chunk.count / 4;
  const float4* own4 = reinterpret_cast<const float4*>(own);
  for (i64 i = threadIdx.x; i < packs; i += blockDim.x * U) {
    float4 x[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u * blockDim.x < packs) x[u] = __ldcg(own4 + i + u * blockDim.x);
    for (int k = 1; k < ranks; ++k) {
      const int other = (rank + k) % ranks;
      float4* to = reinterpret_cast<float4*>(row(inboxes, rank, other, ranks, turn, room) + chunk.place);
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (i + u * blockDim.x < packs) to[i + u * blockDim.x] = x[u];
    }
  }
  for (i64 i = packs * 4 + threadIdx.x; i < chunk.count; i += blockDim.x)
    for (int k = 1; k < ranks; ++k) {
      const int other = (rank + k) % ranks;
      row(inboxes, rank, other, ranks, turn, room)[chunk.place + i] = __ldcg(own + i);
    }
}

// own = scale * the sum over ranks
__device__ void add(float* own, const Chunk chunk, float* const* inboxes, int rank, int ranks, u64 turn, i64 room,
                    float scale) {
  constexpr int U = 4;
  const i64 packs = chunk.offset % 4 ? 0 : chunk.count / 4;
  float4* own4 = reinterpret_cast<float4*>(own);
  for (i64 i = threadIdx.x; i < packs; i += blockDim.x * U) {
    float4 total[U];
    for (int source = 0; source < ranks; ++source) {
      const float* from = source == rank ? own : row(inboxes, source, rank, ranks, turn, room) + chunk.place;
      const float4* from4 = reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (i + u * blockDim.x >= packs) continue;
        const float4 x = __ldcg(from4 + i + u * blockDim.x);
        if (source == 0) {
          total[u] = x;
        } else {
          total[u].x += x.x;
          total[u].y += x.y;
          total[u].z += x.z;
          total[u].w += x.w;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u * blockDim.x < packs)
        own4[i + u * blockDim.x] =
            make_float4(total[u].x * scale, total[u].y * scale, total[u].z * scale, total[u].w * scale);
  }
  for (i64 i = packs * 4 + threadIdx.x; i < chunk.count; i += blockDim.x) {
    float total = 0;
    for (int source = 0; source < ranks; ++source) {
      const float* from = source == rank ? own : row(inboxes, source, rank, ranks, turn, room) + chunk.place;
      const float x = __ldcg(from + i);
      total = source ? total + x : x;
    }
    own[i] = total * scale;
  }
}

// Writes chunks first to stop - 1, then adds up all if `adds`. A block waits for blocks of its own number alone, which
// write before they wait; blocks start in the order of their numbers, so the lowest that has not ended always goes on.
extern "C" __global__ void __launch_bounds__(512, 2)
    one_shot(int rank, int ranks, float* floats, float* const* inboxes, u64* const* arrived, u64* sent, u64* added,
             const Chunk* chunks, int all, int first, int stop, int adds, i64 room, float scale,
             const volatile int* abort_flag) {
  const int blocks = gridDim.x, other = threadIdx.x;
  const bool waits = other < ranks && other != rank;  // this thread, for one other rank
  for (int c = first + blockIdx.x; c < stop; c += blocks) {
    const Chunk chunk = chunks[c];
    const u64 turn = sent[c];
    write(floats + chunk.offset, chunk, inboxes, rank, ranks, turn, room);
    __syncthreads();
    if (threadIdx.x == 0) sent[c] = turn + 1;
    if (waits) release(arrived[other] + i64(rank) * all + c, turn + 1);
  }
  if (!adds) return;
  for (int c = (first + blockIdx.x) % blocks; c < all; c += blocks) {
    const Chunk chunk = chunks[c];
    const u64 turn = added[c];
    const bool here = !waits || reach(arrived[rank] + i64(other) * all + c, turn + 1, abort_flag) > turn;
    if (!__syncthreads_and(here)) return;
    if (threadIdx.x == 0) added[c] = turn + 1;
    add(floats + chunk.offset, chunk, inboxes, rank, ranks, turn, room, scale);
  }
}

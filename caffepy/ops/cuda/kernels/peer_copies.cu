// Signals between ranks that copy engines copy into each other's memory: an iteration has begun, an array has come.
//
// arrived[r]: (ranks, signals), how often each rank has given each signal, in the memory of r. given: (signals + 1), how
// often this rank has; the last is 1 if an abort has ended a wait: then no signal is given any more, since what it stands
// for has not happened. All give the same signals equally often.

#include "progress.cuh"

extern "C" __global__ void give_signal(int rank, int ranks, u64* const* arrived, u64* given, int signals, int which) {
  const u64 turn = given[which] + 1;
  if (given[signals]) return;
  __syncwarp();
  if (threadIdx.x == 0) given[which] = turn;
  for (int other = threadIdx.x; other < ranks; other += blockDim.x)
    if (other != rank) release(arrived[other] + i64(rank) * signals + which, turn);
}

__device__ inline u64 nanoseconds() {
  u64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Waits for the signal of all others; the first time that the abort flag is set, `patience` nanoseconds more, in which one
// that has not heard of it may end its update.
extern "C" __global__ void wait_for_signal(int rank, int ranks, u64* const* arrived, u64* given, int signals, int which,
                                           const volatile int* abort_flag, u64 patience) {
  const u64 turn = given[which];
  for (int other = threadIdx.x; other < ranks; other += blockDim.x) {
    if (other == rank) continue;
    const u64* progress = arrived[rank] + i64(other) * signals + which;
    if (reach(progress, turn, abort_flag) >= turn) continue;
    const u64 until = nanoseconds() + (given[signals] ? 0 : patience);
    while (acquire(progress) < turn && nanoseconds() < until) {}
    if (acquire(progress) < turn) given[signals] = 1;
  }
}

// own = scale * the sum over ranks of `count` floats, in the order of ranks, so that all get the same bits. inbox
// (ranks - 1, room) has those of all others from `place` on, which is as far from a multiple of 4 as `first` of own.
extern "C" __global__ void __launch_bounds__(512)
    add_copies(int rank, int ranks, float* own, i64 first, i64 count, const float* inbox, i64 room, i64 place, float scale) {
  constexpr int U = 4;
  own += first;
  const auto from = [&](int source) { return source == rank ? own : inbox + (source - (source > rank)) * room + place; };
  const i64 head = min(count, i64(-first & 3)), packs = (count - head) / 4, tail = head + packs * 4;
  const i64 start = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
  for (i64 i = start; i < packs; i += step * U) {
    float4 total[U];
    for (int source = 0; source < ranks; ++source) {
      const float4* from4 = reinterpret_cast<const float4*>(from(source) + head);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (i + u * step >= packs) continue;
        const float4 x = __ldcg(from4 + i + u * step);
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
      if (i + u * step < packs)
        reinterpret_cast<float4*>(own + head)[i + u * step] =
            make_float4(total[u].x * scale, total[u].y * scale, total[u].z * scale, total[u].w * scale);
  }
  for (i64 i = start; i < head + count - tail; i += step) {
    const i64 at = i < head ? i : tail + i - head;
    float total = 0;
    for (int source = 0; source < ranks; ++source) {
      const float x = __ldcg(from(source) + at);
      total = source ? total + x : x;
    }
    own[at] = total * scale;
  }
}

// What the copy engines leave to do in an all-reduce: to wait for one another, and to add up what they brought.

typedef long long i64;
typedef unsigned long long u64;

__device__ inline u64 acquire(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

__device__ inline void release(u64* p, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// All ranks come here: one thread for each tells its rank and waits for it, unless the group was given up.
// arrivals: by rank, (size,) words each; count: how often this rank was here.
extern "C" __global__ void meet(int rank, int size, u64* const* arrivals, u64* count, const volatile int* given_up) {
  const int other = threadIdx.x;
  const u64 now = *count + 1;
  __syncthreads();
  if (other < size && other != rank) {
    release(arrivals[other] + rank, now);
    const u64* its = arrivals[rank] + other;
    for (unsigned spin = 1; acquire(its) < now; ++spin)
      if (spin % 1024 == 0 && *given_up) break;
  }
  if (other == 0) *count = now;
}

__device__ inline float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// mine = (mine + the sum of the others' rows) * scale, added in the order of the ranks; all of n packs of 4 floats.
// rows: (others, n), those of lower ranks first, of which there are `before`.
extern "C" __global__ void __launch_bounds__(512)
    mean(float4* mine, const float4* rows, i64 n, int others, int before, float scale) {
  constexpr int U = 4;
  const i64 across = i64(gridDim.x) * blockDim.x;
  for (i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x; first < n; first += across * U) {
    float4 sum[U];
    for (int k = 0; k <= others; ++k) {
      const float4* from = k == before ? mine : rows + (k < before ? k : k - 1) * n;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const i64 i = first + u * across;
        if (i < n) {
          const float4 x = __ldcv(from + i);
          sum[u] = k ? plus(sum[u], x) : x;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const i64 i = first + u * across;
      if (i < n) mine[i] = make_float4(sum[u].x * scale, sum[u].y * scale, sum[u].z * scale, sum[u].w * scale);
    }
  }
}

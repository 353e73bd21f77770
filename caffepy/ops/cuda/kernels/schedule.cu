// One rank's side of an all-reduce schedule over the flat float buffers of all ranks, which it reads through peer access.
//
// The buffer is cut into chunks, chunks are dealt to blocks; block b of every rank works on the same chunks, in the same
// order, so blocks of different ranks wait for one another and for nobody else, and chunks move through the levels one
// behind the other. After each level of a chunk a block raises its progress: base + chunk * levels + level + 1. A reader
// waits for the progress of whose buffer it reads, a writer for that of all who still read what it overwrites.
//
// actions: for each level {operation (0 none, 1 add, 2 copy), source, first wait, waits}; one more at the end, of waits
// only. waits: {rank, level}.

typedef long long i64;
typedef unsigned long long u64;

struct Action { int operation, source, first_wait, waits; };
struct Wait { int rank, level; };

__device__ inline u64 acquire(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

__device__ inline void release(u64* p, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// False if the group was given up meanwhile.
__device__ inline bool reached(const u64* progress, u64 value, const volatile int* given_up) {
  for (int spin = 0; acquire(progress) < value; ++spin)
    if (spin % 1024 == 1023 && *given_up) return false;
  return true;
}

template <bool ADD> __device__ void move(float* to, const float* from, i64 n) {
  const i64 packs = n / 4;
  float4* to4 = reinterpret_cast<float4*>(to);
  const float4* from4 = reinterpret_cast<const float4*>(from);
  constexpr int U = 4;
  for (i64 i = threadIdx.x; i < packs; i += i64(blockDim.x) * U) {
    float4 x[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + i64(u) * blockDim.x < packs) x[u] = __ldcv(from4 + i + i64(u) * blockDim.x);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const i64 j = i + i64(u) * blockDim.x;
      if (j >= packs) break;
      if (ADD) {
        const float4 y = to4[j];
        x[u] = make_float4(x[u].x + y.x, x[u].y + y.y, x[u].z + y.z, x[u].w + y.w);
      }
      to4[j] = x[u];
    }
  }
  for (i64 i = packs * 4 + threadIdx.x; i < n; i += blockDim.x) to[i] = ADD ? to[i] + __ldcv(from + i) : __ldcv(from + i);
}

// buffers and progress: by rank; progress[r] has a word for each block. base: this rank's count of what went before, a
// word for each block.
extern "C" __global__ void __launch_bounds__(512) run_schedule(int rank, float* const* buffers, u64* const* progress, u64* base,
                                                              const Action* actions, const Wait* waits, int levels, i64 size,
                                                              i64 chunk, const volatile int* given_up) {
  __shared__ bool go;
  const u64 start = base[blockIdx.x];
  float* mine = buffers[rank];
  const i64 chunks = (size + chunk - 1) / chunk;
  u64 done = start;
  for (i64 c = blockIdx.x; c < chunks; c += gridDim.x, done += levels) {
    const i64 first = c * chunk, n = size - first < chunk ? size - first : chunk;
    for (int level = 0; level < levels; ++level) {
      const Action action = actions[level];
      if (threadIdx.x == 0) {
        go = true;
        for (int w = 0; w < action.waits && go; ++w) {
          const Wait wait = waits[action.first_wait + w];
          go = reached(progress[wait.rank] + blockIdx.x, done + wait.level + 1, given_up);
        }
      }
      __syncthreads();
      if (!go) return;
      if (action.operation == 1) move<true>(mine + first, buffers[action.source] + first, n);
      if (action.operation == 2) move<false>(mine + first, buffers[action.source] + first, n);
      __threadfence_system();
      __syncthreads();
      if (threadIdx.x == 0) release(progress[rank] + blockIdx.x, done + level + 1);
    }
  }
  // Nobody reads this rank's buffer any more when the last chunk's readers are done.
  if (threadIdx.x == 0) {
    const Action last = actions[levels];
    go = true;
    for (int w = 0; w < last.waits && go && done > start; ++w) {
      const Wait wait = waits[last.first_wait + w];
      go = reached(progress[wait.rank] + blockIdx.x, done - levels + wait.level + 1, given_up);
    }
    base[blockIdx.x] = done;
  }
}

// Biases and their gradients; arrays are (N, O, P), with P 1 for the rows of a matrix. All sums in a fixed order.

typedef long long i64;

template <typename T> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };
template <typename T> using Sum = typename SumOf<T>::type;

// As many elements as 16 bytes hold.
template <typename T> struct alignas(16) Pack { T v[16 / sizeof(T)]; };

__device__ inline bool aligned(const void* p) { return reinterpret_cast<unsigned long long>(p) % 16 == 0; }

__device__ inline i64 thread_index() { return blockIdx.x * i64(blockDim.x) + threadIdx.x; }
__device__ inline i64 thread_count() { return gridDim.x * i64(blockDim.x); }

template <typename S> __device__ S warp_sum(S x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_down_sync(0xffffffffu, x, lanes);
  return x;
}

// y[n, o, p] += b[o]
template <typename T> __global__ void add_bias(T* y, const T* b, i64 size, int outputs, int positions) {
  constexpr int V = 16 / sizeof(T);
  if (positions % V == 0 && aligned(y)) {
    Pack<T>* packs = reinterpret_cast<Pack<T>*>(y);
    const unsigned across = positions / V;
    for (i64 i = thread_index(); i < size / V; i += thread_count()) {
      const Sum<T> bias = Sum<T>(b[unsigned(i) / across % unsigned(outputs)]);
      Pack<T> x = packs[i];
#pragma unroll
      for (int j = 0; j < V; ++j) x.v[j] = T(Sum<T>(x.v[j]) + bias);
      packs[i] = x;
    }
  } else {
    for (i64 i = thread_index(); i < size; i += thread_count())
      y[i] = T(Sum<T>(y[i]) + Sum<T>(b[unsigned(i) / unsigned(positions) % unsigned(outputs)]));
  }
}

// out[i] += x[i]
template <typename T> __global__ void accumulate(const T* x, T* out, i64 size) {
  constexpr int V = 16 / sizeof(T);
  i64 done = 0;
  if (aligned(x) && aligned(out)) {
    const Pack<T>* from = reinterpret_cast<const Pack<T>*>(x);
    Pack<T>* to = reinterpret_cast<Pack<T>*>(out);
    for (i64 i = thread_index(); i < size / V; i += thread_count()) {
      const Pack<T> a = from[i];
      Pack<T> b = to[i];
#pragma unroll
      for (int j = 0; j < V; ++j) b.v[j] = T(Sum<T>(b.v[j]) + Sum<T>(a.v[j]));
      to[i] = b;
    }
    done = size / V * V;
  }
  for (i64 i = done + thread_index(); i < size; i += thread_count()) out[i] = T(Sum<T>(out[i]) + Sum<T>(x[i]));
}

// Sum of x[0 .. size) over the lanes of a warp; whole on lane 0.
template <typename T> __device__ Sum<T> line_sum(const T* x, int size) {
  constexpr int V = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  Sum<T> sum = 0;
  if (size % V == 0 && aligned(x)) {
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(x);
#pragma unroll 4
    for (int i = lane; i < size / V; i += 32) {
      const Pack<T> a = packs[i];
#pragma unroll
      for (int j = 0; j < V; ++j) sum += Sum<T>(a.v[j]);
    }
  } else {
#pragma unroll 4
    for (int i = lane; i < size; i += 32) sum += Sum<T>(x[i]);
  }
  return warp_sum(sum);
}

// part[o, s] = sum over the lines of share s of dy[n, o, ...]; a plane makes ceil(P / length) lines, lines go round
// over the shares' images in order. Grid (O, shares), 256 threads: a warp takes every eighth line of its share.
template <typename T>
__global__ void bias_gradient_planes(
    const T* dy, Sum<T>* part, int images, int outputs, int positions, int length, int shares) {
  __shared__ Sum<T> sums[8];
  const int o = blockIdx.x, share = blockIdx.y, warp = threadIdx.x / 32;
  const int lines = (positions + length - 1) / length;
  const i64 total = i64(images) * lines;
  const i64 lo = total * share / shares, hi = total * (share + 1) / shares;
  Sum<T> sum = 0;
  for (i64 line = lo + warp; line < hi; line += 8) {
    const i64 n = line / lines;
    const int p = int(line % lines) * length;
    sum += line_sum(dy + (n * outputs + o) * positions + p, min(length, positions - p));
  }
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) sum += sums[w];
    part[i64(o) * shares + share] = sum;
  }
}

// part[o, s] = sum over the rows of share s of dy[m, o]. Grid (ceil(O / 32), shares), 256 threads: 32 columns, 8 rows.
template <typename T>
__global__ void bias_gradient_rows(const T* dy, Sum<T>* part, int rows, int outputs, int shares) {
  __shared__ Sum<T> sums[8][32];
  const int column = threadIdx.x % 32, line = threadIdx.x / 32, o = blockIdx.x * 32 + column, share = blockIdx.y;
  const i64 lo = i64(rows) * share / shares, hi = i64(rows) * (share + 1) / shares;
  Sum<T> sum = 0;
  if (o < outputs) {
#pragma unroll 4
    for (i64 m = lo + line; m < hi; m += 8) sum += Sum<T>(dy[m * outputs + o]);
  }
  sums[line][column] = sum;
  __syncthreads();
  if (line == 0 && o < outputs) {
    for (int l = 1; l < 8; ++l) sum += sums[l][column];
    part[i64(o) * shares + share] = sum;
  }
}

// db[o] += sum over s of part[o, s]; a warp for each o.
template <typename T> __global__ void bias_gradient_finish(const Sum<T>* part, T* db, int outputs, int shares) {
  const int o = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (o >= outputs) return;
  Sum<T> sum = 0;
  for (int s = threadIdx.x % 32; s < shares; s += 32) sum += part[i64(o) * shares + s];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) db[o] = T(Sum<T>(db[o]) + sum);
}

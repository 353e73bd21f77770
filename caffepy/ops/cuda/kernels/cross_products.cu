// Products of the channels of two images at the same pixels, summed over pixels: partial sums, which others add up in a
// fixed order.

#include "pack.cuh"
#include "mma.cuh"
#include "pointwise.cuh"

constexpr int THREADS = 256, DEEP = 64, ACROSS = 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Byte of a chunk of 8 channels in a piece of DEEP rows, which lies in blocks of 64 channels: see in_columns in pointwise.cu.
__device__ inline int in_piece(int row, int chunk) {
  return chunk / 8 * (DEEP * 128) + row * 128 + ((chunk ^ row) % 8 * 16);
}

// products (streams, outputs, inputs) = a^T b of the rows of each stream, sums (streams, outputs) of those of a. A block of
// 256 threads has ACROSS outputs by E inputs and goes through pieces of DEEP rows, `streams` of them apart, DOWN from the
// last or up from the first. b is at the pixels of the rows. ALIKE: a is b, with E channels at most, and is fetched once.
template <typename T, int E, int ALIKE, int DOWN> __global__ void __launch_bounds__(THREADS, 2)
cross_products(const T* a, const T* b, float* products, float* sums, int rows, int outputs, int inputs, int streams, PIXELS) {
  constexpr int A = ALIKE ? 0 : ACROSS * DEEP * 2, B = E * DEEP * 2, STAGE = A + B, STAGES = ALIKE ? 6 : 3;
  constexpr int OF_A = ALIKE ? E / 8 : ACROSS / 8, OF_B = E / 8;  // chunks of a row
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned ring = shared_address(memory);
  const Pixels pixels = OF_PIXELS;
  const int t = threadIdx.x;
  const int by_a = (outputs + ACROSS - 1) / ACROSS, by_b = (inputs + E - 1) / E;
  const int first_a = int(blockIdx.x) % by_a * ACROSS, first_b = int(blockIdx.x) / by_a % by_b * E;
  const int stream = int(blockIdx.x) / (by_a * by_b);
  const int pieces = (rows + DEEP - 1) / DEEP, total = stream < pieces ? (pieces - 1 - stream) / streams + 1 : 0;

  int fetched = 0;
  auto fetch_next = [&]() {
    if (fetched < total) {
      const unsigned stage = ring + fetched % STAGES * STAGE;
      const int at = stream + fetched * streams, from = (DOWN ? pieces - 1 - at : at) * DEEP;
#pragma unroll
      for (int i = 0; i < (ALIKE ? 0 : DEEP * OF_A / THREADS); ++i) {
        const int row = (t + i * THREADS) / OF_A, chunk = t % OF_A;
        const bool in = from + row < rows && first_a + chunk * 8 < outputs;
        fetch(stage + in_piece(row, chunk), in ? a + i64(from + row) * outputs + first_a + chunk * 8 : a, in);
      }
#pragma unroll
      for (int i = 0; i < DEEP * OF_B / THREADS; ++i) {
        const int row = (t + i * THREADS) / OF_B, chunk = t % OF_B;
        const bool in = from + row < rows && first_b + chunk * 8 < inputs;
        fetch(stage + A + in_piece(row, chunk), in ? b + pixels.at(from + row) * inputs + first_b + chunk * 8 : b, in);
      }
      ++fetched;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float product[OF_B][4] = {}, of_channel[8] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_next();
  for (int i = 0; i < total; ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    fetch_next();
    const int stage = i % STAGES * STAGE;
    const unsigned of_a = ring + stage + t / 128 % (OF_A / 8) * (DEEP * 128), of_b = ring + stage + A;
    before_products();
#pragma unroll
    for (int k = 0; k < DEEP; k += 16)
      multiply_16<T, true, true>(product, matrix(of_a + k * 128, DEEP * 128, 8 * 128, 1),
                                 matrix(of_b + k * 128, DEEP * 128, 8 * 128, 1));
    begin_products();
    if (first_b == 0)
#pragma unroll
      for (int j = 0; j < DEEP * OF_A / THREADS; ++j) {
        const int row = (t + j * THREADS) / OF_A;
        const Pack<T, 8> pack = *reinterpret_cast<const Pack<T, 8>*>(memory + stage + in_piece(row, t % OF_A));
#pragma unroll
        for (int v = 0; v < 8; ++v) of_channel[v] += float(pack.v[v]);
      }
    end_products(product);
  }

  const int row = first_a + t / 32 * 16 + t % 32 / 4, column = first_b + t % 4 * 2;
#pragma unroll
  for (int n = 0; n < OF_B; ++n)
#pragma unroll
    for (int below = 0; below < 2; ++below)
      if (row + 8 * below < outputs && column + n * 8 < inputs)
        *reinterpret_cast<float2*>(products + (i64(stream) * outputs + row + 8 * below) * inputs + column + n * 8) =
            make_float2(product[n][2 * below], product[n][2 * below + 1]);
  if (first_b) return;
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float* parts = reinterpret_cast<float*>(memory);  // (THREADS / OF_A, OF_A * 8)
#pragma unroll
  for (int v = 0; v < 8; ++v) parts[t * 8 + v] = of_channel[v];
  __syncthreads();
  if (t < OF_A * 8 && first_a + t < outputs) {
    float sum = 0;
    for (int part = 0; part < THREADS / OF_A; ++part) sum += parts[part * OF_A * 8 + t];
    sums[i64(stream) * outputs + first_a + t] = sum;
  }
}

#endif

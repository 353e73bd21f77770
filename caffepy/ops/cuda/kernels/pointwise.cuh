// Pixels as rows of matrices: where they are, how pieces of them come to shared memory, and products of pieces by wgmma.

// Where the rows of an array are: side by side, or, if stride is not 0, every stride-th pixel of each stride-th line of
// images.
struct Pixels {
  int stride, width, line, image, plane;  // rows of a line, pixels of a line and of an image, rows of an image
  Divisor by_plane, by_width;
  __device__ i64 at(int row) const {
    if (stride == 0) return row;
    const unsigned n = by_plane.quotient(row), rest = row - n * plane, h = by_width.quotient(rest);
    return i64(n) * image + (h * line + (rest - h * width)) * stride;
  }
};

#define PIXELS int stride, int width, int line, int image, int plane, i64 by_plane, i64 by_width
#define OF_PIXELS \
  Pixels { stride, width, line, image, plane, Divisor(by_plane), Divisor(by_width) }

// 16 bytes to shared memory; zeros unless they are there. Those beside them are soon wanted from the cache.
__device__ inline void fetch(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// How wgmma finds a matrix: its first byte, bytes from one block of 64 columns to the next (where rows are depth) and
// from one group of 8 rows to the next, and the swizzle: 1 of 128 bytes, 2 of 64.
__device__ inline unsigned long long matrix(unsigned at, int blocks, int rows, int swizzle) {
  return (unsigned long long)(at >> 4) | (unsigned long long)(blocks >> 4) << 16 |
         (unsigned long long)(rows >> 4) << 32 | (unsigned long long)(swizzle) << 62;
}

#define SUMS_8(s, n)                                                                                              \
  "+f"(s[n][0]), "+f"(s[n][1]), "+f"(s[n][2]), "+f"(s[n][3]), "+f"(s[n + 1][0]), "+f"(s[n + 1][1]), \
      "+f"(s[n + 1][2]), "+f"(s[n + 1][3])
#define SUMS_32(s, n) SUMS_8(s, n), SUMS_8(s, n + 2), SUMS_8(s, n + 4), SUMS_8(s, n + 6)
#define WGMMA_32(kind) \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." kind "." kind " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
               "}, %16, %17, p, 1, 1, %18, %19; }" \
               : SUMS_8(sum, 0), SUMS_8(sum, 2) \
               : "l"(a), "l"(b), "n"(int(A_TURNED)), "n"(int(B_TURNED)))
#define WGMMA_64(kind) \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
               "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, %32, %33, p, 1, 1, %34, %35; }" \
               : SUMS_32(sum, 0) \
               : "l"(a), "l"(b), "n"(int(A_TURNED)), "n"(int(B_TURNED)))
#define WGMMA_128(kind) \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
               "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
               "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
               "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
               "}, %64, %65, p, 1, 1, %66, %67; }" \
               : SUMS_32(sum, 0), SUMS_32(sum, 8) \
               : "l"(a), "l"(b), "n"(int(A_TURNED)), "n"(int(B_TURNED)))

template <typename T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16_t> = true;

// sum (64, N) += a (64, 16) * b (16, N); TURNED where rows of the piece are depth.
template <typename T, bool A_TURNED, bool B_TURNED, int TILES>
__device__ inline void multiply_16(float (&sum)[TILES][4], unsigned long long a, unsigned long long b) {
  if constexpr (TILES == 4 && IS_BF16<T>) WGMMA_32("bf16");
  if constexpr (TILES == 4 && !IS_BF16<T>) WGMMA_32("f16");
  if constexpr (TILES == 8 && IS_BF16<T>) WGMMA_64("bf16");
  if constexpr (TILES == 8 && !IS_BF16<T>) WGMMA_64("f16");
  if constexpr (TILES == 16 && IS_BF16<T>) WGMMA_128("bf16");
  if constexpr (TILES == 16 && !IS_BF16<T>) WGMMA_128("f16");
}

// Around calls of multiply_16: what was written to shared memory is seen; they begin, and run beside what follows; the
// sums are finished.
__device__ inline void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void begin_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int TILES> __device__ inline void end_products(float (&sum)[TILES][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int n = 0; n < TILES; n += 2) asm volatile("" : SUMS_8(sum, n)::"memory");
}

#endif

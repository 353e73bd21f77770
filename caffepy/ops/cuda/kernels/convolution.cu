// Columns of one image, for convolutions that cuDNN has no plan for. Three spatial axes; missing ones have size 1.

typedef long long i64;

template <typename T> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };

struct Axis {
  int size, kernel, stride, pad, dilation, out;
};

// col[c, tap, p] = x[c, p * stride - pad + tap * dilation], 0 outside
template <typename T>
__global__ void im2col(
    const T* x, T* col, int channels, int size0, int kernel0, int stride0, int pad0, int dilation0, int out0, int size1, int kernel1, int stride1,
    int pad1, int dilation1, int out1, int size2, int kernel2, int stride2, int pad2, int dilation2, int out2) {
  const Axis a{size0, kernel0, stride0, pad0, dilation0, out0}, b{size1, kernel1, stride1, pad1, dilation1, out1},
      c{size2, kernel2, stride2, pad2, dilation2, out2};
  const int positions = a.out * b.out * c.out, taps = a.kernel * b.kernel * c.kernel;
  const i64 size = i64(channels) * taps * positions;
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < size; i += gridDim.x * i64(blockDim.x)) {
    const int p = int(i % positions), tap = int(i / positions % taps);
    const i64 channel = i / positions / taps;
    const int u = p / (b.out * c.out) * a.stride - a.pad + tap / (b.kernel * c.kernel) * a.dilation;
    const int v = p / c.out % b.out * b.stride - b.pad + tap / c.kernel % b.kernel * b.dilation;
    const int w = p % c.out * c.stride - c.pad + tap % c.kernel * c.dilation;
    const bool inside = u >= 0 && u < a.size && v >= 0 && v < b.size && w >= 0 && w < c.size;
    col[i] = inside ? x[((channel * a.size + u) * b.size + v) * c.size + w] : T(0);
  }
}

// The position that reads element i of an axis with a tap, or -1.
__device__ inline int position(const Axis& a, int i, int tap) {
  const int at = i + a.pad - tap * a.dilation;
  if (at < 0 || at % a.stride != 0) return -1;
  const int p = at / a.stride;
  return p < a.out ? p : -1;
}

// x[c, i] = sum over the taps and positions that read it of col[c, tap, p]
template <typename T>
__global__ void col2im(
    const T* col, T* x, int channels, int size0, int kernel0, int stride0, int pad0, int dilation0, int out0, int size1, int kernel1, int stride1,
    int pad1, int dilation1, int out1, int size2, int kernel2, int stride2, int pad2, int dilation2, int out2) {
  const Axis a{size0, kernel0, stride0, pad0, dilation0, out0}, b{size1, kernel1, stride1, pad1, dilation1, out1},
      c{size2, kernel2, stride2, pad2, dilation2, out2};
  const int positions = a.out * b.out * c.out, taps = a.kernel * b.kernel * c.kernel;
  const i64 size = i64(channels) * a.size * b.size * c.size;
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < size; i += gridDim.x * i64(blockDim.x)) {
    const int w = int(i % c.size), v = int(i / c.size % b.size), u = int(i / c.size / b.size % a.size);
    const i64 channel = i / c.size / b.size / a.size;
    typename SumOf<T>::type sum = 0;
    for (int e = 0; e < a.kernel; ++e) {
      const int p = position(a, u, e);
      if (p < 0) continue;
      for (int f = 0; f < b.kernel; ++f) {
        const int q = position(b, v, f);
        if (q < 0) continue;
        for (int g = 0; g < c.kernel; ++g) {
          const int r = position(c, w, g);
          if (r < 0) continue;
          const int tap = (e * b.kernel + f) * c.kernel + g;
          sum += col[(channel * taps + tap) * positions + (i64(p) * b.out + q) * c.out + r];
        }
      }
    }
    x[i] = T(sum);
  }
}

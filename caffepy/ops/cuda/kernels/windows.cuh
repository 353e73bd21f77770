// Windows over images (N, H, W, C), in packs of V channels; planes (N, C, H, W) are N * C images of one channel. Window
// (i, j) begins at row i * stride - pad, column likewise. An index tells an element of a window: unsigned char its number
// in the window, int its number in the plane; -1 (255) names none.

struct Windows {
  int packs, h, w, ho, wo, kh, kw, sh, sw, ph, pw;
  Divisor by_packs, by_columns, by_rows, by_sh, by_sw;
  __device__ i64 large() const { return i64(h) * w * packs; }   // packs of an image
  __device__ i64 small() const { return i64(ho) * wo * packs; }  // packs of its windows
};

#define WINDOWS                                                                                                     \
  i64 images, i64 packs, i64 h, i64 w, i64 ho, i64 wo, i64 kh, i64 kw, i64 sh, i64 sw, i64 ph, i64 pw, i64 by_packs, \
      i64 by_columns, i64 by_rows, i64 by_sh, i64 by_sw
#define NUMBERS                                                                                                       \
  Windows {                                                                                                           \
    int(packs), int(h), int(w), int(ho), int(wo), int(kh), int(kw), int(sh), int(sw), int(ph), int(pw), {by_packs},     \
        {by_columns}, {by_rows}, {by_sh}, {by_sw}                                                                     \
  }

// Pack number e of what is written: images of so many rows and columns.
struct Place {
  i64 image;
  int row, column, pack;
  __device__ Place(const Windows& s, i64 e, int rows, int columns) {
    const unsigned at = s.by_packs.quotient(unsigned(e)), line = s.by_columns.quotient(at);
    pack = int(unsigned(e) - at * unsigned(s.packs));
    column = int(at - line * unsigned(columns));
    image = s.by_rows.quotient(line);
    row = int(line - unsigned(image) * unsigned(rows));
  }
};

// Rows or columns [lo, hi) of a window that lie in the plane; `full` of its divisor lie in the plane or its padding.
struct Span {
  int start, lo, hi, full;
  __device__ Span(int at, int kernel, int stride, int pad, int size) {
    start = at * stride - pad;
    const int end = start + kernel;
    full = max(min(end, size + pad) - start, 1);
    lo = max(start, 0);
    hi = min(end, size);
  }
};

// Windows [lo, hi) over a row or column; `reached` is hi with those that begin beyond the plane counted to its end,
// since their maximum is there.
struct Cover {
  int lo, hi, reached;
  __device__ Cover(int at, int kernel, const Divisor& by_stride, int pad, int size, int windows) {
    lo = at + pad < kernel ? 0 : int(by_stride.quotient(at + pad - kernel)) + 1;
    hi = min(int(by_stride.quotient(at + pad)) + 1, windows);
    reached = at == size - 1 ? windows : hi;
  }
};

template <typename I> __device__ int index_of(const Windows& s, int row, int column, int top, int left) {
  return sizeof(I) == 1 ? max(row - top, 0) * s.kw + max(column - left, 0) : row * s.w + column;
}

// Pack e of the gradient of maxima: the sum of the dy of those windows whose index names the element, in the order of the
// windows. W windows of a row are loaded at a time, the last one again where there are fewer.
template <int V, int W, typename T, typename I>
__device__ Pack<T, V> of_maxima(const Windows& s, i64 e, const T* __restrict__ dy, const I* __restrict__ index) {
  const Place at(s, e, s.h, s.w);
  const Cover rows(at.row, s.kh, s.by_sh, s.ph, s.h, s.ho), columns(at.column, s.kw, s.by_sw, s.pw, s.w, s.wo);
  const i64 image = at.image * s.small() + at.pack;
  const Pack<T, V>* gradients = reinterpret_cast<const Pack<T, V>*>(dy) + image;
  const Pack<I, V>* indices = reinterpret_cast<const Pack<I, V>*>(index) + image;
  Wide<T> sum[V] = {};
  for (int i = rows.lo; i < rows.reached; ++i)
    for (int j = columns.lo; j < columns.reached; j += W) {
      Pack<T, V> gradient[W];
      Pack<I, V> named[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const int window = (i * s.wo + min(j + k, columns.reached - 1)) * s.packs;
        gradient[k] = gradients[window];
        named[k] = indices[window];
      }
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const int place = index_of<I>(s, at.row, at.column, i * s.sh - s.ph, (j + k) * s.sw - s.pw);
        const int here = j + k < columns.reached ? place : -2;
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (named[k].v[v] == here) sum[v] += Wide<T>(gradient[k].v[v]);
      }
    }
  Pack<T, V> total;
#pragma unroll
  for (int v = 0; v < V; ++v) total.v[v] = T(sum[v]);
  return total;
}

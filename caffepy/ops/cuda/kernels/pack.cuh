// Element types, passes over flat arrays in packs of 16 bytes, and numbers that a captured step reads from device memory.

typedef long long i64;

#define PACK (16 / sizeof(T))
#define FOR_EACH(i, n) \
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < (n); i += gridDim.x * i64(blockDim.x))

// Numbers of 16 bits, for storage alone: they convert to float, and from any number to the nearest, of two the even one.
// Written out here, since CUDA's headers are not at hand wherever kernels are compiled. A number is made as half of a pair:
// of two such halves the compiler makes one instruction, of two numbers alone two of a quarter of its rate.
#define NARROW(pair) "{\n.reg .b32 both;\ncvt.rn." pair ".f32 both, 0f00000000, %1;\ncvt.u16.u32 %0, both;\n}"

struct half_t {
  unsigned short bits;
  half_t() = default;
  template <typename X> __device__ explicit half_t(X x) {
#if __CUDA_ARCH__ >= 800
    asm(NARROW("f16x2") : "=h"(bits) : "f"(float(x)));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(float(x)));
#endif
  }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bf16_t {
  unsigned short bits;
  bf16_t() = default;
  template <typename X> __device__ explicit bf16_t(X x) {
#if __CUDA_ARCH__ >= 800
    asm(NARROW("bf16x2") : "=h"(bits) : "f"(float(x)));
#else
    const float f = float(x);
    const unsigned word = __float_as_int(f);
    bits = f == f ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fff;
#endif
  }
  __device__ operator float() const { return __int_as_float(int(bits) << 16); }
};

template <typename T> struct WideOf { using type = float; };
template <> struct WideOf<double> { using type = double; };
template <typename T> using Wide = typename WideOf<T>::type;  // what elements are computed in

template <typename T, int V> struct alignas(sizeof(T) * V) Pack { T v[V]; };

__device__ inline bool aligned(const void* p, unsigned long long bytes) {
  return reinterpret_cast<unsigned long long>(p) % bytes == 0;
}

// How a pass uses an array: reads it, writes it or both, or neither in a variant of a kernel that has it not.
enum Use { NEITHER, READ, WRITE, BOTH };

template <typename T, Use USE, bool MAYBE = false> struct Access {
  using Element = T;
  T* p;
  template <int V> __device__ bool fits() const { return USE == NEITHER || aligned(p, sizeof(T) * V); }
  template <int V> __device__ Pack<T, V> load(i64 i) const {
    if constexpr (USE & READ)
      return reinterpret_cast<const Pack<T, V>*>(p)[i];
    else
      return Pack<T, V>();
  }
  template <int V> __device__ void store(i64 i, const Pack<T, V>& x) const {
    if ((USE & WRITE) && (!MAYBE || p)) reinterpret_cast<Pack<T, V>*>(p)[i] = x;
  }
};

template <typename T> __device__ Access<T, READ> in(const T* p) { return {const_cast<T*>(p)}; }
template <typename T> __device__ Access<T, WRITE> out(T* p) { return {p}; }
template <typename T> __device__ Access<T, BOTH> both(T* p) { return {p}; }
template <typename T> __device__ Access<T, WRITE, true> maybe_out(T* p) { return {p}; }
template <int IS, typename T> __device__ Access<T, IS ? READ : NEITHER> in_if(const T* p) { return {const_cast<T*>(p)}; }
template <int IS, typename T> __device__ Access<T, IS ? WRITE : NEITHER> out_if(T* p) { return {p}; }

// f(index, element of each array...) for the V elements of pack i; every pack starts with a copy of f.
template <int V, typename... A> struct Group {
  template <typename F>
  static __device__ void apply(i64 i, F f, const A&... a, Pack<typename A::Element, V>... pack) {
#pragma unroll
    for (int v = 0; v < V; ++v) f(i * V + v, pack.v[v]...);
    (a.template store<V>(i, pack), ...);
  }
};

template <int V, typename F, typename... A> __device__ void group(i64 i, F f, A... a) {
  Group<V, A...>::apply(i, f, a..., a.template load<V>(i)...);
}

// f for all n elements, by the threads of a whole grid of one dimension.
template <int V, typename F, typename... A> __device__ void each(i64 n, F f, A... a) {
  const i64 first = blockIdx.x * i64(blockDim.x) + threadIdx.x, step = gridDim.x * i64(blockDim.x);
  i64 done = 0;
  if ((a.template fits<V>() && ...)) {
    for (i64 i = first; i < n / V; i += step) group<V>(i, f, a...);
    done = n / V * V;
  }
  for (i64 i = done + first; i < n; i += step) group<1>(i, f, a...);
}

// The channel of consecutive elements of (outer, C, inner): divides once, then counts.
struct Channel {
  unsigned channels, inner, c, p;
  bool started;
  __device__ Channel(i64 channels, i64 inner)
      : channels(unsigned(channels)), inner(unsigned(inner)), c(0), p(0), started(false) {}
  __device__ unsigned at(i64 i) {
    if (!started) {
      const unsigned plane = unsigned(i) / inner;
      p = unsigned(i) - plane * inner;
      c = plane % channels;
      started = true;
    } else if (++p == inner) {
      p = 0;
      if (++c == channels) c = 0;
    }
    return c;
  }
};

// Division of numbers below 2^31 by a number that launch.divisor() made ready: multiplier and shift.
struct Divisor {
  unsigned multiplier, shift;
  __device__ Divisor(i64 ready) : multiplier(unsigned(ready)), shift(unsigned(ready >> 32)) {}
  __device__ unsigned quotient(unsigned n) const { return multiplier ? __umulhi(n, multiplier) >> shift : n; }
};

#define NUMBER(name) double name, const void *name##_at, i64 name##_kind
#define VALUE(name) number(name, name##_at, name##_kind)

// A number that is an argument itself (kind 0) or lies in device memory, as float (1), double (2) or an integer of
// 4 (3) or 8 bytes (4).
__device__ inline double number(double value, const void* at, i64 kind) {
  switch (kind) {
    case 1: return *static_cast<const float*>(at);
    case 2: return *static_cast<const double*>(at);
    case 3: return *static_cast<const int*>(at);
    case 4: return double(*static_cast<const i64*>(at));
    default: return value;
  }
}

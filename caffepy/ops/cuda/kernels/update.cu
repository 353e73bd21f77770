// Update rules over flat arrays of parameters: normalize, regularize and update in one pass.
//
// The formulas are in rules.cuh.
// Segment s of the arrays ends before ends[s] and has its own factors of rate and decay. w, the histories and g are
// written; g becomes what was subtracted from w. If `go` is 0 nothing is written.

#include "pack.cuh"
#include "rules.cuh"

template <typename T> struct Segments {
  using A = Wide<T>;
  const i64* ends;
  const A *rates, *decays;
  int count;
  bool l1;
  A scale, rate, decay;
};

// The segment of consecutive elements: searches once, then steps on.
template <typename T> struct Position {
  using A = Wide<T>;
  Segments<T> segments;
  int s;
  __device__ Position(Segments<T> segments) : segments(segments), s(-1) {}
  __device__ void move(i64 i) {
    if (s < 0) {
      int hi = segments.count - 1;
      s = 0;
      while (s < hi) {
        const int middle = (s + hi) / 2;
        if (segments.ends[middle] > i)
          hi = middle;
        else
          s = middle + 1;
      }
    } else {
      while (s < segments.count - 1 && segments.ends[s] <= i) ++s;
    }
  }
  __device__ bool inside(i64 i) const { return i < segments.ends[s]; }
  __device__ A rate() const { return segments.rate * segments.rates[s]; }
  __device__ A regularized(A w, A g) const {
    return ::regularized(segments.scale, segments.decay * segments.decays[s], segments.l1, w, g);
  }
};

#define ARGUMENTS                                                                                                 \
  i64 n, const i64 *ends, const Wide<T>*rates, const Wide<T>*decays, i64 count, i64 l1, NUMBER(scale), NUMBER(rate), \
      NUMBER(decay), NUMBER(go), NUMBER(a), NUMBER(b), NUMBER(c), NUMBER(d)
#define PREPARE(RULE)                                                                    \
  using A = Wide<T>;                                                                     \
  if (VALUE(go) == 0) return;                                                            \
  const RULE<A> rule(A(VALUE(a)), A(VALUE(b)), A(VALUE(c)), A(VALUE(d)));                \
  Position<T> at(                                                                        \
      Segments<T>{ends, rates, decays, int(count), l1 != 0, A(VALUE(scale)), A(VALUE(rate)), A(VALUE(decay))});

// w -= rule(rate, r, histories...) for all elements that are inside of a segment; g = the same
template <typename T, typename F, typename... H>
__device__ void update(i64 n, Position<T> at, F rule, T* w, T* g, H*... histories) {
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, H&... h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const Wide<T> v = rule(at.rate(), at.regularized(w, g), h...);
        g = T(v);
        w = T(Wide<T>(w) - v);
      },
      both(w), both(g), both(histories)...);
}

template <typename T> __global__ void sgd(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE(Sgd)
  update(n, at, rule, w, g, h);
}

template <typename T> __global__ void nesterov(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE(Nesterov)
  update(n, at, rule, w, g, h);
}

template <typename T> __global__ void rms(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE(Rms)
  update(n, at, rule, w, g, h);
}

template <typename T> __global__ void adadelta(T* w, T* g, T* h, T* u, ARGUMENTS) {
  PREPARE(Adadelta)
  update(n, at, rule, w, g, h, u);
}

template <typename T> __global__ void adam(T* w, T* g, T* m, T* v, ARGUMENTS) {
  PREPARE(Adam)
  update(n, at, rule, w, g, m, v);
}

// Update rules over flat arrays of parameters: normalize, regularize and update in one pass.
//
// In all formulas r = scale * g + decay * w (L2), or scale * g + decay * sign(w) (L1), is the regularized gradient.
// Segment s of the arrays ends before ends[s] and has its own factors of rate and decay. w, the histories and g are
// written; g becomes what was subtracted from w. If `go` is 0 nothing is written.

#include "pack.cuh"

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
    const A sign = A(w > 0) - A(w < 0);
    return segments.scale * g + segments.decay * segments.decays[s] * (segments.l1 ? sign : w);
  }
};

#define ARGUMENTS                                                                                                 \
  i64 n, const i64 *ends, const Wide<T>*rates, const Wide<T>*decays, i64 count, i64 l1, NUMBER(scale), NUMBER(rate), \
      NUMBER(decay), NUMBER(go), NUMBER(a), NUMBER(b), NUMBER(c), NUMBER(d)
#define PREPARE                                                                        \
  using A = Wide<T>;                                                                   \
  if (VALUE(go) == 0) return;                                                          \
  const A a_ = A(VALUE(a)), b_ = A(VALUE(b)), c_ = A(VALUE(c)), d_ = A(VALUE(d));      \
  Position<T> at(                                                                      \
      Segments<T>{ends, rates, decays, int(count), l1 != 0, A(VALUE(scale)), A(VALUE(rate)), A(VALUE(decay))});

// w -= step(rate, r, histories...) for all elements that are inside of a segment; g = the same
template <typename T, typename F, typename... H>
__device__ void update(i64 n, Position<T> at, F step, T* w, T* g, H*... histories) {
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, H&... h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const Wide<T> v = step(at.rate(), at.regularized(w, g), h...);
        g = T(v);
        w = T(Wide<T>(w) - v);
      },
      both(w), both(g), both(histories)...);
}

// h = momentum*h + rate*r; w -= h
template <typename T> __global__ void sgd(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  const A momentum = a_;
  const auto step = [=](A rate, A r, T& h) {
    const A v = momentum * A(h) + rate * r;
    h = T(v);
    return v;
  };
  update(n, at, step, w, g, h);
}

// h' = momentum*h + rate*r; w -= (1 + momentum)*h' - momentum*h; h = h'
template <typename T> __global__ void nesterov(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  const A momentum = a_;
  const auto step = [=](A rate, A r, T& h) {
    const A before = A(h), after = momentum * before + rate * r;
    h = T(after);
    return (1 + momentum) * after - momentum * before;
  };
  update(n, at, step, w, g, h);
}

// RMSProp: h = rms_decay*h + take*r^2 with take = 1 - rms_decay; AdaGrad: both are 1. w -= rate*r/(sqrt(h) + delta)
template <typename T> __global__ void rms(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  const A rms_decay = a_, take = b_, delta = c_;
  const auto step = [=](A rate, A r, T& h) {
    const A mean = rms_decay * A(h) + take * r * r;
    h = T(mean);
    return rate * r / (sqrt(mean) + delta);
  };
  update(n, at, step, w, g, h);
}

// h = momentum*h + (1 - momentum)*r^2; v = r*sqrt((u + delta)/(h + delta)); u = momentum*u + (1 - momentum)*v^2;
// w -= rate*v
template <typename T> __global__ void adadelta(T* w, T* g, T* h, T* u, ARGUMENTS) {
  PREPARE
  const A momentum = a_, delta = b_, take = 1 - momentum;
  const auto step = [=](A rate, A r, T& h, T& u) {
    const A mean = momentum * A(h) + take * r * r, v = r * sqrt((A(u) + delta) / (mean + delta));
    h = T(mean);
    u = T(momentum * A(u) + take * v * v);
    return rate * v;
  };
  update(n, at, step, w, g, h, u);
}

// m = beta1*m + (1 - beta1)*r; v = beta2*v + (1 - beta2)*r^2; w -= rate*correction*m/(sqrt(v) + delta)
template <typename T> __global__ void adam(T* w, T* g, T* m, T* v, ARGUMENTS) {
  PREPARE
  const A beta1 = a_, beta2 = b_, delta = c_, correction = d_;
  const auto step = [=](A rate, A r, T& m, T& v) {
    const A first = beta1 * A(m) + (1 - beta1) * r, second = beta2 * A(v) + (1 - beta2) * r * r;
    m = T(first);
    v = T(second);
    return rate * correction * first / (sqrt(second) + delta);
  };
  update(n, at, step, w, g, m, v);
}

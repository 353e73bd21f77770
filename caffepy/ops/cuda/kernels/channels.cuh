// Passes over (outer, C, inner) arrays whose threads keep the numbers of their channels in registers, and two sums for
// each channel. Arrays with their channels last have inner 1; outer then counts their lines of channels. A block of 256
// threads takes one of `splits` shares of a channel, or where inner is 1 of up to 32 packs of channels. Sums are added
// up in two stages with a fixed order: a partial sum for each share, then, by finish_channels, all of a channel.
//
// Pixels whose channels are no whole packs may lie folded: `channels` are then those of several pixels side by side, and
// numbers of channels repeat after `period` of them.
//
// An operation Op<T, V> knows V channels: start(arguments, channels, offset of an element) takes their numbers,
// op(v, element of each array...) is called for every element of channel v. One of sums has sums(v, count, first,
// second), which gives those of the `count` elements that it saw; it is 0 before it starts.

struct Shape {
  i64 outer, channels, inner, splits, period;
};

// Channels from the first on, after the last of a period the first again.
struct Channels {
  i64 first, period;
  template <int V> __device__ void each(i64 (&of)[V]) const {
    i64 c = first;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      of[v] = c;
      if (++c == period) c = 0;
    }
  }
};

// The numbers of V channels; one for all where there are none.
template <int V, typename A> __device__ void take(A (&numbers)[V], const A* p, Channels c, A otherwise) {
  constexpr int W = V % 4 == 0 && sizeof(A) == 4 ? 4 : 1;
  if (!p) {
#pragma unroll
    for (int v = 0; v < V; ++v) numbers[v] = otherwise;
  } else if (c.first + V <= c.period && aligned(p + c.first, sizeof(A) * W)) {
#pragma unroll
    for (int v = 0; v < V; v += W) {
      const Pack<A, W> pack = *reinterpret_cast<const Pack<A, W>*>(p + c.first + v);
#pragma unroll
      for (int w = 0; w < W; ++w) numbers[v + w] = pack.v[w];
    }
  } else {
    i64 of[V];
    c.each(of);
#pragma unroll
    for (int v = 0; v < V; ++v) numbers[v] = p[of[v]];
  }
}

template <typename T, int V, int U> struct Several { Pack<T, V> of[U]; };

template <int V, int U, typename A>
__device__ Several<typename A::Element, V, U> load(const A& a, const unsigned (&at)[U]) {
  Several<typename A::Element, V, U> packs;
#pragma unroll
  for (int u = 0; u < U; ++u) packs.of[u] = a.template load<V>(at[u]);
  return packs;
}

template <int V, int U, typename... A> struct Batch {
  template <typename Op>
  static __device__ void apply(const unsigned (&at)[U], Op& op, const A&... a,
                               Several<typename A::Element, V, U>... packs) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int v = 0; v < V; ++v) op(v, packs.of[u].v[v]...);
      (a.template store<V>(at[u], packs.of[u]), ...);
    }
  }
};

// op for the elements of U packs, all of which are loaded before any is stored.
template <int V, int U, typename Op, typename... A>
__device__ void batch(const unsigned (&at)[U], Op& op, const A&... a) {
  Batch<V, U, A...>::apply(at, op, a..., load<V, U>(a, at)...);
}

// One channel, wherever its elements are in a pack.
template <typename Op> struct OneOf {
  Op& op;
  template <typename... X> __device__ void operator()(int, X&... x) { op(0, x...); }
};

// Lines of channels, from the last to the first if DOWN: what the pass before wrote last is then still in the cache.
template <template <typename, int> class Op, typename T, int V, int U, bool DOWN, typename Arguments, typename Done,
          typename... A>
__device__ void over_lines(Shape s, const Arguments& arguments, const Done& done, A... a) {
  const unsigned outer = unsigned(s.outer), packs = unsigned(s.channels / V), splits = unsigned(s.splits);
  unsigned columns = 1;
  while (columns < packs && columns < 32) columns *= 2;
  const unsigned lines = blockDim.x / columns, first = blockIdx.x % splits * lines + threadIdx.x / columns;
  const unsigned count = first < outer ? (outer - 1 - first) / (lines * splits) + 1 : 0;
  const unsigned step = (DOWN ? -lines * splits : lines * splits) * packs;
  for (unsigned group = blockIdx.x / splits; group * columns < packs; group += gridDim.x / splits) {
    const unsigned pack = group * columns + threadIdx.x % columns;
    const unsigned mine = pack < packs ? count : 0;
    unsigned at = (DOWN ? outer - 1 - first : first) * packs + pack, i = 0;
    Op<T, V> op;
    if (mine) op.start(arguments, Channels{i64(pack) * V % s.period, s.period}, i64(at) * V);
    for (; i + U <= mine; i += U) {
      unsigned where[U];
#pragma unroll
      for (int u = 0; u < U; ++u, at += step) where[u] = at;
      batch<V, U>(where, op, a...);
    }
    for (; i < mine; ++i, at += step) {
      const unsigned where[1] = {at};
      batch<V, 1>(where, op, a...);
    }
    done.template lines<V>(op, mine, s, group * columns * V, columns);
  }
}

// Planes of `inner` elements of a channel.
template <template <typename, int> class Op, typename T, int V, typename Arguments, typename Done, typename... A>
__device__ void over_planes(Shape s, const Arguments& arguments, const Done& done, A... a) {
  const unsigned inner = unsigned(s.inner / V), total = unsigned(s.outer) * inner, splits = unsigned(s.splits);
  const unsigned size = (total + splits - 1) / splits, lo = blockIdx.x % splits * size, hi = min(lo + size, total);
  const unsigned dn = blockDim.x / inner, dp = blockDim.x % inner;
  for (unsigned c = blockIdx.x / splits; c < s.channels; c += gridDim.x / splits) {
    unsigned n = (lo + threadIdx.x) / inner, p = (lo + threadIdx.x) % inner, count = 0;
    Op<T, 1> op;
    OneOf<Op<T, 1>> one{op};
    for (unsigned i = lo + threadIdx.x; i < hi; i += blockDim.x) {
      const unsigned where[1] = {(n * unsigned(s.channels) + c) * inner + p};
      if (count == 0) op.start(arguments, Channels{c, s.period}, i64(where[0]) * V);
      batch<V, 1>(where, one, a...);
      count += V;
      p += dp;
      n += dn;
      if (p >= inner) {
        p -= inner;
        ++n;
      }
    }
    done.plane(op, count, s, c);
  }
}

template <template <typename, int> class Op, typename T, int V, int U, bool DOWN, typename Arguments, typename Done,
          typename... A>
__device__ void over(Shape s, const Arguments& arguments, const Done& done, A... a) {
  const bool fit = (s.inner == 1 ? s.channels : s.inner) % V == 0 && (a.template fits<V>() && ...);
  if (s.inner == 1) {
    if (fit)
      over_lines<Op, T, V, U, DOWN>(s, arguments, done, a...);
    else
      over_lines<Op, T, 1, 2 * U, DOWN>(s, arguments, done, a...);
  } else if (fit) {
    over_planes<Op, T, V>(s, arguments, done, a...);
  } else {
    over_planes<Op, T, 1>(s, arguments, done, a...);
  }
}

struct Nothing {
  template <int V, typename Op> __device__ void lines(Op&, unsigned, const Shape&, unsigned, unsigned) const {}
  template <typename Op> __device__ void plane(Op&, unsigned, const Shape&, unsigned) const {}
};

// The operation for every element, from the first to the last; U packs of each array at a time.
template <template <typename, int> class Op, typename T, int V, int U, typename Arguments, typename... A>
__device__ void channel_pass(Shape s, const Arguments& arguments, A... a) {
  over<Op, T, V, U, false>(s, arguments, Nothing(), a...);
}

// Writes the sums of a block to partial (2, splits, C).
struct Partial {
  double* p;

  __device__ void write(const Shape& s, unsigned c, double first, double second) const {
    const i64 split = blockIdx.x % unsigned(s.splits);
    p[split * s.channels + c] = first;
    p[(s.splits + split) * s.channels + c] = second;
  }

  template <int V, typename Op>
  __device__ void lines(Op& op, unsigned count, const Shape& s, unsigned channel, unsigned columns) const {
    double first[V], second[V];
#pragma unroll
    for (int v = 0; v < V; ++v) op.sums(v, count, first[v], second[v]);
    add<V>(first, second, s, channel, columns);
  }

  // First the threads of a warp that have the same column, then the warps.
  template <int V>
  __device__ void add(double (&first)[V], double (&second)[V], const Shape& s, unsigned channel,
                      unsigned columns) const {
    __shared__ double parts[2][8][32 * V];
    for (unsigned other = columns; other < 32; other *= 2) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        first[v] += __shfl_xor_sync(0xffffffffu, first[v], other);
        second[v] += __shfl_xor_sync(0xffffffffu, second[v], other);
      }
    }
    const unsigned lane_id = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane_id < columns) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        parts[0][warp][lane_id * V + v] = first[v];
        parts[1][warp][lane_id * V + v] = second[v];
      }
    }
    __syncthreads();
    const unsigned t = threadIdx.x;
    if (t < columns * V && channel + t < s.channels) {
      double a = parts[0][0][t], b = parts[1][0][t];
#pragma unroll
      for (int w = 1; w < 8; ++w) {
        a += parts[0][w][t];
        b += parts[1][w][t];
      }
      write(s, channel + t, a, b);
    }
  }

  template <typename Op> __device__ void plane(Op& op, unsigned count, const Shape& s, unsigned channel) const {
    double first, second;
    op.sums(0, count, first, second);
    first = block_sum(first);
    second = block_sum(second);
    if (threadIdx.x == 0) write(s, channel, first, second);
  }
};

// The operation for every element, from the last to the first, and its sums for each channel.
template <template <typename, int> class Op, typename T, int V, int U, typename Arguments, typename... A>
__device__ void channel_sums_of(Shape s, double* partial, const Arguments& arguments, A... a) {
  over<Op, T, V, U, true>(s, arguments, Partial{partial}, a...);
}

template <typename F> struct Adding {
  template <typename T, int V> struct Op {
    const F* f;
    i64 of[V];
    double first[V] = {}, second[V] = {};
    __device__ void start(const F& adds, Channels channels, i64) {
      f = &adds;
      channels.each(of);
    }
    template <typename... X> __device__ void operator()(int v, X&... x) { (*f)(of[v], first[v], second[v], x...); }
    __device__ void sums(int v, unsigned, double& a, double& b) const {
      a = first[v];
      b = second[v];
    }
  };
};

// Likewise with f(channel, first sum, second sum, element of each array...), which adds to the sums.
template <int V, typename F, typename A, typename... B>
__device__ void channel_sums(Shape s, double* partial, F f, A a, B... b) {
  channel_sums_of<Adding<F>::template Op, typename A::Element, V, 2>(s, partial, f, a, b...);
}

// f(channel, first sum, second sum) once for each channel, eight of them to a block of up to 1024 threads. Threads, then
// warps, whose sums warps of their own add up.
template <typename F> __device__ void finish_channels(const double* partial, i64 channels, i64 splits, F f) {
  __shared__ double parts[2][8][33];
  const int column = threadIdx.x % 8, warp = threadIdx.x / 32, warps = blockDim.x / 32, lane_id = threadIdx.x % 32;
  const i64 c = blockIdx.x * i64(8) + column;
  double first = 0, second = 0;
  if (c < channels) {
#pragma unroll 4
    for (i64 i = threadIdx.x / 8; i < splits; i += blockDim.x / 8) {
      first += partial[i * channels + c];
      second += partial[(splits + i) * channels + c];
    }
  }
#pragma unroll
  for (int other = 8; other < 32; other *= 2) {
    first += __shfl_xor_sync(0xffffffffu, first, other);
    second += __shfl_xor_sync(0xffffffffu, second, other);
  }
  if (lane_id < 8) {
    parts[0][column][warp] = first;
    parts[1][column][warp] = second;
  }
  __syncthreads();
  for (int k = warp; k < 16; k += warps) {
    double sum = lane_id < warps ? parts[k / 8][k % 8][lane_id] : 0;
#pragma unroll
    for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane_id == 0) parts[k / 8][k % 8][32] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 8 && c < channels) f(c, parts[0][column][32], parts[1][column][32]);
}

// Gets numbers of the channels of a block of finish_channels into the cache, from arrays that there are.
template <typename... A> __device__ void expect_channels(i64 channels, const A*... arrays) {
  const i64 c = blockIdx.x * i64(8) + threadIdx.x;
  if (threadIdx.x >= 8 || c >= channels) return;
  const auto fetch = [](const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); };
  ((arrays ? fetch(arrays + c) : void()), ...);
}

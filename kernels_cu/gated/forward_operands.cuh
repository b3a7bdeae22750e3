// what      The operands of a chunk in the forward kernel of every card: queries and keys times decays.
// math      A query is decayed from the middle of its sub-chunk, from the sub-chunk's start, from the chunk's middle
//           and from its start; a key to the middle of its sub-chunk, to the sub-chunk's end, to the chunk's middle and
//           to its end.
// numerics  Decays are products of e^g of single tokens, never differences of cumulated gates: so resets are exact.
//           About a sub-chunk's middle at most three decays are inverted, after they are clamped to at least e^-20:
//           e^60 is the largest factor, and e^-20 of a token passes a reset in its own sub-chunk. If gates are
//           positive, scores in sub-chunks are computed from single tokens instead (growth.cuh). Scores without gates
//           are sums in float32: of a token with itself; in RWKV-6, within a span, also of a query with the key before
//           it.
//
// A warp has SPAN tokens, half of a sub-chunk, and a lane W channels of them: so decays need no shuffles.
#include "read_order.cuh"
#include "decays.cuh"
#include "gated/forward_storage.cuh"
#include "growth.cuh"

// A warp's share of a chunk: a span, or a part of its channels; a warp has PER shares in turn. If BK is 64 and a warp
// has two spans (AT_ONCE), each half of its lanes has one of them, both of which are upper, or lower, halves of
// sub-chunks.
template <typename T, int BK, int WARPS> struct Share {
  static constexpr int SPANS = CHUNK<T> / SPAN;
  static constexpr int AT_ONCE = BK == 64 && SPANS == 2 * WARPS ? 2 : 1, LANES = 32 / AT_ONCE;
  static constexpr int PARTS = BK == 128 && SPANS < WARPS ? 2 : 1, W = BK / LANES / PARTS;
  static constexpr int PER = (SPANS * PARTS + AT_ONCE * WARPS - 1) / (AT_ONCE * WARPS);
  int span, part, channel;
  __device__ __forceinline__ Share(int n) {
    const int thread = opaque(threadIdx.x), lane = thread & 31;
    const int at = (thread >> 5) + (n + lane / LANES) * WARPS;
    span = at / PARTS, part = at % PARTS, channel = (part * LANES + lane % LANES) * W;
  }
  __device__ __forceinline__ bool any() const { return SPANS * PARTS % WARPS == 0 || span < SPANS; }
  __device__ __forceinline__ int row(int i) const { return span * SPAN + i; }
};

// Gates of SPAN tokens and W channels, 0 behind the sequence's end and beyond K.
template <int W, typename G> using Gates = Piece<W, G>[SPAN];

// Starts copying this lane's gates of a span. No other lane reads them: so this lane waits for its own copies only.
template <int BK, class Share, typename G>
__device__ __forceinline__ void fetch_gates(G* gates, const Share& me, const G* from, i64 stride, int rows,
                                            int channels) {
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    cp_async<Share::W * sizeof(G)>(gates + me.row(i) * BK + me.channel, from, i < rows && channels > 0);
    from += stride;
  }
}
// The same value by value, for rows that are not aligned. Not inline: most rows are aligned.
template <int BK, int W, typename G>
__device__ __noinline__ void fetch_gates_slowly(G* gates, const G* from, i64 stride, int rows, int channels) {
#pragma unroll 1
  for (int at = 0; at < SPAN * W; ++at) {
    const int i = at / W, c = at % W;
    gates[i * BK + c] = i < rows && c < channels ? from[i * stride + c] : from_float<G>(0.f);
  }
}
template <int BK, class Share, typename G>
__device__ __forceinline__ void load_gates(Gates<Share::W, G>& gates, const G* from, const Share& me) {
#pragma unroll
  for (int i = 0; i < SPAN; ++i) gates[i].load(from + me.row(i) * BK + me.channel);
}

template <int W, typename G>
__device__ __forceinline__ void decay_of_span(float (&decay)[W], const Gates<W, G>& gates) {
#pragma unroll
  for (int c = 0; c < W; ++c) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SPAN; ++i) sum += gates[i].get(c);
    decay[c] = decay_of(sum);
  }
}

// Whether a gate is too large for factors about a middle, or NaN, which such factors would keep to its half of the
// sub-chunk.
template <int W, typename G> __device__ __forceinline__ bool any_grows(const Gates<W, G>& gates) {
  float most = gates[0].get(0);
  if constexpr (sizeof(G) == 4) {
#pragma unroll
    for (int n = 1; n < SPAN * W; ++n) most = at_least(gates[n / W].get(n % W), most);
  } else {
    u32 two = gates[0].words[0];
#pragma unroll
    for (int n = 1; n < SPAN * W / 2; ++n) two = at_least<G>(gates[n / (W / 2)].words[n % (W / 2)], two);
    most = at_least(to_float(G{u16(two)}), to_float(G{u16(two >> 16)}));
  }
  return !(most <= GROWTH);
}

// The decays of a lane's tokens. `held`: computed once, together with the span's decay, if there are registers for
// them.
template <class Share> struct SpanDecays {
  static constexpr bool held = Share::AT_ONCE == 2;
  float a[SPAN][Share::W];

  template <typename G> __device__ __forceinline__ void make(const Gates<Share::W, G>& gates) {
#pragma unroll
    for (int i = 0; i < SPAN; ++i)
#pragma unroll
      for (int c = 0; c < Share::W; ++c) a[i][c] = decay_of(gates[i].get(c));
  }
};

template <int BK, class Share>
__device__ __forceinline__ void put_decay(float (&row)[BK], const Share& me, const float (&decay)[Share::W]) {
  Piece<Share::W, float> piece;
  piece.set(decay);
  piece.store(&row[me.channel]);
}

// The decay of the half of a chunk of 32 tokens in which the span is not. Computed only if a warp's lanes have spans of
// both halves: otherwise their branches would be executed in turn. Not used if gates are positive, when the order of
// multiplications matters.
template <class Share> struct OtherHalf {
  static constexpr bool known = Share::SPANS == 8 && Share::AT_ONCE == 2;
  float decay[Share::W];

  template <int SPANS, int BK> __device__ __forceinline__ OtherHalf(const float (&spans)[SPANS][BK], const Share& me) {
    if constexpr (known) {
#pragma unroll
      for (int n = 0; n < SPANS / 2; ++n) {
        Piece<Share::W, float> next;
        next.load(&spans[(me.span & 4 ^ 4) + n][me.channel]);
#pragma unroll
        for (int c = 0; c < Share::W; ++c) decay[c] = n ? decay[c] * next.get(c) : next.get(c);
      }
    }
  }
};

// The decays between this span and the borders before it (BEFORE), or after it: of its sub-chunk, of its half of the
// chunk, and of the chunk.
template <int W, bool BEFORE> struct Between {
  float sub[W], half[W], chunk[W];

  template <int SPANS, int BK, class Share>
  __device__ __forceinline__ Between(const float (&spans)[SPANS][BK], const Share& me, const OtherHalf<Share>& other,
                                     bool grows) {
    const int span = me.span, channel = me.channel;
    const auto times_spans = [&](float (&x)[W], int first, int count) {
#pragma unroll 2
      for (int n = 0; n < count; ++n) {
        Piece<W, float> decay;  // from the span outwards: another order may leave float32's range
        decay.load(&spans[BEFORE ? first + count - 1 - n : first + n][channel]);
#pragma unroll
        for (int c = 0; c < W; ++c) x[c] *= decay.get(c);
      }
    };
    const auto outside = [&](int bit) { return BEFORE == bool(span & bit); };  // whether `bit` more spans lie between
#pragma unroll
    for (int c = 0; c < W; ++c) sub[c] = 1.f;
    if (outside(1)) times_spans(sub, span ^ 1, 1);
#pragma unroll
    for (int c = 0; c < W; ++c) half[c] = sub[c];
    if (outside(2)) times_spans(half, (span ^ 2) & ~1, 2);
#pragma unroll
    for (int c = 0; c < W; ++c) chunk[c] = half[c];
    if (OtherHalf<Share>::known && !grows) {
#pragma unroll
      for (int c = 0; c < W; ++c) chunk[c] = outside(4) ? half[c] * other.decay[c] : half[c];
    } else if (SPANS == 8 && outside(4)) {
      times_spans(chunk, (span ^ 4) & ~3, 4);
    }
  }
};

template <int W> __device__ __forceinline__ void times(float (&y)[W], const float (&x)[W], const float (&by)[W]) {
#pragma unroll
  for (int c = 0; c < W; ++c) y[c] = x[c] * by[c];
}

// Each of 4 values summed over LANES lanes; lane l gets the sum of value l % 4.
template <int LANES> __device__ __forceinline__ float sum_each(float (&x)[SPAN]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + half], half);
      x[n] = (upper ? x[n + half] : x[n]) + other;
    }
  }
  float sum = x[0];
#pragma unroll
  for (int distance = 4; distance < LANES; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

template <typename T, int PRODUCTS, int W> __device__ __forceinline__ void round(float (&x)[W]) {
#pragma unroll
  for (int c = 0; c < W; ++c) x[c] = operand_value<T, PRODUCTS>(x[c]);
}

// Loads SPAN rows of a tile, this lane's channels.
template <int BK, class Share, typename T>
__device__ __forceinline__ void load_span(Piece<Share::W, T> (&rows)[SPAN], const T* tile, const Share& me) {
  const Spot<BK, Share::W, T> spot(me.row(0), me.channel);
#pragma unroll
  for (int i = 0; i < SPAN; ++i) spot.get(rows[i], tile, me.span / 2, i);
}

// Stores a span's rows times `by` at `spot` of a group of 8 rows.
template <typename T, int PRODUCTS, class Where, typename X, int W>
__device__ __forceinline__ void put_span(const Where& spot, X* tile, int eight, const float (&x)[SPAN][W],
                                         const float (&by)[W]) {
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    float y[W];
    times(y, x[i], by);
    round<T, PRODUCTS>(y);
    spot.put(tile, eight, i, y);
  }
}

// Stores queries and keys decayed from and to the middle of their sub-chunk. UPPER: the span is its second half.
template <class ReadOrder, bool UPPER, int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV,
          class Share>
__device__ __forceinline__ void meet_in_middle(Shared<Schedule, T, G, BK, BV>& s, const Share& me,
                                               const Piece<Share::W, T> (&q)[SPAN], const Piece<Share::W, T> (&k)[SPAN],
                                               const float (&a)[SPAN][Share::W]) {
  constexpr int W = Share::W;
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;
  using Middle = MiddleOf<Schedule, T>;
  const Spot<BK, W, typename Middle::Type> spot(me.row(0), me.channel);
  float between[W], inverse_of[W];  // decays between the middle and the token's write
#pragma unroll
  for (int c = 0; c < W; ++c) between[c] = inverse_of[c] = 1.f;
#pragma unroll
  for (int n = 0; n < SPAN; ++n) {
    const int i = UPPER ? n : SPAN - 1 - n;
    float x[W], y[W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      const float decay = fmaxf(a[i][c], LEAST), qi = q[i].get(c), ki = k[i].get(c);
      if (UPPER) {
        if (!INCLUSIVE) x[c] = qi * between[c];
        between[c] *= decay;
        if (INCLUSIVE) x[c] = qi * between[c];
        y[c] = ki * inverse(between[c]);
      } else {
        if (INCLUSIVE) x[c] = qi * inverse_of[c];
        y[c] = ki * between[c];
        between[c] *= decay;
        inverse_of[c] = inverse(between[c]);
        if (!INCLUSIVE) x[c] = qi * inverse_of[c];
      }
    }
    round<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>>(x);
    round<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>>(y);
    spot.put(s.middle_q, me.span / 2, i, x);
    spot.put(s.middle_k, me.span / 2, i, y);
  }
}

// Scores without gates: of a token with itself; in RWKV-6 also of a query with the key before it.
template <class ReadOrder, class Shared, typename T, class Share>
__device__ __forceinline__ void score_directly(Shared& s, const Share& me, const Piece<Share::W, T> (&q)[SPAN],
                                               const Piece<Share::W, T> (&k)[SPAN]) {
  constexpr int W = Share::W;
  const int lane = threadIdx.x % Share::LANES;
  float sums[SPAN];
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    sums[i] = 0.f;
#pragma unroll
    for (int c = 0; c < W; ++c) {
      const float u = ReadOrder::reads_before_write ? s.u[me.channel + c] : 1.f;
      sums[i] = fmaf(q[i].get(c), u * k[i].get(c), sums[i]);
    }
  }
  const float itself = sum_each<Share::LANES>(sums);
  if (lane < SPAN) s.direct[0][me.part][me.row(lane)] = itself;
  if constexpr (ReadOrder::reads_before_write) {
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      sums[i] = 0.f;
#pragma unroll
      for (int c = 0; c < W; ++c)
        if (i) sums[i] = fmaf(q[i].get(c), k[i - 1].get(c), sums[i]);
    }
    const float last = sum_each<Share::LANES>(sums);
    if (lane < SPAN) s.direct[1][me.part][me.row(lane)] = last;
  }
}

// Stores queries decayed from the borders where they meet keys of other sub-chunks, and from the chunk's start.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV, class Share>
__device__ __forceinline__ void decay_queries(Shared<Schedule, T, G, BK, BV>& s, int stage, const Share& me,
                                              const float (&a)[SPAN][Share::W], const OtherHalf<Share>& other,
                                              bool grows) {
  constexpr int W = Share::W;
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;
  const int sub = me.span / 2;
  const Spot<BK, W, typename OperandOf<T>::Type> spot(me.row(0), me.channel);
  const PairedSpot<BK, W, typename OperandOf<T>::Type> paired(me.row(0), me.channel);
  Piece<W, T> q[SPAN];
  load_span<BK>(q, s.q[stage], me);
  __syncwarp();  // they have been read, and may be overwritten
  const Between<W, true> before(s.spans, me, other, grows);
  float decay[W], x[SPAN][W];
#pragma unroll
  for (int c = 0; c < W; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    if (INCLUSIVE) times(decay, decay, a[i]);
#pragma unroll
    for (int c = 0; c < W; ++c) x[i][c] = q[i].get(c) * decay[c];
    if (!INCLUSIVE) times(decay, decay, a[i]);
  }
  if (sub & 1) put_span<T, PRODUCTS>(spot, s.border, sub / 2, x, before.sub);
  if (sub >= 2) put_span<T, PRODUCTS>(spot, s.border, sub, x, before.half);
  put_span<T, PRODUCTS>(paired, state_q(s, stage), sub, x, before.chunk);
}

// Stores keys decayed to the borders where they meet queries of other sub-chunks, and to the chunk's end; and the decay
// of the chunk.
template <int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV, class Share>
__device__ __forceinline__ void decay_keys(Shared<Schedule, T, G, BK, BV>& s, int stage, const Share& me,
                                           const float (&a)[SPAN][Share::W], const OtherHalf<Share>& other,
                                           bool grows) {
  constexpr int W = Share::W;
  const int sub = me.span / 2;
  const Spot<BK, W, typename OperandOf<T>::Type> spot(me.row(0), me.channel);
  Piece<W, T> k[SPAN];
  load_span<BK>(k, s.k[stage], me);
  __syncwarp();  // they have been read, and may be overwritten
  const Between<W, false> after(s.spans, me, other, grows);
  float decay[W], x[SPAN][W];
#pragma unroll
  for (int c = 0; c < W; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = SPAN - 1; i >= 0; --i) {
#pragma unroll
    for (int c = 0; c < W; ++c) x[i][c] = k[i].get(c) * decay[c];
    times(decay, decay, a[i]);
  }
  if constexpr (Schedule::reads) {
    if (!(sub & 1)) put_span<T, PRODUCTS>(spot, s.border, s.BORDER / 8 + sub / 2, x, after.sub);
    if (Share::SPANS == 8 && sub < 2) put_span<T, PRODUCTS>(spot, s.border, s.BORDER / 8 + 2 + sub, x, after.half);
  }
  put_span<T, PRODUCTS>(spot, state_k(s, stage), sub, x, after.chunk);
  if (me.span == 0) {  // the decay of its own tokens, and of all after them
    times(decay, decay, after.chunk);
    put_decay(s.decay, me, decay);
  }
}

// Makes the operands of one share. grows: whether a gate of the chunk is too large for factors about a middle.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV, class Share>
__device__ __forceinline__ void make_operands(Shared<Schedule, T, G, BK, BV>& s, int stage, const Share& me,
                                              SpanDecays<Share>& decays, bool grows) {
  constexpr int W = Share::W;
  const auto make_decays = [&] {
    if constexpr (SpanDecays<Share>::held) return;
    Gates<W, G> gates;
    load_gates<BK>(gates, s.gates, me);
    decays.make(gates);
  };
  float (&a)[SPAN][W] = decays.a;
  if constexpr (Schedule::reads) {
    Piece<W, T> q[SPAN], k[SPAN];
    load_span<BK>(q, s.q[stage], me);
    load_span<BK>(k, s.k[stage], me);
    score_directly<ReadOrder>(s, me, q, k);
    __syncwarp();  // keeps the compiler from mixing these steps, which would take more registers
    make_decays();
    if (me.span & 1) meet_in_middle<ReadOrder, true, PRODUCTS>(s, me, q, k, a);
    else meet_in_middle<ReadOrder, false, PRODUCTS>(s, me, q, k, a);
  } else {
    make_decays();
  }
  const OtherHalf<Share> other(s.spans, me);
  if constexpr (Schedule::reads) decay_queries<ReadOrder, PRODUCTS>(s, stage, me, a, other, grows);
  decay_keys<PRODUCTS>(s, stage, me, a, other, grows);
}

// Stores the decays of the spans whose gates this thread has copied, and computes those of their tokens if they are
// held. Returns whether a gate is too large for factors about a middle.
template <class Share, int BK, class Shared>
__device__ __forceinline__ bool put_spans(Shared& s, SpanDecays<Share>& decays) {
  bool grows = false;
#pragma unroll
  for (int n = 0; n < Share::PER; ++n) {
    const Share me(n);
    if (!me.any()) break;
    Gates<Share::W, typename Shared::Gate> gates;
    float decay[Share::W];
    load_gates<BK>(gates, s.gates, me);
    const bool mine = any_grows<Share::W>(gates);
    if constexpr (SpanDecays<Share>::held) {
      decays.make(gates);
#pragma unroll
      for (int c = 0; c < Share::W; ++c) decay[c] = decays.a[0][c] * decays.a[1][c] * decays.a[2][c] * decays.a[3][c];
      if (mine) decay_of_span<Share::W>(decay, gates);  // the product above may be infinite
    } else {
      decay_of_span<Share::W>(decay, gates);
    }
    put_decay(s.spans[me.span], me, decay);
    grows |= mine;
  }
  return grows;
}

// Starts copying this thread's gates of a chunk with `rows` tokens.
template <class Share, int BK, typename G>
__device__ __forceinline__ void fetch_chunk_gates(G* gates, const Rows<const G>& g, i64 b, i64 h, i64 token, int rows,
                                                  i64 channel, int channels, int bytes) {
#pragma unroll
  for (int n = 0; n < Share::PER; ++n) {
    const Share me(n);
    const G* from = g.row(b, h, token + me.row(0)) + channel + me.channel;
    const int left = rows - me.row(0);
    if (!me.any()) break;
    if (bytes >= Share::W * int(sizeof(G))) fetch_gates<BK>(gates, me, from, g.t, left, channels - me.channel);
    else fetch_gates_slowly<BK, Share::W>(gates + me.row(0) * BK + me.channel, from, g.t, left, channels - me.channel);
  }
}

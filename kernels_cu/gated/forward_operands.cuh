// what      Decayed queries and keys of a chunk, the operands of the gated forward kernels for every GPU architecture.
// math      S_t = diag(e^g_t) S_{t-1} + k_t v_t^T, o_t = scale q_t^T S_t, where callers multiply o by `scale`; in
//           RWKV-6 o_t reads S before the write of k_t. The score of a query and an earlier key is a product of q times
//           the decay from a border to the query and k times the decay from the key to it. A chunk of 32 tokens:
//             halves of 16      |               0               |               1               |
//             sub-chunks of 8   |       0       |       1       |       2       |       3       |
//             spans of SPAN = 4 |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |
//             sub-chunk of the query, of the key   border               tiles
//             n, n                                 the middle of n      middle_q, middle_k
//             1, 0                                 the start of 1       `border`, queries' rows 0-7,   keys' 0-7
//             3, 2                                 the start of 3                         8-15         8-15
//             2 or 3, 0 or 1                       the chunk's middle   16-23 or 24-31    16-23 or 24-31
//           A chunk of 16 tokens (if operands are floats) is half 0 alone. Only a sub-chunk's middle has queries before
//           it and keys after it: these are divided by the decay between them and it. For the product with S, queries
//           are decayed from the chunk's start (tile state_q), and keys to its end (state_k)
// barriers  the callers' (gated/forward.cu, gated/wide_operands.cu, value_gate/forward.cu). Each does for each chunk:
//           fetch_chunk_gates; every thread waits for its own copies; store_span_decays; a barrier: q, k and
//           span_decays are in shared memory, and `grows` is the OR of what store_span_decays returned to the block's
//           threads; make_operands for each of the warp's shares; a barrier: the operands and the chunk's decay are in
//           shared memory
// numerics  Decays are e^(sum of at most four adjacent gates) and products of these, never quotients or differences of
//           longer sums: so a reset (a gate of -inf) gives an exact 0. Only a score within one sub-chunk takes a reset
//           for e^-20: operands about a middle divide, by decays that are clamped to at least e^-20 a token. A score
//           has at most three such divisors, e^60 in all (a fourth one only in scores of a sub-chunk's last token, in
//           RWKV-6 also of its first one, with itself, which store_direct_scores replaces). If a gate is above GROWTH
//           or NaN, scores in a sub-chunk are computed pair by pair instead (growth.cuh). Scores that no gate
//           multiplies are float32 dot products: of a token's own query and key, and in RWKV-6 of a query and the key
//           before it in its span
//
// A warp has whole spans, a lane LANE_CHANNELS channels of all tokens of a span: so products over tokens need no
// shuffles. BK: the channels of a tile. PRODUCTS: 1 or 3 tf32 products for a product of float32 data. grows: whether a
// gate of the chunk is above GROWTH or NaN. stage: the chunk's index in s.q and s.k. coord: a lane's WarpShare.
//
// From forward_storage.cuh
//   Shared        a block's shared memory, `s`. CHUNK: tokens of a chunk
//   Schedule      a launch's kind: if not has_outputs, it computes states only, from keys alone
//   s.border      BORDER rows of queries, then as many of keys. s.direct: see store_direct_scores
//   state_q(s, stage), state_k(s, stage)  the tiles; s.q[stage] and s.k[stage] if operands are as large as data
//   MiddleOf      for operands about a middle. `Type`: in shared memory. They are multiplied as data of type `Product`
//                 are, in PRODUCTS<N> products where other operands take N. In general Type is OperandOf<T>::Type,
//                 Product is T, and PRODUCTS<N> is N. But of bfloat16 data in Schedule SplitChannels (launches each
//                 have a part of the channels, whose scores may cancel) Type and Product are float, PRODUCTS<N> is 1
//   Storage::Gate  G, the gates' type; every gate is of one token and one channel
// From forward_tiles.cuh
//   OperandOf<T>::Type  the type of other operands in shared memory: bfloat16 of bfloat16 data, else float
//   operand_value a number as it is stored there
//   Piece         neighbouring values of a row, in 32-bit `words`, each of one float or of two 16-bit values
//   Spot          a lane's swizzled place in each group of 8 rows of a tile: get and put add the group and a row
// From others
//   sum_and_share<SPAN, 2, 1>  sums each of 4 values over 4 lanes: lane l has the sum of value l % 4 in x[0]
//   GROWTH        1 nat. decay_of(x): e^x. LEAST_DECAY: e^-20. inverse(x): 1 / x
//   max_nan(x, y) the larger one, or NaN if one is NaN; max_nan<G>: of each half of two words
//   cp_async      a copy to shared memory
#include "read_order.cuh"
#include "decays.cuh"
#include "gated/forward_storage.cuh"
#include "growth.cuh"
#include "lanes.cuh"

// Share n of the warp: a span (its number in the chunk) with all channels, or, if BK = 128 and there are fewer spans
// than warps, with half of them. A warp has SHARES_PER_WARP shares, one after the other. If BK is 64 and there are two
// spans for each warp, each half of its lanes has one, at the same time. These two spans are WARPS apart, which is
// even: both are first, or both second, spans of a sub-chunk, so that the halves do not diverge. A lane has the span's
// channels `channel` ... `channel` + LANE_CHANNELS - 1. exists(): whether there is a share n; some warps lack the last
// one.
template <typename T, int BK, int WARPS> struct WarpShare {
  static constexpr int SPANS = CHUNK<T> / SPAN;
  static constexpr int SPANS_AT_ONCE = BK == 64 && SPANS == 2 * WARPS ? 2 : 1, LANES = 32 / SPANS_AT_ONCE;
  static constexpr int CHANNEL_PARTS = BK == 128 && SPANS < WARPS ? 2 : 1, LANE_CHANNELS = BK / LANES / CHANNEL_PARTS;
  static constexpr int SHARES_PER_WARP = (SPANS * CHANNEL_PARTS + SPANS_AT_ONCE * WARPS - 1) / (SPANS_AT_ONCE * WARPS);
  static_assert(SPANS_AT_ONCE == 1 || (WARPS % 2 == 0 && SHARES_PER_WARP == 1));
  static_assert(SPAN == 4 && SUB_CHUNK == 2 * SPAN && (SPANS == 4 || SPANS == 8), "bits of `span` name its borders");
  int span, channel_part, channel;
  __device__ __forceinline__ WarpShare(int n) {
    const int thread = opaque(threadIdx.x), lane = thread & 31;  // opaque: computed again, not held in registers
    const int index = (thread >> 5) + (n + lane / LANES) * WARPS;
    span = index / CHANNEL_PARTS, channel_part = index % CHANNEL_PARTS;
    channel = (channel_part * LANES + lane % LANES) * LANE_CHANNELS;
  }
  __device__ __forceinline__ bool exists() const { return SPANS * CHANNEL_PARTS % WARPS == 0 || span < SPANS; }
  __device__ __forceinline__ int row(int i) const { return span * SPAN + i; }
};

// A lane's gates of a span in registers; 0 after the sequence's end and beyond K.
template <int LANE_CHANNELS, typename G> using Gates = Piece<LANE_CHANNELS, G>[SPAN];

// Starts copying this lane's gates of a span from `from` in memory, of the span's first token and the lane's first
// channel, to the tile `gates` in shared memory. No other lane reads these gates, so that each lane waits for its own
// copies only. rows, channels: how many rows from the span's first on exist, and channels from the lane's first on; 0
// or less: none. Of the lane's channels all exist or none, since rows are multiples of the copies' size.
template <int BK, class WarpShare, typename G>
__device__ __forceinline__ void fetch_gates(G* gates, const WarpShare& coord, const G* from, i64 stride, int rows,
                                            int channels) {
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    cp_async<WarpShare::LANE_CHANNELS * sizeof(G)>(gates + coord.row(i) * BK + coord.channel, from,
                                                   i < rows && channels > 0);
    from += stride;
  }
}
// fetch_gates for rows that do not allow copies of LANE_CHANNELS gates: copies one gate after the other. `gates`: the
// lane's place in the tile. Rarely called, therefore not inline.
template <int BK, int LANE_CHANNELS, typename G>
__device__ __noinline__ void fetch_unaligned_gates(G* gates, const G* from, i64 stride, int rows, int channels) {
#pragma unroll 1
  for (int n = 0; n < SPAN * LANE_CHANNELS; ++n) {
    const int i = n / LANE_CHANNELS, c = n % LANE_CHANNELS;
    gates[i * BK + c] = i < rows && c < channels ? from[i * stride + c] : from_float<G>(0.f);
  }
}
// Loads the gates that this lane has copied, from the tile `from`.
template <int BK, class WarpShare, typename G>
__device__ __forceinline__ void load_gates(Gates<WarpShare::LANE_CHANNELS, G>& gates, const G* from,
                                           const WarpShare& coord) {
#pragma unroll
  for (int i = 0; i < SPAN; ++i) gates[i].load(from + coord.row(i) * BK + coord.channel);
}

// The decay over a span's tokens, for LANE_CHANNELS channels.
template <int LANE_CHANNELS, typename G>
__device__ __forceinline__ void compute_span_decay(float (&decay)[LANE_CHANNELS],
                                                   const Gates<LANE_CHANNELS, G>& gates) {
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; ++c) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SPAN; ++i) sum += gates[i].get(c);
    decay[c] = decay_of(sum);
  }
}

// Whether a gate is above GROWTH, or NaN. Operands about a middle would overflow; and they would lose the NaN, since
// their decays are clamped by fmaxf. max_nan keeps a NaN, and so !(NaN <= GROWTH) is true.
template <int LANE_CHANNELS, typename G>
__device__ __forceinline__ bool any_gate_too_large(const Gates<LANE_CHANNELS, G>& gates) {
  float largest = gates[0].get(0);
  if constexpr (sizeof(G) == 4) {
#pragma unroll
    for (int n = 1; n < SPAN * LANE_CHANNELS; ++n)
      largest = max_nan(gates[n / LANE_CHANNELS].get(n % LANE_CHANNELS), largest);
  } else {
    u32 pair = gates[0].words[0];
#pragma unroll
    for (int n = 1; n < SPAN * LANE_CHANNELS / 2; ++n)
      pair = max_nan<G>(gates[n / (LANE_CHANNELS / 2)].words[n % (LANE_CHANNELS / 2)], pair);
    largest = max_nan(to_float(G{u16(pair)}), to_float(G{u16(pair >> 16)}));
  }
  return !(largest <= GROWTH);
}

// The decay e^g of each of a lane's tokens and channels. kept_in_registers: store_span_decays computes them and
// make_operands uses them; otherwise make_operands computes them itself.
template <class WarpShare> struct TokenDecays {
  static constexpr bool kept_in_registers = WarpShare::SPANS_AT_ONCE == 2;  // the warp then has one share
  float token[SPAN][WarpShare::LANE_CHANNELS];

  template <typename G> __device__ __forceinline__ void compute(const Gates<WarpShare::LANE_CHANNELS, G>& gates) {
#pragma unroll
    for (int i = 0; i < SPAN; ++i)
#pragma unroll
      for (int c = 0; c < WarpShare::LANE_CHANNELS; ++c) token[i][c] = decay_of(gates[i].get(c));
  }
};

// Stores the decays of this lane's channels in a row of shared memory.
template <int BK, class WarpShare>
__device__ __forceinline__ void store_decay(float (&row)[BK], const WarpShare& coord,
                                            const float (&decay)[WarpShare::LANE_CHANNELS]) {
  Piece<WarpShare::LANE_CHANNELS, float> piece;
  piece.set(decay);
  piece.store(&row[coord.channel]);
}

// The decay over the half of the chunk in which the span does not lie, for BorderDecays, below. Computed here if a warp
// has spans of both halves at once: in BorderDecays the halves of the warp would take different branches, which would
// be executed one after the other. Not used if a gate is too large: then the order of multiplications decides whether a
// product overflows.
template <class WarpShare> struct OtherHalfDecay {
  static constexpr bool IS_COMPUTED = WarpShare::SPANS == 8 && WarpShare::SPANS_AT_ONCE == 2;
  float decay[WarpShare::LANE_CHANNELS];

  template <int SPANS, int BK>
  __device__ __forceinline__ OtherHalfDecay(const float (&span_decays)[SPANS][BK], const WarpShare& coord) {
    if constexpr (IS_COMPUTED) {
#pragma unroll
      for (int n = 0; n < SPANS / 2; ++n) {
        Piece<WarpShare::LANE_CHANNELS, float> next;
        next.load(&span_decays[((coord.span & 4) ^ 4) + n][coord.channel]);
#pragma unroll
        for (int c = 0; c < WarpShare::LANE_CHANNELS; ++c) decay[c] = n ? decay[c] * next.get(c) : next.get(c);
      }
    }
  }
};

// For this lane's channels, the decays over the tokens between this span and the start (BEFORE) or the end of its
// sub-chunk, of its half of the chunk, and of the chunk.
constexpr bool BEFORE_SPAN = true, AFTER_SPAN = false;
template <int LANE_CHANNELS, bool BEFORE> struct BorderDecays {
  float sub_chunk[LANE_CHANNELS], half_chunk[LANE_CHANNELS], chunk[LANE_CHANNELS];

  template <int SPANS, int BK, class WarpShare>
  __device__ __forceinline__ BorderDecays(const float (&span_decays)[SPANS][BK], const WarpShare& coord,
                                          const OtherHalfDecay<WarpShare>& other, bool grows) {
    const int span = coord.span, channel = coord.channel;
    // Multiplies x by the decays over spans first ... first + count - 1.
    const auto multiply_spans = [&](float (&x)[LANE_CHANNELS], int first, int count) {
#pragma unroll 2
      for (int n = 0; n < count; ++n) {
        Piece<LANE_CHANNELS, float> decay;  // from the nearest span on: another order may leave float32's range
        decay.load(&span_decays[BEFORE ? first + count - 1 - n : first + n][channel]);
#pragma unroll
        for (int c = 0; c < LANE_CHANNELS; ++c) x[c] *= decay.get(c);
      }
    };
    // Spans are grouped by 2 (a sub-chunk), 4 (a half of the chunk) and 8 (a chunk). Whether, of the 2 * count spans of
    // this span's group, the `count` spans of the other half lie between this span and the group's start (BEFORE) or
    // end.
    const auto other_part_between = [&](int count) { return BEFORE == bool(span & count); };
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) sub_chunk[c] = 1.f;
    if (other_part_between(1)) multiply_spans(sub_chunk, span ^ 1, 1);
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) half_chunk[c] = sub_chunk[c];
    if (other_part_between(2)) multiply_spans(half_chunk, (span ^ 2) & ~1, 2);
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) chunk[c] = half_chunk[c];
    if (OtherHalfDecay<WarpShare>::IS_COMPUTED && !grows) {
#pragma unroll
      for (int c = 0; c < LANE_CHANNELS; ++c)
        chunk[c] = other_part_between(4) ? half_chunk[c] * other.decay[c] : half_chunk[c];
    } else if (SPANS == 8 && other_part_between(4)) {
      multiply_spans(chunk, (span ^ 4) & ~3, 4);
    }
  }
};

// y = x * factor, for LANE_CHANNELS channels.
template <int LANE_CHANNELS>
__device__ __forceinline__ void multiply_channels(float (&y)[LANE_CHANNELS], const float (&x)[LANE_CHANNELS],
                                                  const float (&factor)[LANE_CHANNELS]) {
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; ++c) y[c] = x[c] * factor[c];
}

// Sums each of a lane's 4 values over LANES neighbouring lanes. Lane l returns the sum of value l % 4, x[l % 4].
template <int LANES> __device__ __forceinline__ float sum_each(float (&x)[SPAN]) {
  sum_and_share<SPAN, 2, 1>(x);
  float sum = x[0];
#pragma unroll
  for (int distance = 4; distance < LANES; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

// Rounds x to what tensor cores read of an operand of T.
template <typename T, int PRODUCTS, int LANE_CHANNELS>
__device__ __forceinline__ void round_operand(float (&x)[LANE_CHANNELS]) {
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; ++c) x[c] = operand_value<T, PRODUCTS>(x[c]);
}

// Loads SPAN rows of a tile, this lane's channels.
template <int BK, class WarpShare, typename T>
__device__ __forceinline__ void load_span(Piece<WarpShare::LANE_CHANNELS, T> (&rows)[SPAN], const T* tile,
                                          const WarpShare& coord) {
  const Spot<BK, WarpShare::LANE_CHANNELS, T> spot(coord.row(0), coord.channel);
#pragma unroll
  for (int i = 0; i < SPAN; ++i) spot.get(rows[i], tile, coord.span / 2, i);
}

// Stores a span's rows x, times `factor`, in 8-row group `group` of a tile of Stored (bfloat16 or float), in the rows
// of that group that the span has in its sub-chunk (spot's row, modulo 8). AnySpot: Spot, or, for state_q, PairedSpot,
// which stores each 8 floats of a row in the order 0 2 4 6 1 3 5 7. A lane loads places t and t + 4 of them, t = lane %
// 4: columns 2t and 2t + 1, which it also has of S's accumulators. bfloat16 numbers have the usual order.
template <typename T, int PRODUCTS, class AnySpot, typename Stored, int LANE_CHANNELS>
__device__ __forceinline__ void store_span(const AnySpot& spot, Stored* tile, int group,
                                           const float (&x)[SPAN][LANE_CHANNELS],
                                           const float (&factor)[LANE_CHANNELS]) {
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    float y[LANE_CHANNELS];
    multiply_channels(y, x[i], factor);
    round_operand<T, PRODUCTS>(y);
    spot.put(tile, group, i, y);
  }
}

// Stores middle_q and middle_k: queries decayed from, and keys decayed to, the middle of their sub-chunk. SECOND_SPAN:
// AFTER_MIDDLE if the span is the sub-chunk's second one; then keys are divided by decays, otherwise queries are.
constexpr bool AFTER_MIDDLE = true, BEFORE_MIDDLE = false;
template <class ReadOrder, bool SECOND_SPAN, int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV,
          class WarpShare>
__device__ __forceinline__ void store_middle_operands(Shared<Schedule, T, G, BK, BV>& s, const WarpShare& coord,
                                                      const Piece<WarpShare::LANE_CHANNELS, T> (&q)[SPAN],
                                                      const Piece<WarpShare::LANE_CHANNELS, T> (&k)[SPAN],
                                                      const float (&token_decays)[SPAN][WarpShare::LANE_CHANNELS]) {
  constexpr int LANE_CHANNELS = WarpShare::LANE_CHANNELS;
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;  // a query is decayed by its own token's gate, too
  using Middle = MiddleOf<Schedule, T>;
  const Spot<BK, LANE_CHANNELS, typename Middle::Type> spot(coord.row(0), coord.channel);
  // The decay of the tokens between the middle and this token, and its inverse.
  float between[LANE_CHANNELS], inverse_between[LANE_CHANNELS];
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; ++c) between[c] = inverse_between[c] = 1.f;
#pragma unroll
  for (int n = 0; n < SPAN; ++n) {
    const int i = SECOND_SPAN ? n : SPAN - 1 - n;
    float x[LANE_CHANNELS], y[LANE_CHANNELS];
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) {
      const float decay = fmaxf(token_decays[i][c], LEAST_DECAY), qi = q[i].get(c), ki = k[i].get(c);
      if (SECOND_SPAN) {
        if (!INCLUSIVE) x[c] = qi * between[c];
        between[c] *= decay;
        if (INCLUSIVE) x[c] = qi * between[c];
        y[c] = ki * inverse(between[c]);
      } else {
        if (INCLUSIVE) x[c] = qi * inverse_between[c];
        y[c] = ki * between[c];
        between[c] *= decay;
        inverse_between[c] = inverse(between[c]);
        if (!INCLUSIVE) x[c] = qi * inverse_between[c];
      }
    }
    round_operand<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>>(x);
    round_operand<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>>(y);
    spot.put(s.middle_q, coord.span / 2, i, x);
    spot.put(s.middle_k, coord.span / 2, i, y);
  }
}

// Stores s.direct, dot products that no gate multiplies: [0] of a token's own query and key (RWKV-6: times u); [1], in
// RWKV-6, of a query and the key before it in the span (0, and not used, for a span's first token). One row for each
// part of the channels: their sum is the score.
template <class ReadOrder, class Storage, typename T, class WarpShare>
__device__ __forceinline__ void store_direct_scores(Storage& s, const WarpShare& coord,
                                                    const Piece<WarpShare::LANE_CHANNELS, T> (&q)[SPAN],
                                                    const Piece<WarpShare::LANE_CHANNELS, T> (&k)[SPAN]) {
  constexpr int LANE_CHANNELS = WarpShare::LANE_CHANNELS;
  const int lane = threadIdx.x % WarpShare::LANES;
  float sums[SPAN];
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    sums[i] = 0.f;
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) {
      const float u = ReadOrder::reads_before_write ? s.u[coord.channel + c] : 1.f;
      sums[i] = fmaf(q[i].get(c), u * k[i].get(c), sums[i]);
    }
  }
  const float self_score = sum_each<WarpShare::LANES>(sums);
  if (lane < SPAN) s.direct[0][coord.channel_part][coord.row(lane)] = self_score;
  if constexpr (ReadOrder::reads_before_write) {
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      sums[i] = 0.f;
#pragma unroll
      for (int c = 0; c < LANE_CHANNELS; ++c)
        if (i) sums[i] = fmaf(q[i].get(c), k[i - 1].get(c), sums[i]);
    }
    const float score_before = sum_each<WarpShare::LANES>(sums);
    if (lane < SPAN) s.direct[1][coord.channel_part][coord.row(lane)] = score_before;
  }
}

// Before the first chunk, by all threads of the block: sets to zero the scores A, of which the tasks of
// forward_products.cuh store no block of 8 x 8 above the diagonal, and the part of direct scores that nobody stores
// where a share has all channels.
template <class WarpShare, int THREADS, class Storage> __device__ __forceinline__ void clear_scores(Storage& s) {
  constexpr int NUMBERS = sizeof s.A / sizeof s.A[0], QUERIES = sizeof s.direct[0][0] / sizeof(float);
  for (int index = threadIdx.x; index < NUMBERS; index += THREADS) s.A[index] = {};
  if (WarpShare::CHANNEL_PARTS == 1)
    for (int index = threadIdx.x; index < 2 * QUERIES; index += THREADS)
      s.direct[index / QUERIES][1][index % QUERIES] = 0.f;
}

// Stores queries decayed from the borders between them and keys of other sub-chunks (`border`, as in the table at the
// top), and from the chunk's start (state_q).
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV, class WarpShare>
__device__ __forceinline__ void decay_queries(Shared<Schedule, T, G, BK, BV>& s, int stage, const WarpShare& coord,
                                              const float (&token_decays)[SPAN][WarpShare::LANE_CHANNELS],
                                              const OtherHalfDecay<WarpShare>& other, bool grows) {
  constexpr int LANE_CHANNELS = WarpShare::LANE_CHANNELS;
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;
  const int sub_chunk = coord.span / 2;
  const Spot<BK, LANE_CHANNELS, typename OperandOf<T>::Type> spot(coord.row(0), coord.channel);
  const PairedSpot<BK, LANE_CHANNELS, typename OperandOf<T>::Type> paired(coord.row(0), coord.channel);
  Piece<LANE_CHANNELS, T> q[SPAN];
  load_span<BK>(q, s.q[stage], coord);
  // The warp has read its rows: state_q may be the same memory as s.q, and a PairedSpot is where another lane reads.
  __syncwarp();
  const BorderDecays<LANE_CHANNELS, BEFORE_SPAN> before(s.span_decays, coord, other, grows);  // from the starts
  float decay[LANE_CHANNELS], x[SPAN][LANE_CHANNELS];
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = 0; i < SPAN; ++i) {
    if (INCLUSIVE) multiply_channels(decay, decay, token_decays[i]);
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) x[i][c] = q[i].get(c) * decay[c];
    if (!INCLUSIVE) multiply_channels(decay, decay, token_decays[i]);
  }
  if (sub_chunk & 1) store_span<T, PRODUCTS>(spot, s.border, sub_chunk / 2, x, before.sub_chunk);
  if (sub_chunk >= 2) store_span<T, PRODUCTS>(spot, s.border, sub_chunk, x, before.half_chunk);
  store_span<T, PRODUCTS>(paired, state_q(s, stage), sub_chunk, x, before.chunk);
}

// Stores keys decayed to the borders between them and queries of other sub-chunks (`border`, as in the table at the
// top), and to the chunk's end (state_k); and the decay of the chunk.
template <int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV, class WarpShare>
__device__ __forceinline__ void decay_keys(Shared<Schedule, T, G, BK, BV>& s, int stage, const WarpShare& coord,
                                           const float (&token_decays)[SPAN][WarpShare::LANE_CHANNELS],
                                           const OtherHalfDecay<WarpShare>& other, bool grows) {
  constexpr int LANE_CHANNELS = WarpShare::LANE_CHANNELS;
  const int sub_chunk = coord.span / 2;
  const Spot<BK, LANE_CHANNELS, typename OperandOf<T>::Type> spot(coord.row(0), coord.channel);
  Piece<LANE_CHANNELS, T> k[SPAN];
  load_span<BK>(k, s.k[stage], coord);
  __syncwarp();  // the warp has read its rows: state_k may be their memory
  const BorderDecays<LANE_CHANNELS, AFTER_SPAN> after(s.span_decays, coord, other, grows);  // to the ends
  float decay[LANE_CHANNELS], x[SPAN][LANE_CHANNELS];
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = SPAN - 1; i >= 0; --i) {
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; ++c) x[i][c] = k[i].get(c) * decay[c];
    multiply_channels(decay, decay, token_decays[i]);
  }
  if constexpr (Schedule::has_outputs) {
    if (!(sub_chunk & 1)) store_span<T, PRODUCTS>(spot, s.border, s.BORDER / 8 + sub_chunk / 2, x, after.sub_chunk);
    if (WarpShare::SPANS == 8 && sub_chunk < 2)
      store_span<T, PRODUCTS>(spot, s.border, s.BORDER / 8 + 2 + sub_chunk, x, after.half_chunk);
  }
  store_span<T, PRODUCTS>(spot, state_k(s, stage), sub_chunk, x, after.chunk);
  if (coord.span == 0) {  // the decay over this span and all later ones: over the chunk
    multiply_channels(decay, decay, after.chunk);
    store_decay(s.decay, coord, decay);
  }
}

// Stores all operands of one share. decays: computed here unless kept_in_registers.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, typename G, int BK, int BV, class WarpShare>
__device__ __forceinline__ void make_operands(Shared<Schedule, T, G, BK, BV>& s, int stage, const WarpShare& coord,
                                              TokenDecays<WarpShare>& decays, bool grows) {
  constexpr int LANE_CHANNELS = WarpShare::LANE_CHANNELS;
  // Sets decays.token, unless store_span_decays has.
  const auto compute_decays = [&] {
    if constexpr (TokenDecays<WarpShare>::kept_in_registers) return;
    Gates<LANE_CHANNELS, G> gates;
    load_gates<BK>(gates, s.gates, coord);
    decays.compute(gates);
  };
  float (&token_decays)[SPAN][LANE_CHANNELS] = decays.token;
  if constexpr (Schedule::has_outputs) {
    Piece<LANE_CHANNELS, T> q[SPAN], k[SPAN];
    load_span<BK>(q, s.q[stage], coord);
    load_span<BK>(k, s.k[stage], coord);
    store_direct_scores<ReadOrder>(s, coord, q, k);
    __syncwarp();  // keeps the compiler from interleaving these steps, which would take more registers
    compute_decays();
    if (coord.span & 1) store_middle_operands<ReadOrder, AFTER_MIDDLE, PRODUCTS>(s, coord, q, k, token_decays);
    else store_middle_operands<ReadOrder, BEFORE_MIDDLE, PRODUCTS>(s, coord, q, k, token_decays);
  } else {
    compute_decays();
  }
  // Where state_q and state_k are the memory of s.q[stage] and s.k[stage], decay_queries overwrites the share's
  // queries, and decay_keys its keys: all that reads them stands above. Scores pair by pair read the arrays in memory.
  const OtherHalfDecay<WarpShare> other(s.span_decays, coord);
  if constexpr (Schedule::has_outputs) decay_queries<ReadOrder, PRODUCTS>(s, stage, coord, token_decays, other, grows);
  decay_keys<PRODUCTS>(s, stage, coord, token_decays, other, grows);
}

// Stores the decays of the spans whose gates this thread has copied, and computes the token decays if they are kept.
// Returns whether any_gate_too_large is true of one of its gates.
template <class WarpShare, int BK, class Storage>
__device__ __forceinline__ bool store_span_decays(Storage& s, TokenDecays<WarpShare>& decays) {
  bool grows = false;
#pragma unroll
  for (int n = 0; n < WarpShare::SHARES_PER_WARP; ++n) {
    const WarpShare coord(n);
    if (!coord.exists()) break;
    Gates<WarpShare::LANE_CHANNELS, typename Storage::Gate> gates;
    float decay[WarpShare::LANE_CHANNELS];
    load_gates<BK>(gates, s.gates, coord);
    const bool too_large = any_gate_too_large<WarpShare::LANE_CHANNELS>(gates);
    if constexpr (TokenDecays<WarpShare>::kept_in_registers) {
      decays.compute(gates);
#pragma unroll
      for (int c = 0; c < WarpShare::LANE_CHANNELS; ++c)
        decay[c] = decays.token[0][c] * decays.token[1][c] * decays.token[2][c] * decays.token[3][c];
      // The product above, which rounds otherwise than e^sum, may be infinite.
      if (too_large) compute_span_decay<WarpShare::LANE_CHANNELS>(decay, gates);
    } else {
      compute_span_decay<WarpShare::LANE_CHANNELS>(decay, gates);
    }
    store_decay(s.span_decays[coord.span], coord, decay);
    grows |= too_large;
  }
  return grows;
}

// Starts copying this thread's gates of a chunk with `rows` tokens, from token `token` on, and of `channels` channels
// from `first_channel` on. `bytes`: a power of 2 that divides the address and the length of every row of g.
template <class WarpShare, int BK, typename G>
__device__ __forceinline__ void fetch_chunk_gates(G* gates, const StridedRows<const G>& g, i64 b, i64 h, i64 token,
                                                  int rows, i64 first_channel, int channels, int bytes) {
#pragma unroll
  for (int n = 0; n < WarpShare::SHARES_PER_WARP; ++n) {
    const WarpShare coord(n);
    const G* from = g.row(b, h, token + coord.row(0)) + first_channel + coord.channel;
    const int rows_left = rows - coord.row(0);
    if (!coord.exists()) break;
    if (bytes >= WarpShare::LANE_CHANNELS * int(sizeof(G)))
      fetch_gates<BK>(gates, coord, from, g.token_stride, rows_left, channels - coord.channel);
    else
      fetch_unaligned_gates<BK, WarpShare::LANE_CHANNELS>(gates + coord.row(0) * BK + coord.channel, from,
                                                          g.token_stride, rows_left, channels - coord.channel);
  }
}

// what      Forward pass of the delta rules, token by token: outputs, final states, and states before every so many
//           tokens. Or, if args.F is given, what a segment of a sequence does to a state: from S to F S + G.
// math      Template argument Rule. D = diag(exp g), g log gates of channels; for GatedDelta one g for all channels. S
//           is the state before the token, S' = D S its decay, S+ the state after the token:
//           GatedDelta, Kda: e = v - S'^T k, S+ = S' + k (beta e)^T, o = scale (S'^T q + (q . k) beta e)
//           Dplr (diagonal plus low rank, RWKV-7): p = S^T a, S+ = S' + b p^T + k v^T,
//                 o = scale (S'^T q + (q . b) p + (q . k) v)
//           If args.normalized (never for Dplr), q and k above are the given ones divided by their Euclidean
//           lengths. The kernel works with the given ones and multiplies sums by the inverse lengths
// walks     args.F   columns  starts from                          values  the last state is
//           null     of V     `initial`, or, in a later segment,   v       `final`, if the segment is a sequence's last
//                             its state in `starts`
//           given    of V     `initial`, or, in a later segment,   v       G, in `starts` in the place of the next
//                             zeros                                        segment; not of a last segment
//           given    of F     the identity                         0       F; not of a first or last segment
//           Only walks of the first row have outputs
// shapes    q k a b [B, H, T, K], v o [B, HV, T, V], g [B, HV, T] or [B, HV, T, K], beta [B, HV, T], initial and final
//           state [N, HV, K, V], kept [B, HV, chunks, V, K and zeros to a multiple of 4]. HV, the number of value
//           heads, is shape.H; every args.group value heads share a head of q, k, a and b. F [segments, HV, K, K and
//           zeros to a multiple of 4]; starts [segments, HV, K, V]: first G, each in the place of the next segment,
//           which join_segments.cu then replaces by the state from which that segment starts
// grid      a block for every (segment, value head, BV columns of V), segment slowest, columns of F after those of V.
//           BK / 16 neighbouring lanes share COLUMNS columns: each of them holds 16 channels of these columns' state in
//           registers
// smem      Shared: two stages of tokens as they are in memory, zeros beyond K, V and the sequence; and decays and
//           scalars (`TokenScalars`) of the tokens of one stage
// barriers  one in is_whole, if sequences have segments: threads agree whether the state from which the last segment
//           starts is finite, since join_segments.cu marks there that numbers grew out of range. Two for each stage of
//           tokens. First: the tokens have arrived, and no thread reads the previous stage's tokens, decays or scalars
//           any more, which are then overwritten. Second: decays and scalars of this stage are written
// numerics  float32; float64 for float64 data. S^T a or S'^T k, and S'^T q, are summed over lanes in the same shuffles,
//           so that a token waits for shuffles once
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K <= BK; BK of 64, 128, 256; COLUMNS of 1, 2, 4
// tests     test_delta_kernels; test_segments_by_token there with F
#include "delta/segments.cuh"
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   FloatOrDouble<T>: double if T is, else float; widened, narrowed: from T to it and back; load_neighbours,
//     store_neighbours: so many neighbouring numbers at once
//   Rule::channel_gates: a gate for each channel; Rule::own_erasure: a and b of Dplr
//   BlockWork work: n, the segment's index (if P = 1 the sequence's), counted through all batch rows; b, h: its
//     batch row and head of values; span: its tokens; the columns of V from first_column on. Its last argument: more
//     tiles of columns after those of V, whose first_column counts on
//   Tokens::fetch starts copies; TokenGates: gates and betas on their way; store: writes them to TokenScalars
//   prepare_tokens: writes decays of channels, and the other members of TokenScalars: the inverse lengths of q and k, 1
//     if these are not normalized; q_dot_k and q_dot_b, products of the given q, k and b
//   DeltaArgs: inputs; initial states; P, segments of a sequence; group, value heads that share a head of keys
//   segment_of: a Segment: its tokens and chunks; `from`, the state that it starts from, null for zeros; `to`, where
//     its last state goes, null for nowhere: see `walks`. is_whole: whether the walk's first segment takes all tokens
//     of its sequence, and the others none, since states were not finite when join_segments.cu had joined segments
//   converted_once: a conversion that the compiler does not repeat for every token; THREADS = 128

constexpr int CHANNELS = 16;  // of a lane
// Tokens of a stage: so many that the stage's q, and its k, have at most 4 KB for every type and BK.
template <typename T, int BK> constexpr int TOKENS = (BK > 128 ? 16 : 32) / sizeof(T);

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  StridedRows<T> o;                     // null: no output is wanted
  StridedRows<FloatOrDouble<T>> final;  // null: no final state is wanted
  FloatOrDouble<T>* kept;               // the states before every shape.chunk-th token of a sequence, or null
  FloatOrDouble<T>* F;                  // or null; then o, final and kept are null
};

template <class Rule, typename T, typename G, int BK, int COLUMNS> struct Shared {
  static constexpr int LANES = BK / CHANNELS;           // lanes that share columns
  static constexpr int BV = THREADS / LANES * COLUMNS;  // columns of a block
  static_assert(32 % LANES == 0, "shuffles sum over lanes of one warp");
  static_assert(COLUMNS <= LANES, "each column's output is stored by a lane of its own");
  Tokens<Rule, T, G, BK, BV, TOKENS<T, BK>> stages[2];
  // exp g [TOKENS, BK]; without gates of channels unused, 16 bytes long since an array must not be empty.
  FloatOrDouble<T> decays[Rule::channel_gates ? TOKENS<T, BK> * BK : 16 / sizeof(FloatOrDouble<T>)];
  TokenScalars<FloatOrDouble<T>> scalars[TOKENS<T, BK>];
};

// The i-th channel of a lane, number `lane` of the LANES that share columns: four neighbouring ones at a time.
template <int LANES> __device__ __forceinline__ int channel_of(int lane, int i) {
  return 4 * (lane + LANES * (i / 4)) + i % 4;
}

// Applies token r of a stage to S, a lane's channels of COLUMNS columns from `column` on. Returns, of the lane's column
// number `lane`, the output before it is scaled.
template <class Storage, class Rule, int BK, int COLUMNS, class Stage, typename R>
__device__ __forceinline__ R apply_token(R (&S)[CHANNELS][COLUMNS], const Storage& s, const Stage& in,
                                         const TokenScalars<R> token_scalars, int r, int lane, int column) {
  constexpr int LANES = Storage::LANES, BV = Storage::BV;
  // By column, first over this lane's channels, then over all: erased is S'^T k, of Dplr p = S^T a; read is S'^T q.
  R k[CHANNELS], b[Rule::own_erasure ? CHANNELS : 1], erased[COLUMNS] = {}, read[COLUMNS] = {}, v[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) v[c] = widened(in.v[r * BV + column + c]);
#pragma unroll
  for (int i = 0; i < CHANNELS; i += 4) {
    const int place = r * BK + channel_of<LANES>(lane, i);
    R q[4], a[4], decay[4];
    load_neighbours<4>(q, in.q + place), load_neighbours<4>(k + i, in.k + place);
    if constexpr (Rule::own_erasure) load_neighbours<4>(a, in.a + place), load_neighbours<4>(b + i, in.b + place);
    if constexpr (Rule::channel_gates) load_neighbours<4>(decay, s.decays + place);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        R& x = S[i + j][c];
        if constexpr (Rule::own_erasure) erased[c] = fma(a[j], x, erased[c]);
        x *= Rule::channel_gates ? decay[j] : token_scalars.decay;
        if constexpr (!Rule::own_erasure) erased[c] = fma(k[i + j], x, erased[c]);
        read[c] = fma(q[j], x, read[c]);
      }
  }
  // The sums over the LANES lanes that share columns.
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      erased[c] += __shfl_xor_sync(0xffffffffu, erased[c], distance);
      read[c] += __shfl_xor_sync(0xffffffffu, read[c], distance);
    }
  R written[COLUMNS];  // beta e times k's inverse length; Dplr: v. S+ = S' + k written^T (Dplr: + b p^T)
  R o = 0;             // the output of the lane's column number `lane`, which this lane stores
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    written[c] = Rule::own_erasure ? v[c]
                                   : token_scalars.inverse_k_length * token_scalars.beta *
                                         (v[c] - token_scalars.inverse_k_length * erased[c]);
    R sum = fma(token_scalars.q_dot_k, written[c], read[c]);
    if constexpr (Rule::own_erasure) sum = fma(token_scalars.q_dot_b, erased[c], sum);
    o = lane == c ? sum : o;
  }
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      S[i][c] = fma(k[i], written[c], S[i][c]);
      if constexpr (Rule::own_erasure) S[i][c] = fma(b[i], erased[c], S[i][c]);
    }
  return o;
}

// By the launch bounds a multiprocessor has registers for three blocks, 168 a thread; with float64 for two, 255.
template <class Rule, typename T, typename G, int BK, int COLUMNS>
__global__ void __launch_bounds__(THREADS, sizeof(FloatOrDouble<T>) == 4 ? 3 : 2)
    delta_recurrent_forward(const Args<T, G> args) {
  using R = FloatOrDouble<T>;
  using Storage = Shared<Rule, T, G, BK, COLUMNS>;
  constexpr int LANES = Storage::LANES, BV = Storage::BV, STAGE_TOKENS = TOKENS<T, BK>;
  auto& s = *reinterpret_cast<Storage*>(dynamic_smem());
  const Shape& shape = args.shape;
  // work.first_column counts on from V, rounded up to BV, to the columns of F.
  BlockWork work(shape, BV, args.F ? u32(shape.K + BV - 1) / BV : 0);
  struct Part {  // what the block has of a state, or of F
    bool of_F;
    int width;  // numbers of a row in memory; of F: K and zeros
    int first_column;
    Segment<R> segment;
  };
  // Whether the first segment's block takes all tokens of its sequence, as a joined state is not finite.
  const bool whole =
      !args.F && is_whole<FORWARDS>(shape, u32(args.P), work.n, work.h, args.starts, int(work.first_column), BV);
  // n: the segment; tile: work.first_column. Called twice, with the same result: see the end of the kernel.
  const auto part_of = [&](u32 n, u32 tile) {
    const u32 value_columns = u32(shape.V + BV - 1) / BV * BV;
    const auto segment =
        segment_of<FORWARDS>(!args.F, shape, u32(args.P), n, work.h, args.initial, args.starts, args.final, whole);
    if (tile < value_columns) return Part{false, int(shape.V), int(tile), segment};
    return Part{true, padded_to_4(int(shape.K)), int(tile - value_columns), segment};
  };
  const auto part = part_of(work.n, work.first_column);
  if (args.F && (part.segment.last || (part.of_F && part.segment.first))) return;
  work.span = part.segment.tokens;
  const int K = int(shape.K), columns_left = part.width - part.first_column,
            tokens = int(work.span.stop - work.span.start);
  // `lane` counts the LANES lanes that share columns; `column`: the lane's first column in the block's tile.
  const int lane = threadIdx.x % LANES, column = threadIdx.x / LANES * COLUMNS;
  const auto channel = [&](int i) { return channel_of<LANES>(lane, i); };

  R S[CHANNELS][COLUMNS];
  // Calls f(numbers, place, count) for the COLUMNS numbers that a lane has of each channel: the place of the first one
  // in a state or in F, and how many exist.
  const auto each_channel = [&](const Part& of, auto f) {
    const int first_column = of.first_column + column, left = min(of.width - first_column, COLUMNS);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) f(S[i], i64(channel(i)) * of.width + first_column, channel(i) < K ? left : 0);
  };
  // Whether the COLUMNS numbers of each channel can be copied at once, from or to `state`.
  const auto at_once = [](const Part& of, const R* state) {
    return of.width % COLUMNS == 0 && u64(state) % (COLUMNS * sizeof(R)) == 0;
  };
  const R* const from = part.of_F ? nullptr : part.segment.from;
  // Where all channels exist: a load with a condition would wait for the one before.
  if (from && at_once(part, from) && K == BK && column < columns_left) {
    each_channel(part, [&](R(&x)[COLUMNS], i64 at, int) { load_neighbours<COLUMNS>(x, from + at); });
  } else {
    each_channel(part, [&](R(&x)[COLUMNS], i64 at, int count) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        // A walk for F starts from the identity: row * width + column is a multiple of width + 1 on the diagonal only.
        const R first = part.of_F ? R((at + c) % (part.width + 1) == 0) : R(0);
        x[c] = c >= count ? R(0) : from ? from[at + c] : first;
      }
    });
  }

  TokenGates<Rule, R> next_gates;
  // Starts the copies of a stage's tokens, and the loads of their gates and write strengths to registers.
  const auto fetch = [&](int token, int stage) {
    const int rows = min(tokens - token, STAGE_TOKENS);
    s.stages[stage].fetch(args, work, work.span.start + token, rows);
    next_gates.load(args, work, work.span.start + token, rows);
    cp_async_commit();
  };
  if (tokens) fetch(0, 0);
  const R scale = converted_once<R>(args.scale);
  const bool stores = args.o.p && lane < COLUMNS && column + lane < columns_left;
  T* to = args.o.row(work.b, work.h, work.span.start) + work.first_column + column + lane;
  const int kept_channels = padded_to_4(K);
  // The token before which the next state is kept; -1: none is, and `kept` below is not used.
  int next_kept = args.kept ? 0 : -1;
  R* kept = args.kept +
            ((i64(work.b) * shape.H + work.h) * shape.NC + part.segment.chunks.start) * shape.V * kept_channels +
            i64(work.first_column + column) * kept_channels + 4 * lane;
#pragma unroll 1
  for (int token = 0, stage = 0; token < tokens; token += STAGE_TOKENS, stage ^= 1) {
    const auto& in = s.stages[stage];
    const int rows = min(tokens - token, STAGE_TOKENS);
    cp_async_wait<0>();
    __syncthreads();  // this stage's tokens have arrived; no thread reads the previous stage or its scalars any more
    next_gates.store(s.scalars, rows);
    if (token + STAGE_TOKENS < tokens) fetch(token + STAGE_TOKENS, stage ^ 1);
    constexpr bool DOTS = true;  // also q . k and q . b
    prepare_tokens<DOTS>(s.scalars, s.decays, in, rows, args.normalized);
    __syncthreads();  // decays and scalars of this stage's tokens are written
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      if (token + r == next_kept) {
        next_kept += int(shape.chunk);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
          for (int i = 0; i < CHANNELS; i += 4)
            if (column + c < columns_left && channel(i) < K)
              store_neighbours<4>(kept + c * kept_channels + LANES * i, [&](int j) { return S[i + j][c]; });
        kept += shape.V * kept_channels;
      }
      const TokenScalars<R> token_scalars = s.scalars[r];
      const R o = apply_token<Storage, Rule, BK>(S, s, in, token_scalars, r, lane, column);
      if (stores) *to = narrowed<T>(scale * token_scalars.inverse_q_length * o);
      to += args.o.token_stride;
    }
  }
  // `opaque` hides that these are the numbers of before: what is computed from them takes no registers between tokens.
  const u32 n = u32(opaque(int(work.n)));
  const auto end = part_of(n, u32(opaque(int(work.first_column))));
  R* state = end.of_F ? args.F + (i64(n) * shape.H + work.h) * K * end.width : end.segment.to;
  if (!state) return;
  if (at_once(end, state)) {
    each_channel(end, [&](R(&x)[COLUMNS], i64 at, int count) {
      if (count > 0) store_neighbours<COLUMNS>(state + at, [&](int c) { return x[c]; });
    });
  } else {
    each_channel(end, [&](R(&x)[COLUMNS], i64 at, int count) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        if (c < count) state[at + c] = x[c];
    });
  }
}

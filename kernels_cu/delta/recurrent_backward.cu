// what      The gradients of the delta rules token by token, from states that recurrent_forward.cu has kept, or, of
//           sequences of at most TOKENS tokens, from their initial states. A segment of a sequence turns dS, the
//           gradient of the state after it, into F^T dS + G', F being the product of its tokens' transitions
//           (join_segments.cu). Without OUTPUTS the kernel computes only G': it starts from dS = 0, or from dht in a
//           sequence's last segment, and stores the dS before the segment
// math      Template argument Rule; Dplr is RWKV-7's. With S' = diag(exp g_t) S_{t-1}, forwards o_t = scale S_t^T q_t,
//           GatedDelta, Kda: e = v - S'^T k, S_t = S' + k (beta e)^T
//           Dplr: p = S_{t-1}^T a, S_t = S' + b p^T + k v^T
//           Backwards, dS being the gradient of the state after a token: dS <- dS + scale q do^T, then
//           GatedDelta, Kda: u = dS^T k, dv = beta u, dbeta = u . e, dk = dS beta e - S' dv,
//           dS' = dS - k dv^T, dg = sums of dS' S' over columns, dS <- diag(exp g) dS'
//           Dplr: dp = dS^T b, dv = dS^T k, dk = dS v, db = dS p, da = S_{t-1} dp,
//           dg = sums of dS S' over columns, dS <- diag(exp g) dS + a dp^T
//           all: dq = scale S_t do. Of GatedDelta dg is summed over channels, too. e and p are called residuals
// shapes    q k a b [B, H, T, K], v [B, HV, T, V], g [B, HV, T] (GatedDelta) or [B, HV, T, K], beta [B, HV, T]; kept
//           [B, HV, chunks, V, K padded to a multiple of 4]: the states before every TOKENS-th token; do dv [B, HV, T,
//           V], dht dh0 [N, HV, K, V]; parts [kinds, tiles, B, HV, T, K], kinds q k, a b of Dplr, g of channels;
//           if q and k are normalized, their parts are the gradients of the normalized ones. token_parts [2, tiles, B,
//           HV, T]: [0] of beta, [1] of GatedDelta's g, else unused. starts [2, N, P, HV, K, V] of N sequences with P
//           segments each: [0] is the forward pass's; [1] has at segment p first G' of segment p + 1, which
//           join_segments.cu then replaces by dS after segment p
// grid      a block for every (segment, head of values, args.tiles times BV columns), segment slowest; a warp has
//           COLUMNS columns at a time and all channels, LANE_CHANNELS of them a lane
// smem      Shared: a chunk of tokens, the states before them, and the warps' parts of sums over columns
// barriers  one after every BV columns; one with segments, in is_whole: whether dS after the first segment is finite;
//           two for each state that is copied: it is in shared memory | it has been read, or, before dS is stored,
//           parts of sums have been; three a chunk: it has arrived, and the previous chunk's parts have been added up |
//           decays and the tokens' scalars are in shared memory | parts of sums over columns are, and the chunk has
//           been read
// numerics  float32, of float64 data float64. A chunk's states are computed again, forwards, from the state before it,
//           which the forward kernel has kept: the host gives both kernels the same TOKENS. If dS after a sequence's
//           first segment is not finite, since numbers grew when segments were joined, the block of the sequence's last
//           segment computes the whole sequence, and the blocks of its other segments compute nothing
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K <= BK; BK of 64, 128, 256; TOKENS of 1, 2, 4, 8 a chunk
// tests     test_delta_kernels
#include "delta/segments.cuh"
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   Rule::channel_gates: a gate for each channel; Rule::own_erasure: a and b of Dplr
//   BlockWork work: n, the segment's index (if P = 1 the sequence's), counted through all batch rows, P of each
//     sequence; b, the batch row; h, the head of values; span, the tokens; the columns of V from first_column on
//   Tokens::fetch starts copies; TokenGates: gates and betas on their way; store: writes them to TokenScalars
//   prepare_tokens: writes decays of channels, and the other members of TokenScalars: the inverse lengths of q and k, 1
//     if these are not normalized; q_dot_k and q_dot_b, products of the given q, k and b
//   DeltaArgs: inputs; initial states; P, segments of a sequence; group, value heads that share a head of keys; bytes,
//     16, 8, 4 or 2: every row starts on a multiple of it, and is a multiple long
//   segment_of: a Segment: its tokens and chunks; `from`, the gradient that it starts from, null for zeros: dht, or in
//     `starts`; `to`, where its last one goes, null for nowhere: dh0, or, without OUTPUTS, in `starts`. is_whole:
//     whether one block computes the whole sequence (`numerics`) in its columns, which do not depend on others
//   FloatOrDouble<T>: the type of sums; converted_once: a conversion that the compiler does not repeat; narrowed<T>: a
//     sum rounded to T; load_neighbours, store_neighbours: neighbouring numbers at once
//   THREADS = 128

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  StridedRows<const T> do_;
  StridedRows<T> dv;                        // this, kept, parts and token_parts: null without OUTPUTS
  StridedRows<const FloatOrDouble<T>> dht;  // null where it is 0
  StridedRows<FloatOrDouble<T>> dh0;        // or null
  const FloatOrDouble<T>* kept;  // if null though OUTPUTS, sequences of at most TOKENS tokens start from `initial`
  FloatOrDouble<T>*parts, *token_parts;
  i64 tiles;  // of BV columns that a block has, one after the other
};

enum Kind { DQ, DK, DA, DB };  // arrays of sums over columns, of `parts` and slots; DA and DB only of Dplr

template <class Rule, typename T, typename G, int BK, int TOKENS> struct Shared {
  using R = FloatOrDouble<T>;
  // COLUMNS, of a warp: so many that a lane has 64 bytes of S, and of dS. BV: of the block.
  static constexpr int CHANNELS = BK, LANE_CHANNELS = BK / 32, COLUMNS = 2048 / sizeof(R) / BK, BV = WARPS * COLUMNS;
  // The number of arrays of sums over columns (Kind); with gates of channels dg is the last one.
  static constexpr int KINDS = Rule::own_erasure ? 5 : Rule::channel_gates ? 3 : 2;
  static constexpr int SLOT_ROWS = COLUMNS > KINDS ? COLUMNS : KINDS;  // rows of a warp for a token
  Tokens<Rule, T, G, BK, BV, TOKENS> in;
  T do_[TOKENS * BV];
  R decays[Rule::channel_gates ? TOKENS * BK : 16 / sizeof(R)];  // without channels' gates 16 bytes, not used
  TokenScalars<R> scalars[TOKENS];
  R residual[TOKENS * BV];  // e, or of Dplr p
  // Warps' parts of dbeta and of GatedDelta's dg. A token's dg is stored while the token before it is computed: so the
  // row after the chunk's last token is stored, too, as 0, and is not read.
  R token_parts[TOKENS + 1][WARPS][2];
  // A token's rows, by warp. First, row c: column c of the warp in the state before the token. Then, when the warp has
  // read these, row `kind`: its part of a sum over columns, of each channel.
  R slots[TOKENS][SLOT_ROWS][WARPS][BK];
};

// Sums each of N numbers over all lanes (that is, over channels), and gives all sums to every lane in x; returns the
// sum with number lane / (32 / N). In each step two lanes add their numbers; if these are several, each lane keeps one
// half of the sums.
template <int N, typename R> __device__ __forceinline__ R sum_over_channels(R (&x)[N]) {
#pragma unroll
  for (int n = N / 2, distance = 16; distance; n /= 2, distance /= 2) {
    const bool upper = threadIdx.x & distance;
    if (n == 0) x[0] += __shfl_xor_sync(0xffffffffu, x[0], distance);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const R other = upper ? x[i] : x[n + i];
      x[i] = (upper ? x[n + i] : x[i]) + __shfl_xor_sync(0xffffffffu, other, distance);
    }
  }
  const R own = x[0];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __shfl_sync(0xffffffffu, own, i * (32 / N));
  return own;
}

// Adds up the four warps' parts of the sums of `rows` tokens, from token `first` of the batch row on, and stores them:
// thread x has channel x % BK, and more if BK > THREADS, of every AT_ONCE-th token.
template <class Storage, typename T, typename G>
__device__ __forceinline__ void store_sums(const Args<T, G>& args, const Storage& s, const BlockWork& work, i64 first,
                                           int rows, int K) {
  static_assert(WARPS == 4);
  using R = FloatOrDouble<T>;
  constexpr int BK = Storage::CHANNELS, BV = Storage::BV, KINDS = Storage::KINDS, SLOT_ROWS = Storage::SLOT_ROWS;
  const Shape& shape = args.shape;
  const i64 block_columns = args.tiles * BV, tiles = (shape.V + block_columns - 1) / block_columns;
  const i64 tile = work.first_column / block_columns, heads = shape.B * shape.H;
  const bool adds = work.first_column % block_columns;  // to the parts of the block's columns before these
  const i64 head = i64(work.b) * shape.H + work.h;
  constexpr int AT_ONCE = THREADS / BK ? THREADS / BK : 1;  // tokens
  for (int c = threadIdx.x % BK; c < K; c += THREADS) {
    const int r = BK < THREADS ? threadIdx.x / BK : 0;
    const R* part = &s.slots[r][0][0][c];
    R* to = args.parts + ((tile * heads + head) * shape.T + first + r) * K + c;
    const i64 next_kind = tiles * heads * shape.T * K;
#pragma unroll 1
    for (int n = r; n < rows; n += AT_ONCE, part += AT_ONCE * SLOT_ROWS * WARPS * BK, to += AT_ONCE * K) {
      R sums[KINDS];  // all are loaded before one is stored: each load after a store would wait for memory again
      R* at = to;
#pragma unroll
      for (int kind = 0; kind < KINDS; ++kind, at += next_kind) sums[kind] = adds ? *at : R(0);
      at = to;
#pragma unroll
      for (int kind = 0; kind < KINDS; ++kind, at += next_kind) {
        const R* of_warps = part + kind * WARPS * BK;
        *at = sums[kind] + ((of_warps[0] + of_warps[BK]) + (of_warps[2 * BK] + of_warps[3 * BK]));
      }
    }
  }
  if (int(threadIdx.x) < 2 * rows) {
    const int r = threadIdx.x / 2, which = threadIdx.x % 2;  // which: 0 of beta, 1 of GatedDelta's g
    const auto& of_warps = s.token_parts[r];
    R& to = args.token_parts[((which * tiles + tile) * heads + head) * shape.T + first + r];
    const R sum = (of_warps[0][which] + of_warps[1][which]) + (of_warps[2][which] + of_warps[3][which]);
    to = adds ? to + sum : sum;
  }
}

// The walk of BV columns, from work.first_column on.
template <class Rule, typename T, typename G, int BK, int TOKENS, bool OUTPUTS>
__device__ __forceinline__ void walk_columns(const Args<T, G>& args, BlockWork work) {
  using Storage = Shared<Rule, T, G, BK, TOKENS>;
  using R = FloatOrDouble<T>;
  constexpr int LANE_CHANNELS = Storage::LANE_CHANNELS, COLUMNS = Storage::COLUMNS, BV = Storage::BV,
                KINDS = Storage::KINDS;
  constexpr int NEIGHBOURS = LANE_CHANNELS < 4 ? LANE_CHANNELS : 4;  // neighbouring channels of a lane
  auto& s = *reinterpret_cast<Storage*>(dynamic_smem());
  const Shape& shape = args.shape;
  constexpr bool DOTS = false;  // prepare_tokens does not compute q . k and q . b
  const bool whole_sequence =
      OUTPUTS && is_whole<BACKWARDS>(shape, u32(args.P), work.n, work.h, args.starts, int(work.first_column), BV);
  // The segment in the order of this walk: segment.from is the gradient of the state after it (null: 0), segment.to the
  // place for that of the state before it; `last`: it has the sequence's first tokens, where this walk ends.
  const auto segment = segment_of<BACKWARDS>(OUTPUTS, shape, u32(args.P), work.n, work.h, args.dht, args.starts,
                                             args.dh0, whole_sequence);
  work.span = segment.tokens;
  if (!OUTPUTS && segment.last) return;  // the walk ends with the sequence's first tokens: no segment takes its G'
  const int K = int(shape.K), columns_left = int(shape.V) - work.first_column,
            tokens = int(work.span.stop - work.span.start);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = warp * COLUMNS;
  const int own_column = column + lane / (32 / COLUMNS);  // the one whose dv the lane stores
  // The i-th of this lane's channels.
  const auto channel = [&](int i) { return NEIGHBOURS * (lane + 32 * (i / NEIGHBOURS)) + i % NEIGHBOURS; };
  const int kept_channels = padded_to_4(K);
  const R scale = converted_once<R>(args.scale);

  // ---- states: loads and stores -------------------------------------------------------------------------------------
  R S[LANE_CHANNELS][COLUMNS] = {}, dS[LANE_CHANNELS][COLUMNS] = {};
  // States are copied by way of shared memory, since neighbouring threads then copy neighbouring columns. in_tile: a
  // number there, of the block's columns of a state, swizzled against bank conflicts.
  R* const tile = s.slots[0][0][0];
  const auto in_tile = [&](int state_row, int tile_column) -> R& {
    return tile[state_row * BV + (tile_column ^ state_row / NEIGHBOURS % BV)];
  };
  // Calls f(number in the tile, its index in a state [K, V], whether it exists there) for a thread's numbers.
  const auto each_of_tile = [&](auto f) {
#pragma unroll
    for (int first = 0; first < BK * BV; first += THREADS) {
      const int n = first + int(threadIdx.x), state_row = n / BV, tile_column = n % BV;
      f(in_tile(state_row, tile_column), state_row * shape.V + work.first_column + tile_column,
        state_row < K && tile_column < columns_left);
    }
  };
  // Calls f(number, the same in the tile) for this lane's numbers of S or dS.
  const auto each = [&](auto& state, auto f) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) f(state[i][c], in_tile(channel(i), column + c));
  };
  const auto load_state = [&](auto& state, const R* from) {
    if (!from) return;
    each_of_tile([&](R& x, i64 at, bool inside) { x = inside ? from[at] : R(0); });
    __syncthreads();  // the state is in shared memory
    each(state, [](R& x, R of_tile) { x = of_tile; });
    __syncthreads();  // the state has been read
  };
  load_state(dS, segment.from);
  if (OUTPUTS && !args.kept && args.initial.p) load_state(S, args.initial.row(work.n, work.h, 0));

  // ---- chunks, backwards in time ------------------------------------------------------------------------------------
  TokenGates<Rule, R> next_gates;
  const int chunks = (tokens + TOKENS - 1) / TOKENS;
  const i64 first_chunk = (i64(work.b) * shape.H + work.h) * shape.NC + segment.chunks.start;
  // Starts to copy a chunk's tokens, and loads their gates and betas to registers, and the state kept before the chunk
  // to S.
  const auto fetch = [&](int chunk) {
    const i64 first = work.span.start + chunk * TOKENS;
    const int rows = min(tokens - chunk * TOKENS, TOKENS);
    s.in.fetch(args, work, first, rows);
    copy_tile<TOKENS, BV>(s.do_, args.do_.row(work.b, work.h, first) + work.first_column, args.do_.token_stride, rows,
                          columns_left, args.bytes);
    next_gates.load(args, work, first, rows);
    cp_async_commit();
    if (!OUTPUTS || !args.kept) return;
    const R* from = args.kept + ((first_chunk + chunk) * shape.V + work.first_column + column) * kept_channels;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; i += NEIGHBOURS) {
        R x[NEIGHBOURS] = {};
        if (column + c < columns_left && channel(i) < K)
          load_neighbours<NEIGHBOURS>(x, from + c * kept_channels + channel(i));
#pragma unroll
        for (int j = 0; j < NEIGHBOURS; ++j) S[i + j][c] = x[j];
      }
  };
  if (chunks) fetch(chunks - 1);
#pragma unroll 1
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    const i64 first = work.span.start + chunk * TOKENS;
    const int rows = min(tokens - chunk * TOKENS, TOKENS);
    cp_async_wait<0>();
    next_gates.store(s.scalars, rows);
    __syncthreads();  // the chunk has arrived; the previous one's parts have been added up
    prepare_tokens<DOTS>(s.scalars, s.decays, s.in, rows, args.normalized);  // a warp has a token at a time
    __syncthreads();  // decays and scalars of its tokens are in shared memory

    // A token, in this lane's channels; q and k divided by their lengths if the call asks for that.
    R q[LANE_CHANNELS], k[LANE_CHANNELS], a[LANE_CHANNELS], b[LANE_CHANNELS], decay[LANE_CHANNELS];
    const auto load = [&](int r) {
      const TokenScalars<R>& token_scalars = s.scalars[r];
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; i += NEIGHBOURS) {
        const int place = r * BK + channel(i);
        load_neighbours<NEIGHBOURS>(q + i, s.in.q + place), load_neighbours<NEIGHBOURS>(k + i, s.in.k + place);
        if constexpr (Rule::own_erasure)
          load_neighbours<NEIGHBOURS>(a + i, s.in.a + place), load_neighbours<NEIGHBOURS>(b + i, s.in.b + place);
        if constexpr (Rule::channel_gates) load_neighbours<NEIGHBOURS>(decay + i, s.decays + place);
      }
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i) {
        q[i] *= token_scalars.inverse_q_length, k[i] *= token_scalars.inverse_k_length;
        if constexpr (!Rule::channel_gates) decay[i] = token_scalars.decay;
      }
    };
#pragma unroll 1
    for (int r = 0; OUTPUTS && r < rows; ++r) {    // forwards: the states before the chunk's tokens, and residuals
      R residual[COLUMNS] = {}, written[COLUMNS];  // written: v, of which other rules than Dplr then make beta e
      load(r);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i += NEIGHBOURS)
          store_neighbours<NEIGHBOURS>(&s.slots[r][c][warp][channel(i)], [&](int j) { return S[i + j][c]; });
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          R& x = S[i][c];
          if constexpr (Rule::own_erasure) residual[c] = fma(a[i], x, residual[c]);
          x *= decay[i];
          if constexpr (!Rule::own_erasure) residual[c] = fma(k[i], x, residual[c]);
        }
      load_neighbours<COLUMNS>(written, s.in.v + r * BV + column);
      sum_over_channels(residual);
      if constexpr (!Rule::own_erasure)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
          residual[c] = written[c] - residual[c], written[c] = s.scalars[r].beta * residual[c];
      if (lane == 0) store_neighbours<COLUMNS>(s.residual + r * BV + column, [&](int c) { return residual[c]; });
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          S[i][c] = fma(k[i], written[c], S[i][c]);
          if constexpr (Rule::own_erasure) S[i][c] = fma(b[i], residual[c], S[i][c]);
        }
    }
    __syncwarp();  // s.residual has those of all tokens
    // This lane's part of dg of the token that was computed last. The sum over lanes is made while the next token is
    // computed, so that the shuffles wait for nothing.
    R gate_part = 0;
    const auto store_dg = [&](int r) {
      if (!OUTPUTS || Rule::channel_gates) return;
      const R sum = sum_over_lanes<32>(gate_part);
      if (lane == 0) s.token_parts[r][warp][1] = sum;
    };
    // Backwards. With OUTPUTS S is the state after token r, until that before it is loaded; without, S is not used.
#pragma unroll 1
    for (int r = rows - 1; r >= 0; --r) {
      // parts: by Kind, then of dg with gates of channels, summed over the warp's columns. dv: u = dS^T k, then dv; v:
      // other rules than Dplr later make beta e of it. own_dv: dv in own_column.
      R parts[KINDS][LANE_CHANNELS] = {}, residual[COLUMNS] = {}, v[COLUMNS], do_[COLUMNS], dv[COLUMNS] = {},
        dp[COLUMNS] = {};
      load(r);
      if (OUTPUTS) load_neighbours<COLUMNS>(residual, s.residual + r * BV + column);
      load_neighbours<COLUMNS>(v, s.in.v + r * BV + column);
      load_neighbours<COLUMNS>(do_, s.do_ + r * BV + column);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) do_[c] *= scale;
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          parts[DQ][i] = fma(S[i][c], do_[c], parts[DQ][i]);
          dS[i][c] = fma(q[i], do_[c], dS[i][c]);
          dv[c] = fma(k[i], dS[i][c], dv[c]);
          if constexpr (Rule::own_erasure) dp[c] = fma(b[i], dS[i][c], dp[c]);
        }
      store_dg(r + 1);
      R own_dv = sum_over_channels(dv);
      if constexpr (Rule::own_erasure) sum_over_channels(dp);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)  // the state before the token
#pragma unroll
        for (int i = 0; OUTPUTS && i < LANE_CHANNELS; i += NEIGHBOURS) {
          R x[NEIGHBOURS];
          load_neighbours<NEIGHBOURS>(x, &s.slots[r][c][warp][channel(i)]);
#pragma unroll
          for (int j = 0; j < NEIGHBOURS; ++j) S[i + j][c] = x[j];
        }
      R dbeta = 0;
      gate_part = 0;
      if constexpr (!Rule::own_erasure) {
        const R beta = s.scalars[r].beta;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          dbeta = fma(dv[c], residual[c], dbeta);
          dv[c] *= beta, v[c] = beta * residual[c];
        }
        own_dv *= beta;
      }
      if (OUTPUTS && lane % (32 / COLUMNS) == 0 && own_column < columns_left)
        args.dv.row(work.b, work.h, first + r)[work.first_column + own_column] = narrowed<T>(own_dv);
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i) {
        R gate_term = 0;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          R& x = dS[i][c];
          const R decayed = decay[i] * S[i][c];
          parts[DK][i] = fma(x, v[c], parts[DK][i]);
          if constexpr (Rule::own_erasure) {
            parts[DA][i] = fma(S[i][c], dp[c], parts[DA][i]);
            parts[DB][i] = fma(x, residual[c], parts[DB][i]);
            gate_term = fma(x, decayed, gate_term);
            x = fma(decay[i], x, a[i] * dp[c]);
          } else {
            parts[DK][i] = fma(-decayed, dv[c], parts[DK][i]);
            x = fma(-k[i], dv[c], x);
            gate_term = fma(x, decayed, gate_term);
            x *= decay[i];
          }
        }
        if constexpr (Rule::channel_gates) parts[KINDS - 1][i] = gate_term;
        else gate_part += gate_term;
      }
      if (!OUTPUTS) continue;
#pragma unroll
      for (int kind = 0; kind < KINDS; ++kind)
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i += NEIGHBOURS)
          store_neighbours<NEIGHBOURS>(&s.slots[r][kind][warp][channel(i)], [&](int j) { return parts[kind][i + j]; });
      if (lane == 0) s.token_parts[r][warp][0] = dbeta;
    }
    store_dg(0);
    __syncthreads();  // the parts of sums over columns are in shared memory, and the chunk has been read
    if (chunk) fetch(chunk - 1);
    if (!OUTPUTS) continue;
    store_sums<Storage>(args, s, work, first, rows, K);
  }
  if (!segment.to) return;
  __syncthreads();  // parts of sums have been read
  each(dS, [](R x, R& of_tile) { of_tile = x; });
  __syncthreads();  // dS is in shared memory
  each_of_tile([&](R x, i64 at, bool inside) {
    if (inside) segment.to[at] = x;
  });
}

// By the launch bounds a multiprocessor has registers for three blocks, 168 a thread; with float64 for two, 255.
template <class Rule, typename T, typename G, int BK, int TOKENS, bool OUTPUTS>
__global__ void __launch_bounds__(THREADS, sizeof(FloatOrDouble<T>) == 4 ? 3 : 2)
    delta_recurrent_backward(const Args<T, G> args) {
  constexpr int BV = Shared<Rule, T, G, BK, TOKENS>::BV;
  BlockWork work(args.shape, int(args.tiles) * BV);
  const u32 stop = u32(min(work.first_column + args.tiles * BV, args.shape.V));
#pragma unroll 1
  for (; work.first_column < stop; work.first_column += BV) {
    walk_columns<Rule, T, G, BK, TOKENS, OUTPUTS>(args, work);
    __syncthreads();  // these columns' tokens, and parts of sums, have been read
  }
}

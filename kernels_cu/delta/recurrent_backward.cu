// what      The gradients of the delta rules token by token, from states that the forward kernel has kept. Without
//           OUTPUTS, what a segment of a sequence does to the gradient of a state, from C to F^T C + G: G alone.
// math      dS, the gradient of the state after a token: dS <- dS + scale q do^T, then with D = diag(exp g) S_{t-1}
//           GatedDelta, Kda: u = dS^T k, e = v - D^T k, dv = beta u, dbeta = u . e, dk = dS beta e - D dv,
//           dD = dS - k dv^T, dg = sums of dD D over columns, dS <- diag(exp g) dD
//           Dplr: p = S_{t-1}^T a, dp = dS^T b, dv = dS^T k, dk = dS v, db = dS p, da = S_{t-1} dp,
//           dg = sums of dS D over columns, dS <- diag(exp g) dS + a dp^T
//           both: dq = scale S_t do. Of GatedDelta dg is summed over channels, too
// shapes    as recurrent_forward.cu has them; do dv [B, HV, T, V], dht dh0 [N, HV, K, V];
//           parts [kinds, tiles, B, HV, T, K], kinds q k, a b of Dplr, g of channels; token_parts [2, tiles, B, HV, T]
//           of beta and of GatedDelta's g; starts: join_segments.cu
// grid      a block for every (segment, head of values, BV columns), segment slowest; a warp has COLUMNS columns and
//           all channels, EACH of them a lane
// smem      Shared: a chunk of tokens, the states before them, and the warps' parts of sums over columns
// barriers  one: whether states from which segments start are finite; three a chunk: it has arrived, and the previous
//           chunk's parts have been added up | decays and the tokens' scalars are in shared memory | parts of sums over
//           columns are, and the chunk has been read
// numerics  float32, of float64 data float64. A chunk's states are computed again, forwards, from the state before it,
//           which the forward kernel has kept
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K <= BK; BK of 64, 128, 256; TOKENS of 1, 2, 4, 8 a chunk
#include "delta/segments.cuh"
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  Rows<const T> do_;
  Rows<T> dv;               // this, kept, parts and token_parts: null without OUTPUTS
  Rows<const Real<T>> dht;  // null where it is 0
  Rows<Real<T>> dh0;        // or null
  const Real<T>* kept;
  Real<T>*parts, *token_parts;
};

template <class Rule, typename T, typename G, int BK, int TOKENS> struct Shared {
  using R = Real<T>;
  static constexpr int EACH = BK / 32, COLUMNS = 2048 / sizeof(R) / BK, BV = WARPS * COLUMNS;
  static constexpr int KINDS = Rule::own_erasure ? 5 : Rule::channel_gates ? 3 : 2;  // of sums over columns
  static constexpr int SLOT = COLUMNS > KINDS ? COLUMNS : KINDS;                     // rows of a warp for a token
  Tokens<Rule, T, G, BK, BV, TOKENS> in;
  T do_[TOKENS * BV];
  R decays[Rule::channel_gates ? TOKENS * BK : 16 / sizeof(R)];
  TokenScalars<R> scalars[TOKENS];
  R found[TOKENS * BV];                 // e, or of Dplr p
  R token_parts[TOKENS + 1][WARPS][2];  // warps' parts of dbeta and of a token's dg; the last row is not read
  R slots[TOKENS][SLOT][WARPS][BK];     // the state before a token by columns, then its parts of sums over columns
};

// Sums over all lanes of N numbers, each of them to every lane; returns the sum number lane / (32 / N).
template <int N, typename R> __device__ __forceinline__ R sum_columns(R (&x)[N]) {
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

template <class Rule, typename T, typename G, int BK, int TOKENS, bool OUTPUTS>
__global__ void __launch_bounds__(THREADS, sizeof(Real<T>) == 4 ? 3 : 2)
    delta_recurrent_backward(const Args<T, G> args) {
  using Storage = Shared<Rule, T, G, BK, TOKENS>;
  using R = Real<T>;
  constexpr int EACH = Storage::EACH, COLUMNS = Storage::COLUMNS, BV = Storage::BV, KINDS = Storage::KINDS;
  constexpr int SLOT = Storage::SLOT, NEAR = EACH < 4 ? EACH : 4;  // neighbouring channels of a lane
  auto& s = *reinterpret_cast<Storage*>(dynamic_smem());
  const Shape& shape = args.shape;
  BlockWork work(shape, BV);
  const bool whole = OUTPUTS && is_whole<true>(shape, u32(args.P), work.n, work.h, args.starts, int(work.tile), BV);
  const auto segment =
      segment_of<true>(OUTPUTS, shape, u32(args.P), work.n, work.h, args.dht, args.starts, args.dh0, whole);
  work.span = segment.tokens;
  if (!OUTPUTS && segment.last) return;
  const int K = int(shape.K), columns_left = int(shape.V) - work.tile, tokens = int(work.span.stop - work.span.start);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = warp * COLUMNS;
  const int own_column = column + lane / (32 / COLUMNS);  // the one whose dv the lane stores
  const auto channel = [&](int i) { return NEAR * (lane + 32 * (i / NEAR)) + i % NEAR; };
  const int kept_channels = (K + 3) / 4 * 4;
  const R scale = converted_once<R>(args.scale);

  R S[EACH][COLUMNS] = {}, dS[EACH][COLUMNS];
  const auto each = [&](auto& state, auto f) {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        f(state[i][c], channel(i), column + c, channel(i) < K && column + c < columns_left);
  };
  each(dS, [&](R& x, int state_row, int tile_column, bool inside) {
    x = segment.from && inside ? segment.from[state_row * shape.V + work.tile + tile_column] : R(0);
  });

  TokenGates<Rule, R> next;
  const int chunks = (tokens + TOKENS - 1) / TOKENS;
  const i64 first_chunk = (i64(work.b) * shape.H + work.h) * shape.NC + segment.chunks.start;
  const auto fetch = [&](int chunk) {
    const i64 first = work.span.start + chunk * TOKENS;
    const int rows = min(tokens - chunk * TOKENS, TOKENS);
    s.in.fetch(args, work, first, rows);
    copy_tile<TOKENS, BV>(s.do_, args.do_.row(work.b, work.h, first) + work.tile, args.do_.t, rows, columns_left,
                          args.bytes);
    next.load(args, work, first, rows);
    cp_async_commit();
    if (!OUTPUTS) return;
    const R* from = args.kept + ((first_chunk + chunk) * shape.V + work.tile + column) * kept_channels;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int i = 0; i < EACH; i += NEAR) {
        R x[NEAR] = {};
        if (column + c < columns_left && channel(i) < K)
          load_neighbours<NEAR>(x, from + c * kept_channels + channel(i));
#pragma unroll
        for (int j = 0; j < NEAR; ++j) S[i + j][c] = x[j];
      }
  };
  if (chunks) fetch(chunks - 1);
#pragma unroll 1
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    const i64 first = work.span.start + chunk * TOKENS;
    const int rows = min(tokens - chunk * TOKENS, TOKENS);
    cp_async_wait<0>();
    next.store(s.scalars, rows);
    __syncthreads();  // the chunk has arrived; the previous one's parts have been added up
    prepare_tokens<false>(s.scalars, s.decays, s.in, rows, args.normalized);
    __syncthreads();  // decays and scalars of its tokens are in shared memory

    R q[EACH], k[EACH], a[EACH], b[EACH], decay[EACH];
    const auto load = [&](int r) {
      const TokenScalars<R>& token_scalars = s.scalars[r];
#pragma unroll
      for (int i = 0; i < EACH; i += NEAR) {
        const int place = r * BK + channel(i);
        load_neighbours<NEAR>(q + i, s.in.q + place), load_neighbours<NEAR>(k + i, s.in.k + place);
        if constexpr (Rule::own_erasure)
          load_neighbours<NEAR>(a + i, s.in.a + place), load_neighbours<NEAR>(b + i, s.in.b + place);
        if constexpr (Rule::channel_gates) load_neighbours<NEAR>(decay + i, s.decays + place);
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        q[i] *= token_scalars.inverse_q_length, k[i] *= token_scalars.inverse_k_length;
        if constexpr (!Rule::channel_gates) decay[i] = token_scalars.decay;
      }
    };
#pragma unroll 1
    for (int r = 0; OUTPUTS && r < rows; ++r) {  // the states of the chunk, and e, or p
      R found[COLUMNS] = {}, written[COLUMNS];
      load(r);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int i = 0; i < EACH; i += NEAR)
          store_neighbours<NEAR>(&s.slots[r][c][warp][channel(i)], [&](int j) { return S[i + j][c]; });
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          R& x = S[i][c];
          if constexpr (Rule::own_erasure) found[c] = fma(a[i], x, found[c]);
          x *= decay[i];
          if constexpr (!Rule::own_erasure) found[c] = fma(k[i], x, found[c]);
        }
      load_neighbours<COLUMNS>(written, s.in.v + r * BV + column);
      sum_columns(found);
      if constexpr (!Rule::own_erasure)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) found[c] = written[c] - found[c], written[c] = s.scalars[r].beta * found[c];
      if (lane == 0) store_neighbours<COLUMNS>(s.found + r * BV + column, [&](int c) { return found[c]; });
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          S[i][c] = fma(k[i], written[c], S[i][c]);
          if constexpr (Rule::own_erasure) S[i][c] = fma(b[i], found[c], S[i][c]);
        }
    }
    __syncwarp();  // s.found has e, or p, of all tokens
    // This lane's part of dg of the token that was computed last; the sum over lanes is made with the next token.
    R gate_part = 0;
    const auto store_dg = [&](int r) {
      if (!OUTPUTS || Rule::channel_gates) return;
      const R sum = sum_over_lanes<32>(gate_part);
      if (lane == 0) s.token_parts[r][warp][1] = sum;
    };
#pragma unroll 1
    for (int r = rows - 1; r >= 0; --r) {
      R parts[KINDS][EACH] = {}, found[COLUMNS] = {}, v[COLUMNS], do_[COLUMNS], dv[COLUMNS] = {}, dp[COLUMNS] = {};
      load(r);
      if (OUTPUTS) load_neighbours<COLUMNS>(found, s.found + r * BV + column);
      load_neighbours<COLUMNS>(v, s.in.v + r * BV + column);
      load_neighbours<COLUMNS>(do_, s.do_ + r * BV + column);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) do_[c] *= scale;
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          parts[0][i] = fma(S[i][c], do_[c], parts[0][i]);
          dS[i][c] = fma(q[i], do_[c], dS[i][c]);
          dv[c] = fma(k[i], dS[i][c], dv[c]);
          if constexpr (Rule::own_erasure) dp[c] = fma(b[i], dS[i][c], dp[c]);
        }
      store_dg(r + 1);
      R own_dv = sum_columns(dv);
      if constexpr (Rule::own_erasure) sum_columns(dp);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)  // the state before the token
#pragma unroll
        for (int i = 0; OUTPUTS && i < EACH; i += NEAR) {
          R x[NEAR];
          load_neighbours<NEAR>(x, &s.slots[r][c][warp][channel(i)]);
#pragma unroll
          for (int j = 0; j < NEAR; ++j) S[i + j][c] = x[j];
        }
      R dbeta = 0;
      gate_part = 0;
      if constexpr (!Rule::own_erasure) {
        const R beta = s.scalars[r].beta;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          dbeta = fma(dv[c], found[c], dbeta);
          dv[c] *= beta, v[c] = beta * found[c];
        }
        own_dv *= beta;
      }
      if (OUTPUTS && lane % (32 / COLUMNS) == 0 && own_column < columns_left)
        args.dv.row(work.b, work.h, first + r)[work.tile + own_column] = from_real<T>(own_dv);
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        R gate_term = 0;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          R& x = dS[i][c];
          const R decayed = decay[i] * S[i][c];
          parts[1][i] = fma(x, v[c], parts[1][i]);
          if constexpr (Rule::own_erasure) {
            parts[2][i] = fma(S[i][c], dp[c], parts[2][i]);
            parts[3][i] = fma(x, found[c], parts[3][i]);
            gate_term = fma(x, decayed, gate_term);
            x = fma(decay[i], x, a[i] * dp[c]);
          } else {
            parts[1][i] = fma(-decayed, dv[c], parts[1][i]);
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
        for (int i = 0; i < EACH; i += NEAR)
          store_neighbours<NEAR>(&s.slots[r][kind][warp][channel(i)], [&](int j) { return parts[kind][i + j]; });
      if (lane == 0) s.token_parts[r][warp][0] = dbeta;
    }
    store_dg(0);
    __syncthreads();  // the parts of sums over columns are in shared memory, and the chunk has been read
    if (chunk) fetch(chunk - 1);
    if (!OUTPUTS) continue;
    const i64 tiles = (shape.V + BV - 1) / BV, tile = work.tile / BV, heads = shape.B * shape.H;
    const i64 head = i64(work.b) * shape.H + work.h;
    constexpr int AT_ONCE = THREADS / BK ? THREADS / BK : 1;  // tokens
    for (int c = threadIdx.x % BK; c < K; c += THREADS) {
      const int r = BK < THREADS ? threadIdx.x / BK : 0;
      const R* part = &s.slots[r][0][0][c];
      R* to = args.parts + ((tile * heads + head) * shape.T + first + r) * K + c;
#pragma unroll
      for (int kind = 0; kind < KINDS; ++kind, part += WARPS * BK, to += tiles * heads * shape.T * K)
#pragma unroll 4
        for (int n = 0; r + n < rows; n += AT_ONCE) {
          const R* of_warps = part + n * SLOT * WARPS * BK;
          to[n * K] = (of_warps[0] + of_warps[BK]) + (of_warps[2 * BK] + of_warps[3 * BK]);
        }
    }
    if (int(threadIdx.x) < 2 * rows) {
      const int r = threadIdx.x / 2, which = threadIdx.x % 2;
      const auto& of_warps = s.token_parts[r];
      args.token_parts[((which * tiles + tile) * heads + head) * shape.T + first + r] =
          (of_warps[0][which] + of_warps[1][which]) + (of_warps[2][which] + of_warps[3][which]);
    }
  }
  if (segment.to)
    each(dS, [&](R& x, int state_row, int tile_column, bool inside) {
      if (inside) segment.to[state_row * shape.V + work.tile + tile_column] = x;
    });
}

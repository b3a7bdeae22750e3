// what      The delta rules token by token, as the equations stand: outputs, and states on the way.
// math      GatedDelta, Kda: S' = D S, e = beta (v - S'^T k), S = S' + k e^T, o = scale (S'^T q + (q . k) e)
//           Dplr: p = S^T a, S = D S + b p^T + k v^T, o = scale ((D S)^T q + (q . b) p + (q . k) v)
// shapes    q k a b [B, H, T, K], v o [B, HV, T, V], g [B, HV, T] or [B, HV, T, K], beta [B, HV, T], initial and final
//           state [N, HV, K, V], kept [B, HV, chunks, K, V]
// grid      a block for every (sequence, head of values, BV columns), sequence slowest; BK / 16 neighbouring lanes have
//           COLUMNS columns, 16 channels each
// smem      Shared: two stages of tokens, decays and what else is to know of one
// barriers  two a stage of tokens: they have arrived, and nobody reads the last ones | decays and sums over channels
//           stand
// numerics  float32, of float64 data float64. What a column's key and query find in the state is summed over lanes at
//           once: one wait a token
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K <= BK; BK of 64, 128, 256; COLUMNS of 1, 4
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

constexpr int CHANNELS = 16;                                                            // of a lane
template <typename T, int BK> constexpr int TOKENS = (BK > 128 ? 16 : 32) / sizeof(T);  // of a stage

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  Rows<T> o;            // null where no output is wanted
  Rows<Real<T>> final;  // or null
  Real<T>* kept;        // the states before every `every` tokens, or null
  i64 every;
};

template <class Rule, typename T, typename G, int BK, int COLUMNS> struct Shared {
  static constexpr int LANES = BK / CHANNELS, BV = THREADS / LANES * COLUMNS;
  Tokens<Rule, T, G, BK, BV, TOKENS<T, BK>> stages[2];
  Real<T> decays[Rule::channel_gates ? TOKENS<T, BK> * BK : 16 / sizeof(Real<T>)];
  Said<Real<T>> said[TOKENS<T, BK>];
};

template <class Rule, typename T, typename G, int BK, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) delta_recurrent_forward(const Args<T, G> args) {
  using R = Real<T>;
  using Storage = Shared<Rule, T, G, BK, COLUMNS>;
  constexpr int LANES = Storage::LANES, BV = Storage::BV, SLAB = TOKENS<T, BK>;
  auto& s = *reinterpret_cast<Storage*>(dynamic_smem());
  const Shape& shape = args.shape;
  const Place at(shape, BV);
  const int K = int(shape.K), left = int(shape.V) - at.tile, tokens = int(at.span.stop - at.span.start);
  const int lane = threadIdx.x % LANES, column = threadIdx.x / LANES * COLUMNS;
  const auto channel = [&](int i) { return 4 * (lane + LANES * (i / 4)) + i % 4; };

  R S[CHANNELS][COLUMNS];
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) f(S[i][c], channel(i), column + c, channel(i) < K && column + c < left);
  };
  each([&](R& x, int of, int at_column, bool inside) {
    x = args.initial.p && inside ? args.initial.row(at.n, at.h, of)[at.tile + at_column] : R(0);
  });

  TokenNumbers<Rule, R> next;
  const auto fetch = [&](int token, int stage) {
    const int rows = min(tokens - token, SLAB);
    s.stages[stage].fetch(args, at, at.span.start + token, rows);
    next.ask(args, at, at.span.start + token, rows);
    cp_async_commit();
  };
  if (tokens) fetch(0, 0);
  const i64 chunk = ((i64(at.b) * shape.H + at.h) * shape.NC + chunks_of(shape, at.n % u32(shape.count)).start);
#pragma unroll 1
  for (int token = 0, stage = 0; token < tokens; token += SLAB, stage ^= 1) {
    const auto& in = s.stages[stage];
    const int rows = min(tokens - token, SLAB);
    cp_async_wait<0>();
    __syncthreads();  // the tokens have arrived; nobody reads the last ones, nor what was said of them
    next.put(s.said, rows);
    if (token + SLAB < tokens) fetch(token + SLAB, stage ^ 1);
    look_at(s.said, s.decays, in, rows, args.normalized);
    __syncthreads();  // all that is to know of them stands
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      if (args.kept && (token + r) % int(args.every) == 0) {
        R* to = args.kept + (chunk + (token + r) / int(args.every)) * shape.K * shape.V + at.tile;
        each([&](R& x, int of, int at_column, bool inside) {
          if (inside) to[of * shape.V + at_column] = x;
        });
      }
      const Said<R> of = s.said[r];
      R k[CHANNELS], b[Rule::own_erasure ? CHANNELS : 1], erased[COLUMNS] = {}, read[COLUMNS] = {}, v[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) v[c] = to_real(in.v[r * BV + column + c]);
#pragma unroll
      for (int i = 0; i < CHANNELS; i += 4) {
        const int place = r * BK + channel(i);
        R q[4], a[4], decay[4];
        load_near<4>(q, in.q + place), load_near<4>(k + i, in.k + place);
        if constexpr (Rule::own_erasure) load_near<4>(a, in.a + place), load_near<4>(b + i, in.b + place);
        if constexpr (Rule::channel_gates) load_near<4>(decay, s.decays + place);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            R& x = S[i + j][c];
            if constexpr (Rule::own_erasure) erased[c] = fma(a[j], x, erased[c]);
            x *= Rule::channel_gates ? decay[j] : of.decay;
            if constexpr (!Rule::own_erasure) erased[c] = fma(k[i + j], x, erased[c]);
            read[c] = fma(q[j], x, read[c]);
          }
      }
#pragma unroll
      for (int distance = 1; distance < LANES; distance *= 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          erased[c] += __shfl_xor_sync(0xffffffffu, erased[c], distance);
          read[c] += __shfl_xor_sync(0xffffffffu, read[c], distance);
        }
      R written[COLUMNS], o = 0;  // what k is multiplied by; of one column, the lane's own to store
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        written[c] = Rule::own_erasure ? v[c] : of.k * of.beta * (v[c] - of.k * erased[c]);
        R sum = fma(of.qk, written[c], read[c]);
        if constexpr (Rule::own_erasure) sum = fma(of.qb, erased[c], sum);
        o = lane == c ? sum : o;
      }
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          S[i][c] = fma(k[i], written[c], S[i][c]);
          if constexpr (Rule::own_erasure) S[i][c] = fma(b[i], erased[c], S[i][c]);
        }
      if (args.o.p && lane < COLUMNS && column + lane < left)
        args.o.row(at.b, at.h, at.span.start + token + r)[at.tile + column + lane] =
            from_real<T>(R(args.scale) * of.q * o);
    }
  }
  if (args.final.p)
    each([&](R& x, int of, int at_column, bool inside) {
      if (inside) args.final.row(at.n, at.h, of)[at.tile + at_column] = x;
    });
}

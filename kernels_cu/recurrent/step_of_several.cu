// what      A few tokens for B sequences. Each state takes the accepted tokens of the call before, which are pending,
//           and is stored; it meets the tokens of this call in registers alone, and they are pending behind it.
// math      A pending token: S = diag(decay) S + k u^T (+ b p^T). A token of this call:
//           Gla: u = v, o = scale q^T S;   BeforeWrite: o = scale q^T (S before it + diag(bonus) k v^T)
//           GatedDelta, Kda: u = beta (v - (decay S)^T k), o = scale q^T S
//           Dplr: u = v, p = (S before it)^T a, o = scale q^T S
// shapes    q k a b [B, H, T, K], v o [B, HV, T, V], g [B, HV, T] or [B, HV, T, K], beta [B, HV, T], bonus [HV, K],
//           state [P, HV, K, V], pending [P, HV, M, W] with rows decay | k | b | u | p, slots accepted [B] or null
// grid      a block for every (sequence, head of values), sequence slowest; BV columns at a time, of which a lane has
//           16 bytes of EACH channels
// smem      Shared: the pending tokens, those of this call, what they find in the warps' channels
// barriers  three every BV columns: all tokens stand | so do the products of their rows | the last token is read; two a
//           token: its parts stand | so do their sums
// numerics  float32, whatever the state is stored in; float64 where that or data are float64
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19; 2025, eq. 17; as delta/tokens.cuh
// limits    K <= BK; T <= TOKENS; the last axis of the state is contiguous
//
// The block that has all columns of a head is the only one that reads its pending keys: so it may store the next ones.
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

constexpr int TOKENS = 8;
template <typename T, typename S> using Widest = decltype(Real<T>() + Real<S>());

// The gated recurrences, beside those of delta/tokens.cuh.
struct Gla {
  static constexpr bool channel_gates = true, own_erasure = false;
};
struct BeforeWrite {
  static constexpr bool channel_gates = true, own_erasure = false;
};
template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;
template <class Rule> constexpr bool HAS_BONUS = SAME<Rule, BeforeWrite>;
template <class Rule> constexpr bool GATED = HAS_BONUS<Rule> || SAME<Rule, Gla>;  // a token writes what came
template <class Rule> constexpr int KEYS = Rule::own_erasure ? 2 : 1;             // that a token writes

template <typename T, typename G, typename S> struct Args {
  Rows<const T> q, k, v, a, b;  // a and b of Dplr alone
  Rows<const G> g, beta;        // beta of GatedDelta and Kda alone
  Rows<T> o;
  const Widest<T, S>* bonus;  // of BeforeWrite alone
  Rows<S> state;              // rows are channels
  Rows<Widest<T, S>> pending;
  const i64* slots;     // or null: sequence b has state b
  const i64* accepted;  // or null: none is
  i64 H, T_, K, V;      // H heads of values
  i64 M;                // pending tokens that there is room for
  i64 group;            // so many heads of values share one of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 pieces;      // whether every row of the state is whole pieces of 16 bytes
};

// Columns at a time, and threads: so that a lane's numbers of the state leave it registers.
template <typename R, int BK> constexpr int THREADS_OF = BK == 128 && sizeof(R) == 4 ? 512 : 256;
template <typename R, int BK> constexpr int COLUMNS = THREADS_OF<R, BK> / (BK == 256 && sizeof(R) == 8 ? 8 : 4);

template <class Rule, typename R, int BK, int BV> struct Shared {
  static constexpr int GATES = Rule::channel_gates ? BK : 16 / sizeof(R), WARPS = THREADS_OF<R, BK> / 32;
  R kept_decays[TOKENS][GATES], kept_keys[KEYS<Rule>][TOKENS][BK], kept_columns[KEYS<Rule>][TOKENS][BV];
  R decays[TOKENS][GATES], keys[KEYS<Rule>][TOKENS][BK], q[TOKENS][BK];
  R a[Rule::own_erasure ? TOKENS : 1][Rule::own_erasure ? BK : 16 / sizeof(R)], v[TOKENS][BV];
  R parts[WARPS][2][BV], sums[2][BV];           // of what a token's key finds, and its query
  R beta[TOKENS], weights[KEYS<Rule>][TOKENS];  // q . k and q . b
};

template <class Rule, typename T, typename G, typename S, int BK>
__global__ void __launch_bounds__(THREADS_OF<Widest<T, S>, BK>, 1) recurrent_step_of_several(const Args<T, G, S> args) {
  using R = Widest<T, S>;
  constexpr int BV = COLUMNS<R, BK>, BLOCK = THREADS_OF<R, BK>, STEP_WARPS = BLOCK / 32, N = 16 / sizeof(S),
                LANES = BV / N, DOWN = BLOCK / LANES, EACH = BK / DOWN, ROWS = LANES < 32 ? LANES : 32;
  struct alignas(16) Piece {
    S x[N];
  };
  auto& s = *reinterpret_cast<Shared<Rule, R, BK, BV>*>(dynamic_smem());
  const u32 H = u32(args.H), h = blockIdx.x % H, b = blockIdx.x / H, head = h / u32(args.group);
  const int K = int(args.K), V = int(args.V), tokens = int(args.T_), gates = Rule::channel_gates ? K : 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = threadIdx.x / LANES, column = threadIdx.x % LANES * N;
  const i64 slot = args.slots ? args.slots[b] : b;
  const i64 asked = args.accepted ? args.accepted[b] : 0;
  const int taken = asked < 0 ? 0 : asked > args.M ? int(args.M) : int(asked);
  // A pending token's numbers: decays, then its keys, then the columns behind each.
  const auto pending = [&](int token) { return args.pending.row(slot, h, token); };
  const int columns_at = gates + KEYS<Rule> * K;

  for (int start = 0; start < V; start += BV) {
    const int left = V - start;
    S* const first = args.state.row(slot, h, row) + start + column;
    R state[EACH][N];
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const S* from = first + n * DOWN * args.state.t;
      const bool exists = row + n * DOWN < K;
      Piece piece{};
      if (args.pieces) {
        if (exists && column < left) piece = *reinterpret_cast<const Piece*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (exists && column + i < left) piece.x[i] = from[i];
      }
#pragma unroll
      for (int i = 0; i < N; ++i) state[n][i] = to_real(piece.x[i]);
    }
#pragma unroll 1  // else addresses of several passes stand beside the state, which fills the registers
    for (int at = threadIdx.x; at < TOKENS * BK; at += BLOCK) {
      const int t = at / BK, c = at % BK;
      const bool kept = t < taken && c < K, mine = t < tokens && c < K;
      const auto of = [&](const Rows<const T>& x) { return mine ? R(to_real(x.row(b, head, t)[c])) : R(0); };
      s.q[t][c] = of(args.q), s.keys[0][t][c] = of(args.k);
      if constexpr (Rule::own_erasure) s.a[t][c] = of(args.a), s.keys[1][t][c] = of(args.b);
      if constexpr (Rule::channel_gates) {
        s.decays[t][c] = decay_of(mine ? R(to_real(args.g.row(b, h, t)[c])) : R(0));
        s.kept_decays[t][c] = kept ? pending(t)[c] : R(1);
      }
#pragma unroll
      for (int n = 0; n < KEYS<Rule>; ++n) s.kept_keys[n][t][c] = kept ? pending(t)[gates + n * K + c] : R(0);
    }
    for (int at = threadIdx.x; at < TOKENS * BV; at += BLOCK) {
      const int t = at / BV, c = at % BV;
      s.v[t][c] = t < tokens && c < left ? R(to_real(args.v.row(b, h, t)[start + c])) : R(0);
#pragma unroll
      for (int n = 0; n < KEYS<Rule>; ++n)
        s.kept_columns[n][t][c] = t < taken && c < left ? pending(t)[columns_at + n * V + start + c] : R(0);
    }
    if (const int t = threadIdx.x; t < TOKENS) {
      if constexpr (!Rule::channel_gates) {
        s.decays[t][0] = decay_of(t < tokens ? R(to_real(*args.g.row(b, h, t))) : R(0));
        s.kept_decays[t][0] = t < taken ? *pending(t) : R(1);
      }
      if constexpr (!GATED<Rule> && !Rule::own_erasure)
        s.beta[t] = t < tokens ? R(to_real(*args.beta.row(b, h, t))) : R(0);
    }
    __syncthreads();  // all tokens stand

    // A warp has a token: its rows are divided by their lengths, and multiplied with each other.
    for (int t = warp; t < tokens; t += STEP_WARPS) {
      if (args.normalized) {
        R qq = 0, kk = 0;
        for (int c = lane; c < BK; c += 32)
          qq = fma(s.q[t][c], s.q[t][c], qq), kk = fma(s.keys[0][t][c], s.keys[0][t][c], kk);
        qq = inverse_root(sum_over_lanes<32>(qq) + R(LEAST_SQUARE));
        kk = inverse_root(sum_over_lanes<32>(kk) + R(LEAST_SQUARE));
        for (int c = lane; c < BK; c += 32) s.q[t][c] *= qq, s.keys[0][t][c] *= kk;
      }
#pragma unroll
      for (int n = 0; n < KEYS<Rule>; ++n) {
        R weight = 0;
        for (int c = lane; c < K; c += 32) {
          R key = s.keys[n][t][c];
          if constexpr (HAS_BONUS<Rule>) key *= args.bonus[h * args.K + c];
          weight = fma(s.q[t][c], key, weight);
        }
        weight = sum_over_lanes<32>(weight);
        if (lane == 0) s.weights[n][t] = weight;
      }
    }
    for (int t = 0; t < taken; ++t) {
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        const int c = row + n * DOWN;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          R x = s.kept_decays[t][Rule::channel_gates ? c : 0] * state[n][i];
#pragma unroll
          for (int m = 0; m < KEYS<Rule>; ++m) x = fma(s.kept_keys[m][t][c], s.kept_columns[m][t][column + i], x);
          state[n][i] = x;
        }
      }
    }
    if (taken) {
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        S* to = first + n * DOWN * args.state.t;
        const bool exists = row + n * DOWN < K;
        Piece piece;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          piece.x[i] = from_real<S>(Real<S>(state[n][i]));
          state[n][i] = to_real(piece.x[i]);  // what a later call will read
          if (!args.pieces && exists && column + i < left) to[i] = piece.x[i];
        }
        if (args.pieces && exists && column < left) *reinterpret_cast<Piece*>(to) = piece;
      }
    }
    __syncthreads();  // the products of the tokens' rows stand

    for (int t = 0; t < tokens; ++t) {
      R erased[N] = {}, read[N] = {};
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        const int c = row + n * DOWN;
        const R decay = s.decays[t][Rule::channel_gates ? c : 0], q = s.q[t][c];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const R before = state[n][i], after = decay * before;
          if constexpr (Rule::own_erasure) erased[i] = fma(s.a[t][c], before, erased[i]);
          else if constexpr (!GATED<Rule>) erased[i] = fma(s.keys[0][t][c], after, erased[i]);
          read[i] = fma(q, HAS_BONUS<Rule> ? before : after, read[i]);
          state[n][i] = after;
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        for (int distance = LANES; distance < 32; distance *= 2) {
          if constexpr (!GATED<Rule>) erased[i] += __shfl_xor_sync(0xffffffffu, erased[i], distance);
          read[i] += __shfl_xor_sync(0xffffffffu, read[i], distance);
        }
        if (lane < ROWS) s.parts[warp][0][column + i] = erased[i], s.parts[warp][1][column + i] = read[i];
      }
      __syncthreads();  // the parts stand
      if (const int which = threadIdx.x / BV, c = threadIdx.x % BV; which < 2) {
        R sum = 0;
#pragma unroll
        for (int n = 0; n < STEP_WARPS; ++n) sum += s.parts[n][which][c];
        s.sums[which][c] = sum;
      }
      __syncthreads();  // the sums stand
      // What the token adds to column c behind its key n.
      const auto added = [&](int n, int c) {
        if constexpr (GATED<Rule>) return s.v[t][c];
        else if constexpr (Rule::own_erasure) return n ? s.sums[0][c] : s.v[t][c];
        else return s.beta[t] * (s.v[t][c] - s.sums[0][c]);
      };
#pragma unroll
      for (int m = 0; m < KEYS<Rule>; ++m) {
        R columns[N];
#pragma unroll
        for (int i = 0; i < N; ++i) columns[i] = added(m, column + i);
#pragma unroll
        for (int n = 0; n < EACH; ++n)
#pragma unroll
          for (int i = 0; i < N; ++i) state[n][i] = fma(s.keys[m][t][row + n * DOWN], columns[i], state[n][i]);
      }
      if (const int c = threadIdx.x; c < BV && c < left) {
        R o = s.sums[1][c];
#pragma unroll
        for (int n = 0; n < KEYS<Rule>; ++n) {
          o = fma(s.weights[n][t], added(n, c), o);
          pending(t)[columns_at + n * V + start + c] = added(n, c);
        }
        args.o.row(b, h, t)[start + c] = from_real<T>(Real<T>(R(args.scale) * o));
      }
    }
    __syncthreads();  // the last token is read
  }
  for (int at = threadIdx.x; at < tokens * BK; at += BLOCK) {
    const int t = at / BK, c = at % BK;
    if (c < gates) pending(t)[c] = s.decays[t][c];
#pragma unroll
    for (int n = 0; n < KEYS<Rule>; ++n)
      if (c < K) pending(t)[gates + n * K + c] = s.keys[n][t][c];
  }
}

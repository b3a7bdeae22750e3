// what      Decodes a few tokens for each of B sequences, of which the caller may later reject some (speculative
//           decoding). The first `accepted` tokens of those pending, which the previous call stored, are applied to the
//           state, and the state is stored. This call's tokens then change it in registers only, and are stored as
//           pending.
// math      S_t [K, V] is the state after token t, pending or of this call, decay = e^g. With S' = diag(decay) S_(t-1):
//             S_t = S' + k u^T (Dplr: + b p^T)
//           Gla: u = v, o = scale q^T S_t;   BeforeWrite: u = v, o = scale q^T (S_(t-1) + diag(bonus) k v^T)
//           GatedDelta, Kda: u = beta (v - S'^T k), o = scale q^T S_t
//           Dplr: u = v, p = S_(t-1)^T a, o = scale q^T S_t
//           o is computed without S_t, from one reading of S': o = scale (S'^T q + (q . k) u + (q . b) p), p of Dplr
//           only (BeforeWrite: scale (S_(t-1)^T q + (q . diag(bonus) k) u)); the dot products are `weights`
// shapes    q k a b [B, H, T, K], v o [B, HV, T, V], g [B, HV, T] or [B, HV, T, K], beta [B, HV, T], bonus [HV, K];
//           in the code H is HV, h a head of values, and `head` the head of q, k, a and b that it shares. A `b` in an
//           index is the sequence, elsewhere Dplr's vector. state [P, HV, K, V]. pending [P, HV, M, W]: a token's W
//           numbers are decay (K or one) | k | u, for Dplr decay | k | b | u | p; k is stored after the division by its
//           length. slots [B] or null: sequence b has state slots[b] of the P states, or state b; no two sequences
//           share one, which is not checked here. accepted [B] or null: how many pending tokens were accepted, the
//           first ones; null: none
// grid      a block for every (sequence, head of values), sequence slowest. It takes BV columns at a time; a lane has
//           LANE_COLUMNS columns of LANE_CHANNELS channels
// smem      Shared: pending tokens, this call's tokens, sums over the warps' channels
// barriers  three every BV columns: all tokens are in shared memory | normalized q and k, and `weights`, are | the last
//           token has been read; two a token: the warps' sums are in shared memory | their totals are
// numerics  float32, for every type of the stored state; float64 if the state or the data are float64
// source    Gla: Yang et al., 2024, eq. 3; BeforeWrite: Peng et al., 2024, eq. 18-19; the others: see delta/tokens.cuh
// limits    K <= BK; T <= M <= TOKENS; the last axis of the state is contiguous
//
// A block has all columns of its head. Only it reads the head's pending tokens, and so it may overwrite them.
// LEAST_SQUARE (delta/lengths.cuh) is added to the square of a length before the division.
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   Wider<T, S>: double if numbers of T or S are computed in it, else float; FloatOrDouble<T>: that of T alone.
//     widened, narrowed: convert to it and back
//   sum_over_lanes<32>: the sum over a warp, in every lane; inverse_root: 1 / sqrt(x); decay_of(g): e^g

constexpr int TOKENS = 8;  // the largest number of pending tokens

// The rule: a recurrence, here or in delta/tokens.cuh (GatedDelta, Kda, Dplr). channel_gates: a gate for each channel,
// otherwise one for all; own_erasure: it erases with vectors a and b, not with k.
struct Gla {
  static constexpr bool channel_gates = true, own_erasure = false;
};
struct BeforeWrite {
  static constexpr bool channel_gates = true, own_erasure = false;
};
template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;
template <class Rule> constexpr bool HAS_BONUS = SAME<Rule, BeforeWrite>;
// Whether a token erases, so that it reads the state before it writes: not for u = v without p.
template <class Rule> constexpr bool ERASES = !HAS_BONUS<Rule> && !SAME<Rule, Gla>;
template <class Rule> constexpr int KEYS = Rule::own_erasure ? 2 : 1;  // vectors by which a token writes: k, and b

template <typename T, typename G, typename S> struct Args {
  StridedRows<const T> q, k, v, a, b;  // a and b: only for Dplr
  StridedRows<const G> g, beta;        // beta: only for GatedDelta and Kda
  StridedRows<T> o;
  const Wider<T, S>* bonus;  // only for BeforeWrite
  StridedRows<S> state;      // rows are channels of K
  StridedRows<Wider<T, S>> pending;
  const i64* slots;     // null: sequence b has state b
  const i64* accepted;  // null: no token was accepted
  i64 H, T_, K, V;      // H: heads of values; T_: tokens of this call
  i64 M;                // the largest number of pending tokens
  i64 group;            // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 aligned16;   // whether every row of the state starts on 16 bytes and is a multiple of 16 bytes
};

// Threads of a block, and columns at a time: chosen so that a lane's part of the state leaves enough registers.
template <typename R, int BK> constexpr int THREADS_OF = BK == 128 && sizeof(R) == 4 ? 512 : 256;
template <typename R, int BK> constexpr int COLUMNS = THREADS_OF<R, BK> / (BK == 256 && sizeof(R) == 8 ? 8 : 4);

template <class Rule, typename R, int BK, int BV> struct Shared {
  static constexpr int GATES = Rule::channel_gates ? BK : 16 / sizeof(R), WARPS = THREADS_OF<R, BK> / 32;
  // keys: k, then b. columns: what the keys are multiplied by, u, then p.
  R pending_decays[TOKENS][GATES], pending_keys[KEYS<Rule>][TOKENS][BK], pending_columns[KEYS<Rule>][TOKENS][BV];
  R decays[TOKENS][GATES], keys[KEYS<Rule>][TOKENS][BK], q[TOKENS][BK];
  R a[Rule::own_erasure ? TOKENS : 1][Rule::own_erasure ? BK : 16 / sizeof(R)], v[TOKENS][BV];
  R parts[WARPS][2][BV], sums[2][BV];           // of a token: [0]: S'^T k, or S_(t-1)^T a; [1]: S'^T q, or S_(t-1)^T q
  R beta[TOKENS], weights[KEYS<Rule>][TOKENS];  // weights: q . k (BeforeWrite: q . diag(bonus) k) and q . b

  // Divides q and k of token t by their lengths; by a warp.
  __device__ __forceinline__ void normalise(int t, int lane) {
    R qq = 0, kk = 0;  // |q|^2 and |k|^2, then the inverse lengths
    for (int c = lane; c < BK; c += 32) qq = fma(q[t][c], q[t][c], qq), kk = fma(keys[0][t][c], keys[0][t][c], kk);
    qq = inverse_root(sum_over_lanes<32>(qq) + R(LEAST_SQUARE));
    kk = inverse_root(sum_over_lanes<32>(kk) + R(LEAST_SQUARE));
    for (int c = lane; c < BK; c += 32) q[t][c] *= qq, keys[0][t][c] *= kk;
  }
  // Stores the weights of token t; by a warp. bonus: the head's.
  __device__ __forceinline__ void put_weights(int t, int lane, int K, const R* bonus) {
#pragma unroll
    for (int n = 0; n < KEYS<Rule>; ++n) {
      R weight = 0;
      for (int c = lane; c < K; c += 32) {
        R key = keys[n][t][c];
        if constexpr (HAS_BONUS<Rule>) key *= bonus[c];
        weight = fma(q[t][c], key, weight);
      }
      weight = sum_over_lanes<32>(weight);
      if (lane == 0) weights[n][t] = weight;
    }
  }
  // Adds the warps' parts: `which` of a column.
  __device__ __forceinline__ void add_parts(int which, int column) {
    R sum = 0;
#pragma unroll
    for (int n = 0; n < WARPS; ++n) sum += parts[n][which][column];
    sums[which][column] = sum;
  }
  // A column of token t's u (n = 0) or p (n = 1), from its sums.
  __device__ __forceinline__ R written(int t, int n, int column) const {
    if constexpr (!ERASES<Rule>) return v[t][column];
    else if constexpr (Rule::own_erasure) return n ? sums[0][column] : v[t][column];
    else return beta[t] * (v[t][column] - sums[0][column]);
  }
};

// T: the type of q, k, v, a, b and o; G: that of g and beta; S: that of the stored state. R, the type of the
// arithmetic: Wider<T, S> (real.cuh).
template <class Rule, typename T, typename G, typename S, int BK>
__global__ void __launch_bounds__(THREADS_OF<Wider<T, S>, BK>, 1) recurrent_step_of_several(const Args<T, G, S> args) {
  using R = Wider<T, S>;
  constexpr int BV = COLUMNS<R, BK>, BLOCK = THREADS_OF<R, BK>, BLOCK_WARPS = BLOCK / 32, LANE_COLUMNS = 16 / sizeof(S),
                LANES = BV / LANE_COLUMNS, CHANNELS_AT_ONCE = BLOCK / LANES, LANE_CHANNELS = BK / CHANNELS_AT_ONCE;
  // LANES neighbouring threads have the BV columns of one channel. So sums over a warp's lanes LANES apart, and then
  // over warps, are sums over channels alone.
  static_assert(LANES <= 32, "a warp has all columns");
  static_assert(LANE_CHANNELS * CHANNELS_AT_ONCE == BK && BLOCK >= 2 * BV, "threads have all channels, and all sums");
  struct alignas(16) Piece {
    S x[LANE_COLUMNS];
  };
  auto& s = *reinterpret_cast<Shared<Rule, R, BK, BV>*>(dynamic_smem());
  const u32 H = u32(args.H), h = blockIdx.x % H, b = blockIdx.x / H, head = h / u32(args.group);
  const int K = int(args.K), V = int(args.V), tokens = int(args.T_), gates = Rule::channel_gates ? K : 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_channel = threadIdx.x / LANES, column = threadIdx.x % LANES * LANE_COLUMNS;
  const i64 slot = args.slots ? args.slots[b] : b;
  // The host cannot check counts that are on the device: one below 0 counts as 0, one above M as M.
  const i64 requested = args.accepted ? args.accepted[b] : 0;
  const int accepted = requested < 0 ? 0 : requested > args.M ? int(args.M) : int(requested);
  // The address of a pending token's numbers: decays, then its k (Dplr: and b), then its u (and p).
  const auto pending = [&](int token) { return args.pending.row(slot, h, token); };
  const int columns_offset = gates + KEYS<Rule> * K;  // of u

  for (int first_column = 0; first_column < V; first_column += BV) {
    const int columns_left = V - first_column;
    // A thread has LANE_COLUMNS columns from `column` on and every CHANNELS_AT_ONCE-th channel from first_channel on.
    S* const first_piece = args.state.row(slot, h, first_channel) + first_column + column;
    R state[LANE_CHANNELS][LANE_COLUMNS];
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; ++n) {
      const S* from = first_piece + n * CHANNELS_AT_ONCE * args.state.token_stride;
      const bool exists = first_channel + n * CHANNELS_AT_ONCE < K;
      Piece piece{};
      if (args.aligned16) {
        if (exists && column < columns_left) piece = *reinterpret_cast<const Piece*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i)
          if (exists && column + i < columns_left) piece.x[i] = from[i];
      }
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) state[n][i] = widened(piece.x[i]);
    }
#pragma unroll 1  // unrolled, it would hold more addresses than the state leaves registers for
    for (int index = threadIdx.x; index < TOKENS * BK; index += BLOCK) {
      const int t = index / BK, c = index % BK;
      const bool is_accepted = t < accepted && c < K, exists = t < tokens && c < K;
      const auto load = [&](const StridedRows<const T>& x) { return exists ? R(widened(x.row(b, head, t)[c])) : R(0); };
      s.q[t][c] = load(args.q), s.keys[0][t][c] = load(args.k);
      if constexpr (Rule::own_erasure) s.a[t][c] = load(args.a), s.keys[1][t][c] = load(args.b);
      if constexpr (Rule::channel_gates) {
        s.decays[t][c] = decay_of(exists ? R(widened(args.g.row(b, h, t)[c])) : R(0));
        s.pending_decays[t][c] = is_accepted ? pending(t)[c] : R(1);
      }
#pragma unroll
      for (int n = 0; n < KEYS<Rule>; ++n) s.pending_keys[n][t][c] = is_accepted ? pending(t)[gates + n * K + c] : R(0);
    }
    for (int index = threadIdx.x; index < TOKENS * BV; index += BLOCK) {
      const int t = index / BV, c = index % BV;
      s.v[t][c] = t < tokens && c < columns_left ? R(widened(args.v.row(b, h, t)[first_column + c])) : R(0);
#pragma unroll
      for (int n = 0; n < KEYS<Rule>; ++n)
        s.pending_columns[n][t][c] =
            t < accepted && c < columns_left ? pending(t)[columns_offset + n * V + first_column + c] : R(0);
    }
    if (const int t = threadIdx.x; t < TOKENS) {
      if constexpr (!Rule::channel_gates) {
        s.decays[t][0] = decay_of(t < tokens ? R(widened(*args.g.row(b, h, t))) : R(0));
        s.pending_decays[t][0] = t < accepted ? *pending(t) : R(1);
      }
      if constexpr (ERASES<Rule> && !Rule::own_erasure)
        s.beta[t] = t < tokens ? R(widened(*args.beta.row(b, h, t))) : R(0);
    }
    __syncthreads();  // all tokens are in shared memory

    // Each warp has tokens: it divides q and k by their lengths, and computes weights.
    for (int t = warp; t < tokens; t += BLOCK_WARPS) {
      if (args.normalized) s.normalise(t, lane);
      s.put_weights(t, lane, K, args.bonus + h * args.K);
    }
    for (int t = 0; t < accepted; ++t) {  // applies the accepted tokens to the state
#pragma unroll
      for (int n = 0; n < LANE_CHANNELS; ++n) {
        const int c = first_channel + n * CHANNELS_AT_ONCE;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) {
          R x = s.pending_decays[t][Rule::channel_gates ? c : 0] * state[n][i];
#pragma unroll
          for (int m = 0; m < KEYS<Rule>; ++m) x = fma(s.pending_keys[m][t][c], s.pending_columns[m][t][column + i], x);
          state[n][i] = x;
        }
      }
    }
    if (accepted) {
#pragma unroll
      for (int n = 0; n < LANE_CHANNELS; ++n) {
        S* to = first_piece + n * CHANNELS_AT_ONCE * args.state.token_stride;
        const bool exists = first_channel + n * CHANNELS_AT_ONCE < K;
        Piece piece;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) {
          piece.x[i] = narrowed<S>(FloatOrDouble<S>(state[n][i]));
          state[n][i] = widened(piece.x[i]);  // rounded as a later call will load it
          if (!args.aligned16 && exists && column + i < columns_left) to[i] = piece.x[i];
        }
        if (args.aligned16 && exists && column < columns_left) *reinterpret_cast<Piece*>(to) = piece;
      }
    }
    __syncthreads();  // normalized rows and weights are in shared memory

    for (int t = 0; t < tokens; ++t) {
      // This thread's channels' terms of S'^T k (Dplr: S_(t-1)^T a) and of S'^T q (BeforeWrite: S_(t-1)^T q).
      R erased[LANE_COLUMNS] = {}, read[LANE_COLUMNS] = {};
#pragma unroll
      for (int n = 0; n < LANE_CHANNELS; ++n) {
        const int c = first_channel + n * CHANNELS_AT_ONCE;
        const R decay = s.decays[t][Rule::channel_gates ? c : 0], q = s.q[t][c];
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) {
          const R before = state[n][i], after = decay * before;
          if constexpr (Rule::own_erasure) erased[i] = fma(s.a[t][c], before, erased[i]);
          else if constexpr (ERASES<Rule>) erased[i] = fma(s.keys[0][t][c], after, erased[i]);
          read[i] = fma(q, HAS_BONUS<Rule> ? before : after, read[i]);
          state[n][i] = after;
        }
      }
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        for (int distance = LANES; distance < 32; distance *= 2) {
          if constexpr (ERASES<Rule>) erased[i] += __shfl_xor_sync(0xffffffffu, erased[i], distance);
          read[i] += __shfl_xor_sync(0xffffffffu, read[i], distance);
        }
        if (lane < LANES) s.parts[warp][0][column + i] = erased[i], s.parts[warp][1][column + i] = read[i];
      }
      __syncthreads();  // all warps' parts are in shared memory
      if (const int which = threadIdx.x / BV; which < 2) s.add_parts(which, threadIdx.x % BV);
      __syncthreads();  // their sums are in shared memory
#pragma unroll
      for (int m = 0; m < KEYS<Rule>; ++m) {
        R columns[LANE_COLUMNS];
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) columns[i] = s.written(t, m, column + i);
#pragma unroll
        for (int n = 0; n < LANE_CHANNELS; ++n)
#pragma unroll
          for (int i = 0; i < LANE_COLUMNS; ++i)
            state[n][i] = fma(s.keys[m][t][first_channel + n * CHANNELS_AT_ONCE], columns[i], state[n][i]);
      }
      if (const int c = threadIdx.x; c < BV && c < columns_left) {
        R o = s.sums[1][c];
#pragma unroll
        for (int n = 0; n < KEYS<Rule>; ++n) {
          o = fma(s.weights[n][t], s.written(t, n, c), o);
          pending(t)[columns_offset + n * V + first_column + c] = s.written(t, n, c);
        }
        args.o.row(b, h, t)[first_column + c] = narrowed<T>(FloatOrDouble<T>(R(args.scale) * o));
      }
    }
    __syncthreads();  // all tokens have been read: the next columns' may overwrite them
  }
  // This call's decays and keys become pending: no tile of columns needs those of the previous call any more.
  for (int index = threadIdx.x; index < tokens * BK; index += BLOCK) {
    const int t = index / BK, c = index % BK;
    if (c < gates) pending(t)[c] = s.decays[t][c];
#pragma unroll
    for (int n = 0; n < KEYS<Rule>; ++n)
      if (c < K) pending(t)[gates + n * K + c] = s.keys[n][t][c];
  }
}

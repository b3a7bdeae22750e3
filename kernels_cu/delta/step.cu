// what      One token of a delta rule for B sequences; each state is read and written once, in place.
// math      S is the state before the token, S+ after it, D = diag(exp g), S' = D S
//           GatedDelta, Kda: e = v - S'^T k, S+ = S' + k (beta e)^T, o = scale (S'^T q + (q . k) beta e)
//           Dplr (RWKV-7): p = S^T a, S+ = S' + b p^T + k v^T, o = scale (S'^T q + (q . b) p + (q . k) v)
//           If args.normalized (never for Dplr), q and k are the given ones divided by their lengths
// shapes    q k a b [B, H, K], v o [B, HV, V], g [B, HV] (GatedDelta) or [B, HV, K], beta [B, HV], state [states, HV,
//           K, V]; slots [B]: which state a sequence has, or null
// grid      a block for every (sequence, head of values, BV columns), sequence slowest; a thread has 16 bytes of
//           columns, LANE_COLUMNS, of LANE_CHANNELS channels
// smem      Shared: the token, and the warps' parts of S'^T k (Dplr: S^T a) and S'^T q
// barriers  two: the token is in shared memory | so are the parts, and the token's scalars
// numerics  float32, for every type of the stored state; float64 if the state or the data are float64
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K <= BK; BK of 64, 128, 256 and BV of 16, 64, or 16 and 128; the last axis of every array is contiguous
//           (has_rows in plan.py)
// tests     test_steps (slots; states that are slices or not aligned16; fewer heads of keys, of length 1); test_compile
//           (STEP_BLOCKS: no spills)
//
// A thread starts all loads of its part of the state before it reads the token, and reads all of the token before the
// first barrier: that hides the memory's latency.
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   Rule::channel_gates: a gate for each channel; Rule::own_erasure: a and b of Dplr
//   FloatOrDouble<T>: double if T is, else float; widened, narrowed: from T to it and back. Wider<T, S>: double if T or
//     S is, else float. decay_of(g): e^g; inverse_root(x): 1 / sqrt x
//   StridedRows: row(b, h, token) is a row's address; strides are in numbers
//   TokenScalars: inverse lengths of q and k, q . k and q . b, both of the given vectors
//   LEAST_SQUARE = 1e-6 is added to the square of a length

constexpr int STEP_THREADS = 256, STEP_WARPS = STEP_THREADS / 32;
// Blocks on a multiprocessor, which bound registers: of half-precision states a thread has twice as many columns,
// and float64 numbers take two registers each; of wide blocks a thread has more channels.
template <class Rule, typename R, typename S, int BK, int BV>
constexpr int STEP_BLOCKS = BK == 256 && BV == 64 && sizeof(R) == 8                     ? 1
                            : BK == 256 && BV == 64 || sizeof(R) == 8 || sizeof(S) == 2 ? 2
                            : BV == 64 || Rule::own_erasure                             ? 3
                                                                                        : 4;

template <typename T, typename G, typename S> struct Args {
  StridedRows<const T> q, k, v, a, b;  // the token stride is not used; a and b: only for Dplr
  StridedRows<const G> g, beta;        // beta: only for GatedDelta and Kda
  StridedRows<T> o;
  StridedRows<S> state;  // rows are channels, so that the token stride is that of channels
  const i64* slots;      // all different, since states change in place; null: sequence b has state b
  i64 HV, K, V;          // HV: heads of values
  i64 group;             // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 aligned16;   // whether every row of the state starts on 16 bytes and is a multiple of 16 bytes
};

// Arrays that the rule does not use have 16 bytes, since an array must not be empty.
template <class Rule, typename R, int BK, int BV> struct Shared {
  R q[BK], k[BK], a[Rule::own_erasure ? BK : 16 / sizeof(R)], b[Rule::own_erasure ? BK : 16 / sizeof(R)];
  R decays[Rule::channel_gates ? BK : 16 / sizeof(R)];
  R v[BV];                     // of the block's columns
  R parts[STEP_WARPS][2][BV];  // the warps' parts, [0] of S'^T k (Dplr: S^T a), [1] of S'^T q
  TokenScalars<R> scalars;

  // Computes the token's scalars; by a warp.
  __device__ __forceinline__ void put_scalars(int lane, bool normalized) {
    R qq = 0, kk = 0, qk = 0, qb = 0;
    for (int c = lane; c < BK; c += 32) {
      qk = fma(q[c], k[c], qk), qq = fma(q[c], q[c], qq), kk = fma(k[c], k[c], kk);
      if constexpr (Rule::own_erasure) qb = fma(q[c], b[c], qb);
    }
    qq = sum_over_lanes<32>(qq), kk = sum_over_lanes<32>(kk), qk = sum_over_lanes<32>(qk), qb = sum_over_lanes<32>(qb);
    if (lane == 0) {
      scalars.inverse_q_length = normalized ? inverse_root(qq + R(LEAST_SQUARE)) : R(1), scalars.q_dot_k = qk,
      scalars.q_dot_b = qb;
      scalars.inverse_k_length = normalized ? inverse_root(kk + R(LEAST_SQUARE)) : R(1);
    }
  }
  __device__ __forceinline__ R sum_of_parts(int which, int column) const {
    R sum = 0;
#pragma unroll
    for (int n = 0; n < STEP_WARPS; ++n) sum += parts[n][which][column];
    return sum;
  }
  // The factor of the given key where it is added to a column of the state: v, or beta (v - S'^T k) / |given k|, with k
  // = given k / |given k|. Without `normalized`, so always of Dplr, no length divides. erased: the column's number of
  // S'^T (given k) (Dplr: not used).
  __device__ __forceinline__ R written(R erased, R beta, int column) const {
    return Rule::own_erasure ? v[column]
                             : scalars.inverse_k_length * beta * (v[column] - scalars.inverse_k_length * erased);
  }
};

template <class Rule, typename T, typename G, typename S, int BK, int BV>
__global__ void __launch_bounds__(STEP_THREADS, STEP_BLOCKS<Rule, Wider<T, S>, S, BK, BV>)
    delta_step(const Args<T, G, S> args) {
  using R = Wider<T, S>;
  constexpr int LANE_COLUMNS = 16 / sizeof(S), LANES = BV / LANE_COLUMNS, CHANNELS_AT_ONCE = STEP_THREADS / LANES,
                LANE_CHANNELS = BK > CHANNELS_AT_ONCE ? BK / CHANNELS_AT_ONCE : 1;
  struct alignas(16) Piece {
    S x[LANE_COLUMNS];
  };
  auto& s = *reinterpret_cast<Shared<Rule, R, BK, BV>*>(dynamic_smem());
  const u32 tiles = u32((args.V + BV - 1) / BV), batch_head = blockIdx.x / tiles, HV = u32(args.HV);
  const u32 value_head = batch_head % HV, b = batch_head / HV, key_head = value_head / u32(args.group);
  const int K = int(args.K), first_column = blockIdx.x % tiles * BV, columns_left = int(args.V) - first_column;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // The thread's channels are first_channel + n CHANNELS_AT_ONCE; column: its first one in the block's tile.
  const int first_channel = threadIdx.x / LANES, column = threadIdx.x % LANES * LANE_COLUMNS;

  // state[n]: channel first_channel + n CHANNELS_AT_ONCE, LANE_COLUMNS columns; zeros outside of K and V.
  S* const first_number =
      args.state.row(args.slots ? args.slots[b] : b, value_head, first_channel) + first_column + column;
  Piece state[LANE_CHANNELS] = {};
  // Calls f(piece, its distance in memory from the thread's first one, in pieces) for those of the thread's pieces
  // that exist. In pieces, since the compiler then sees that a piece takes one store of 16 bytes.
  static_assert(CHANNELS_AT_ONCE % LANE_COLUMNS == 0 && 32 % LANES == 0, "whole pieces; a warp has all columns");
  const auto each_piece = [&](auto f) {
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; ++n)
      if (first_channel + n * CHANNELS_AT_ONCE < K && column < columns_left)
        f(state[n], n * (CHANNELS_AT_ONCE / LANE_COLUMNS) * args.state.token_stride);
  };
  if (args.aligned16) {
    each_piece([&](Piece& piece, i64 at) { piece = reinterpret_cast<const Piece*>(first_number)[at]; });
  } else {
    each_piece([&](Piece& piece, i64 at) {
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i)
        if (column + i < columns_left) piece.x[i] = first_number[at * LANE_COLUMNS + i];
    });
  }
  // The token: first all of its loads, then what waits for them. own_a, own_b, own_decay: of this thread's channel;
  // GatedDelta has one gate, and own_decay is the same in all threads.
  static_assert(BK <= STEP_THREADS && BV <= STEP_THREADS, "a thread loads one channel and one column at most");
  const int index = threadIdx.x;
  const bool has_channel = index < K, has_column = index < BV && index < columns_left;
  T q = {}, k = {}, own_a = {}, own_b = {};
  G gate = {}, strength = {};
  const T v = args.v.row(b, value_head, 0)[first_column + (has_column ? index : 0)];  // without a column: not used
  if constexpr (!Rule::channel_gates) gate = *args.g.row(b, value_head, 0);
  if constexpr (!Rule::own_erasure) strength = *args.beta.row(b, value_head, 0);
  if (has_channel) {
    q = args.q.row(b, key_head, 0)[index], k = args.k.row(b, key_head, 0)[index];
    if constexpr (Rule::own_erasure)
      own_a = args.a.row(b, key_head, 0)[index], own_b = args.b.row(b, key_head, 0)[index];
    if constexpr (Rule::channel_gates) gate = args.g.row(b, value_head, 0)[index];
  }
  __syncwarp();  // no load moves behind this; else the compiler puts some behind code that waits for another's number
  const R own_decay = decay_of(R(widened(gate))), beta = widened(strength);
  if (index < BK) {
    s.q[index] = widened(q), s.k[index] = widened(k);
    if constexpr (Rule::own_erasure) s.a[index] = widened(own_a), s.b[index] = widened(own_b);
    if constexpr (Rule::channel_gates) s.decays[index] = own_decay;
  }
  if (index < BV) s.v[index] = widened(v);
  __syncthreads();  // the token is in shared memory

  if (warp == 0) s.put_scalars(lane, args.normalized);
  // Of the thread's columns, over its channels, then over the warp's: erased is S'^T k (Dplr: S^T a), read is S'^T q.
  R decay = own_decay, erased[LANE_COLUMNS] = {}, read[LANE_COLUMNS] = {};
#pragma unroll
  for (int n = 0; n < LANE_CHANNELS; ++n) {
    const int c = first_channel + n * CHANNELS_AT_ONCE;
    if (c >= K) break;
    if constexpr (Rule::channel_gates) decay = s.decays[c];
    const R q = s.q[c], erasing = Rule::own_erasure ? s.a[c] : s.k[c];
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; ++i) {
      const R before = widened(state[n].x[i]), after = decay * before;
      erased[i] = fma(erasing, Rule::own_erasure ? before : after, erased[i]);
      read[i] = fma(q, after, read[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; ++i) {
    for (int distance = LANES; distance < 32; distance *= 2) {  // lanes with the same columns
      erased[i] += __shfl_xor_sync(0xffffffffu, erased[i], distance);
      read[i] += __shfl_xor_sync(0xffffffffu, read[i], distance);
    }
    if (lane < LANES) s.parts[warp][0][column + i] = erased[i], s.parts[warp][1][column + i] = read[i];
  }
  __syncthreads();  // the parts and the token's scalars are in shared memory

  R write[LANE_COLUMNS];  // what s.written returns for each column; `erased` is now the sum over all channels
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; ++i) {
    erased[i] = s.sum_of_parts(0, column + i);
    write[i] = s.written(erased[i], beta, column + i);
  }
#pragma unroll
  for (int n = 0; n < LANE_CHANNELS; ++n) {
    const int c = first_channel + n * CHANNELS_AT_ONCE;
    if (c >= K) break;
    if constexpr (Rule::channel_gates) decay = s.decays[c];
    const R k = s.k[c], b = Rule::own_erasure ? s.b[c] : R(0);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; ++i) {
      R x = decay * R(widened(state[n].x[i]));
      x = fma(k, write[i], x);
      if constexpr (Rule::own_erasure) x = fma(b, erased[i], x);
      state[n].x[i] = narrowed<S>(FloatOrDouble<S>(x));
    }
  }
  if (args.aligned16) {
    each_piece([&](const Piece& piece, i64 at) { reinterpret_cast<Piece*>(first_number)[at] = piece; });
  } else {
    each_piece([&](const Piece& piece, i64 at) {
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i)
        if (column + i < columns_left) first_number[at * LANE_COLUMNS + i] = piece.x[i];
    });
  }
  if (has_column) {
    const R p = s.sum_of_parts(0, index);
    R o = fma(s.scalars.q_dot_k, s.written(p, beta, index), s.sum_of_parts(1, index));
    if constexpr (Rule::own_erasure) o = fma(s.scalars.q_dot_b, p, o);
    args.o.row(b, value_head, 0)[first_column + index] =
        narrowed<T>(FloatOrDouble<T>(R(args.scale) * s.scalars.inverse_q_length * o));
  }
}

// what      GLA and RWKV-6 forward with heads of at most 16 channels and columns; GLA also with a gate of columns.
//           Without OUTPUTS: instead of o, summaries of segments: the state S after a segment if the state before it is
//           zero, and the segment's decay. For the backward pass also dS, the gradient of the state before a segment if
//           the gradient of the state after it is zero.
// math      S_t = diag(exp g_t) S_{t-1} + k_t v_t^T;   o_t = scale q_t^T S_t  (RWKV-6: scale q_t^T (S_{t-1} + diag(u)
//           k_t v_t^T)); with gv S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T, * number by number. Summaries,
//           backwards in time: dS <- diag(exp g_t) (dS + scale q_t do_t^T)  (RWKV-6: diag(exp g_t) dS + scale q_t
//           do_t^T);   decay: exp g_t, multiplied over the segment's tokens; with gv decays are logarithms
// shapes    q k g [B, H, T, K], v do o gv [B, H, T, V], u [H, K], initial, final, dht [N, H, K, V] float32.
//           Summaries of the P segments of each of N sequences, float32:
//           Forward pass (`both` is 0): states [N P, H, K, V] and decays [N P, H, 2, K], read by scan_segments.cu,
//           which multiplies both rows of decays: the second row is 1 here; with gv it adds them, and the second row is
//           0. With gv also column_decays [N P, H, V].
//           Backward pass: states [2, N P, H, K, V], decays [2, N P, H, K] and column_decays [2, N P, H, V], read by
//           scan_both_ways.cu; index 0 is forwards in time, 1 backwards. In each direction a segment's decay has the
//           segment's own index, but its state (or dS) has the index of the next segment in that direction, which
//           starts from it. The first segment has `initial` (or dht) at its index and starts from it; of the last one
//           nothing is computed
// grid      a warp for every 64 / D heads of all sequences, or of the computed segments, sequence slowest, but for the
//           direction of summaries; a lane has two columns of a head's state
// smem      for each warp: two stages, each of a step of 8 tokens, in which o overwrites g; the decays of one step
// barriers  of warps, three a step: the step has been copied | its decays are in shared memory | o is in shared memory,
//           and the step has been read
// numerics  float32 throughout. With gv and a gate above 0 the decay is exp(g + gv): exp g or exp gv alone may overflow
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19; summaries: Blelloch, 1990, section 1.4.1
// limits    K, V <= D; D of 8, 16; gv with AfterWrite
//
// Names (small_heads.cuh). Tile: a step's rows of all heads of a warp; load_row and `put` read and write a row of one
// head as floats. LaneCoord: a lane's head and its number in it; Work: that head's tokens, and n, the number of its
// sequence or segment over the batch, -1 if the lane has no head; HEADS: heads of a warp; largest_of_warp: the most
// tokens of a head. fetch and store copy a lane's pieces of a step; lane_rows: where they are in memory; put_decays:
// exp of the gates that a lane has copied, or these gates; grows: whether a gate of the warp's step is above 0;
// with_next_number: calls a function with that of the next number of a state
#include "gated/small_heads.cuh"
#include "forward_arguments.cuh"

constexpr int WARPS = 4;  // of a block: each has heads and shared memory of its own

// o, u and final: with OUTPUTS; do_ and all from dht on: without. q is read with OUTPUTS, and if `both`.
template <typename T, typename G> struct Args : ForwardArgs<T, G> {
  i64 bytes;                // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows
  StridedRows<const G> gv;  // this and column_decays: null unless GATED
  StridedRows<const T> do_;
  const float* dht;  // null: zero
  float *states, *decays, *column_decays;
  i64 segments, computed;  // segments of a sequence, and how many of them, from the first on, are computed
  i64 both;                // whether both directions in time are computed, of all segments
};

// The base of a stage: its tile of queries, if o is computed.
template <class Tile, bool OUTPUTS> struct Queries {
  Tile q;
};
template <class Tile> struct Queries<Tile, false> {};

template <typename T, typename G, int D, bool GATED, bool OUTPUTS>
struct Stage : ColumnGates<Tile<G, D, D / 2>, GATED>, Queries<Tile<T, D, D / 2>, OUTPUTS> {
  Tile<T, D, D / 2> keys, values;  // k and v, or backwards in time q and do: the factors of what is added to S
  union {
    Tile<G, D, D / 2> g;
    Tile<T, D, D / 2> o;  // overwrites g after the decays have been computed
  };
};
template <typename T, typename G, int D, bool GATED, bool OUTPUTS> struct Shared {
  struct Warp {
    Stage<T, G, D, GATED, OUTPUTS> stages[2];
    Tile<float, D, D / 2> decays;
  } warps[WARPS];
};

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: the type of q, k, v, do and o; G: that of g
// and gv. GATED: whether columns have gates gv, too. The launch bounds: the blocks that share a multiprocessor's
// registers: fewer where a thread needs more registers, that is for heads of 16 and for float32 gates. The host counts
// on them (GatedSmall.blocks_per_multiprocessor).
template <class ReadOrder, typename T, typename G, int D, bool GATED, bool OUTPUTS>
__global__ void __launch_bounds__(32 * WARPS, D == 8 ? sizeof(G) == 2 ? 5 : 4 : 3)
    gated_small_forward(const Args<T, G> args) {
  constexpr int LANES = D / 2;
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  static_assert(!(GATED && BEFORE), "columns have gates in GLA only");
  using Inputs = Tile<T, D, LANES>;
  const int warp = threadIdx.x >> 5;
  auto& s = reinterpret_cast<Shared<T, G, D, GATED, OUTPUTS>*>(dynamic_smem())->warps[warp];
  const Shape& shape = args.shape;
  const LaneCoord<LANES> coord;
  const bool both = !OUTPUTS && args.both;  // of summaries alone
  const u32 direction_blocks = both ? gridDim.x / 2 : gridDim.x;
  const bool backwards = both && blockIdx.x >= direction_blocks;
  const int P = OUTPUTS ? 1 : int(args.segments);
  Work work = work_of(shape, ((blockIdx.x - backwards * direction_blocks) * WARPS + warp) * Inputs::HEADS + coord.head,
                      u32(P), OUTPUTS ? 1 : u32(args.computed));
  const int K = int(shape.K), V = int(shape.V), bytes = int(args.bytes), column = 2 * coord.lane;
  const int segment = backwards ? P - 1 - int(work.n % P) : int(work.n % P);  // of its sequence, in the direction
  // slot: the index of the head in states, and in decays, of all sequences or segments, of the direction.
  const i64 state_size = i64(K) * V, slot = (backwards * (shape.B * shape.row_sequences) + work.n) * shape.H + work.h;

  // S is dS if time runs backwards. total_decay: that of channels 2 lane and 2 lane + 1; if GATED its logarithm, and
  // column_total: that of the columns.
  float S[D][2] = {}, u[D], total_decay[2] = {!GATED, !GATED}, column_total[2] = {};
#pragma unroll
  for (int c = 0; c < D; ++c) u[c] = OUTPUTS && BEFORE && c < K ? args.u[work.h * K + c] : 0.f;
  // Calls f(number, its index in a state [K, V] of memory) for this lane's numbers: columns `column` and the next.
  const auto each_number = [&](auto f) {
#pragma unroll
    for (int c = 0; c < D; ++c)
#pragma unroll
      for (int x = 0; x < 2; ++x)
        if (work.n >= 0 && c < K && column + x < V) f(S[c][x], c * V + column + x);
  };
  if (OUTPUTS && args.initial)
    each_number([&](float& number, int index) { number = args.initial[slot * state_size + index]; });
  if (both && segment == 0) {  // the first segment starts from `initial` or `dht`, which is stored as its start
    const float* given = backwards ? args.dht : args.initial;
    each_number([&](float& number, int index) {
      if (given) number = given[(work.n / P * shape.H + work.h) * state_size + index];
      args.states[slot * state_size + index] = number;
    });
  }
  // The last segment's summary is not needed: a head without tokens and with n = -1 computes and stores nothing.
  if (both && segment == P - 1) work.n = -1, work.tokens = 0;

  const auto& tiles = s.stages[0];  // either stage: lane_rows takes the types of tiles alone
  const auto key_rows = lane_rows(tiles.keys, backwards ? args.q : args.k, work, coord.lane);
  const auto value_rows = lane_rows(tiles.values, backwards ? args.do_ : args.v, work, coord.lane);
  const auto q_rows = lane_rows(tiles.keys, args.q, work, coord.lane);
  const auto g_rows = lane_rows(tiles.g, args.g, work, coord.lane);
  const auto gv_rows = lane_rows(tiles.g, args.gv, work, coord.lane);
  const auto o_rows = lane_rows(tiles.o, args.o, work, coord.lane);
  // A warp takes as many steps as its longest head has. Tokens past the end of a head are zeros, their gates too: they
  // add nothing, and their decay is 1.
  const int longest = largest_of_warp<LANES>(work.tokens), last_step = (longest - 1) / STEP * STEP;
  // The first token in time, counted from the head's first one, of the step of the walk that begins after n tokens.
  const auto token_after = [&](int n) { return backwards ? last_step - n : n; };
  const auto fetch_step = [&](int n) {  // starts copying that step
    const int token = token_after(n), tokens_left = work.tokens - token;
    auto& to = s.stages[n / STEP % 2];
    fetch(to.keys, key_rows, coord.head, coord.lane, token, tokens_left, K, bytes);
    fetch(to.values, value_rows, coord.head, coord.lane, token, tokens_left, V, bytes);
    fetch(to.g, g_rows, coord.head, coord.lane, token, tokens_left, K, bytes);
    if constexpr (OUTPUTS) fetch(to.q, q_rows, coord.head, coord.lane, token, tokens_left, K, bytes);
    if constexpr (GATED) fetch(to.gv, gv_rows, coord.head, coord.lane, token, tokens_left, V, bytes);
    cp_async_commit();
  };
  const float scale = float(args.scale), value_scale = backwards ? scale : 1.f;
  // Whether a token's product is added before its gate decays the sum.
  const bool write_before_decay = backwards && !BEFORE;
  if (longest) fetch_step(0);
#pragma unroll 1
  for (int n = 0; n < longest; n += STEP) {
    auto& in = s.stages[n / STEP % 2];
    cp_async_wait<0>();
    __syncwarp();  // all lanes have copied the step
    const bool growing = grows<GATED>(in, coord.head, coord.lane);
    put_decays(s.decays, in.g, coord.head, coord.lane, growing);
    __syncwarp();  // the decays are in shared memory
    if (n + STEP < longest) fetch_step(n + STEP);
    // Applies token i of the step to S; computes its o, or applies its gates to the total decays.
    const auto add_token = [&](int i, auto next_number) {
      float q[D] = {}, key[D], decays[D], value[2], gv[2] = {}, o[2] = {};
      if constexpr (OUTPUTS) in.q.load_row(q, i, coord.head);
      in.keys.load_row(key, i, coord.head), in.values.load_row(value, i, coord.head, column);
      s.decays.load_row(decays, i, coord.head);
      if constexpr (GATED) in.gv.load_row(gv, i, coord.head, column);
      if constexpr (!OUTPUTS) {
        value[0] *= value_scale, value[1] *= value_scale;
        float lane_decays[2];  // of the channels in total_decay
        if constexpr (GATED) {
          in.g.load_row(lane_decays, i, coord.head, column);
          total_decay[0] += lane_decays[0], total_decay[1] += lane_decays[1];
          column_total[0] += gv[0], column_total[1] += gv[1];
        } else {
          s.decays.load_row(lane_decays, i, coord.head, column);
          total_decay[0] *= lane_decays[0], total_decay[1] *= lane_decays[1];
        }
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float column_decay = growing ? gv[x] : decay_of(gv[x]);
#pragma unroll
        for (int c = 0; c < D; ++c) {
          if constexpr (OUTPUTS) {
            const float kv = key[c] * value[x], next = next_number(S[c][x], decays[c], column_decay, kv);
            o[x] = fmaf(q[c], BEFORE ? fmaf(u[c], kv, S[c][x]) : next, o[x]);
            S[c][x] = next;
          } else {
            S[c][x] = write_before_decay ? next_number(fmaf(key[c], value[x], S[c][x]), decays[c], column_decay, 0.f)
                                         : next_number(S[c][x], decays[c], column_decay, key[c] * value[x]);
          }
        }
      }
      if constexpr (OUTPUTS) {
        o[0] *= scale, o[1] *= scale;
        in.o.put(o, i, coord.head, column);
      }
    };
    with_next_number<GATED>(growing, [&](auto next_number) {
      if (backwards) {
#pragma unroll
        for (int i = STEP - 1; i >= 0; --i) add_token(i, next_number);
      } else {
#pragma unroll
        for (int i = 0; i < STEP; ++i) add_token(i, next_number);
      }
    });
    __syncwarp();  // o is in shared memory; the step has been read, so that its stage may be filled again
    if (OUTPUTS) store(in.o, o_rows, coord.head, coord.lane, n, work.tokens - n, V, bytes);
  }
  if constexpr (OUTPUTS) {
    if (args.final) each_number([&](float& number, int index) { args.final[slot * state_size + index] = number; });
    return;
  }
  const i64 state_slot = both ? slot + (backwards ? -shape.H : shape.H) : slot;  // both: the next segment's
  each_number([&](float& number, int index) { args.states[state_slot * state_size + index] = number; });
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    if (work.n < 0) continue;
    if (column + x < K) {
      float* decay = args.decays + slot * (both ? K : 2 * K) + column + x;
      *decay = total_decay[x];
      if (!both) decay[K] = !GATED;
    }
    if (GATED && column + x < V) args.column_decays[slot * V + column + x] = column_total[x];
  }
}

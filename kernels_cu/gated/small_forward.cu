// what      GLA and RWKV-6 forward with heads of at most 16 channels and columns; GLA also with a gate of columns.
// math      S_t = diag(exp g_t) S_{t-1} + k_t v_t^T;   o_t = scale q_t^T S_t  (RWKV-6: scale q_t^T (S_{t-1} + diag(u)
//           k_t v_t^T)); with gv S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T, * number by number
// shapes    q k g [B, H, T, K], v o gv [B, H, T, V], u [H, K], initial and final state [N, H, K, V] float32
// grid      a warp for every 64 / D heads of all sequences or segments, sequence slowest; a lane has two columns of a
//           head's state
// smem      for each warp: two stages, each of a step of 8 tokens, in which o overwrites g; the decays of one step
// barriers  of warps, three a step: the step has been copied | its decays are in shared memory | o is in shared memory,
//           and the step has been read
// numerics  float32 throughout. With gv and a gate above 0 the decay is exp(g + gv): exp g or exp gv alone may overflow
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19
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

template <typename T, typename G> struct Args : ForwardArgs<T, G> {
  i64 bytes;                // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows
  StridedRows<const G> gv;  // null unless GATED
};

template <typename T, typename G, int D, bool GATED> struct Stage : ColumnGates<Tile<G, D, D / 2>, GATED> {
  Tile<T, D, D / 2> q, k, v;
  union {
    Tile<G, D, D / 2> g;
    Tile<T, D, D / 2> o;  // overwrites g after the decays have been computed
  };
};
template <typename T, typename G, int D, bool GATED> struct Shared {
  struct Warp {
    Stage<T, G, D, GATED> stages[2];
    Tile<float, D, D / 2> decays;
  } warps[WARPS];
};

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: the type of q, k, v and o; G: that of g and
// gv. GATED: whether columns have gates gv, too. The launch bounds: the blocks that share a multiprocessor's registers:
// fewer where a thread needs more registers, that is for heads of 16 and for float32 gates.
template <class ReadOrder, typename T, typename G, int D, bool GATED>
__global__ void __launch_bounds__(32 * WARPS, D == 8 ? sizeof(G) == 2 ? 5 : 4 : 3)
    gated_small_forward(const Args<T, G> args) {
  constexpr int LANES = D / 2;
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  static_assert(!(GATED && BEFORE), "columns have gates in GLA only");
  using Inputs = Tile<T, D, LANES>;
  const int warp = threadIdx.x >> 5;
  auto& s = reinterpret_cast<Shared<T, G, D, GATED>*>(dynamic_smem())->warps[warp];
  const Shape& shape = args.shape;
  const LaneCoord<LANES> coord;
  const Work work = work_of(shape, (blockIdx.x * WARPS + warp) * Inputs::HEADS + coord.head);
  const int K = int(shape.K), V = int(shape.V), bytes = int(args.bytes), column = 2 * coord.lane;

  float S[D][2], u[D];
  // Calls f(number of S, its index in a state [K, V] of memory) for this lane's numbers: columns `column` and the next.
  const auto each_number = [&](auto f) {
    const i64 first = (work.n * shape.H + work.h) * (i64(K) * V) + column;
#pragma unroll
    for (int c = 0; c < D; ++c)
#pragma unroll
      for (int x = 0; x < 2; ++x)
        if (work.n >= 0 && c < K && column + x < V) f(S[c][x], first + c * V + x);
  };
#pragma unroll
  for (int c = 0; c < D; ++c) {
    S[c][0] = S[c][1] = 0.f;
    u[c] = BEFORE && c < K ? args.u[work.h * K + c] : 0.f;
  }
  if (args.initial) each_number([&](float& x, i64 place) { x = args.initial[place]; });

  const auto& tiles = s.stages[0];  // either stage: lane_rows takes the types of tiles alone
  const auto q_rows = lane_rows(tiles.q, args.q, work, coord.lane),
             k_rows = lane_rows(tiles.k, args.k, work, coord.lane);
  const auto v_rows = lane_rows(tiles.v, args.v, work, coord.lane);
  const auto g_rows = lane_rows(tiles.g, args.g, work, coord.lane);
  const auto gv_rows = lane_rows(tiles.g, args.gv, work, coord.lane);
  const auto o_rows = lane_rows(tiles.o, args.o, work, coord.lane);
  // Starts copying the step that starts at `token`. A warp takes as many steps as its longest head has.
  const auto fetch_step = [&](Stage<T, G, D, GATED>& to, int token) {
    const int tokens_left = work.tokens - token;
    fetch(to.k, k_rows, coord.head, coord.lane, token, tokens_left, K, bytes);
    fetch(to.v, v_rows, coord.head, coord.lane, token, tokens_left, V, bytes);
    fetch(to.g, g_rows, coord.head, coord.lane, token, tokens_left, K, bytes);
    fetch(to.q, q_rows, coord.head, coord.lane, token, tokens_left, K, bytes);
    if constexpr (GATED) fetch(to.gv, gv_rows, coord.head, coord.lane, token, tokens_left, V, bytes);
    cp_async_commit();
  };
  const int longest = largest_of_warp<LANES>(work.tokens);
  const float scale = float(args.scale);
  if (longest) fetch_step(s.stages[0], 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < longest; token += STEP, stage ^= 1) {
    Stage<T, G, D, GATED>& in = s.stages[stage];
    cp_async_wait<0>();
    __syncwarp();  // all lanes have copied the step
    const bool growing = grows<GATED>(in, coord.head, coord.lane);
    put_decays(s.decays, in.g, coord.head, coord.lane, growing);
    __syncwarp();  // the decays are in shared memory
    if (token + STEP < longest) fetch_step(s.stages[stage ^ 1], token + STEP);
    with_next_number<GATED>(growing, [&](auto next_number) {
#pragma unroll
      for (int i = 0; i < STEP; ++i) {
        float q[D], k[D], decays[D], v[2], gv[2] = {}, o[2] = {};
        in.q.load_row(q, i, coord.head), in.k.load_row(k, i, coord.head), s.decays.load_row(decays, i, coord.head);
        in.v.load_row(v, i, coord.head, column);
        if constexpr (GATED) in.gv.load_row(gv, i, coord.head, column);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float column_decay = growing ? gv[x] : decay_of(gv[x]);
#pragma unroll
          for (int c = 0; c < D; ++c) {
            const float kv = k[c] * v[x], next = next_number(S[c][x], decays[c], column_decay, kv);
            o[x] = fmaf(q[c], BEFORE ? fmaf(u[c], kv, S[c][x]) : next, o[x]);
            S[c][x] = next;
          }
        }
        o[0] *= scale, o[1] *= scale;
        in.o.put(o, i, coord.head, column);
      }
    });
    __syncwarp();  // o is in shared memory; the step has been read, so that its stage may be filled again
    store(in.o, o_rows, coord.head, coord.lane, token, work.tokens - token, V, bytes);
  }
  if (args.final) each_number([&](float& x, i64 place) { args.final[place] = x; });
}

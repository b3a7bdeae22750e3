// what      GLA and RWKV-6 backward with heads of at most 16 channels and columns; GLA also with a gate of columns.
// math      S_t = diag(a_t) S_{t-1} + k_t v_t^T, a_t = exp g_t; dS_t is the gradient of S_t, w_t = scale do_t . v_t
//           GLA     dS_{t-1} = diag(a_t) dS_t + scale q_{t-1} do_{t-1}^T;  dq_t = scale S_t do_t
//           RWKV-6  dS_{t-1} = diag(a_t) dS_t + scale q_t do_t^T;  dq_t = scale S_{t-1} do_t + w_t u k_t
//           both    dk_t = dS_t v_t (RWKV-6: + w_t u q_t);  dv_t = dS_t^T k_t (RWKV-6: + scale (q_t . u k_t) do_t)
//                   dg_t = sum over columns of a_t S_{t-1} dS_t, number by number;  du = sum_t w_t q_t k_t
// shapes    q k g dq dk dg [B, H, T, K], v do dv [B, H, T, V], u [H, K], starts, ends and dh0 [N, H, K, V] float32,
//           partial_du [N P, H, K] float32, du of each segment; step_states [B, NC, H, D D] float32: S before each of
//           the NC steps of 8 tokens of a batch row, in the order of lanes' registers, stored forwards in time and read
//           backwards
// grid      a warp for every 512 / (D D) heads of all sequences or segments, sequence slowest; a lane has 16 / D rows
//           of a head's state
// smem      for each warp: two stages, each of a step's inputs and stored state, which gradients overwrite; the decays
//           of one step
// barriers  of warps. Forwards in time three a step: the step has been copied | its decays are in shared memory | it
//           has been read. Backwards four: the step and its stored state have been copied | decays are in shared
//           memory | the stored state has been read, which dv overwrites | gradients are in shared memory, and the step
//           has been read
// numerics  float32 throughout; the gates' gradient is a sum without subtractions. With gv and a gate above 0 the decay
//           is exp(g + gv): exp g or exp gv alone may overflow
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    K, V <= D; D of 8, 16
// instances both orders, D, and T and G: float32, or T of 16 bits with G of T or float32; GLA with gv (GATED)
// tests     test_small_heads, test_gradient_kernels; with gv test_value_gate
//
// Names (small_heads.cuh). A step is STEP = 8 tokens. Tile: a step's rows of all heads of a warp; load_row and `put`
// read and write a row of one head as floats. LaneCoord: a lane's head and its number in it; Work: that head's tokens,
// and n, the number of its sequence or segment over the batch, -1 if the lane has no head. HEADS: heads of a warp;
// largest_of_warp: the most tokens of a head. fetch and store copy a lane's pieces of a step; lane_rows: where they are
// in memory; put_decays: exp of the gates that a lane has copied, or these gates; grows: whether a gate of the warp's
// step is above 0; with_next_number: calls a function with that of the next number of a state.
// opaque(x): x, its origin hidden from the compiler, so that what depends on it is computed again
#include "gated/small_heads.cuh"
#include "lanes.cuh"

constexpr int WARPS = 2;     // of a block: each has heads and shared memory of its own
constexpr int NUMBERS = 16;  // of a state in a lane's registers

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, v, do_;
  StridedRows<const G> g;
  StridedRows<T> dq, dk, dv;
  StridedRows<G> dg;
  const float *u, *starts, *ends;  // starts: the states before segments; ends: the gradients of those after; null: zero
  float *dh0, *step_states, *partial_du;  // dh0 and partial_du null: not wanted
  Shape shape;
  double scale;
  i64 P;                    // segments of a sequence
  i64 bytes;                // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows
  StridedRows<const G> gv;  // this and dgv: null unless GATED
  StridedRows<G> dgv;
};

template <int D> constexpr int LANES = D * D / NUMBERS;  // lanes of a head
static_assert(LANES<8> * 8 == 32 && LANES<16> * 2 == 32, "a warp has whole heads");
static_assert(NUMBERS % 16 == 0, "a lane has whole rows of a head's state");

// The base's tile gv is overwritten by dgv.
template <typename T, typename G, int D, bool GATED> struct Stage : ColumnGates<Tile<G, D, LANES<D>>, GATED> {
  Tile<T, D, LANES<D>> q, k;  // overwritten by dq and dk
  Tile<T, D, LANES<D>> v, do_;
  Tile<G, D, LANES<D>> g;  // overwritten by dg
  union {
    float4 step_states[NUMBERS / 4][32];  // S before the step, [4 numbers][lane]
    Tile<T, D, LANES<D>> dv;              // overwrites `step_states`
  };
};
template <typename T, typename G, int D, bool GATED> struct Shared {
  struct Warp : ColumnGates<Tile<float, D, LANES<D>>, GATED> {  // its gv: decays of columns
    Stage<T, G, D, GATED> stages[2];
    Tile<float, D, LANES<D>> decays;
  } warps[WARPS];
};

// A lane's gradients of a token, in its rows of the state; dv and dgv without the rows of other lanes.
template <int ROWS, int D> struct TokenGradients {
  float dq[ROWS] = {}, dk[ROWS] = {}, dg[ROWS] = {}, dv[D], dgv[D] = {};
};
// Computes them from S, the state before the token, and dS, the gradient of the state after it by later tokens, which
// becomes that of the state before it. a, b: the token's decays of channels and columns, as next_number takes them
// (with_next_number). Adds the token's term to du.
template <bool BEFORE, bool GATED, int ROWS, int D, class Next>
__device__ __forceinline__ void set_gradients(TokenGradients<ROWS, D>& x, const float (&q)[ROWS],
                                              const float (&k)[ROWS], const float (&a)[ROWS], const float (&v)[D],
                                              const float (&do_)[D], const float (&b)[D], const float (&S)[ROWS][D],
                                              float (&dS)[ROWS][D], const float (&u)[ROWS], float (&du)[ROWS],
                                              float scale, Next next_number) {
  float self_weight = 0.f;  // scale do_t . v_t
#pragma unroll
  for (int column = 0; column < D; ++column) self_weight = fmaf(v[column], do_[column], self_weight);
  self_weight *= scale;
  float self_score = 0.f;  // q_t . u k_t
#pragma unroll
  for (int c = 0; c < ROWS; ++c) self_score = fmaf(u[c] * q[c], k[c], self_score);
#pragma unroll
  for (int column = 0; column < D; ++column) x.dv[column] = BEFORE ? scale * self_score * do_[column] : 0.f;
#pragma unroll
  for (int c = 0; c < ROWS; ++c) {
    const float scaled_q = scale * q[c];
#pragma unroll
    for (int column = 0; column < D; ++column) {
      const float dS_after = BEFORE ? dS[c][column] : fmaf(scaled_q, do_[column], dS[c][column]);
      const float read = GATED ? next_number(S[c][column], a[c], b[column], 0.f) : S[c][column];
      x.dq[c] = fmaf(read, do_[column], x.dq[c]);
      x.dk[c] = fmaf(dS_after, v[column], x.dk[c]);
      x.dv[column] = fmaf(k[c], dS_after, x.dv[column]);
      const float decayed = next_number(dS_after, a[c], b[column], 0.f);
      x.dg[c] = fmaf(S[c][column], decayed, x.dg[c]);
      if (GATED) x.dgv[column] = fmaf(S[c][column], decayed, x.dgv[column]);
      dS[c][column] = BEFORE ? fmaf(scaled_q, do_[column], decayed) : decayed;
    }
    x.dq[c] = fmaf(BEFORE || GATED ? scale : scale * a[c], x.dq[c], self_weight * u[c] * k[c]);
    if (BEFORE) {
      x.dk[c] = fmaf(self_weight * u[c], q[c], x.dk[c]);
      du[c] = fmaf(self_weight * q[c], k[c], du[c]);
    }
  }
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: the type of q, k, v and do; G: that of g,
// gv, dg and dgv. GATED: whether columns have gates gv, too.
template <class ReadOrder, typename T, typename G, int D, bool GATED>
__global__ void __launch_bounds__(32 * WARPS, 4) gated_small_backward(const Args<T, G> args) {
  constexpr int ROWS = NUMBERS / D, LANE_COLUMNS = D / LANES<D>;  // of a lane: channels of the state, columns of dv
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  static_assert(!(GATED && BEFORE), "columns have gates in GLA only");
  using Inputs = Tile<T, D, LANES<D>>;
  const int warp = threadIdx.x >> 5;
  auto& s = reinterpret_cast<Shared<T, G, D, GATED>*>(dynamic_smem())->warps[warp];
  const Shape& shape = args.shape;
  const LaneCoord<LANES<D>> coord;
  const Work work = work_of(shape, (blockIdx.x * WARPS + warp) * Inputs::HEADS + coord.head);
  const int K = int(shape.K), V = int(shape.V), bytes = int(args.bytes), channel = ROWS * coord.lane;
  const float scale = float(args.scale);

  using State = float[ROWS][D];
  // Calls f(number of S, its index in states [.., H, K, V] of memory) for this lane's numbers of the state of sequence
  // or segment n.
  const auto each_number = [&](State& S, i64 n, auto f) {
    const i64 first = ((n * shape.H + work.h) * K + channel) * V;
#pragma unroll
    for (int c = 0; c < ROWS; ++c)
#pragma unroll
      for (int x = 0; x < D; ++x)
        if (work.n >= 0 && channel + c < K && x < V) f(S[c][x], first + c * V + x);
  };
  // The row of step_states of the segment's first step; a chunk of `shape` is such a step.
  const i64 first_state =
      (work.b * shape.NC + (work.n < 0 ? 0 : chunks_of(shape, work.n % shape.row_sequences).start)) * shape.H + work.h;
  // This lane's first four numbers of the stored state before the step that starts at `token`.
  const auto state_at = [&](int token) {
    return reinterpret_cast<float4*>(args.step_states) +
           (first_state + token / STEP * shape.H) * (NUMBERS / 4 * LANES<D>)+coord.lane;
  };
  // The addresses of rows, in memory and in tiles, are computed each time: registers to hold them are too few.
  const auto fetch_rows = [&](auto& to, const auto& rows, int token, int width) {
    const LaneCoord<LANES<D>> coord(opaque(threadIdx.x));
    fetch(to, lane_rows(to, rows, work, coord.lane), coord.head, coord.lane, token, work.tokens - token, width, bytes);
  };
  // Starts copying k, v and g, which the walk forwards needs, of the step that starts at `token`.
  const auto fetch_keys = [&](Stage<T, G, D, GATED>& to, int token) {
    fetch_rows(to.k, args.k, token, K), fetch_rows(to.v, args.v, token, V), fetch_rows(to.g, args.g, token, K);
    if constexpr (GATED) fetch_rows(to.gv, args.gv, token, V);
  };
  // Starts copying all inputs of the step, and the state stored before it; closes the group of copies.
  const auto fetch_all = [&](Stage<T, G, D, GATED>& to, int token) {
    fetch_keys(to, token);
    fetch_rows(to.q, args.q, token, K), fetch_rows(to.do_, args.do_, token, V);
#pragma unroll
    for (int n = 0; n < NUMBERS / 4; ++n)
      cp_async<16>(&to.step_states[n][threadIdx.x & 31], state_at(token) + n * LANES<D>, token < work.tokens);
    cp_async_commit();
  };
  // Stores the step's decays, or its gates if they grow; returns whether they do.
  const auto put_all_decays = [&](const Stage<T, G, D, GATED>& in) {
    const bool growing = grows<GATED>(in, coord.head, coord.lane);
    put_decays(s.decays, in.g, coord.head, coord.lane, growing);
    if constexpr (GATED) put_decays(s.gv, in.gv, coord.head, coord.lane, growing);
    return growing;
  };
  // Loads the decays of token i of the step.
  const auto load_decays = [&](float (&a)[ROWS], float (&b)[D], int i) {
    s.decays.load_row(a, i, coord.head, channel);
    if constexpr (GATED) s.gv.load_row(b, i, coord.head);
  };
  // Computes the state after token i of the step from the state before it.
  const auto next_state = [&](State& after, const State& before, const Stage<T, G, D, GATED>& in, int i,
                              auto next_number) {
    float k[ROWS], a[ROWS], v[D], b[D] = {};
    in.k.load_row(k, i, coord.head, channel), in.v.load_row(v, i, coord.head), load_decays(a, b, i);
#pragma unroll
    for (int c = 0; c < ROWS; ++c)
#pragma unroll
      for (int x = 0; x < D; ++x) after[c][x] = next_number(before[c][x], a[c], b[x], k[c] * v[x]);
  };

  const int longest = largest_of_warp<LANES<D>>(work.tokens), last_step = (longest - 1) / STEP * STEP;
  if (longest) {
    State S = {};
    if (args.starts) each_number(S, work.n, [&](float& x, i64 place) { x = args.starts[place]; });
    fetch_keys(s.stages[0], 0);
    cp_async_commit();
#pragma unroll 1
    for (int token = 0, stage = 0; token <= last_step; token += STEP, stage ^= 1) {
      const Stage<T, G, D, GATED>& in = s.stages[stage];
      if (token < work.tokens) {
        float4* to = state_at(token);
#pragma unroll
        for (int n = 0; n < NUMBERS / 4; ++n) {
          const float* x = &S[4 * n / D][4 * n % D];
          to[n * LANES<D>] = {x[0], x[1], x[2], x[3]};
        }
      }
      if (token == last_step) break;
      cp_async_wait<0>();
      __syncwarp();  // all lanes have copied the step
      const bool growing = put_all_decays(in);
      __syncwarp();  // the decays are in shared memory
      if (token + STEP < last_step) {
        fetch_keys(s.stages[stage ^ 1], token + STEP);
        cp_async_commit();
      }
      with_next_number<GATED>(growing, [&](auto next_number) {
#pragma unroll
        for (int i = 0; i < STEP; ++i) next_state(S, S, in, i, next_number);  // each number depends on itself only
      });
      __syncwarp();  // the step has been read: its stage may be filled again
    }
    cp_async_wait<0>();
    __syncwarp();  // all lanes' copies have ended: the stage of the last step may be filled
    fetch_all(s.stages[last_step / STEP % 2], last_step);
  }

  State dS = {};  // the gradient of the state before those tokens whose gradients have been computed
  if (args.ends) each_number(dS, work.n, [&](float& x, i64 place) { x = args.ends[place]; });
  float u[ROWS], du[ROWS] = {};
#pragma unroll
  for (int c = 0; c < ROWS; ++c) u[c] = BEFORE && channel + c < K ? args.u[work.h * K + channel + c] : 1.f;
#pragma unroll 1
  for (int token = last_step; longest && token >= 0; token -= STEP) {
    Stage<T, G, D, GATED>& in = s.stages[token / STEP % 2];
    cp_async_wait<0>();
    __syncwarp();  // all lanes have copied the step
    const bool growing = put_all_decays(in);
    __syncwarp();  // the decays are in shared memory
    if (token) fetch_all(s.stages[token / STEP % 2 ^ 1], token - STEP);
    State S[STEP];  // before each token
#pragma unroll
    for (int n = 0; n < NUMBERS / 4; ++n) {
      const float4 x = in.step_states[n][threadIdx.x & 31];
      float* to = &S[0][4 * n / D][4 * n % D];
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    with_next_number<GATED>(growing, [&](auto next_number) {
#pragma unroll
      for (int i = 0; i + 1 < STEP; ++i) next_state(S[i + 1], S[i], in, i, next_number);
      __syncwarp();  // the stored state has been read, which dv overwrites
#pragma unroll
      for (int i = STEP - 1; i >= 0; --i) {
        float q[ROWS], k[ROWS], a[ROWS], v[D], do_[D], b[D] = {};
        in.q.load_row(q, i, coord.head, channel), in.k.load_row(k, i, coord.head, channel), load_decays(a, b, i);
        in.v.load_row(v, i, coord.head), in.do_.load_row(do_, i, coord.head);
        TokenGradients<ROWS, D> gradients;
        set_gradients<BEFORE, GATED>(gradients, q, k, a, v, do_, b, S[i], dS, u, du, scale, next_number);
        in.q.put(gradients.dq, i, coord.head, channel), in.k.put(gradients.dk, i, coord.head, channel);
        in.g.put(gradients.dg, i, coord.head, channel);
        // Stores this lane's columns of x, summed over the lanes of the head.
        const auto put_columns = [&](auto& to, float (&x)[D]) {
          sum_and_share<D, LANES<D> / 2, 1>(x);  // lanes.cuh: a lane keeps LANE_COLUMNS of the sums, in x[0] on
          float own[LANE_COLUMNS];
#pragma unroll
          for (int n = 0; n < LANE_COLUMNS; ++n) own[n] = x[n];
          to.put(own, i, coord.head, LANE_COLUMNS * coord.lane);
        };
        put_columns(in.dv, gradients.dv);
        if constexpr (GATED) put_columns(in.gv, gradients.dgv);
      }
    });
    __syncwarp();  // the gradients are in shared memory; the step has been read
    const auto put = [&](const auto& tile, const auto& rows, int width) {
      const LaneCoord<LANES<D>> coord(opaque(threadIdx.x));
      store(tile, lane_rows(tile, rows, work, coord.lane), coord.head, coord.lane, token, work.tokens - token, width,
            bytes);
    };
    put(in.q, args.dq, K), put(in.k, args.dk, K), put(in.g, args.dg, K), put(in.dv, args.dv, V);
    if constexpr (GATED) put(in.gv, args.dgv, V);
  }
  if (args.dh0 && work.n % args.P == 0)
    each_number(dS, work.n / args.P, [&](float& x, i64 place) { args.dh0[place] = x; });
  if (BEFORE)
#pragma unroll
    for (int c = 0; c < ROWS; ++c)
      if (work.n >= 0 && channel + c < K) args.partial_du[(work.n * shape.H + work.h) * K + channel + c] = du[c];
}

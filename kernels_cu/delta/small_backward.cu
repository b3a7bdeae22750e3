// what      The gradients of the delta rules, token by token, with heads of at most 16 channels and columns. Without
//           OUTPUTS the G' of a segment, which takes the gradient dS of the state after it to F^T dS + G' before it; F
//           is small_forward.cu's
// math      Template argument Rule; Dplr is RWKV-7's. With S' = diag(exp g_t) S_{t-1}, forwards o_t = scale S_t^T q_t,
//           GatedDelta, Kda: e = v - S'^T k, S_t = S' + k (beta e)^T
//           Dplr: p = S_{t-1}^T a, S_t = S' + b p^T + k v^T
//           Backwards, dS being the gradient of the state after a token: dS <- dS + scale q do^T, then
//           GatedDelta, Kda: u = dS^T k, dv = beta u, dbeta = u . e, dk = dS beta e - S' dv,
//           dS' = dS - k dv^T, dg = sums of dS' S' over columns, dS <- diag(exp g) dS'
//           Dplr: dp = dS^T b, dv = dS^T k, dk = dS v, db = dS p, da = S_{t-1} dp,
//           dg = sums of dS S' over columns, dS <- diag(exp g) dS + a dp^T
//           all: dq = scale S_t do. Of GatedDelta dg is summed over channels, too. e and p are called residuals
//           If args.normalized, q and k above are the given ones divided by their lengths; their gradients are those of
//           the given ones
//           G' is the dS before a segment if that after it is zero, or, of the sequence's last one, dht
// shapes    q k a b [B, H, T, K], v do dv [B, HV, T, V], g [B, HV, T] (GatedDelta) or [B, HV, T, K], beta [B, HV, T],
//           states [N, HV, K, V]; gradients like their arrays; parts [2, B, HV, T, K]: if args.group heads of values
//           share a head of the rest, terms of the gradients of the divided q and k, which sum_parts.cu adds up.
//           step_states [B, NC, HV, D D]: the state before each of the NC steps of 8 tokens of a batch row, in the
//           order of lanes' registers. starts [2, segments, HV, K, V]: [0] the states before segments; [1] G', each in
//           the place of the segment before; then, from join_segments.cu, the gradients of the states after these
//           segments
// grid      a warp for every 512 / (D D) value heads of all sequences or segments, sequence slowest; a lane has 4
//           channels of 4 columns of a state
// smem      two stages, each of a step of 8 tokens and the state before it, which gradients overwrite; what is computed
//           once for every token of a step: decays of channels, Factors, residuals, gradients of scalars
// barriers  of warps. Forwards three a step: the step has been copied | decays and factors are in shared memory | the
//           step has been read. Backwards three: the step and the state before it have been copied | decays and factors
//           are in shared memory | gradients are, and the step has been read. With OUTPUTS, before the last one:
//           residuals are, and the state has been read, which dv overwrites | each token has been read, which its
//           gradients overwrite
// numerics  float32 throughout. The states within a step are computed again from that before it. If a state or gradient
//           at a border of segments is not finite, since numbers grew when segments were joined, the last segment's
//           lanes compute the whole sequence of this head, and those of other segments nothing
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K, V <= D; D of 8, 16
// tests     test_delta_kernels
#include "gated/small_heads.cuh"
#include "delta/segments.cuh"
#include "delta/tokens.cuh"

// From the includes:
//   Tile: tokens of a warp's heads in shared memory; STEP = 8: tokens of a step
//   Work, work_of: a head, its tokens, and n, the number of its sequence or segment, -1 if the lane has no head;
//     LaneCoord: the lane's head of the warp, its number in that head
//   fetch, store: copy a step's rows; lane_rows: where the lane's pieces of them are in memory; put_decays: stores e^g
//     of gates g; HEADS: heads of a warp
//   DeltaArgs: the arguments of kernels token by token. shape.H: heads of values (HV); P: segments of a sequence;
//     bytes: rows start on, and are multiples of, so many bytes
//   LEAST_SQUARE = 1e-6 is added to the square of a length; converted_once<float>(x): x, which the compiler does not
//     convert again. Of rules, channel_gates: a gate for every channel; own_erasure: a and b beside k
//   segment_of: a Segment: its tokens and chunks, here steps; `last`: the walk comes to it last; `from`, the gradient
//     that it starts from, null for zeros; `to`, where its last one goes, null for nowhere: dh0, or, without OUTPUTS,
//     in `starts`. The walk's first segment starts from dht, with OUTPUTS others from `starts`. If the last argument
//     is true, the walk's first segment has all tokens and is its last one, too; the others have none
//   sum_and_share<N, FIRST, LAST>(x): sums each of N numbers over the lanes that differ in the bits FIRST, FIRST / 2,
//     ... LAST. These share the sums: with two lanes each keeps N / 2 of them, with four N / 4, in x[0] and on

constexpr int BLOCK = 4;  // a lane has BLOCK channels of BLOCK columns
using State = float[BLOCK][BLOCK];
static_assert(sizeof(float[BLOCK]) == sizeof(float4), "a row is stored as a float4");
template <int D> constexpr int ACROSS = D / BLOCK;             // lanes that share channels, or columns
template <int D> constexpr int LANES = ACROSS<D> * ACROSS<D>;  // of a head
template <typename E, int D> using StepTile = Tile<E, D, LANES<D>>;

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  StridedRows<const T> do_;
  StridedRows<const float> dht;  // null: zeros
  StridedRows<float> dh0;        // null: not wanted
  StridedRows<T> dq, dk, da, db, dv;
  StridedRows<G> dg, dbeta;    // dg null: not wanted, of GatedDelta only
  float *step_states, *parts;  // parts null: only if args.group is 1; else heads would store the same dq
};

template <bool OWN_ERASURE, typename T, int D> struct ErasureTiles {
  StepTile<T, D> a, b;  // overwritten by da and db
};
template <typename T, int D> struct ErasureTiles<false, T, D> {};
template <class Rule, typename T, typename G, int D> struct Stage : ErasureTiles<Rule::own_erasure, T, D> {
  StepTile<T, D> q, k;  // overwritten by dq and dk
  StepTile<T, D> v, do_;
  StepTile<G, D> g;  // of channels; overwritten by dg
  union {
    float4 state[BLOCK][32];  // before the step, [row of a lane][lane]
    StepTile<T, D> dv;        // overwrites `state`
  };
};
// The numbers of a token of a head: its decay, if channels share one; beta; the inverse lengths of q and k.
struct alignas(16) Factors {
  float decay, beta, of_q, of_k;
};
struct ScalarGradients {
  float dbeta, dg;
};
template <class Rule, typename T, typename G, int D> struct Shared {
  Stage<Rule, T, G, D> stages[2];
  StepTile<float, D> decays, residuals;
  Factors factors[STEP][32 / LANES<D>];  // by token and head
  ScalarGradients scalars[STEP][32 / LANES<D>];
};

// Of a step the lane loads and stores the numbers (gate, beta) of tokens `lane`, `lane` + LANES, ...
template <int D> constexpr int LANE_TOKENS = (STEP + LANES<D> - 1) / LANES<D>;
// Calls f(n, token of the step) for the lane's n-th such token.
template <int D, class F> __device__ __forceinline__ void each_token(int lane, F f) {
#pragma unroll
  for (int n = 0; n < LANE_TOKENS<D>; ++n)
    if (lane + n * LANES<D> < STEP) f(n, lane + n * LANES<D>);
}

// Sums N numbers x over the lanes that have other channels of the same columns; all get the sums.
template <int D, int N> __device__ __forceinline__ void sum_over_channels(float (&x)[N]) {
#pragma unroll
  for (int distance = ACROSS<D>; distance < LANES<D>; distance *= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] += __shfl_xor_sync(0xffffffffu, x[n], distance);
}
// How many of BLOCK sums over columns a lane keeps. Of its BLOCK channels the first of these has the number OWN<D> *
// (lane % ACROSS<D>).
template <int D> constexpr int OWN = BLOCK / ACROSS<D>;

// What a lane keeps of its head through both directions of time, and what it does with a step or a token of it.
template <class Rule, typename T, typename G, int D, bool OUTPUTS> struct Walk {
  using Storage = Stage<Rule, T, G, D>;
  static constexpr bool DPLR = Rule::own_erasure;

  const Args<T, G>& args;
  Shared<Rule, T, G, D>& s;
  const LaneCoord<LANES<D>> coord;
  const int K, V, channel, column;                 // channel, column: of the first of this lane's numbers of a state
  Work work, keys;                                 // the head of `keys` is that of q, k, a and b
  i64 first_state;                                 // the number in args.step_states of the state before the first step
  G gates[LANE_TOKENS<D>], betas[LANE_TOKENS<D>];  // of the step that is copied

  __device__ __forceinline__ Walk(const Args<T, G>& args)
      : args(args),
        s(*reinterpret_cast<Shared<Rule, T, G, D>*>(dynamic_smem())),
        K(int(args.shape.K)),
        V(int(args.shape.V)),
        channel(coord.lane / ACROSS<D> * BLOCK),
        column(coord.lane % ACROSS<D> * BLOCK),
        work(work_of(args.shape, blockIdx.x * StepTile<T, D>::HEADS + coord.head)) {}

  // Whether the state at the last border of segments, in this direction, is not finite: then join_segments.cu has made
  // its channels 0 and 1 NaN. Reads channel 0.
  __device__ __forceinline__ bool is_grown(bool backwards) {
    const Shape& shape = args.shape;
    const int P = int(args.P);
    const i64 n = backwards * shape.B * shape.row_sequences + work.n / P * P + (backwards ? 0 : P - 1);
    bool grown = false;
    for (int x = coord.lane; work.n >= 0 && x < V; x += LANES<D>)
      grown |= !is_finite(args.starts[(n * shape.H + work.h) * K * V + x]);
    return grown;
  }
  // The lane's head has these tokens; without any, if no segment takes the G' of them.
  __device__ __forceinline__ void take(const Segment<float>& segment) {
    if (!OUTPUTS && segment.last) work.n = -1;
    work.start = segment.tokens.start, work.tokens = work.n < 0 ? 0 : int(segment.tokens.stop - segment.tokens.start);
    keys = work, keys.h /= int(args.group);
    first_state = (work.b * args.shape.NC + segment.chunks.start) * args.shape.H + work.h;
  }

  // Calls f(number of S, its place in a state in memory) for this lane's numbers.
  template <class F> __device__ __forceinline__ void each_number(State& S, F f) {
#pragma unroll
    for (int c = 0; c < BLOCK; ++c)
#pragma unroll
      for (int x = 0; x < BLOCK; ++x)
        if (work.n >= 0 && channel + c < K && column + x < V) f(S[c][x], (channel + c) * V + column + x);
  }
  // This lane's first four numbers of the stored state before the step that starts at `token`; of the next four, LANES
  // further on.
  static_assert(BLOCK * LANES<D> * 4 == D * D, "the lanes' float4 are a state");
  __device__ __forceinline__ float4* state_at(int token) {
    return reinterpret_cast<float4*>(args.step_states) +
           (first_state + token / STEP * args.shape.H) * (BLOCK * LANES<D>)+coord.lane;
  }

  // ---- a step -------------------------------------------------------------------------------------------------------
  // The addresses of rows, in memory and in tiles, are computed each time: registers to hold them are too few.
  template <class Step, class Rows>
  __device__ __forceinline__ void copy(Step& to, const Rows& rows, const Work& head, int token, int width) {
    const LaneCoord<LANES<D>> coord(opaque(threadIdx.x));
    fetch(to, lane_rows(to, rows, head, coord.lane), coord.head, coord.lane, token, work.tokens - token, width,
          int(args.bytes));
  }
  template <class Step, class Rows>
  __device__ __forceinline__ void put_back(const Step& tile, const Rows& rows, const Work& head, int token, int width) {
    const LaneCoord<LANES<D>> coord(opaque(threadIdx.x));
    store(tile, lane_rows(tile, rows, head, coord.lane), coord.head, coord.lane, token, work.tokens - token, width,
          int(args.bytes));
  }
  __device__ __forceinline__ void load(G (&to)[LANE_TOKENS<D>], const StridedRows<const G>& from, int token) {
    each_token<D>(coord.lane, [&](int n, int i) {
      to[n] = token + i < work.tokens ? *from.row(work.b, work.h, work.start + token + i) : from_float<G>(0.f);
    });
  }
  // Starts to copy the step that starts at `token`, and loads its scalars, once take_step has stored those of the step
  // before. backwards: what that walk alone reads, too.
  __device__ __forceinline__ void fetch_step(Storage& to, int token, bool backwards) {
    copy(to.k, args.k, keys, token, K);
    if constexpr (Rule::channel_gates) copy(to.g, args.g, work, token, K);
    if constexpr (DPLR) copy(to.a, args.a, keys, token, K), copy(to.b, args.b, keys, token, K);
    if (OUTPUTS) copy(to.v, args.v, work, token, V);
    if (backwards) copy(to.q, args.q, keys, token, K), copy(to.do_, args.do_, work, token, V);
    if (OUTPUTS && backwards)
#pragma unroll
      for (int n = 0; n < BLOCK; ++n)
        cp_async<16>(&to.state[n][threadIdx.x], state_at(token) + n * LANES<D>, token < work.tokens);
    if constexpr (!Rule::channel_gates) load(gates, args.g, token);
    if constexpr (!DPLR) load(betas, args.beta, token);
    cp_async_commit();
  }
  __device__ __forceinline__ float inverse_length(const StepTile<T, D>& tile, int i) {
    float x[D], square = float(LEAST_SQUARE);
    tile.load_row(x, i, coord.head);
#pragma unroll
    for (int c = 0; c < D; ++c) square = fmaf(x[c], x[c], square);
    return inverse_root(square);
  }
  // Waits for the step that is copied, and stores its decays and factors. with_q: whether that of q, too.
  __device__ __forceinline__ void take_step(const Storage& in, bool with_q) {
    cp_async_wait<0>();
    __syncwarp();  // all lanes have copied the step
    if constexpr (Rule::channel_gates) put_decays(s.decays, in.g, coord.head, coord.lane);
    if constexpr (!DPLR)
      each_token<D>(coord.lane, [&](int n, int i) {
        s.factors[i][coord.head] = {Rule::channel_gates ? 1.f : decay_of(to_float(gates[n])), to_float(betas[n]),
                                    args.normalized && with_q ? inverse_length(in.q, i) : 1.f,
                                    args.normalized ? inverse_length(in.k, i) : 1.f};
      });
    __syncwarp();  // decays and factors are in shared memory
  }
  // Stores a step's gradients, but those that are parts.
  __device__ __forceinline__ void store_gradients(const Storage& from, int token) {
    if (!args.parts) put_back(from.q, args.dq, keys, token, K), put_back(from.k, args.dk, keys, token, K);
    put_back(from.dv, args.dv, work, token, V);
    if constexpr (DPLR) put_back(from.a, args.da, keys, token, K), put_back(from.b, args.db, keys, token, K);
    if constexpr (Rule::channel_gates) put_back(from.g, args.dg, work, token, K);
    if constexpr (!DPLR)
      each_token<D>(coord.lane, [&](int, int i) {
        if (token + i >= work.tokens) return;
        const ScalarGradients& x = s.scalars[i][coord.head];
        *args.dbeta.row(work.b, work.h, work.start + token + i) = from_float<G>(x.dbeta);
        if (!Rule::channel_gates && args.dg.p)
          *args.dg.row(work.b, work.h, work.start + token + i) = from_float<G>(x.dg);
      });
  }

  // ---- a token ------------------------------------------------------------------------------------------------------
  // Its factors, and in the lane's channels k and decays.
  struct Key {
    float k[BLOCK], decays[BLOCK];
    Factors factors;
  };
  __device__ __forceinline__ void load_key(Key& key, const Storage& in, int i) {
    in.k.load_row(key.k, i, coord.head, channel);
    if constexpr (!DPLR) key.factors = s.factors[i][coord.head];
    if constexpr (Rule::channel_gates) s.decays.load_row(key.decays, i, coord.head, channel);
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
      if (!DPLR) key.k[c] *= key.factors.of_k;
      if (!Rule::channel_gates) key.decays[c] = key.factors.decay;
    }
  }
  // Computes the state after token i of the step from that before it, and the token's residual. `after` may be
  // `before`: a number needs itself, and sums.
  __device__ __forceinline__ void next_state(State& after, const State& before, const Storage& in, int i,
                                             float (&residual)[BLOCK]) {
    Key key;
    float v[BLOCK], a[BLOCK], b[BLOCK];
    load_key(key, in, i), in.v.load_row(v, i, coord.head, column);
    if constexpr (DPLR) in.a.load_row(a, i, coord.head, channel), in.b.load_row(b, i, coord.head, channel);
#pragma unroll
    for (int x = 0; x < BLOCK; ++x) {
      residual[x] = 0.f;
#pragma unroll
      for (int c = 0; c < BLOCK; ++c) {
        const float decayed = key.decays[c] * before[c][x];
        residual[x] = DPLR ? fmaf(a[c], before[c][x], residual[x]) : fmaf(key.k[c], decayed, residual[x]);
        after[c][x] = decayed;
      }
    }
    sum_over_channels<D>(residual);
#pragma unroll
    for (int x = 0; x < BLOCK; ++x) {
      if (!DPLR) residual[x] = v[x] - residual[x];
      const float written = DPLR ? v[x] : key.factors.beta * residual[x];
#pragma unroll
      for (int c = 0; c < BLOCK; ++c) {
        after[c][x] = fmaf(key.k[c], written, after[c][x]);
        if (DPLR) after[c][x] = fmaf(b[c], residual[x], after[c][x]);
      }
    }
  }
  // What the gradients of a token take; of the given q and do: q divided by its length, do times the scale.
  struct Token : Key {
    float q[BLOCK], a[BLOCK], b[BLOCK], do_[BLOCK];
    float residual[BLOCK],
        written[BLOCK];  // written: what the token writes along k; v of Dplr, else load_token leaves v
  };
  __device__ __forceinline__ void load_token(Token& token, const Storage& in, int i, float scale) {
    load_key(token, in, i);
    in.q.load_row(token.q, i, coord.head, channel), in.do_.load_row(token.do_, i, coord.head, column);
    if constexpr (DPLR) {
      in.a.load_row(token.a, i, coord.head, channel), in.b.load_row(token.b, i, coord.head, channel);
      if (OUTPUTS) in.v.load_row(token.written, i, coord.head, column);
    }
    if (OUTPUTS) s.residuals.load_row(token.residual, i, coord.head, column);
#pragma unroll
    for (int x = 0; x < BLOCK; ++x) {
      if (!DPLR) token.q[x] *= token.factors.of_q, token.written[x] = token.factors.beta * token.residual[x];
      token.do_[x] *= scale;
    }
  }
  // Sums over the lane's columns, or, of dv, over all channels.
  struct TokenGradients {
    float dq[BLOCK], dk[BLOCK], da[BLOCK], db[BLOCK], dg[BLOCK], dv[BLOCK];
    ScalarGradients scalars;
  };
  // Takes dS, the gradient of the state after a token, to that of the state before it.
  __device__ __forceinline__ TokenGradients step_back(State& dS, const Token& token, const State& before,
                                                      const State& after) {
    TokenGradients sums = {};
    float u[BLOCK] = {}, dp[BLOCK] = {};  // u: dS^T k
#pragma unroll
    for (int c = 0; c < BLOCK; ++c)
#pragma unroll
      for (int x = 0; x < BLOCK; ++x) {
        dS[c][x] = fmaf(token.q[c], token.do_[x], dS[c][x]), u[x] = fmaf(token.k[c], dS[c][x], u[x]);
        if (DPLR) dp[x] = fmaf(token.b[c], dS[c][x], dp[x]);
      }
    sum_over_channels<D>(u);
    if constexpr (DPLR) sum_over_channels<D>(dp);
#pragma unroll
    for (int x = 0; x < BLOCK; ++x) {
      sums.dv[x] = DPLR ? u[x] : u[x] * token.factors.beta;
      if (!DPLR) sums.scalars.dbeta = fmaf(u[x], token.residual[x], sums.scalars.dbeta);
    }
#pragma unroll
    for (int c = 0; c < BLOCK; ++c)
#pragma unroll
      for (int x = 0; x < BLOCK; ++x) {
        const float decayed = token.decays[c] * before[c][x];
        float& number = dS[c][x];  // each line takes it as the lines before have left it
        sums.dq[c] = fmaf(after[c][x], token.do_[x], sums.dq[c]);
        sums.dk[c] = fmaf(number, token.written[x], sums.dk[c]);
        if constexpr (DPLR) {
          sums.da[c] = fmaf(before[c][x], dp[x], sums.da[c]);
          sums.db[c] = fmaf(number, token.residual[x], sums.db[c]);
          sums.dg[c] = fmaf(number, decayed, sums.dg[c]);
          number = fmaf(token.decays[c], number, token.a[c] * dp[x]);
        } else {
          sums.dk[c] = fmaf(-decayed, sums.dv[x], sums.dk[c]);
          number = fmaf(-token.k[c], sums.dv[x], number);
          sums.dg[c] = fmaf(number, decayed, sums.dg[c]);
          number *= token.decays[c];
        }
      }
    return sums;
  }
  // Makes the gradients of q and k divided by their lengths those of the given q and k, which have nothing along them.
  __device__ __forceinline__ void divide_by_lengths(TokenGradients& sums, const Token& token) {
    float along[2] = {};  // what the gradients have along q and k, in the lane's columns
#pragma unroll
    for (int c = 0; c < BLOCK; ++c)
      along[0] = fmaf(token.q[c], sums.dq[c], along[0]), along[1] = fmaf(token.k[c], sums.dk[c], along[1]);
    sum_over_channels<D>(along);
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
      sums.dq[c] = token.factors.of_q * fmaf(-token.q[c], along[0], sums.dq[c]);
      sums.dk[c] = token.factors.of_k * fmaf(-token.k[c], along[1], sums.dk[c]);
    }
  }
  // Sums x over columns; puts the sums of this lane's own channels in token i of a tile, or in a row of args.parts.
  template <class Step> __device__ __forceinline__ void put_sums(Step& tile, float (&x)[BLOCK], int i) {
    float own[OWN<D>];
    own_sums(own, x);
    tile.put(own, i, coord.head, own_channel());
  }
  __device__ __forceinline__ void put_part(int part, float (&x)[BLOCK], int token) {
    float own[OWN<D>];
    own_sums(own, x);
    const i64 head = (part * args.shape.B + work.b) * args.shape.H + work.h;
    float* row = args.parts + (head * args.shape.T + work.start + token) * K;
    for (int n = 0; n < OWN<D> && token < work.tokens && own_channel() + n < K; ++n) row[own_channel() + n] = own[n];
  }
  __device__ __forceinline__ int own_channel() { return channel + OWN<D> * (coord.lane % ACROSS<D>); }
  __device__ __forceinline__ void own_sums(float (&own)[OWN<D>], float (&x)[BLOCK]) {
    sum_and_share<BLOCK, ACROSS<D> / 2, 1>(x);
#pragma unroll
    for (int n = 0; n < OWN<D>; ++n) own[n] = x[n];
  }
  // Overwrites token i of the step that starts at `first` with its gradients, which are then complete.
  __device__ __forceinline__ void put_gradients(Storage& in, TokenGradients& sums, int first, int i) {
    if (args.parts) put_part(0, sums.dq, first + i), put_part(1, sums.dk, first + i);
    else put_sums(in.q, sums.dq, i), put_sums(in.k, sums.dk, i);
    if constexpr (DPLR) put_sums(in.a, sums.da, i), put_sums(in.b, sums.db, i);
    if constexpr (Rule::channel_gates) put_sums(in.g, sums.dg, i);
    else sums.scalars.dg = sum_over_lanes<LANES<D>>((sums.dg[0] + sums.dg[1]) + (sums.dg[2] + sums.dg[3]));
    if constexpr (!DPLR) {
      sums.scalars.dbeta = sum_over_lanes<ACROSS<D>>(sums.scalars.dbeta);
      if (coord.lane == 0) s.scalars[i][coord.head] = sums.scalars;
    }
    if (channel == 0) in.dv.put(sums.dv, i, coord.head, column);
  }

  // ---- all steps ----------------------------------------------------------------------------------------------------
  // Forwards in time: stores the state before every step, from the state `start` on, null for zeros.
  __device__ __forceinline__ void store_states(const float* start, int last_step) {
    State S = {};
    if (start) each_number(S, [&](float& x, int place) { x = start[place]; });
    if (last_step) fetch_step(s.stages[0], 0, false);
#pragma unroll 1
    for (int token = 0, stage = 0; token <= last_step; token += STEP, stage ^= 1) {
      if (token < work.tokens)
#pragma unroll
        for (int n = 0; n < BLOCK; ++n) state_at(token)[n * LANES<D>] = {S[n][0], S[n][1], S[n][2], S[n][3]};
      if (token == last_step) break;
      const Storage& in = s.stages[stage];
      take_step(in, false);
      if (token + STEP < last_step) fetch_step(s.stages[stage ^ 1], token + STEP, false);
      float residual[BLOCK];
#pragma unroll
      for (int i = 0; i < STEP; ++i) next_state(S, S, in, i, residual);
      __syncwarp();  // the step has been read
    }
    cp_async_wait<0>();
    __syncwarp();  // all lanes' copies have ended
  }
  // Computes the states of a step again, S[i] before token i, S[STEP] behind the last one, and its residuals.
  __device__ __forceinline__ void states_of_step(State (&S)[STEP + 1], const Storage& in) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const float4 x = in.state[n][threadIdx.x];
      S[0][n][0] = x.x, S[0][n][1] = x.y, S[0][n][2] = x.z, S[0][n][3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
      float residual[BLOCK];
      next_state(S[i + 1], S[i], in, i, residual);
      if (channel == 0) s.residuals.put(residual, i, coord.head, column);
    }
    __syncwarp();  // residuals are in shared memory; the stored state has been read, which dv overwrites
  }
  // Backwards in time: the gradients, step after step. dS: the gradient of the state after the last token; then that of
  // the state before the first one.
  __device__ __forceinline__ void gradients(State& dS, int last_step) {
    const float scale = converted_once<float>(args.scale);
    fetch_step(s.stages[last_step / STEP % 2], last_step, true);  // a step's stage: by its number's parity
#pragma unroll 1
    for (int first = last_step; first >= 0; first -= STEP) {
      Storage& in = s.stages[first / STEP % 2];
      take_step(in, true);
      if (first) fetch_step(s.stages[first / STEP % 2 ^ 1], first - STEP, true);
      State S[STEP + 1];  // without OUTPUTS not set: G' does not need it
      if (OUTPUTS) states_of_step(S, in);
#pragma unroll
      for (int i = STEP - 1; i >= 0; --i) {
        Token token = {};
        load_token(token, in, i, scale);
        TokenGradients sums = step_back(dS, token, S[i], S[i + 1]);
        if (!OUTPUTS) continue;
        if (!DPLR && args.normalized && !args.parts) divide_by_lengths(sums, token);
        __syncwarp();  // all lanes have read the token, which its gradients overwrite
        put_gradients(in, sums, first, i);
      }
      __syncwarp();  // the gradients are in shared memory; the step has been read
      if (OUTPUTS) store_gradients(in, first);
    }
  }
};

// The launch bounds: the blocks that share a multiprocessor's registers.
template <class Rule, typename T, typename G, int D, bool OUTPUTS>
__global__ void __launch_bounds__(32, 8) delta_small_backward(const Args<T, G> args) {
  const Shape& shape = args.shape;
  const int P = int(args.P);
  Walk<Rule, T, G, D, OUTPUTS> walk(args);
  const i64 n = walk.work.n;
  const int h = walk.work.h;
  const bool grown = OUTPUTS && P > 1 && (walk.is_grown(FORWARDS) || walk.is_grown(BACKWARDS));
  const bool whole = OUTPUTS && P > 1 && sum_over_lanes<LANES<D>>(grown ? 1.f : 0.f) > 0.f;
  const Segment<float> segment =
      segment_of<BACKWARDS>(OUTPUTS, shape, P, u32(n), h, args.dht, args.starts, args.dh0, whole);
  walk.take(segment);
  const int longest = largest_of_warp<LANES<D>>(walk.work.tokens), last_step = (longest - 1) / STEP * STEP;
  if (OUTPUTS && longest) {
    const float* start = args.starts + (n * shape.H + h) * shape.K * shape.V;
    if (whole || n % P == 0) start = args.initial.p ? args.initial.row(n / P, h, 0) : nullptr;
    walk.store_states(start, last_step);
  }
  State dS = {};
  if (segment.from) walk.each_number(dS, [&](float& x, int place) { x = segment.from[place]; });
  if (longest) walk.gradients(dS, last_step);
  if (segment.to) walk.each_number(dS, [&](float& x, int place) { segment.to[place] = x; });
}

// what      Forward pass of the delta rules, token by token, with heads of at most 16 channels and columns.
// math      Template argument Rule. D = diag(exp g), g log gates of channels; for GatedDelta one g for all channels. S
//           is the state before the token, S' = D S its decay, S+ the state after the token; o = scale S+^T q:
//           GatedDelta, Kda: S+ = S' + k (beta (v - S'^T k))^T
//           Dplr (diagonal plus low rank, RWKV-7): S+ = S' + b (S^T a)^T + k v^T
//           If args.normalized, q and k above are the given ones divided by their Euclidean lengths. The kernel works
//           with the given ones and multiplies sums by the inverse lengths
// shapes    q k a b [B, H, T, K], v o [B, HV, T, V], g [B, HV, T] or [B, HV, T, K], beta [B, HV, T], initial and final
//           state [N, HV, K, V]. HV, the number of value heads, is shape.H; args.group of them share a head of the rest
// grid      a warp for every 64 / D value heads of all sequences, sequence slowest; a lane has two columns of a head's
//           state
// smem      for each warp: two stages, each of a step of 8 tokens, in which o overwrites channels' gates; the decays of
//           channels of one step
// barriers  of warps, two a step: the step has been copied, and its decays are in shared memory | o is in shared
//           memory, and the step has been read
// numerics  float32 throughout
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K, V <= D; D of 8, 16
#include "gated/small_heads.cuh"
#include "delta/tokens.cuh"

// From the includes:
//   Tile: 8 tokens of a warp's heads in shared memory; load_row, put: load and store numbers of a row
//   Work, work_of: a head, its sequence and tokens; LaneCoord: the lane's head of the warp, its number in that head
//   lane_rows: the lane's rows in memory; fetch, store: copy a step's rows; put_decays: exp of gates
//   DeltaArgs: the arguments of kernels token by token. Of rules, channel_gates: a gate for every channel; own_erasure:
//     a and b beside k
//   STEP = 8 tokens, THREADS = 128, WARPS = 4

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  StridedRows<T> o;
  StridedRows<float> final;  // null: no final state is wanted
};

template <bool OWN_ERASURE, typename T, int D> struct ErasureTiles {
  Tile<T, D, D / 2> a, b;
};
template <typename T, int D> struct ErasureTiles<false, T, D> {};
template <class Rule, typename T, typename G, int D> struct Stage : ErasureTiles<Rule::own_erasure, T, D> {
  Tile<T, D, D / 2> q, k, v;
  union {
    Tile<G, D, D / 2> g;  // of channels
    Tile<T, D, D / 2> o;  // overwrites g after the decays have been computed
  };
};
template <class Rule, typename T, typename G, int D> struct Shared {
  struct Warp {
    Stage<Rule, T, G, D> stages[2];
    Tile<float, D, D / 2> decays;  // of channels
  } warps[WARPS];
};

// A number of each token of a step, such as its beta: the lane has those of tokens `lane`, `lane` + LANES, ...
template <typename G, int LANES> struct StepScalars {
  G x[STEP / LANES];

  // Those of the step that starts at `token`; zeros after the head's last token.
  __device__ __forceinline__ void load(const StridedRows<const G>& from, const Work& head, int lane, int token) {
#pragma unroll
    for (int n = 0; n < STEP / LANES; ++n) {
      const int own = token + lane + n * LANES;
      x[n] = own < head.tokens ? *from.row(head.b, head.h, head.start + own) : from_float<G>(0.f);
    }
  }
  // That of token i of the step, for all lanes of the head.
  __device__ __forceinline__ float of_token(int i) const {
    const int first = threadIdx.x & 31 & -LANES;
    return __shfl_sync(0xffffffffu, to_float(x[i / LANES]), first + i % LANES);
  }
};

// The launch bounds: the blocks that share a multiprocessor's registers.
template <class Rule, typename T, typename G, int D>
__global__ void __launch_bounds__(THREADS, D == 8 ? 4 : 3) delta_small_forward(const Args<T, G> args) {
  constexpr int LANES = D / 2;
  using Inputs = Tile<T, D, LANES>;
  const int warp = threadIdx.x >> 5;
  auto& s = reinterpret_cast<Shared<Rule, T, G, D>*>(dynamic_smem())->warps[warp];
  const Shape& shape = args.shape;
  const LaneCoord<LANES> coord;
  const Work work = work_of(shape, (blockIdx.x * WARPS + warp) * Inputs::HEADS + coord.head);
  Work keys = work;  // its head is that of q, k, a and b
  keys.h /= int(args.group);
  const int K = int(shape.K), V = int(shape.V), bytes = int(args.bytes), column = 2 * coord.lane;

  float S[D][2] = {};
  // Calls f(number of S, its address) for this lane's numbers: columns `column` and the next; `states`: in memory.
  const auto each_number = [&](const auto& states, auto f) {
    if (!states.p || work.n < 0) return;
    auto* const state = states.row(work.n, work.h, 0) + column;
#pragma unroll
    for (int c = 0; c < D; ++c)
#pragma unroll
      for (int x = 0; x < 2; ++x)
        if (c < K && column + x < V) f(S[c][x], state + c * V + x);
  };
  each_number(args.initial, [](float& x, const float* from) { x = *from; });

  const auto& tiles = s.stages[0];  // either stage: lane_rows takes the types of tiles alone
  const auto q_rows = lane_rows(tiles.q, args.q, keys, coord.lane),
             k_rows = lane_rows(tiles.k, args.k, keys, coord.lane);
  const auto v_rows = lane_rows(tiles.v, args.v, work, coord.lane);
  const auto o_rows = lane_rows(tiles.o, args.o, work, coord.lane);
  StepScalars<G, LANES> next_gates, next_betas;
  // Starts to copy the step that starts at `token`, and loads its scalars.
  const auto fetch_step = [&](Stage<Rule, T, G, D>& to, int token) {
    const int tokens_left = work.tokens - token;
    const auto copy = [&](auto& tile, const auto& rows, int width) {
      fetch(tile, rows, coord.head, coord.lane, token, tokens_left, width, bytes);
    };
    copy(to.k, k_rows, K), copy(to.q, q_rows, K), copy(to.v, v_rows, V);
    if constexpr (Rule::channel_gates) copy(to.g, lane_rows(to.g, args.g, work, coord.lane), K);
    else next_gates.load(args.g, work, coord.lane, token);
    if constexpr (Rule::own_erasure) {
      copy(to.a, lane_rows(to.a, args.a, keys, coord.lane), K);
      copy(to.b, lane_rows(to.b, args.b, keys, coord.lane), K);
    } else {
      next_betas.load(args.beta, work, coord.lane, token);
    }
    cp_async_commit();
  };
  const int longest = largest_of_warp<LANES>(work.tokens);
  const float scale = float(args.scale);
  if (longest) fetch_step(s.stages[0], 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < longest; token += STEP, stage ^= 1) {
    auto& in = s.stages[stage];
    cp_async_wait<0>();
    if constexpr (Rule::channel_gates) put_decays(s.decays, in.g, coord.head, coord.lane);
    const auto gates = next_gates, betas = next_betas;
    __syncwarp();  // the step has been copied by all lanes, and its decays are in shared memory
    if (token + STEP < longest) fetch_step(s.stages[stage ^ 1], token + STEP);
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
      float q[D], k[D], v[2], o[2] = {};
      in.q.load_row(q, i, coord.head), in.k.load_row(k, i, coord.head), in.v.load_row(v, i, coord.head, column);
      float output_scale = scale;
      if constexpr (Rule::own_erasure) {
        float a[D], b[D], decays[D], read[2] = {};  // read: S^T a
        in.a.load_row(a, i, coord.head), in.b.load_row(b, i, coord.head);
        s.decays.load_row(decays, i, coord.head);
#pragma unroll
        for (int c = 0; c < D; ++c)
#pragma unroll
          for (int x = 0; x < 2; ++x) read[x] = fmaf(a[c], S[c][x], read[x]);
#pragma unroll
        for (int c = 0; c < D; ++c)
#pragma unroll
          for (int x = 0; x < 2; ++x) S[c][x] = fmaf(decays[c], S[c][x], fmaf(b[c], read[x], k[c] * v[x]));
      } else {
        float decays[D], read[2] = {}, inverse_length = 1.f;  // read: S'^T k
        if constexpr (Rule::channel_gates) s.decays.load_row(decays, i, coord.head);
        const float decay = Rule::channel_gates ? 1.f : decay_of(gates.of_token(i)), beta = betas.of_token(i);
        if (args.normalized) {
          float of_q = 0.f, of_k = 0.f;
#pragma unroll
          for (int c = 0; c < D; ++c) of_q = fmaf(q[c], q[c], of_q), of_k = fmaf(k[c], k[c], of_k);
          output_scale *= inverse_root(of_q + float(LEAST_SQUARE));
          inverse_length = inverse_root(of_k + float(LEAST_SQUARE));
        }
#pragma unroll
        for (int c = 0; c < D; ++c)
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            S[c][x] *= Rule::channel_gates ? decays[c] : decay;
            read[x] = fmaf(k[c], S[c][x], read[x]);
          }
#pragma unroll
        for (int x = 0; x < 2; ++x) read[x] = inverse_length * beta * (v[x] - inverse_length * read[x]);
#pragma unroll
        for (int c = 0; c < D; ++c)
#pragma unroll
          for (int x = 0; x < 2; ++x) S[c][x] = fmaf(k[c], read[x], S[c][x]);
      }
#pragma unroll
      for (int c = 0; c < D; ++c)
#pragma unroll
        for (int x = 0; x < 2; ++x) o[x] = fmaf(q[c], S[c][x], o[x]);
      o[0] *= output_scale, o[1] *= output_scale;
      in.o.put(o, i, coord.head, column);
    }
    __syncwarp();  // o is in shared memory; the step has been read, so that its stage may be filled again
    store(in.o, o_rows, coord.head, coord.lane, token, work.tokens - token, V, bytes);
  }
  each_number(args.final, [](float& x, float* to) { *to = x; });
}

// what      Forward pass of the delta rules, token by token, with heads of at most 16 channels and columns. Or,
//           without OUTPUTS, what a segment of a sequence does to a state: from S to F S + G.
// math      Template argument Rule. D = diag(exp g), g log gates of channels; for GatedDelta one g for all channels. S
//           is the state before the token, S' = D S its decay, S+ the state after the token; o = scale S+^T q:
//           GatedDelta, Kda: S+ = S' + k (beta (v - S'^T k))^T
//           Dplr (diagonal plus low rank, RWKV-7): S+ = S' + b (S^T a)^T + k v^T
//           If args.normalized, q and k above are the given ones divided by their Euclidean lengths. The kernel works
//           with the given ones and multiplies sums by the inverse lengths
//           G is the state after a walk over a segment from zeros, over the first one from the initial state. F is the
//           state after a walk from the identity with values of 0. G of the last segment is not needed, nor is F of the
//           first and the last one
// shapes    q k a b [B, H, T, K], v o [B, HV, T, V], g [B, HV, T] or [B, HV, T, K], beta [B, HV, T], initial and final
//           state [N, HV, K, V]. HV, the number of value heads, is shape.H; args.group of them share a head of the
//           rest. F [segments, HV, K, K and zeros to a multiple of 4]; starts [segments, HV, K, V]: first G, each in
//           the place of the next segment, which join_segments.cu then replaces by the state from which that segment
//           starts
// grid      a warp for every 32 / D value heads (D, of a template: the lanes of a head) of all sequences or segments,
//           sequence slowest; without OUTPUTS, for as many states: a head has two, G and F. A lane has a column of a
//           state
// smem      two stages, each of a step of 16 tokens, in which o overwrites channels' gates; what is computed once for
//           every token of a step: decays of channels, Factors
// barriers  of warps, three a step: the step has been copied | decays and factors are in shared memory | o is in shared
//           memory, and the step has been read
// numerics  float32 throughout
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
// limits    K, V <= D; D of 8, 16
#include "gated/small_heads.cuh"
#include "delta/segments.cuh"
#include "delta/tokens.cuh"

// From the includes:
//   Tile: tokens of a warp's heads in shared memory
//   Work, work_of: a head, its tokens, and n, the number of its sequence or segment, -1 if the lane has no head;
//     LaneCoord: the lane's head of the warp, its number in that head
//   fetch, store: copy a step's rows; put_decays: stores e^g of gates g; HEADS = 32 / D: heads of a warp
//   DeltaArgs: the arguments of kernels token by token. Of rules, channel_gates: a gate for every channel; own_erasure:
//     a and b beside k
//   segment_of: a Segment: its tokens; `from`, the state that it starts from, null for zeros; `to`, where its last
//     state goes, null for nowhere. The first segment starts from the initial state. The others start, without outputs,
//       from zeros, and `to` is in `starts`; else they start from `starts`, and only the last one has `to`. If the last
//       argument is true, the first segment has all tokens and is the last one, too; the others have none

constexpr int TOKENS = 16;  // of a step
template <typename E, int D> using StepTile = Tile<E, D, D, TOKENS>;

template <typename T, typename G> struct Args : DeltaArgs<T, G> {
  StridedRows<T> o;          // null: no output is wanted
  StridedRows<float> final;  // null: no final state is wanted
  float* F;                  // null with OUTPUTS; without, o and final are null
};

template <bool OWN_ERASURE, typename T, int D> struct ErasureTiles {
  StepTile<T, D> a, b;
};
template <typename T, int D> struct ErasureTiles<false, T, D> {};
template <class Rule, typename T, typename G, int D> struct Stage : ErasureTiles<Rule::own_erasure, T, D> {
  StepTile<T, D> q, k, v;
  union {
    StepTile<G, D> g;  // of channels
    StepTile<T, D> o;  // overwrites g after the decays have been computed
  };
};

// The numbers of a token of GatedDelta and Kda: S' = decay S, or with decays of channels; what is written along k is
// value v - erasure S'^T k; o = output S+^T q. So value = beta / |k|, erasure = beta / |k|^2, output = scale / |q|;
// without args.normalized the lengths count as 1.
struct alignas(16) Factors {
  float decay, value, erasure, output;
};
template <class Rule, typename T, typename G, int D> struct Shared {
  Stage<Rule, T, G, D> stages[2];
  StepTile<float, D> decays;        // of channels
  Factors factors[TOKENS][32 / D];  // by token and head
};

// A number of each token of a step, such as its beta: the lane has those of tokens `lane`, `lane` + D, ...
template <typename G, int D> struct StepScalars {
  static_assert(TOKENS % D == 0);
  G x[TOKENS / D];

  // Those of the step that starts at `token`; zeros after the head's last token.
  __device__ __forceinline__ void load(const StridedRows<const G>& from, const Work& head, int lane, int token) {
#pragma unroll
    for (int n = 0; n < TOKENS / D; ++n) {
      const int own = token + lane + n * D;
      x[n] = own < head.tokens ? *from.row(head.b, head.h, head.start + own) : from_float<G>(0.f);
    }
  }
};

// x^T y, by two sums: each is a chain of half as many additions.
template <int D> __device__ __forceinline__ float dot(const float (&x)[D], const float (&y)[D]) {
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int c = 0; c < D; c += 2) even = fmaf(x[c], y[c], even), odd = fmaf(x[c + 1], y[c + 1], odd);
  return even + odd;
}

// What a lane reads of a token in shared memory: a and b of Dplr, `factors` of other rules; `decays`, if channels have
// gates; of v its column. Without OUTPUTS q is not read.
template <class Rule, typename T, typename G, int D, bool OUTPUTS> struct Token {
  float q[D], k[D], a[D], b[D], decays[D], v[1];
  Factors factors;

  __device__ __forceinline__ void load(const Shared<Rule, T, G, D>& s, const Stage<Rule, T, G, D>& in, int i,
                                       const LaneCoord<D>& coord) {
    if constexpr (OUTPUTS) in.q.load_row(q, i, coord.head);
    in.k.load_row(k, i, coord.head), in.v.load_row(v, i, coord.head, coord.lane);
    if constexpr (Rule::channel_gates) s.decays.load_row(decays, i, coord.head);
    if constexpr (Rule::own_erasure) in.a.load_row(a, i, coord.head), in.b.load_row(b, i, coord.head);
    else factors = s.factors[i][coord.head];
  }
  // Applies the token to S, the lane's column of a state; returns the same column of o, without OUTPUTS 0.
  __device__ __forceinline__ float apply(float (&S)[D], float scale) const {
    if constexpr (Rule::own_erasure) {
      const float read = dot(a, S);
#pragma unroll
      for (int c = 0; c < D; ++c) S[c] = fmaf(b[c], read, fmaf(decays[c], S[c], k[c] * v[0]));
      return OUTPUTS ? scale * dot(q, S) : 0.f;
    } else {
#pragma unroll
      for (int c = 0; c < D; ++c) S[c] *= Rule::channel_gates ? decays[c] : factors.decay;
      const float write = fmaf(-factors.erasure, dot(k, S), factors.value * v[0]);
#pragma unroll
      for (int c = 0; c < D; ++c) S[c] = fmaf(k[c], write, S[c]);
      return OUTPUTS ? factors.output * dot(q, S) : 0.f;
    }
  }
};

// The launch bounds: the blocks that share a multiprocessor's registers.
template <class Rule, typename T, typename G, int D, bool OUTPUTS>
__global__ void __launch_bounds__(32, D == 8 ? 16 : 8) delta_small_forward(const Args<T, G> args) {
  using Inputs = StepTile<T, D>;
  auto& s = *reinterpret_cast<Shared<Rule, T, G, D>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const LaneCoord<D> coord;
  const u32 number = blockIdx.x * Inputs::HEADS + coord.head;
  const bool of_F = !OUTPUTS && number % 2;
  const int K = int(shape.K), V = int(shape.V), bytes = int(args.bytes), P = int(args.P);
  const int width = of_F ? padded_to_4(K) : V;  // numbers of a row of the state in memory
  Work work = work_of(shape, OUTPUTS ? number : number / 2);
  // Whether join_segments.cu has marked the state from which the sequence's last segment starts, by a number in the row
  // of channel 0 that is not finite: then the first segment walks all tokens, and the others none.
  const auto is_grown = [&] {
    if (work.n < 0 || coord.lane >= V) return false;
    return !is_finite(args.starts[((work.n / P * P + P - 1) * shape.H + work.h) * K * V + coord.lane]);
  };
  const bool whole = OUTPUTS && P > 1 && sum_over_lanes<D>(is_grown() ? 1.f : 0.f) > 0.f;
  const auto segment =
      segment_of<false>(OUTPUTS, shape, P, u32(work.n), work.h, args.initial, args.starts, args.final, whole);
  if (!OUTPUTS && (segment.last || (of_F && segment.first))) work.n = -1;
  work.start = segment.tokens.start, work.tokens = work.n < 0 ? 0 : int(segment.tokens.stop - segment.tokens.start);
  Work keys = work;  // its head is that of q, k, a and b
  keys.h /= int(args.group);

  // Calls f(number of S, channel, its place in a state in memory) for this lane's numbers.
  float S[D];
  const auto each_number = [&](auto f) {
#pragma unroll
    for (int c = 0; c < D; ++c)
      if (work.n >= 0 && c < K && coord.lane < width) f(S[c], c, c * width + coord.lane);
  };
#pragma unroll
  for (int c = 0; c < D; ++c) S[c] = 0.f;
  each_number([&](float& x, int channel, int place) {
    x = of_F ? float(channel == coord.lane) : segment.from ? segment.from[place] : 0.f;
  });

  const auto& tiles = s.stages[0];  // either stage: lane_rows takes the types of tiles alone
  const auto q_rows = lane_rows(tiles.q, args.q, keys, coord.lane),
             k_rows = lane_rows(tiles.k, args.k, keys, coord.lane);
  const auto v_rows = lane_rows(tiles.v, args.v, work, coord.lane);
  const auto o_rows = lane_rows(tiles.o, args.o, work, coord.lane);
  StepScalars<G, D> gates, betas;  // of the step that is copied
  // Starts to copy the step that starts at `token`, and loads its scalars.
  const auto fetch_step = [&](Stage<Rule, T, G, D>& to, int token) {
    const int tokens_left = work.tokens - token;
    const auto copy = [&](auto& tile, const auto& rows, int width) {
      fetch(tile, rows, coord.head, coord.lane, token, tokens_left, width, bytes);
    };
    copy(to.k, k_rows, K), copy(to.v, v_rows, of_F ? 0 : V);
    if (OUTPUTS) copy(to.q, q_rows, K);
    if constexpr (Rule::channel_gates) copy(to.g, lane_rows(to.g, args.g, work, coord.lane), K);
    else gates.load(args.g, work, coord.lane, token);
    if constexpr (Rule::own_erasure) {
      copy(to.a, lane_rows(to.a, args.a, keys, coord.lane), K);
      copy(to.b, lane_rows(to.b, args.b, keys, coord.lane), K);
    } else {
      betas.load(args.beta, work, coord.lane, token);
    }
    cp_async_commit();
  };
  const float scale = float(args.scale);
  // Stores the factors of the tokens whose scalars the lane has.
  const auto put_factors = [&](const Stage<Rule, T, G, D>& in) {
#pragma unroll
    for (int n = 0; n < TOKENS / D; ++n) {
      const int i = coord.lane + n * D;
      const float decay = Rule::channel_gates ? 1.f : decay_of(to_float(gates.x[n])), beta = to_float(betas.x[n]);
      float of_q = 1.f, of_k = 1.f;  // inverse lengths
      if (args.normalized) {
        float q[D], k[D];
        in.k.load_row(k, i, coord.head);
        if (OUTPUTS) in.q.load_row(q, i, coord.head), of_q = inverse_root(dot(q, q) + float(LEAST_SQUARE));
        of_k = inverse_root(dot(k, k) + float(LEAST_SQUARE));
      }
      s.factors[i][coord.head] = {decay, beta * of_k, beta * of_k * of_k, scale * of_q};
    }
  };
  const int longest = largest_of_warp<D>(work.tokens);
  if (longest) fetch_step(s.stages[0], 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < longest; token += TOKENS, stage ^= 1) {
    auto& in = s.stages[stage];
    cp_async_wait<0>();
    __syncwarp();  // all lanes have copied the step
    if constexpr (Rule::channel_gates) put_decays(s.decays, in.g, coord.head, coord.lane);
    if constexpr (!Rule::own_erasure) put_factors(in);
    __syncwarp();  // decays and factors are in shared memory
    if (token + TOKENS < longest) fetch_step(s.stages[stage ^ 1], token + TOKENS);
    Token<Rule, T, G, D, OUTPUTS> now, next;
    now.load(s, in, 0, coord);
#pragma unroll 4
    for (int i = 0; i < TOKENS; ++i) {
      next.load(s, in, (i + 1) % TOKENS, coord);  // while the token before it is applied; at the end token 0, unused
      const float o[1] = {now.apply(S, scale)};
      if (OUTPUTS) in.o.put(o, i, coord.head, coord.lane);
      now = next;
    }
    __syncwarp();  // o is in shared memory; the step has been read, so that its stage may be filled again
    if (OUTPUTS) store(in.o, o_rows, coord.head, coord.lane, token, work.tokens - token, V, bytes);
  }
  float* const to = of_F ? args.F + (work.n * shape.H + work.h) * K * width : segment.to;
  if (to) each_number([&](float& x, int, int place) { to[place] = x; });
}

// what      GLA and RWKV-6 backward on every card: the state S before every chunk of 64 tokens, by a walk forwards in
//           time, and the gradient dS of the state after every chunk, by a walk backwards. Or the summaries of segments
//           for both directions: the same walks, which store only their last S or dS.
// math      per step of 32 tokens (four sub-chunks of 8), with decays [K], e^(sum of log gates g): D over all gates of
//           the step, L_j over those after j, E_i over those up to i (RWKV-6: up to i - 1):
//           S <- D S + sum_j L_j k_j v_j^T;  backwards in time  dS <- D dS + scale sum_i E_i q_i do_i^T
// shapes    q k g [B, H, T, K], v do [B, H, T, V]; chunk_states: every chunk's S and dS in the layout of
//           state_tile_index (backward.cuh), bfloat16 or float32; initial, dht [.., H, K, V] float32, a state for every
//           sequence, or, with chunk_states, for every segment; dh0 [.., H, K, V] float32, for every sequence.
//           Summaries: states [2, N, H, K, V] and decays [2, N, H, ceil(V / BV), K] float32 of N segments, in order of
//           time; index 0 is S, 1 dS. The result of a segment's walk is stored as the state of the next segment in the
//           walk's direction. The first segment in a direction starts from the given state, which is stored as its own
//           state; the others start from zero, and scan_both_ways.cu joins their results. The blocks of the last
//           segment in a direction return at once: no segment needs its result, and its decays are not written
// grid      a block for every (direction, sequence or segment, head, tile of 64 channels, BV columns of V),
//           directions slowest; a warp for every 16 channels
// smem      Stage: a step of k, v and g, or q, do and g, STAGES times; copied by all threads, read by all warps
// barriers  one every 32 tokens: they have been copied, and the previous ones have been read. For summaries also
//           while gates alone are read, to find what is forgotten: every 32 tokens, again every 256, and at the end
// numerics  S and dS in float32 accumulators; products as in fragments.cuh. A summary leaves out the tokens that all 64
//           channels of the block have forgotten at the end of the walk: the gates walked after them sum to -48
//           (FORGOTTEN_NATS) or less, and none of these is positive. The block's decays are then stored as 0. The
//           result must hide what is left out: each of its numbers must be at least 2^21 times the decay over the steps
//           that were walked (hides_forgotten); later gates multiply both alike. If one is smaller, the block walks
//           once more, and leaves out nothing
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19; Blelloch, 1990, section 1.4.1
// limits    BV of 64, 128; summaries of two segments or more
//
// From fragments.cuh. A product is D[16, 8] += A[16, 16] B[16, 8]
//   Math<T, PRODUCTS>  how data T are multiplied. Stored: the type of operands in memory; SPLIT: an operand is two tf32
//                      numbers
//   Left, RightData    a lane's pairs of A, of B as data are in memory; set_unrounded: stores floats that products may
//                      cut off
//   load_right         two B side by side, from a tile [depth, column] (AS_STORED)
//   accumulate         D += A B for two B, for sums over many tokens
//   TF32_CORRECTION<M, E>  the factor that makes up for one operand, stored as E (by default M::Stored), that tf32
//                      products cut off; 1 if they cut off nothing
//   load_channels      16 tokens, two sub-chunks, of a warp's 16 channels: with g = lane / 4, t = lane % 4, x[p] is of
//                      channel g + 8 (p % 2), tokens 2t and 2t + 1 of the sub-chunk p / 2
// From decays.cuh. a: the decays of a lane's two tokens
//   PairDecays(a)      the decays from the sub-chunk's start (`start`), to its end (`end`) and over it (`whole`)
//   decays_of(g)       the decays of the log gates of a lane's two tokens
//   product_over(x, first, end) = x[first ... end - 1] multiplied
//   four_lane_sums(x)  sums over the four lanes of a channel; its `all`: over all four
// From backward.cuh
//   fetch_rows         starts copying rows of an array to a tile, zeros where there are none
//   CHUNK = 64 and SUB_CHUNK = 8 tokens; TILE = 64 channels or columns
//   state_tile_index(shape, heads, backwards, batch row, head, chunk, tile of K, tile of V): where a tile begins
//   each_number(S, channel, column, K, V, f): calls f(number, its offset in a state [K, V]) for the lane's numbers
//   store_in_tiles(to, S, has_next): stores the warp's part of S in its tile, and in the next one if that exists
// From tensor.cuh: tokens_of, chunks_of: the range of tokens, of chunks, of a sequence or segment of a batch row
//
// Similar names: STEP, tokens of a step; `step`, its number in the walk; STAGES, steps in shared memory; `sequence`, a
// sequence or, for summaries, a segment; `segment`, its number in the walk; slot, its index in `states`
#include "backward.cuh"

constexpr int STEP = 32, STEP_SUBS = STEP / SUB_CHUNK;  // tokens of a step, and its sub-chunks
constexpr int STEPS_WORTH_READING = 16;  // a shorter segment is walked whole, without a look at its gates
static_assert(CHUNK == 2 * STEP, "a chunk has two steps");

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, v, do_;
  StridedRows<const G> g;
  const float *initial, *dht;  // null: zero
  void* chunk_states;          // null: computes the summaries of segments
  float *dh0, *states, *decays;
  Shape shape;
  i64 first, heads;  // this launch computes heads first ... first + heads - 1
  double scale;
  i64 P;  // segments of a sequence, 1 or more, for summaries and with chunk_states
};

// A step's rows [token, channel or column]; LD (backward.cuh): the distance of neighbouring tokens.
template <typename T, typename G, int BV> struct alignas(16) Stage {
  T keys[STEP * LD<T, TILE>];  // [32, 64], k, or backwards q
  T values[STEP * LD<T, BV>];  // [32, BV], v, or backwards do
  G g[STEP * LD<G, TILE>];     // [32, 64]
};

// STAGES: as many as leave shared memory for three blocks on a multiprocessor, or four if BV is 64. blocks, for launch
// bounds: the compiler leaves registers for at least so many blocks on a multiprocessor; there may be more. So 2, for
// float32 and BV of 64, lets a thread take 255 registers, and does not mean that it needs them.
template <typename T, int BV> constexpr int STAGES = sizeof(T) == 4 && BV > TILE ? 2 : 3;
template <class M, typename T, int BV> constexpr int blocks() {
  if (M::SPLIT || sizeof(typename M::Stored) > sizeof(T)) return 2;
  return BV > TILE ? 3 : sizeof(T) == 2 ? 4 : 2;
}
template <typename T, typename G, int BV> struct Shared {
  Stage<T, G, BV> stages[STAGES<T, BV>];
};

// A block's tokens and its tile of the state, 64 channels by BV columns.
struct StateTile {
  int sequence, b, h;  // sequence or segment, over the batch; batch row; head
  int k_tile, v_tile;  // channels 64 k_tile ... and columns BV v_tile ... of the state
  Span span;           // tokens
};

// Reads gates from the last step of the walk to the first. Returns the first step that the result still depends on:
// after earlier ones every channel's gates sum to FORGOTTEN_NATS or less. After every STEPS_A_VERDICT steps it gives
// up, and returns 0, if a gate was positive, or if some channel may forget less than a quarter of the steps: if its
// mean sum of gates over the steps read, times 0.75 `steps`, is above FORGOTTEN_NATS.
// channel: the lane's first one, the other is 8 later. fetch(step, stage) starts copying the gates of a step, none if
// step is negative, and commits a group of copies.
template <typename T, typename G, int BV, class Fetch>
__device__ __forceinline__ int first_remembered(const Shared<T, G, BV>& s, int steps, int channel, int K, Fetch fetch) {
  constexpr int STAGES = ::STAGES<T, BV>, STEPS_A_VERDICT = 8;
  const int warp = threadIdx.x >> 5;
  float gate_sums[2] = {channel < K ? 0.f : FORGOTTEN_NATS, channel + 8 < K ? 0.f : FORGOTTEN_NATS};
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) fetch(steps - 1 - step, step);
  float largest_gate = 0.f;  // if it is positive, nothing may be left out
  int steps_read = 0, first = 0;
#pragma unroll 1
  for (; steps_read < steps; ++steps_read) {
    cp_async_wait<STAGES - 2>();
    const bool remembered = largest_gate > 0.f || !(gate_sums[0] <= FORGOTTEN_NATS && gate_sums[1] <= FORGOTTEN_NATS);
    if (!__syncthreads_or(remembered)) {  // these gates have been copied; the previous ones have been read
      first = steps - steps_read;
      break;
    }
    // Both sides of gate_sums / steps_read * most_steps <= FORGOTTEN_NATS are multiplied by steps_read.
    const float forgotten_by_now = FORGOTTEN_NATS * steps_read, most_steps = 0.75f * steps;
    if (steps_read && steps_read % STEPS_A_VERDICT == 0 &&
        __syncthreads_or(largest_gate > 0.f || remembered && !(gate_sums[0] * most_steps <= forgotten_by_now &&
                                                               gate_sums[1] * most_steps <= forgotten_by_now)))
      break;
    fetch(steps - steps_read - STAGES, (steps_read + STAGES - 1) % STAGES);
    const G* gates = s.stages[steps_read % STAGES].g + 16 * warp;
#pragma unroll
    for (int m = 0; m < STEP / 16; ++m) {
      float2 x[4];
      load_channels(x, gates + 16 * m * LD<G, TILE>, LD<G, TILE>);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        gate_sums[p & 1] += four_lane_sums(x[p].x + x[p].y).all;
        largest_gate = fmaxf(largest_gate, fmaxf(x[p].x, x[p].y));
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();  // all gates have been read
  return first;
}

// Computes the states of one tile and direction, step by step. Backwards, steps are counted from the segment's end, and
// S below is dS. may_forget: whether a summary may leave out tokens. Returns whether all is done: false if it has left
// out tokens that it must not.
template <class ReadOrder, typename T, typename G, int PRODUCTS, int BV>
__device__ __forceinline__ bool walk(Shared<T, G, BV>& s, const Args<T, G>& args, const StateTile& work, bool backwards,
                                     bool may_forget) {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  constexpr int STAGES = ::STAGES<T, BV>;
  const Shape& shape = args.shape;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int K = int(shape.K), V = int(shape.V), P = int(args.P);
  const int channel = work.k_tile * TILE + 16 * warp + g, column = work.v_tile * BV + 2 * t;
  const bool summarises = !args.chunk_states;

  // S, or backwards dS: S[n / 2][n % 2][2 octet + p] is channel + 8 octet, column + 8n + p.
  float S[BV / 16][2][4] = {};
  const int segment = backwards ? P - 1 - work.sequence % P : work.sequence % P;  // its number in the walk
  const i64 state_size = i64(K) * V;
  const float* given = backwards ? args.dht : args.initial;
  // Summaries: the index [direction, segment, head] of this segment.
  const i64 slot = (backwards * (shape.B * shape.row_sequences) + work.sequence) * shape.H + work.h;
  if (segment == 0 || !summarises) {
    const float* from =
        given ? given + ((summarises ? work.sequence / P : work.sequence) * shape.H + work.h) * state_size : nullptr;
    float* to = summarises ? args.states + slot * state_size : nullptr;
    each_number(S, channel, column, K, V, [&](float& x, i64 offset) {
      if (from) x = from[offset];
      if (to) to[offset] = x;
    });
  }

  const int chunks = int((work.span.stop - work.span.start + CHUNK - 1) / CHUNK), steps = CHUNK / STEP * chunks;
  // The steps whose tokens count: nobody wants the state behind the last chunk but summaries and dh0.
  const int read = summarises || backwards && args.dh0 ? steps : steps - CHUNK / STEP;
  // The first token in time of a step of the walk. A chunk of 64 tokens has two steps.
  const auto token_of = [&](int step) { return work.span.start + STEP * (backwards ? steps - 1 - step : step); };
  // Start copying a step's gates, or all its inputs; `fetch` also commits a group of copies, an empty one if there is
  // no such step.
  const auto fetch_gates = [&](int step, int stage) {
    fetch_rows<STEP, TILE>(s.stages[stage].g, args.g, work.b, work.h, token_of(step), work.span.stop,
                           work.k_tile * TILE, K);
  };
  const auto fetch = [&](int step) {
    if (step < read) {
      Stage<T, G, BV>& in = s.stages[step % STAGES];
      const i64 token = token_of(step), stop = work.span.stop;
      fetch_gates(step, step % STAGES);
      fetch_rows<STEP, TILE>(in.keys, backwards ? args.q : args.k, work.b, work.h, token, stop, work.k_tile * TILE, K);
      fetch_rows<STEP, BV>(in.values, backwards ? args.do_ : args.v, work.b, work.h, token, stop, work.v_tile * BV, V);
    }
    cp_async_commit();
  };
  int first_step = 0;
  if (summarises && may_forget && steps >= STEPS_WORTH_READING)
    first_step = first_remembered<T, G, BV>(s, steps, channel, K, [&](int step, int stage) {
      if (step >= 0) fetch_gates(step, stage);
      cp_async_commit();
    });
  float total_decay[2] = {1.f, 1.f};  // over the steps from first_step on, by octet
  const int first_chunk = int(chunks_of(shape, work.sequence % shape.row_sequences).start);
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) fetch(first_step + step);
#pragma unroll 1
  for (int step = first_step; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();  // leaves the later steps' copies under way, each a group, maybe an empty one
    __syncthreads();              // this step's tokens have been copied; the previous ones have been read
    fetch(step + STAGES - 1);
    if (!summarises && step % 2 == 0) {  // a chunk begins: stores S, rounded, for the kernels that compute gradients
      const int chunk = first_chunk + (backwards ? chunks - 1 - step / 2 : step / 2);
      Stored* to = static_cast<Stored*>(args.chunk_states) + state_tile_index(shape, args.heads, backwards, work.b,
                                                                              work.h - args.first, chunk, work.k_tile,
                                                                              work.v_tile * (BV / TILE));
      store_in_tiles(to, S, work.v_tile * BV + TILE < V);
      if (step >= read) break;
    }
    const Stage<T, G, BV>& in = s.stages[step % STAGES];
    // Of the lane's two tokens of each sub-chunk: the decays to its end, or backwards from its start; and by octet the
    // decays over each sub-chunk.
    float2 factors[STEP_SUBS][2];
    float sub_decays[2][STEP_SUBS];
#pragma unroll
    for (int m = 0; m < STEP / 16; ++m) {
      float2 gates[4];
      load_channels(gates, in.g + 16 * m * LD<G, TILE> + 16 * warp, LD<G, TILE>);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const PairDecays<ReadOrder> decays(decays_of(gates[p]));
        const int n = 2 * m + (p >> 1), octet = p & 1;
        factors[n][octet] = backwards ? decays.start : decays.end;
        sub_decays[octet][n] = decays.whole;
      }
    }
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      const float step_decay = product_over(sub_decays[octet], 0, STEP_SUBS);
      total_decay[octet] *= step_decay;
#pragma unroll
      for (int n = 0; n < BV / 8; ++n)
        S[n / 2][n % 2][2 * octet] *= step_decay, S[n / 2][n % 2][2 * octet + 1] *= step_decay;
    }
#pragma unroll
    for (int m = 0; m < STEP / 16; ++m) {
      float2 x[4];
      Left<M> a;
      load_channels(x, in.keys + 16 * m * LD<T, TILE> + 16 * warp, LD<T, TILE>);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int n = 2 * m + (p >> 1), octet = p & 1;
        // The decay over the step's other sub-chunks between the token and the walk's next step, corrected for both
        // operands' truncation; backwards also times scale, a factor of every o, and so of the gradient through it.
        const float outer_decay = TF32_CORRECTION<M> * TF32_CORRECTION<M, T> *
                                  (backwards ? float(args.scale) * product_over(sub_decays[octet], 0, n)
                                             : product_over(sub_decays[octet], n + 1, STEP_SUBS));
        a.set_unrounded(p, outer_decay * factors[n][octet] * x[p]);
      }
#pragma unroll
      for (int n = 0; n < BV / 8; n += 2) {
        RightData<M, T> b[2];
        load_right<AS_STORED>(b, in.values + 16 * m * LD<T, BV> + 8 * n, LD<T, BV>);
        accumulate(S[n / 2], a, b);
      }
    }
  }
  cp_async_wait<0>();
  if (first_step) {
    bool hides = true;
    for (int octet = 0; octet < 2; ++octet) {
      float least = LARGEST_FLOAT;  // of the magnitudes of the channel's numbers
#pragma unroll
      for (int n = 0; n < BV / 8; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x)
          if (column + 8 * n + x < V) least = fminf(least, fabsf(S[n / 2][n % 2][2 * octet + x]));
      hides &= channel + 8 * octet >= K || hides_forgotten(least, total_decay[octet]);
    }
    if (__syncthreads_or(!hides)) return false;  // all threads have read the last step
    total_decay[0] = total_decay[1] = 0.f;
  }
  float* to = nullptr;
  if (summarises) {
    to = args.states + (slot + (backwards ? -shape.H : shape.H)) * state_size;
    for (int octet = 0; octet < 2; ++octet)
      if (t == 0 && channel + 8 * octet < K)
        args.decays[(slot * ((V + BV - 1) / BV) + work.v_tile) * K + channel + 8 * octet] = total_decay[octet];
  } else if (backwards && args.dh0 && segment == P - 1) {
    // Is work.sequence, computed from `slot`: with gates wider than data the compiler would spill work.sequence.
    const int sequence = sizeof(G) > sizeof(T) ? int(slot / shape.H - shape.B * shape.row_sequences) : work.sequence;
    to = args.dh0 + (sequence / P * shape.H + work.h) * state_size;
  }
  if (to) each_number(S, channel, column, K, V, [&](float& x, i64 offset) { to[offset] = x; });
  return true;
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: the type of q, k, v and do; G: that of g.
// PRODUCTS: tf32 products for each product of float32, 1 or 3.
template <class ReadOrder, typename T, typename G, int PRODUCTS, int BV>
__global__ void __launch_bounds__(THREADS, blocks<Math<T, PRODUCTS>, T, BV>())
    gated_backward_states(const Args<T, G> args) {
  Shared<T, G, BV>& s = *reinterpret_cast<Shared<T, G, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  for (bool may_forget = true;; may_forget = false) {
    const u32 index = opaque(blockIdx.x);  // a second walk computes `work` again, for which the first has no registers
    const int v_tiles = int((shape.V + BV - 1) / BV), k_tiles = int((shape.K + TILE - 1) / TILE);
    const bool backwards = index >= gridDim.x / 2;
    const u32 block = index - backwards * (gridDim.x / 2), tiles = v_tiles * k_tiles, heads = u32(args.heads);
    StateTile work;
    work.v_tile = block % v_tiles, work.k_tile = block / v_tiles % k_tiles;
    work.h = int(args.first) + block / tiles % heads, work.sequence = block / tiles / heads,
    work.b = work.sequence / int(shape.row_sequences);
    work.span = tokens_of(shape, work.sequence % shape.row_sequences);
    if (!args.chunk_states && work.sequence % args.P == (backwards ? 0 : args.P - 1))
      return;  // the last segment's summary is not used
    if (walk<ReadOrder, T, G, PRODUCTS, BV>(s, args, work, backwards, may_forget)) return;
  }
}

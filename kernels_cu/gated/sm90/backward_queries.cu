// what      GLA and RWKV-6 backward on Hopper, first pass: forwards in time, carrying the state. Gives dq, du, and for
//           the second pass what a chunk's queries have in dg.
// math      per chunk of 32, with the decays of decays.cuh:  dA_ij = scale do_i . v_j for j <= i (RWKV-6: j < i);
//           dq_i = sum_j dA_ij D_ij k_j + scale E_i S do_i (RWKV-6: + u k_i scale do_i . v_i);
//           S <- D S + sum_j L_j k_j v_j^T
//           weight_t = sum_{i>=t} q_i dq_i - sum_{j>=t} k_j dk_j over the chunk's pairs, and the state's share of
//           q_i dq_i (RWKV-6: i > t), own parts left out; du = sum_t q_t k_t scale do_t . v_t
// shapes    q k g dq weight [B, H, T, K], v do [B, H, T, V], u [H, K], initial, dht [N, H, K, V] and du, ends [N, H, K]
//           float32; weight: in g's bytes (query_share.cuh); sums [chunk, K + FLAGS] float32: the state's share
//           over a whole chunk, with its unit, and a byte of every warp; ends: sum_v S_T dht; kept [B, H,
//           T / CHECKPOINT_EVERY + 1, BK, BV] float32: the states before every multiple of CHECKPOINT_EVERY tokens of a
//           sequence (kept_at)
// grid      a block for every (sequence, head), sequence slowest, or for many (InTurn in states.cuh); a warpgroup for
//           every 64 channels, then one of which three warps multiply tokens, and one moves chunks
// smem      Stage: a chunk's tokens, and its results in place of them; InTurn: where the chunks on their way are
// barriers  arrived: v and do are there; full: so are the channels' tokens; pairs: so are dA and do for the state;
//           done: so are the results. Who waits for pairs waits for arrived too: they arrive who have waited for it
// numerics  dA, and queries and keys that meet in the chunk, are tf32, whose range is float32's; so the sums in
//           `weight`, of the same rounded numbers for queries and keys, cancel in float32 where both lie behind t. The
//           state: states.cuh
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    sm_90a; bfloat16, float16; K <= BK, V <= BV, multiples of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "gated/sm90/growth.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, v, do_, g, dq, weight;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const T> q_rows, k_rows, v_rows, do_rows;
  Rows<const G> g_rows;
  Rows<T> dq_rows;
  Rows<G> weight_rows;
  const float *u, *initial, *dht;  // null where there is none
  float *ends, *sums, *du, *kept;
  Shape shape;
  double scale;
  i64 P;       // segments a sequence
  i64 joined;  // whether all but the first are one here, and in the second pass all but the last
  i64 adds;    // whether dq adds to what it is for other columns
};

template <typename T, typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<T, BK> q, k;  // q: then dq
  Tile<G, BK> g;     // then weight
  Tile<T, BV> v, do_;
  ReadTile<BV> read;  // do for products with the state
  Pairs dA;           // RWKV-6: that of a token with itself is its own_at
};

constexpr int STAGES = 3;
template <typename T, typename G, int BK, int BV, class Schedule> struct Shared {
  Stage<T, G, BK, BV> stages[STAGES];
  ChunkPlaces<Schedule, false, STAGES + 1> places;
  WorkTile place;  // of a block that has one segment
  Barrier arrived[STAGES], full[STAGES], pairs[STAGES], done[STAGES];
};

// ---- a warp that moves chunks --------------------------------------------------------------------------------------

template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void move(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args) {
  const i64 K = args.shape.K, V = args.shape.V;
  const auto store = [&](int iteration, const WorkTile& at, int token) {
    Stage<T, G, BK, BV>& out = s.stages[iteration % STAGES];
    store_chunk(at, token, [&](auto f) {
      f(out.q, args.dq, args.dq_rows, K, 0, args.adds);
      f(out.g, args.weight, args.weight_rows, K);
    });
  };
  const auto fetch_values = [&](int next, const WorkTile& at, int token) {  // first, since dA is waited for
    Stage<T, G, BK, BV>& stage = s.stages[next % STAGES];
    fetch_chunk(s.arrived[next % STAGES], at, token, [&](auto f) {
      f(stage.do_, args.do_, args.do_rows, V);
      f(stage.v, args.v, args.v_rows, V);
    });
    __syncwarp();
  };
  const auto fetch_channels = [&](int next, const WorkTile& at, int token) {
    Stage<T, G, BK, BV>& stage = s.stages[next % STAGES];
    fetch_chunk(s.full[next % STAGES], at, token, [&](auto f) {
      f(stage.g, args.g, args.g_rows, K);
      f(stage.k, args.k, args.k_rows, K);
      f(stage.q, args.q, args.q_rows, K);
    });
  };
  const auto wait = [&](int iteration) {
    barrier_wait(s.done[iteration % STAGES], iteration / STAGES & 1);  // the results stand, the tokens have been read
    fence_async();                                                     // here, since consumers have less time
  };
  if constexpr (Schedule::in_turn) {
    int count = 0;  // of the chunks that have been asked for
    s.places.begin(args.shape);
#pragma unroll 1
    for (int iteration = -STAGES; iteration < count; ++iteration) {
      if (iteration >= 0) wait(iteration);
      const int next = iteration + STAGES;
      const bool more = s.places.next(args.shape, next);
      const WorkTile& place = s.places.at(next);
      if (more) fetch_values(next, place, 0), ++count;
      if (iteration >= 0) store(iteration, s.places.at(iteration), 0);
      if (more) fetch_channels(next, place, 0);
      __syncwarp();
    }
  } else {
    const WorkTile own = segment_of<false>(args.shape, args.P, args.joined);
    const WorkTile& at = ReadOrder::reads_before_write ? s.place : own;
    const int tokens = own.tokens;  // known to be the same for all lanes, unlike s.place
    if constexpr (ReadOrder::reads_before_write) {
      // RWKV-6 lacks registers: what this warp needs of them costs those with channels some, too.
      if ((threadIdx.x & 31) == 0) s.place = segment_of<false>(args.shape, args.P, args.joined);
      __syncwarp();
    }
#pragma unroll 1
    for (int iteration = -STAGES; iteration * CHUNK < tokens; ++iteration) {
      if (iteration >= 0) wait(iteration);
      const int next = iteration + STAGES;
      const bool more = next * CHUNK < tokens;
      if (more) fetch_values(next, at, next * CHUNK);
      if (iteration >= 0) store(iteration, at, iteration * CHUNK);
      if (more) fetch_channels(next, at, next * CHUNK);
      __syncwarp();
    }
  }
}

// ---- three warps that multiply tokens -------------------------------------------------------------------------------

// Of so many tokens, behind as many chunks.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void multiply_tokens(Shared<T, G, BK, BV, Schedule>& s, int tokens, int chunks, float scale,
                                                int block, int lane) {
#pragma unroll 1
  for (int iteration = chunks; (iteration - chunks) * CHUNK < tokens; ++iteration) {
    forget(lane);  // addresses are cheaper made anew than held in registers
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    barrier_wait(s.arrived[iteration % STAGES], iteration / STAGES & 1);  // v and do are there, and dA has been read
    float d[2][4];
    pair_products(d, in.do_, in.v, block, lane);
    const float by = TF32_CORRECTION * scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = queries_of(block) + (lane >> 2) + 8 * half, j = keys_of(block) + 2 * (lane & 3), behind = i - j;
      const int at = pair_index(i, j);
      const auto value = [&](int n, float x) {
        if (ReadOrder::reads_before_write && n == behind) own_at(in.dA, i) = scale * x;
        return pair_value(n < behind + !ReadOrder::reads_before_write ? by * x : 0.f);
      };
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 two = {value(8 * n, d[n][2 * half]), value(8 * n + 1, d[n][2 * half + 1])};
        *reinterpret_cast<float2*>(&in.dA[0][at ^ 8 * n]) = two;
      }
    }
    put_read_tile<3, T, BV>(in.read, in.do_, block, lane);
    fence_async();
    barrier_arrive(s.pairs[iteration % STAGES]);
  }
}

// ---- warpgroups with 64 channels each -------------------------------------------------------------------------------

// What a chunk gives, first its pairs, in two steps, then the state: dq; and of each token q dq - k dk. For RWKV-6 q dq
// and k dk, the latter in `writing`: a query and the key before it count for the same token.
struct Gradients {
  Chunk dq, weight, writing;
};

// A chunk's tokens: a warp's channels of them.
template <typename T, typename G> struct TokenOperands {
  Gates<G> gates;
  Operand queries, keys;

  // NEAR: gates for what meets in a sub-chunk alone.
  template <bool NEAR>
  __device__ __forceinline__ void load(G (*g)[CHUNK][PANEL<G>], T (&q)[CHUNK][64], T (&k)[CHUNK][64], int at) {
    gates.template load<NEAR>(g, at);
    load_operand(queries, q, at);
    load_operand(keys, k, at);
  }
};
// Whether there are registers for them until their last use; and whether they are loaded when the chunk before ends.
template <typename G, int BV> constexpr bool HELD = sizeof(G) == 2 && BV == 64;
template <class ReadOrder, typename G, int BV>
constexpr bool EARLY = HELD<G, BV> || (sizeof(G) == 2 && ReadOrder::reads_before_write);

template <bool NEAR, class ReadOrder, typename T, typename G>
__device__ __forceinline__ void meet_within(Gradients& d, const TokenOperands<T, G>& tokens,
                                            const Counts<ReadOrder, G>& counts, const PairReader& dA, Pairs& pairs,
                                            const float (&u)[2], float (&du)[2]) {
#pragma unroll
  for (int n = 0; n < SUBCHUNKS; ++n) {
    SubChunk queries, keys, near, near_keys, over_keys = {}, over_queries = {};
    float present[4] = {};  // of tokens with themselves
    const float2 own = ReadOrder::reads_before_write ? own_pair(pairs, n) : float2{};
    const auto meet_itself = [&](int i, float q, float k) {
      if (!ReadOrder::reads_before_write) return;
      const float x = (i % 2 ? own.y : own.x) * k;
      du[i / 2] = fmaf(q, x, du[i / 2]);
      present[i] = u[i / 2] * x;
    };
    decays_from_middle<NEAR>(near, near_keys, tokens.gates, counts, n);
    decay_within<true, T>(queries, keys, near, near_keys, tokens.queries, tokens.keys, n, meet_itself);
    dA.add_keys(over_keys, keys, n, n);
    dA.add_queries(over_queries, queries, n, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float writing = keys[i] * over_queries[i];
      d.dq[n][i] = fmaf(near[i], over_keys[i], present[i]);
      if (ReadOrder::reads_before_write) d.writing[n][i] = writing;
      d.weight[n][i] =
          ReadOrder::reads_before_write ? queries[i] * over_keys[i] : fmaf(queries[i], over_keys[i], -writing);
    }
  }
  __syncwarp();  // else all is made at once: there are no registers for that
}

// from_state: S do. Calls write(what the state has of the keys) when that and its decays stand.
template <bool HELD, class ReadOrder, typename T, typename G, class F>
__device__ __forceinline__ void meet_across(Gradients& d, TokenOperands<T, G>& tokens, const Values& from_state,
                                            SubChunkDecays& decays, G (*g)[CHUNK][PANEL<G>], T (&q)[CHUNK][64],
                                            T (&k)[CHUNK][64], const Counts<ReadOrder, G>& counts, const PairReader& dA,
                                            float scale, bool& growth, int at, F write) {
  Operand &queries = tokens.queries, &keys = tokens.keys;
  Across read, met, over = {};
  StateOperand<T> written;
  Chunk far;
  if (!HELD) tokens.gates.load(g, at);
  growth = outgrows<T>(tokens.gates, g);
  decays_of(decays, tokens.gates);
  if (!HELD) load_operand(keys, k, at);
  decays_to_end(far, tokens.gates, counts);
  decay_keys<true, T>(met, keys, far, decays, [&](auto... x) { written.put(x...); });
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    dA.add_keys(over.by8[x], met.by8[x], 2 * x + 1, 2 * x);
    dA.add_keys(over.by16[x], met.by16[0], 2 + x, 0);
    dA.add_keys(over.by16[x], met.by16[1], 2 + x, 1);
  }
  write(written);
  if (!HELD) load_operand(queries, q, at);
  decays_from_start(far, tokens.gates, counts);
  const QueryScale range = scale_of_queries<ReadOrder, T>(far);
  decay_queries<true, T>(
      read, queries, far, decays, {scale * range.up[0], scale * range.up[1]}, [&](int n, int h, float x, float y) {
        const float2 two = state_values<T>(x, y);
        const int i = 2 * h;
        d.weight[n][i] = fmaf(range.down[h] * two.x, from_state[4 * n + i], d.weight[n][i]);
        d.weight[n][i + 1] = fmaf(range.down[h] * two.y, from_state[4 * n + i + 1], d.weight[n][i + 1]);
      });
#pragma unroll
  for (int x = 0; x < 2; ++x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d.weight[2 * x + 1][i] = fmaf(read.by8[x][i], over.by8[x][i], d.weight[2 * x + 1][i]);
      d.weight[2 + x][i] = fmaf(read.by16[x][i], over.by16[x][i], d.weight[2 + x][i]);
    }
  }
  each_pair([&](int n, int h) {
    const float by = scale * decays.before(n, h);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int i = 2 * h + p;
      const float x = from_state[4 * n + i];
      float at_start = by * x;  // of its sub-chunk
      if (n % 2) at_start += over.by8[n / 2][i];
      if (n == 2) at_start += over.by16[0][i];
      if (n == 3) at_start += decays.own[2][h] * over.by16[1][i];
      d.dq[n][i] = fmaf(far[n][i], at_start, d.dq[n][i]);
    }
  });
  const auto take = [&](int n, int i, float key, float over_queries) {
    if (ReadOrder::reads_before_write) d.writing[n][i] = fmaf(key, over_queries, d.writing[n][i]);
    else d.weight[n][i] = fmaf(-key, over_queries, d.weight[n][i]);
  };
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    SubChunk by8 = {}, by16 = {};
    dA.add_queries(by8, read.by8[x], 2 * x + 1, 2 * x);
    dA.add_queries(by16, read.by16[0], 2, x);
    dA.add_queries(by16, read.by16[1], 3, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      take(2 * x, i, met.by8[x][i], by8[i]);
      take(x, i, met.by16[x][i], by16[i]);
    }
  }
  __syncwarp();
}

// read_t <- sum_{i>t} read_i - sum_{j>=t} written_j over tokens of the chunk. all: over all of them.
__device__ __forceinline__ void sum_behind(Chunk& read, const Chunk& written, float (&all)[2]) {
  const int t = opaque(threadIdx.x) & 3;
  const bool next_counts = t % 2 == 0, far_counts = t / 2 == 0;  // the other lane of two; the other two
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    all[h] = 0.f;
#pragma unroll
    for (int n = SUBCHUNKS - 1; n >= 0; --n) {
      const float between = read[n][2 * h + 1] - written[n][2 * h];
      const float own = between + (read[n][2 * h] - written[n][2 * h + 1]);
      const float next = __shfl_xor_sync(0xffffffffu, own, 1), two = own + next;
      const float far = __shfl_xor_sync(0xffffffffu, two, 2);
      float behind = all[h] - written[n][2 * h + 1];
      if (next_counts) behind += next;
      if (far_counts) behind += far;
      all[h] += two + far;
      read[n][2 * h] = behind + between, read[n][2 * h + 1] = behind;
    }
  }
}

// A segment, behind so many chunks of others.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args, const Segment& at,
                                        int chunks) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31, t = lane & 3, tokens = at.tokens;
  const int kept = first_kept(args.shape, at);
  // All in float16 with 128 columns has no registers for a lane's places.
  const auto place = [](int x) { return NARROW<T> && sizeof(G) == 2 && BV == 128 ? opaque(x) : held(x); };
  const int channel = threadIdx.x / 32 * 16 + (lane >> 2), offset = place(lane_offset());
  const i64 K = args.shape.K, state = at.pair * K * args.shape.V;
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));  // else made anew each time
  const bool inside[2] = {channel < K, channel + 8 < K};
  const Counts<ReadOrder, G> counts;
  const int pair_row = place(pair_index(lane >> 2, 2 * t)), pair_column = place(pair_index(2 * t, lane >> 2));

  float S[BV / 2], u[2] = {}, du[2] = {}, *sums = args.sums + at.chunk * (K + FLAGS) + channel;
  load_state<BV>(S, args.initial ? args.initial + state : nullptr, args.shape, channel);
  if (ReadOrder::reads_before_write)
    for (int h = 0; h < 2; ++h)
      if (inside[h]) u[h] = args.u[at.head * K + channel + 8 * h];

  Values from_state;
  TokenOperands<T, G> operands;
  const auto begin = [&](int iteration) {  // of the chunk behind the last one nobody reads what this gives
    if ((iteration - chunks) * CHUNK < tokens)
      barrier_wait(s.pairs[iteration % STAGES], iteration / STAGES & 1);  // dA and do are there
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    start_read<BV>(from_state, S, in.read);
    if ((iteration - chunks) * CHUNK < tokens)
      barrier_wait(s.full[iteration % STAGES], iteration / STAGES & 1);  // channels, too
    if (EARLY<ReadOrder, G, BV>)
      operands.template load<!HELD<G, BV>>(own_panels(in.g, warpgroup), in.q[warpgroup], in.k[warpgroup], offset);
  };
  if (!Schedule::in_turn || tokens) begin(chunks);  // else another segment's tokens may be coming
#pragma unroll 1
  for (int iteration = chunks; (iteration - chunks) * CHUNK < tokens; ++iteration, sums += K + FLAGS) {
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    Gradients found;
    SubChunkDecays decays;
    bool growth;
    const auto g_panels = own_panels(in.g, warpgroup);
    T(&q_panel)[CHUNK][64] = in.q[warpgroup], (&k_panel)[CHUNK][64] = in.k[warpgroup];
    const PairReader dA(in.dA, pair_row, pair_column);
    if (!EARLY<ReadOrder, G, BV>) operands.template load<true>(g_panels, q_panel, k_panel, offset);
    wgmma_wait<0>();  // for from_state, under way since the chunk before
    wgmma_keep(from_state);
    meet_within<!HELD<G, BV>, ReadOrder>(found, operands, counts, dA, in.dA, u, du);
    const auto write = [&](StateOperand<T>& keys) {  // amid the chunk, so that nobody waits for the product at its end
      if (growth) {                                  // what has been computed, and will be, may be anything
        grow_queries<ReadOrder, T, G, BK, BV>(S, sums, inside, in.q, in.k, in.g, in.v, in.do_, in.dA, u, scale);
        each_pair([&](int n, int h) { keys.put(n, h, 0.f, 0.f), decays.own[n][h] = 1.f; });
      }
      if (lane == 0) reinterpret_cast<bool*>(sums - channel + K)[threadIdx.x / 32] = growth;
      decay_state<BV>(S, decays);
      wgmma_fence();
      start_write<T, BV>(S, keys, in.v);
      wgmma_commit();
    };
    meet_across<HELD<G, BV>, ReadOrder>(found, operands, from_state, decays, g_panels, q_panel, k_panel, counts, dA,
                                        scale, growth, offset, write);

    float sum[2];
    u32 unit[2];
    if (!growth) {
      if constexpr (IN_UNITS<G>) {
        float size[2] = {};
        add_sizes(size, found.weight);
        if (ReadOrder::reads_before_write) add_sizes(size, found.writing);
        units_for(unit, size);
      }
      if (ReadOrder::reads_before_write) sum_behind(found.weight, found.writing, sum);
      else sum_tokens_by_shuffles<true, true>(found.weight, sum);
      __syncwarp();  // all lanes have read the warp's channels of q and g
      store_chunk_values(&q_panel, found.dq, offset);
      store_query_share(g_panels, found.weight, unit, offset);
    }
    wgmma_wait<0>();
    wgmma_keep(S);
    // The next chunk may be another segment's, whose tokens are just coming.
    begin(iteration + (!Schedule::in_turn || (iteration + 1 - chunks) * CHUNK < tokens));
    barrier_arrive(s.done[iteration % STAGES]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!growth && t == 0 && inside[h]) sums[8 * h] = IN_UNITS<G> ? sum_with_unit(sum[h], unit[h]) : sum[h];
    const int next = (iteration + 1 - chunks) * CHUNK;
    if (next % CHECKPOINT_EVERY == 0 && (next < tokens || args.joined)) {
      float4* to = kept_at<BK, BV>(args.kept, kept + next / CHECKPOINT_EVERY);
#pragma unroll
      for (int n = 0; n < BV / 8; ++n) to[n * 2 * BK] = {S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3]};
    }
  }

  wgmma_wait<0>();
  wgmma_keep(from_state);
  float end[2] = {};
  const bool ends = args.dht && (!args.joined || at.last != at.pair);  // else the second pass is not cut here
  if (ends)
    each_of_state<BV, true>(S, args.dht + at.last * K * args.shape.V, args.shape, channel,
                            [&](float& x, float& y, const float* from) {
                              const float2 two = *reinterpret_cast<const float2*>(from);
                              end[&x - S >> 1 & 1] += x * two.x + y * two.y;
                            });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float whole = channel_sum(end[h]), all = channel_sum(du[h]);
    if (t || !inside[h]) continue;
    if (ends) args.ends[at.last * K + channel + 8 * h] = whole;
    if (!ReadOrder::reads_before_write) continue;
    if (at.last != at.pair) args.du[at.last * K + channel + 8 * h] = 0.f;
    args.du[at.pair * K + channel + 8 * h] = all;
  }
}

template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__global__ void __launch_bounds__(2 * BK + 128, BK + BV == 128 ? 2 : 1)
    gated_sm90_backward_queries(const __grid_constant__ Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV, Schedule>*>(dynamic_smem());
  constexpr int CONSUMERS = 2 * BK;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.arrived[stage], 32);
      barrier_init(s.full[stage], 32);
      barrier_init(s.pairs[stage], 3 * 32);
      barrier_init(s.done[stage], CONSUMERS);
    }
  fence_async();
  __syncthreads();                               // the barriers stand
  constexpr bool TIGHT = BK == 128 || BV == 64;  // otherwise nobody lacks registers
  if (threadIdx.x < CONSUMERS) {
    if constexpr (TIGHT) registers_up<BK == 64 ? 216 : 232>();
    each_segment<Schedule, false>(args,
                                  [&](const Segment& at, int chunks) { consume<ReadOrder>(s, args, at, chunks); });
    return;
  }
  if constexpr (TIGHT) registers_down<40>();
  const int warp = (threadIdx.x - CONSUMERS) / 32;
  if (warp == 3) return move<ReadOrder>(s, args);
  each_segment<Schedule, false>(args, [&](const Segment& at, int chunks) {
    multiply_tokens<ReadOrder>(s, at.tokens, chunks, float(args.scale), warp, threadIdx.x & 31);
  });
}

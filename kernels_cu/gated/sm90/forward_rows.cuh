// what      Rows, tokens of a chunk, in Hopper's forward kernel: how they are copied from memory, where they are in
//           tiles of operands, and how these are sent to the cluster's other block.
// limits    sm_90a; half data
#include "gated/sm90/forward_storage.cuh"

// x = 4 neighbouring values as float32.
__device__ __forceinline__ void unpack(float (&x)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
template <typename T> __device__ __forceinline__ void unpack(float (&x)[4], uint2 four) {
  x[0] = to_float(T{u16(four.x)}), x[1] = to_float(T{u16(four.x >> 16)});
  x[2] = to_float(T{u16(four.y)}), x[3] = to_float(T{u16(four.y >> 16)});
}
template <typename T> __device__ __forceinline__ void unpack(float (&x)[4], const T* from) {
  unpack<T>(x, *reinterpret_cast<const uint2*>(from));
}

__device__ __forceinline__ float dot(const float (&x)[4], const float (&y)[4]) {
  return fmaf(x[3], y[3], fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0])));
}

// A producer thread's group, its number in the group, its sub-chunk of 8 rows, that one's first row, and the first of
// the thread's 4 channels. BK / 4 lanes share a sub-chunk.
template <int BK> struct ProducerCoord {
  static constexpr int LANES = BK / 4, THREADS = NUM_SUBCHUNKS * LANES;
  int group, thread, subchunk, first, channel;
  __device__ __forceinline__ ProducerCoord(u32 producer)
      : group(producer / THREADS),
        thread(producer % THREADS),
        subchunk(producer % THREADS / LANES),
        first(subchunk * BC),
        channel(producer % LANES * 4) {}
};

// The first row in ScoreOperands of a sub-chunk's queries decayed from the border before it, or keys decayed to the
// border after it. Queries of sub-chunk 3 and keys of sub-chunk 0 have one more copy, for the chunk's middle.
template <class Scores> __device__ __forceinline__ int near_queries(const Scores& s, int subchunk) {
  return subchunk == 2 ? s.HALF : s.NEAR + 4 * (subchunk - 1);  // sub-chunk 0 has none
}
template <class Scores> __device__ __forceinline__ int near_keys(const Scores& s, int subchunk) {
  return subchunk == 1 ? s.HALF + BC : s.NEAR + 4 * subchunk;  // sub-chunk 3 has none
}

// y = x times a factor of each channel, or, if W is 1, one factor of all.
template <int W> __device__ __forceinline__ void times(float (&y)[4], const float (&x)[4], const float (&by)[W]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = x[c] * by[c % W];
}

// Stores 4 neighbouring values.
__device__ __forceinline__ void put_four(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
}
template <typename T> __device__ __forceinline__ void put_four(T* to, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
}

// Stores the decays of 4 neighbouring channels. Of each 16 channels the four that one consumer lane needs are side by
// side: 2t, 2t + 1, 8 + 2t, 9 + 2t with t = lane % 4.
__device__ __forceinline__ void put_decays(float* decays, u32 channel, const float (&x)[4]) {
  float* const to = decays + channel / 16 * 16 + channel % 8 * 2 + channel % 16 / 8 * 2;
  *reinterpret_cast<float2*>(to) = {x[0], x[1]}, *reinterpret_cast<float2*>(to + 4) = {x[2], x[3]};
}

// The address of channels `channel` to `channel` + 3 in row `first`, a multiple of 8, of a swizzled tile.
template <typename T, int PANELS>
__device__ __forceinline__ char* in_tile(T (&tile)[PANELS][CHUNK][64], int first, u32 channel) {
  return reinterpret_cast<char*>(tile) + channel / 64 * (CHUNK * 128) + first * 128 + channel % 64 * 2;
}
// The same for tf32 queries that are multiplied by the state. Each 8 channels have the order in which registers hold
// the state: 0 2 4 6 1 3 5 7, and in every second panel 1 3 5 7 0 2 4 6, so that stores to two panels are in different
// banks.
template <int PANELS>
__device__ __forceinline__ char* in_tile(float (&tile)[PANELS][CHUNK][32], int first, u32 channel) {
  const u32 place = (channel % 32 / 8 * 32 + channel % 8 * 2) ^ channel / 32 % 2 * 16;
  return reinterpret_cast<char*>(tile) + channel / 32 * (CHUNK * 128) + first * 128 + place;
}

// Stores 4 channels of the sub-chunk's row i. first: in_tile of row 0.
template <typename T> __device__ __forceinline__ void put_key(char* first, int i, const float (&x)[4]) {
  store_flipped(first, i * 16, i * 128, {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])});
}
template <typename T> __device__ __forceinline__ void put_state_query(char* first, int i, const float (&x)[4]) {
  if constexpr (COARSE<T>) return put_key<T>(first, i, x);
  store_flipped(first, i * 16, i * 128, {__float_as_uint(x[0]), __float_as_uint(x[2])});
  store_flipped(first, i * 16 ^ 16, i * 128, {__float_as_uint(x[1]), __float_as_uint(x[3])});
}

// The log gates of the sub-chunk's token i: of this lane's 4 channels, or the ScalarDecay, which lane i of the
// sub-chunk's lanes has read.
template <bool READS, typename T, int BK>
__device__ __forceinline__ void gates_of(float (&g)[1], const InputStage<READS, T, ScalarDecay, BK>&,
                                         const ProducerCoord<BK>&, float scalar_gate, int i) {
  constexpr int LANES = ProducerCoord<BK>::LANES;
  g[0] = __shfl_sync(0xffffffffu, scalar_gate, (threadIdx.x & 31) / LANES * LANES + i);
}
template <bool READS, typename T, typename G, int BK>
__device__ __forceinline__ void gates_of(float (&g)[4], const InputStage<READS, T, G, BK>& in,
                                         const ProducerCoord<BK>& me, float, int i) {
  unpack(g, in.g[me.first + i] + me.channel);
}

// The ScalarDecay of the sub-chunk's token thread % 8; 0, which is no decay, after the sequence's end.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ float gate_of(const Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                         const ProducerCoord<BK>& me, int chunk) {
  const WorkTile& at = s.work;
  const int row = chunk * CHUNK + me.first + me.thread % BC;
  const bool exists = row < at.tokens && at.start + row < i32(args.shape.T);
  return WIDTH<G> == 1 && exists ? *args.scalar_gate.row(at.batch, at.head, at.start + row) : 0.f;
}

// Set to zero the gates, or the keys, of this sub-chunk's tokens from `tokens` on, which are after the sequence's end,
// so that they change no state. The outputs of such tokens are not stored.
template <bool READS, typename T, typename G, int BK>
__device__ __noinline__ void clear_gates(InputStage<READS, T, G, BK>& in, int first, int tokens, int channel) {
  if constexpr (WIDTH<G> == 4)
    for (int row = max(first, tokens); row < first + BC; ++row)
      for (int c = channel; c < channel + 4; ++c) in.g[row][c] = from_float<G>(0.f);
  fence_async();  // orders these stores before the copy of the next chunk to the same place
}
template <bool READS, typename T, typename G, int BK>
__device__ __noinline__ void clear_keys(InputStage<READS, T, G, BK>& in, int first, int tokens, int channel) {
  for (int row = max(first, tokens); row < first + BC; ++row)
    for (int c = channel; c < channel + 4; ++c) in.k[row][c] = from_float<T>(0.f);
  fence_async();  // likewise
}

// Starts copying a chunk's rows without a tensor map; for all threads of a group. Rows from `tokens` on and channels
// from `channels` on become zero. Not inlined, since it is rare. tokens: the sequence's tokens from this chunk on.
template <int THREADS, typename X, int BK>
__device__ __noinline__ void copy_rows(X (&to)[CHUNK][BK], const X* from, i64 stride, int tokens, int channels,
                                       int thread) {
  constexpr int PIECE = 16 / sizeof(X), PIECES = BK / PIECE;
#pragma unroll 4
  for (int at = thread; at < CHUNK * PIECES; at += THREADS) {
    const int row = at / PIECES, channel = at % PIECES * PIECE;
    cp_async<16>(&to[row][channel], from + row * stride + channel, row < tokens && channel < channels);
  }
}

// Start copying the gates, or the queries and keys, of the group's chunk `chunk`, if the sequence has it; for all
// threads of the group. tokens: of the sequence.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void fetch_gates(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, int thread,
                                            int group, int chunk, int tokens) {
  if constexpr (WIDTH<G> == 4) {
    if (chunk * CHUNK >= tokens) return;
    const WorkTile& at = s.work;
    if (__builtin_expect(runs_backwards<Schedule>(args), false)) {
      const i64 first = args.channel + (Schedule::K_RANKS > 1 ? rank_of<Schedule>() * BK : 0);
      const G* const from = args.g_rows.row(at.batch, at.head, at.start + chunk * CHUNK) + first;
      copy_rows<ProducerCoord<BK>::THREADS>(s.inputs[group].g, from, args.g_rows.t, tokens - chunk * CHUNK,
                                            int(args.shape.K - first), thread);
      copies_arrive(s.gates[group]);
      return;
    }
    if (thread) return;
    auto& g = s.inputs[group].g;
    const i32 channel = i32(args.channel) + (Schedule::K_RANKS > 1 ? rank_of<Schedule>() * BK : 0);
    barrier_expect(s.gates[group], sizeof g);
    tensor_load(g, args.g, s.gates[group], channel, at.start + chunk * CHUNK, at.head, at.batch);
  }
}
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void fetch_rows(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, int thread,
                                           int group, int chunk, int tokens) {
  if (chunk * CHUNK >= tokens) return;
  const WorkTile& at = s.work;
  auto& in = s.inputs[group];
  if (__builtin_expect(runs_backwards<Schedule>(args), false)) {
    constexpr int THREADS = ProducerCoord<BK>::THREADS;
    const i64 first = args.channel + (Schedule::K_RANKS > 1 ? rank_of<Schedule>() * BK : 0);
    const int rest = tokens - chunk * CHUNK, channels = int(args.shape.K - first);
    const auto start = [&](const Rows<const T>& x) {
      return x.row(at.batch, at.head, at.start + chunk * CHUNK) + first;
    };
    copy_rows<THREADS>(in.k, start(args.k_rows), args.k_rows.t, rest, channels, thread);
    if constexpr (Schedule::reads) copy_rows<THREADS>(in.q, start(args.q_rows), args.q_rows.t, rest, channels, thread);
    copies_arrive(s.rows[group]);
    return;
  }
  if (thread) return;
  const i32 channel = i32(args.channel) + (Schedule::K_RANKS > 1 ? rank_of<Schedule>() * BK : 0);
  const i32 row = at.start + chunk * CHUNK, h = at.head, b = at.batch;
  Barrier& rows = s.rows[group];
  if constexpr (Schedule::reads) {
    barrier_expect(rows, sizeof in.k + sizeof in.q);
    tensor_load(in.k, args.k, rows, channel, row, h, b);
    tensor_load(in.q, args.q, rows, channel, row, h, b);
  } else {
    barrier_expect(rows, sizeof in.k);
    tensor_load(in.k, args.k, rows, channel, row, h, b);
  }
}

// Start copying this block's operands, or scores, to the cluster's other block, where each copy arrives at `full`; for
// one thread, after a barrier of the group.
constexpr int SENT = 4;  // copies of a chunk: q, k, decays and scores
template <class S> __device__ __forceinline__ void send_operands(const S& s, int stage, int rank, Barrier& full) {
  const auto& q = s.operands.q[stage][rank];
  const auto& k = s.operands.k[stage][rank];
  const auto& made = s.numbers[stage];
  copy_to_peer(q, sizeof q, full);
  copy_to_peer(k, sizeof k, full);
  // Each of K_RANKS blocks writes numbers.row itself; blocks that make chunks in turn send it along with the decays.
  const u32 row = sizeof made.decay == sizeof made.decay[0] ? sizeof made.row : 0;
  copy_to_peer(made.decay[rank], sizeof made.decay[0] + row, full);
}
template <class S> __device__ __forceinline__ void send_scores(const S& s, int stage, int rank, Barrier& full) {
  const auto& A = s.operands.A[stage][rank];
  copy_to_peer(A, sizeof A, full);
}

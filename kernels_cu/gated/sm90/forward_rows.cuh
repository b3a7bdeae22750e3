// what      For Hopper's forward kernel: copies of a chunk's q, k and g from memory, the addresses of a token's row in
//           the tiles of operands, and copies of operands to the other block of the cluster. A row is a token of a
//           chunk of 32. Args, Shared and their parts: forward_storage.cuh; Schedule and WorkTile:
//           forward_schedules.cuh
// limits    sm_90a; q and k of float16 or bfloat16
#include "gated/sm90/forward_storage.cuh"

// From the includes:
//   store_flipped(base, flip, offset, x): stores x at (base XOR flip) + offset, in bytes
//   copy_to_other_block(x, bytes, full): starts copying x to the same address in the cluster's other block, and arrives
//     at that block's `full`, whose phase ends after the copy
//   ScalarDecay: the type G of gates that all channels of a token share. HAS_CHANNEL_GATES is then false, and
//     InputStage, a chunk's q, k and g as they are in memory, has no g: threads read such gates themselves
//     (args.scalar_gate)
//   StageHeader: `decay` of each channel over the chunk; after it `row`, which tells what the stage holds: WHOLE_CHUNK,
//     or which one token
//   threads_copy_rows: whether threads copy rows of q, k and g, not tensor maps: tokens have a negative stride

// Sets x to 4 neighbouring values as float32: from float32 in memory, from 16-bit numbers in two registers, or from
// 16-bit numbers in memory.
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

// The sum of x[c] y[c] over 4 channels.
__device__ __forceinline__ float dot(const float (&x)[4], const float (&y)[4]) {
  return fmaf(x[3], y[3], fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0])));
}

// What a producer thread computes: 4 channels, from `channel` on, of a sub-chunk of 8 rows, from the chunk's row
// first_row on. LANES lanes share a sub-chunk. group: the thread's producer group; thread: its number in the group.
template <int BK> struct ProducerCoord {
  static constexpr int LANES = BK / 4, THREADS = NUM_SUBCHUNKS * LANES;
  int group, thread, subchunk, first_row, channel;
  __device__ __forceinline__ ProducerCoord(u32 producer)
      : group(producer / THREADS),
        thread(producer % THREADS),
        subchunk(producer % THREADS / LANES),
        first_row(subchunk * SUB_CHUNK),
        channel(producer % LANES * 4) {}
};

// Sets y to x times a factor for each channel, or times factor[0] if GATES is 1.
template <int GATES>
__device__ __forceinline__ void times(float (&y)[4], const float (&x)[4], const float (&factor)[GATES]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = x[c] * factor[c % GATES];
}

// Stores 4 neighbouring values as float32, or rounded to T.
__device__ __forceinline__ void put_four(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
}
template <typename T> __device__ __forceinline__ void put_four(T* to, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
}

// Stores the decays x of 4 neighbouring channels from `channel` on for consumers: of each 16 channels, the four that
// one consumer lane needs are side by side: 2t, 2t + 1, 8 + 2t, 9 + 2t with t = lane % 4.
__device__ __forceinline__ void put_decays(float* decays, u32 channel, const float (&x)[4]) {
  float* const to = decays + channel / 16 * 16 + channel % 8 * 2 + channel % 16 / 8 * 2;
  *reinterpret_cast<float2*>(to) = {x[0], x[1]}, *reinterpret_cast<float2*>(to + 4) = {x[2], x[3]};
}

// The address of channels `channel` ... `channel` + 3 in row `first_row`, a multiple of 8, of a tile of operands in the
// 128-byte swizzle. In row first_row + i they are at this address XOR 16 i, plus 128 i bytes.
template <typename T, int PANELS>
__device__ __forceinline__ char* in_tile(T (&tile)[PANELS][CHUNK][64], int first_row, u32 channel) {
  return reinterpret_cast<char*>(tile) + channel / 64 * (CHUNK * 128) + first_row * 128 + channel % 64 * 2;
}
// That address in a tile of tf32 queries, which are multiplied by the state. Each 8 channels have the order in which
// registers hold the state: 0 2 4 6 1 3 5 7, and in every second panel 1 3 5 7 0 2 4 6: lanes 8 apart store to two
// panels at the same time, and so to different banks.
template <int PANELS>
__device__ __forceinline__ char* in_tile(float (&tile)[PANELS][CHUNK][32], int first_row, u32 channel) {
  const u32 place = (channel % 32 / 8 * 32 + channel % 8 * 2) ^ channel / 32 % 2 * 16;
  return reinterpret_cast<char*>(tile) + channel / 32 * (CHUNK * 128) + first_row * 128 + place;
}

// Stores 4 channels x of row i of a sub-chunk: of keys, or of queries that are multiplied by the state. row0: the
// address of the sub-chunk's row 0, from in_tile.
template <typename T> __device__ __forceinline__ void put_key(char* row0, int i, const float (&x)[4]) {
  store_flipped(row0, i * 16, i * 128, {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])});
}
template <typename T> __device__ __forceinline__ void put_state_query(char* row0, int i, const float (&x)[4]) {
  if constexpr (IS_BFLOAT16<T>) return put_key<T>(row0, i, x);
  store_flipped(row0, i * 16, i * 128, {__float_as_uint(x[0]), __float_as_uint(x[2])});
  store_flipped(row0, i * 16 ^ 16, i * 128, {__float_as_uint(x[1]), __float_as_uint(x[3])});
}

// Sets g to the log gates of the sub-chunk's token i: those of this lane's 4 channels, or, if G is ScalarDecay, the one
// that all channels have. scalar_gate: what load_scalar_gate gave this lane; of a sub-chunk's lanes, lane i has token
// i's.
template <bool HAS_OUTPUTS, typename T, typename G, int BK>
__device__ __forceinline__ void load_gates(float (&g)[GATES_PER_TOKEN<G>], const InputStage<HAS_OUTPUTS, T, G, BK>& in,
                                           const ProducerCoord<BK>& coord, float scalar_gate, int i) {
  constexpr int LANES = ProducerCoord<BK>::LANES;
  if constexpr (HAS_CHANNEL_GATES<G>) unpack(g, in.g[coord.first_row + i] + coord.channel);
  else g[0] = __shfl_sync(0xffffffffu, scalar_gate, (threadIdx.x & 31) / LANES * LANES + i);
}

// Returns the log gate, if G is ScalarDecay, of token thread % 8 of the thread's sub-chunk in chunk `chunk`; 0, which
// is no decay, after the sequence's end and for other types of gates. Tokens are compared with T, too, since
// work.tokens is rounded up to whole chunks at the end of a batch row, unless threads copy rows.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ float load_scalar_gate(const Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                                  const ProducerCoord<BK>& coord, int chunk) {
  const WorkTile& work = s.work;
  const int row = chunk * CHUNK + coord.first_row + coord.thread % SUB_CHUNK;
  const bool exists = row < work.tokens && work.start + row < i32(args.shape.T);
  return !HAS_CHANNEL_GATES<G> && exists ? *args.scalar_gate.row(work.batch, work.head, work.start + row) : 0.f;
}

// Set to zero the gates, or the keys, of this thread's channels and sub-chunk in rows from `tokens_left` on, which are
// after the sequence's end, so that they change no state. The outputs of such rows are not stored. tokens_left: the
// sequence's tokens from the chunk's start on; first_row, channel: as in ProducerCoord.
template <bool HAS_OUTPUTS, typename T, typename G, int BK>
__device__ __noinline__ void clear_gates(InputStage<HAS_OUTPUTS, T, G, BK>& in, int first_row, int tokens_left,
                                         int channel) {
  if constexpr (HAS_CHANNEL_GATES<G>)
    for (int row = max(first_row, tokens_left); row < first_row + SUB_CHUNK; ++row)
      for (int c = channel; c < channel + 4; ++c) in.g[row][c] = from_float<G>(0.f);
}
template <bool HAS_OUTPUTS, typename T, typename G, int BK>
__device__ __noinline__ void clear_keys(InputStage<HAS_OUTPUTS, T, G, BK>& in, int first_row, int tokens_left,
                                        int channel) {
  for (int row = max(first_row, tokens_left); row < first_row + SUB_CHUNK; ++row)
    for (int c = channel; c < channel + 4; ++c) in.k[row][c] = from_float<T>(0.f);
}

// Starts copying a chunk's rows by all threads of a group, for arrays whose tokens have a negative stride, which tensor
// maps do not allow. Rows from `tokens_left` on and channels from `channels` on become zero. from: the chunk's first
// row in memory; stride: the distance of rows; tokens_left: the sequence's tokens from this chunk on, never rounded up
// to whole chunks. Rows start on 16 bytes and are a multiple of 16 bytes long, as those of tensor maps.
// copy_rows_apart: the same, not inlined.
template <int THREADS, typename X, int BK>
__device__ __forceinline__ void copy_rows(X (&to)[CHUNK][BK], const X* from, i64 stride, int tokens_left, int channels,
                                          int thread) {
  constexpr int PIECE = 16 / sizeof(X), PIECES = BK / PIECE;
#pragma unroll 4
  for (int index = thread; index < CHUNK * PIECES; index += THREADS) {
    const int row = index / PIECES, channel = index % PIECES * PIECE;
    cp_async<16>(&to[row][channel], from + row * stride + channel, row < tokens_left && channel < channels);
  }
}
template <int THREADS, typename X, int BK>
__device__ __noinline__ void copy_rows_apart(X (&to)[CHUNK][BK], const X* from, i64 stride, int tokens_left,
                                             int channels, int thread) {
  copy_rows<THREADS>(to, from, stride, tokens_left, channels, thread);
}

// Starts copying a chunk's rows of q, k or g. With 64 channels the loop over rows is apart.
template <typename X, int BK, class S, class Args>
__device__ __forceinline__ void copy_input(X (&to)[CHUNK][BK], const StridedRows<const X>& rows, const S& s,
                                           const Args& args, int thread, int chunk, int tokens) {
  constexpr int THREADS = ProducerCoord<BK>::THREADS;
  const WorkTile& work = s.work;
  const X* const from = rows.row(work.batch, work.head, work.start + chunk * CHUNK) + args.channel;
  const int tokens_left = tokens - chunk * CHUNK, channels = int(args.shape.K - args.channel);
  if constexpr (BK == 128) copy_rows<THREADS>(to, from, rows.token_stride, tokens_left, channels, thread);
  else copy_rows_apart<THREADS>(to, from, rows.token_stride, tokens_left, channels, thread);
}

// Inputs of a chunk that are copied together: g; or k and, if has_outputs, q.
enum Inputs { LOG_GATES, QUERIES_AND_KEYS };

// Starts copying these inputs by all threads of a group, and lets each arrive once its copies are complete.
template <Inputs WHAT, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void copy_by_threads(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, int thread,
                                                int group, int chunk, int tokens) {
  auto& in = s.inputs[group];
  if constexpr (WHAT == LOG_GATES) copy_input(in.g, args.g_rows, s, args, thread, chunk, tokens);
  else copy_input(in.k, args.k_rows, s, args, thread, chunk, tokens);
  if constexpr (WHAT == QUERIES_AND_KEYS && Schedule::has_outputs)
    copy_input(in.q, args.q_rows, s, args, thread, chunk, tokens);
  mbarrier_arrive_after_copies(WHAT == LOG_GATES ? s.gates_copied[group] : s.qk_copied[group]);
}
// The same with 128 channels: out of line with all that it reads. In the loop over chunks the addresses took registers,
// and 2 KB of code. With 64 channels called so, too, RWKV-6 took 0.223 ms for 0.214 at 8,4096,32,64.
template <Inputs WHAT, class Schedule, typename T, typename G, int BK, int BV>
__device__ __noinline__ void copy_by_threads_apart(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                                   int thread, int group, int chunk) {
  copy_by_threads<WHAT>(s, args, thread, group, chunk, s.work.tokens);
}

// Starts copying these inputs of chunk `chunk` to the group's, if the sequence has such a chunk; nothing if G is
// ScalarDecay and WHAT is LOG_GATES. Once they are there, a phase of s.gates_copied[group], or of s.qk_copied[group],
// ends. The phase has one arrival and the bytes that tensor maps copy, or, where threads copy rows, an arrival of each
// thread (forward.cu initialises the barriers). For all threads of the group. tokens: work.tokens, where threads copy
// rows the exact number (work_tile); thread: its number in the group. The first channel is args.channel, the launch's
// first one; if K_RANKS blocks share the channels, each has BK, in order of rank.
template <Inputs WHAT, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void fetch_inputs(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, int thread,
                                             int group, int chunk, int tokens) {
  if constexpr (WHAT == QUERIES_AND_KEYS || HAS_CHANNEL_GATES<G>) {
    if (chunk * CHUNK >= tokens) return;
    if (__builtin_expect(threads_copy_rows<Schedule>(args), false)) {
      if constexpr (BK == 128) copy_by_threads_apart<WHAT>(s, args, thread, group, chunk);
      else copy_by_threads<WHAT>(s, args, thread, group, chunk, tokens);
      return;
    }
    if (thread) return;
    const WorkTile& work = s.work;
    auto& in = s.inputs[group];
    MBarrier& copied = WHAT == LOG_GATES ? s.gates_copied[group] : s.qk_copied[group];
    const i32 channel = i32(args.channel) + (Schedule::K_RANKS > 1 ? rank_in_cluster<Schedule>() * BK : 0);
    if constexpr (WHAT == LOG_GATES) {
      mbarrier_arrive_and_expect(copied, sizeof in.g);
      tensor_load(in.g, args.g, copied, channel, work.start + chunk * CHUNK, work.head, work.batch);
    } else {
      const i32 row = work.start + chunk * CHUNK, h = work.head, b = work.batch;
      mbarrier_arrive_and_expect(copied, sizeof in.k * (Schedule::has_outputs ? 2 : 1));
      tensor_load(in.k, args.k, copied, channel, row, h, b);
      if constexpr (Schedule::has_outputs) tensor_load(in.q, args.q, copied, channel, row, h, b);
    }
  }
}

// Start copying this block's operands, or scores A, to the same stage of the cluster's other block, where each copy
// arrives at `full`. For one thread, after a barrier of the group and then a fence_proxy_async of its own. rank: if
// K_RANKS > 1, this block's number in the cluster, and so the index of its own BK channels in a stage; else 0.
constexpr int SENT = 4;  // the copies of a chunk, for which `full` waits: q, k, decays and scores
template <class S> __device__ __forceinline__ void send_operands(const S& s, int stage, int rank, MBarrier& full) {
  const auto& q = s.operands.q[stage][rank];
  const auto& k = s.operands.k[stage][rank];
  const auto& header = s.headers[stage];
  copy_to_other_block(q, sizeof q, full);
  copy_to_other_block(k, sizeof k, full);
  // With K_RANKS = 2 each block makes a part of every chunk and writes its own header.row. With K_RANKS = 1 the blocks
  // make whole chunks in turn, and header.row, the struct's last member, is sent along with the decays before it.
  static_assert(sizeof header == sizeof header.decay + sizeof header.row, "header.row lies behind the decays");
  constexpr u32 row_bytes = S::K_RANKS == 1 ? sizeof header.row : 0;
  copy_to_other_block(header.decay[rank], sizeof header.decay[0] + row_bytes, full);
}
template <class S> __device__ __forceinline__ void send_scores(const S& s, int stage, int rank, MBarrier& full) {
  const auto& A = s.operands.A[stage][rank];
  copy_to_other_block(A, sizeof A, full);
}

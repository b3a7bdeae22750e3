// what      The consumer warpgroups of Hopper's forward kernel: each holds 64 columns of the state S [K, V] in its
//           registers, transposed, and multiplies the operands of chunks of 32 tokens that the producers have stored.
// math      A [query, key]: the chunk's scores; S: the state before the chunk; q: queries times the decays from the
//           chunk's start; k: keys times the decays to its end; decay [K]: over the chunk.  o = A v + q S,
//           S <- diag(decay) S + k^T v.  Computed transposed: accumulators are [column of V, token] and [column of V,
//           channel of K]. The producers have multiplied A and q by `scale`
// smem      reads operands and headers, which producers write; v, copied from memory, is read and overwritten by o:
//           Shared in forward_storage.cuh
// barriers  A chunk is computed at once or, if its operands would overflow (forward.cu), token by token: producers then
//           fill its stage several times, and headers[stage].row[0] says which token a fill holds. A warpgroup's
//           timetable of a chunk: "barrier": a named one, VALUES_BARRIER + warpgroup, of its 128 threads; slot: the
//           chunk's v, then o; stage: the chunk's operands and header. forward.cu sets the mbarriers' counts
//             wait            values_copied: v is in the slot, copied by one thread (threads_copy_rows: by all 128)
//             barrier         only in a last chunk of fewer than 32 tokens: the slot's other rows are 0
//             read the slot   a warp reads, and later overwrites, its own 16 columns only: no barrier is between
//             wait            full: the stage is complete
//             products        o = A v + q S; then, the last group, S <- diag(decay) S + k^T v. They read the stage
//             barrier         only SegmentState: all warps have read the slot
//             refill          thread 0: the previous chunk's o has been copied from its slot, and v is copied to it
//             write the slot  o, when its products have ended
//             arrive          empty, when all products have ended and row[0] has been read: a lane of every warp. Token
//                             by token: once more wait for full, products, write and arrive, for every later fill
//             barrier         not SegmentState: all warps have written o
//             store           one thread has o copied to memory. In such a last chunk all threads store it instead; if
//                             threads_copy_rows, in every chunk, and then they, not thread 0, refill this chunk's slot
//           One more barrier only separates two loops, see `consume`
// numerics  S in float32; its product with q reads it rounded to bfloat16, or, if q, k and v are float16, cut off to
//           tf32
// limits    sm_90a; BK and BV of 64 or 128
// tests     those of forward.cu; RegisterChoices: test_compile (spills, and products that run one after the other)
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_storage.cuh"
#include "wgmma.cuh"

// From the includes, wgmma.cuh:
//   wgmma<type, N, K_MAJOR or MN_MAJOR>(d, a, b, accumulate): starts d[64, N] = a b, or d += a b. a is in registers, b
//     is a descriptor of a swizzled tile: [N, depth] if K_MAJOR, else [depth, N]. Adding bytes / 16 to it moves the
//     tile
//   wgmma_fence_operand(d): keeps the compiler from moving accesses of d over it
//   k_major_tile(tile), mn_major_tile(tile, panel): the descriptors; each 64 columns of the second lie `panel` bytes
//     after the 64 before
// swizzled.cuh and forward_rows.cuh:
//   swizzled(tile, row, piece): the address of a row's 16-byte piece
//   unpack(x, from): loads 4 neighbouring floats
// forward_storage.cuh and forward_schedules.cuh:
//   T: the type of q, k, v and o; G: of the gates, or ScalarDecay. BK, BV: channels and columns of a block
//   K_RANKS: how many blocks make the operands of every chunk, each of BK channels; consumers of each of them hold all
//     K_RANKS BK channels. PANEL = 64: columns of a warpgroup. CHUNK_RANKS: how many make the operands of chunks in
//     turn. If either is 2, blocks copy operands to each other. SinglePass: both are 1; ClusterSplitK: K_RANKS is 2
//   SegmentState: the schedule without queries and outputs, for the final states of segments; both ranks are 1
//   work: the block's head, columns and tokens; `sequence`, the number over the batch of its sequence, segment or, in
//     SegmentState, part of a segment; its states `initial` and `final`, null if there is none
//   Operands: of each stage, for each of K_RANKS blocks, a tile of q and one of k with that block's BK channels, side
//     by side as one tile of K_RANKS BK channels, and a tile of that block's scores; scores_offset: the byte offset of
//     a stage's scores in a tile that two stages share, else 0
//   HAS_CHANNEL_GATES: whether channels have gates of their own; false for ScalarDecay, whose decays of a chunk are all
//     equal. SPLIT_SCORES: whether a score is stored as two numbers
//   headers[stage]: a StageHeader. `decay`: of the channels of each of K_RANKS blocks, [0] first. row[0], the only one
//     of the array that is used: WHOLE_CHUNK; or, token by token, the row of the token whose operands the stage holds,
//     plus MORE_FILLS if the stage will be filled again for this chunk. A first fill holds no token, and has MORE_FILLS
//   scan.skipped_decay: of SegmentState, the decay over the tokens that are skipped right before the block's part.
//     narrow_work (forward_forgotten.cuh) skips a segment's first tokens if they and the state before them are
//     forgotten at its end, and cuts the others in consecutive parts, one a block. So the decay is 0 for the first part
//     of a segment of which tokens are skipped, else 1
//   threads_copy_rows: whether tokens have a negative stride. Then threads copy v by v_rows and store o by Args::o;
//     else the tensor maps `v` and `o_boxes` do
//   args.channel: the launch's first channel
// ptx.cuh:
//   hide_origin(x), opaque(x): keep the compiler from holding in registers what it computes from x
//   copy_of(x): x in a register of its own, not rounded: a tf32 product ignores the last 13 bits

// Calls f(number, address) for every number of the state that this lane holds and that is inside [K, V], with its
// address in `state` [K, V]. A warpgroup holds CHANNELS channels, K_RANKS times BK, from `channel` on of 64 columns
// from `column` on. With t = lane % 4, g = lane / 4: S[4n + 2h + p] is of the 8n + 2t + p-th of these
// channels and the 16 warp + g + 8h-th of these columns.
template <int CHANNELS, typename P, class F>
__device__ __forceinline__ void each_state_number(float (&S)[CHANNELS / 2], P* state, const Shape& shape, i64 channel,
                                                  i64 column, F f) {
  const int t = threadIdx.x & 3;
  column += 16 * int(threadIdx.x / 32 % 4) + (threadIdx.x >> 2 & 7);
  P* row = state + (channel + 2 * t) * shape.V + column;  // of channel 8n + 2t
#pragma unroll
  for (int n = 0; n < CHANNELS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (channel + 8 * n + 2 * t + (i & 1) < shape.K && column + 8 * (i >> 1) < shape.V)
        f(S[4 * n + i], row + (i & 1) * shape.V + 8 * (i >> 1));
    row += 8 * shape.V;
    __syncwarp();  // keeps the compiler from computing all addresses first, for which registers are too few
  }
}

// Multiplies this lane's N numbers of the state, of 2 N channels from `first_channel` on, by the chunk's decays.
// put_decays (forward_rows.cuh) has ordered them so that the 4 that a lane needs of 16 channels are side by side.
// CHANNEL_DECAYS: HAS_CHANNEL_GATES; if false, only decays[0] is read. thread: the thread's number in the warpgroup.
template <bool CHANNEL_DECAYS, int N>
__device__ __forceinline__ void decay_state(float (&S)[N], const float* decays, int thread, int first_channel = 0) {
  const float common = decays[0];
  const int t = thread & 3;
#pragma unroll
  for (int n = 0; n < N / 4; n += 2) {
    float decay[4] = {common, common, common, common};
    const float* const from = decays + (first_channel + 8 * n) / 16 * 16 + 4 * t;
    if (CHANNEL_DECAYS && N / 4 > 1) unpack(decay, from);
    if (CHANNEL_DECAYS && N / 4 == 1) {
      const float2 two = *reinterpret_cast<const float2*>(from + first_channel % 16 / 8 * 2);
      decay[0] = two.x, decay[1] = two.y;
    }
#pragma unroll
    for (int m = 0; m < 2 && n + m < N / 4; ++m) {
      float* const numbers = S + 4 * (n + m);  // of 8 channels
      numbers[0] *= decay[2 * m], numbers[1] *= decay[2 * m + 1];
      numbers[2] *= decay[2 * m], numbers[3] *= decay[2 * m + 1];
    }
  }
}

// Starts the products o = A v. A is the sum of the tiles of the K_RANKS blocks that share the channels. SPLIT: a tile
// also holds the scores' rounding errors (SPLIT_SCORES). v: the warp's columns as two left operands of 16 tokens.
template <bool SPLIT, typename T, class Operands>
__device__ __forceinline__ void multiply_scores(float (&o)[16], const u32 (&v)[2][4], Operands& operands, int stage) {
  auto& tiles = operands.scores(stage);
#pragma unroll
  for (int rank = 0; rank < int(sizeof tiles / sizeof tiles[0]); ++rank) {
    u64 A = k_major_tile(tiles[rank]) + operands.scores_offset(stage) / 16;
    hide_origin(A);  // else the compiler would hold every address computed from it in a register
#pragma unroll
    for (int piece = 0; piece < (SPLIT ? 4 : 2); ++piece)  // 16 columns of the tile: of scores, then of errors
      wgmma<T, CHUNK, K_MAJOR>(o, v[piece % 2], A + piece * 32 / 16, rank + piece > 0);
  }
}

// `copy` makes a left operand a of DEPTH channels of the state, S[0 ... DEPTH / 2 - 1] of a lane. If T is bfloat16 it
// rounds them to bfloat16. Else it copies them as float32, because the operand is tf32, and its product ignores the
// last 13 bits. tile: the number of this group of DEPTH channels.
template <typename T> struct StateOperand {
  static constexpr int DEPTH = 8;
  using Format = tf32;
  // Channels get the order in which in_tile and put_state_query (forward_rows.cuh) store tf32 queries: even ones, then
  // odd ones. In every second panel of queries odd ones come first (`swap`), so that the producers' stores to two
  // panels are in different banks. A panel has the channels of 4 operands.
  static __device__ __forceinline__ void copy(u32 (&a)[4], const float* S, int tile) {
    const int swap = tile / 4 % 2 * 2;
    a[0 + swap] = copy_of(S[0]), a[1 + swap] = copy_of(S[2]), a[2 - swap] = copy_of(S[1]), a[3 - swap] = copy_of(S[3]);
  }
};
template <> struct StateOperand<bf16> {
  static constexpr int DEPTH = 16;
  using Format = bf16;
  static __device__ __forceinline__ void copy(u32 (&a)[4], const float* S, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i)  // else the compiler would round the state again where it reads a[i]
      a[i] = pack<bf16>(S[2 * i], S[2 * i + 1]), hide_origin(reinterpret_cast<int&>(a[i]));
  }
};

// Starts the products o = A v + q S, and computes S <- diag(decay) S. The state is copied to operands in parts of
// PART_OPERANDS: while the tensor cores multiply one part, this thread copies and decays the next one.
template <bool SPLIT, bool CHANNEL_DECAYS, int PART_OPERANDS, typename T, int N, class Operands>
__device__ __forceinline__ void multiply_scores_and_state(float (&o)[16], float (&S)[N], const u32 (&v)[2][4],
                                                          Operands& operands, const float* decays, int stage,
                                                          int thread) {
  using Copy = StateOperand<T>;
  constexpr int DEPTH = Copy::DEPTH, PARTS = 2 * N / DEPTH / PART_OPERANDS;
  static_assert(PARTS * PART_OPERANDS * DEPTH == 2 * N, "parts hold all channels");
  constexpr int PANEL_OPERANDS = 4;  // operands that read one panel of q: 128 bytes of channels
  u32 state[2][PART_OPERANDS][4];    // operands of this part and of the next
  u64 panels = k_major_tile(operands.q[stage]);
  hide_origin(panels);
  // Copies a part of S to operands, and decays S.
  const auto copy = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART_OPERANDS; ++n) {
      const int tile = part * PART_OPERANDS + n;
      float (&numbers)[DEPTH / 2] = *reinterpret_cast<float (*)[DEPTH / 2]>(S + tile * (DEPTH / 2));
      Copy::copy(state[part & 1][n], numbers, tile);
      decay_state<CHANNEL_DECAYS>(numbers, decays, thread, tile * DEPTH);
    }
  };
  // Starts the products of a part.
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART_OPERANDS; ++n) {
      const int tile = part * PART_OPERANDS + n;
      const u64 q = panels + (tile / PANEL_OPERANDS * (CHUNK * 128) + tile % PANEL_OPERANDS * 32) / 16;
      wgmma<typename Copy::Format, CHUNK, K_MAJOR>(o, state[part & 1][n], q, ACCUMULATE);
    }
    wgmma_commit();
  };
  copy(0);
  if constexpr (PARTS > 1) copy(1);
  wgmma_fence();
  // First, since its first product sets o; it closes no group: its products are in the group of multiply(0).
  multiply_scores<SPLIT, T>(o, v, operands, stage);
  multiply(0);
  if constexpr (PARTS > 1) multiply(1);
#pragma unroll
  for (int part = 2; part < PARTS; ++part) {
    wgmma_wait<1>();  // the products of part - 2, whose registers this part takes, have ended
    copy(part);
    wgmma_fence();
    multiply(part);
  }
}

// Stores o of the chunk's token `row` in a tile of o [token, column], swizzled. A lane has the numbers of a quarter of
// the tokens; only those that have this token store. thread: the thread's number in the warpgroup.
template <typename T>
__device__ __forceinline__ void put_output_row(T* tile, const float (&o)[16], int row, int thread) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = 0.f;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int p = 0; p < 2; ++p) x = row == 8 * n + thread % 4 * 2 + p ? o[4 * n + 2 * h + p] : x;
    T* const to = swizzled(tile, row, thread / 32 * 2 + h) + thread / 4 % 8;
    if (row % 8 / 2 == thread % 4) *to = from_float<T>(x);  // this lane has the token
  }
}

// Starts copying a chunk of v without a tensor map; for all threads of a warpgroup, which all arrive at `loaded`. At
// first `tile` is unused, later it holds a chunk of o that has been stored: a thread overwrites only the 16-byte pieces
// that it has stored itself (SegmentState: v, which by then all warps have read). Rows from `rows` on and columns from
// `columns` on become zero. stride: the distance of tokens in memory.
template <typename T>
__device__ __forceinline__ void copy_values(T (&tile)[CHUNK][PANEL], const T* from, i64 stride, int rows, int columns,
                                            MBarrier& loaded) {
  const int thread = opaque(threadIdx.x) % 128, piece = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < CHUNK; row += 16)
    cp_async<16>(swizzled(tile[0], row, piece), from + row * stride + 8 * piece, row < rows && 8 * piece < columns);
  mbarrier_arrive_after_copies(loaded);
}

// What an instance holds in registers, and what it computes again. No result depends on it. Where a reason is a spill
// or serialised products, it is NVRTC 13.5's for the instance that is named; ms are of an H200, with 4 sequences of
// 4096 tokens, 64 heads, and 128 channels and columns.
template <class Schedule, typename T, typename G, int BV> struct RegisterChoices {
  static constexpr bool ONE_BLOCK = Schedule::K_RANKS == 1;  // a lane has BK / 2 numbers of S; else BK, and BK is 128
  // Of multiply_scores_and_state: the state has two parts; else each operand is a part, which takes fewer registers.
  // With two parts bfloat16's products of 128 channels and columns are serialised.
  static constexpr bool TWO_PARTS = ONE_BLOCK && BV == 64 && IS_BFLOAT16<T>;
  // Whether start_products takes lane % 4 from `thread`; else from threadIdx.x, read anew. The other way bfloat16 took
  // 0.431 ms instead of 0.426, float16 0.530 instead of 0.484. No times are recorded of float32 gates, ClusterSplitK.
  static constexpr bool LANE_FROM_THREAD = ONE_BLOCK && IS_BFLOAT16<T> && sizeof(G) == 2;
  // Whether compute_token_by_token holds the chunk's number; else it computes it again. If it held it, SinglePass of
  // bfloat16, float32 gates and 128 channels and columns would spill 32 bytes.
  static constexpr bool HOLDS_CHUNK = sizeof(G) != 4;
  // Whether `consume` has a loop for ordinary chunks alone, which instructions for marks and for chunks token by token
  // would slow down; else one loop has all chunks. With two loops ClusterSplitK of RWKV-6, float16 and float32 gates
  // would spill 20 bytes.
  static constexpr bool TWO_LOOPS = ONE_BLOCK;
  // Whether the loop for ordinary chunks is left to copy reversed rows of v. With that code in the loop, CUDA 13.0's
  // assembler spilled 12 bytes in bfloat16 and 44 in float16, of 128 channels and columns. With 64 columns that code
  // spills nothing, and to leave the loop after each chunk takes 7 instructions more.
  static constexpr bool REFILLS_OUTSIDE = ONE_BLOCK && BV == 128;
};

// One thread of a consumer warpgroup. For each chunk `consume` calls compute_chunk; compute_token_by_token, if
// compute_chunk returned true; and store. It calls store_mark before some chunks, and finish after the last one.
template <class Schedule, typename T, typename G, int BK, int BV> struct Consumer {
  using Storage = Shared<Schedule, T, G, BK, BV>;
  static constexpr int K_RANKS = Schedule::K_RANKS, SLOTS = Storage::VALUE_SLOTS, STAGES = Storage::STAGES;
  static constexpr bool CHANNEL_DECAYS = HAS_CHANNEL_GATES<G>;
  using Choices = RegisterChoices<Schedule, T, G, BV>;
  static constexpr int PART_OPERANDS = Choices::TWO_PARTS ? BK / 32 : 1;
  static constexpr bool STORES_MARKS = Schedule::has_outputs && K_RANKS == 1;  // args.marks
  static_assert(Schedule::has_outputs || K_RANKS == 1, "total_decay is of the channels of one block");

  Storage& s;
  const Args<T, G>& args;
  const WorkTile& work;
  const u32 tokens;                // of `work`
  int warpgroup, thread;           // the consumer warpgroup's number; the thread's number in it
  float S[K_RANKS * BK / 2] = {};  // this lane's numbers of the state, see each_state_number
  // SegmentState: the decay over all chunks so far, of the channel whose decay is StageHeader::decay[0][thread % BK].
  float total_decay = 1.f;
  float o[16];  // accumulators [column, token]: o[4n + 2h + p] has token 8n + 2 (lane % 4) + p, columns as S
  u32 v[2][4];  // left operands [column, 16 tokens]

  __device__ __forceinline__ Consumer(Storage& s, const Args<T, G>& args)
      : s(s), args(args), work(s.work), tokens(s.work.tokens), warpgroup(threadIdx.x / 128), thread(threadIdx.x % 128) {
    bool has_initial = work.initial;
    // SegmentState: if tokens before this part are skipped, nothing of the initial state is left after them.
    if constexpr (!Schedule::has_outputs) total_decay = s.scan.skipped_decay, has_initial &= total_decay != 0;
    if (has_initial) each_number_of_state(work.initial, [](float& x, const float* from) { x = *from; });
    if (threads_copy_rows<Schedule>(args))
      for (u32 chunk = 0; chunk < SLOTS; ++chunk) fetch_by_threads(chunk);
    else if (thread == 0)
      for (u32 chunk = 0; chunk < SLOTS && chunk * CHUNK < tokens; ++chunk) fetch(chunk);
    __syncwarp();  // else CUDA 13.0's assembler keeps this thread apart from its warp: see tests/convergence.py
  }

  __device__ __forceinline__ int first_column() const { return work.column + warpgroup * PANEL; }
  // The warpgroup's slot of the chunk's v, and later of its o.
  __device__ __forceinline__ T* slot_of(u32 chunk) { return s.v[warpgroup][chunk % SLOTS][0]; }

  template <typename P, class F> __device__ __forceinline__ void each_number_of_state(P* state, F f) {
    each_state_number<K_RANKS * BK>(S, state, args.shape, args.channel, first_column(), f);
  }
  // Calls f(row of the chunk, piece of the row) for the 16-byte pieces of v and o that this thread stores or clears.
  // They must be those that copy_values has this thread copy: no barrier is between.
  template <class F> __device__ __forceinline__ void each_piece(F f) {
#pragma unroll
    for (int row = 0; row < CHUNK; row += 16) f(thread / 8 + row, thread % 8);
  }
  // The address that this lane gives to ldmatrix and stmatrix for four 8x8 matrices: 16 tokens from `token` on, a
  // multiple of 8, of this warp's 16 columns. In fewer instructions it equals
  // swizzled(tile, token + (thread & 7) + (thread >> 4 & 1) * 8, thread / 32 * 2 + (thread >> 3 & 1)).
  __device__ __forceinline__ T* ldmatrix_row(T* tile, int token) const {
    const int offset = (thread & 7) * (128 + 16) ^ (thread & 96) ^ (thread << 1 & 16) ^ (thread << 6 & 1024);
    return reinterpret_cast<T*>(reinterpret_cast<char*>(tile) + offset + token * 128);
  }

  // Starts copying a chunk of v; for one thread of the warpgroup.
  __device__ __forceinline__ void fetch(u32 chunk) {
    const u32 slot = chunk % SLOTS;
    MBarrier& loaded = s.values_copied[warpgroup][slot];
    mbarrier_arrive_and_expect(loaded, sizeof s.v[0][0]);
    tensor_load(s.v[warpgroup][slot], args.v, loaded, first_column(), work.start + chunk * CHUNK, work.head,
                work.batch);
  }
  // Starts copying a chunk of v if the token stride is negative, for which there is no tensor map; for all threads of
  // the warpgroup. Copies nothing if the chunk starts after the sequence's end.
  __device__ __forceinline__ void fetch_by_threads(u32 chunk) {
    const u32 slot = chunk % SLOTS, token = chunk * CHUNK;
    if (token >= tokens) return;
    const T* const from = args.v_rows.row(work.batch, work.head, work.start + token) + first_column();
    copy_values(s.v[warpgroup][slot], from, args.v_rows.token_stride, int(tokens - token),
                int(args.shape.V) - first_column(), s.values_copied[warpgroup][slot]);
  }

  // Starts the products o = A v + q S and then, in a group of their own, S <- diag(decay) S + k^T v. SegmentState has
  // no o.
  __device__ __forceinline__ void start_products(u32 stage) {
    const float* const decays = s.headers[stage].decay[0];
    // For decay_state, which uses it % 4 alone: `thread` and threadIdx.x have the same.
    const int same_lane = Choices::LANE_FROM_THREAD ? thread : int(threadIdx.x);
    if constexpr (Schedule::has_outputs)
      multiply_scores_and_state<SPLIT_SCORES<Schedule, T>, CHANNEL_DECAYS, PART_OPERANDS, T>(o, S, v, s.operands,
                                                                                             decays, stage, same_lane);
    else decay_state<CHANNEL_DECAYS>(S, decays, thread), total_decay *= decays[thread % BK];
    wgmma_fence_operand(S);
    wgmma_fence();
    u64 k = mn_major_tile(s.operands.k[stage], CHUNK * 128);
    hide_origin(k);
    wgmma<T, K_RANKS * BK, MN_MAJOR>(S, v[0], k, ACCUMULATE);
    wgmma<T, K_RANKS * BK, MN_MAJOR>(S, v[1], k + 16 * 128 / 16, ACCUMULATE);
    wgmma_commit();
  }

  // Tells the blocks that made a chunk's operands that this warp has read them; for one lane of a warp.
  __device__ __forceinline__ void release(u32 chunk, u32 stage) {
    const bool made_here = Schedule::CHUNK_RANKS == 1 || chunk % Schedule::CHUNK_RANKS == rank_in_cluster<Schedule>();
    if (made_here) mbarrier_arrive(s.empty[stage]);
    if (Schedule::K_RANKS > 1 || !made_here) mbarrier_arrive_at_other_block(s.empty[stage]);
  }

  // Multiplies a chunk's operands, and stores o in the slot of v. Returns whether the producers fill the stage for the
  // chunk's tokens one by one. Then this first fill had operands of 0 and decays of 1: S is as before, o is 0, and
  // compute_token_by_token must follow.
  __device__ __forceinline__ bool compute_chunk(u32 chunk) {
    const u32 token = chunk * CHUNK;
    const u32 stage = __shfl_sync(0xffffffffu, chunk % STAGES, 0);  // the compiler sees that lanes agree
    hide_origin(thread);  // addresses are computed again, since registers to hold them are too few
    if constexpr (K_RANKS > 1) hide_origin(warpgroup);
    mbarrier_wait(s.values_copied[warpgroup][chunk % SLOTS], chunk / SLOTS & 1);  // v is in its slot
    T* const values = slot_of(chunk);
    if (token + CHUNK > tokens) {  // rows after the end may hold NaN, and 0 times NaN is NaN
      each_piece([&](int row, int piece) {
        if (token + row >= tokens) *reinterpret_cast<uint4*>(swizzled(values, row, piece)) = {0, 0, 0, 0};
      });
      named_barrier_sync(VALUES_BARRIER + warpgroup, 128);  // all warps see zeros in these rows
    }
    ldmatrix_x4_trans(v[0], ldmatrix_row(values, 0));
    ldmatrix_x4_trans(v[1], ldmatrix_row(values, 16));
    mbarrier_wait(s.full[stage], chunk / STAGES & 1);  // the stage's operands are complete
    start_products(stage);

    if constexpr (!Schedule::has_outputs) {
      named_barrier_sync(VALUES_BARRIER + warpgroup, 128);  // every warp has read v: its slot may be filled again
    }
    // The slot of the previous chunk is refilled; before chunk 0 all slots are filled already.
    if (thread == 0 && chunk && token + (SLOTS - 1) * CHUNK < tokens && !threads_copy_rows<Schedule>(args)) {
      tensor_store_wait();  // the previous chunk's o has left the slot into which v is copied
      if constexpr (!Schedule::has_outputs) fence_proxy_async();  // orders the warps' reads before this copy
      fetch(chunk + SLOTS - 1);
    }
    __syncwarp();                           // thread 0's warp goes on together, as stmatrix and wgmma need
    if constexpr (Schedule::has_outputs) {  // o overwrites v, which is in registers
      wgmma_wait<1>();                      // o is complete; the products of S may be under way
      wgmma_fence_operand(o);
      hide_origin(thread);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = o + 8 * half;
        const u32 rows[4] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
        stmatrix_x4_trans(ldmatrix_row(values, 16 * half), rows);
      }
    }
    // Lane 0 reads the header, since lane 0 releases the stage after that. At the vote all lanes have read the decays.
    const bool one_by_one = __any_sync(0xffffffffu, thread % 32 == 0 && s.headers[stage].row[0] != WHOLE_CHUNK);
    wgmma_wait<0>();  // S is complete, and the stage's operands have been read
    wgmma_fence_operand(S);
    if (thread % 32 == 0) release(chunk, stage);
    return one_by_one;
  }

  // Computes a chunk token by token, after compute_chunk, which has left its v in registers: in the slot is o. The
  // producers fill the stage again, with the operands of one row (make_tokens in forward_growth.cuh): RWKV-6 and
  // SegmentState once a token; GLA twice, first with the token's decays and operands of 0, whose o of 0 is overwritten
  // after the second fill. make_tokens makes 32 or 64 of these fills, of a short last chunk, too, and asserts that the
  // number is even: so the stage's next chunk waits for the parity that it would wait for after a chunk of one fill.
  __device__ __forceinline__ void compute_token_by_token(u32 chunk) {
    int row = MORE_FILLS;  // StageHeader::row[0]: the token's row, plus MORE_FILLS unless this is the last fill
#pragma unroll 1
    for (int fill = 1; row & MORE_FILLS; ++fill) {
      const u32 stage = __shfl_sync(0xffffffffu, chunk % STAGES, 0);
      mbarrier_wait(s.full[stage], chunk / STAGES + fill & 1);
      hide_origin(thread);
      start_products(stage);
      wgmma_wait<0>();
      wgmma_fence_operand(S);
      // Lane 0 reads the header, since lane 0 releases the stage after that; the other lanes get the row from it.
      row = __shfl_sync(0xffffffffu, thread % 32 == 0 ? s.headers[stage].row[0] : 0, 0);
      if constexpr (Schedule::has_outputs) {
        wgmma_fence_operand(o);
        const u32 own_chunk = Choices::HOLDS_CHUNK ? chunk : u32(opaque(chunk));
        put_output_row(s.v[warpgroup][own_chunk % SLOTS][0], o, row % MORE_FILLS, thread);
      }
      __syncwarp();  // all lanes have read the decays, so that lane 0 may release the stage
      if (thread % 32 == 0) release(chunk, stage);
    }
  }

  // Stores a chunk of o in memory, from the slot of v.
  __device__ __forceinline__ void store(u32 chunk) {
    if constexpr (Schedule::has_outputs) {
      fence_proxy_async();  // this thread's stores of o precede the copy that reads them
      // All warps' columns of o are in shared memory: one thread may store them.
      named_barrier_sync(VALUES_BARRIER + warpgroup, 128);
      const u32 token = chunk * CHUNK;
      T* const from = slot_of(chunk);
      if (token + CHUNK > tokens || threads_copy_rows<Schedule>(args)) {
        T* const to = args.o.row(work.batch, work.head, work.start + token) + first_column();
        const i64 columns = args.shape.V - first_column();
        each_piece([&](int row, int piece) {
          if (token + row < tokens && 8 * piece < columns)
            *reinterpret_cast<uint4*>(to + row * args.o.token_stride + 8 * piece) =
                *reinterpret_cast<const uint4*>(swizzled(from, row, piece));
        });
      } else if (thread == 0) {
        tensor_store(args.o_boxes, from, first_column(), work.start + token, work.head, work.batch);
      }
    }
  }

  // Stores the state before a chunk in args.marks, for the backward pass, if the chunk's number is a multiple of
  // args.mark_every, a power of two, which is mask + 1. Without marks both args.marks and args.mark_every are 0: then
  // mask has all bits, and `consume` leaves its inner loop for no mark.
  __device__ __forceinline__ void store_mark(u32 chunk, u32 mask) {
    if (STORES_MARKS && args.marks && (chunk & mask) == 0) {
      const i64 state = (work.sequence * args.marks_per_sequence + chunk / (mask + 1)) * args.shape.H + work.head;
      each_number_of_state(args.marks + state * args.shape.K * args.shape.V, [](float& x, float* to) { *to = x; });
    }
  }

  // Stores the state after the last chunk in `final`, and SegmentState's decays.
  __device__ __forceinline__ void finish() {
    tensor_store_wait();  // shared memory stays until o has been copied from it: thread 0, which copies, waits
    if constexpr (!Schedule::has_outputs) {
      // The channel whose decay put_decays stores at decays[thread].
      const int channel = int(args.channel) + thread / 16 * 16 + thread / 2 % 2 * 8 + thread / 4 % 4 * 2 + thread % 2;
      float* const decays = args.decays + (i64(work.sequence) * args.shape.H + work.head) * 2 * args.shape.K + channel;
      // The decay is the product of two rows. The second row, which other kernels of segments need, is 1 here.
      if (first_column() == 0 && thread < BK && channel < args.shape.K)
        decays[0] = total_decay, decays[args.shape.K] = 1.f;
    }
    if (work.final) each_number_of_state(work.final, [](float& x, float* to) { *to = x; });
  }
};

// A consumer thread's loop over the chunks of the block's tokens.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args) {
  using ConsumerOf = Consumer<Schedule, T, G, BK, BV>;
  ConsumerOf consumer(s, args);
  const u32 tokens = consumer.tokens;
  constexpr bool TWO_LOOPS = ConsumerOf::Choices::TWO_LOOPS, REFILLS_OUTSIDE = ConsumerOf::Choices::REFILLS_OUTSIDE;
  const u32 mask = u32(args.mark_every) - 1;
  const bool refills_outside = REFILLS_OUTSIDE && threads_copy_rows<Schedule>(args);
  for (u32 chunk = 0; chunk * CHUNK < tokens;) {
    consumer.store_mark(chunk, mask);
    bool one_by_one = false;
    // No data depend on this barrier: it keeps the compiler from merging both loops.
    if constexpr (TWO_LOOPS) named_barrier_sync(VALUES_BARRIER + consumer.warpgroup, 128);
    do {
      one_by_one = consumer.compute_chunk(chunk);
      if (__builtin_expect(one_by_one, false)) {
        if constexpr (TWO_LOOPS) break;
        consumer.compute_token_by_token(chunk);
      }
      consumer.store(chunk);
      if (!REFILLS_OUTSIDE && __builtin_expect(threads_copy_rows<Schedule>(args), false))
        consumer.fetch_by_threads(chunk + ConsumerOf::SLOTS);
      ++chunk;
    } while (chunk * CHUNK < tokens && (!ConsumerOf::STORES_MARKS || (chunk & mask) != 0) && !refills_outside);
    if (TWO_LOOPS && one_by_one) {
      consumer.compute_token_by_token(chunk), consumer.store(chunk);
      if (!REFILLS_OUTSIDE && threads_copy_rows<Schedule>(args)) consumer.fetch_by_threads(chunk + ConsumerOf::SLOTS);
      ++chunk;
    }
    if (refills_outside) consumer.fetch_by_threads(chunk - 1 + ConsumerOf::SLOTS);
  }
  consumer.finish();
}

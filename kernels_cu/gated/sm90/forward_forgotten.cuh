// what      For SegmentState (forward_schedules.cuh), with which Hopper's forward kernel computes only the final states
//           of segments: finds the first tokens of a segment that decay so much until its end that they may be skipped.
//           It adds up log gates from the last token backwards. Heads of most trained models forget within one or two
//           thousand tokens. Shared and Args: forward_storage.cuh
// math      the latest token from which on the log gates of every channel sum to FORGOTTEN_NATS (-48) or less, if no
//           gate is above 0; all tokens before it are skipped. If the segment's last token does not write to every
//           number of the state, nothing is skipped: its writes hide what is forgotten, also where later gates let it
//           grow
// smem      `inputs` as boxes of gates, [CHUNK, BK] each; `operands` as sums of gates, [warp, channel]
// barriers  mbarrier scan.loaded: a batch of gates is in `inputs`. Of the block, for every batch: sums are in shared
//           memory, and gates have been read | a vote: whether a channel is not forgotten yet | if so, another
//           vote: whether the search is given up
// numerics  the skipped part is e^-48 (1.4e-21) of a state: float32 drops it when it is added to a number of similar
//           size. If a gate is above 0, earlier states may have grown more than they were forgotten since: then nothing
//           is skipped.
// limits    sm_90a; a block adds up the gates of its own channels only. ScalarDecay and tensors with a negative stride
//           of tokens are not searched: nothing is skipped
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_storage.cuh"

// From the includes:
//   writes_enough(x): whether a number of a key or value is so large that what it writes hides what is forgotten
//   threads_copy_rows: whether the stride of tokens is negative, which tensor maps do not allow
//   WorkTile: what a block computes. mbarrier_arrive_and_expect, tensor_load, mbarrier_wait: copy boxes, and wait for
//   them named_barrier_any(id, threads, x): whether x is true in one of these threads, which all wait
//   fence_proxy_async: orders this thread's accesses of shared memory before later copies by tensor maps

// Whether a thread of the block finds that the segment's last token does not write to a number of the state. Every
// thread looks at some of the token's numbers.
template <int THREADS, typename T, typename G>
__device__ __forceinline__ bool last_token_leaves_gaps(const Args<T, G>& args, const WorkTile& work) {
  const Shape& shape = args.shape;
  const i64 last = min(i64(work.start) + work.tokens, shape.T) - 1;  // work.tokens may be rounded up
  const T* const key = args.k_rows.row(work.batch, work.head, last);
  const T* const value = args.v_rows.row(work.batch, work.head, last);
  bool gaps = false;
  for (int i = threadIdx.x; i < shape.K; i += THREADS) gaps |= !writes_enough(to_float(key[i]));
  for (int i = threadIdx.x; i < shape.V; i += THREADS) gaps |= !writes_enough(to_float(value[i]));
  return gaps;
}

// Returns the first token that is not forgotten, counted from the segment's start, a multiple of CHUNK; 0 if nothing is
// forgotten. Also 0 as soon as the mean of the gates read so far predicts that less than a quarter of the tokens are.
// For all THREADS threads of the block, before its pipeline starts, since it overwrites `inputs` and `operands`.
template <int THREADS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ i32 first_remembered(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                                const WorkTile& work) {
  if constexpr (!HAS_CHANNEL_GATES<G>) return 0;
  else {
    if (threads_copy_rows<Schedule>(args)) return 0;  // tensor maps have no negative token stride
    // BOXES: chunks of gates that are copied at a time, a batch; ROWS: rows of a chunk that the block's threads read at
    // once.
    using Box = G[CHUNK][BK];
    constexpr int BOXES = sizeof s.inputs / sizeof(Box), ROW_THREADS = BK / 8;  // a thread has 8 channels of a row
    constexpr int ROWS = THREADS >= CHUNK * ROW_THREADS ? CHUNK : CHUNK / 2, WARPS = ROWS * ROW_THREADS / 32;
    Box* const boxes = reinterpret_cast<Box*>(s.inputs);
    float (*const sums)[BK] = reinterpret_cast<float (*)[BK]>(&s.operands);
    static_assert(sizeof(float) * WARPS * BK <= sizeof s.operands && THREADS >= ROWS * ROW_THREADS && THREADS >= BK);
    const int thread = threadIdx.x, row = thread / ROW_THREADS, channel = thread % ROW_THREADS * 8;
    const bool has_channel = thread < BK && args.channel + thread < args.shape.K;
    const auto fetch = [&](int stop) {  // starts copying the gates of the chunks before `stop`, the last one first
      const int count = min(stop, BOXES);
      mbarrier_arrive_and_expect(s.scan.loaded, count * u32(sizeof(Box)));
      for (int box = 0; box < count; ++box)
        tensor_load(boxes[box], args.g, s.scan.loaded, i32(args.channel), work.start + (stop - 1 - box) * CHUNK,
                    work.head, work.batch);
    };
    float sum = 0.f, largest_gate = 0.f;  // of channel `thread`'s gates; of the gates that this thread has read
    int stop = (work.tokens + CHUNK - 1) / CHUNK;  // the chunks that are not read yet: the first `stop` ones
    if (thread == 0 && stop) fetch(stop);
    const bool gaps = stop && last_token_leaves_gaps<THREADS>(args, work);
    __syncwarp();  // else CUDA 13.0's assembler keeps thread 0 apart from its warp
    for (u32 batch = 0; stop; ++batch) {
      const int count = min(stop, BOXES);
      float sums_here[8] = {};  // over this thread's rows of the batch, of its 8 channels
      mbarrier_wait(s.scan.loaded, batch & 1);
      for (int box = 0; box < count && row < ROWS; ++box)
        for (int i = row; i < CHUNK; i += ROWS) {
          if ((stop - 1 - box) * CHUNK + i >= work.tokens) continue;
          float g[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            unpack(g, boxes[box][i] + channel + 4 * half);
#pragma unroll
            for (int c = 0; c < 4; ++c) sums_here[4 * half + c] += g[c], largest_gate = fmaxf(largest_gate, g[c]);
          }
        }
#pragma unroll
      for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int distance = 16; distance >= ROW_THREADS; distance /= 2)
          sums_here[c] += __shfl_xor_sync(0xffffffffu, sums_here[c], distance);
      if (row < ROWS && thread % 32 < ROW_THREADS)
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[thread / 32][channel + c] = sums_here[c];
      fence_proxy_async();  // orders these reads before the next copies of gates
      __syncthreads();      // sums are in shared memory, and all gates have been read
      stop -= count;
      if (thread == 0 && stop) fetch(stop);
      if (has_channel)
        for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp][thread];
      const float tokens_read = float(work.tokens - stop * CHUNK);
      const bool gives_up = gaps || largest_gate > 0.f ||
                            has_channel && !(sum * (work.tokens - work.tokens / 4) <= FORGOTTEN_NATS * tokens_read);
      const bool remembered = named_barrier_any(VALUES_BARRIER, THREADS,
                                                gaps || largest_gate > 0.f || has_channel && !(sum <= FORGOTTEN_NATS));
      if (remembered && !named_barrier_any(VALUES_BARRIER, THREADS, gives_up)) continue;
      if (stop) mbarrier_wait(s.scan.loaded, ~batch & 1);  // the copies under way have ended: `inputs` is free
      return remembered ? 0 : stop * CHUNK;
    }
    return 0;
  }
}

// Sets s.work to the part of the segment that this block computes. The parts share the tokens that are not forgotten in
// equal numbers of chunks. For all threads of the block.
template <int THREADS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void narrow_work(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, WorkTile work) {
  const i32 first = first_remembered<THREADS>(s, args, work), parts = i32(args.parts), part = work.sequence % parts;
  const i32 part_tokens = (work.tokens - first + parts * CHUNK - 1) / (parts * CHUNK) * CHUNK;
  const i32 begin = min(first + part * part_tokens, work.tokens), end = min(begin + part_tokens, work.tokens);
  if (threadIdx.x == 0) {
    s.work.start = work.start + begin, s.work.tokens = end - begin;
    s.scan.skipped_decay = part == 0 && first > 0 ? 0.f : 1.f;
  }
  __syncthreads();  // s.work is set
}

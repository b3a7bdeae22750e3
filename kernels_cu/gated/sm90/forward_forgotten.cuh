// what      For Hopper's forward kernel that computes segments' final states: finds a segment's first tokens that its
//           final state has forgotten, so that they are skipped, from sums of log gates backwards from the last token.
//           Heads of most models forget within one or two thousand tokens.
// math      the latest token from which on every channel's log gates sum to FORGOTTEN_NATS (-48) or less, none above 0
// barriers  scan.loaded: a batch of gates is in shared memory; then sums are, and gates have been read | threads agree
// numerics  the skipped part is e^-48 (1.4e-21) of a state: float32 drops it when it is added to a number of similar
//           size. If a gate is above 0, earlier states may have grown more than they were forgotten since: then nothing
//           is skipped.
// limits    sm_90a; it looks at the block's own channels only, and not at gates that all channels share
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_storage.cuh"

// The first token that is not forgotten, counted from the segment's start, a multiple of CHUNK. 0 if nothing is
// forgotten, or if the mean of the gates seen so far says that less than a quarter of the tokens would be. For all
// THREADS of the block, before its pipeline starts: it uses `inputs` and `operands` as memory of its own.
template <int THREADS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ i32 first_remembered(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                                const WorkTile& at) {
  if constexpr (WIDTH<G> == 1) return 0;
  else {
    if (runs_backwards<Schedule>(args)) return 0;  // tensor maps have no negative token stride
    using Box = G[CHUNK][BK];
    constexpr int BOXES = sizeof s.inputs / sizeof(Box), ACROSS = BK / 8;  // ACROSS threads have 8 channels each
    constexpr int ROWS = THREADS >= CHUNK * ACROSS ? CHUNK : CHUNK / 2, WARPS = ROWS * ACROSS / 32;
    Box* const boxes = reinterpret_cast<Box*>(s.inputs);
    float (*const sums)[BK] = reinterpret_cast<float (*)[BK]>(&s.operands);
    static_assert(sizeof(float) * WARPS * BK <= sizeof s.operands && THREADS >= ROWS * ACROSS && THREADS >= BK);
    const int thread = threadIdx.x, row = thread / ACROSS, channel = thread % ACROSS * 8;
    const bool asked = thread < BK && args.channel + thread < args.shape.K;
    const auto fetch = [&](int stop) {  // starts copying the gates of the chunks before `stop`, the last one first
      const int count = min(stop, BOXES);
      barrier_expect(s.scan.loaded, count * u32(sizeof(Box)));
      for (int box = 0; box < count; ++box)
        tensor_load(boxes[box], args.g, s.scan.loaded, i32(args.channel), at.start + (stop - 1 - box) * CHUNK, at.head,
                    at.batch);
    };
    float total = 0.f, most = 0.f;  // the sum of channel `thread`'s gates; the largest gate that this thread has read
    int stop = (at.tokens + CHUNK - 1) / CHUNK;
    if (thread == 0 && stop) fetch(stop);
    __syncwarp();  // else CUDA 13.0's assembler keeps thread 0 apart from its warp
    for (u32 batch = 0; stop; ++batch) {
      const int count = min(stop, BOXES);
      float x[8] = {};
      barrier_wait(s.scan.loaded, batch & 1);
      for (int box = 0; box < count && row < ROWS; ++box)
        for (int i = row; i < CHUNK; i += ROWS) {
          if ((stop - 1 - box) * CHUNK + i >= at.tokens) continue;
          float g[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            unpack(g, boxes[box][i] + channel + 4 * half);
#pragma unroll
            for (int c = 0; c < 4; ++c) x[4 * half + c] += g[c], most = fmaxf(most, g[c]);
          }
        }
#pragma unroll
      for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int distance = 16; distance >= ACROSS; distance /= 2) x[c] += __shfl_xor_sync(0xffffffffu, x[c], distance);
      if (row < ROWS && thread % 32 < ACROSS)
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[thread / 32][channel + c] = x[c];
      fence_async();    // orders these reads before the next copies of gates
      __syncthreads();  // sums are in shared memory, and all gates have been read
      stop -= count;
      if (thread == 0 && stop) fetch(stop);
      if (asked)
        for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][thread];
      const float looked = float(at.tokens - stop * CHUNK);
      const bool hopeless = most > 0.f || asked && !(total * (at.tokens - at.tokens / 4) <= FORGOTTEN_NATS * looked);
      const bool kept = barrier_any(VALUES, THREADS, most > 0.f || asked && !(total <= FORGOTTEN_NATS));
      if (kept && !barrier_any(VALUES, THREADS, hopeless)) continue;
      if (stop) barrier_wait(s.scan.loaded, ~batch & 1);  // the copies under way have ended: `inputs` is free
      return kept ? 0 : stop * CHUNK;
    }
    return 0;
  }
}

// Sets s.work to the part of the segment that this block computes. The parts share the tokens that are not forgotten in
// equal numbers of chunks. For all threads of the block.
template <int THREADS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void narrow_work(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, WorkTile at) {
  const i32 first = first_remembered<THREADS>(s, args, at), parts = i32(args.parts), part = at.sequence % parts;
  const i32 each = (at.tokens - first + parts * CHUNK - 1) / (parts * CHUNK) * CHUNK;
  const i32 begin = min(first + part * each, at.tokens), end = min(begin + each, at.tokens);
  if (threadIdx.x == 0) {
    s.work.start = at.start + begin, s.work.tokens = end - begin;
    s.scan.before = part == 0 && first > 0 ? 0.f : 1.f;
  }
  __syncthreads();  // s.work is set
}

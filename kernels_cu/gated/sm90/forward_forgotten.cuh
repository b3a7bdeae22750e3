// what      Which tokens of a segment its end remembers: before a pass that summarises the segment, a look at its gates
//           from the last one backwards. Most models' heads forget within a thousand tokens or two.
// math      the last token from which on every channel's gates add up to FORGOTTEN_NATS at most, and none of them grows
// barriers  scan.loaded: a batch of gates is there; then two of the block a batch
// numerics  what is left out is e^-48 of a state (1.4e-21), which float32 adds to nothing of a size near to it. Where a
//           gate grows, more may have grown before it than was forgotten since: then nothing is left out.
// limits    sm_90a; the block's own channels; a gate that all channels share is not looked at
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_storage.cuh"

// The first token that is remembered, a whole number of chunks behind the segment's start; 0 where nothing is
// forgotten, or less than a quarter to judge by the gates so far. For all threads of a block that has nothing else yet.
template <int THREADS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ i32 first_remembered(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                                const WorkTile& at) {
  if constexpr (WIDTH<G> == 1) return 0;
  else {
    if (runs_backwards<Schedule>(args)) return 0;  // boxes are for tokens in order
    using Box = G[CHUNK][BK];
    constexpr int BOXES = sizeof s.inputs / sizeof(Box), ACROSS = BK / 8;  // threads of 8 channels each
    constexpr int ROWS = THREADS >= CHUNK * ACROSS ? CHUNK : CHUNK / 2, WARPS = ROWS * ACROSS / 32;
    Box* const boxes = reinterpret_cast<Box*>(s.inputs);
    float (*const sums)[BK] = reinterpret_cast<float (*)[BK]>(&s.operands);
    static_assert(sizeof(float) * WARPS * BK <= sizeof s.operands && THREADS >= ROWS * ACROSS && THREADS >= BK);
    const int thread = threadIdx.x, row = thread / ACROSS, channel = thread % ACROSS * 8;
    const bool asked = thread < BK && args.channel + thread < args.shape.K;
    const auto fetch = [&](int stop) {  // the boxes before `stop`, backwards; by one thread
      const int count = min(stop, BOXES);
      barrier_expect(s.scan.loaded, count * u32(sizeof(Box)));
      for (int box = 0; box < count; ++box)
        tensor_load(boxes[box], args.g, s.scan.loaded, i32(args.channel), at.start + (stop - 1 - box) * CHUNK, at.head,
                    at.batch);
    };
    float total = 0.f, most = 0.f;  // most: the largest of the gates that this thread has read
    int stop = (at.tokens + CHUNK - 1) / CHUNK;
    if (thread == 0 && stop) fetch(stop);
    __syncwarp();  // as in forward_consumers.cuh, where an assembler kept such a thread apart from its warp
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
      fence_async();    // the next copies of gates come after these reads
      __syncthreads();  // sums are in shared memory, and gates are read
      stop -= count;
      if (thread == 0 && stop) fetch(stop);
      if (asked)
        for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][thread];
      const float looked = float(at.tokens - stop * CHUNK);
      const bool hopeless = most > 0.f || asked && !(total * (at.tokens - at.tokens / 4) <= FORGOTTEN_NATS * looked);
      const bool kept = barrier_any(VALUES, THREADS, most > 0.f || asked && !(total <= FORGOTTEN_NATS));
      if (kept && !barrier_any(VALUES, THREADS, hopeless)) continue;
      if (stop) barrier_wait(s.scan.loaded, ~batch & 1);  // nothing comes any more
      return kept ? 0 : stop * CHUNK;
    }
    return 0;
  }
}

// Of a segment the part that this block summarises: as long as others, of what is remembered.
template <int THREADS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void narrow_work(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, WorkTile at) {
  const i32 first = first_remembered<THREADS>(s, args, at), parts = i32(args.parts), part = at.sequence % parts;
  const i32 each = (at.tokens - first + parts * CHUNK - 1) / (parts * CHUNK) * CHUNK;
  const i32 begin = min(first + part * each, at.tokens), end = min(begin + each, at.tokens);
  if (threadIdx.x == 0) {
    s.work.start = at.start + begin, s.work.tokens = end - begin;
    s.scan.before = part == 0 && first > 0 ? 0.f : 1.f;
  }
  __syncthreads();  // all know it
}

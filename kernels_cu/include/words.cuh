// what      What blocks of one grid hand to each other when all are at work at once: words without barriers, or
//           numbers behind a barrier of the grid.
// limits    sm_80 and later
// twin      tests/emulator/words.cuh has the same names for the CPU: a change here is a change there.
#include "ptx.cuh"

// Words that blocks hand to each other, when all of the grid's are at work at once: 48 bits and, above them, the lower
// 16 of the number of the epoch in which they were written. Whoever takes words reads them until they are of the wanted
// epoch: no barrier is needed, nor a fence.
__device__ __forceinline__ void put_word(u64* to, u64 bits, u32 epoch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits | u64(epoch) << 48) : "memory");
}
__device__ __forceinline__ bool of_epoch(u64 word, u32 epoch) { return u32(word >> 48) == (epoch & 0xffffu); }

// Start reading words; they may be of any epoch.
template <int N> __device__ __forceinline__ void load_words(u64 (&words)[N], const u64* const (&from)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words[n]) : "l"(from[n]));
}
// Read them again until they are of this epoch.
template <int N> __device__ __forceinline__ void settle_words(u64 (&words)[N], const u64* const (&from)[N], u32 epoch) {
  for (;;) {
    bool all = true;
#pragma unroll
    for (int n = 0; n < N; ++n) all &= of_epoch(words[n], epoch);
    if (all) return;
    load_words(words, from);
  }
}
template <int N> __device__ __forceinline__ void take_words(u64 (&words)[N], const u64* const (&from)[N], u32 epoch) {
  load_words(words, from);
  settle_words(words, from, epoch);
}

// The same of pairs of neighbours, on 16 bytes, which begin at `from[at[n]]`.
template <int N>
__device__ __forceinline__ void take_pairs(u64 (&pairs)[N][2], const u64* from, const int (&at)[N], u32 epoch) {
  bool all;
  do {
    all = true;
#pragma unroll
    for (int n = 0; n < N; ++n)
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(pairs[n][0]), "=l"(pairs[n][1])
                   : "l"(from + at[n]));
#pragma unroll
    for (int n = 0; n < N; ++n) all &= of_epoch(pairs[n][0], epoch) && of_epoch(pairs[n][1], epoch);
  } while (!all);
}

// A barrier of the whole grid, when all its blocks are at work at once, in two halves, for threads 0 to THREADS - 1,
// which share named barrier 1: what any block wrote before it arrived can be read after the wait. `arrived` changes its
// highest bit, the sense, when the last block has come; the others are 0 between barriers, and at the start.
constexpr u32 NO_BARRIER = 1;  // for a sense: nothing to wait for
__device__ __forceinline__ u32 next_sense(u32 sense) { return sense ^ 0x80000000u; }

// To read before the first barrier.
__device__ __forceinline__ u32 barrier_sense(const u32* arrived) {
  return *reinterpret_cast<const volatile u32*>(arrived) & 0x80000000u;
}
template <int THREADS> __device__ __forceinline__ void grid_arrive(u32* arrived) {
  barrier_sync(1, THREADS);  // the block's writes are done
  const u32 step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(arrived), "r"(step) : "memory");
}
template <int THREADS> __device__ __forceinline__ void grid_wait(const u32* arrived, u32 sense) {
  if (sense == NO_BARRIER) return;
  if (threadIdx.x == 0) {
    u32 now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    } while (((now ^ sense) & 0x80000000u) == 0);
  }
  barrier_sync(1, THREADS);  // so are the others'
}

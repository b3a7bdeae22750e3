// what      How blocks of one grid hand numbers to each other, by words of global memory and without barriers, and how
//           the last block finds the largest key of all blocks. Blocks wait for each other's words, so that
//           all blocks of the grid must run at once: the host launches them `together` (device.py).
// limits    sm_80 and later
// twin      tests/emulator/words.cuh has the same names for the CPU: a change here is a change there.
#include "ptx.cuh"

// A word is a number and the epoch in which it was written: the kernel counts epochs, the same in all blocks. A reader
// loads a word until it is of the wanted epoch: no barrier and no fence is needed. A word of 64 bits holds the whole
// epoch. A word of 32 bits holds the epoch's lowest bit in place of the number's lowest bit, which is lost: only for
// words that are written in every epoch, and read in every epoch by all of their readers, so that a word is of this
// epoch or of the last one. Before the first launch the host sets words of either size to 0, which is epoch 0
// (word_buffers in models/rwkv/cuda_decoder.py); epochs start at 1.
template <typename Word> __device__ __forceinline__ Word word_of(float x, u32 epoch);
template <> __device__ __forceinline__ u64 word_of(float x, u32 epoch) { return __float_as_uint(x) | u64(epoch) << 32; }
template <> __device__ __forceinline__ u32 word_of(float x, u32 epoch) {
  return (__float_as_uint(x) & ~1u) | (epoch & 1u);
}
__device__ __forceinline__ float number(u64 word) { return __uint_as_float(u32(word)); }
__device__ __forceinline__ float number(u32 word) { return __uint_as_float(word & ~1u); }
// The bits in which a word's epoch differs from `epoch`. BITS_OF_EPOCH, a mask, has the bits of the epoch that a word
// holds: if other_epoch is 0 in these, the word is of this epoch. Bits outside of the mask are arbitrary.
__device__ __forceinline__ u32 other_epoch(u64 word, u32 epoch) { return u32(word >> 32) ^ epoch; }
__device__ __forceinline__ u32 other_epoch(u32 word, u32 epoch) { return word ^ epoch; }
template <typename Word> constexpr u32 BITS_OF_EPOCH = ~0u;
template <> constexpr u32 BITS_OF_EPOCH<u32> = 1u;

__device__ __forceinline__ void put_word(u64* to, float x, u32 epoch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word_of<u64>(x, epoch)) : "memory");
}
__device__ __forceinline__ void put_word(u32* to, float x, u32 epoch) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word_of<u32>(x, epoch)) : "memory");
}

// Loads say nothing of other memory (no clobber "memory"): all that a reader needs is in the word, so that the compiler
// may move other accesses across.
__device__ __forceinline__ void load_word(u64& word, const u64* from) {
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from));
}
__device__ __forceinline__ void load_word(u32& word, const u32* from) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from));
}
// Loads neighbouring words by one instruction; `from` is aligned to 16 bytes.
__device__ __forceinline__ void load_word(u64 (&words)[2], const u64* from) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from));
}
__device__ __forceinline__ void load_word(u32 (&words)[4], const u32* from) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}
template <typename Word, int N> __device__ __forceinline__ u32 other_epoch(const Word (&words)[N], u32 epoch) {
  u32 other = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) other |= other_epoch(words[n], epoch);
  return other;
}

// Loads N words, or groups of neighbouring words (arrays of 16 bytes), of whichever epoch, from `from`.
template <typename Words, typename Word, int N>
__device__ __forceinline__ void load_words(Words (&words)[N], const Word* const (&from)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) load_word(words[n], from[n]);
}
// settle_words loads words, which load_words has loaded before, again until all are of this epoch. take_words does
// both.
template <typename Words, typename Word, int N>
__device__ __forceinline__ void settle_words(Words (&words)[N], const Word* const (&from)[N], u32 epoch) {
  while (other_epoch(words, epoch) & BITS_OF_EPOCH<Word>) load_words(words, from);
}
template <typename Words, typename Word, int N>
__device__ __forceinline__ void take_words(Words (&words)[N], const Word* const (&from)[N], u32 epoch) {
  do { load_words(words, from); } while (other_epoch(words, epoch) & BITS_OF_EPOCH<Word>);
}

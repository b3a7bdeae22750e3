// include/words.cuh on the CPU, where blocks run in turn: words are there when a launch needs them.
#include "ptx.cuh"

inline void put_word(u64* to, u64 bits, u32 epoch, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(bits >> 48 == 0, "put_word of more than 48 bits (%s:%d)", where.file, where.line);
  *to = bits | u64(epoch) << 48;
}
template <int N> void load_words(u64 (&words)[N], const u64* const (&from)[N]) {
  for (int n = 0; n < N; ++n) words[n] = *from[n];
}
template <int N>
void settle_words(u64 (&words)[N], const u64* const (&)[N], u32 epoch, emulator::Where where = emulator::here()) {
  for (u64 word : words)
    EMULATOR_CHECK(word >> 48 == (epoch & 0xffff), "a word of epoch %u, not %u (%s:%d)", u32(word >> 48),
                   epoch & 0xffff, where.file, where.line);
}
template <int N>
void take_words(u64 (&words)[N], const u64* const (&from)[N], u32 epoch, emulator::Where where = emulator::here()) {
  load_words(words, from);
  settle_words(words, from, epoch, where);
}
template <int N>
void take_pairs(u64 (&pairs)[N][2], const u64* from, const int (&at)[N], u32 epoch,
                emulator::Where where = emulator::here()) {
  for (int n = 0; n < N; ++n) {
    EMULATOR_CHECK(reinterpret_cast<u64>(from + at[n]) % 16 == 0, "take_pairs not on 16 bytes (%s:%d)", where.file,
                   where.line);
    const u64* const both[2] = {from + at[n], from + at[n] + 1};
    take_words(pairs[n], both, epoch, where);
  }
}

// Blocks run in turn, so that a kernel with such a barrier is launched once for every stretch between two of them.
constexpr u32 NO_BARRIER = 1;
inline u32 next_sense(u32 sense) { return sense ^ 0x80000000u; }
inline u32 barrier_sense(const u32* arrived) { return *arrived & 0x80000000u; }
template <int THREADS> void grid_arrive(u32*) {}
template <int THREADS> void grid_wait(const u32*, u32) {}

// include/words.cuh on the CPU, where blocks run in turn: words are there when a launch needs them.
#include "ptx.cuh"

template <typename Word> Word word_of(float x, u32 epoch) {
  if constexpr (sizeof(Word) == 8) return __float_as_uint(x) | u64(epoch) << 32;
  else return (__float_as_uint(x) & ~1u) | (epoch & 1u);
}
inline float number(u64 word) { return __uint_as_float(u32(word)); }
inline float number(u32 word) { return __uint_as_float(word & ~1u); }
inline u32 other_epoch(u64 word, u32 epoch) { return u32(word >> 32) ^ epoch; }
inline u32 other_epoch(u32 word, u32 epoch) { return word ^ epoch; }
template <typename Word> constexpr u32 BITS_OF_EPOCH = ~0u;
template <> constexpr u32 BITS_OF_EPOCH<u32> = 1u;
template <typename Word, int N> u32 other_epoch(const Word (&words)[N], u32 epoch) {
  u32 other = 0;
  for (const Word word : words) other |= other_epoch(word, epoch);
  return other;
}

inline void put_word(u64* to, float x, u32 epoch) { *to = word_of<u64>(x, epoch); }
inline void put_word(u32* to, float x, u32 epoch) { *to = word_of<u32>(x, epoch); }

template <typename Word> void load_word(Word& word, const Word* from, emulator::Where) { word = *from; }
template <typename Word, int N> void load_word(Word (&words)[N], const Word* from, emulator::Where where) {
  EMULATOR_CHECK(reinterpret_cast<u64>(from) % 16 == 0, "words not on 16 bytes (%s:%d)", where.file, where.line);
  for (int n = 0; n < N; ++n) words[n] = from[n];
}
template <typename Words, typename Word, int N>
void load_words(Words (&words)[N], const Word* const (&from)[N], emulator::Where where = emulator::here()) {
  for (int n = 0; n < N; ++n) load_word(words[n], from[n], where);
}
template <typename Words, typename Word, int N>
void settle_words(Words (&words)[N], const Word* const (&)[N], u32 epoch, emulator::Where where = emulator::here()) {
  for (const Words& found : words)
    EMULATOR_CHECK((other_epoch(found, epoch) & BITS_OF_EPOCH<Word>) == 0, "a word that is not of epoch %u (%s:%d)",
                   epoch, where.file, where.line);
}
template <typename Words, typename Word, int N>
void take_words(Words (&words)[N], const Word* const (&from)[N], u32 epoch, emulator::Where where = emulator::here()) {
  load_words(words, from, where);
  settle_words(words, from, epoch, where);
}

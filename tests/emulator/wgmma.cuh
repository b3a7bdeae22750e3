// The CPU twin of kernels_cu/include/wgmma.cuh: each warp multiplies its own rows.
#include "ptx.cuh"

namespace emulator {

struct TileProduct {
  void (*multiply)(const Started&);
  float* d;
  const u32* a;  // or null: a_tile
  u64 a_tile, b;
  bool accumulate;
  int columns;
  bool transposed;
  Where where;
};

#pragma GCC visibility push(default)
void start(void* const* operands);
#pragma GCC visibility pop

static void commit(void* const*) { ++products[index() / WARP].groups; }

template <int N> void finish(void* const*) {
  Products& own = products[index() / WARP];
  int done = 0;
  for (; done < own.count && own.started[done].group < own.groups - N; ++done)
    own.started[done].multiply(own.started[done]);
  own.count -= done;
  memmove(own.started, own.started + done, own.count * sizeof(Started));
}

}  // namespace emulator

constexpr bool K_MAJOR = false, MN_MAJOR = true, OVERWRITE = false, ACCUMULATE = true;
inline u64 tile_descriptor(const void* p, u32 leading, u32 stride, emulator::Where where) {
  EMULATOR_CHECK(emulator::in_shared(p, 16) && (leading | stride) % 16 == 0 && (leading | stride) < 1 << 18,
                 "a tile's descriptor: an address or a distance no multiple of 16, or not in shared memory (%s:%d)",
                 where.file, where.line);
  const u64 address = static_cast<const unsigned char*>(p) - emulator::shared_memory;
  return address >> 4 | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}
inline u64 k_major_tile(const void* p, u32 eight_rows = 1024, emulator::Where where = emulator::here()) {
  return tile_descriptor(p, 16, eight_rows, where);
}
inline u64 mn_major_tile(const void* p, u32 panel, emulator::Where where = emulator::here()) {
  return tile_descriptor(p, panel, 1024, where);
}

inline void wgmma_fence(emulator::Where where = emulator::here()) {
  emulator::collective("wgmma_fence", where, nullptr, nullptr);
}

inline void wgmma_commit(emulator::Where where = emulator::here()) {
  emulator::collective("wgmma_commit", where, emulator::commit, nullptr);
}

template <int N> void wgmma_wait(emulator::Where where = emulator::here()) {
  emulator::collective("wgmma_wait", where, emulator::finish<N>, nullptr);
}

template <int N> void wgmma_fence_operand(float (&d)[N]) {}
template <int N> void wgmma_fence_operand(u32 (&x)[N][4]) {}

template <class T, int N, bool TRANSPOSED>
void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate, emulator::Where where = emulator::here()) {
  static_assert(N == 16 || N == 24 || N == 32 || N == 64 || N == 128 || N == 256, "no such product");
  static_assert(!TRANSPOSED || emulator::Format<T>::PACKED == 2, "tf32 takes no transposed tile");
  emulator::TileProduct operand{emulator::Format<T>::multiply_tile, d, a, 0, b, accumulate, N, TRANSPOSED, where};
  emulator::collective("wgmma", where, emulator::start, &operand);
}
template <class T, int N, bool TRANSPOSED>
void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate, emulator::Where where = emulator::here()) {
  static_assert(N >= 16 && N <= 256 && emulator::Format<T>::PACKED == 2 && (!TRANSPOSED || N == 64), "no such product");
  emulator::TileProduct operand{emulator::Format<T>::multiply_tile, d, nullptr, a, b, accumulate, N, TRANSPOSED, where};
  emulator::collective("wgmma", where, emulator::start, &operand);
}

template <int N> void registers_up() {}
template <int N> void registers_down() {}

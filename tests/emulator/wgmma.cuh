// The CPU twin of kernels_cu/include/wgmma.cuh: each warp multiplies its own rows.
#include "ptx.cuh"

namespace emulator {

template <class T, int N, bool TRANSPOSED> void multiply_tile(const Started& product) {
  using F = Format<T>;
  constexpr int K = F::DEPTH, BYTES = 4 / F::PACKED, PIECE = 16 / BYTES;
  const u32 tile = (product.b & 0x3fff) << 4, leading = (product.b >> 16 & 0x3fff) << 4,
            stride = (product.b >> 32 & 0x3fff) << 4;
  float A[16][K], B[K][N], piece[PIECE];
  const auto read = [&](u32 at) {  // 16 bytes, which swizzles leave together
    const u32 swizzled = at ^ (at >> 3 & 0x70);
    if (swizzled + 16 > shared_bytes)
      return report("wgmma reads byte %u of %zu bytes of shared memory (%s:%d)", swizzled, shared_bytes,
                    product.where.file, product.where.line);
    for (int i = 0; i < PIECE; ++i) {
      u32 bits = 0;
      memcpy(&bits, shared_memory + swizzled + i * BYTES, BYTES);
      piece[i] = F::value(bits, 0);
    }
  };
  if (product.a_tile)
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < K; k += PIECE) {
        read(((product.a_tile & 0x3fff) << 4) + (product.first_row + row) / 8 * ((product.a_tile >> 32 & 0x3fff) << 4) +
             row % 8 * 128 + k * BYTES);
        memcpy(A[row] + k, piece, sizeof piece);
      }
  else
    for (int lane = 0; lane < WARP; ++lane) put_rows<T>(A, lane, product.a[lane]);
  if (TRANSPOSED)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < N; n += PIECE) {
        read(tile + k / 8 * stride + k % 8 * 128 + n / 64 * leading + n % 64 * BYTES);
        memcpy(B[k] + n, piece, sizeof piece);
      }
  else
    for (int n = 0; n < N; ++n)
      for (int k = 0; k < K; k += PIECE) {
        read(tile + n / 8 * stride + n % 8 * 128 + k * BYTES);
        for (int i = 0; i < PIECE; ++i) B[k + i][n] = piece[i];
      }
  for (int row = 0; row < 16; ++row)
    for (int n = 0; n < N; n += 8) {
      float sums[8] = {};
      auto own = [&](int i) -> float& { return product.d[row % 8 * 4 + i / 2][n / 2 + row / 8 * 2 + i % 2]; };
      if (product.accumulate)
        for (int i = 0; i < 8; ++i) sums[i] = own(i);
      multiply_row<K>(sums, A[row], B[0] + n, N);
      for (int i = 0; i < 8; ++i) own(i) = sums[i];
    }
}

struct TileProduct {
  void (*multiply)(const Started&);
  float* d;
  const u32* a;  // or null: a_tile
  u64 a_tile, b;
  bool accumulate;
  Where where;
};

static void start(void* const* operands) {
  Products& own = products[index() / WARP];
  const TileProduct& first = *static_cast<TileProduct*>(operands[0]);
  if (own.count == MAX_PRODUCTS)
    return report("more than %d wgmma under way (%s:%d)", MAX_PRODUCTS, first.where.file, first.where.line);
  Started& product = own.started[own.count++];
  const int first_row = int(threadIdx.x / WARP % 4 * 16);
  product = {first.multiply, {}, {}, first.a_tile, first_row, first.b, first.accumulate, own.groups, first.where};
  for (int lane = 0; lane < WARP; ++lane) {
    const TileProduct& operand = *static_cast<TileProduct*>(operands[lane]);
    if (operand.b != first.b || operand.a_tile != first.a_tile || operand.accumulate != first.accumulate)
      return report("the lanes of a warp give wgmma different tiles (%s:%d)", first.where.file,
                    first.where.line);
    product.d[lane] = operand.d;
    if (operand.a) memcpy(product.a[lane], operand.a, sizeof product.a[lane]);
  }
}

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

inline u64 wgmma_tile(const void* p, u32 leading, u32 stride, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(emulator::in_shared(p, 16) && (leading | stride) % 16 == 0 && (leading | stride) < 1 << 18,
                 "wgmma_tile: an address or a distance no multiple of 16, or not in shared memory (%s:%d)",
                 where.file, where.line);
  const u64 address = static_cast<const unsigned char*>(p) - emulator::shared_memory;
  return address >> 4 | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
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

template <int N> void wgmma_keep(float (&d)[N]) {}
template <int N> void wgmma_keep(u32 (&x)[N][4]) {}

template <class T, int N, bool TRANSPOSED>
void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate,
           emulator::Where where = emulator::here()) {
  static_assert(N == 16 || N == 24 || N == 32 || N == 64 || N == 128 || N == 256, "no such product");
  static_assert(!TRANSPOSED || emulator::Format<T>::PACKED == 2, "tf32 takes no transposed tile");
  emulator::TileProduct operand{emulator::multiply_tile<T, N, TRANSPOSED>, d, a, 0, b, accumulate, where};
  emulator::collective("wgmma", where, emulator::start, &operand);
}
template <class T, int N, bool TRANSPOSED>
void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate, emulator::Where where = emulator::here()) {
  static_assert(N >= 16 && N <= 256 && emulator::Format<T>::PACKED == 2 && !TRANSPOSED, "no such product");
  emulator::TileProduct operand{emulator::multiply_tile<T, N, TRANSPOSED>, d, nullptr, a, b, accumulate, where};
  emulator::collective("wgmma", where, emulator::start, &operand);
}

template <int N> void registers_up() {}
template <int N> void registers_down() {}

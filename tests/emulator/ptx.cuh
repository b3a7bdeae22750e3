// The CPU twin of kernels_cu/include/ptx.cuh: the same names and types, as the PTX manual defines them.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

// ---- conversions ------------------------------------------------------------------------------------------

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

inline float to_float(f16 x) {
  _Float16 half;
  memcpy(&half, &x, sizeof half);
  return float(half);
}

template <typename T> T from_float(float x);

template <> inline float from_float<float>(float x) { return x; }

template <> inline bf16 from_float<bf16>(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <> inline f16 from_float<f16>(float x) {
  if (x != x) return {0x7fff};
  const _Float16 half = x;
  f16 y;
  memcpy(&y, &half, sizeof y);
  return y;
}

inline u32 to_tf32(float x) {
  if (x != x) return 0x7fffffff;
  return (__float_as_uint(x) + 0x1000) & ~0x1fffu;
}

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}

// ---- warp: matrix products and reductions -----------------------------------------------------------------

namespace emulator {

// How a 32-bit operand register holds values: PACKED of them, and tiles are DEPTH of them deep.
struct Tf32 {
  static constexpr int PACKED = 1, DEPTH = 8;
  static float value(u32 bits, int) { return __uint_as_float(bits & ~0x1fffu); }
};
struct Bf16 {
  static constexpr int PACKED = 2, DEPTH = 16;
  static float value(u32 bits, int i) { return to_float(bf16{u16(bits >> 16 * i)}); }
};
struct F16 {
  static constexpr int PACKED = 2, DEPTH = 16;
  static float value(u32 bits, int i) { return to_float(f16{u16(bits >> 16 * i)}); }
};

struct Product { float* d; const u32* a; const u32* b; };
typedef float Row __attribute__((vector_size(32)));

template <class Format> void multiply(void* const* operands) {
  constexpr int P = Format::PACKED, K = Format::DEPTH;
  float A[16][K];
  Row B[K], D[16];
  for (int lane = 0; lane < WARP; ++lane) {
    const Product& own = *static_cast<Product*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < P; ++i) {
      for (int r = 0; r < 4; ++r) A[g + r % 2 * 8][t * P + i + r / 2 * (K / 2)] = Format::value(own.a[r], i);
      for (int r = 0; r < 2; ++r) B[t * P + i + r * (K / 2)][g] = Format::value(own.b[r], i);
    }
    for (int r = 0; r < 4; ++r) D[g + r / 2 * 8][t * 2 + r % 2] = own.d[r];
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k) D[row] += A[row][k] * B[k];
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) static_cast<Product*>(operands[lane])->d[r] = D[g + r / 2 * 8][t * 2 + r % 2];
  }
}

struct MatrixRow { u32* r; const u16* row; };

template <bool TRANSPOSED> void load_matrices(void* const* operands) {
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int m = 0; m < 4; ++m) {
      auto value = [&](int i, int j) { return u32(static_cast<MatrixRow*>(operands[m * 8 + i])->row[j]); };
      static_cast<MatrixRow*>(operands[lane])->r[m] = TRANSPOSED
                                                          ? value(2 * t, g) | value(2 * t + 1, g) << 16
                                                          : value(g, 2 * t) | value(g, 2 * t + 1) << 16;
    }
  }
}

template <bool TRANSPOSED> void load_row(const char* call, u32* r, const void* row, Where where) {
  EMULATOR_CHECK(in_shared(row, 16), "%s of a row not aligned to 16 bytes or not in shared memory (%s:%d)",
                 call, where.file, where.line);
  MatrixRow operand{r, static_cast<const u16*>(row)};
  collective(call, where, load_matrices<TRANSPOSED>, &operand);
}

template <class Format>
void multiply_own(const char* call, float* d, const u32* a, const u32* b, Where where) {
  Product operand{d, a, b};
  collective(call, where, multiply<Format>, &operand);
}

}  // namespace emulator

inline void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                     emulator::Where where = emulator::here()) {
  emulator::multiply_own<emulator::Tf32>("mma_tf32", d, a, b, where);
}

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                     emulator::Where where = emulator::here()) {
  emulator::multiply_own<emulator::Bf16>("mma_bf16", d, a, b, where);
}

inline void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                    emulator::Where where = emulator::here()) {
  emulator::multiply_own<emulator::F16>("mma_f16", d, a, b, where);
}

inline void ldmatrix_x4(u32 (&r)[4], const void* row, emulator::Where where = emulator::here()) {
  emulator::load_row<false>("ldmatrix_x4", r, row, where);
}

inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, emulator::Where where = emulator::here()) {
  emulator::load_row<true>("ldmatrix_x4_trans", r, row, where);
}

inline float warp_sum(float x, emulator::Where where = emulator::here()) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance, where);
  return x;
}

// ---- shared memory ----------------------------------------------------------------------------------------

inline unsigned char* dynamic_smem() { return emulator::shared_memory; }

// The destination holds poison until the wait, so that reading it too early shows.
template <int BYTES>
void cp_async(void* smem_dst, const void* gmem_src, bool valid, emulator::Where where = emulator::here()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emulator::Thread& self = *emulator::current;
  EMULATOR_CHECK(emulator::in_shared(smem_dst, BYTES),
                 "cp_async to %d bytes not aligned or not in shared memory (%s:%d)", BYTES, where.file,
                 where.line);
  EMULATOR_CHECK(reinterpret_cast<u64>(gmem_src) % BYTES == 0,
                 "cp_async of %d bytes from a source not aligned (%s:%d)", BYTES, where.file, where.line);
  EMULATOR_CHECK(self.copies_count < emulator::MAX_COPIES, "more than %d cp_async under way (%s:%d)",
                 emulator::MAX_COPIES, where.file, where.line);
  memset(smem_dst, emulator::POISON, BYTES);
  emulator::copies[threadIdx.x][self.copies_count++] = {smem_dst, gmem_src, BYTES, valid, self.groups_count};
}

inline void cp_async_commit() { ++emulator::current->groups_count; }

template <int N> void cp_async_wait() {
  emulator::Thread& self = *emulator::current;
  emulator::Copy* copies = emulator::copies[threadIdx.x];
  int done = 0;
  for (; done < self.copies_count && copies[done].group < self.groups_count - N; ++done) {
    const emulator::Copy& copy = copies[done];
    if (copy.valid)
      memcpy(copy.dst, copy.src, copy.bytes);
    else
      memset(copy.dst, 0, copy.bytes);
  }
  self.copies_count -= done;
  memmove(copies, copies + done, self.copies_count * sizeof(emulator::Copy));
}

// ---- kernels that overlap: here they run in turn -------------------------------------------------------------

inline void prefetch_l2(const void* gmem, u32 bytes, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(reinterpret_cast<u64>(gmem) % 16 == 0 && bytes % 16 == 0,
                 "prefetch_l2 of %u bytes, or an address, that is no multiple of 16 (%s:%d)", bytes, where.file,
                 where.line);
}
inline void launch_next() {}
inline void wait_for_previous() {}

// what      Matrix products of a warpgroup (wgmma) behind typed functions: four warps, the first a multiple of four.
// limits    sm_90a
// twin      tests/emulator/wgmma.cuh has the same names for the CPU: a change here is a change there.
#include "ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The descriptor of a tile in shared memory. The tile's rows have 128 bytes, and eight rows lie side by side in 1024
// bytes, in which address bits 4-6 are XORed with bits 7-9 (the 128-byte swizzle): so arrays of tiles start on 1024
// bytes. Adding bytes / 16 to the descriptor moves the tile by `bytes` bytes.
//   K_MAJOR, B[N][DEPTH]: a row has DEPTH numbers of one n. Each eight rows lie `eight_rows` bytes after the eight
//   before
//   MN_MAJOR, B[DEPTH][N]: a row has 64 columns n of one depth. Each 64 columns lie `panel` bytes after the 64 before
constexpr bool K_MAJOR = false, MN_MAJOR = true;
__device__ __forceinline__ u64 tile_descriptor(const void* p, u32 panel, u32 eight_rows) {
  const u32 address = u32(__cvta_generic_to_shared(p)) & 0x3ffff;
  return address >> 4 | u64(panel >> 4) << 16 | u64(eight_rows >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ u64 k_major_tile(const void* p, u32 eight_rows = 1024) {
  return tile_descriptor(p, 16 /* is not read */, eight_rows);
}
__device__ __forceinline__ u64 mn_major_tile(const void* p, u32 panel) { return tile_descriptor(p, panel, 1024); }

// Whether a product replaces what d holds, or is added to it.
constexpr bool OVERWRITE = false, ACCUMULATE = true;

// To be called before the first product, and before a product of which `a` or `d` was written since the last call.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the products started since the last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the N latest groups are unfinished. Until then the caller must not read or write d of an
// unfinished product, and must not write its operands (registers or tiles).
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving accesses of d over this line.
template <int N> __device__ __forceinline__ void wgmma_fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// To be called after the wait: keeps the compiler from giving the registers of the operands `a` to other values while
// products still read them.
template <int N> __device__ __forceinline__ void wgmma_fence_operand(u32 (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Starts D[64, N] = A[64, DEPTH] B[DEPTH, N], plus D if it accumulates; `b` is the descriptor of the tile B, which is
// K_MAJOR or MN_MAJOR. DEPTH is 8 in tf32, 16 in bf16 and f16; N is 16, 24, 32, 64, 128 or 256; tf32 is K_MAJOR. Warp w
// of the warpgroup holds rows 16 w to 16 w + 15 of A and of D. With A and D for these 16 rows, g = lane / 4 and t =
// lane % 4, a lane has ([2t,+1]: numbers 2t and 2t + 1; [2t+8,+9]: 2t + 8 and 2t + 9)
//   tf32:       a = A[g][t], A[g+8][t], A[g][t+4], A[g+8][t+4]
//   bf16, f16:  a = A[g][2t,+1], A[g+8][2t,+1], A[g][2t+8,+9], A[g+8][2t+8,+9], the first of two in the lower half
//   d[4n], d[4n+1] = D[g][8n+2t,+1]      d[4n+2], d[4n+3] = D[g+8][8n+2t,+1]
template <class Format, int N, bool B_MAJOR>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate);

// WGMMA defines one of these functions. types: the instruction's depth and types; tail: its last number, whether B is
// transposed (none in tf32); d_, a_, b_, accumulate_: the numbers of the operands in the assembly (%0, %1, ...), a_ and
// d_ lists of them; then the constraints of d. WGMMA_FORMATS: for all formats with N columns. EIGHT(t): %t0 to %t7;
// TEN(t): %t0 to %t9 and a comma; SIXTY: %0 to %59; D4, D8, D32: constraints of so many numbers of d.
#define WGMMA(format, n, transposed, types, tail, d_, a_, b_, accumulate_, ...)                                    \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma<format, n, transposed>(float (&d)[n / 2], const u32(&a)[4], u64 b,         \
                                                               bool accumulate) {                                  \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " accumulate_                                 \
                 ", 0;\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n types " {" d_ "}, {" a_ "}, " b_ ", accumulate, 1, 1" tail \
                 ";\n}"                                                                                            \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                      \
  }
#define WGMMA_FORMATS(n, ...)                                    \
  WGMMA(tf32, n, false, "k8.f32.tf32.tf32", "", __VA_ARGS__)     \
  WGMMA(bf16, n, false, "k16.f32.bf16.bf16", ", 0", __VA_ARGS__) \
  WGMMA(bf16, n, true, "k16.f32.bf16.bf16", ", 1", __VA_ARGS__)  \
  WGMMA(f16, n, false, "k16.f32.f16.f16", ", 0", __VA_ARGS__)    \
  WGMMA(f16, n, true, "k16.f32.f16.f16", ", 1", __VA_ARGS__)

#define EIGHT(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7"
#define TEN(t) EIGHT(t) ",%" #t "8,%" #t "9,"
#define SIXTY TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

WGMMA_FORMATS(16, EIGHT(), "%8,%9,%10,%11", "%12", "%13", D8(0))
WGMMA_FORMATS(24, TEN() "%10,%11", "%12,%13,%14,%15", "%16", "%17", D8(0), D4(8))
WGMMA_FORMATS(32, TEN() "%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21", D8(0), D8(8))
WGMMA_FORMATS(64, TEN() TEN(1) TEN(2) "%30,%31", "%32,%33,%34,%35", "%36", "%37", D32(0))
WGMMA_FORMATS(128, SIXTY "%60,%61,%62,%63", "%64,%65,%66,%67", "%68", "%69", D32(0), D32(32))
WGMMA_FORMATS(256, SIXTY TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) EIGHT(12), "%128,%129,%130,%131", "%132", "%133",
              D32(0), D32(32), D32(64), D32(96))
#undef WGMMA

// The same product with both operands in shared memory: `a` is the descriptor of the tile A[64][DEPTH], which is laid
// out as B[N][DEPTH] is. In bf16 and f16 only; N is 16, 24, 32, 64, 72, 96, 128, 144 or 256, and 64 if B is
// MN_MAJOR.
template <class Format, int N, bool B_MAJOR>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate);

// As above; a_ is the number of a's descriptor. WGMMA_TILES_OF: for both formats.
#define WGMMA(format, n, transposed, types, tail, d_, a_, b_, accumulate_, ...)                                     \
  template <>                                                                                                       \
  __device__ __forceinline__ void wgmma<format, n, transposed>(float (&d)[n / 2], u64 a, u64 b, bool accumulate) {  \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " accumulate_                                  \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #n types " {" d_ "}, " a_ ", " b_ ", accumulate, 1, 1, 0" tail \
                 ";\n}"                                                                                             \
                 : __VA_ARGS__                                                                                      \
                 : "l"(a), "l"(b), "r"(int(accumulate)));                                                           \
  }
#define WGMMA_TILES_OF(n, transposed, tail, ...)                     \
  WGMMA(bf16, n, transposed, "k16.f32.bf16.bf16", tail, __VA_ARGS__) \
  WGMMA(f16, n, transposed, "k16.f32.f16.f16", tail, __VA_ARGS__)
#define WGMMA_TILES(n, ...) WGMMA_TILES_OF(n, false, ", 0", __VA_ARGS__)

WGMMA_TILES(16, EIGHT(), "%8", "%9", "%10", D8(0))
WGMMA_TILES(24, TEN() "%10,%11", "%12", "%13", "%14", D8(0), D4(8))
WGMMA_TILES(32, TEN() "%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", D8(0), D8(8))
WGMMA_TILES(64, TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", D32(0))
WGMMA_TILES_OF(64, true, ", 1", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", D32(0))
WGMMA_TILES(72, TEN() TEN(1) TEN(2) "%30,%31,%32,%33,%34,%35", "%36", "%37", "%38", D32(0), D4(32))
WGMMA_TILES(96, TEN() TEN(1) TEN(2) TEN(3) EIGHT(4), "%48", "%49", "%50", D32(0), D8(32), D8(40))
WGMMA_TILES(128, SIXTY "%60,%61,%62,%63", "%64", "%65", "%66", D32(0), D32(32))
WGMMA_TILES(144, SIXTY TEN(6) "%70,%71", "%72", "%73", "%74", D32(0), D32(32), D8(64))
WGMMA_TILES(256, SIXTY TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) EIGHT(12), "%128", "%129", "%130", D32(0), D32(32),
            D32(64), D32(96))
#undef WGMMA
#undef WGMMA_TILES
#undef WGMMA_TILES_OF
#undef WGMMA_FORMATS
#undef EIGHT
#undef TEN
#undef SIXTY
#undef D8
#undef D4
#undef D32

// Sets the number of registers of a thread to N (24 to 256, a multiple of 8); every warp of the warpgroup calls this.
// registers_up waits until other warpgroups have given up enough registers. The kernel must have __launch_bounds__,
// which fix the number that its threads start with: otherwise the assembler ignores these instructions.
template <int N> __device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
#endif

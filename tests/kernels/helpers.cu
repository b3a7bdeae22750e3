// what      One warp that applies one function of ptx.cuh, or warp_sum: the template argument says which.
// shapes    in, out: whatever the case reads and writes; n: how many
// grid      one block of one warp
// smem      1024 bytes
#include "lanes.cuh"
#include "ptx.cuh"

struct HelpersArgs {
  const void* in;
  void* out;
  i64 n;
};

// Reads element i of in, writes element i of out.
template <typename In, typename Out, typename Function> __device__ void each(const HelpersArgs& args, Function f) {
  for (i64 i = threadIdx.x; i < args.n; i += 32) static_cast<Out*>(args.out)[i] = f(static_cast<const In*>(args.in)[i]);
}

template <typename T> struct Widen {
  __device__ static void run(const HelpersArgs& args) {
    each<T, float>(args, [](T x) { return to_float(x); });
  }
};

template <typename T> struct Narrow {
  __device__ static void run(const HelpersArgs& args) {
    each<float, T>(args, [](float x) { return from_float<T>(x); });
  }
};

// in [n, 2] float, out [n] pairs.
template <typename T> struct Pack {
  __device__ static void run(const HelpersArgs& args) {
    const float* in = static_cast<const float*>(args.in);
    for (i64 i = threadIdx.x; i < args.n; i += 32) static_cast<u32*>(args.out)[i] = pack<T>(in[2 * i], in[2 * i + 1]);
  }
};

// in: x, y and z, [n / 3] pairs each; out: x y + z.
struct Fma {
  __device__ static void run(const HelpersArgs& args) {
    const u32* const in = static_cast<const u32*>(args.in);
    const i64 n = args.n / 3;
    for (i64 i = threadIdx.x; i < n; i += 32)
      static_cast<u32*>(args.out)[i] = fma_bf16(in[i], in[n + i], in[2 * n + i]);
  }
};

// in: x and y, [n / 2] pairs of float16 each; out: x y.
struct Times {
  __device__ static void run(const HelpersArgs& args) {
    const u32* const in = static_cast<const u32*>(args.in);
    const i64 n = args.n / 2;
    for (i64 i = threadIdx.x; i < n; i += 32) static_cast<u32*>(args.out)[i] = mul_f16(in[i], in[n + i]);
  }
};

struct Tf32 {
  __device__ static void run(const HelpersArgs& args) {
    each<float, u32>(args, [](float x) { return to_tf32(x); });
  }
};

struct Exp2 {
  __device__ static void run(const HelpersArgs& args) {
    each<float, float>(args, [](float x) { return exp2_approx(x); });
  }
};

struct WarpSum {
  __device__ static void run(const HelpersArgs& args) {
    each<float, float>(args, [](float x) { return warp_sum(x); });
  }
};

// out[0], [1], [2]: the value of the lane 3 back, 5 ahead, and of lane 7.
struct Shuffles {
  __device__ static void run(const HelpersArgs& args) {
    const int lane = threadIdx.x;
    const float x = static_cast<const float*>(args.in)[lane];
    float* out = static_cast<float*>(args.out);
    out[lane] = __shfl_up_sync(0xffffffffu, x, 3);
    out[32 + lane] = __shfl_down_sync(0xffffffffu, x, 5);
    out[64 + lane] = __shfl_sync(0xffffffffu, x, 7);
  }
};

struct Tf32Product {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_tf32(d, a, b); }
};
struct Bf16Product {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_m16n8k16(d, a, b, bf16{}); }
};
struct HalfBf16Product {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_m16n8k8(d, {a[0], a[1]}, b[0], bf16{});
  }
};
struct F16Product {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_m16n8k16(d, a, b, f16{}); }
};
struct F16ProductAndSum {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const float c[4] = {d[0], d[1], d[2], d[3]};
    for (float& x : d) x = __uint_as_float(0x7fc00000u);  // nobody adds to that
    mma_f16_plus(d, a, b, c);
  }
};
// In two products of 8.
struct Bf16Products {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    for (int half = 0; half < 2; ++half) mma_m16n8k8(d, {a[2 * half], a[2 * half + 1]}, b[half], bf16{});
  }
};
struct F16Products {
  __device__ static void run(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    for (int half = 0; half < 2; ++half) mma_m16n8k8(d, {a[2 * half], a[2 * half + 1]}, b[half], f16{});
  }
};

// in: A [16, 8 words] then B transposed, [8, 8 words]; a word is a float or a pair of 16-bit values.
// out: D [16, 8] = A B + 1.
template <typename Product> struct Mma {
  __device__ static void run(const HelpersArgs& args) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const u32* A = static_cast<const u32*>(args.in);
    const u32* B = A + 16 * 8;
    const u32 a[4] = {A[g * 8 + t], A[(g + 8) * 8 + t], A[g * 8 + t + 4], A[(g + 8) * 8 + t + 4]};
    const u32 b[2] = {B[g * 8 + t], B[g * 8 + t + 4]};
    float d[4] = {1, 1, 1, 1};
    Product::run(d, a, b);
    for (int i = 0; i < 4; ++i) static_cast<float*>(args.out)[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
  }
};

// in: [4, 8, 8] 16-bit values; out: [32, 4] registers.
template <bool TRANSPOSED> struct Ldmatrix {
  __device__ static void run(const HelpersArgs& args) {
    const int lane = threadIdx.x;
    u16* s = reinterpret_cast<u16*>(dynamic_smem());
    for (int i = lane; i < 256; i += 32) s[i] = static_cast<const u16*>(args.in)[i];
    __syncthreads();  // s is whole
    u32 r[4];
    if constexpr (TRANSPOSED) ldmatrix_x4_trans(r, s + 8 * lane);
    else ldmatrix_x4(r, s + 8 * lane);
    for (int m = 0; m < 4; ++m) static_cast<u32*>(args.out)[4 * lane + m] = r[m];
  }
};

// in: [96] words; out: [32, 4] registers. Words and pairs of them are stored at flipped places, from which rows of
// matrices are read, each from its neighbour's place.
struct Flipped {
  __device__ static void run(const HelpersArgs& args) {
    const int lane = threadIdx.x;
    const u32* in = static_cast<const u32*>(args.in);
    u32* s = reinterpret_cast<u32*>(dynamic_smem());
    for (int i = lane; i < 256; i += 32) s[i] = 0;
    __syncthreads();  // s is zero
    store_flipped(s + lane, 64, 128, in[lane]);
    store_flipped(s + 2 * lane, 32, 256, {in[32 + 2 * lane], in[33 + 2 * lane]});
    __syncthreads();  // words and pairs are there
    u32 r[4];
    ldmatrix_x4_flipped(r, s + 4 * (lane & 7), 16, lane / 8 * 128);
    for (int m = 0; m < 4; ++m) static_cast<u32*>(args.out)[4 * lane + m] = r[m];
  }
};

// in, out: [32, BYTES / 4] floats; lanes from n on are not valid. Two groups: the even lanes' copies and the
// odd ones'.
template <int BYTES> struct CopyAsync {
  __device__ static void run(const HelpersArgs& args) {
    constexpr int WIDTH = BYTES / 4;
    const int lane = threadIdx.x;
    float* s = reinterpret_cast<float*>(dynamic_smem()) + WIDTH * lane;
    const float* in = static_cast<const float*>(args.in) + WIDTH * lane;
    if (lane % 2 == 0) cp_async<BYTES>(s, in, lane < args.n);
    cp_async_commit();
    if (lane % 2 == 1) cp_async<BYTES>(s, in, lane < args.n);
    cp_async_commit();
    cp_async_wait<1>();
    if (lane % 2 == 0)
      for (int i = 0; i < WIDTH; ++i) static_cast<float*>(args.out)[WIDTH * lane + i] = s[i];
    cp_async_wait<0>();
    if (lane % 2 == 1)
      for (int i = 0; i < WIDTH; ++i) static_cast<float*>(args.out)[WIDTH * lane + i] = s[i];
  }
};

template <typename Case> __global__ void __launch_bounds__(32) helpers(const HelpersArgs args) { Case::run(args); }

// what      What the kernels of a training step share: eight channels at a time, sums over a block, dropout.
#include "decode.cuh"

// Eight neighbouring channels of a token, as floats.
struct Eight {
  float x[8];
};

// The same as they are stored, in as few registers, for loads that are to be under way together.
template <typename T> struct Stored {
  uint4 words[sizeof(T) / 2];

  // `from` is aligned to 16 bytes.
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int n = 0; n < int(sizeof(T)) / 2; ++n) words[n] = reinterpret_cast<const uint4*>(from)[n];
  }

  __device__ __forceinline__ Eight floats() const {
    Eight to;
    if constexpr (sizeof(T) == 4) {
      const uint4 low = words[0], high = words[1];
      const u32 all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) to.x[n] = __uint_as_float(all[n]);
    } else {
      const u32 all[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        to.x[2 * n] = to_float(T{u16(all[n])});
        to.x[2 * n + 1] = to_float(T{u16(all[n] >> 16)});
      }
    }
    return to;
  }
};

template <typename T> __device__ __forceinline__ Eight load8(const T* from) {
  Stored<T> stored;
  stored.load(from);
  return stored.floats();
}

template <typename T> __device__ __forceinline__ void store8(T* to, const Eight& from) {
  const float* x = from.x;
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    *reinterpret_cast<float4*>(to + 4) = {x[4], x[5], x[6], x[7]};
  } else {
    *reinterpret_cast<uint4*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                                     pack<T>(x[6], x[7])};
  }
}

// Both sums over the block, the same bits in every thread; `s_parts` is not used again before a barrier.
template <int WARPS> __device__ __forceinline__ float2 block_sums(float x, float y, float2* s_parts) {
  x = warp_sum(x);
  y = warp_sum(y);
  if constexpr (WARPS == 1) return {x, y};
  if ((threadIdx.x & 31) == 0) s_parts[threadIdx.x >> 5] = {x, y};
  __syncthreads();  // the warps' sums stand
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    sum.x += s_parts[warp].x;
    sum.y += s_parts[warp].y;
  }
  return sum;
}

// The tokens that a block of `each` has, one after the other, and where they stand in their sequences of `T`.
struct Tokens {
  i64 t, last, place, T;

  __device__ __forceinline__ Tokens(i64 each, i64 all, i64 T)
      : t(blockIdx.x * each), last(t + each < all ? t + each : all), place(t % T), T(T) {}
  __device__ __forceinline__ bool more() const { return t < last; }
  __device__ __forceinline__ bool starts() const { return place == 0; }
  __device__ __forceinline__ bool ends() const { return place + 1 == T; }
  __device__ __forceinline__ void next() {
    place = ends() ? 0 : place + 1;
    ++t;
  }
};

// Where a residual loses some of its elements: those of `site` in the step that `seeds` tell, two integers on the
// device. Null keeps all.
struct Dropout {
  const i64* seeds;
  i64 site;
  double rate;
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
__device__ __forceinline__ uint4 philox(uint4 counter, u32 key0, u32 key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 left = u64(0xD2511F53u) * counter.x, right = u64(0xCD9E8D57u) * counter.z;
    counter = {u32(right >> 32) ^ counter.y ^ key0, u32(right), u32(left >> 32) ^ counter.w ^ key1, u32(left)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Drops some of the eight channels that start at `at`, a multiple of 8, and scales the others up. Each has 16 random
// bits.
__device__ __forceinline__ void dropped(Eight& x, const Dropout& drop, i64 at) {
  if (!drop.seeds) return;
  const u64 n = u64(at) / 8;
  const uint4 bits = philox({u32(n), u32(n >> 32), u32(drop.site), 0}, u32(drop.seeds[0]), u32(drop.seeds[1]));
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w}, threshold = u32(drop.rate * 65536);
  const float scale = 65536.f / float(65536 - threshold);
#pragma unroll
  for (int i = 0; i < 8; ++i) x.x[i] *= (words[i / 2] >> 16 * (i % 2) & 0xffff) >= threshold ? scale : 0.f;
}

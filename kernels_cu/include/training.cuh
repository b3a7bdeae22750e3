// what      Shared by the kernels of a training step: loads and stores of eight channels, a block's tokens, dropout.
#include "decode.cuh"

// Eight neighbouring channels of a token, as floats.
struct EightFloats {
  float x[8];
};

// Eight neighbouring channels as they are in memory, which takes fewer registers: for loads that are issued together.
template <typename T> struct Stored {
  uint4 words[sizeof(T) / 2];

  // `from` is aligned to 16 bytes.
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int n = 0; n < int(sizeof(T)) / 2; ++n) words[n] = reinterpret_cast<const uint4*>(from)[n];
  }

  __device__ __forceinline__ EightFloats floats() const {
    EightFloats to;
    if constexpr (sizeof(T) == 4) {
      const uint4 low = words[0], high = words[1];
      const u32 all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) to.x[n] = __uint_as_float(all[n]);
    } else {
      unpack<T>(to.x, words[0]);
    }
    return to;
  }
};

// Load and store eight neighbours, at addresses that are multiples of 16 bytes.
template <typename T> __device__ __forceinline__ EightFloats load8(const T* from) {
  Stored<T> stored;
  stored.load(from);
  return stored.floats();
}

template <typename T> __device__ __forceinline__ void store8(T* to, const EightFloats& from) { store8(to, from.x); }

// The residual and its gradient, [tokens, D] in float32: a row has the first four of every thread's eight channels,
// then the other four, so that in both halves a warp's threads load and store 16 bytes side by side. In the order of
// channels they would load and store half of every 32 bytes, twice. Only the first D / 8 threads of a block call them.
template <typename X> __device__ __forceinline__ X* residual_of(X* x, i64 t, i64 D) {
  return x + t * D + 4 * threadIdx.x;
}

struct StoredResidual {
  float4 low, high;

  __device__ __forceinline__ void load(const float* x, i64 t, i64 D) {
    const float* from = residual_of(x, t, D);
    low = load4(from), high = load4(from + D / 2);
  }
  __device__ __forceinline__ EightFloats floats() const {
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
};

__device__ __forceinline__ void store_residual(float* to, i64 t, i64 D, const EightFloats& x) {
  to = residual_of(to, t, D);
  store4(to, {x.x[0], x.x[1], x.x[2], x.x[3]});
  store4(to + D / 2, {x.x[4], x.x[5], x.x[6], x.x[7]});
}

// Eight neighbours of each of THREADS threads, in shared memory. copy() starts to copy the thread's; after
// cp_async_commit and cp_async_wait floats() reads them. The next copy() may follow floats() without a barrier.
template <typename T, int THREADS> struct Copied {
  static constexpr int PIECES = sizeof(T) / 2, OF_PIECE = 16 / sizeof(T);
  uint4 pieces[PIECES][THREADS];

  // `from` is aligned to 16 bytes. apart: the numbers from a piece to the next.
  __device__ __forceinline__ void copy(const T* from, i64 apart = OF_PIECE) {
#pragma unroll
    for (int n = 0; n < PIECES; ++n) cp_async<16>(&pieces[n][threadIdx.x], from + n * apart, true);
  }

  __device__ __forceinline__ EightFloats floats() const {
    Stored<T> stored;
#pragma unroll
    for (int n = 0; n < PIECES; ++n) stored.words[n] = pieces[n][threadIdx.x];
    return stored.floats();
  }
};

// Iterates over a block's tokens: `per_block` of `tokens` in all, from block * per_block on. t: the current token;
// last: the one after the block's last token; place: t's number in its sequence of T tokens. starts(), ends(): whether
// t is its sequence's first, or last token.
struct Tokens {
  i64 t, last, place, T;

  __device__ __forceinline__ Tokens(i64 per_block, i64 tokens, i64 T, i64 block = blockIdx.x)
      : t(block * per_block), last(t + per_block < tokens ? t + per_block : tokens), place(t % T), T(T) {}
  __device__ __forceinline__ bool more() const { return t < last; }
  __device__ __forceinline__ bool starts() const { return place == 0; }
  __device__ __forceinline__ bool ends() const { return place + 1 == T; }
  __device__ __forceinline__ void next() {
    place = ends() ? 0 : place + 1;
    ++t;
  }
};

// Dropout of an array, a share `rate` of it. seeds: two integers on the device, of the training and of its step; null:
// no dropout; site: the number of the array's place in the model. Seeds, site and its index determine whether a number
// becomes zero.
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

// Sets some of eight channels of an array, from number `index` on, a multiple of 8, to zero, and scales the others up,
// so that sums stay as they are on average. 16 random bits decide for each: it becomes 0 if they are below rate 2^16.
// Equal seeds, site and index give the same bits: the backward pass drops what the forward pass did.
__device__ __forceinline__ void dropped(EightFloats& x, const Dropout& drop, i64 index) {
  if (!drop.seeds) return;
  const u64 n = u64(index) / 8;
  const uint4 bits = philox({u32(n), u32(n >> 32), u32(drop.site), 0}, u32(drop.seeds[0]), u32(drop.seeds[1]));
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w}, threshold = u32(drop.rate * 65536);
  const float scale = 65536.f / float(65536 - threshold);
#pragma unroll
  for (int i = 0; i < 8; ++i) x.x[i] *= (words[i / 2] >> 16 * (i % 2) & 0xffff) >= threshold ? scale : 0.f;
}

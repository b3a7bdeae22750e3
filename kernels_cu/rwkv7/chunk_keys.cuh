// what      The decays, keys, vectors a and b and values of RWKV-7's recurrence for the tokens of a chunk, in prompts.
//           They are made of the time mix's products, as in keys.cu, within the kernel that prepares the chunk.
// shapes    16-bit data T; heads of 64 channels; a tile is [32 tokens, 64 channels] in shared memory. `args` are the
//           kernel's: v, first_v, and key, the array k again, are [1, H, T, 64]. So is b, which holds the logits of
//           the first layer's share. bases [3, H, 1, 64] are of w, a and v; removal, replacement [1, H, 1, 64]
// limits    128 threads; rows start on 16 bytes
#include "rwkv7/time_mix_sums.cuh"

// From the kernel's includes:
//   BlockTask: a thread's BLOCK = 4 tokens and 4 channels. 16 neighbouring lanes have the 64 channels of these tokens.
//     at(tile, n): the address of the n-th token's channels
//   ChunkOfBlock: the chunk; h: its head; rows: its tokens; row(x, h): the row of the first one in x
//   unpack_four, put_four: load and store four channels

constexpr int TOKEN_LANES = 16;

// Stores 16 bytes to memory by two instructions, of which the compiler makes four if they are words.
__device__ __forceinline__ void store_16(void* to, const uint4& x) {
  u64* const halves = static_cast<u64*>(to);
  halves[0] = u64(x.y) << 32 | x.x, halves[1] = u64(x.w) << 32 | x.z;
}

// What a thread reads of memory itself, and makes of it. The constructor loads it: the loads are on their way while the
// kernel starts to copy tiles.
template <typename T> struct ChunkKeys {
  static constexpr int PIECE = 8, AT_ONCE = 16;  // of values: channels of a thread; tokens of all 128 threads
  BlockTask<64> task;
  int first = threadIdx.x / PIECE, c = threadIdx.x % PIECE * PIECE;  // the thread's first token of values, and channel
  float4 base_w, base_a, removal, replacement;                       // of the thread's channels of keys
  float base_v[PIECE];
  uint4 v[2] = {}, first_v[2] = {}, share[2] = {};  // of tokens `first` and AT_ONCE later
  bool is_first_layer;                              // whose bases of v are -inf; what it loads of first_v is not used

  template <class Args, class Chunk> __device__ __forceinline__ ChunkKeys(const Args& args, const Chunk& chunk) {
    is_first_layer = *args.bases.row(2, 0, 0) < -3e38f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (first + n * AT_ONCE >= chunk.rows) continue;
      const auto load = [&](const auto& x) { return *reinterpret_cast<const uint4*>(at(x, chunk, n)); };
      v[n] = load(args.v), first_v[n] = load(args.first_v), share[n] = load(args.b);
    }
    load8(base_v, args.bases.row(2, chunk.h, 0) + c);
    const auto four_of = [&](const auto& rows, int kind) { return load4(rows.row(kind, chunk.h, 0) + task.c); };
    base_w = four_of(args.bases, 0), base_a = four_of(args.bases, 1);
    removal = four_of(args.removal, 0), replacement = four_of(args.replacement, 0);
  }
  template <class Rows, class Chunk>
  __device__ __forceinline__ auto at(const Rows& x, const Chunk& chunk, int n) const {
    return chunk.row(x, chunk.h) + (first + n * AT_ONCE) * x.token_stride + c;
  }

  // Mixes the chunk's values, in place, with those of the first layer, which stores its own in first_v instead.
  template <class Args, class Chunk> __device__ __forceinline__ void mix_values(const Args& args, const Chunk& chunk) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (first + n * AT_ONCE >= chunk.rows) continue;
      if (is_first_layer) {
        store_16(at(args.first_v, chunk, n), v[n]);
        continue;
      }
      float x[PIECE], x_first[PIECE], logit[PIECE];
      const auto unpack = [](float (&to)[PIECE], const uint4& from) { load8(to, reinterpret_cast<const T*>(&from)); };
      unpack(x, v[n]), unpack(x_first, first_v[n]), unpack(logit, share[n]);
#pragma unroll
      for (int i = 0; i < PIECE; ++i) x[i] = mixed_value<T>(x[i], x_first[i], base_v[i] + logit[i]);
      store_16(at(args.v, chunk, n),
               {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])});
    }
  }

  // Makes the recurrence's numbers of the thread's tokens and channels, in tiles: the key of k; a and b of the logits
  // in a; the log decay of those in g. Keys go to memory, too. Tokens after the chunk's last one get zeros.
  template <class Args, class Chunk>
  __device__ __forceinline__ void make_keys(const Args& args, const Chunk& chunk, T* k, T* a, T* b, T* g) {
    static_assert(sizeof(T) == 2 && BlockTask<64>::LANES == TOKEN_LANES);
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const float4 product = unpack_four(task.at(k, n)), decay = plus(base_w, unpack_four(task.at(g, n))),
                   icl_logit = plus(base_a, unpack_four(task.at(a, n)));
      const ChannelOfKey four[4] = {channel_of_key<T>(product.x, decay.x, icl_logit.x, removal.x, replacement.x),
                                    channel_of_key<T>(product.y, decay.y, icl_logit.y, removal.y, replacement.y),
                                    channel_of_key<T>(product.z, decay.z, icl_logit.z, removal.z, replacement.z),
                                    channel_of_key<T>(product.w, decay.w, icl_logit.w, removal.w, replacement.w)};
      float squares = 0.f;
#pragma unroll
      for (const ChannelOfKey& x : four) squares = fmaf(x.removed, x.removed, squares);
      const float inverse_norm = fminf(inverse_root(sum_over_lanes<TOKEN_LANES>(squares)), 1.f / LEAST_NORM);
      const auto of_four = [&](auto f) { return float4{f(four[0]), f(four[1]), f(four[2]), f(four[3])}; };
      const int token = task.first + n;
      const bool inside = token < chunk.rows;
      const float4 key = of_four([](const ChannelOfKey& x) { return x.key; });
      put_four(task.at(k, n), key);
      put_four(task.at(a, n), of_four([&](const ChannelOfKey& x) { return -inverse_norm * x.removed; }));
      put_four(task.at(b, n), of_four([&](const ChannelOfKey& x) { return inverse_norm * x.removed * x.icl; }));
      put_four(task.at(g, n), of_four([&](const ChannelOfKey& x) { return inside ? x.w : 0.f; }));
      if (inside) store_four(chunk.row(args.key, chunk.h) + token * args.key.token_stride + task.c, key);
    }
    __syncwarp();  // the warp's blocks are complete: a block is that of lanes of one warp
  }
};

// Where keys are given.
struct NoKeys {
  template <class Args, class Chunk> __device__ __forceinline__ NoKeys(const Args&, const Chunk&) {}
};

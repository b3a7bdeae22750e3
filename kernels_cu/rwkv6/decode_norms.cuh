// what      The norms of a decoding step of one sequence in one launch: x and LN(x) as words, LN(x) mixed with the
//           previous token's, as operands in the staging area. The including kernel includes its version's
//           decode_phases.cuh first.
// math      xx = LN(x); a mix is xx + (shift - xx) maa, shift the previous token's xx
// shapes    args.x [D]: the residual stream before the first layer; args.xx [6, D]: words, see normed_words
// smem      the staging area: x as floats(), then the operands of one or two mixes; LN(x) in kept_norm() if KEEPS_NORM
// barriers  named barrier 1 of the computing threads, at each call of sync()
#include "rwkv6/decode_operands.cuh"

// From the includes:
//   THREADS = 256 threads compute; tid: the thread's number among them; epoch: the number that this layer's words carry
//   put_word: stores a number for other blocks; take_words: loads words, until they are of this epoch
//   put_operands, put_vector: store operands in the staging area. DIGITS: operands are digits of 8 bits, in a unit of
//     all numbers that a warp multiplies, so they are made once these numbers are in shared memory
//   Norm: where a norm's parameters `ln`, its mix's `maa` and the previous token's LN(x), `shift`, are; channels(norm,
//     j): those of channels j ... j + 3 (Channels); norm_of: the Norm of a phase's mix number `input`; input_of: a
//     tile's
//   sum_for_norm: stores the warps' sums for a norm; sum_of_warps: adds them; normed, mixed: four channels of LN(x), of
//     the mix
//   VECTORS: how many mixes of FFN_INPUTS a block computes at once; KEEPS_NORM: whether LN(x) is kept, for mix_again

template <typename T, typename S, int STAGES> struct DecodeNorms : DecodeOperands<T, S, STAGES> {
  typedef DecodeOperands<T, S, STAGES> Block;
  using Block::args, Block::s, Block::D, Block::tid, Block::epoch, Block::DIGITS, Block::channels, Block::floats;
  using Block::Block;
  typedef typename Block::Channels Channels;
  typedef typename Block::Word Word;

  // Waits for a word, and returns its number.
  __device__ __forceinline__ float take_number(const Word* from) const {
    Word word[1];
    const Word* const words[1] = {from};
    take_words(word, words, epoch);
    return number(word[0]);
  }

  // The parts of args.xx: LN(x) of a mix; x after a mix; x after the last layer, in words of 8 bytes, which hold the
  // whole epoch. A word of 4 bytes has its lowest bit only, and is for blocks that read it in every layer. All blocks
  // with tiles of HEAD read the last x, and may have had no tile of a normed phase before.
  static constexpr int OF_TIME_MIX = 0;  // the value of `channel_mix` for the time mix
  __device__ __forceinline__ Word* normed_words(int channel_mix) const { return args.xx + channel_mix * D; }
  __device__ __forceinline__ Word* x_words(int channel_mix) const { return args.xx + (2 + channel_mix) * D; }
  __device__ __forceinline__ u64* last_x_words() const { return reinterpret_cast<u64*>(args.xx + 4 * D); }

  // Waits for the words of x [D], and stores their numbers in floats(), in the staging area.
  template <typename W> __device__ __forceinline__ void take_x(const W* words, u32 epoch) {
    constexpr int TOGETHER = 16 / sizeof(W) /* words of a load */, LOADS = 8 / TOGETHER;
#pragma unroll 1
    for (int start = TOGETHER * tid; start < D; start += LOADS * TOGETHER * THREADS) {
      const W* from[LOADS];
      W found[LOADS][TOGETHER];
      const auto at = [&](int n) { return min(start + n * TOGETHER * THREADS, D - TOGETHER); };
#pragma unroll
      for (int n = 0; n < LOADS; ++n) from[n] = words + at(n);
      take_words(found, from, epoch);
#pragma unroll
      for (int n = 0; n < LOADS; ++n)
#pragma unroll
        for (int i = 0; i < TOGETHER; i += 2)
          *reinterpret_cast<float2*>(floats() + at(n) + i) = {number(found[n][i]), number(found[n][i + 1])};
    }
  }
  // The same for the x that a normed phase reads: after the time mix, after the channel mix of the layer before, or, in
  // the first layer, from memory.
  __device__ __forceinline__ void take_x(i64 layer, int phase) {
    if (phase == HEAD) take_x(last_x_words(), epoch - 1);  // of the last layer
    else if (phase == FFN_INPUTS) take_x(x_words(0), epoch);
    else if (layer > 0) take_x(x_words(1), epoch - 1);
    else
#pragma unroll 1
      for (int j = 4 * tid; j < D; j += 4 * THREADS) *reinterpret_cast<float4*>(floats() + j) = load4(args.x + j);
    sync();  // the staging area is filled
  }

  // Stores the operands of xx + (shift - xx) maa, with xx = LN(x), for the mix of the block's first tile `tile`, or, if
  // VECTORS is 2, for both mixes of FFN_INPUTS; if KEEPS_NORM, keeps xx for `mix_again`. The block that has the phase's
  // tile 0 stores words of xx for others.
  __device__ __forceinline__ void normalise(i64 layer, int phase, int tile) {
    constexpr int AHEAD = 2;  // groups of four channels whose parameters a thread loads before it waits for x
    Word* const xx = tile == 0 && phase != HEAD ? normed_words(phase == FFN_INPUTS) : nullptr;
    const bool twice = VECTORS == 2 && phase == FFN_INPUTS;
    const Norm norm = norm_of(args, layer, phase, VECTORS == 2 ? 0 : input_of(args, phase, tile));
    const float inverse_D = 1.f / D;
    const auto load = [&](const float* from, int j) { return from && j < D ? load4(from + j) : float4{}; };
    // Of AHEAD groups of four channels: the norm's and the mix's parameters; the previous token's xx; the second mix's
    // maa.
    Channels ahead[AHEAD];
    float4 old[AHEAD], second_maa[AHEAD];
    const auto load_channels = [&](int n, int j) {
      ahead[n] = channels(norm, j), old[n] = load(norm.shift, j),
      second_maa[n] = load(twice ? norm.maa + D : nullptr, j);
    };
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) load_channels(n, 4 * (tid + n * THREADS));
    take_x(layer, phase);
    Block::sum_for_norm(floats());  // s.sum, s.squares: by warp
    const float mean = Block::sum_of_warps(s.sum) * inverse_D;
    const float scale = inverse_root(Block::sum_of_warps(s.squares) * inverse_D + float(args.eps));
    const auto store_mixes = [&](int n, int j) {
      if (j >= D) return;
      Channels& c = ahead[n];
      const float4 y = Block::normed(load4(floats() + j), mean, scale, c);
      const auto store = [&](int vector, const float4& x) {
        if (DIGITS) *reinterpret_cast<float4*>(floats() + vector * D + j) = x;
        else Block::put_operands(D, vector, j, x);
      };
      store(0, norm.shift ? Block::mixed(y, old[n], c) : y);
      if (KEEPS_NORM) *reinterpret_cast<float4*>(Block::kept_norm() + j) = y;
      c.maa = second_maa[n];
      if (twice) store(1, Block::mixed(y, old[n], c));
      if (!xx) return;
      put_word(xx + j, y.x, epoch), put_word(xx + j + 1, y.y, epoch);
      put_word(xx + j + 2, y.z, epoch), put_word(xx + j + 3, y.w, epoch);
    };
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) store_mixes(n, 4 * (tid + n * THREADS));
#pragma unroll 1
    for (int j = 4 * (tid + AHEAD * THREADS); j < D; j += 4 * THREADS) load_channels(0, j), store_mixes(0, j);
    sync();  // the operands, or the numbers that become digits, are in shared memory
    if (DIGITS)
#pragma unroll 1
      for (int vector = 0; vector <= twice; ++vector)
        Block::put_vector(vector, [&](int k) { return load4(floats() + vector * D + k); });
  }

  // Stores the operands of another mix of the phase, number `input`, over those of the mix before.
  __device__ __forceinline__ void mix_again(i64 layer, int phase, int input) {
    const Norm norm = norm_of(args, layer, phase, input);
    __syncwarp();  // the warp has read its part of the staging area, which is overwritten
    Block::put_vector(0, [&](int k) {
      Channels c = {};
      c.maa = load4(norm.maa + k);
      return Block::mixed(load4(Block::kept_norm() + k), load4(norm.shift + k), c);
    });
  }
};

// what      The vectors of products of decode_layers.cuh: each of the 8 computing warps converts the numbers that it
//           multiplies by to operands in the staging area, from which its lanes load them. The numbers are floats in
//           shared memory, or words of other blocks in global memory, which carry the number of the layer they are of,
//           `epoch`
// smem      the staging area: operands of one or two vectors [TERMS, count], the terms of their numbers
//           (decode_split.cuh); after them the floats [D] of a norm. Columns of weights (Lane<T>, decode_tiles.cuh): a
//           stage has STAGE; in each of its STEPS steps a warp has STEP neighbours, warps STEP apart, steps STRIDE
//           apart
// barriers  __syncwarp only
#include "rwkv6/decode_block.cuh"
#include "words.cuh"

// From the includes:
//   THREADS = 256 threads compute, WARPS = 8 warps
//   Lane<T>, STEPS: columns of weights (smem); Split<T>: how a number is split into TERMS terms, a lane's EACH numbers
//     into WORDS words
//   VECTORS: how many mixes of a norm a block computes at once; KEEPS_NORM: whether it keeps LN(x) for further mixes
//   take_words: waits for words of this epoch; Handed<T>: the type of words
//
// Similar names:
//   a four, FOURS  four neighbouring numbers of a vector; how many of them a lane waits for at once
//   NEIGHBOURS     words that a load of 16 bytes has, 4 or 2; LOADS: loads of a four, 1 or 2
//   EACH           neighbours of a row of weights that a lane multiplies in a step
//   WORDS, PACKED  u32 that have one term of EACH numbers; how many numbers a u32 has
//   Word, `words`  numbers with their epoch, in global memory
//   count, pitch   numbers of the vector in the staging area; the distance there from one term's row to the next one's

template <typename T, typename S, int STAGES> struct DecodeOperands : DecodeBlock<T, S, STAGES> {
  typedef DecodeBlock<T, S, STAGES> Block;
  using Block::s, Block::staging, Block::D, Block::tid, Block::EACH, Block::TERMS;
  const u32 epoch;  // the number that this layer's words carry

  __device__ __forceinline__ DecodeOperands(const Args<T, S>& args, Shared<STAGES>& s, u32 epoch, int next)
      : Block(args, s, next), epoch(epoch) {}

  static constexpr int WORDS = Split<T>::WORDS;
  static constexpr bool HALVES = TERMS == 3, DIGITS = TERMS == 4;  // its terms: bfloat16, or digits; else tf32
  static constexpr int PACKED = HALVES ? 2 : DIGITS ? 4 : 1;       // numbers in a word of operands
  typedef Handed<T> Word;
  static constexpr int NEIGHBOURS = 16 / sizeof(Word);
  typedef u32 Operands[STEPS][WORDS];  // a lane's, for a stage of weights: of one term of the vector's numbers

  // Bytes of a number, or of a channel. Operands of a vector; those of a norm's vectors, after which its floats are, or
  // in whose place they are if operands are floats and the norm is not kept; all that a norm has in the staging area.
  // The host reserves as many (DecodeFew and DecodeOne compare them).
  static constexpr int OPERAND_BYTES = PACKED > 1 ? TERMS * 4 / PACKED : 4;
  static constexpr int FLOATS_AT = PACKED > 1 ? VECTORS * OPERAND_BYTES : KEEPS_NORM ? 4 : 0;
  static constexpr int NORM_BYTES = PACKED > 1 ? FLOATS_AT + (DIGITS ? 8 : 4) : 8;
  __device__ __forceinline__ float* floats() const { return staging + FLOATS_AT * D / 4; }
  // Where LN(x) is kept: over the floats of x, or, with digits, D numbers later, after the floats of the mix that
  // become digits.
  __device__ __forceinline__ float* kept_norm() const { return floats() + (DIGITS ? D : 0); }

  // Stores the operands of four neighbouring numbers of a vector, from number k on: in a row of `pitch` numbers for
  // each term, their bfloat16 numbers, or their digits in the warp's unit; or, in one row, the numbers themselves.
  __device__ __forceinline__ void put_operands(int pitch, int vector, int k, float4 x) {
    if constexpr (HALVES) {
      u32* to = reinterpret_cast<u32*>(staging) + (vector * TERMS * pitch + k) / 2;
#pragma unroll
      for (int term = 0; term < TERMS; ++term, to += pitch / 2)
        *reinterpret_cast<uint2*>(to) = {upper_halves(x.x, x.y), upper_halves(x.z, x.w)};
    } else if constexpr (DIGITS) {
      u32 words[TERMS];
      // 0x7f000000 less the bits of a power of two, here the unit, are the bits of its inverse.
      Split<T>::digits(words, x, __uint_as_float(0x7f000000u - __float_as_uint(s.units[vector][tid >> 5])));
      u32* to = reinterpret_cast<u32*>(staging) + (vector * TERMS * pitch + k) / 4;
#pragma unroll
      for (int term = 0; term < TERMS; ++term, to += pitch / 4) *to = words[term];
    } else {
      *reinterpret_cast<float4*>(staging + vector * pitch + k) = x;
    }
  }
  // The upper halves of x and y, two bfloat16 numbers, which are subtracted from x and y.
  static __device__ __forceinline__ u32 upper_halves(float& x, float& y) {
    const u32 upper[2] = {__float_as_uint(x) & 0xffff0000u, __float_as_uint(y) & 0xffff0000u};
    x -= __uint_as_float(upper[0]), y -= __uint_as_float(upper[1]);
    return upper[0] >> 16 | upper[1];
  }

  // The largest of `largest` and the magnitudes of x, as bits, which have the order of the magnitudes.
  static __device__ __forceinline__ u32 largest_of(u32 largest, const float4& x) {
    const auto magnitude = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
    return max(max(largest, max(magnitude(x.x), magnitude(x.y))), max(magnitude(x.z), magnitude(x.w)));
  }
  // Stores the unit of the digits of the warp's numbers, whose largest magnitude is `largest`: the power of two with
  // which that is from 2^29 to 2^30 units, or NaN if a number is not finite. 0x10000000, 2^-95, keeps the unit normal.
  __device__ __forceinline__ void put_unit(int vector, u32 largest) {
    largest = __reduce_max_sync(0xffffffffu, max(largest, 0x10000000u));
    const float unit = __uint_as_float((largest & 0x7f800000u) - (29u << 23));
    if ((tid & 31) == 0) s.units[vector][tid >> 5] = largest < 0x7f800000u ? unit : __uint_as_float(0x7fffffffu);
    __syncwarp();  // the unit is in shared memory
  }

  // Of `count` numbers a warp multiplies by some groups of four, those of its columns of weights. fours_of: how many
  // groups; column_of: the first number of a group.
  static constexpr int ACROSS = Lane<T>::STEP / 4, FOURS_OF_STAGE = STEPS * ACROSS;
  static __device__ __forceinline__ int fours_of(int count) {
    return (count + Lane<T>::STAGE - 1) / Lane<T>::STAGE * FOURS_OF_STAGE;
  }
  __device__ __forceinline__ int column_of(int four) const {
    return four / FOURS_OF_STAGE * Lane<T>::STAGE + four % FOURS_OF_STAGE / ACROSS * Lane<T>::STRIDE +
           (tid >> 5) * Lane<T>::STEP + four % ACROSS * 4;
  }

  // Waits for the words of the numbers by which this warp multiplies, of `count` numbers, and stores their operands: of
  // the numbers, or of their products with the gates. A lane waits for FOURS groups of four at a time. With digits
  // `count` is at most AT_ONCE<FOURS>: each iteration finds a unit for its numbers, and products take the last one
  // (NEIGHBOURS, LOADS: of words of 4 bytes 4 and 1, of 8 bytes 2 and 2).
  template <int FOURS> static constexpr int AT_ONCE = FOURS * 4 * THREADS;  // numbers of all warps in an iteration
  template <int FOURS, bool GATED>
  __device__ __forceinline__ void fetch(const Word* words, const Word* gates, int pitch, int count) {
    constexpr int LOADS = 4 / NEIGHBOURS;  // of four
    const int groups = fours_of(count);
#pragma unroll 1
    for (int start = tid & 31; start < groups; start += FOURS * 32) {
      const Word *from[FOURS * LOADS], *from_gates[FOURS * LOADS];
      Word found[FOURS * LOADS][NEIGHBOURS], gate[FOURS * LOADS][NEIGHBOURS];
      const auto column = [&](int n) { return column_of(start + n * 32); };
#pragma unroll
      for (int n = 0; n < FOURS * LOADS; ++n) {
        const int k = min(column(n / LOADS), count - 4) + n % LOADS * NEIGHBOURS;
        from[n] = words + k, from_gates[n] = gates + k;
      }
      if (GATED) take_words(gate, from_gates, epoch);
      take_words(found, from, epoch);
      float4 x[FOURS];
      u32 largest = 0;
#pragma unroll
      for (int n = 0; n < FOURS; ++n) {
        float each[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int load = n * LOADS + i / NEIGHBOURS;
          each[i] = number(found[load][i % NEIGHBOURS]) * (GATED ? number(gate[load][i % NEIGHBOURS]) : 1.f);
        }
        x[n] = {each[0], each[1], each[2], each[3]};
        largest = largest_of(largest, x[n]);
      }
      if (DIGITS) put_unit(0, largest);
#pragma unroll
      for (int n = 0; n < FOURS; ++n)
        if (start + n * 32 < groups && column(n) < count) put_operands(pitch, 0, column(n), x[n]);
    }
    __syncwarp();  // the warp's operands are in the staging area
  }

  // Stores the warp's operands of a vector, of which `four_at` gives four numbers from the given one on.
  template <typename F> __device__ __forceinline__ void put_vector(int vector, const F& four_at) {
    const int fours = fours_of(D);
    const auto each = [&](const auto& visit) {
#pragma unroll 2
      for (int four = tid & 31; four < fours; four += 32)
        if (const int k = column_of(four); k < D) visit(k, four_at(k));
    };
    if (DIGITS) {
      u32 largest = 0;
      each([&](int, const float4& x) { largest = largest_of(largest, x); });
      put_unit(vector, largest);
    }
    each([&](int k, const float4& x) { put_operands(D, vector, k, x); });
    __syncwarp();  // the warp's operands are in the staging area
  }

  // Loads the operands of the lane's column from number k on, of the `count` numbers in the staging area; zeros after
  // these, where operands of another warp may be.
  __device__ __forceinline__ void load_x(u32 (&x)[WORDS], int vector, int pitch, int count, int k) const {
    const int g = (tid & 31) >> 2, row = PACKED > 1 ? vector * TERMS + g : vector;
    const float* from = staging + (row * pitch + k) / PACKED;
    const bool inside = k < count && g < TERMS;  // the product's other columns are not used
    if constexpr (PACKED > 1) {
      load_words_of(x, from, inside);
    } else {
      u32 all[EACH];
      load_words_of(all, from, inside);
      Split<T>::term(x, all, g % TERMS);
    }
  }
  template <int N> static __device__ __forceinline__ void load_words_of(u32 (&x)[N], const float* from, bool inside) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = inside ? load4(from + i) : float4{};
      x[i] = __float_as_uint(four.x), x[i + 1] = __float_as_uint(four.y);
      x[i + 2] = __float_as_uint(four.z), x[i + 3] = __float_as_uint(four.w);
    }
  }

  // Loads the operands for the lane's columns of N stages of weights, from number k on.
  template <int N>
  __device__ __forceinline__ void load_stages(Operands* x, int vector, int pitch, int count, int k) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        load_x(x[n][step], vector, pitch, count, k + Lane<T>::start(tid) + n * Lane<T>::STAGE + step * Lane<T>::STRIDE);
  }
};

// what      What the Hopper backward passes under scalar decays share: scores as the sum of two bfloat16
//           numbers, and the decays of tokens.
// limits    sm_90a; bfloat16
constexpr int CHUNK = 32;

#include "backward_tokens.cuh"

// Stores one as rows of queries, with f(query, key, value) for each value: as the sum of two bfloat16 numbers, the
// second 32 columns on.
template <class F>
__device__ __forceinline__ void put_pairs(bf16 (&tile)[CHUNK][64], const float (&d)[2][4], int block, int lane, F f) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = queries_of(block) + g + 8 * half, j = keys_of(block) + 8 * n + 2 * t;
      const float x = f(i, j, d[n][2 * half]), y = f(i, j + 1, d[n][2 * half + 1]);
      const u32 rounded = pack<bf16>(x, y);
      reinterpret_cast<u32*>(swizzled(tile[0], i, j / 8))[t] = rounded;
      reinterpret_cast<u32*>(swizzled(tile[0], i, j / 8 + 4))[t] = remainder_of(rounded, x, y);
    }
}

// ---- scalar decays: one gate for all channels of a token; no gate is too strong --------------------

// Of a chunk, from sums of the gates that lie between, never a difference of such sums.
struct TokenDecays {
  float start[CHUNK];               // from the chunk's start to a token, both inclusive
  float between[CHUNK][CHUNK + 8];  // [query, key]: behind the key to the query inclusive; 8 rows lie in all banks

  __device__ float all() const { return start[CHUNK - 1]; }
  __device__ const float* end() const { return between[CHUNK - 1]; }  // behind a token to the chunk's end
};

// By a warp, each lane with its token's gate.
__device__ __forceinline__ void put_decays(TokenDecays& to, float gate) {
  const int lane = threadIdx.x & 31;
  float from_start = 0.f, own = 0.f, from_key = 0.f;
  gate *= LOG2E;
#pragma unroll 8
  for (int i = 0; i < CHUNK; ++i) {
    const float next = __shfl_sync(0xffffffffu, gate, i);
    from_start += next;
    if (i == lane) own = from_start;
    if (i > lane) from_key += next;
    to.between[i][lane] = exp2_approx(from_key);
  }
  to.start[lane] = exp2_approx(own);
}

// x times factors of tokens, as the sum of two bfloat16 numbers.
__device__ __forceinline__ void decay_tokens(Operand& x, Operand& rest, const float (&by)[8]) {
  each_two([&](int at, int s, int m) {
    const float first = low(x[s][m]) * by[at / 4 * 2], second = high(x[s][m]) * by[at / 4 * 2 + 1];
    x[s][m] = pack<bf16>(first, second);
    rest[s][m] = remainder_of(x[s][m], first, second);
  });
}

// The decays between the tokens of a block of pairs, laid out as their products are; 0 for a key behind its query.
__device__ __forceinline__ void load_decays(float (&d)[2][4], const TokenDecays& decays, int block, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = queries_of(block) + g + 8 * half, j = keys_of(block) + 8 * n + 2 * t;
      const float2 two = *reinterpret_cast<const float2*>(&decays.between[i][j]);
      d[n][2 * half] = j <= i ? two.x : 0.f, d[n][2 * half + 1] = j < i ? two.y : 0.f;
    }
}

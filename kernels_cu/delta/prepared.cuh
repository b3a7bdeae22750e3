// what      What a chunk of a delta rule does to a state, in global memory: written by the kernels that prepare chunks,
//           read by those that walk over states.
// math      For a chunk, S is the state before it, V its values, D its decays. Y = E S, o = scale (W S + B V);
//           gated delta rule and KDA, E = -kd:  S <- D S + Z^T (V + Y);   rwkv7, E = ad:  S <- D S + Zb^T Y + Z^T V.
//           Backwards, C is the gradient of the state after the chunk:   C <- D C + scale W^T do + E^T P
//           gated delta rule and KDA, without beta in Z and B:  w = Z C + scale B^T do,  dv = beta w,  P = beta Z C;
//           rwkv7:  dv = Z C + scale B^T do,  du = Zb C + scale H^T do,  P = Zb C
// shapes    one for every chunk of a head of values; those of a head follow each other
#include "delta/chunk_storage.cuh"
#include "tensor.cuh"

// TWO (RWKV-7): v is written by the rows of Z[0] (Z), and Y by those of Z[1] (Zb).
template <typename T, int BK, bool TWO> struct alignas(16) Prepared {
  static constexpr int OF_STATES = (2 + TWO) * C * BK * sizeof(T) + BK * sizeof(float);  // bytes before W

  T E[C * BK], Z[1 + TWO][C * BK];  // tiles, as place<BK> lays them out
  float whole[BK];                  // D: each channel's decay over the chunk
  T W[C * BK];                      // W and B are for outputs only
  Matrix<T> B;
};

// The same for gradients. The tokens' residuals are R (V + Y), or, TWO, R Y + L V.
template <typename T, int BK, bool TWO> struct alignas(16) PreparedForGradients {
  Matrix<T> of_residual[1 + TWO];   // R, L; only the walk forwards reads them
  T E[C * BK], Z[1 + TWO][C * BK];  // from here on read by both walks
  float whole[BK], beta[C];
  T W[C * BK];           // times scale; from here on read by the walk backwards only
  Matrix<T> B[1 + TWO];  // B, H
};

template <typename T, int BK, bool TWO, bool GRADIENT> struct ImageOf {
  using Type = Prepared<T, BK, TWO>;
};
template <typename T, int BK, bool TWO> struct ImageOf<T, BK, TWO, true> {
  using Type = PreparedForGradients<T, BK, TWO>;
};

// The chunk that a block of a grid [B, H, NC] prepares.
struct ChunkOfBlock {
  u32 b, h;
  i64 index;  // among all chunks
  Span span;  // of tokens
  int rows;

  __device__ __forceinline__ ChunkOfBlock(const Shape& shape) {
    const u32 chunks = u32(shape.NC), heads = u32(shape.H), pair = blockIdx.x / chunks;
    b = pair / heads, h = pair % heads, index = blockIdx.x;
    span = chunk_tokens(shape, blockIdx.x % chunks), rows = int(span.stop - span.start);
  }
  // The row of the chunk's first token, of a head.
  template <typename T> __device__ __forceinline__ T* row(const Rows<T>& x, u32 head) const {
    return x.row(b, head, span.start);
  }
};

// Copies an array of shared memory to global memory, by all threads, 16 bytes each.
template <int THREADS, typename X, int SIZE>
__device__ __forceinline__ void store_pieces(X (&to)[SIZE], const X (&from)[SIZE]) {
  constexpr int PIECES = SIZE * sizeof(X) / 16;
  static_assert(SIZE * sizeof(X) % 16 == 0);
#pragma unroll
  for (int n = 0; n < PIECES; n += THREADS) {
    const int at = n + threadIdx.x;
    if (n + THREADS <= PIECES || at < PIECES)
      reinterpret_cast<uint4*>(to)[at] = reinterpret_cast<const uint4*>(from)[at];
  }
}

// what      What a chunk of a delta rule does to a state, in global memory: written by the kernels *prepare.cu, read by
//           the *walks*, the kernels that carry a state from chunk to chunk (scan.cu, backward_states.cu).
// math      S is the state before the chunk, v its values, D the decay of each channel over the chunk, the product of
//           its tokens' e^g. Y is what the tokens read from S:  Y = E S;  o = scale (W S + B v)
//           E, W, Z and Zb have a row [K] for each token, B, H, R and L are [32, 32] and 0 above the diagonal
//           gated delta rule and KDA: E = -kd (the keys, decayed from the chunk's start, by their own gate too);
//           S <- D S + Z^T (v + Y);  the residuals, what tokens write before beta, are u = R (v + Y)
//           RWKV-7: E = ad (the vectors a, decayed likewise, but not by their own gate);  S <- D S + Zb^T Y + Z^T v;
//           the residuals, what the vectors a read from the state of the token before, are u = R Y + L v. In o, W S has
//           H Y in it: H is what o gets of Y
//           Backwards, dS is the gradient of the state after the chunk, and P the part of the gradient of Y that comes
//           from dS:  dS <- D dS + scale W^T do + E^T P
//           gated delta rule and KDA, with Z' and B' for Z and B without beta (Z = beta Z', B = B' beta):
//           w = Z' dS + scale B'^T do, the gradient of beta u;  dv = beta w;  P = beta Z' dS
//           RWKV-7: dv = Z dS + scale B^T do;  du = Zb dS + scale H^T do, the gradient of u, and so of Y;  P = Zb dS.
//           The gradients of u and of beta u are whole: u also acts by way of the chunk's later tokens
// shapes    one of these structs for every chunk of a head of values; those of a head follow each other
#include "delta/chunk_storage.cuh"
#include "tensor.cuh"

// From the includes:
//   shape.H: heads of values (not the matrix H); shape.NC: chunks of a batch row
//   BT = 32 tokens; LowerMatrix: a lower triangle [32, 32], each number the sum of two for 16-bit data
//   place<BK>(tile, i, c): the address of channel c of token i in a tile

// TWO_WRITES (RWKV-7): v is written along the rows of Z[0] (Z), and Y along those of Z[1] (Zb).
template <typename T, int BK, bool TWO_WRITES> struct alignas(16) Prepared {
  T E[BT * BK], Z[1 + TWO_WRITES][BT * BK];  // tiles, as place<BK> lays them out
  float decay[BK];                           // D
  T W[BT * BK];                              // without scale. A walk without outputs reads what is before W
  LowerMatrix<T> B;
};

// The same for gradients, in the order in which the walks forwards and backwards read: each reads one range of bytes,
// which Stage (backward_states.cu; of Prepared: scan.cu) finds by OFFSET_OF: members must stay in their range.
// W is stored times scale, B and H are not: walks multiply what these give. Without TWO_WRITES Z and B are Z' and B'.
template <typename T, int BK, bool TWO_WRITES> struct alignas(16) PreparedForGradients {
  LowerMatrix<T> residual_matrix[1 + TWO_WRITES];  // R, and L: read by the walk forwards only
  T E[BT * BK], Z[1 + TWO_WRITES][BT * BK];        // read by both walks, as decay and beta are
  float decay[BK], beta[BT];                       // beta: with TWO_WRITES ones, copied but not used
  T W[BT * BK];                      // W and B: read by the walk backwards, and by a walk forwards that writes o
  LowerMatrix<T> B[1 + TWO_WRITES];  // B, H
};

// TWO_WRITES: a token's write to the state, b (a^T S), is apart from k v^T. GRADIENT: for gradients.
constexpr bool WRITES_ONCE = false, WRITES_TWICE = true;
template <typename T, int BK, bool TWO_WRITES, bool GRADIENT> struct PreparedFor {
  using Type = Prepared<T, BK, TWO_WRITES>;
};
template <typename T, int BK, bool TWO_WRITES> struct PreparedFor<T, BK, TWO_WRITES, true> {
  using Type = PreparedForGradients<T, BK, TWO_WRITES>;
};

// The chunk that block blockIdx.x of a grid [batch rows, heads of values, chunks of a row] prepares: of row b, head h.
struct ChunkOfBlock {
  u32 b, h;
  i64 index;  // the block's number: the chunk's among the chunks of all heads
  Span span;  // the chunk's tokens, in batch row b
  int rows;   // how many tokens: at most 32

  __device__ __forceinline__ ChunkOfBlock(const Shape& shape) {
    const u32 chunks = u32(shape.NC), heads = u32(shape.H), pair = blockIdx.x / chunks;
    b = pair / heads, h = pair % heads, index = blockIdx.x;
    span = chunk_tokens(shape, blockIdx.x % chunks), rows = int(span.stop - span.start);
  }
  // The row of the chunk's first token in x.
  template <typename T> __device__ __forceinline__ T* row(const StridedRows<T>& x, u32 head) const {
    return x.row(b, head, span.start);
  }
};

// Copies an array from shared memory to global memory, by all THREADS threads of a block, 16 bytes at a time. Both are
// aligned to 16 bytes.
template <int THREADS, typename X, int SIZE>
__device__ __forceinline__ void store_pieces(X (&to)[SIZE], const X (&from)[SIZE]) {
  constexpr int PIECES = SIZE * sizeof(X) / 16;
  static_assert(SIZE * sizeof(X) % 16 == 0);
#pragma unroll
  for (int n = 0; n < PIECES; n += THREADS) {
    const int piece = n + threadIdx.x;
    if (n + THREADS <= PIECES || piece < PIECES)
      reinterpret_cast<uint4*>(to)[piece] = reinterpret_cast<const uint4*>(from)[piece];
  }
}

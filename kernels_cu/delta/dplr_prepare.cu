// what      RWKV-7's recurrence, a delta rule that erases by vectors a and b of its own: prepares each chunk of 32
//           tokens, that is, computes what the chunk does to a state, for the kernels that walk over states. GRADIENT:
//           for those that walk in both directions.
// math      A token's decay is e^g of its log gates g [K]. Decayed tokens: ad_i is a_i decayed from the chunk's start
//           through token i - 1, qd_i is q_i decayed from the start through i; ke, be are k and b decayed to the
//           chunk's end. Scores: Axy_ij = x_i . y_j times the decay between both tokens, x = q or a, y = k or b; of q
//           with its own gate, j <= i; of a without it, j < i.
//           N = (I - Aab)^-1, L = N Aak, H = Aqb N, B = Aqk + Aqb L;   E = ad, W = w_scale (qd + H ad), Zb = N^T be,
//           Zk = ke + L^T be
//           What these do to a state: prepared.cuh, where Zk is Z.
//           Each token x is stored as x' = x / p_x, p_x a power of 2. Primed matrices are those of primed tokens:
//           with P = diag(p_a p_b), N' = (I - P Aab')^-1 and L' = N' P Aak':   H = diag(p_q) Aqb' N' diag(p_b),
//           B = diag(p_q) (Aqk' + Aqb' L') diag(p_k), Zb = diag(p_b) N'^T be', Zk = diag(p_k) (ke' + L'^T be'),
//           N = diag(1 / p_b) N' diag(p_b), L = diag(1 / p_b) L' diag(p_k)
// shapes    q k a b g [B, H, T, K], prepared [B, H, NC], NC the chunks of a batch row. A thread decays 4 channels of a
//           block of 4 tokens (BlockTask). Of 8 x 8 numbers of a product a lane has row lane / 4, columns 2 (lane % 4)
//           and the next
// grid      a block for every (batch, head, chunk), chunks fastest
// smem      DplrChunk: a chunk's inputs, its matrices. In the code q and a are "rows", k and b "columns", after their
//           place in Axy
// barriers  eight of the block: inputs have arrived | decays of blocks (all threads also agree whether a gate grows) |
//           decayed rows and k | scores with k | decayed b | scores with b | N', L' and qd | H and B. Each: these are
//           in shared memory, and their operands have been read and may be overwritten. One of two warps: weights. One
//           more in prepare_by_tokens, in place of those from the third on
// numerics  scores, N' and L' in float32. Of 16-bit data they are the sum of two float16 as operands, and H and B of
//           two T; E, W, Z in T. Decays: channel_chunk.cuh; chunks that grow: growing_chunk.cuh
// source    Peng et al., 2025 (2503.14456), eq. 17; Yang et al., 2024 (2406.06484), section 3
// limits    T of bfloat16, float16, single; K <= BK; BK of 64, 128
#include "delta/dplr_chunk.cuh"

// From the includes:
//   Rows x: a strided array
//   DplrChunk: the block's shared memory; prepare_dplr_chunk: stores what a chunk does to a state. ChunkOfBlock: the
//     block's chunk
//   blocks_with_room: at most so many blocks a multiprocessor, fewer if shared memory has room for fewer

template <typename T, typename G> struct Args {
  Rows<const T> q, k, a, b;
  Rows<const G> g;
  void* prepared;  // Prepared, or PreparedForGradients, of each chunk
  Shape shape;
  double w_scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows start on multiples of it, and are multiples long
};

// Launch bounds: blocks have 2 BK threads, so that registers are for 512 threads of a multiprocessor (128 a thread),
// and for fewer blocks if shared memory has room for fewer.
template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<DplrChunk<T, G, BK>>(256 / BK))
    delta_dplr_prepare(const Args<T, G> args) {
  auto& s = *reinterpret_cast<DplrChunk<T, G, BK>*>(dynamic_smem());
  prepare_dplr_chunk<GRADIENT, BK>(s, args, ChunkOfBlock(args.shape));
}

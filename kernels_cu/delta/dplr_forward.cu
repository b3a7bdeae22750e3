// what      RWKV-7's recurrence forward in one launch, for few heads: some blocks prepare chunks of 32 tokens, as
//           dplr_prepare.cu does, while the others walk over the chunks that are prepared, as scan.cu does.
// math      dplr_prepare.cu and scan.cu
// shapes    q k a b g [B, H, T, K], v o [B, H, T, V], prepared and ready [B, H, NC], initial and final state
//           [N, H, K, V] float32. ready: 0 before the launch; a chunk's becomes 1 when the chunk is prepared
// grid      `walks` blocks, one for every (sequence, head, BK columns); then one for every (chunk, batch, head), heads
//           fastest: a chunk of every head, then the next of every head. Or in two launches, the latter blocks first
// smem      DplrChunk, or a ring of STAGES: a prepared chunk, and its v
// barriers  dplr_prepare.cu's and scan.cu's; one: all threads have stored the chunk, and one of them may say so.
//           Walking blocks wait for blocks that prepare, which wait for none (WAITING.md)
// numerics  dplr_prepare.cu and scan.cu
// source    Peng et al., 2025 (2503.14456), eq. 17; Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK = 64; sequences are not cut into segments
#include "delta/dplr_chunk.cuh"
#include "delta/forward_walk.cuh"
#include "words.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, a, b, v;
  Rows<const G> g;
  Rows<T> o;
  Rows<const float> initial;  // null: zeros
  Rows<float> final;          // null: not wanted
  float *starts, *F;          // null: no sequence is cut
  void* prepared;             // Prepared of each chunk
  u32* ready;
  Shape shape;
  i64 P;  // 1
  double scale, w_scale;
  i64 walks;
  i64 bytes;  // 16, 8, 4 or 2: all rows start on multiples of it, and are multiples long
};

template <typename T, typename G, int BK, int STAGES> union Shared {
  DplrChunk<T, G, BK> chunk;
  Stage<T, BK, BK, true> stages[STAGES];
};

template <typename T, typename G, int BK, int STAGES>
__global__ void __launch_bounds__(2 * BK, 256 / BK) delta_dplr_forward(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G, BK, STAGES>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 walks = u32(args.walks), chunks = u32(shape.NC);
  if (blockIdx.x < walks) {
    int known = 0;  // so many first chunks of the batch row are prepared, as the warp knows
    walk_forwards<true>(s.stages, args, blockIdx.x, [&](u32 row, int chunk) {
      while (known <= chunk) known += raised_flags(args.ready + i64(row) * chunks + known, int(chunks) - known);
    });
  } else {
    const u32 number = blockIdx.x - walks, rows = u32(shape.B * shape.H);
    const ChunkOfBlock chunk(shape, number % rows * chunks + number / rows);
    prepare_dplr_chunk<false, BK>(s.chunk, args, chunk);
    __syncthreads();  // all threads have stored the chunk
    if (threadIdx.x == 0) raise_flag(args.ready + chunk.index);
  }
}

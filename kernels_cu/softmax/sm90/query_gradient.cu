// what      Softmax attention's gradient of q on Hopper, from the gradients of scores that backward_keys.cu stores: one
//           thread copies, two warpgroups multiply.
// math      dq_i = scale sum_j ds_ij k_j, ds_ij = p_ij (do_i . v_j - delta_i), with a cap times 1 - (s_ij / cap)^2, as
//           backward_keys.cu stores it. A query sees the keys from `left` tokens before its own position to `right`
//           tokens after it
// shapes    dq [B, H, Tq, K], k [B, H / group, Tk, K]; ds: see DsEntry (softmax_sm90.cuh)
// grid      softmax.py launches as many blocks as multiprocessors; a block computes the query tiles (Work in
//           softmax_work.cuh) of its column of `works`, in turn. A warpgroup has two blocks of 64 queries
// smem      Shared: a ring of tiles of k and ds of 64 keys; a tile of dq
// barriers  work_full: a query tile's Work has been written; work_empty: it has been read; full: k and ds have arrived;
//           empty: they have been read. Named: ZERO_ROWS_BARRIER in zero_rows: zeros are written
// numerics  sums in float32
// source    Dao et al., "FlashAttention", 2022, algorithm 4, line 21
// limits    sm_90a; 16-bit data; rows of whole 16 bytes; K <= D; D of 64, 128
// tests     test_softmax_attention; test_compile (no spills)
#include "softmax_sm90.cuh"

// From the includes:
//   zero_rows: zeros in rows of other sequences; all warpgroups write the same, and each waits for its own threads only
//   Work: a tile of queries. `other_...`: the sequence of keys; `first_tile`, `tiles`: its tiles that the queries see,
//     0 at the end of the list; `diagonal`: the position of the first query among the keys; `statistics_chunk`: the
//     tile's first chunk of ds; `ds_index`: the sequence's first key tile of 128 in ds_offsets
//   prefetch_work, take_prefetched_work: copy the block's next Work ahead, and take it; start_tile_copy: copies a tile
//   consume_and_produce: gives warpgroups their roles and registers; store_rows: stores a warp's 16 rows of dq
//   RingPosition: a place in the ring of stages; release(barrier): this warp arrives; init_stages<WARPS>: barriers that
//     a producer and WARPS warps arrive at. warp_uniform(x): x, which all lanes of the warp have
//   order_reads_before_copies: orders a warp's reads before the copies that a later arrival at a barrier allows
//   issue_weighted_sum: starts dq[n] += ds[n] @ tile; wait_for<0>(sums): waits until all products have ended
//   Tile: panels of PANEL = 64 columns, swizzled; CHUNK_QUERIES = 64

constexpr int QUERIES = 256, KEYS = 64, BOX_TOKENS = 64, BLOCKS = QUERIES / CHUNK_QUERIES;
static_assert(sizeof(DsEntry) == 2 * sizeof(ScoreGradients), "an entry is of two tiles of KEYS keys");
constexpr int WARPGROUPS = 2, THREADS = 128 * (WARPGROUPS + 1);  // of consumers; with the producer's warpgroup

template <typename T> struct Args {
  TensorMap k, dq;     // boxes of 64 columns and 64 tokens; of dq 16 tokens
  StridedRows<T> out;  // dq again, for a warp's 16 rows that are not all tokens of the tile
  const Work* works;   // [rounds, gridDim.x]
  const DsEntry* ds;
  const i32* ds_offsets;         // of each key tile of 128 keys
  i64 H, group, K, left, right;  // H: heads of queries
  i64 ds_head, ds_entries;       // the head of queries, of B H, that ds begins with; a head's number of entries
  double scale;
};

template <typename T, int D> struct alignas(1024) Shared {
  static_assert(D == 64 || D == 128);
  static constexpr int STAGES = D == 64 ? 4 : 3;
  Tile<T, D, KEYS> k[STAGES];
  ScoreGradients ds[STAGES][BLOCKS];
  Tile<T, D, QUERIES> dq;
  Work works[2], prefetched;
  MBarrier work_full[2], work_empty[2], full[STAGES], empty[STAGES];
};

// Whether one of a block's 64 queries sees one of the 64 keys of a key tile.
__device__ __forceinline__ bool sees_keys(const Work& work, int block, int tile, int left, int right) {
  const int queries = min(work.tokens - block * CHUNK_QUERIES, CHUNK_QUERIES),
            diagonal = work.diagonal + block * CHUNK_QUERIES;
  const int from = max(diagonal - left, 0), end = min(diagonal + queries + right, work.other_length);
  return queries > 0 && from < (tile + 1) * KEYS && tile * KEYS < end;
}

// The producing thread: copies the tiles of all of the block's work.
template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using Memory = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  prefetch_work(s.prefetched, next);
  prefetch_tensor_map(args.k), prefetch_tensor_map(args.dq);
  RingPosition<Memory::STAGES> k;
  RingPosition<2> works;
  while (true) {
    const Work work = take_prefetched_work(s.prefetched, next);
    mbarrier_wait(s.work_empty[works.stage], works.parity ^ 1);
    s.works[works.stage] = work;
    mbarrier_arrive(s.work_full[works.stage]);
    if (!work.tiles) return;
    works.next();
    const int key_head = int(u32(work.head) / u32(args.group));
    const i64 head = i64(work.batch) * args.H + work.head - args.ds_head;
    const DsEntry* const ds = args.ds + head * args.ds_entries + work.statistics_chunk;
#pragma unroll 1
    for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
      u32 bits = 0, blocks = 0;  // bit n: block n sees a key; blocks: how many do
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const bool any = sees_keys(work, block, tile, int(args.left), int(args.right));
        bits |= u32(any) << block, blocks += any;
      }
      // A sequence without keys has no offset: its dq, which is 0, is written, too.
      const int offset = bits ? args.ds_offsets[work.ds_index + tile / 2] : 0;
      mbarrier_wait(s.empty[k.stage], k.parity ^ 1);
      mbarrier_arrive_and_expect(s.full[k.stage], sizeof s.k[0] + blocks * sizeof(ScoreGradients));
      start_tile_copy<BOX_TOKENS>(s.k[k.stage], args.k, s.full[k.stage], work.other_start + tile * KEYS, key_head,
                                  work.batch);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
        if (bits >> block & 1)
          copy_bulk_evict_first(&s.ds[k.stage][block], &ds[offset + block][tile % 2], sizeof(ScoreGradients),
                                s.full[k.stage]);
      k.next();
    }
  }
}

// A consuming warpgroup: two of the four blocks of each of the block's query tiles.
template <typename T, int D> __device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using Memory = Shared<T, D>;
  const int warpgroup = warp_uniform(threadIdx.x / 128), lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  RingPosition<Memory::STAGES> k;
  RingPosition<2> works;
  static_assert(BLOCKS == 2 * WARPGROUPS, "a warpgroup has two blocks");
  float dq[2][D / 2];
  u32 ds[2][KEYS / 16][4];  // of the warpgroup's two blocks, queries as rows

  // Loads ds of the warp's 16 queries of the warpgroup's block n, as operands A of wgmma with queries as rows. In
  // memory keys are rows: transpose_pairs transposes each matrix of 8 x 8, and the middle two of four change places.
  auto load_ds = [&](int n) {
#pragma unroll
    for (int key = 0; key < KEYS / 16; ++key) {
      const uint4 x = s.ds[k.stage][2 * warpgroup + n].of_warp[key][warp][lane];
      ds[n][key][0] = transpose_pairs(x.x), ds[n][key][1] = transpose_pairs(x.z);
      ds[n][key][2] = transpose_pairs(x.y), ds[n][key][3] = transpose_pairs(x.w);
    }
  };

  while (true) {
    mbarrier_wait(s.work_full[works.stage], works.parity);
    const Work& work = s.works[works.stage];
    const int tiles = warp_uniform(work.tiles), first = warp_uniform(work.first_tile),
              length = warp_uniform(work.other_length);
    if (!tiles) break;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dq[n][i] = 0.f;
#pragma unroll 1
    for (int tile = first; tile < first + tiles; ++tile) {
      bool any[2];  // whether each block sees a key; if not, nothing is added: 0 times a key of NaN is NaN
#pragma unroll
      for (int n = 0; n < 2; ++n)
        any[n] = warp_uniform(sees_keys(work, 2 * warpgroup + n, tile, int(args.left), int(args.right)));
      mbarrier_wait(s.full[k.stage], k.parity);
      if (length - tile * KEYS < KEYS) zero_rows(s.k[k.stage], length - tile * KEYS, warpgroup);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (any[n]) load_ds(n), issue_weighted_sum(dq[n], ds[n], s.k[k.stage], ACCUMULATE);
      order_reads_before_copies();  // for ds, which plain loads read; only wgmma reads k
      wait_for<0>(dq[0], dq[1]);
      release(s.empty[k.stage]);
      k.next();
    }
    const float scale = float(args.scale);
    if (lane == 0) tensor_store_wait();  // the copy engine has read this warp's dq of the previous tile
    __syncwarp();                        // all lanes may overwrite it
#pragma unroll
    for (int n = 0; n < 2; ++n)
      store_rows(args.dq, args.out, args.K, dq[n], scale, scale, s.dq, (2 * warpgroup + n) * CHUNK_QUERIES, work);
    __syncwarp();  // this warp has read the work; no fence, since the producer writes it by plain stores
    release(s.work_empty[works.stage]);
    works.next();
  }
  if (lane == 0) tensor_store_wait();
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS, 1) softmax_sm90_query_gradient(const __grid_constant__ Args<T> args) {
  using Memory = Shared<T, D>;
  Memory& s = *reinterpret_cast<Memory*>(dynamic_smem());
  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * WARPGROUPS;  // that consume
    init_stages<WARPS>(s.work_full, s.work_empty);
    init_stages<WARPS>(s.full, s.empty);
  }
  consume_and_produce<WARPGROUPS>([&] { consume<T, D>(s, args); }, [&] { produce(s, args); });
}

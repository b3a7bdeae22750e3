// what      The warps of a decoding step in one launch that copy weights, for the phases of RWKV-6 or RWKV-7: the
//           including kernel includes its version's decode_phases.cuh first. Weights come as tiles of 16 rows, and of
//           each tile as stages: as many neighbouring columns as PIECE bytes of a row hold.
// smem      Shared: the ring of stages of weights, and what a phase needs
// barriers  mbarriers. full: a stage's weights have been copied; empty: all lanes have read them; summed, taken: see
//           decode_layers.cuh
//
// The copying warps go through the weights of all phases, as far ahead as there are free stages: so weights are copied
// while the other warps wait for other blocks. At most FLIGHT stages are being copied at a time, since other reads of
// memory wait for them.

// From the includes:
//   THREADS = 256 threads compute, WARPS = 8 warps; ROWS = 16: of a tile; PIECE: bytes of a row in a stage
//   Lane<T>::STAGE: columns of a stage; tiles_of: tiles of so many rows; Tiles: a block's share of tiles; TileRows: the
//     weights and scales of a tile; PlaceOfTile: matrices of all layers, and a tile's number there
//   PHASES: of a layer; OUTPUT, FFN_VALUE, HEAD: some of them; own_place_of: where the tiles of other phases are

constexpr int COPIERS = 3;                                // warps that copy weights
constexpr int FLIGHT = 3;                                 // stages that are being copied at a time
constexpr int ALL_THREADS = THREADS + 32 * COPIERS + 32;  // those that compute, that copy, and the finishing warp

template <int STAGES> struct Shared {
  static_assert(FLIGHT <= STAGES);
  // Even rows first, then odd rows: so reads of neighbouring rows have no bank conflicts.
  unsigned char ring[STAGES][2][ROWS / 2 * PIECE + 64];
  static_assert(ROWS % 2 == 0 && sizeof(ring[0][0]) % 16 == 0);  // bulk copies begin at multiples of 16 bytes
  MBarrier full[STAGES], empty[STAGES];
  Tiles tiles[PHASES + 1];           // of each phase
  float units[2][WARPS];             // int8: of two vectors, the unit of each warp's digits
  MBarrier summed[2], taken[2];      // a tile's sums are in `tile_sums`; the finishing warp has read them
  float sum[WARPS], squares[WARPS];  // each warp's sum of a norm's numbers, and of squares around their mean
  // The warps' sums of a tile [place][term of a number][row][warp]; RWKV-6's mixes use the same memory.
  float tile_sums[2][4][ROWS][WARPS + 4];

  __device__ __forceinline__ unsigned char* row(int stage, int row) { return ring[stage][row % 2] + row / 2 * PIECE; }
};

// Columns of a phase's matrices (K): F of the channel mix's value, else D.
template <typename T, typename S> __device__ __forceinline__ int depth_of(const Args<T, S>& args, int phase) {
  return int(phase == FFN_VALUE ? args.F : args.D);
}
// The 16 rows of a tile of a phase, and their scales.
template <typename T, typename S>
__device__ __forceinline__ TileRows<T> rows_of(const Args<T, S>& args, i64 layer, int phase, int tile) {
  const i64 row = layer * tiles_of(args.D) + tile;
  PlaceOfTile<T> place;
  if (phase == OUTPUT) place = {{args.output, args.output_scales}, row};
  else if (phase == FFN_VALUE) place = {{args.ffn_value, args.ffn_value_scales}, row};
  else if (phase == HEAD) place = {{args.head, args.head_scales}, tile};
  else place = own_place_of(args, layer, phase, tile);
  const i64 first = place.tile * ROWS;
  return {place.of.weights + first * depth_of(args, phase), place.of.scales + first};
}

// The loop of the warps that copy weights. Each has some of a stage's 16 rows, a lane a row; zeros from column K on.
template <typename T, typename S, int STAGES>
__device__ __forceinline__ void copy_weights(const Args<T, S>& args, Shared<STAGES>& s) {
  const int lane = threadIdx.x & 31, copier = int(threadIdx.x - THREADS) >> 5;
  const int first = ROWS * copier / COPIERS, count = ROWS * (copier + 1) / COPIERS - first;  // this warp's rows
  int stage = 0, latest = STAGES - FLIGHT;  // the copy of `latest` must be complete before that of `stage` starts
  u32 parity = 1;
#pragma unroll 1
  for (int n = int(args.first); n < int(args.last); ++n) {
    const int layer = n / PHASES, phase = layer == args.L ? int(HEAD) : n % PHASES, K = depth_of(args, phase);
    const Tiles tiles = s.tiles[phase];
    if (n == args.first + 1) wait_for_previous();  // which may write states and slots
    if (n > args.first && copier == 0) prefetch_inputs(args, layer, phase);
#pragma unroll 1
    for (int t = 0; t < tiles.count(); ++t) {
      const TileRows<T> tile = rows_of(args, layer, phase, tiles[t]);
      const T* rows = tile.weights + i64(first) * K;
      if (sizeof(T) == 1 && threadIdx.x == THREADS) prefetch_l2(tile.scales, ROWS * sizeof(float));
#pragma unroll 1
      for (int k = 0; k < K; k += Lane<T>::STAGE) {
        mbarrier_wait(s.empty[stage], parity);                     // all lanes have read what the stage had
        mbarrier_wait(s.full[latest], parity ^ (latest < stage));  // the stage FLIGHT before this one has been copied
        if (lane < count) {
          const int bytes = min(PIECE, (K - k) * int(sizeof(T)));
          unsigned char* to = s.row(stage, first + lane);
          for (int at = bytes; at < PIECE; at += 16) *reinterpret_cast<uint4*>(to + at) = {0, 0, 0, 0};
          if (bytes < PIECE) fence_proxy_async();  // orders these plain stores before a later copy to their place
          mbarrier_arrive_and_expect(s.full[stage], bytes);
          copy_bulk_evict_first(to, rows + i64(lane) * K + k, bytes, s.full[stage]);
        }
        __syncwarp();  // lanes that copied and lanes that did not go on together; no data depend on it
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++latest == STAGES) latest = 0;
      }
    }
  }
}

// what      The phases of a decoding step in decode_few.cu: which weights each of them multiplies by, how their rows
//           are distributed over blocks, and the warps that copy weights to shared memory.
// smem      Shared: the ring of stages of weights, and what a phase needs
// barriers  mbarriers. full: a stage's weights have been copied; empty: all lanes have read them; summed, taken: see
//           decode_few.cu
//
// The copying warps go through the weights of all phases, as far ahead as there are free stages: so weights are copied
// while the other warps wait for other blocks. At most FLIGHT stages are being copied at a time, since other reads of
// memory wait for them.
#include "rwkv6/time_mix.cuh"

constexpr int ROWS = 16;
constexpr int STEPS = 2;                                    // of a stage, along K
constexpr int PIECE = STEPS * THREADS / 8 * 16;             // bytes of a row in a stage
constexpr int CHANNELS = 128, SPLITS = THREADS / CHANNELS;  // of a unit of the mix

enum Phase : int { MIX_DOWN, MIX, INPUTS, TIME_MIX, OUTPUT, FFN_INPUTS, FFN_VALUE, PHASES, HEAD = PHASES };

// The type of the words by which blocks exchange results, for weights of type T.
template <typename T> struct WordOf {
  typedef u32 Type;
};
template <> struct WordOf<float> {
  typedef u64 Type;
};
template <typename T> using Handed = typename WordOf<T>::Type;

// S is the type of the recurrent state.
template <typename T, typename S> struct Args {
  typedef typename MultipliedAs<T>::Type Up;
  const T *maa_down, *decay_down, *kvrg, *output, *ffn_key, *ffn_receptance, *ffn_value, *head;
  // int8: a scale for each row; otherwise null.
  const float *maa_down_scales, *decay_down_scales, *kvrg_scales, *output_scales, *ffn_key_scales,
      *ffn_receptance_scales, *ffn_value_scales, *head_scales;
  const Up *maa_up, *decay_up;
  const float *ln1, *ln2, *ln_x, *ln_out, *maa_x, *maa, *ffn_maa, *decay, *bonus;
  float *att_shift, *ffn_shift;
  S* wkv;
  const i64* slots;  // the sequence's row of the states; null: 0
  Handed<T>*xx, *low, *mixed, *kvrg_out, *decay_low, *y, *activated, *gate;
  float *x, *logits;
  u32* arrived;
  i64 L, P, D, H, N, A, W, F, V;
  i64 staged;       // numbers of an input in the staging area at a time
  i64 first, last;  // phases to compute, counted over all layers
  double eps, group_eps;
  i64* tokens;     // the likeliest token, the lowest of equal ones; null: not wanted
  u64* likeliest;  // of each block, and how many blocks have stored theirs
  u32* brought;
};

// A block's share of a phase's tiles of 16 rows: tiles first ... stop - 1, then later ... last - 1, whose results are
// needed later.
struct Tiles {
  int first, stop, later, last;

  __device__ __forceinline__ int count() const { return stop - first + last - later; }
  __device__ __forceinline__ int operator[](int n) const {
    return n < stop - first ? first + n : n - stop + first + later;
  }
  // The same tiles of a matrix whose first tile has number `begin`; and these tiles, then `more`.
  __device__ __forceinline__ Tiles from(int begin) const { return {first + begin, stop + begin, 0, 0}; }
  __device__ __forceinline__ Tiles then(const Tiles& more) const { return {first, stop, more.first, more.stop}; }
};

constexpr int COPIERS = 3;  // warps that copy weights
constexpr int FLIGHT = 3;   // stages that are being copied at a time

template <int STAGES> struct Shared {
  // Even rows first, then odd rows: so reads of neighbouring rows have no bank conflicts.
  unsigned char ring[STAGES][2][ROWS / 2 * PIECE + 64];
  Barrier full[STAGES], empty[STAGES];
  Tiles tiles[PHASES + 1];               // of each phase
  float units[2][WARPS];                 // int8: of two vectors, the unit of each warp's digits
  Barrier summed[2], taken[2];           // a tile's sums are in `parts`; the finishing warp has read them
  float sum[WARPS], squares[WARPS];      // the warps' parts of norms
  union {                                // phases use these in turn
    float parts[2][4][ROWS][WARPS + 4];  // the warps' sums of a tile [place][part of a number][row][warp]
    float mix[SPLITS][CHANNELS];         // parts of the mix's second product
  };

  __device__ __forceinline__ unsigned char* row(int stage, int row) { return ring[stage][row % 2] + row / 2 * PIECE; }
};

__device__ __forceinline__ int tiles_of(i64 rows) { return int(rows + ROWS - 1) / ROWS; }

// Equal shares of tiles, up to one tile, which the first blocks have more, or the last ones.
__device__ __forceinline__ Tiles share_to_first(int tiles, u32 block, u32 blocks) {
  const int each = tiles / int(blocks), more = tiles % int(blocks), first = int(block) * each + min(int(block), more);
  return {first, first + each + (int(block) < more), 0, 0};
}
__device__ __forceinline__ Tiles share_to_last(int tiles, u32 block, u32 blocks) {
  const Tiles mirrored = share_to_first(tiles, blocks - 1 - block, blocks);
  return {tiles - mirrored.stop, tiles - mirrored.first, 0, 0};
}

// The block's share of a phase's tiles. All blocks have about as many tiles of a layer. Blocks that compute a head's
// time mix have no tiles of the gate; the tiles of MIX_DOWN start at a block that has no unit of the mix after it.
template <typename T, typename S> __device__ __forceinline__ Tiles share_of(const Args<T, S>& args, int phase) {
  const u32 block = blockIdx.x, blocks = gridDim.x;
  const int D = tiles_of(args.D), F = tiles_of(args.F);
  const u32 with_keys = min(blocks, u32(F));
  switch (phase) {
    case MIX_DOWN:
      return share_to_first(tiles_of(5 * args.A), (block + blocks / 3) % blocks, blocks);
    case INPUTS: {
      const int wanted = tiles_of(args.W) + 3 * D;  // all but the gate, which is needed after the time mix only
      const u32 heads = args.H < blocks / 2 ? u32(args.H) : 0;  // blocks that have a time mix, and no gate
      const Tiles gates = block < heads ? Tiles{} : share_to_last(D, block - heads, blocks - heads);
      return share_to_first(wanted, block, blocks).then(gates.from(wanted));
    }
    case OUTPUT:
    case FFN_VALUE:
      return block < with_keys ? share_to_first(D, block, with_keys) : Tiles{};
    case FFN_INPUTS:
      // A block has the gate of the rows whose `value` it computes. Every block here has keys: a block that has all
      // keys knows that all blocks have read the shift.
      if (block >= with_keys) return {};
      return share_to_first(F, block, with_keys).then(share_to_first(D, block, with_keys).from(F));
    case HEAD:
      return share_to_first(tiles_of(args.V), block, blocks);
  }
  return {};
}

template <typename T, typename S> __device__ __forceinline__ int depth_of(const Args<T, S>& args, int phase) {
  return int(phase == FFN_VALUE ? args.F : args.D);
}

// A tile's first row of weights, and the scales of its rows (int8).
template <typename T> struct TileRows {
  const T* weights;
  const float* scales;
};

template <typename T, typename S>
__device__ __forceinline__ TileRows<T> rows_of(const Args<T, S>& args, i64 layer, int phase, int tile) {
  const int D = tiles_of(args.D), F = tiles_of(args.F), W = tiles_of(args.W);
  TileRows<T> rows = {args.head, args.head_scales};
  i64 row = tile;
  switch (phase) {
    case MIX_DOWN:
      rows = {args.maa_down, args.maa_down_scales}, row += layer * tiles_of(5 * args.A);
      break;
    case INPUTS:
      if (tile < W) rows = {args.decay_down, args.decay_down_scales}, row += layer * W;
      else rows = {args.kvrg, args.kvrg_scales}, row += layer * 4 * D - W;
      break;
    case OUTPUT:
      rows = {args.output, args.output_scales}, row += layer * D;
      break;
    case FFN_INPUTS:
      if (tile < F) rows = {args.ffn_key, args.ffn_key_scales}, row += layer * F;
      else rows = {args.ffn_receptance, args.ffn_receptance_scales}, row += layer * D - F;
      break;
    case FFN_VALUE:
      rows = {args.ffn_value, args.ffn_value_scales}, row += layer * D;
      break;
  }
  return {rows.weights + row * ROWS * depth_of(args, phase), rows.scales + row * ROWS};
}

// A lane's weights: EACH neighbours, 16 bytes of a row, at a time. Four lanes have a warp's STEP columns of a row.
template <typename T> struct Lane {
  static constexpr int EACH = 16 / sizeof(T), STEP = 4 * EACH, STRIDE = WARPS * STEP, STAGE = STEPS * STRIDE;

  static __device__ __forceinline__ int start(int thread) { return (thread >> 5) * STEP + (thread & 3) * EACH; }
};

// Starts copying to L2 what a phase reads beside its tiles.
template <typename T, typename S>
__device__ __forceinline__ void prefetch_inputs(const Args<T, S>& args, i64 layer, int phase) {
  const int lane = threadIdx.x & 31, row = int(args.D * 4);
  const i64 at = layer * args.D, N = args.N, state = layer * args.P + (args.slots ? args.slots[0] : 0);
  if (blockIdx.x == 0) {
    if (phase == MIX_DOWN || phase == FFN_INPUTS) {
      const bool ffn = phase == FFN_INPUTS;
      if (lane == 0) prefetch_l2((ffn ? args.ln2 : args.ln1) + 2 * at, 2 * row);
      if (lane == 1) prefetch_l2(ffn ? args.ffn_maa + 2 * at : args.maa_x + at, ffn ? 2 * row : row);
      if (lane == 2) prefetch_l2((ffn ? args.ffn_shift : args.att_shift) + state * args.D, row);
    } else if (phase == TIME_MIX) {
      if (lane == 0) prefetch_l2(args.ln_x + 2 * at, 2 * row);
      if (lane == 1) prefetch_l2(args.decay + at, row);
      if (lane == 2) prefetch_l2(args.bonus + at, row);
    } else if (phase == MIX) {
      if (lane == 0) prefetch_l2(args.maa + 5 * at, 5 * row);
    } else if (phase == HEAD) {
      if (lane == 0) prefetch_l2(args.ln_out, 2 * row);
    }
  }
  if (phase == MIX) {
    const int across = int(args.D + CHANNELS - 1) / CHANNELS;
    for (int unit = blockIdx.x; unit < 5 * across; unit += gridDim.x) {
      const i64 first = unit % across * CHANNELS, width = min(i64(CHANNELS), args.D - first);
#pragma unroll 1
      for (i64 a = lane; a < args.A; a += 32)
        prefetch_l2(args.maa_up + ((layer * 5 + unit / across) * args.A + a) * args.D + first,
                    u32(width * sizeof(*args.maa_up)));
    }
  } else if (phase == TIME_MIX) {
    for (i64 h = blockIdx.x; h < args.H; h += gridDim.x) {
#pragma unroll 1
      for (i64 n = lane; n < N / 4; n += 32)
        prefetch_l2(args.wkv + ((state * args.H + h) * N + 4 * n) * N, u32(4 * sizeof(S) * N));
      if (N % 8 == 0)
#pragma unroll 1
        for (i64 w = lane; w < args.W; w += 32)
          prefetch_l2(args.decay_up + (layer * args.W + w) * args.D + h * N, u32(N * sizeof(*args.decay_up)));
    }
  }
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
        barrier_wait(s.empty[stage], parity);
        barrier_wait(s.full[latest], parity ^ (latest < stage));
        if (lane < count) {
          const int bytes = min(PIECE, (K - k) * int(sizeof(T)));
          unsigned char* to = s.row(stage, first + lane);
          for (int at = bytes; at < PIECE; at += 16) *reinterpret_cast<uint4*>(to + at) = {0, 0, 0, 0};
          if (bytes < PIECE) fence_async();
          barrier_expect(s.full[stage], bytes);
          copy_once(to, rows + i64(lane) * K + k, bytes, s.full[stage]);
        }
        __syncwarp();
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++latest == STAGES) latest = 0;
      }
    }
  }
}

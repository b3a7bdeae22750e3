// what      The phases of a decoding step of RWKV-6: which weights each of them multiplies by, and how their rows are
//           distributed over blocks.
#include "rwkv6/decode_tiles.cuh"

constexpr int CHANNELS = 128, SPLITS = THREADS / CHANNELS;  // of a unit of the mix
constexpr int VECTORS = 2;                                  // mixes of a norm whose operands a block has at once
constexpr bool KEEPS_NORM = false;                          // whether it computes mixes later, too

enum Phase : int { MIX_DOWN, MIX, INPUTS, TIME_MIX, OUTPUT, FFN_INPUTS, FFN_VALUE, PHASES, HEAD = PHASES };

// S is the type of the recurrent state. L: layers; P: states of a pool; D: channels; H: heads, of N channels; A, W:
// ranks of the five mixes and of the decay; F: channels inside the channel mix; V: tokens of the vocabulary. Weights
// have [L, n, rows, K] numbers, their scales [L, n, rows]; _down and _up are first and second matrices of low rank;
// kvrg: of key, value, receptance and gate. Words (Handed) are results that blocks hand to each other.
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

// The place of a tile of a phase that the other version does not share.
template <typename T, typename S>
__device__ __forceinline__ PlaceOfTile<T> own_place_of(const Args<T, S>& args, i64 layer, int phase, int tile) {
  const int D = tiles_of(args.D), F = tiles_of(args.F), W = tiles_of(args.W);
  if (phase == MIX_DOWN) return {{args.maa_down, args.maa_down_scales}, layer * tiles_of(5 * args.A) + tile};
  if (phase == INPUTS && tile < W) return {{args.decay_down, args.decay_down_scales}, layer * W + tile};
  if (phase == INPUTS) return {{args.kvrg, args.kvrg_scales}, layer * 4 * D + tile - W};
  if (tile < F) return {{args.ffn_key, args.ffn_key_scales}, layer * F + tile};
  return {{args.ffn_receptance, args.ffn_receptance_scales}, layer * D + tile - F};
}

__device__ __forceinline__ bool is_normed(int phase) {
  return phase == MIX_DOWN || phase == FFN_INPUTS || phase == HEAD;
}
// By weights.
__device__ __forceinline__ bool multiplies(int phase) { return phase != MIX && phase != TIME_MIX; }

// Which of the phase's vectors a tile multiplies by.
template <typename T, typename S> __device__ __forceinline__ int input_of(const Args<T, S>& args, int phase, int tile) {
  if (phase == FFN_INPUTS) return tile >= tiles_of(args.F);
  const int tiles = tiles_of(args.D), first = tile - tiles_of(args.W);  // of key, value, receptance and gate
  if (phase != INPUTS || first < 0) return 0;
  return 1 + (first >= tiles) + (first >= 2 * tiles) + (first >= 3 * tiles);
}

template <typename T, typename S>
__device__ __forceinline__ Norm norm_of(const Args<T, S>& args, i64 layer, int phase, int input) {
  const i64 at = layer * args.D, state = state_row(args, layer) * args.D;
  Norm norm;
  norm.ln = phase == HEAD ? args.ln_out : (phase == MIX_DOWN ? args.ln1 : args.ln2) + 2 * at;
  norm.maa = phase == HEAD ? nullptr : phase == MIX_DOWN ? args.maa_x + at : args.ffn_maa + 2 * at + input * args.D;
  norm.shift = phase == HEAD ? nullptr : (phase == MIX_DOWN ? args.att_shift : args.ffn_shift) + state;
  return norm;
}

// Starts copying to L2 what a phase reads beside its tiles.
template <typename T, typename S>
__device__ __forceinline__ void prefetch_inputs(const Args<T, S>& args, i64 layer, int phase) {
  const int lane = threadIdx.x & 31, row = int(args.D * 4);
  const i64 at = layer * args.D;
  if (is_normed(phase)) prefetch_norm(norm_of(args, layer, phase, 0), phase == FFN_INPUTS ? 2 : 1, args.D);
  if (blockIdx.x == 0) {
    if (phase == TIME_MIX) {
      if (lane == 0) prefetch_l2(args.ln_x + 2 * at, 2 * row);
      if (lane == 1) prefetch_l2(args.decay + at, row);
      if (lane == 2) prefetch_l2(args.bonus + at, row);
    } else if (phase == MIX) {
      if (lane == 0) prefetch_l2(args.maa + 5 * at, 5 * row);
    }
  }
  if (phase == MIX) {
    const int across = int(args.D + CHANNELS - 1) / CHANNELS;
    for (int unit = blockIdx.x; unit < 5 * across; unit += gridDim.x) {
      const i64 first = unit % across * CHANNELS, width = min(i64(CHANNELS), args.D - first);
      prefetch_rows(args.maa_up + (layer * 5 + unit / across) * args.A * args.D + first, args.A, args.D, width);
    }
  } else if (phase == TIME_MIX) {
    prefetch_states(args, layer);
    for (i64 h = blockIdx.x; h < args.H; h += gridDim.x)
      prefetch_rows(args.decay_up + layer * args.W * args.D + h * args.N, args.W, args.D, args.N);
  }
}

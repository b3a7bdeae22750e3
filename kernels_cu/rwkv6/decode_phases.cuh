// what      The phases of a decoding step of RWKV-6, one token of one sequence: which weights each of them multiplies
//           by, and how their rows are distributed over the blocks of a launch. rwkv7/decode_phases.cuh has the same
//           for RWKV-7; a kernel includes one of them.
// math      of a layer, in the order of Phase. xx = LN(x), old: the xx of the previous token, mix(xx) = xx + (old - xx)
//           maa, with parameters maa of each mix; c: one of w k v r g (decay, key, value, receptance, gate)
//           MIX_DOWN    low = tanh(maa_down mix(xx))
//           MIX         mixed_c = xx + (old - xx) (maa_c + up_c low_c)
//           INPUTS      decay_low = tanh(decay_down mixed_w); k v r g, each a matrix times mixed_c
//           TIME_MIX    y = group norm of the recurrence's output
//           OUTPUT      x += output (y silu(g))
//           FFN_INPUTS  activated = relu(key mix(xx))^2, gate = sigmoid(receptance mix(xx))
//           FFN_VALUE   x += gate (value activated)
//           HEAD        logits = head LN(x), after all layers
// limits    H N = D, a multiple of 8. Outputs of a matrix that is multiplied in tiles are padded to whole tiles of 16.
//           Arrays are aligned to 16 bytes, for bulk copies and prefetches
#include "rwkv6/decode_tiles.cuh"

// From decode_tiles.cuh:
//   THREADS = 256 threads compute; ROWS = 16: of a tile; tiles_of: tiles of so many rows
//   Tiles: a block's share of a phase's tiles; PlaceOfTile: matrices of all layers, and a tile's number there
//   Handed<T>: the type of words; MultipliedAs: the type in which weights are multiplied
//   Norm: where a norm's parameters are; state_row: the row of the states of all layers; prefetch_...: start copies to
//     L2

// A unit of the phase MIX is CHANNELS channels of one of the five mixes; SPLITS threads share a channel's sum over A.
constexpr int CHANNELS = 128, SPLITS = THREADS / CHANNELS;
static_assert(SPLITS * CHANNELS == THREADS);
constexpr int VECTORS = 2;             // how many mixes of a norm a block computes at once (FFN_INPUTS has two)
constexpr bool KEEPS_NORM = false;     // whether a block keeps LN(x) to compute other mixes of it later
constexpr bool HOLDS_WEIGHTS = false;  // whether OUTPUT and FFN_INPUTS begin with weights in registers

enum Phase : int { MIX_DOWN, MIX, INPUTS, TIME_MIX, OUTPUT, FFN_INPUTS, FFN_VALUE, PHASES, HEAD = PHASES };

// T is the type of weights, S that of the recurrent state. L: layers; P: states of a pool; D: channels; H: heads, of N
// channels; A, W: ranks of the five mixes and of the decay; F: channels inside the channel mix; V: tokens of the
// vocabulary. Weights have [L, matrices, outputs, inputs] numbers, their scales [L, matrices, outputs]; _down and _up
// are first and second matrices of low rank, the latter [L, matrices, inputs, outputs]; kvrg: of key, value, receptance
// and gate.
template <typename T, typename S> struct Args {
  typedef typename MultipliedAs<T>::Type Up;  // the type of second matrices: that in which T is multiplied
  const T *maa_down, *decay_down, *kvrg, *output, *ffn_key, *ffn_receptance, *ffn_value, *head;
  // int8: a scale for each row; otherwise null.
  const float *maa_down_scales, *decay_down_scales, *kvrg_scales, *output_scales, *ffn_key_scales,
      *ffn_receptance_scales, *ffn_value_scales, *head_scales;
  const Up *maa_up, *decay_up;
  // Norms [L, 2, D], weight and bias: of the time mix, of the channel mix, of heads (ln_x); ln_out [2, D] of the head.
  // Mixes: maa_x [L, D] for MIX_DOWN, maa [L, 5, D], ffn_maa [L, 2, D] for key and receptance. decay, bonus [L, D].
  const float *ln1, *ln2, *ln_x, *ln_out, *maa_x, *maa, *ffn_maa, *decay, *bonus;
  float *att_shift, *ffn_shift;  // [L, P, D]: the previous token's LN(x) of the time mix, of the channel mix
  S* wkv;                        // [L, P, H, N, N]: the recurrent states
  const i64* slots;              // which of the pool's P states is the sequence's; null: the first
  // Results that blocks hand to each other, in words: numbers that carry the layer they are of.
  // [6, D]: LN(x) of the time mix, of the channel mix; x after each; x after the last layer, in words of 8 bytes.
  Handed<T>* xx;
  Handed<T>* low;        // [5 A]
  Handed<T>* mixed;      // [5, D]
  Handed<T>* kvrg_out;   // [4, D], silu of the gate
  Handed<T>* decay_low;  // [W]
  Handed<T>* y;          // [D]
  Handed<T>* activated;  // [F]
  Handed<T>* gate;       // [D]
  float *x, *logits;
  u32* arrived;  // of each block: how many layers it has computed, over all launches
  i64 L, P, D, H, N, A, W, F, V;
  i64 staged;       // how many numbers of a product's vector the staging area holds at a time
  i64 first, last;  // phases [first, last) are computed; layer * PHASES + phase is a phase's number, L * PHASES HEAD's
  double eps, group_eps;
};

// The block's share of a phase's tiles: share_to_first gives all blocks as many, but for one more to the first ones,
// share_to_last to the last ones; a.then(b.from(n)) has the tiles a, and then b, whose matrix follows n tiles of
// another one. All blocks have about as many tiles of a layer. If there are fewer heads than half of the blocks, those
// that compute a head's time mix have no tiles of the gate. The tiles of MIX_DOWN start at block `blocks - blocks / 3`:
// from there on, blocks have no unit of the phase MIX if there are at most so many units.
template <typename T, typename S> __device__ __forceinline__ Tiles share_of(const Args<T, S>& args, int phase) {
  const u32 block = blockIdx.x, blocks = gridDim.x;
  const int D = tiles_of(args.D), F = tiles_of(args.F);
  const u32 with_keys = min(blocks, u32(F));  // blocks that have tiles of the channel mix's key
  switch (phase) {
    case MIX_DOWN:
      return share_to_first(tiles_of(5 * args.A), (block + blocks / 3) % blocks, blocks);
    case INPUTS: {
      const int early = tiles_of(args.W) + 3 * D;  // all but the gate's, which are needed after the time mix only
      const u32 heads = args.H < blocks / 2 ? u32(args.H) : 0;  // blocks that have a time mix, and no gate
      const Tiles gates = block < heads ? Tiles{} : share_to_last(D, block - heads, blocks - heads);
      return share_to_first(early, block, blocks).then(gates.from(early));
    }
    case OUTPUT:
    case FFN_VALUE:  // the same rows: a thread adds to numbers of args.x that it has written itself
      return block < with_keys ? share_to_first(D, block, with_keys) : Tiles{};
    case FFN_INPUTS:
      // A block has the gate of the rows whose `value` it computes. Only blocks with tiles of keys take part: whoever
      // has received all keys then knows that each of these blocks has read the shift, which may be overwritten.
      if (block >= with_keys) return {};
      return share_to_first(F, block, with_keys).then(share_to_first(D, block, with_keys).from(F));
    case HEAD:
      return share_to_first(tiles_of(args.V), block, blocks);
  }
  return {};
}

// The place of a tile of MIX_DOWN, INPUTS or FFN_INPUTS, the phases with weights that RWKV-7 lacks or has otherwise.
template <typename T, typename S>
__device__ __forceinline__ PlaceOfTile<T> own_place_of(const Args<T, S>& args, i64 layer, int phase, int tile) {
  const int D = tiles_of(args.D), F = tiles_of(args.F), W = tiles_of(args.W);
  if (phase == MIX_DOWN) return {{args.maa_down, args.maa_down_scales}, layer * tiles_of(5 * args.A) + tile};
  if (phase == INPUTS && tile < W) return {{args.decay_down, args.decay_down_scales}, layer * W + tile};
  if (phase == INPUTS) return {{args.kvrg, args.kvrg_scales}, layer * 4 * D + tile - W};
  if (tile < F) return {{args.ffn_key, args.ffn_key_scales}, layer * F + tile};
  return {{args.ffn_receptance, args.ffn_receptance_scales}, layer * D + tile - F};
}

// Whether a phase multiplies by vectors that are mixes of LN(x), or LN(x).
__device__ __forceinline__ bool is_normed(int phase) {
  return phase == MIX_DOWN || phase == FFN_INPUTS || phase == HEAD;
}
// Whether the phase is a product of weights in tiles.
__device__ __forceinline__ bool multiplies(int phase) { return phase != MIX && phase != TIME_MIX; }

// Which of the phase's vectors a tile multiplies by. FFN_INPUTS: mixes for the key, the receptance; INPUTS: for the
// decay, key, value, receptance, gate.
template <typename T, typename S> __device__ __forceinline__ int input_of(const Args<T, S>& args, int phase, int tile) {
  if (phase == FFN_INPUTS) return tile >= tiles_of(args.F);
  // kvrg_tile: the tile's number among those of key, value, receptance and gate; below 0 for the decay's.
  const int tiles = tiles_of(args.D), kvrg_tile = tile - tiles_of(args.W);
  if (phase != INPUTS || kvrg_tile < 0) return 0;
  return 1 + (kvrg_tile >= tiles) + (kvrg_tile >= 2 * tiles) + (kvrg_tile >= 3 * tiles);
}

// The parameters of a normed phase (`is_normed`), with the mix of vector `input`; HEAD mixes nothing.
template <typename T, typename S>
__device__ __forceinline__ Norm norm_of(const Args<T, S>& args, i64 layer, int phase, int input) {
  const i64 layer_offset = layer * args.D, state = state_row(args, layer) * args.D;
  Norm norm;
  norm.ln = phase == HEAD ? args.ln_out : (phase == MIX_DOWN ? args.ln1 : args.ln2) + 2 * layer_offset;
  norm.maa = phase == HEAD       ? nullptr
             : phase == MIX_DOWN ? args.maa_x + layer_offset
                                 : args.ffn_maa + 2 * layer_offset + input * args.D;
  norm.shift = phase == HEAD ? nullptr : (phase == MIX_DOWN ? args.att_shift : args.ffn_shift) + state;
  return norm;
}

// Starts to copy to L2 what the block reads in a phase beside its tiles, and in block 0 also what all blocks read; for
// one warp.
template <typename T, typename S>
__device__ __forceinline__ void prefetch_inputs(const Args<T, S>& args, i64 layer, int phase) {
  const int lane = threadIdx.x & 31, row_bytes = int(args.D * 4);
  const i64 layer_offset = layer * args.D;
  if (is_normed(phase)) prefetch_norm(norm_of(args, layer, phase, 0), phase == FFN_INPUTS ? 2 : 1, args.D);
  if (blockIdx.x == 0) {
    if (phase == TIME_MIX) {
      if (lane == 0) prefetch_l2(args.ln_x + 2 * layer_offset, 2 * row_bytes);
      if (lane == 1) prefetch_l2(args.decay + layer_offset, row_bytes);
      if (lane == 2) prefetch_l2(args.bonus + layer_offset, row_bytes);
    } else if (phase == MIX) {
      if (lane == 0) prefetch_l2(args.maa + 5 * layer_offset, 5 * row_bytes);
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

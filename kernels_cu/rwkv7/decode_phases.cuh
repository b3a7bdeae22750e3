// what      The phases of a decoding step of RWKV-7: which weights each of them multiplies by, and how their rows are
//           distributed over blocks.
#include "rwkv6/decode_tiles.cuh"

constexpr int VECTORS = 1;         // mixes of a norm whose operands a block has at once
constexpr bool KEEPS_NORM = true;  // whether it computes mixes later, too

enum Phase : int { INPUTS, TIME_MIX, OUTPUT, FFN_INPUTS, FFN_VALUE, PHASES, HEAD = PHASES };
enum Opening : int { DECAY, RATE, GATE, SHARE, OPENINGS };  // by products of low rank; the value has the share's mix
constexpr int MIXES = 6;

// S is the type of the recurrent state. L: layers; P: states of a pool; D: channels; H: heads, of N channels; W, A, G,
// Q: ranks of the openings DECAY, RATE, GATE and SHARE; F: channels inside the channel mix; V: tokens of the
// vocabulary. Weights have [L, n, rows, K] numbers, their scales [L, n, rows]; down and up are first and second
// matrices of low rank; vkr: of value, key and receptance. Words (Handed) are results that blocks hand to each other.
template <typename T, typename S> struct Args {
  typedef typename MultipliedAs<T>::Type Up;
  const T *down, *vkr, *output, *ffn_key, *ffn_value, *head;
  // int8: a scale for each row; otherwise null.
  const float *down_scales, *vkr_scales, *output_scales, *ffn_key_scales, *ffn_value_scales, *head_scales;
  const Up* up;
  const float *ln1, *ln2, *ln_x, *ln_out, *mix, *ffn_mix, *bases, *removal, *replacement, *bonus;
  float *att_shift, *ffn_shift;
  S* wkv;
  const i64* slots;  // the sequence's row of the states; null: 0
  Handed<T>*xx, *low, *vkr_out, *y, *activated;
  float *first_v, *x, *logits;
  u32* arrived;
  i64 L, P, D, H, N, W, A, G, Q, F, V;
  i64 staged;       // numbers of an input in the staging area at a time
  i64 first, last;  // phases [first, last) are computed; layer * PHASES + phase is a phase's number, L * PHASES HEAD's
  double eps, group_eps;
  i64* tokens;     // the likeliest token, the lowest of equal ones; null: not wanted
  u64* likeliest;  // one number: the largest key_of (decode_layers.cuh) of blocks so far; 0 before a launch
  u32* brought;    // one number: how many blocks it is of; 0 before a launch

  __device__ __forceinline__ int rank(int opening) const {
    return int(opening == DECAY ? W : opening == RATE ? A : opening == GATE ? G : Q);
  }
  // Tiles of the largest rank, to which the others are padded.
  __device__ __forceinline__ int tiles_of_rank() const { return tiles_of(max(max(W, A), max(G, Q))); }
};

__device__ __forceinline__ bool is_normed(int phase) { return phase == INPUTS || phase == FFN_INPUTS || phase == HEAD; }
// Whether the phase multiplies by weights.
__device__ __forceinline__ bool multiplies(int phase) { return phase != TIME_MIX; }

// A tile of the inputs: its mix; its matrix, the openings' before those of value, key and receptance; its place there.
struct InputTile {
  int mix, matrix, tile;
};
template <typename T, typename S> __device__ __forceinline__ InputTile input_tile_of(const Args<T, S>& args, int tile) {
#pragma unroll
  for (int opening = 0; opening < OPENINGS; ++opening) {
    const int tiles = tiles_of(args.rank(opening));
    if (tile < tiles) return {opening, opening, tile};
    tile -= tiles;
  }
  const int tiles = tiles_of(args.D), n = tile / tiles;
  return {SHARE + n, OPENINGS + n, tile - n * tiles};
}
template <typename T, typename S> __device__ __forceinline__ int input_of(const Args<T, S>& args, int phase, int tile) {
  return phase == INPUTS ? input_tile_of(args, tile).mix : 0;
}

// The block's share of a phase's tiles. All blocks have about as many tiles of a layer. Blocks with a head compute what
// opens while others compute the last of v, k and r: so tiles of low rank are a block's first ones, on blocks without a
// head. Blocks that have either have about two tiles of v, k and r fewer.
template <typename T, typename S> __device__ __forceinline__ Tiles share_of(const Args<T, S>& args, int phase) {
  const u32 block = blockIdx.x, blocks = gridDim.x;
  const int D = tiles_of(args.D), F = tiles_of(args.F);
  switch (phase) {
    case INPUTS: {
      int openings = 0;
#pragma unroll
      for (int opening = 0; opening < OPENINGS; ++opening) openings += tiles_of(args.rank(opening));
      const u32 heads = args.H + openings < blocks ? u32(args.H) : 0, few = heads ? heads + openings : 0;
      const Tiles low = block < heads ? Tiles{} : share_to_first(openings, block - heads, blocks - heads);
      const int of_few = int(few) * max(0, 3 * D - 2 * int(blocks - few)) / int(blocks);
      const Tiles vkr = block < few ? share_to_first(of_few, block, few)
                                    : share_to_last(3 * D - of_few, block - few, blocks - few).from(of_few);
      return low.then(vkr.from(openings));
    }
    case OUTPUT:
    case FFN_VALUE:
      return share_to_first(D, block, blocks);
    case FFN_INPUTS:
      return share_to_first(F, block, blocks);
    case HEAD:
      return share_to_first(tiles_of(args.V), block, blocks);
  }
  return {};
}

// The place of a tile of a phase that the other version does not share.
template <typename T, typename S>
__device__ __forceinline__ PlaceOfTile<T> own_place_of(const Args<T, S>& args, i64 layer, int phase, int tile) {
  if (phase == FFN_INPUTS) return {{args.ffn_key, args.ffn_key_scales}, layer * tiles_of(args.F) + tile};
  const InputTile of = input_tile_of(args, tile);
  if (of.matrix < OPENINGS)
    return {{args.down, args.down_scales}, (layer * OPENINGS + of.matrix) * args.tiles_of_rank() + of.tile};
  return {{args.vkr, args.vkr_scales}, (layer * 3 + of.matrix - OPENINGS) * tiles_of(args.D) + of.tile};
}

template <typename T, typename S>
__device__ __forceinline__ Norm norm_of(const Args<T, S>& args, i64 layer, int phase, int input) {
  if (phase == HEAD) return {args.ln_out, nullptr, nullptr};
  const i64 at = layer * args.D, state = state_row(args, layer) * args.D;
  if (phase == FFN_INPUTS) return {args.ln2 + 2 * at, args.ffn_mix + at, args.ffn_shift + state};
  return {args.ln1 + 2 * at, args.mix + MIXES * at + input * args.D, args.att_shift + state};
}

// The first row of an opening's second matrix.
template <typename T, typename S>
__device__ __forceinline__ const typename Args<T, S>::Up* up_of(const Args<T, S>& args, i64 layer, int opening) {
  return args.up + (layer * OPENINGS + opening) * args.tiles_of_rank() * ROWS * args.D;
}

// Starts copying to L2 what a phase reads beside its tiles.
template <typename T, typename S>
__device__ __forceinline__ void prefetch_inputs(const Args<T, S>& args, i64 layer, int phase) {
  if (is_normed(phase)) prefetch_norm(norm_of(args, layer, phase, 0), phase == INPUTS ? MIXES : 1, args.D);
  if (phase != TIME_MIX) return;
  prefetch_states(args, layer);
  for (i64 h = blockIdx.x; h < args.H; h += gridDim.x)
#pragma unroll 1
    for (int opening = 0; opening < OPENINGS; ++opening)
      prefetch_rows(up_of(args, layer, opening) + h * args.N, args.rank(opening), args.D, args.N);
}

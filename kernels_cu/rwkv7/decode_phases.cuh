// what      The phases of a decoding step of RWKV-7, one token of one sequence: which weights each of them multiplies
//           by, and how their rows are distributed over the blocks of a launch. rwkv6/decode_phases.cuh has the same
//           for RWKV-6; a kernel includes one of them.
// math      of a layer, in the order of Phase. xx = LN(x), old: the xx of the previous token, mix(xx) = xx + (old - xx)
//           maa, with parameters maa of each of six mixes
//           INPUTS      low: first products of the openings, tanh of the decay's, sigmoid of the gate's; v k r: a
//                       matrix times a mix each
//           TIME_MIX    openings from low: decay, rate, gate and share, by second matrices of low rank; y = (group norm
//                       of the recurrence's output + bonus) gate
//           OUTPUT      x += output y
//           FFN_INPUTS  activated = relu(key mix(xx))^2
//           FFN_VALUE   x += value activated
//           HEAD        logits = head LN(x), after all layers
// limits    H N = D, a multiple of 8. Outputs of a matrix that is multiplied in tiles are padded to whole tiles of 16
#include "rwkv6/decode_tiles.cuh"

// From decode_tiles.cuh:
//   THREADS = 256 threads compute; ROWS = 16: of a tile; tiles_of: tiles of so many rows
//   Tiles: a block's share of a phase's tiles; PlaceOfTile: matrices of all layers, and a tile's number there
//   Handed<T>: the type of words; MultipliedAs: the type in which weights are multiplied
//   Norm: where a norm's parameters are; state_row: the row of the states of all layers; prefetch_...: start copies to
//     L2

constexpr int VECTORS = 1;         // how many mixes of a norm a block computes at once
constexpr bool KEEPS_NORM = true;  // whether a block keeps LN(x) to compute other mixes of it later
// Whether lanes load the first weights of OUTPUT and FFN_INPUTS to registers before the vector is there. When it comes
// the ring of stages is full: memory would be idle before, and the first product late.
constexpr bool HOLDS_WEIGHTS = true;

enum Phase : int { INPUTS, TIME_MIX, OUTPUT, FFN_INPUTS, FFN_VALUE, PHASES, HEAD = PHASES };
// Functions of the data by products of low rank: the decay, the learning rate, the gate, and the share of the first
// layer's value in v.
enum Opening : int { DECAY, RATE, GATE, SHARE, OPENINGS };
// Mixes by number: 0 to 3 of the openings, 3, the share's, also of the value; 4 of the key, 5 of the receptance.
constexpr int MIXES = 6;

// S is the type of the recurrent state. L: layers; P: states of a pool; D: channels; H: heads, of N channels; W, A, G,
// Q: ranks of the openings DECAY, RATE, GATE and SHARE; F: channels inside the channel mix; V: tokens of the
// vocabulary. Weights have [L, matrices, outputs, inputs] numbers, their scales [L, matrices, outputs]; down and up are
// first and second matrices of low rank, the latter [L, OPENINGS, inputs, outputs], all padded to the largest rank;
// vkr: of value, key and receptance.
template <typename T, typename S> struct Args {
  typedef typename MultipliedAs<T>::Type Up;
  const T *down, *vkr, *output, *ffn_key, *ffn_value, *head;
  // int8: a scale for each row; otherwise null.
  const float *down_scales, *vkr_scales, *output_scales, *ffn_key_scales, *ffn_value_scales, *head_scales;
  const Up* up;
  // Norms [L, 2, D], weight and bias: of the time mix, of the channel mix, of heads (ln_x); ln_out [2, D] of the head.
  // mix [L, MIXES, D], ffn_mix [L, D]: the mixes' maa; bases [L, 3, D]: of decay, rate and share; the others [L, D].
  const float *ln1, *ln2, *ln_x, *ln_out, *mix, *ffn_mix, *bases, *removal, *replacement, *bonus;
  float *att_shift, *ffn_shift;  // [L, P, D]: the previous token's LN(x) of the time mix, of the channel mix
  S* wkv;                        // [L, P, H, N, N]: the recurrent states
  const i64* slots;              // which of the pool's P states is the sequence's; null: the first
  // Results that blocks hand to each other, in words: numbers that carry the layer they are of.
  // [6, D]: LN(x) of the time mix, of the channel mix; x after each; x after the last layer, in words of 8 bytes.
  Handed<T>* xx;
  Handed<T>* low;        // [OPENINGS, the largest rank padded to whole tiles]
  Handed<T>* vkr_out;    // [3, D]
  Handed<T>* y;          // [D]
  Handed<T>* activated;  // [F]
  float* first_v;        // [D]: the first layer's v
  float *x, *logits;
  u32* arrived;  // of each block: how many layers it has computed, over all launches
  i64 L, P, D, H, N, W, A, G, Q, F, V;
  i64 staged;       // how many numbers of a product's vector the staging area holds at a time
  i64 first, last;  // phases [first, last) are computed; layer * PHASES + phase is a phase's number, L * PHASES HEAD's
  double eps, group_eps;

  // The rank of an opening's two matrices.
  __device__ __forceinline__ int rank(int opening) const {
    return int(opening == DECAY ? W : opening == RATE ? A : opening == GATE ? G : Q);
  }
  // Tiles of the largest rank, to which the others are padded.
  __device__ __forceinline__ int tiles_of_rank() const { return tiles_of(max(max(W, A), max(G, Q))); }
};

// Whether a phase multiplies by vectors that are mixes of LN(x), or LN(x).
__device__ __forceinline__ bool is_normed(int phase) { return phase == INPUTS || phase == FFN_INPUTS || phase == HEAD; }
// Whether the phase multiplies by weights.
__device__ __forceinline__ bool multiplies(int phase) { return phase != TIME_MIX; }

// A tile of INPUTS. mix: the mix by which it is multiplied; matrix: 0 to 3 of the openings, then value, key and
// receptance; tile: its number among the matrix's tiles.
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
// Which of the phase's mixes a tile multiplies by; 0 if there is one vector.
template <typename T, typename S> __device__ __forceinline__ int input_of(const Args<T, S>& args, int phase, int tile) {
  return phase == INPUTS ? input_tile_of(args, tile).mix : 0;
}

// The block's share of a phase's tiles: share_to_first gives all blocks as many, but for one more to the first ones,
// share_to_last to the last ones; a.then(b.from(n)) has the tiles a, and then b, whose matrix follows n tiles of
// another one. All blocks have about as many tiles of a layer. A block that has a head computes its openings while
// other blocks compute the last tiles of v, k and r: so tiles of low rank are the first ones of blocks without a head.
// The few blocks with a head or with tiles of low rank have about two tiles of v, k and r fewer than others.
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

// The place of a tile of INPUTS or FFN_INPUTS, the phases with weights that RWKV-6 has otherwise.
template <typename T, typename S>
__device__ __forceinline__ PlaceOfTile<T> own_place_of(const Args<T, S>& args, i64 layer, int phase, int tile) {
  if (phase == FFN_INPUTS) return {{args.ffn_key, args.ffn_key_scales}, layer * tiles_of(args.F) + tile};
  const InputTile of = input_tile_of(args, tile);
  if (of.matrix < OPENINGS)
    return {{args.down, args.down_scales}, (layer * OPENINGS + of.matrix) * args.tiles_of_rank() + of.tile};
  return {{args.vkr, args.vkr_scales}, (layer * 3 + of.matrix - OPENINGS) * tiles_of(args.D) + of.tile};
}

// The norm of a normed phase, the parameters of its mix number `input`, and the previous token's LN(x); HEAD mixes
// nothing.
template <typename T, typename S>
__device__ __forceinline__ Norm norm_of(const Args<T, S>& args, i64 layer, int phase, int input) {
  if (phase == HEAD) return {args.ln_out};
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

// what      Decodes one token of RWKV-7 for one sequence in one launch: all layers and the logits. Every weight is read
//           once.
// math      phases of a layer, xx = LN(x), old = the previous token's xx, mix(xx) = xx + (old - xx) maa:
//           low = tanh(down mix_w) | down mix_a | sigmoid(down mix_g) | down mix_v, v k r = W mix(xx) |
//           y = (group norm of the time mix + bonus) gate. The *openings* are functions of low times `up`, second
//           matrices of low rank: the decay, the learning rate, the gate, and the share of first_v in v |
//           x += output y | activated = relu(key mix(xx))^2 | x += value activated;
//           after the last layer: logits = head LN(x)
// shapes    x [D], logits [V]; weights [L, n, rows, K], rows of a product padded to 16; states [L, P, ...], slots [1]
//           or null; R: the largest rank, to which the others are padded; first_v [D], the first layer's values. Words
//           (rwkv6/decode_few.cu): xx [6, D], low [4, R], vkr [3, D], y [D], activated [F]. arrived [grid]: how many
//           layers a block has computed so far
// grid      rwkv7/cuda_decode.py launches as many blocks as multiprocessors, all resident at once unless only one phase
//           is launched. Of a block, 256 threads compute; the finishing warp adds the warps' sums of a tile of 16 rows
//           and stores results; COPIERS warps copy weights
// smem      Shared; then the staging area: the operands of D numbers and a norm's numbers; or those of `staged` numbers
//           at a time if a product has more; or a head's time mix
// barriers  words and mbarriers as in rwkv6/decode_few.cu: a reader loads a word until it carries this layer's number,
//           and no block waits for all others. Of a layer's words low, v, k and r depend on all x before, y of all
//           heads on all of these, x on all y, activated on all x: a word is overwritten a layer later, when all its
//           readers have read it
// numerics  float32 sums in a fixed order. Words are float32 without the last bit (float32 weights: whole). Vectors are
//           sums of numbers that tensor cores multiply exactly: two tf32, three bfloat16, or with int8 weights four
//           digits of 31 bits (rwkv6/decode_split.cuh)
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    one sequence; D and F multiples of 8, D up to 8192, N a multiple of 4 up to 256; weights aligned to 16
//           bytes; at least two blocks; sm_90a
#include "rwkv7/decode_phases.cuh"
#include "rwkv6/decode_layers.cuh"
#include "rwkv7/time_mix.cuh"

// From the includes:
//   put_word: stores a number for other blocks; take_words: waits for words of this epoch; sync: named barrier 1 of the
//     computing threads. add_scaled(x, f, y) = x + f y, of four numbers
//   ROWS = 16: of a tile; tiles_of: tiles of so many rows
//   state_row: the row of the states of all layers
//   StatePart(state, N, tid, busy): a thread's part of a head's state: columns `column` ... `column` + 3, every
//     `groups`-th row from `group` on; it loads the first of them, `held`, if `busy`: HOLDS_ROWS, not HOLDS_NONE
//   Token, KeyParameters: of the thread's channel; Scratch: shared memory of a head; time_mix_head: keys, state, group
//     norm, bonus and gate of a head
//   decode_token: the whole kernel; fetch_words: waits for words and stores operands
//   OPENINGS = 4: DECAY, RATE, GATE, SHARE; up_of: the first row of an opening's second matrix; input_tile_of: the
//     matrix of a tile of INPUTS, and the tile's number there (InputTile); ALL_THREADS: of a block

union HeadScratch {
  float group_sums[OPENINGS][4 * THREADS];  // of the openings' products, by group of threads: [groups, N] each
  Scratch of_token;                         // after the openings
  // behind it: `low`
};

template <typename T, typename S, int STAGES> struct DecodeOne : DecodeLayers<DecodeOne<T, S, STAGES>, T, S, STAGES> {
  typedef DecodeLayers<DecodeOne, T, S, STAGES> Layers;
  using Layers::args, Layers::s, Layers::staging, Layers::D, Layers::tid, Layers::epoch;
  typedef typename Layers::Word Word;
  typedef typename Args<T, S>::Up Up;
  using Layers::Layers;

  // Waits for numbers [first, first + count) of the vector that OUTPUT (y) or FFN_VALUE (activated) multiplies, and
  // stores their operands in the staging area, in rows of `pitch` numbers. Other phases take a norm's vectors.
  __device__ __forceinline__ void fetch(int phase, int, int first, int pitch, int count) {
    Layers::fetch_words((phase == OUTPUT ? args.y : args.activated) + first, pitch, count);
  }

  // Stores `sum`, the result of `row` of a tile of INPUTS or FFN_INPUTS, for other blocks.
  __device__ __forceinline__ void finish(int phase, int tile, int, int row, float sum) {
    if (phase == FFN_INPUTS) {
      row += tile * ROWS;
      if (row < args.F) put_word(args.activated + row, relu_squared<float>(sum), epoch);
      return;
    }
    const InputTile of = input_tile_of(args, tile);
    row += of.tile * ROWS;
    if (of.matrix >= OPENINGS) {
      if (row < D) put_word(args.vkr_out + (of.matrix - OPENINGS) * D + row, sum, epoch);
    } else {  // rows behind the rank give what nobody reads
      const float low = of.matrix == DECAY ? tanhf(sum) : of.matrix == GATE ? sigmoid(sum) : sum;
      put_word(args.low + of.matrix * padded_rank() + row, low, epoch);
    }
  }
  __device__ __forceinline__ int padded_rank() const { return args.tiles_of_rank() * ROWS; }

  __device__ __forceinline__ float gate_of(int) const { return 1.f; }

  // A thread's weights of the openings' second matrices. As of a head's state, a thread has four columns of the head,
  // and every `groups`-th row of a matrix. It holds the first of these rows in registers: of heads of 64 channels all
  // rows, if the ranks are 96, 96, 256 and 64.
  static constexpr int held_of(int opening) {
    return (opening == GATE ? 16 : opening == SHARE ? 4 : 6) / (sizeof(Up) == 4 ? 2 : 1);
  }
  struct Rows {
    Four<Up> held[OPENINGS][held_of(GATE)];
  };

  // Four columns of row r of an opening's second matrix, from `column` on; of the last row beyond the rank.
  __device__ __forceinline__ Four<Up> row_of(i64 layer, int opening, int r, int column) const {
    return load_four(up_of(args, layer, opening) + u32(min(r, args.rank(opening) - 1) * D + column));
  }
  // Loads the rows that a thread holds; at: the head's first channel.
  __device__ __forceinline__ void load(Rows& rows, i64 layer, const StatePart& part, int at) const {
#pragma unroll
    for (int opening = 0; opening < OPENINGS; ++opening)
#pragma unroll
      for (int n = 0; n < held_of(opening); ++n)
        rows.held[opening][n] = row_of(layer, opening, part.group + n * part.groups, at + part.column);
  }

  // Stores the sums of this thread's terms of the openings' products low up, from `low` in shared memory, for its four
  // columns from `at` + part.column on.
  __device__ __forceinline__ void sum_openings(HeadScratch& scratch, const float* low, const Rows& rows,
                                               const StatePart& part, i64 layer, int at, int N) const {
#pragma unroll
    for (int opening = 0; opening < OPENINGS; ++opening, low += padded_rank()) {
      const int rank = part.group < part.groups ? args.rank(opening) : 0;
      float4 sum = {};
      int r = part.group;
#pragma unroll
      for (int n = 0; n < held_of(opening); ++n, r += part.groups) {
        if (n % 4 == 0) __syncwarp();  // or all numbers of `low` are loaded first, and take registers
        sum = add_scaled(sum, r < rank ? low[r] : 0.f, float4(rows.held[opening][n]));
      }
#pragma unroll 4
      for (; r < rank; r += part.groups)
        sum = add_scaled(sum, low[r], float4(row_of(layer, opening, r, at + part.column)));
      if (part.group < part.groups) store4(scratch.group_sums[opening] + part.group * N + part.column, sum);
    }
  }

  // Waits for the openings' products with their first matrices, and stores them in `low`, in shared memory.
  __device__ __forceinline__ void take_low(float* low) const {
    constexpr int NEIGHBOURS = Layers::NEIGHBOURS;
    const int R = padded_rank();
#pragma unroll 1
    for (int n = NEIGHBOURS * tid; n < OPENINGS * R; n += NEIGHBOURS * THREADS) {
      if (n % R >= tiles_of(args.rank(n / R)) * ROWS) continue;
      Word found[1][NEIGHBOURS];
      const Word* const neighbours[1] = {args.low + n};
      take_words(found, neighbours, epoch);
#pragma unroll
      for (int i = 0; i < NEIGHBOURS; ++i) low[n + i] = number(found[0][i]);
    }
  }

  // The token of the thread's channel of the head that begins at channel `at`, from the openings' sums. first_v:
  // where layer 0 keeps v; first_value: that v, in a later layer.
  __device__ __forceinline__ Token token_of(const float (&opened)[OPENINGS], i64 layer, int at, int channel,
                                            float* first_v, float first_value) const {
    const float decay = decay_of(-DECAY_SCALE * sigmoid(opened[DECAY])), share = sigmoid(opened[SHARE]);
    Word words[3];
    const Word* from[3];
#pragma unroll
    for (int n = 0; n < 3; ++n) from[n] = args.vkr_out + n * D + at + channel;
    take_words(words, from, epoch);
    float v = number(words[0]);
    if (layer > 0) v = fmaf(first_value - v, share, v);
    else *first_v = v;
    return {number(words[1]), v, number(words[2]), decay, sigmoid(opened[RATE]), opened[GATE]};
  }

  // The phase TIME_MIX: computes y. A unit of work is a head; a thread has four columns of its state and every (4
  // THREADS / N)-th row, and, below N, a channel of its vectors. The openings' products are computed before v, k and r
  // are there, which come last.
  __device__ __forceinline__ void compute(i64 layer, int) {
    HeadScratch& scratch = *reinterpret_cast<HeadScratch*>(staging);
    float* const low = reinterpret_cast<float*>(&scratch + 1);
    const int N = int(args.N), H = int(args.H);
#pragma unroll 1
    for (int h = blockIdx.x; h < H; h += gridDim.x) {
      const int at = h * N, channel = min(tid, N - 1);  // at: the head's first channel
      const int own_at = int(layer) * D + at + channel;
      S* state = args.wkv + (state_row(args, layer) * H + h) * N * N;
      const StatePart place(state, N, tid, HOLDS_NONE);  // its state is loaded when `rows` has no registers any more
      Rows rows;
      load(rows, layer, place, at);
      const float* const norm = args.ln_x + (int(layer) * D + own_at);
      const KeyParameters own = {args.removal[own_at], args.replacement[own_at], args.bonus[own_at], norm[0], norm[D]};
      const float* const base = args.bases + (2 * int(layer) * D + own_at);
      const float of_decay = base[0], of_rate = base[D], of_share = base[2 * D];
      float* const first_v = args.first_v + at + channel;
      const float first_value = layer > 0 ? *first_v : 0.f;
      if (h != blockIdx.x) sync();  // the previous head's numbers have been read
      take_low(low);
      sync();  // `low` is in shared memory
      sum_openings(scratch, low, rows, place, layer, at, N);
      const StatePart part(state, N, tid, HOLDS_ROWS);
      sync();  // the groups' sums of the openings are in shared memory
      // Of the thread's channel: base + low up, before each opening's function.
      float opened[OPENINGS] = {of_decay, of_rate, 0.f, of_share};
      if (tid < N)
#pragma unroll 4
        for (int group = 0; group < part.groups; ++group)
#pragma unroll
          for (int opening = 0; opening < OPENINGS; ++opening)
            opened[opening] += scratch.group_sums[opening][group * N + channel];
      sync();  // the openings' sums have been read, which the token overwrites
      Token token = {};
      if (tid < N) token = token_of(opened, layer, at, channel, first_v, first_value);
      time_mix_head(scratch.of_token, part, state, N, tid, own, token, float(args.group_eps),
                    [&](int n, float y) { put_word(args.y + at + n, y, epoch); });
    }
  }
};

template <typename T, typename S, int STAGES>
__global__ void __launch_bounds__(ALL_THREADS, 1) rwkv7_decode_one(const __grid_constant__ Args<T, S> args) {
  decode_token<DecodeOne<T, S, STAGES>, T, S, STAGES>(args);
}

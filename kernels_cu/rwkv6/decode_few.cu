// what      Decodes one token of RWKV-6 for one sequence in one launch: all layers and the logits. Every weight is read
//           once.
// math      phases of a layer, xx = LN(x), old = the previous token's xx, mix(xx) = xx + (old - xx) maa:
//           low = tanh(maa_down mix(xx)) | mixed_c = xx + (old - xx) (maa_c + up_c low_c), c one of w k v r g |
//           decay_low = tanh(decay_down mixed_w), k v r g = W mixed | y = group norm of the time mix |
//           x += output (y silu(g)) | activated = relu(key mix(xx))^2, gate = sigmoid(receptance mix(xx)) |
//           x += gate (value activated);   after the last layer: logits = head LN(x)
// shapes    x [D], logits [V]; weights [L, n, rows, K], rows of a product padded to 16; states [L, P, ...], slots [1]
//           or null. Blocks exchange results in global memory as words, numbers that carry their layer: xx [6, D]:
//           LN(x) of both mixes, x after either mix, and the last layer's x in words of 8 bytes; low [5 A], mixed
//           [5, D], kvrg [4, D] with silu of the gate, decay_low [W], y [D], activated [F], gate [D]. arrived [grid]:
//           how many layers a block has computed so far, over all launches
// grid      as many blocks as multiprocessors, all resident at once unless only one phase is launched
//           (launch_all_layers in rwkv/cuda_decoder.py). Of a block, 256 threads compute: of a tile of 16 rows of a
//           product, a warp takes every 8th step along K, and a lane neighbouring numbers of two rows; one warp, the
//           finishing warp, adds the warps' sums; COPIERS warps copy weights
// smem      Shared; then the staging area: the operands of D numbers, twice if a norm has two mixes; or those of
//           `staged` numbers at a time if a product has more; or a head's time mix
// barriers  none of the grid. A word holds the number of its layer, or its parity: a reader loads it again until the
//           layer is the expected one. A word is overwritten a layer later, by a block that has seen results of all its
//           readers: each of them has written a word since, and every word of a layer depends on all words before. A
//           warp waits only for the words by which it multiplies. mbarriers: full, empty: stages of weights; summed,
//           taken: sums of a tile. Barriers of the 256 threads: see the comments
// numerics  float32 sums in a fixed order. Words are float32 without the last bit. Tensor cores take x and float32
//           weights as sums of two tf32 numbers; other weights are exact. With bfloat16 weights x is a sum of three
//           bfloat16 numbers; with int8 weights x is rounded to 31 bits relative to the largest number that its warp
//           multiplies by, split into digits, and the products are exact
// source    Peng et al., 2024, "Eagle and Finch", section 4; Ootomo and Yokota, 2022, for the split; Ootomo, Ozaki and
//           Yokota, 2024, for digits; NVIDIA's NCCL, for data that carry their own flags
// limits    one sequence: all blocks read all words, which from two on costs more than a launch for each phase; D and F
//           multiples of 8, D up to 8192, N a multiple of 4 up to 256, W up to 512; weights aligned to 16 bytes; at
//           least two blocks; sm_90a
#include "rwkv6/decode_phases.cuh"
#include "rwkv6/decode_layers.cuh"

// From the includes:
//   put_word: stores a number for other blocks; take_words: waits for words of this epoch; sync: named barrier 1 of the
//     computing threads
//   ROWS = 16: of a tile; tiles_of: tiles of so many rows
//   state_row: the row of the states of all layers
//   StatePart(state, N, tid, busy): a thread's part of a head's state: columns `column` ... `column` + 3, every
//     `groups`-th row from `group` on; if `busy` is HOLDS_ROWS it loads the first of them, `held`, at once
//   TimeMixScratch: shared memory of a head; ChannelOfHead: a thread's channel of it; time_mix_head: decay, state,
//     group norm and gate of a head
//   take_number: waits for one word; relu_squared: in units of UNIT_OF_SQUARES, 1 for float
//   CHANNELS = 128, SPLITS: channels of a unit of the phase MIX, and threads that share a channel's sum
//   decode_token: the whole kernel; fetch_words: waits for words and stores operands; fetch_gated: those of words times
//     gates; wait_for_place: the sums that were there have been read; normed_words: the words of LN(x); load_words,
//     settle_words: as take_words, in two steps

template <typename T, typename S, int STAGES> struct DecodeFew : DecodeLayers<DecodeFew<T, S, STAGES>, T, S, STAGES> {
  typedef DecodeLayers<DecodeFew, T, S, STAGES> Layers;
  using Layers::args, Layers::s, Layers::staging, Layers::D, Layers::tid, Layers::epoch, Layers::tile_count;
  typedef typename Layers::Word Word;
  typedef typename Args<T, S>::Up Up;
  using Layers::Layers;

  // Waits for numbers [first, first + count) of the vector that INPUTS (mix number `input`), OUTPUT (y silu(g)) or
  // FFN_VALUE (activated) multiplies, and stores their operands in the staging area, in rows of `pitch` numbers.
  __device__ __forceinline__ void fetch(int phase, int input, int first, int pitch, int count) {
    const Word* const words = phase == INPUTS ? args.mixed + input * D : phase == OUTPUT ? args.y : args.activated;
    if (phase != OUTPUT) return Layers::fetch_words(words + first, pitch, count);
    Layers::fetch_gated(words + first, args.kvrg_out + 3 * D + first, pitch, count);
  }

  // Stores `sum`, the result of `row` of a tile of MIX_DOWN, INPUTS or FFN_INPUTS, for other blocks.
  __device__ __forceinline__ void finish(int phase, int tile, int input, int row, float sum) {
    switch (phase) {
      case MIX_DOWN:
        row += tile * ROWS;
        if (row < 5 * args.A) put_word(args.low + row, tanhf(sum), epoch);
        break;
      case INPUTS:
        if (input == 0) {
          row += tile * ROWS;
          if (row < args.W) put_word(args.decay_low + row, tanhf(sum), epoch);
        } else {
          row += (tile - tiles_of(args.W) - (input - 1) * tiles_of(D)) * ROWS;
          if (row < D) put_word(args.kvrg_out + (input - 1) * D + row, input == 4 ? silu(sum) : sum, epoch);
        }
        break;
      case FFN_INPUTS:
        if (input == 0) {
          row += tile * ROWS;
          if (row < args.F) put_word(args.activated + row, relu_squared<float>(sum), epoch);
        } else {
          row += (tile - tiles_of(args.F)) * ROWS;
          if (row < D) put_word(args.gate + row, sigmoid(sum), epoch);
        }
        break;
    }
  }

  // The gate of a channel of the channel mix, which this thread has written.
  __device__ __forceinline__ float gate_of(int channel) const { return number(args.gate[channel]); }

  // The phases without products by weights.
  __device__ __forceinline__ void compute(i64 layer, int phase) {
    if (phase == MIX) five_mixes(layer);
    else time_mix(layer);
  }

  static constexpr int PASS = 16;  // rows of a low rank's second matrix that a thread loads at a time

  // Loads a thread's weights of a second matrix of low rank, of which it has a channel and every `splits`-th row: PASS
  // of these rows, from row `first` on. up: its channel of row 0; rows: the rows that exist.
  __device__ __forceinline__ void load_rows(Up (&weight)[PASS], const Up* up, int first, int splits, int rows) const {
#pragma unroll
    for (int i = 0; i < PASS; ++i)
      if (first + i * splits < rows) weight[i] = up[i64(first + i * splits) * D];
  }

  // The sum of this thread's terms of a product low up, of a channel and every `splits`-th row from `split` on, below
  // `rows`; low is in shared memory. `weight` has the first PASS of these rows of `up`.
  __device__ __forceinline__ float sum_of_rows(Up (&weight)[PASS], const Up* up, int split, int splits, int rows,
                                               const float* low) const {
    float sum = 0.f;
    for (int start = 0; start < rows; start += PASS * splits) {
      if (start > 0) load_rows(weight, up, start + split, splits, rows);
#pragma unroll
      for (int i = 0; i < PASS; ++i)
        if (const int row = start + split + i * splits; row < rows) sum = fmaf(low[row], to_float(weight[i]), sum);
    }
    return sum;
  }

  // This thread's channel of a head. Its gate is 1: OUTPUT multiplies y by the gates.
  __device__ __forceinline__ ChannelOfHead channel_of_head(i64 layer, int of_head) const {
    const i64 head = layer * D + of_head;
    return {args.decay[head + tid], 1.f, args.ln_x[2 * layer * D + of_head + tid],
            args.ln_x[(2 * layer + 1) * D + of_head + tid]};
  }

  // The phase MIX: computes `mixed`. A unit is 128 channels of one of the five mixes c (w k v r g); a thread has a
  // channel, and every SPLITS-th row of its matrix `up`.
  __device__ __forceinline__ void five_mixes(i64 layer) {
    const int A = int(args.A), across = (D + CHANNELS - 1) / CHANNELS, units = 5 * across;
    const int split = tid / CHANNELS, channel = tid % CHANNELS;
    Layers::wait_for_place(tile_count),
        Layers::wait_for_place(tile_count + 1);  // both places have been read: `mix` has their memory
    static_assert(sizeof(float[SPLITS][CHANNELS]) <= sizeof s.tile_sums);
    auto& mix = reinterpret_cast<float (&)[SPLITS][CHANNELS]>(s.tile_sums);
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int c = unit / across, j = unit % across * CHANNELS + channel;
      const bool inside = j < D, adds_sums = inside && split == 0;  // of the channel
      const int rows = inside ? A : 0;
      const Up* up = args.maa_up + (layer * 5 + c) * A * D + j;
      Up weight[PASS];
      load_rows(weight, up, split, SPLITS, rows);
      const float maa = adds_sums ? args.maa[(layer * 5 + c) * D + j] : 0.f;
      const float old = adds_sums ? args.att_shift[state_row(args, layer) * D + j] : 0.f;
      Word xx[1];
      const Word* const from_xx[1] = {Layers::normed_words(Layers::OF_TIME_MIX) + (adds_sums ? j : 0)};
      load_words(xx, from_xx);
#pragma unroll 1
      for (int n = tid; n < A; n += THREADS) staging[n] = Layers::take_number(args.low + c * A + n);
      settle_words(xx, from_xx, epoch);
      sync();  // `low` is in shared memory, and the previous unit's sums have been read
      mix[split][channel] = sum_of_rows(weight, up, split, SPLITS, rows, staging);
      sync();  // the sums are in shared memory
      if (!adds_sums) continue;
      float sum = maa;
#pragma unroll
      for (int i = 0; i < SPLITS; ++i) sum += mix[i][channel];
      put_word(args.mixed + c * D + j, fmaf(old - number(xx[0]), sum, number(xx[0])), epoch);
    }
  }

  // The phase TIME_MIX: computes y. A unit of work is a head; a thread has four columns of its state and every (4
  // THREADS / N)-th row, and, below N, a channel of its vectors.
  __device__ __forceinline__ void time_mix(i64 layer) {
    TimeMixScratch& scratch = *reinterpret_cast<TimeMixScratch*>(staging);
    const int N = int(args.N), W = int(args.W), H = int(args.H);
    const int splits = THREADS / N, split = tid / N, channel = tid % N;
#pragma unroll 1
    for (int h = blockIdx.x; h < H; h += gridDim.x) {
      const int at = h * N;
      S* state = args.wkv + (state_row(args, layer) * H + h) * N * N;
      const Up* up = args.decay_up + layer * W * D + at + channel;
      Up weight[PASS];
      const int rows = split < splits ? W : 0;
      load_rows(weight, up, split, splits, rows);
      ChannelOfHead own = {};
      float u = 0.f;
      if (tid < N) {
        own = channel_of_head(layer, at);
        u = args.bonus[layer * D + at + tid];
      }
      const StatePart part(state, N, tid, HOLDS_ROWS);

      Word words[4];  // k, v and r of the thread's channel, and one of decay_low
      const Word* from[4];
#pragma unroll
      for (int n = 0; n < 3; ++n) from[n] = args.kvrg_out + n * D + at + min(tid, N - 1);
      from[3] = args.decay_low + min(tid, W - 1);
      take_words(words, from, epoch);
      if (h != blockIdx.x) sync();  // the previous head's numbers have been read
      if (tid < N)
        scratch.k[tid] = number(words[0]), scratch.v[tid] = number(words[1]), scratch.r[tid] = number(words[2]),
        scratch.u[tid] = u;
      if (tid < W) scratch.low[tid] = number(words[3]);
#pragma unroll 1
      for (int w = tid + THREADS; w < W; w += THREADS) scratch.low[w] = Layers::take_number(args.decay_low + w);
      sync();  // the inputs are in shared memory

      if (split < splits)
        scratch.group_sums[split * N + channel] = sum_of_rows(weight, up, split, splits, rows, scratch.low);
      // Adds the sums of the decay, steps the state, and calls the function with each y (rwkv6/time_mix.cuh).
      time_mix_head(scratch, part, state, N, tid, own, float(args.group_eps),
                    [&](int n, float y) { put_word(args.y + at + n, y, epoch); });
    }
  }
};

template <typename T, typename S, int STAGES>
__global__ void __launch_bounds__(ALL_THREADS, 1) rwkv6_decode_few(const __grid_constant__ Args<T, S> args) {
  decode_token<DecodeFew<T, S, STAGES>, T, S, STAGES>(args);
}

// what      All layers of one token for few sequences, and its logits; every weight is read once.
// math      the phases of decode_step.cu
// shapes    as there, but what blocks hand to each other are words: xx [4, B, D], LN(x) of both mixes, then x as either
//           has left it, low [B, 5 A], mixed [5, B, D], kvrg [4, B, D], decay_low [B, W], y [B, D], activated [B, F],
//           gate [B, D]; arrived [grid], the layers that a block has seen
// grid      as there
// smem      Shared, then the staging area: the operands of D numbers of each sequence, or of `staged` where a product
//           has more
// barriers  none of the grid: a word carries the number of the layer in which it was written, and who needs it reads it
//           until that is there. A word is overwritten a layer later, by a block that has seen the work of all who read
//           it: each of them has written a word since, and every word goes into every number of the next layer. The
//           block's where a comment says what stands.
// numerics  those of decode_step.cu, and the same bits, with float32 weights; half weights are taken as they are, and
//           beside bfloat16 ones x is a sum of three bfloat16 numbers
// source    Peng et al., 2024, "Eagle and Finch", section 4; Ootomo and Yokota, 2022, for the split; NVIDIA's NCCL, for
//           data that carry their own flags
// limits    B as many as have their numbers in 8 columns: all blocks read all words, 8 bytes a number, which costs more
//           than barriers from two sequences on; D up to 8192; otherwise those of decode_step.cu
#include "rwkv6/decode_block.cuh"
#include "words.cuh"

template <typename T, typename S, int STAGES>
__device__ __noinline__ void normalise(const Args<T, S, u64>& args, Shared<STAGES>& s, i64 layer, int phase, int input,
                                       u32 epoch, bool first);
template <typename T, typename S, int STAGES>
struct DecodeFew : DecodeBlock<T, S, u64, STAGES, COLUMNS / Split<T>::PARTS> {
  typedef DecodeBlock<T, S, u64, STAGES, COLUMNS / Split<T>::PARTS> Block;
  using Block::args, Block::s, Block::staging, Block::B, Block::D, Block::tid, Block::stage, Block::parity;
  using Block::EACH, Block::PARTS, Block::SEQUENCES, Block::channels, Block::input_of, Block::row_of, Block::together;
  typedef typename Block::Channels Channels;
  typedef typename Block::Norm Norm;
  const u32 epoch;  // of what this layer writes

  __device__ __forceinline__ DecodeFew(const Args<T, S, u64>& args, Shared<STAGES>& s, u32 epoch, int next)
      : Block(args, s, next), epoch(epoch) {}

  static constexpr int WORDS = Split<T>::WORDS;
  static constexpr bool HALVES = PARTS == 3;  // whether the parts of a number are bfloat16, and not tf32
  typedef float Sums[EACH / 4][4];

  // -- numbers as words ----------------------------------------------------------------------------------------------
  static __device__ __forceinline__ u64 plain(float x) { return __float_as_uint(x); }
  static __device__ __forceinline__ float number(u64 word) { return __uint_as_float(u32(word)); }

  // As products take it: where its parts are bfloat16, these three.
  static __device__ __forceinline__ u64 operand(float x) {
    if constexpr (!HALVES) return plain(x);
    else {
      const u32 first = __float_as_uint(x), second = without_upper(first), third = without_upper(second);
      return (first >> 16 | (second & 0xffff0000u)) | u64(third >> 16) << 32;
    }
  }
  static __device__ __forceinline__ u32 without_upper(u32 x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffff0000u));
  }

  // -- the staging area: operands [B, count], or on the way there floats [B, D] at its end --------------------------
  __device__ __forceinline__ float* floats() const { return staging + (HALVES ? B * D / 2 : 0); }

  // Operands of neighbours k and k + 1 of sequence b; those of each part are a row.
  __device__ __forceinline__ void put_operands(int count, int b, int k, u64 x, u64 y) {
    if constexpr (HALVES) {
      u32* row = reinterpret_cast<u32*>(staging) + (b * PARTS * count + k) / 2;
      const u32 low[2] = {u32(x), u32(y)}, high[2] = {u32(x >> 32), u32(y >> 32)};
      row[0] = (low[0] & 0xffffu) | low[1] << 16;
      row[count / 2] = low[0] >> 16 | (low[1] & 0xffff0000u);
      row[count] = (high[0] & 0xffffu) | high[1] << 16;
    } else {
      *reinterpret_cast<float2*>(staging + b * count + k) = {number(x), number(y)};
    }
  }

  // Pairs of neighbours among numbers [first, first + count) of each sequence's K words, taken for `store(b, k, x, y)`.
  template <int EACH_THREAD, typename Store>
  __device__ __forceinline__ void take(const u64* words, int first, int count, int K, u32 epoch, const Store& store) {
    const int half = count / 2, pairs = B * half;
    const auto sequence = [&](int pair) { return B > 1 ? pair / half : 0; };
#pragma unroll 1
    for (int start = tid; start < pairs; start += EACH_THREAD * THREADS) {
      int at[EACH_THREAD];
      u64 pair[EACH_THREAD][2];
#pragma unroll
      for (int n = 0; n < EACH_THREAD; ++n) {
        const int p = min(start + n * THREADS, pairs - 1);
        at[n] = 2 * p + sequence(p) * (K - count);
      }
      take_pairs(pair, words + first, at, epoch);
#pragma unroll
      for (int n = 0; n < EACH_THREAD; ++n) {
        const int p = start + n * THREADS, b = sequence(p);
        if (p < pairs) store(b, 2 * (p - b * half), pair[n][0], pair[n][1]);
      }
    }
    sync();  // the staging area stands
  }

  // What products take of `count` numbers of each sequence.
  __device__ __forceinline__ void fetch(const u64* words, int first, int count, int K) {
    const auto store = [&](int b, int k, u64 x, u64 y) { put_operands(count, b, k, x, y); };
    if (B * count <= 8 * THREADS) take<4>(words, first, count, K, epoch, store);
    else take<7>(words, first, count, K, epoch, store);
  }

  // -- norms ---------------------------------------------------------------------------------------------------------
  // Of xx: LN(x) of a mix, and x as a mix has left it.
  __device__ __forceinline__ u64* normed_words(bool channel_mix) const { return args.xx + channel_mix * B * D; }
  __device__ __forceinline__ u64* x_words(bool channel_mix) const { return args.xx + (2 + channel_mix) * B * D; }

  // floats = x
  __device__ __forceinline__ void fetch_x(i64 layer, int phase) {
    if (layer == 0 && phase == MIX_DOWN) {
#pragma unroll 1
      for (int j = 4 * tid; j < B * D; j += 4 * THREADS) *reinterpret_cast<float4*>(floats() + j) = load4(args.x + j);
      sync();  // the staging area stands
    } else {
      const bool last_layers = phase != FFN_INPUTS;
      take<4>(x_words(last_layers), 0, D, D, epoch - last_layers, [&](int b, int k, u64 x, u64 y) {
        *reinterpret_cast<float2*>(floats() + b * D + k) = {number(x), number(y)};
      });
    }
  }

  // Operands of xx + (shift - xx) maa with xx = LN(x), of which the words go to `xx` where that is not null.
  __device__ __forceinline__ void normalise(i64 layer, int phase, int input, u64* xx) {
    constexpr int MOST = 8;  // times four channels that a thread has of a sequence
    constexpr int HELD = 2;  // of them have their parameters, and the first sequence's shift, before x comes
    const Norm norm = Block::norm_of(layer, phase, input);
    const float inverse_D = 1.f / D;
    const auto shift = [&](int b, int j) {
      return norm.shift && b < B && j < D ? load4(norm.shift + row_of(b) * D + j) : float4{};
    };
    Channels held[HELD];
    float4 old[HELD];
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      const int j = 4 * (tid + n * THREADS);
      held[n] = channels(norm, j), old[n] = shift(0, j);
    }
    fetch_x(layer, phase);
    Block::measure(floats());
#pragma unroll 1
    for (int b = 0; b < B; ++b) {
      const float mean = together(s.sum, b) * inverse_D;
      const float scale = inverse_root(together(s.squares, b) * inverse_D + float(args.eps));
      float4 x[MOST], next[HELD];
#pragma unroll
      for (int n = 0; n < MOST; ++n) {
        const int j = 4 * (tid + n * THREADS);
        if (j < D) x[n] = load4(floats() + b * D + j);
        if (n < HELD) next[n] = shift(b + 1, j);
      }
      if (HALVES) sync();  // operands may take the place of these floats
#pragma unroll
      for (int n = 0; n < MOST; ++n) {
        const int j = 4 * (tid + n * THREADS);
        if (j >= D) break;
        const Channels c = n < HELD ? held[n] : channels(norm, j);
        const float4 before = n < HELD ? old[n] : shift(b, j);
        const float4 y = Block::normed(x[n], mean, scale, c);
        if (xx) {
          u64* to = xx + b * D + j;
          put_word(to, plain(y.x), epoch), put_word(to + 1, plain(y.y), epoch);
          put_word(to + 2, plain(y.z), epoch), put_word(to + 3, plain(y.w), epoch);
        }
        const float4 mixed = norm.shift ? Block::mixed(y, before, c) : y;
        put_operands(D, b, j, operand(mixed.x), operand(mixed.y));
        put_operands(D, b, j + 2, operand(mixed.z), operand(mixed.w));
      }
#pragma unroll
      for (int n = 0; n < HELD; ++n) old[n] = next[n];
    }
    sync();  // the operands stand
  }

  // -- products ------------------------------------------------------------------------------------------------------
  __device__ __forceinline__ const u64* words_of(int phase, int input) const {
    return phase == INPUTS ? args.mixed + input * B * D : phase == OUTPUT ? args.y : args.activated;
  }

  // Row m of a tile for sequence b, its sum.
  __device__ __forceinline__ void finish(i64 layer, int phase, int tile, int input, int b, int m, float sum, float xx) {
    switch (phase) {
      case MIX_DOWN:
        m += tile * ROWS;
        if (m < 5 * args.A) put_word(args.low + b * 5 * args.A + m, plain(tanhf(sum)), epoch);
        break;
      case INPUTS:
        if (input == 0) {
          m += tile * ROWS;
          if (m < args.W) put_word(args.decay_low + b * args.W + m, plain(tanhf(sum)), epoch);
        } else {
          m += (tile - tiles_of(args.W) - (input - 1) * tiles_of(D)) * ROWS;
          if (m < D) put_word(args.kvrg_out + ((input - 1) * B + b) * D + m, plain(sum), epoch);
        }
        break;
      case FFN_INPUTS:
        if (input == 0) {
          m += tile * ROWS;
          if (m < args.F) put_word(args.activated + b * args.F + m, operand(sum > 0.f ? sum * sum : 0.f), epoch);
        } else {
          m += (tile - tiles_of(args.F)) * ROWS;
          if (m < D) put_word(args.gate + b * D + m, plain(sigmoid(sum)), epoch);
        }
        break;
      case OUTPUT:
      case FFN_VALUE:
        m += tile * ROWS;
        if (m >= D) break;
        put_word(x_words(phase == FFN_VALUE) + b * D + m, plain(sum), epoch);
        args.x[b * D + m] = sum;  // for this thread itself
        if (phase == FFN_VALUE) args.ffn_shift[(layer * args.P + row_of(b)) * D + m] = xx;
        break;
      case HEAD:
        m += tile * ROWS;
        if (m < args.V) args.logits[b * args.V + m] = sum;
        break;
    }
  }

  // Numbers k on of the lane's column, of the `count` of each sequence that the staging area holds.
  __device__ __forceinline__ void load_x(u32 (&x)[WORDS], int count, int k) const {
    const int g = (tid & 31) >> 2, row = HALVES ? min(g, PARTS * B - 1) : min(g / PARTS, B - 1);
    const float* from = staging + (row * count + (k < count ? k : 0)) / (HALVES ? 2 : 1);
    if constexpr (HALVES) {
      load_words_of(x, from);
    } else {
      u32 all[EACH];
      load_words_of(all, from);
      Split<T>::part(x, all, g % PARTS);
    }
  }
  template <int N> static __device__ __forceinline__ void load_words_of(u32 (&x)[N], const float* from) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = load4(from + i);
      x[i] = __float_as_uint(four.x), x[i + 1] = __float_as_uint(four.y);
      x[i + 2] = __float_as_uint(four.z), x[i + 3] = __float_as_uint(four.w);
    }
  }

  // The next stage's 16 rows by columns k on.
  __device__ __forceinline__ void multiply_slot(Sums& sums, int count, int k) {
    const unsigned char* row = Block::row_of_slot();
    u32 x[STEPS][WORDS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) load_x(x[step], count, k + Lane<T>::start(tid) + step * Lane<T>::STRIDE);
    barrier_wait(s.full[stage], parity);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint4* from = reinterpret_cast<const uint4*>(row + step * (PIECE / STEPS));
      Split<T>::multiply(sums, from[0], from[8 * PITCH / 16], x[step]);
    }
    Block::release_slot();
  }

  // This block's tiles of a phase that multiplies by weights.
  __device__ __forceinline__ void products(i64 layer, int phase) {
    const Tiles tiles = share_of(args, phase);
    if (tiles.first >= tiles.stop) return;
    const bool normed = phase == MIX_DOWN || phase == FFN_INPUTS || phase == HEAD;
    if (normed) ::normalise<T, S, STAGES>(args, s, layer, phase, input_of(phase, tiles.first), epoch, tiles.first == 0);
    const int warp = tid >> 5, g = (tid & 31) >> 2, t = tid & 3;
    const int K = opaque(depth_of(args, phase));
    const int held = normed ? K : min(K, int(args.staged));  // numbers of a sequence in the staging area at a time
    int staged = normed ? 0 : -1;                            // the input whose vectors are in the staging area
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.stop; ++tile) {
      const int input = input_of(phase, tile);
      Sums sums = {};
      float before = 0.f;
      const int me = opaque(tid), b = me / ROWS, m = me % ROWS, at = b * D + tile * ROWS + m;
      const bool adds = (phase == OUTPUT || phase == FFN_VALUE) && b < B && tile * ROWS + m < D;
      const bool gated = adds && phase == FFN_VALUE;
      const u64* const side_words[2] = {args.gate + at, normed_words(true) + at};
      u64 side[2] = {};  // those of the channel mix, on their way while it multiplies
      if (adds) before = args.x[at];
#pragma unroll 1
      for (int start = 0; start < K; start += held) {
        const int count = min(held, K - start);
        if (!normed && (staged != input || held < K)) {
          if (start > 0) sync();  // what the staging area has was read
          fetch(words_of(phase, input), start, count, K);
          staged = input;
        }
        if (gated && start == 0) load_words(side, side_words);
#pragma unroll 2
        for (int k = 0; k < count; k += Lane<T>::STAGE) multiply_slot(sums, count, k);
      }
      if (gated) settle_words(side, side_words, epoch);
      auto& parts = s.parts[tile & 1];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < EACH / 4; ++n) sum += sums[n][i];
        parts[warp][2 * t + i % 2][g + i / 2 * 8] = sum;
      }
      sync();  // the warps' parts stand, those of the tile before are free
      if (b < B) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < WARPS; ++n) {
          float part = 0.f;
#pragma unroll
          for (int which = 0; which < PARTS; ++which) part += parts[n][PARTS * b + which][m];
          sum += part;
        }
        const float gate = phase == FFN_VALUE ? number(side[0]) : 1.f;
        finish(layer, phase, tile, input, b, m, fmaf(gate, sum, before), number(side[1]));
      }
    }
  }

  // -- what lies between products ------------------------------------------------------------------------------------
  static constexpr int PASS = 16;  // of a low rank's second matrix at a time
  static constexpr int OWN = (SEQUENCES + SPLITS - 1) / SPLITS;

  // A unit is 128 channels of one of the five inputs; a thread has a channel and every SPLITS-th row of `up`.
  __device__ __forceinline__ void mix(i64 layer) {
    const int A = int(args.A), across = (D + CHANNELS - 1) / CHANNELS, units = 5 * across;
    const int split = tid / CHANNELS, channel = tid % CHANNELS;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int c = unit / across, j = unit % across * CHANNELS + channel;
      const bool inside = j < D;
      const T* up = args.maa_up + (layer * 5 + c) * A * D + j;
      T weight[PASS];
      Block::load_rows(weight, up, split, SPLITS, inside ? A : 0);
      const float maa = inside ? args.maa[(layer * 5 + c) * D + j] : 0.f;
      float old[OWN] = {};  // of the sequences that this thread finishes
      u64 words[OWN + 1];   // of xx for them, and of `low`
      const u64* from[OWN + 1];
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
        const int b = split + n * SPLITS;
        from[n] = normed_words(false) + (inside && b < B ? b * D + j : 0);
        if (inside && b < B) old[n] = args.att_shift[(layer * args.P + row_of(b)) * D + j];
      }
#pragma unroll 1
      for (int n = min(tid, B * A - 1);; n += THREADS) {
        from[OWN] = args.low + (n / A * 5 + c) * A + n % A;
        take_words(words, from, epoch);
        if (tid < B * A) staging[n] = number(words[OWN]);
        if (n + THREADS >= B * A) break;
      }
      sync();  // `low` stands, and the parts of the unit before are free
      Block::mix_parts(weight, up, inside, split, channel, [&](int b) { return staging + b * A; });
      sync();  // the parts stand
      if (!inside) continue;
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
        const int b = split + n * SPLITS;
        if (b >= B) break;
        float sum = maa;
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) sum += s.mix[b][i][channel];
        const float xx = number(words[n]);
        put_word(args.mixed + (c * B + b) * D + j, operand(fmaf(old[n] - xx, sum, xx)), epoch);
      }
    }
  }

  // A unit is a head of a sequence; a thread has four columns of its state and every (4 THREADS / N)-th row.
  __device__ __forceinline__ void time_mix(i64 layer) {
    TimeMixScratch& s = this->s.time_mix;
    const int N = int(args.N), W = int(args.W), H = int(args.H), units = B * H;
    const int splits = THREADS / N, split = tid / N, channel = tid % N;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int h = unit % H, b = unit / H, of_head = h * N, at = b * D + of_head;
      S* state = args.wkv + ((layer * args.P + row_of(b)) * H + h) * N * N;
      const T* up = args.decay_up + layer * W * D + of_head + channel;
      T weight[PASS];
      Block::load_rows(weight, up, split, splits, split < splits ? W : 0);
      ChannelOfHead own = {};
      float u = 0.f;
      if (tid < N) {
        own = Block::channel_of_head(layer, of_head);
        u = args.bonus[layer * D + of_head + tid];
      }
      const StatePart part(state, N, tid, true);

      u64 words[6];  // k, v, r, the gate and LN(x) of the thread's channel, and one of decay_low
      const u64* from[6];
      const u64* kvrg = args.kvrg_out + at + min(tid, N - 1);
#pragma unroll
      for (int n = 0; n < 4; ++n) from[n] = kvrg + n * B * D;
      from[4] = normed_words(false) + at + min(tid, N - 1), from[5] = args.decay_low + b * W + min(tid, W - 1);
      take_words(words, from, epoch);
      sync();  // what was there before is free
      if (tid < N) {
        s.k[tid] = number(words[0]), s.v[tid] = number(words[1]), s.r[tid] = number(words[2]), s.u[tid] = u;
        own.gate = number(words[3]);
        args.att_shift[(layer * args.P + row_of(b)) * D + of_head + tid] = number(words[4]);
      }
      if (tid < W) s.low[tid] = number(words[5]);
#pragma unroll 1
      for (int w = tid + THREADS; w < W; w += THREADS) {
        const u64* const next[1] = {args.decay_low + b * W + w};
        u64 found[1];
        take_words(found, next, epoch);
        s.low[w] = number(found[0]);
      }
      sync();  // the inputs stand

      Block::decay_parts(s, weight, up, split, splits, channel, N);
      time_mix_head(s, part, state, N, tid, own, float(args.group_eps),
                    [&](int n, float y) { put_word(args.y + at + n, operand(y), epoch); });
    }
  }
};

// What goes on in a block need not be kept in registers meanwhile.
template <typename T, typename S, int STAGES>
__device__ __noinline__ void normalise(const Args<T, S, u64>& args, Shared<STAGES>& s, i64 layer, int phase, int input,
                                       u32 epoch, bool first) {
  DecodeFew<T, S, STAGES> block(args, s, epoch, 0);
  block.normalise(layer, phase, input, first && phase != HEAD ? block.normed_words(phase == FFN_INPUTS) : nullptr);
}

template <typename T, typename S, int STAGES>
__device__ __forceinline__ void decode(const Args<T, S, u64>& args, Shared<STAGES>& s) {
  wait_for_previous();
  const u32 before = args.arrived[blockIdx.x];
  int next = 0;  // the number of the stage that is next, and the parity of its `full`
#pragma unroll 1
  for (int n = int(args.first); n < int(args.last); ++n) {
    const int layer = n / PHASES, phase = layer == args.L ? int(HEAD) : n % PHASES;
    DecodeFew<T, S, STAGES> block(args, s, before + layer + 1, next);
    if (phase == MIX) block.mix(layer);
    else if (phase == TIME_MIX) block.time_mix(layer);
    else block.products(layer, phase);
    next = block.stage * 2 + int(block.parity);
  }
  sync();  // all threads know how many layers there were
  if (threadIdx.x == 0 && args.last > args.L * PHASES) args.arrived[blockIdx.x] = before + u32(args.L);
}

template <typename T, typename S, int STAGES>
__global__ void __launch_bounds__(THREADS + 32 * COPIERS, 1)
    rwkv6_decode_few(const __grid_constant__ Args<T, S, u64> args) {
  Shared<STAGES>& s = *reinterpret_cast<Shared<STAGES>*>(dynamic_smem());
  launch_next();
  init_stages(s);
  if (threadIdx.x < THREADS) decode<T, S, STAGES>(args, s);
  else copy_weights(args, s);
}

// what      All layers of one token for up to 8 sequences with float32 weights, and its logits; every weight is read
//           once.
// math      phases of a layer: low = tanh(maa_down mix(LN x)) | mixed_c = xx + d (maa_c + up_c low_c) |
//           decay_low = tanh(decay_down mixed_w), k v r g = W mixed | y = time mix, group norm, gate |
//           x += output y | activated = relu(key mix(LN x))^2, gate = sigmoid(receptance mix(LN x)) |
//           x += gate value activated;   after the last layer: logits = head LN x
// shapes    x xx gate y [B, D], low [B, 5 A], mixed [5, B, D], kvrg [4, B, D], decay_low [B, W],
//           activated [B, F], logits [B, V]; weights [L, n, rows, K], rows of a product padded to 16;
//           states [L, P, ...], slots [B] or null
// grid      as many blocks as multiprocessors, all at work at once unless phases [first, last) are a single one;
//           256 threads: of 16 rows of a product a warp takes every 8th step of K, a lane its neighbours in two rows;
//           and four warps that copy the weights
// smem      Shared, then what a product takes: [B, D], or all of the channel mix's activations, where `staged`
// barriers  the grid's between two phases; the block's where a comment says what stands
// numerics  tensor cores take x and weights as sums of two tf32 numbers. PAIRED, for few sequences, has x's two side
//           by side as columns. float32 sums in a fixed order. A sequence does not depend on the others, so neither on
//           B.
// source    Peng et al., 2024, "Eagle and Finch", section 4; Ootomo and Yokota, 2022, for the split
// limits    B up to 8; D and F multiples of 8, N of 4 and up to 256, W up to 512; weights aligned to
//           16 bytes; at least two blocks; sm_90a
#include "rwkv6/decode_block.cuh"
#include "words.cuh"

template <typename S, int STAGES, bool PAIRED>
__device__ __noinline__ void normalise(const Args<float, S, float>& args, Shared<STAGES, float>& s, i64 layer,
                                       int phase, int input, u32 sense, bool first);

// Sequences whose numbers fit side by side: warps that share one's norm are WARPS over these.
template <bool PAIRED> constexpr int SEQUENCES_OF = PAIRED ? COLUMNS / Split<float>::PARTS : COLUMNS;

template <typename S, int STAGES, bool PAIRED>
struct Decode : DecodeBlock<float, S, float, STAGES, SEQUENCES_OF<PAIRED>> {
  typedef DecodeBlock<float, S, float, STAGES, SEQUENCES_OF<PAIRED>> Block;
  using Block::args, Block::s, Block::staging, Block::B, Block::D, Block::tid, Block::stage, Block::parity;
  using Block::EACH, Block::PARTS, Block::SEQUENCES, Block::channels, Block::input_of, Block::row_of, Block::together;
  typedef typename Block::Channels Channels;
  typedef typename Block::Norm Norm;
  const u32 sense;  // of the barrier before this phase

  __device__ __forceinline__ Decode(const Args<float, S, float>& args, Shared<STAGES, float>& s, u32 sense, int next)
      : Block(args, s, next), sense(sense) {}

  // What the phases before wrote can be read; between their end and here is time to load what does not change.
  __device__ __forceinline__ void ready() { grid_wait<THREADS>(args.arrived, sense); }

  static constexpr int GROUP = 4;  // stages whose vectors are held
  static constexpr int WORDS = PAIRED ? Split<float>::WORDS : EACH;
  typedef float Sums[PAIRED ? 1 : PARTS][EACH / 4][4];
  static constexpr int HELD = PAIRED ? 2 : 1;  // times four channels of a norm, which a thread has under way
  static constexpr int PASS = PAIRED ? 16 : 8;

  // staging = `count` values, a multiple of four; all are on their way at once.
  __device__ __forceinline__ void fetch(const float* from, int count) {
    const int rounds = (count + 4 * THREADS - 1) / (4 * THREADS);  // blocks begin at different ones
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
      const int at = (n + int(blockIdx.x)) % rounds * (4 * THREADS) + 4 * tid;
      if (at < count) cp_async<16>(staging + at, from + at, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    sync();  // the staging area stands
  }

  // staging = xx + (shift - xx) maa with xx = LN(x), which goes to `xx` too where that is not null.
  __device__ __forceinline__ void normalise(const Norm& norm, float* xx) {
    const float inverse_D = 1.f / D;
    const auto shift = [&](int b, int j) {
      return norm.shift && j < D ? load4(norm.shift + row_of(min(b, B - 1)) * D + j) : float4{};
    };
    const auto four = [&](int b, int j, const Channels& c, const float4& old) {
      const float mean = together(s.sum, b) * inverse_D;
      const float scale = inverse_root(together(s.squares, b) * inverse_D + float(args.eps));
      const float4 x = load4(staging + b * D + j);
      float4 y = Block::normed(x, mean, scale, c);
      if (xx) *reinterpret_cast<float4*>(xx + b * D + j) = y;
      if (norm.shift) y = Block::mixed(y, old, c);
      *reinterpret_cast<float4*>(staging + b * D + j) = y;
    };
    Channels held[HELD];  // the thread's first, on their way while other blocks are waited for
    float4 old[HELD][SEQUENCES];
    const auto load = [&](int n, int j) {
      held[n] = channels(norm, j);
#pragma unroll
      for (int b = 0; b < SEQUENCES; ++b)
        if (b < B) old[n][b] = shift(b, j);
    };
    const auto finish = [&](int n, int j) {
#pragma unroll
      for (int b = 0; b < SEQUENCES; ++b)
        if (b < B && j < D) four(b, j, held[n], old[n][b]);
    };
#pragma unroll
    for (int n = 0; n < HELD; ++n) load(n, 4 * (tid + n * THREADS));
    ready();
    fetch(args.x, B * D);
    Block::measure(staging);
#pragma unroll
    for (int n = 0; n < HELD; ++n) finish(n, 4 * (tid + n * THREADS));
#pragma unroll 1
    for (int j = 4 * (tid + HELD * THREADS); j < D; j += 4 * THREADS) load(0, j), finish(0, j);
    sync();  // the staging area stands
  }

  // Where the tiles that take this input end.
  __device__ __forceinline__ int end_of(int phase, int input) const {
    if (phase == INPUTS) return tiles_of(args.W) + input * tiles_of(D);
    return phase == FFN_INPUTS && input == 0 ? tiles_of(args.F) : 1 << 30;
  }

  // Row m of a tile for sequence b: its sum, added to x where the phase adds.
  __device__ __forceinline__ void finish(i64 layer, int phase, int tile, int input, int b, int m, float sum, float xx) {
    switch (phase) {
      case MIX_DOWN:
        m += tile * ROWS;
        if (m < 5 * args.A) args.low[b * 5 * args.A + m] = tanhf(sum);
        break;
      case INPUTS:
        if (input == 0) {
          m += tile * ROWS;
          if (m < args.W) args.decay_low[b * args.W + m] = tanhf(sum);
        } else {
          m += (tile - tiles_of(args.W) - (input - 1) * tiles_of(D)) * ROWS;
          if (m < D) args.kvrg_out[((input - 1) * B + b) * D + m] = sum;
        }
        break;
      case FFN_INPUTS:
        if (input == 0) {
          m += tile * ROWS;
          if (m < args.F) args.activated[b * args.F + m] = sum > 0.f ? sum * sum : 0.f;
        } else {
          m += (tile - tiles_of(args.F)) * ROWS;
          if (m < D) args.gate[b * D + m] = sigmoid(sum);
        }
        break;
      case OUTPUT:
      case FFN_VALUE:
        m += tile * ROWS;
        if (m >= D) break;
        args.x[b * D + m] = sum;
        if (phase == FFN_VALUE) args.ffn_shift[(layer * args.P + row_of(b)) * D + m] = xx;
        break;
      case HEAD:
        m += tile * ROWS;
        if (m < args.V) args.logits[b * args.V + m] = sum;
        break;
    }
  }

  __device__ __forceinline__ const float* vectors_of(int phase, int input) const {
    switch (phase) {
      case INPUTS:
        return args.mixed + input * B * D;
      case OUTPUT:
        return args.y;
      case FFN_VALUE:
        return args.activated;
    }
    return staging;
  }

  // The next stage's 16 rows by the lane's columns. x is a part of a sequence's vector, or all of it.
  __device__ __forceinline__ void multiply_slot(Sums& sums, const u32 (&x)[STEPS][WORDS]) {
    const unsigned char* row = Block::row_of_slot();
    barrier_wait(s.full[stage], parity);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint4* from = reinterpret_cast<const uint4*>(row + step * (PIECE / STEPS));
      const uint4 above = from[0], below = from[4 * PIECE / 16];
      if constexpr (PAIRED) {
        Split<float>::multiply(sums[0], above, below, x[step]);
      } else {
#pragma unroll
        for (int which = 0; which < PARTS; ++which) {
          u32 part[Split<float>::WORDS];
          Split<float>::part(part, x[step], which);
          Split<float>::multiply(sums[which], above, below, part);
        }
      }
    }
    Block::release_slot();
  }

  // This block's tiles of a phase that multiplies by weights.
  __device__ __forceinline__ void products(i64 layer, int phase) {
    const Tiles tiles = s.tiles[phase];
    const bool normed = phase == MIX_DOWN || phase == FFN_INPUTS || phase == HEAD;
    const bool busy = tiles.first < tiles.stop;
    if (busy && normed)
      ::normalise<S, STAGES, PAIRED>(args, s, layer, phase, input_of(phase, tiles.first), sense, tiles.first == 0);
    else ready();
    if (!busy) return;
    const int warp = tid >> 5, g = (tid & 31) >> 2, t = tid & 3;
    const int K = opaque(depth_of(args, phase)), stages = (K + Lane<float>::STAGE - 1) / Lane<float>::STAGE;
    const int own = min(PAIRED ? g / PARTS : g, B - 1) * K;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.stop;) {
      const int input = input_of(phase, tile), stop = min(tiles.stop, end_of(phase, input));
      const float* vectors = vectors_of(phase, input);
      if (phase == FFN_VALUE && args.staged) {
        fetch(vectors, B * K);
        vectors = staging;
      }
      vectors += own;
      u32 x[GROUP][STEPS][WORDS] = {};
      bool fresh = true;
#pragma unroll 1
      for (; tile < stop; ++tile, fresh = false) {
        Sums sums = {};
        float before = 0.f, gate = 1.f, xx = 0.f;
        const int me = opaque(tid), b = me / ROWS, m = me % ROWS, at = b * D + tile * ROWS + m;
        if ((phase == OUTPUT || phase == FFN_VALUE) && b < B && tile * ROWS + m < D) {
          before = args.x[at];
          if (phase == FFN_VALUE) gate = args.gate[at], xx = args.xx[at];
        }
#pragma unroll 1
        for (int group = 0; group < stages; group += GROUP) {
          if (fresh || stages > GROUP) {
#pragma unroll
            for (int n = 0; n < GROUP * STEPS; ++n) {
              const int k = Lane<float>::start(tid) + group * Lane<float>::STAGE + n * Lane<float>::STRIDE;
              const float* from = vectors + (k < K ? k : 0);
              u32(&to)[WORDS] = x[n / STEPS][n % STEPS];
              u32 all[EACH];
#pragma unroll
              for (int i = 0; i < int(sizeof(all)) / 4; i += 4) {
                const float4 four = load4(from + i);
                all[i] = __float_as_uint(four.x), all[i + 1] = __float_as_uint(four.y);
                all[i + 2] = __float_as_uint(four.z), all[i + 3] = __float_as_uint(four.w);
              }
              if constexpr (PAIRED) Split<float>::part(to, all, g % PARTS);
              else
#pragma unroll
                for (int i = 0; i < WORDS; ++i) to[i] = all[i];
            }
          }
#pragma unroll
          for (int n = 0; n < GROUP; ++n) {
            if (group + n >= stages) break;
            multiply_slot(sums, x[n]);
          }
        }
        auto& parts = s.scratch.parts[tile & 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float sum = 0.f;
#pragma unroll
          for (int which = 0; which < (PAIRED ? 1 : PARTS); ++which) {
            float part = 0.f;
#pragma unroll
            for (int n = 0; n < EACH / 4; ++n) part += sums[which][n][i];
            sum += part;
          }
          parts[warp][2 * t + i % 2][g + i / 2 * 8] = sum;
        }
        sync();  // the warps' parts stand, those of the tile before are free
        if (b < B) {
          float sum = 0.f;
#pragma unroll
          for (int n = 0; n < WARPS; ++n) {
            float part = 0.f;
#pragma unroll
            for (int which = 0; which < (PAIRED ? PARTS : 1); ++which)
              part += parts[n][PAIRED ? PARTS * b + which : b][m];
            sum += part;
          }
          finish(layer, phase, tile, input, b, m, fmaf(gate, sum, before), xx);
        }
      }
    }
  }

  // A unit is 128 channels of one of the five inputs; a thread has a channel and every SPLITS-th row of `up`.
  __device__ __forceinline__ void mix(i64 layer) {
    const int A = int(args.A), across = (D + CHANNELS - 1) / CHANNELS, units = 5 * across;
    const int split = tid / CHANNELS, channel = tid % CHANNELS;
    bool first = true;
#pragma unroll 1
    for (int unit = blockIdx.x; first || unit < units; unit += gridDim.x, first = false) {
      const int c = unit / across, j = unit % across * CHANNELS + channel;
      const float* up = args.maa_up + (layer * 5 + c) * A * D + j;
      float weight[PASS];
      float maa = 0.f;
      const bool inside = unit < units && j < D;
      Block::load_rows(weight, up, split, SPLITS, inside ? A : 0);
      if (inside) maa = args.maa[(layer * 5 + c) * D + j];
      if (first) ready();
      else sync();  // the parts of the unit before are free
      if (unit >= units) break;
      float xx = 0.f, old = 0.f;  // of the first sequence that this thread finishes
      const auto vectors = [&](int b) {
        xx = args.xx[b * D + j], old = args.att_shift[(layer * args.P + row_of(b)) * D + j];
      };
      if (inside && split < B) vectors(split);
      Block::mix_parts(weight, up, inside, split, channel, [&](int b) { return args.low + (b * 5 + c) * A; });
      sync();  // the parts stand
      if (!inside) continue;
      for (int b = split; b < B; b += SPLITS) {
        float sum = maa;
#pragma unroll
        for (int n = 0; n < SPLITS; ++n) sum += s.scratch.mix[b][n][channel];
        if (b > split) vectors(b);
        args.mixed[(c * B + b) * D + j] = fmaf(old - xx, sum, xx);
      }
    }
  }

  // A unit is a head of a sequence; a thread has four columns of its state and every (4 THREADS / N)-th row.
  __device__ __forceinline__ void time_mix(i64 layer) {
    TimeMixScratch& s = this->s.scratch.time_mix;
    const int N = int(args.N), W = int(args.W), H = int(args.H), units = B * H;
    const int splits = THREADS / N, split = tid / N, channel = tid % N;
    bool first = true;
#pragma unroll 1
    for (int unit = blockIdx.x; first || unit < units; unit += gridDim.x, first = false) {
      const bool busy = unit < units;
      const int h = unit % H, b = busy ? unit / H : 0, of_head = h * N, at = b * D + of_head;
      S* state = args.wkv + ((layer * args.P + row_of(b)) * H + h) * N * N;
      const float* up = args.decay_up + layer * W * D + of_head + channel;
      float weight[PASS];
      Block::load_rows(weight, up, split, splits, busy && split < splits ? W : 0);
      ChannelOfHead own = {};
      float u = 0.f;
      if (busy && tid < N) {
        own = Block::channel_of_head(layer, of_head);
        u = args.bonus[layer * D + of_head + tid];
      }
      const StatePart part(state, N, tid, busy);
      if (first) ready();
      else sync();  // what the head before left is free
      if (!busy) break;

      if (tid < N) {
        const float* kvrg = args.kvrg_out + at + tid;
        s.k[tid] = kvrg[0];
        s.v[tid] = kvrg[B * D];
        s.r[tid] = kvrg[2 * B * D];
        s.u[tid] = u;
        own.gate = silu(kvrg[3 * B * D]);
        args.att_shift[(layer * args.P + row_of(b)) * D + of_head + tid] = args.xx[at + tid];
      }
      for (int w = tid; w < W; w += THREADS) s.low[w] = args.decay_low[b * W + w];
      sync();  // the inputs stand

      Block::decay_parts(s, weight, up, split, splits, channel, N);
      time_mix_head(s, part, state, N, tid, own, float(args.group_eps), [&](int n, float y) { args.y[at + n] = y; });
    }
  }
};

// What goes on in a block need not be kept in registers meanwhile.
template <typename S, int STAGES, bool PAIRED>
__device__ __noinline__ void normalise(const Args<float, S, float>& args, Shared<STAGES, float>& s, i64 layer,
                                       int phase, int input, u32 sense, bool first) {
  Decode<S, STAGES, PAIRED> block(args, s, sense, 0);
  block.normalise(block.norm_of(layer, phase, input), first ? args.xx : nullptr);
}

// Phases one by one. `next` is the number of the next stage, and the parity of its `full`.
template <typename S, int STAGES, bool PAIRED>
__device__ __forceinline__ int products(const Args<float, S, float>& args, Shared<STAGES, float>& s, int layer,
                                        int phase, u32 sense, int next) {
  Decode<S, STAGES, PAIRED> block(args, s, sense, next);
  block.products(layer, phase);
  return block.stage * 2 + int(block.parity);
}
template <typename S, int STAGES, bool PAIRED>
__device__ __forceinline__ void mix(const Args<float, S, float>& args, Shared<STAGES, float>& s, int layer, u32 sense) {
  Decode<S, STAGES, PAIRED>(args, s, sense, 0).mix(layer);
}
template <typename S, int STAGES, bool PAIRED>
__device__ __forceinline__ void time_mix(const Args<float, S, float>& args, Shared<STAGES, float>& s, int layer,
                                         u32 sense) {
  Decode<S, STAGES, PAIRED>(args, s, sense, 0).time_mix(layer);
}

template <typename S, int STAGES, bool PAIRED>
__device__ __forceinline__ void decode(const Args<float, S, float>& args, Shared<STAGES, float>& s) {
  wait_for_previous();
  u32 sense = barrier_sense(args.arrived);
  int next = 0;
#pragma unroll 1
  for (int n = int(args.first); n < int(args.last); ++n) {
    const int layer = n / PHASES, phase = layer == args.L ? int(HEAD) : n % PHASES;
    if (n > args.first) grid_arrive<THREADS>(args.arrived);
    const u32 before = n > args.first ? sense : NO_BARRIER;
    if (phase == MIX) mix<S, STAGES, PAIRED>(args, s, layer, before);
    else if (phase == TIME_MIX) time_mix<S, STAGES, PAIRED>(args, s, layer, before);
    else next = products<S, STAGES, PAIRED>(args, s, layer, phase, before, next);
    if (n > args.first) sense = next_sense(sense);
  }
}

template <typename S, int STAGES, bool PAIRED>
__global__ void __launch_bounds__(THREADS + 32 * COPIERS<float>, 1)
    rwkv6_decode_step(const __grid_constant__ Args<float, S, float> args) {
  Shared<STAGES, float>& s = *reinterpret_cast<Shared<STAGES, float>*>(dynamic_smem());
  launch_next();
  init_stages(args, s);
  if (threadIdx.x < THREADS) decode<S, STAGES, PAIRED>(args, s);
  else copy_weights(args, s);
}

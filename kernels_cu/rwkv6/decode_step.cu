// what      All layers of one token for up to 8 sequences, and its logits; every weight is read once.
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
// smem      Shared, then [B, D], or [B, F] where `staged`: what a product takes
// barriers  the grid's between two phases; the block's where a comment says what stands
// numerics  tensor cores take x as a sum: of three bfloat16 numbers, or else two of tf32, as float32 weights; half
//           weights are taken as they are. PAIRED, for few sequences, has the numbers side by side as columns.
//           float32 sums in a fixed order. A sequence does not depend on the others, so neither on B.
// source    Peng et al., 2024, "Eagle and Finch", section 4; Ootomo and Yokota, 2022, for the split
// limits    B up to 8; D and F multiples of 8, N of 4 and up to 256, W up to 512; weights aligned to 16 bytes; at
//           least two blocks; sm_90a
//
// The copying warps go through all phases to the last one's end, as far ahead as there are slots: while the others
// wait for other blocks, their next weights arrive. Few copies at a time are under way, since whatever else crosses
// the memory queues behind them.
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 16, COLUMNS = 8;
constexpr int COPIERS = 4;                                           // warps that have the weights copied
constexpr int FLIGHT = 2;                                            // slots asked for and not yet come
constexpr int STEPS = 2, GROUP = 4;                                  // steps a slot, slots whose vectors are held
constexpr int PIECE = STEPS * THREADS / 8 * 16, PITCH = PIECE + 64;  // bytes of a row in a slot; no bank conflicts
constexpr int CHANNELS = 128, SHARES = THREADS / CHANNELS;           // of a unit of the mix
constexpr int MAX_N = 256, MAX_W = 512;

enum Phase : int { MIX_DOWN, MIX, INPUTS, TIME_MIX, OUTPUT, FFN_INPUTS, FFN_VALUE, PHASES, HEAD = PHASES };

template <typename T> struct Args {
  const T *maa_down, *maa_up, *decay_down, *decay_up, *kvrg, *output, *ffn_key, *ffn_receptance, *ffn_value, *head;
  const float *ln1, *ln2, *ln_x, *ln_out, *maa_x, *maa, *ffn_maa, *decay, *bonus;
  float *att_shift, *wkv, *ffn_shift;
  const i64* slots;  // or null: sequence b has row b of the states
  float *x, *xx, *low, *mixed, *kvrg_out, *decay_low, *y, *activated, *gate, *logits;
  u32* arrived;
  i64 L, B, P, D, H, N, A, W, F, V, staged, first, last;
  double eps, group_eps;
};

struct TimeMixScratch {
  float k[MAX_N], v[MAX_N], r[MAX_N], u[MAX_N], decay[MAX_N], low[MAX_W];
  float parts[4 * THREADS];  // [., N], of the decay, then of o
  float sum[WARPS], squares[WARPS];
};

template <int SLOTS> struct Shared {
  unsigned char ring[SLOTS][ROWS][PITCH];
  Barrier full[SLOTS], empty[SLOTS];
  float mean[COLUMNS], scale[COLUMNS];
  union {
    float parts[2][WARPS][COLUMNS][ROWS + 1];
    float mix[COLUMNS][SHARES][CHANNELS];
    TimeMixScratch time_mix;
  };
};

// This block's share of a phase's tiles of 16 rows.
struct Tiles {
  int first, stop;
};

__device__ __forceinline__ int tiles_of(i64 rows) { return int(rows + ROWS - 1) / ROWS; }

__device__ __forceinline__ Tiles share(int tiles, u32 block, u32 blocks) {
  return {int(tiles * block / blocks), int(tiles * (block + 1) / blocks)};
}

template <typename T> __device__ __forceinline__ Tiles share_of(const Args<T>& args, int phase) {
  const u32 block = blockIdx.x, blocks = gridDim.x;
  const int D = tiles_of(args.D), F = tiles_of(args.F);
  switch (phase) {
    case MIX_DOWN:
      return share(tiles_of(5 * args.A), block, blocks);
    case INPUTS:
      return share(tiles_of(args.W) + 4 * D, block, blocks);
    case OUTPUT:
    case FFN_VALUE:
      return share(D, block, blocks);
    case FFN_INPUTS: {  // no block has tiles of both, and so two normed inputs
      const u32 keys = max(1u, blocks * F / (F + D));
      if (block < keys) return share(F, block, keys);
      const Tiles tiles = share(D, block - keys, blocks - keys);
      return {F + tiles.first, F + tiles.stop};
    }
    case HEAD:
      return share(tiles_of(args.V), block, blocks);
  }
  return {0, 0};
}

template <typename T> __device__ __forceinline__ int depth_of(const Args<T>& args, int phase) {
  return int(phase == FFN_VALUE ? args.F : args.D);
}

// The first row of a tile.
template <typename T>
__device__ __forceinline__ const T* weights_of(const Args<T>& args, i64 layer, int phase, int tile) {
  const int D = tiles_of(args.D), F = tiles_of(args.F), W = tiles_of(args.W);
  const T* w = args.head;
  i64 row = tile;
  switch (phase) {
    case MIX_DOWN:
      w = args.maa_down, row += layer * tiles_of(5 * args.A);
      break;
    case INPUTS:
      if (tile < W) w = args.decay_down, row += layer * W;
      else w = args.kvrg, row += layer * 4 * D - W;
      break;
    case OUTPUT:
      w = args.output, row += layer * D;
      break;
    case FFN_INPUTS:
      if (tile < F) w = args.ffn_key, row += layer * F;
      else w = args.ffn_receptance, row += layer * D - F;
      break;
    case FFN_VALUE:
      w = args.ffn_value, row += layer * D;
      break;
  }
  return w + row * ROWS * depth_of(args, phase);
}

// How a lane has its weights: 16 bytes of a row are EACH neighbours, a warp's STEP of them four lanes'.
template <typename T> struct Lane {
  static constexpr int EACH = 16 / sizeof(T), STEP = 4 * EACH, STRIDE = WARPS * STEP, SLOT = STEPS * STRIDE;

  static __device__ __forceinline__ int start(int thread) { return (thread >> 5) * STEP + (thread & 3) * EACH; }
};

// Ask for what a phase reads beside its tiles.
template <typename T> __device__ __forceinline__ void prefetch_inputs(const Args<T>& args, i64 layer, int phase) {
  const int lane = threadIdx.x & 31, row = int(args.D * 4);
  const i64 at = layer * args.D, b = lane - 2, N = args.N;
  if (blockIdx.x == 0) {
    if (phase == MIX_DOWN || phase == FFN_INPUTS) {
      const bool ffn = phase == FFN_INPUTS;
      if (lane == 0) prefetch_l2((ffn ? args.ln2 : args.ln1) + 2 * at, 2 * row);
      if (lane == 1) prefetch_l2(ffn ? args.ffn_maa + 2 * at : args.maa_x + at, ffn ? 2 * row : row);
      if (b >= 0 && b < args.B)
        prefetch_l2(
            (ffn ? args.ffn_shift : args.att_shift) + (layer * args.P + (args.slots ? args.slots[b] : b)) * args.D,
            row);
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
      for (i64 a = lane; a < args.A; a += 32)
        prefetch_l2(args.maa_up + ((layer * 5 + unit / across) * args.A + a) * args.D + first, u32(width * sizeof(T)));
    }
  } else if (phase == TIME_MIX) {
    for (i64 unit = blockIdx.x; unit < args.B * args.H; unit += gridDim.x) {
      const i64 h = unit % args.H, b = unit / args.H, state = layer * args.P + (args.slots ? args.slots[b] : b);
      for (i64 n = lane; n < N; n += 32) prefetch_l2(args.wkv + ((state * args.H + h) * N + n) * N, u32(4 * N));
      if (N % 8 == 0)
        for (i64 w = lane; w < args.W; w += 32)
          prefetch_l2(args.decay_up + (layer * args.W + w) * args.D + h * N, u32(N * sizeof(T)));
    }
  }
}

// The warps that have the weights copied, some of the 16 rows of a slot each; zeros from column K on.
template <typename T, int SLOTS> __device__ __forceinline__ void copy_weights(const Args<T>& args, Shared<SLOTS>& s) {
  constexpr int EACH = ROWS / COPIERS, ACROSS = PIECE / (32 * 16);
  const int lane = threadIdx.x & 31, copier = int(threadIdx.x - THREADS) >> 5;
  int slot = 0, latest = SLOTS - FLIGHT;  // `latest` must have come before `slot` is asked for
  u32 parity = 1;
#pragma unroll 1
  for (int n = int(args.first); n < int(args.last); ++n) {
    const int layer = n / PHASES, phase = layer == args.L ? int(HEAD) : n % PHASES, K = depth_of(args, phase);
    const Tiles tiles = share_of(args, phase);
    if (n == args.first + 1) wait_for_previous();  // who may write states and slots
    if (n > args.first && copier == 0) prefetch_inputs(args, layer, phase);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.stop; ++tile) {
      const T* rows = weights_of(args, layer, phase, tile) + i64(copier * EACH) * K;
#pragma unroll 1
      for (int k = 0; k < K; k += Lane<T>::SLOT) {
        barrier_wait(s.empty[slot], parity);
        barrier_wait(s.full[latest], parity ^ (latest < slot));
        const T* from = rows + k + lane * Lane<T>::EACH;
        unsigned char* to = s.ring[slot][copier * EACH] + 16 * lane;
        const bool whole = k + Lane<T>::SLOT <= K;
#pragma unroll
        for (int row = 0; row < EACH; ++row, from += K)
#pragma unroll
          for (int n = 0; n < ACROSS; ++n) {
            const bool inside = whole || k + (n * 32 + lane) * Lane<T>::EACH < K;
            cp_async<16>(to + row * PITCH + n * 512, inside ? from + n * 32 * Lane<T>::EACH : rows, inside);
          }
        copies_arrive(s.full[slot]);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
        if (++latest == SLOTS) latest = 0;
      }
    }
  }
}

// x as a sum of numbers that tensor cores read exactly, and 16 rows of weights by one of them: sums += w part, four
// of the lane's columns in each of the sums.
template <typename T> struct Split {
  static constexpr int EACH = Lane<T>::EACH, PARTS = 2, WORDS = EACH;

  // In tf32, the rest rounded to nearest by cutting it.
  static __device__ __forceinline__ u32 high(u32 x) { return x & 0xffffe000u; }
  static __device__ __forceinline__ u32 rest(u32 x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(high(x))) + 0x1000u;
  }
  static __device__ __forceinline__ void part(u32 (&to)[WORDS], const u32 (&x)[EACH], int which) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) to[i] = which ? rest(x[i]) : high(x[i]);
  }

  static __device__ __forceinline__ u32 weight(const uint4& w, int i) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    if constexpr (sizeof(T) == 4) return words[i];
    else return __float_as_uint(to_float(T{u16(words[i / 2] >> 16 * (i % 2))}));
  }
  static __device__ __forceinline__ void multiply(float (&sums)[EACH / 4][4], const uint4& upper, const uint4& lower,
                                                  const u32 (&x)[WORDS]) {
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      const u32 w[4] = {weight(upper, i), weight(lower, i), weight(upper, i + 1), weight(lower, i + 1)};
      const u32 pair[2] = {x[i], x[i + 1]};
      if constexpr (sizeof(T) == 4) {
        const u32 small[4] = {rest(w[0]), rest(w[1]), rest(w[2]), rest(w[3])};
        mma_tf32(sums[i / 4], small, pair);
      }
      mma_tf32(sums[i / 4], w, pair);
    }
  }
};

// In bfloat16, of which three hold a float; two neighbours a word, as the weights lie.
template <> struct Split<bf16> {
  static constexpr int EACH = 8, PARTS = 3, WORDS = 4;

  static __device__ __forceinline__ u32 rest(u32 x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffff0000u));
  }
  static __device__ __forceinline__ void part(u32 (&to)[WORDS], const u32 (&x)[EACH], int which) {
    u32 left[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      left[i] = which > 0 ? rest(x[i]) : x[i];
      if (which > 1) left[i] = rest(left[i]);
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) to[i] = left[2 * i] >> 16 | (left[2 * i + 1] & 0xffff0000u);
  }

  static __device__ __forceinline__ void multiply(float (&sums)[2][4], const uint4& upper, const uint4& lower,
                                                  const u32 (&x)[WORDS]) {
    const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
    const u32 x_first[2] = {x[0], x[1]}, x_second[2] = {x[2], x[3]};
    mma_bf16(sums[0], first, x_first);
    mma_bf16(sums[1], second, x_second);
  }
};

template <typename T, int SLOTS, bool PAIRED> struct Decode {
  const Args<T>& args;
  Shared<SLOTS>& s;
  float* const stage;
  const int B, D, tid;
  const u32 sense;  // of the barrier before this phase
  int slot;
  u32 parity;

  __device__ __forceinline__ Decode(const Args<T>& args, Shared<SLOTS>& s, u32 sense, int turn)
      : args(args),
        s(s),
        stage(reinterpret_cast<float*>(&s + 1)),
        B(opaque(int(args.B))),
        D(opaque(int(args.D))),
        tid(opaque(threadIdx.x)),
        sense(sense),
        slot(turn >> 1),
        parity(turn & 1) {}

  // The block's barrier, but for the warp that copies.
  __device__ __forceinline__ void sync() { barrier_sync(1, THREADS); }

  // What the phases before wrote can be read; between their end and here is time to load what does not change.
  __device__ __forceinline__ void ready() { grid_wait<THREADS>(args.arrived, sense); }

  __device__ __forceinline__ static float total(const float (&parts)[WARPS]) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < WARPS; ++n) sum += parts[n];
    return sum;
  }

  // The sum over the threads, the same bits in each.
  __device__ __forceinline__ float sum_of_all(float x, float (&parts)[WARPS]) {
    x = warp_sum(x);
    if ((tid & 31) == 0) parts[tid >> 5] = x;
    sync();  // the warps' sums stand
    return total(parts);
  }

  __device__ __forceinline__ i64 row_of(int b) const { return args.slots ? args.slots[b] : b; }

  // The parameters of four channels' norm and mix; of a norm, where they and the old channels lie.
  struct Channels {
    float4 weight, bias, part;
  };
  struct Norm {
    const float *ln, *maa, *shift;
  };

  __device__ __forceinline__ Channels channels(const Norm& norm, int j) const {
    if (j >= D) return {};
    return {load4(norm.ln + j), load4(norm.ln + D + j), norm.maa ? load4(norm.maa + j) : float4{}};
  }

  __device__ __forceinline__ Norm norm_of(i64 layer, int phase, int input) const {
    const i64 at = layer * D;
    Norm norm;
    norm.ln = phase == HEAD ? args.ln_out : (phase == MIX_DOWN ? args.ln1 : args.ln2) + 2 * at;
    norm.maa = phase == HEAD ? nullptr : phase == MIX_DOWN ? args.maa_x + at : args.ffn_maa + 2 * at + input * D;
    norm.shift = phase == HEAD ? nullptr : (phase == MIX_DOWN ? args.att_shift : args.ffn_shift) + at * args.P;
    return norm;
  }

  static constexpr int EACH = Lane<T>::EACH, PARTS = Split<T>::PARTS, WORDS = PAIRED ? Split<T>::WORDS : EACH;
  typedef float Sums[PAIRED ? 1 : PARTS][EACH / 4][4];
  // Of what a thread has under way, as much as the vectors leave registers for: 16 bytes of x, four channels of a
  // norm, four columns of a state, other sequences' old channels, weights of a small product.
  static constexpr int FETCHED = (PAIRED ? 32 : 16) / WORDS, HELD = PAIRED ? 2 : 1, ROWS_HELD = 4, BATCH = 4;
  static constexpr int PASS = PAIRED ? 16 : 8;

  // stage = `count` values, a multiple of four.
  __device__ __forceinline__ void fetch(const float* from, int count) {
#pragma unroll 1
    for (int first = 4 * tid; first < count; first += FETCHED * 4 * THREADS) {
      float4 fours[FETCHED];
#pragma unroll
      for (int n = 0; n < FETCHED; ++n)
        if (first + n * 4 * THREADS < count) fours[n] = load4(from + first + n * 4 * THREADS);
#pragma unroll
      for (int n = 0; n < FETCHED; ++n)
        if (first + n * 4 * THREADS < count) *reinterpret_cast<float4*>(stage + first + n * 4 * THREADS) = fours[n];
    }
    sync();  // the stage stands
  }

  // The mean and the scale of each sequence's x in the stage: a warp has one.
  __device__ __forceinline__ void measure() {
    const int b = tid >> 5, lane = tid & 31;
    if (b >= B) return;
    const float inverse_D = 1.f / D;
    float sum = 0.f, squares = 0.f;
#pragma unroll 4
    for (int j = 4 * lane; j < D; j += 4 * 32) {
      const float4 x = load4(stage + b * D + j);
      sum += (x.x + x.y) + (x.z + x.w);
    }
    const float mean = warp_sum(sum) * inverse_D;
#pragma unroll 4
    for (int j = 4 * lane; j < D; j += 4 * 32) {
      const float4 x = load4(stage + b * D + j), y = {x.x - mean, x.y - mean, x.z - mean, x.w - mean};
      squares += (y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w);
    }
    const float scale = inverse_root(warp_sum(squares) * inverse_D + float(args.eps));
    if (lane == 0) s.mean[b] = mean, s.scale[b] = scale;
  }

  // stage = xx + (shift - xx) maa with xx = LN(x), which goes to `xx` too where that is not null.
  __device__ __forceinline__ void normalise(const Norm& norm, float* xx) {
    const int first = 4 * tid;
    const auto shift = [&](int b, int j) {
      return norm.shift && j < D ? load4(norm.shift + row_of(b) * D + j) : float4{};
    };
    const auto four = [&](int b, int j, const Channels& c, const float4& old) {
      const float mean = s.mean[b], scale = s.scale[b];
      const float4 x = load4(stage + b * D + j);
      float4 y = {fmaf((x.x - mean) * scale, c.weight.x, c.bias.x), fmaf((x.y - mean) * scale, c.weight.y, c.bias.y),
                  fmaf((x.z - mean) * scale, c.weight.z, c.bias.z), fmaf((x.w - mean) * scale, c.weight.w, c.bias.w)};
      if (xx) *reinterpret_cast<float4*>(xx + b * D + j) = y;
      if (norm.shift)
        y = {fmaf(old.x - y.x, c.part.x, y.x), fmaf(old.y - y.y, c.part.y, y.y), fmaf(old.z - y.z, c.part.z, y.z),
             fmaf(old.w - y.w, c.part.w, y.w)};
      *reinterpret_cast<float4*>(stage + b * D + j) = y;
    };
    fetch(args.x, B * D);
    Channels held[HELD];  // the thread's first, on their way while sums are made
    float4 old[HELD];
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      const int j = first + n * 4 * THREADS;
      held[n] = channels(norm, j), old[n] = shift(0, j);
    }
    measure();
    sync();  // the means and scales stand
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      const int j = first + n * 4 * THREADS;
      if (j >= D) break;
      four(0, j, held[n], old[n]);
#pragma unroll 1
      for (int b = 1; b < B; b += BATCH) {
        float4 olds[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) olds[i] = shift(min(b + i, B - 1), j);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
          if (b + i < B) four(b + i, j, held[n], olds[i]);
      }
    }
#pragma unroll 1
    for (int j = first + HELD * 4 * THREADS; j < D; j += 4 * THREADS) {
      const Channels c = channels(norm, j);
#pragma unroll 1
      for (int b = 0; b < B; ++b) four(b, j, c, shift(b, j));
    }
    sync();  // the stage stands
  }

  // What a product's tile takes: which of the phase's inputs.
  __device__ __forceinline__ int input_of(int phase, int tile) const {
    if (phase == FFN_INPUTS) return tile >= tiles_of(args.F);
    if (phase != INPUTS || tile < tiles_of(args.W)) return 0;
    return 1 + (tile - tiles_of(args.W)) / tiles_of(D);
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
    return stage;
  }

  // The next slot's 16 rows by the lane's columns. x is a part of a sequence's vector, or all of it.
  __device__ __forceinline__ void multiply_slot(Sums& sums, const u32 (&x)[STEPS][WORDS]) {
    const int lane = tid & 31;
    const unsigned char* row = s.ring[slot][lane >> 2] + Lane<T>::start(tid) * sizeof(T);
    barrier_wait(s.full[slot], parity);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint4* from = reinterpret_cast<const uint4*>(row + step * (PIECE / STEPS));
      const uint4 above = from[0], below = from[8 * PITCH / 16];
      if constexpr (PAIRED) {
        Split<T>::multiply(sums[0], above, below, x[step]);
      } else {
#pragma unroll
        for (int which = 0; which < PARTS; ++which) {
          u32 part[Split<T>::WORDS];
          Split<T>::part(part, x[step], which);
          Split<T>::multiply(sums[which], above, below, part);
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.empty[slot]);
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }

  // This block's tiles of a phase that multiplies by weights.
  __device__ __forceinline__ void products(i64 layer, int phase) {
    const Tiles tiles = share_of(args, phase);
    const bool normed = phase == MIX_DOWN || phase == FFN_INPUTS || phase == HEAD;
    ready();
    if (tiles.first >= tiles.stop) return;
    if (normed) normalise(norm_of(layer, phase, input_of(phase, tiles.first)), tiles.first == 0 ? args.xx : nullptr);
    const int warp = tid >> 5, g = (tid & 31) >> 2, t = tid & 3;
    const int K = opaque(depth_of(args, phase)), slots = (K + Lane<T>::SLOT - 1) / Lane<T>::SLOT;
    const int own = min(PAIRED ? g / PARTS : g, B - 1) * K;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.stop;) {
      const int input = input_of(phase, tile), stop = min(tiles.stop, end_of(phase, input));
      const float* vectors = vectors_of(phase, input);
      if (phase == FFN_VALUE && args.staged) {
        fetch(vectors, B * K);
        vectors = stage;
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
        for (int group = 0; group < slots; group += GROUP) {
          if (fresh || slots > GROUP) {
#pragma unroll
            for (int n = 0; n < GROUP * STEPS; ++n) {
              u32 all[EACH];
              const int k = Lane<T>::start(tid) + group * Lane<T>::SLOT + n * Lane<T>::STRIDE;
              const float* from = vectors + (k < K ? k : 0);
#pragma unroll
              for (int i = 0; i < EACH; i += 4) {
                const float4 four = load4(from + i);
                all[i] = __float_as_uint(four.x), all[i + 1] = __float_as_uint(four.y);
                all[i + 2] = __float_as_uint(four.z), all[i + 3] = __float_as_uint(four.w);
              }
              u32(&to)[WORDS] = x[n / STEPS][n % STEPS];
              if constexpr (PAIRED) Split<T>::part(to, all, g % PARTS);
              else
#pragma unroll
                for (int i = 0; i < EACH; ++i) to[i] = all[i];
            }
          }
#pragma unroll
          for (int n = 0; n < GROUP; ++n) {
            if (group + n >= slots) break;
            multiply_slot(sums, x[n]);
          }
        }
        auto& parts = s.parts[tile & 1];
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

  // A unit is 128 channels of one of the five inputs; a thread has a channel and every SHARES-th row of `up`.
  __device__ __forceinline__ void mix(i64 layer) {
    const int A = int(args.A), across = (D + CHANNELS - 1) / CHANNELS, units = 5 * across;
    const int share = tid / CHANNELS, channel = tid % CHANNELS;
    bool first = true;
#pragma unroll 1
    for (int unit = blockIdx.x; first || unit < units; unit += gridDim.x, first = false) {
      const int c = unit / across, j = unit % across * CHANNELS + channel;
      const T* up = args.maa_up + (layer * 5 + c) * A * D + j;
      T weight[PASS];
      float maa = 0.f;
      const bool inside = unit < units && j < D;
      const auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < PASS; ++i) {
          const int a = start + share + i * SHARES;
          if (inside && a < A) weight[i] = up[i64(a) * D];
        }
      };
      load(0);
      if (inside) maa = args.maa[(layer * 5 + c) * D + j];
      if (first) ready();
      else sync();  // the parts of the unit before are free
      if (unit >= units) break;
      float xx = 0.f, old = 0.f;  // of the first sequence that this thread finishes
      const auto vectors = [&](int b) {
        xx = args.xx[b * D + j], old = args.att_shift[(layer * args.P + row_of(b)) * D + j];
      };
      if (inside && share < B) vectors(share);
      for (int start = 0; start < A; start += PASS * SHARES) {
        if (start > 0) load(start);
#pragma unroll 2
        for (int b = 0; b < B; ++b) {
          const float* low = args.low + (b * 5 + c) * A;
          float part = start > 0 ? s.mix[b][share][channel] : 0.f;
#pragma unroll
          for (int i = 0; i < PASS; ++i) {
            const int a = start + share + i * SHARES;
            if (inside && a < A) part = fmaf(low[a], to_float(weight[i]), part);
          }
          s.mix[b][share][channel] = part;
        }
      }
      sync();  // the parts stand
      if (!inside) continue;
      for (int b = share; b < B; b += SHARES) {
        float sum = maa;
#pragma unroll
        for (int n = 0; n < SHARES; ++n) sum += s.mix[b][n][channel];
        if (b > share) vectors(b);
        args.mixed[(c * B + b) * D + j] = fmaf(old - xx, sum, xx);
      }
    }
  }

  // A unit is a head of a sequence; a thread has four columns of its state and every (4 THREADS / N)-th row.
  __device__ __forceinline__ void time_mix(i64 layer) {
    TimeMixScratch& s = this->s.time_mix;
    const int N = int(args.N), W = int(args.W), H = int(args.H), units = B * H;
    const int shares = THREADS / N, share = tid / N, channel = tid % N;
    bool first = true;
#pragma unroll 1
    for (int unit = blockIdx.x; first || unit < units; unit += gridDim.x, first = false) {
      const bool busy = unit < units;
      const int h = unit % H, b = busy ? unit / H : 0, of_head = h * N, at = b * D + of_head;
      const i64 head = layer * D + of_head;
      float* state = args.wkv + ((layer * args.P + row_of(b)) * H + h) * N * N;
      const T* up = args.decay_up + layer * W * D + of_head + channel;
      T weight[PASS];
      const auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < PASS; ++i) {
          const int w = start + share + i * shares;
          if (busy && share < shares && w < W) weight[i] = up[i64(w) * D];
        }
      };
      load(0);
      const float inverse_N = 1.f / N;
      float u = 0.f, z = 0.f, gain = 0.f, bias = 0.f;
      if (busy && tid < N) {
        u = args.bonus[head + tid], z = args.decay[head + tid];
        gain = args.ln_x[2 * layer * D + of_head + tid], bias = args.ln_x[(2 * layer + 1) * D + of_head + tid];
      }
      const int quads = N / 4, groups = THREADS / quads, group = tid / quads, column = tid % quads * 4;
      float4 held[ROWS_HELD] = {};  // of the state, this thread's first rows
#pragma unroll
      for (int n = 0; n < ROWS_HELD; ++n) {
        const int c = group + n * groups;
        if (busy && group < groups && c < N) held[n] = load4(state + c * N + column);
      }
      if (first) ready();
      else sync();  // what the head before left is free
      if (!busy) break;

      float gate = 0.f;
      if (tid < N) {
        const float* kvrg = args.kvrg_out + at + tid;
        s.k[tid] = kvrg[0];
        s.v[tid] = kvrg[B * D];
        s.r[tid] = kvrg[2 * B * D];
        s.u[tid] = u;
        gate = kvrg[3 * B * D];
        args.att_shift[(layer * args.P + row_of(b)) * D + of_head + tid] = args.xx[at + tid];
      }
      for (int w = tid; w < W; w += THREADS) s.low[w] = args.decay_low[b * W + w];
      sync();  // the inputs stand

      if (share < shares) {
        float part = 0.f;
        for (int start = 0; start < W; start += PASS * shares) {
          if (start > 0) load(start);
#pragma unroll
          for (int i = 0; i < PASS; ++i) {
            const int w = start + share + i * shares;
            if (w < W) part = fmaf(s.low[w], to_float(weight[i]), part);
          }
        }
        s.parts[share * N + channel] = part;
      }
      sync();  // the parts of the decay stand
      if (tid < N) {
        for (int n = 0; n < shares; ++n) z += s.parts[n * N + tid];
        s.decay[tid] = decay_of(-expf(z));
      }
      sync();  // the decay stands, its parts are free

      if (group < groups) {
        const float4 v = load4(s.v + column);
        float4 o = {};
        const auto row = [&](int c, float4 S) {
          const float k = s.k[c], r = s.r[c], decay = s.decay[c], ku = k * s.u[c];
          o.x = fmaf(r, fmaf(ku, v.x, S.x), o.x);
          o.y = fmaf(r, fmaf(ku, v.y, S.y), o.y);
          o.z = fmaf(r, fmaf(ku, v.z, S.z), o.z);
          o.w = fmaf(r, fmaf(ku, v.w, S.w), o.w);
          S = {fmaf(decay, S.x, k * v.x), fmaf(decay, S.y, k * v.y), fmaf(decay, S.z, k * v.z),
               fmaf(decay, S.w, k * v.w)};
          *reinterpret_cast<float4*>(state + c * N + column) = S;
        };
#pragma unroll
        for (int n = 0; n < ROWS_HELD; ++n)
          if (group + n * groups < N) row(group + n * groups, held[n]);
#pragma unroll 2
        for (int c = group + ROWS_HELD * groups; c < N; c += groups) row(c, load4(state + c * N + column));
        *reinterpret_cast<float4*>(s.parts + group * N + column) = o;
      }
      sync();  // the parts of o stand

      float o = 0.f;
      if (tid < N)
        for (int n = 0; n < groups; ++n) o += s.parts[n * N + tid];
      const float mean = sum_of_all(o, s.sum) * inverse_N;
      const float centred = tid < N ? o - mean : 0.f;
      const float variance = sum_of_all(centred * centred, s.squares) * inverse_N;
      if (tid < N) {
        const float y = fmaf(centred * inverse_root(variance + float(args.group_eps)), gain, bias);
        args.y[at + tid] = y * gate * sigmoid(gate);
      }
    }
  }
};

// Phases one by one. `turn` is the number of the slot whose turn it is, and the parity of its `full`.
template <typename T, int SLOTS, bool PAIRED>
__device__ __forceinline__ int products(const Args<T>& args, Shared<SLOTS>& s, int layer, int phase, u32 sense,
                                        int turn) {
  Decode<T, SLOTS, PAIRED> block(args, s, sense, turn);
  block.products(layer, phase);
  return block.slot * 2 + int(block.parity);
}
template <typename T, int SLOTS, bool PAIRED>
__device__ __forceinline__ void mix(const Args<T>& args, Shared<SLOTS>& s, int layer, u32 sense) {
  Decode<T, SLOTS, PAIRED>(args, s, sense, 0).mix(layer);
}
template <typename T, int SLOTS, bool PAIRED>
__device__ __forceinline__ void time_mix(const Args<T>& args, Shared<SLOTS>& s, int layer, u32 sense) {
  Decode<T, SLOTS, PAIRED>(args, s, sense, 0).time_mix(layer);
}

template <typename T, int SLOTS, bool PAIRED>
__device__ __forceinline__ void decode(const Args<T>& args, Shared<SLOTS>& s) {
  wait_for_previous();
  u32 sense = barrier_sense(args.arrived);
  int turn = 0;
#pragma unroll 1
  for (int n = int(args.first); n < int(args.last); ++n) {
    const int layer = n / PHASES, phase = layer == args.L ? int(HEAD) : n % PHASES;
    if (n > args.first) grid_arrive<THREADS>(args.arrived);
    const u32 before = n > args.first ? sense : NO_BARRIER;
    if (phase == MIX) mix<T, SLOTS, PAIRED>(args, s, layer, before);
    else if (phase == TIME_MIX) time_mix<T, SLOTS, PAIRED>(args, s, layer, before);
    else turn = products<T, SLOTS, PAIRED>(args, s, layer, phase, before, turn);
    if (n > args.first) sense = next_sense(sense);
  }
}

template <typename T, int SLOTS, bool PAIRED>
__global__ void __launch_bounds__(THREADS + 32 * COPIERS, 1) rwkv6_decode_step(const __grid_constant__ Args<T> args) {
  Shared<SLOTS>& s = *reinterpret_cast<Shared<SLOTS>*>(dynamic_smem());
  launch_next();
  if (threadIdx.x < SLOTS) {
    barrier_init(s.full[threadIdx.x], 32 * COPIERS);
    barrier_init(s.empty[threadIdx.x], WARPS);
  }
  __syncthreads();  // the barriers stand
  if (threadIdx.x < THREADS) decode<T, SLOTS, PAIRED>(args, s);
  else copy_weights(args, s);
}

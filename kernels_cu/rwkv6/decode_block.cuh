// what      Functions of a block of a decoding step (decode_few.cu): norms, access to the stages of weights, parts of
//           the second products of a low rank.
// smem      Shared, then the staging area
// barriers  named barrier 1 of the threads that compute; a comment at each says what is complete
#include "rwkv6/decode_split.cuh"

template <typename T, typename S, int STAGES> struct DecodeBlock {
  typedef typename Args<T, S>::Up Up;
  static constexpr int EACH = Lane<T>::EACH, PARTS = Split<T>::PARTS;

  const Args<T, S>& args;
  Shared<STAGES>& s;
  float* const staging;
  const int D, tid;
  int stage;  // the next stage of weights, and the parity of its barrier `full`
  u32 parity;

  __device__ __forceinline__ DecodeBlock(const Args<T, S>& args, Shared<STAGES>& s, int next)
      : args(args),
        s(s),
        staging(reinterpret_cast<float*>(&s + 1)),
        D(opaque(int(args.D))),
        tid(opaque(threadIdx.x)),
        stage(next >> 1),
        parity(next & 1) {}

  // The sequence's row of the states.
  __device__ __forceinline__ i64 row() const { return args.slots ? args.slots[0] : 0; }

  // -- norms ---------------------------------------------------------------------------------------------------------
  // Channels: the parameters of a norm and its mix for four channels. Norm: where these parameters, and the previous
  // token's LN(x), are in memory.
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
    const i64 state = (layer * args.P + row()) * D;
    norm.shift = phase == HEAD ? nullptr : (phase == MIX_DOWN ? args.att_shift : args.ffn_shift) + state;
    return norm;
  }

  // The sum of the warps' parts.
  static __device__ __forceinline__ float sum_of_parts(const float (&parts)[WARPS]) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < WARPS; ++n) sum += parts[n];
    return sum;
  }

  // Stores each warp's part of the sum of x [D] in s.sum, and of the sum of squares around the mean in s.squares.
  __device__ __forceinline__ void sum_for_norm(const float* x) {
    const int warp = tid >> 5, lane = tid & 31;
    float sum = 0.f, squares = 0.f;
#pragma unroll 4
    for (int j = 4 * tid; j < D; j += 4 * THREADS) {
      const float4 four = load4(x + j);
      sum += (four.x + four.y) + (four.z + four.w);
    }
    sum = warp_sum(sum);
    if (lane == 0) s.sum[warp] = sum;
    sync();  // the warps' sums are in shared memory
    const float mean = sum_of_parts(s.sum) * (1.f / D);
#pragma unroll 4
    for (int j = 4 * tid; j < D; j += 4 * THREADS) {
      const float4 four = load4(x + j), y = {four.x - mean, four.y - mean, four.z - mean, four.w - mean};
      squares += (y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w);
    }
    squares = warp_sum(squares);
    if (lane == 0) s.squares[warp] = squares;
    sync();  // the warps' sums of squares are in shared memory
  }

  // Four channels of LN(x), from x; and of their mix with the previous token's, `old`.
  static __device__ __forceinline__ float4 normed(const float4& x, float mean, float scale, const Channels& c) {
    return {fmaf((x.x - mean) * scale, c.weight.x, c.bias.x), fmaf((x.y - mean) * scale, c.weight.y, c.bias.y),
            fmaf((x.z - mean) * scale, c.weight.z, c.bias.z), fmaf((x.w - mean) * scale, c.weight.w, c.bias.w)};
  }
  static __device__ __forceinline__ float4 mixed(const float4& y, const float4& old, const Channels& c) {
    return {fmaf(old.x - y.x, c.part.x, y.x), fmaf(old.y - y.y, c.part.y, y.y), fmaf(old.z - y.z, c.part.z, y.z),
            fmaf(old.w - y.w, c.part.w, y.w)};
  }

  // -- products ------------------------------------------------------------------------------------------------------
  // Which of the phase's vectors a tile multiplies by.
  __device__ __forceinline__ int input_of(int phase, int tile) const {
    if (phase == FFN_INPUTS) return tile >= tiles_of(args.F);
    const int tiles = tiles_of(D), first = tile - tiles_of(args.W);  // of key, value, receptance and gate
    if (phase != INPUTS || first < 0) return 0;
    return 1 + (first >= tiles) + (first >= 2 * tiles) + (first >= 3 * tiles);
  }

  // The lane's columns of the next stage, in the first of its two rows.
  __device__ __forceinline__ const unsigned char* row_of_slot() const {
    return s.row(stage, (tid & 31) >> 2) + Lane<T>::start(tid) * sizeof(T);
  }

  __device__ __forceinline__ void next_slot() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }

  // -- second matrices of low rank: a thread has a channel and every `splits`-th row, PASS of them at a time ----------
  template <int PASS>
  __device__ __forceinline__ void load_rows(Up (&weight)[PASS], const Up* up, int first, int splits, int rows) const {
#pragma unroll
    for (int i = 0; i < PASS; ++i)
      if (first + i * splits < rows) weight[i] = up[i64(first + i * splits) * D];
  }

  // The parts of a mix's product, from `low` [A] in shared memory. `weight` has the first rows.
  template <int PASS>
  __device__ __forceinline__ void mix_parts(Up (&weight)[PASS], const Up* up, bool inside, int split, int channel,
                                            const float* low) {
    const int A = int(args.A);
    float part = 0.f;
    for (int start = 0; start < A; start += PASS * SPLITS) {
      if (start > 0) load_rows(weight, up, start + split, SPLITS, inside ? A : 0);
#pragma unroll
      for (int i = 0; i < PASS; ++i) {
        const int a = start + split + i * SPLITS;
        if (inside && a < A) part = fmaf(low[a], to_float(weight[i]), part);
      }
    }
    s.mix[split][channel] = part;
  }

  // The parts of a head's decay, from `low` in shared memory. `weight` has the first rows.
  template <int PASS>
  __device__ __forceinline__ void decay_parts(TimeMixScratch& s, Up (&weight)[PASS], const Up* up, int split,
                                              int splits, int channel, int N) const {
    const int W = int(args.W);
    if (split >= splits) return;
    float sum = 0.f;
    for (int start = 0; start < W; start += PASS * splits) {
      if (start > 0) load_rows(weight, up, start + split, splits, W);
#pragma unroll
      for (int i = 0; i < PASS; ++i) {
        const int w = start + split + i * splits;
        if (w < W) sum = fmaf(s.low[w], to_float(weight[i]), sum);
      }
    }
    s.parts[split * N + channel] = sum;
  }

  // This thread's channel of a head, without its gate.
  __device__ __forceinline__ ChannelOfHead channel_of_head(i64 layer, int of_head) const {
    const i64 head = layer * D + of_head;
    return {args.decay[head + tid], 0.f, args.ln_x[2 * layer * D + of_head + tid],
            args.ln_x[(2 * layer + 1) * D + of_head + tid]};
  }
};

// Initialises the barriers of the stages, and stores the block's tiles of every phase.
template <typename T, typename S, int STAGES>
__device__ __forceinline__ void init_stages(const Args<T, S>& args, Shared<STAGES>& s) {
  if (threadIdx.x <= PHASES) s.tiles[threadIdx.x] = share_of(args, threadIdx.x);
  if (threadIdx.x < STAGES) {
    barrier_init(s.full[threadIdx.x], ROWS);
    barrier_init(s.empty[threadIdx.x], THREADS);
  }
  if (threadIdx.x < 2) {
    barrier_init(s.summed[threadIdx.x], THREADS);
    barrier_init(s.taken[threadIdx.x], 32);
  }
  fence_async();
  __syncthreads();  // the barriers are initialised, and bulk copies see them
}

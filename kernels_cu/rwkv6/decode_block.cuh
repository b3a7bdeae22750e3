// what      Functions of a block of a decoding step in one launch: norms, and access to the stages of weights. T: the
//           type of weights; S: of the recurrent state.
// smem      Shared, then the staging area
// barriers  named barrier 1 of the threads that compute; a comment at each says what is complete
#include "rwkv6/decode_split.cuh"

// From the includes:
//   THREADS = 256 threads compute, WARPS = 8 warps
//   ROWS = 16: of a tile; PHASES: of a layer
//   Lane<T>: columns of weights of a lane; Split<T>: how numbers are split into terms
//   share_of: the block's tiles of a phase; Norm: where a norm's parameters are; sync: named barrier 1

template <typename T, typename S, int STAGES> struct DecodeBlock {
  static constexpr int EACH = Lane<T>::EACH, TERMS = Split<T>::TERMS;
  static_assert(sizeof(Shared<STAGES>) % 16 == 0, "the staging area behind it is read by 16 bytes");
  static_assert(TERMS <= sizeof(Shared<STAGES>::tile_sums[0]) / sizeof(Shared<STAGES>::tile_sums[0][0]));
  static_assert(STAGES <= THREADS && PHASES < THREADS);  // init_stages has a thread for each

  const Args<T, S>& args;
  Shared<STAGES>& s;
  float* const staging;
  const int D, tid;
  int stage;   // the place in the ring of the next stage of weights
  u32 parity;  // of that place's barrier `full`

  // next: 2 stage + parity. `opaque` hides the origin of D and tid: addresses are computed again, not held in
  // registers.
  __device__ __forceinline__ DecodeBlock(const Args<T, S>& args, Shared<STAGES>& s, int next)
      : args(args),
        s(s),
        staging(reinterpret_cast<float*>(&s + 1)),
        D(opaque(int(args.D))),
        tid(opaque(threadIdx.x)),
        stage(next >> 1),
        parity(next & 1) {}

  // -- norms ---------------------------------------------------------------------------------------------------------
  // The parameters of a norm and its mix, LN(x) + (old - LN(x)) maa, for four channels.
  struct Channels {
    float4 weight, bias, maa;
  };
  __device__ __forceinline__ Channels channels(const Norm& norm, int j) const {
    if (j >= D) return {};
    return {load4(norm.ln + j), load4(norm.ln + D + j), norm.maa ? load4(norm.maa + j) : float4{}};
  }

  // The sum of the warps' sums, the same bits in each thread.
  static __device__ __forceinline__ float sum_of_warps(const float (&sums)[WARPS]) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < WARPS; ++n) sum += sums[n];
    return sum;
  }

  // Stores each warp's sum of its numbers of x [D] in s.sum, and of their squares around the mean of x in s.squares.
  // All 256 threads call this; it ends with a barrier.
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
    const float mean = sum_of_warps(s.sum) * (1.f / D);
#pragma unroll 4
    for (int j = 4 * tid; j < D; j += 4 * THREADS) {
      const float4 y = minus(load4(x + j), {mean, mean, mean, mean});
      squares += (y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w);
    }
    squares = warp_sum(squares);
    if (lane == 0) s.squares[warp] = squares;
    sync();  // the warps' sums of squares are in shared memory
  }

  // Four channels of LN(x), from x; and of y = LN(x) mixed with the previous token's, `old`: y + (old - y) maa.
  static __device__ __forceinline__ float4 normed(const float4& x, float mean, float scale, const Channels& c) {
    const float4 y = minus(x, {mean, mean, mean, mean});
    return fma4({y.x * scale, y.y * scale, y.z * scale, y.w * scale}, c.weight, c.bias);
  }
  static __device__ __forceinline__ float4 mixed(const float4& y, const float4& old, const Channels& c) {
    return fma4(minus(old, y), c.maa, y);
  }

  // -- products ------------------------------------------------------------------------------------------------------
  // The address of the lane's columns of the next stage, in row lane / 4, the first of its two rows; the other one is
  // row lane / 4 + 8.
  __device__ __forceinline__ const unsigned char* row_of_slot() const {
    return s.row(stage, (tid & 31) >> 2) + Lane<T>::start(tid) * sizeof(T);
  }

  // Goes on to the next stage of the ring.
  __device__ __forceinline__ void next_slot() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Initialises the barriers of the stages, and stores the block's tiles of every phase; all threads call this. Arrivals:
// `full` one for each of the 16 rows that are copied, `empty` and `summed` one for each computing thread, `taken` one
// for each lane of the finishing warp.
template <typename T, typename S, int STAGES>
__device__ __forceinline__ void init_stages(const Args<T, S>& args, Shared<STAGES>& s) {
  if (threadIdx.x <= PHASES) s.tiles[threadIdx.x] = share_of(args, threadIdx.x);
  if (threadIdx.x < STAGES) {
    mbarrier_init(s.full[threadIdx.x], ROWS);
    mbarrier_init(s.empty[threadIdx.x], THREADS);
  }
  if (threadIdx.x < 2) {
    mbarrier_init(s.summed[threadIdx.x], THREADS);
    mbarrier_init(s.taken[threadIdx.x], 32);
  }
  fence_proxy_async();
  __syncthreads();  // the barriers are initialised, and bulk copies see them
}

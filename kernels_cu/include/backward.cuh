// what      What the two backward passes share: how a block's threads divide the work, the tokens at hand, and the
//           gradient of the weights of their pairs.
// math      dA_ij = do_i . v_j
// shapes    a warp holds 16 channels by 64 columns of the state: four warps, one below the other, are a group, and
//           groups stand side by side. Outside of products SHARE threads, neighbours in a warp, take a channel: of a
//           token's pairs each takes every SHARE-th partner, of the tokens themselves each has OWN in a row.
// numerics  half data are tf32 numbers as they are, so this product is exact but for its sums
#include "product.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "subchunk.cuh"
#include "tensor.cuh"

constexpr int BK = 64;       // channels a block
constexpr int COLUMNS = 64;  // of the state, a warp
template <int BV> constexpr int THREADS = 2 * BV;
template <int BV> constexpr int WARPS = BV / 16;
template <int BV> constexpr int GROUPS = BV / COLUMNS;
template <int BV> constexpr int SHARE = BV / 32;
template <int BV> constexpr int OWN = SUB / SHARE<BV>;

// Who a thread is; `opaque`, so that what follows from it takes no register from one sub-chunk to the next.
template <int BV> struct Role {
  int thread = opaque(threadIdx.x);
  int warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
  int rows = 16 * (warp % 4), group = warp / 4;                                   // of the state
  int c = thread / SHARE<BV>, part = thread % SHARE<BV>, first = part * OWN<BV>;  // its channel and tokens
};

template <typename T, typename G, int BV> struct alignas(16) Incoming {
  T q[SUB * BK];    // [16, BK]
  T k[SUB * BK];    // [16, BK]
  G g[SUB * BK];    // [16, BK]
  T v[SUB * BV];    // [16, BV]
  T do_[SUB * BV];  // [16, BV]
};

template <int BV> struct alignas(16) SubChunk {
  float q[SUB * LD<BK>];                 // [16, BK]
  float k[SUB * LD<BK>];                 // [16, BK]
  float a[SUB * LD<BK>];                 // [16, BK], decays
  float v[SUB * LD<BV>];                 // [16, BV]
  float do_[SUB * LD<BV>];               // [16, BV]
  float read[GROUPS<BV>][SUB * LD<BK>];  // [16, BK], do or v with the state, over each group's columns
  float dA[SUB * SUB];                   // [16, 16], as `pair_at` has it
  float partial[WARPS<BV>][SUB * SUB];   // [16, 16], dA over each warp's columns of V
  float total[BK];                       // the sub-chunk's whole decay
  float behind[GROUPS<BV>][BK];          // state times its gradient, over each group's columns
};

// Where weight i, j is: a thread's partners j stand side by side.
template <int BV> __device__ __forceinline__ int pair_at(int i, int j) {
  return i * SUB + OWN<BV> * (j % SHARE<BV>)+j / SHARE<BV>;
}

// The whole block: do v^T over each warp's 16 columns.
template <typename T, int BV> __device__ __forceinline__ void multiply_pairs(SubChunk<BV>& s, const Role<BV>& role) {
  float d[2][4] = {};
#pragma unroll
  for (int c = 0; c < 16; c += 8) {
    Data<T, 4> a;
    Data<T, 2> b;
    load_a(a, s.do_ + 16 * role.warp + c, LD<BV>);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_b_transposed(b, s.v + 8 * half * LD<BV> + 16 * role.warp + c, LD<BV>);
      multiply(d[half], a, b);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      s.partial[role.warp][(role.g + 8 * (x >> 1)) * SUB + 8 * half + 2 * role.t + (x & 1)] = d[half][x];
}

// The sum of those products: dA[i, j], or with BY_KEY dA[j, i], at `pair_at` of its first and second token.
template <bool BY_KEY, int BV> __device__ __forceinline__ void sum_pairs(SubChunk<BV>& s, const Role<BV>& role) {
#pragma unroll
  for (int at = role.thread; at < SUB * SUB; at += THREADS<BV>) {
    const int i = at / SUB, j = at % SUB;
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS<BV>; ++warp) sum += s.partial[warp][at];
    s.dA[BY_KEY ? pair_at<BV>(j, i) : pair_at<BV>(i, j)] = sum;
  }
}

// A warp's 16 tokens by 16 channels of a product to where the threads find their channels.
template <int BV>
__device__ __forceinline__ void put_read(SubChunk<BV>& s, const Role<BV>& role, const float (&x)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      s.read[role.group][(role.g + 8 * (n >> 1)) * LD<BK> + role.rows + 8 * half + 2 * role.t + (n & 1)] = x[half][n];
}

// The sum over the groups of that product, token i, the thread's channel.
template <int BV> __device__ __forceinline__ float read_of(const SubChunk<BV>& s, const Role<BV>& role, int i) {
  float sum = s.read[0][i * LD<BK> + role.c];
#pragma unroll
  for (int group = 1; group < GROUPS<BV>; ++group) sum += s.read[group][i * LD<BK> + role.c];
  return sum;
}

// x[0...OWN-1] <- the sums over a channel's threads of x at the thread's own tokens.
template <int BV> __device__ __forceinline__ void sum_to_owners(float (&x)[SUB], int part) {
#pragma unroll
  for (int distance = SHARE<BV> / 2, count = SUB / 2; distance > 0; distance /= 2, count /= 2) {
    const bool upper = part & distance;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const float sent = upper ? x[n] : x[n + count], kept = upper ? x[n + count] : x[n];
      x[n] = kept + __shfl_xor_sync(0xffffffffu, sent, distance);
    }
  }
}

// f(other part, its x) for all threads of the channel, in their order.
template <int BV, class F> __device__ __forceinline__ void each_part(float x, F f) {
  const int lane = threadIdx.x & 31 & ~(SHARE<BV> - 1);
#pragma unroll
  for (int part = 0; part < SHARE<BV>; ++part) f(part, __shfl_sync(0xffffffffu, x, lane + part));
}

// A channel's decays at a thread's own tokens: from the sub-chunk's start to where token i reads, from after token j to
// the sub-chunk's end, and over all of it.
template <class ReadOrder, int BV> struct Decays {
  float before[OWN<BV>], after[OWN<BV>], total = 1.f;

  __device__ __forceinline__ Decays(const SubChunk<BV>& s, const Role<BV>& role) {
    float own = 1.f, earlier = 1.f, later = 1.f;
#pragma unroll
    for (int n = 0; n < OWN<BV>; ++n) {
      const float a = s.a[(role.first + n) * LD<BK> + role.c];
      before[n] = ReadOrder::reads_before_write ? own : own * a;
      after[n] = a;
      own *= a;
    }
    each_part<BV>(own, [&](int part, float decay) {
      if (part < role.part) earlier *= decay;
      if (part > role.part) later *= decay;
      total *= decay;
    });
#pragma unroll
    for (int n = OWN<BV> - 1; n >= 0; --n) {
      const float a = after[n];
      before[n] *= earlier;
      after[n] = later;
      later *= a;
    }
  }
};

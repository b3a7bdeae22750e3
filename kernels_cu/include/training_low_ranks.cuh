// what      RWKV-7's products of low rank in a training step: the first matrix `down` of each, and which numbers of
//           the joint matrix [2, D, all] a warp has. It is all `down` side by side, then these again, each row times
//           the channel's factor maa of the product's mix. The joint matrix multiplies a token's input xx, and d: xx
//           of the token before, less xx.
#include "lanes.cuh"
#include "training.cuh"

constexpr int THREADS = 256, PRODUCTS = 4;  // PRODUCTS: the most of a layer; one that a layer lacks has R = 0

// LowRanks.LOW_RANK in backends/cupy/rwkv6_training_kernels.py declares the same members.
// down: the product's first matrix [D, R]; ddown: its gradient, in the backward pass; mix_row: which of a layer's six
// mixes the product takes, no two the same; valid also where R = 0.
template <typename T> struct LowRank {
  const T* down;
  float* ddown;
  i64 R, mix_row;
};

// What a warp computes: one channel, a row of `down`, of one product. Its lane has columns lane, lane + 32, ... of the
// product's R. Column n of the product is column first + n of the joint matrix, whose rows have `all` columns.
struct ChannelOfProduct {
  i64 channel, first = 0, all = 0;
  int product, lane;

  template <typename T>
  __device__ __forceinline__ explicit ChannelOfProduct(const LowRank<T> (&products)[PRODUCTS])
      : channel((i64(blockIdx.x) * THREADS + threadIdx.x) / (32 * PRODUCTS)),
        product(int(threadIdx.x) / 32 % PRODUCTS),
        lane(int(threadIdx.x) % 32) {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) {
      if (p < product) first += products[p].R;
      all += products[p].R;
    }
  }
};

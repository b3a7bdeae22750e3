// what      RWKV-7's products of low rank in a training step: their first matrices, and what a warp has of the joint
//           matrix of these.
#include "lanes.cuh"
#include "training.cuh"

constexpr int THREADS = 256, PRODUCTS = 4;  // PRODUCTS: the most of a layer; where it has fewer, the last has R = 0

// down: the product's first matrix [D, R]; ddown: its gradient, in the backward pass; mix_row: which of a layer's six
// mixes the product takes.
template <typename T> struct LowRank {
  const T* down;
  float* ddown;
  i64 R, mix_row;
};

// What a warp computes: a channel of a product; `lane` and every 32nd after it of the product's R columns, which are
// those from `first` on of the `all` columns of the joint matrix.
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

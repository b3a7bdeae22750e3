// what      RWKV-7's products of low rank in a training step: what the joint matrix of their first matrices is made of.
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

// The columns of the joint matrix.
template <typename T> __device__ __forceinline__ i64 sum_of_ranks(const LowRank<T> (&products)[PRODUCTS]) {
  i64 sum = 0;
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p) sum += products[p].R;
  return sum;
}

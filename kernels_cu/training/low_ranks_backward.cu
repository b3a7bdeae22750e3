// what      Backward of training/low_ranks.cu: from the gradient of the joint matrix (training_low_ranks.cuh) those of
//           all products' first matrices, and of the mixes' weights by way of that matrix. ddown is then complete. dmix
//           is not: this kernel writes it, so it comes first; later ones add what reaches k v r as mixes of their own.
// math      A product takes xx + maa d, xx a layer's normed input, d the token before less it. The joint matrix is
//           down, by which xx is multiplied, and maa down, by which d is. So, for a product's columns, ddown =
//           djoint_xx + maa djoint_d; dmaa = sum_R djoint_d down. Mixes of no product get 0
// shapes    djoint [2, D, the sum of all R]: the half of xx, then that of d; down and ddown [D, R] for each product;
//           mix and dmix [MIXES, D], a mix's weights in a row: a product's maa is row `mix_row`
// grid      rwkv7/cuda_grad.py launches a warp a channel of a product; 256 threads
// numerics  float32; sums always in the same order
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    no two products have one mix_row; a product that a layer lacks has R = 0, and its mix_row all the same
#include "training_low_ranks.cuh"

// From training_low_ranks.cuh:
//   THREADS = 256, PRODUCTS = 4
//   LowRank: down, ddown, R and mix_row of a product
//   ChannelOfProduct: what the warp computes, `channel` of `product`; all: the columns of djoint; first: the product's
//     first one

constexpr int MIXES = 6;  // w a g k v r, the order of "mix" in rwkv7/weights.py

template <typename T> struct Args {
  LowRank<T> products[PRODUCTS];
  const float* mix;
  float* dmix;
  const float* djoint;
  i64 D;
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_low_ranks_backward(const Args<T> args) {
  const ChannelOfProduct own(args.products);
  if (own.channel >= args.D) return;
  const LowRank<T>& product = args.products[own.product];
  const i64 mix_index = product.mix_row * args.D + own.channel;
  const float maa = args.mix[mix_index];
  const T* down = product.down + own.channel * product.R;
  float* ddown = product.ddown + own.channel * product.R;
  // This channel's and product's numbers in the halves of djoint.
  const float* of_xx = args.djoint + own.channel * own.all + own.first;
  const float* of_d = of_xx + args.D * own.all;
  float dmaa = 0.f;
  for (i64 n = own.lane; n < product.R; n += 32) {
    const float through_d = of_d[n];
    ddown[n] = fmaf(maa, through_d, of_xx[n]);
    dmaa = fmaf(through_d, to_float(down[n]), dmaa);
  }
  dmaa = warp_sum(dmaa);
  if (own.lane == 0) args.dmix[mix_index] = dmaa;
  // Product 0's warp of a channel, also where R = 0, writes the zeros of mixes of no product: a lane a mix.
  if (own.product > 0 || own.lane >= MIXES) return;
  bool has_product = false;  // whether a product takes the mix with the lane's number; else the lane writes its 0
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p) has_product |= args.products[p].mix_row == own.lane;
  if (!has_product) args.dmix[own.lane * args.D + own.channel] = 0.f;
}

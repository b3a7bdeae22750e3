// what      The first matrices of all of RWKV-7's products of low rank as one matrix, which multiplies a token's xx and
//           d: down^T (xx + maa d) is down^T xx + (maa down)^T d, so no mixes of these products are written.
// math      joint = (down_1 ... down_P) above (maa_1 down_1 ... maa_P down_P), maa_p a factor of every row
// shapes    down [D, R] for each product, mix [MIXES, D], of which a product has row `mix_row` as its maa; joint [2, D,
//           the sum of all R]
// grid      rwkv7/cuda_grad.py launches a warp a channel of a product; 256 threads
// numerics  maa down rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    a product that a layer lacks has R = 0, and its mix_row all the same
#include "training_low_ranks.cuh"

// From training_low_ranks.cuh:
//   THREADS = 256, PRODUCTS = 4
//   LowRank: down, R and mix_row of a product
//   ChannelOfProduct: what the warp computes, `channel` of `product`; all: the columns of joint; first: the product's
//     first one

template <typename T> struct Args {
  LowRank<T> products[PRODUCTS];
  const float* mix;
  T* joint;
  i64 D;
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_low_ranks(const Args<T> args) {
  const ChannelOfProduct own(args.products);
  if (own.channel >= args.D) return;
  const LowRank<T>& product = args.products[own.product];
  const float maa = args.mix[product.mix_row * args.D + own.channel];
  const T* down = product.down + own.channel * product.R;
  T* of_xx = args.joint + own.channel * own.all + own.first;
  T* of_d = of_xx + args.D * own.all;
  for (i64 n = own.lane; n < product.R; n += 32) {
    of_xx[n] = down[n];
    of_d[n] = from_float<T>(maa * to_float(down[n]));
  }
}

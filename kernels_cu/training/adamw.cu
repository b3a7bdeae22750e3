// what      A step of AdamW over all parameters, with the gradient clipped by its norm; and a copy of the new matrices,
//           rounded to the dtype of products, for the next step.
// math      g' = g clip / max(norm, clip), clip being the largest norm that stays (args.clip; `limit` in code); the
//           moments: first <- b1 first + (1 - b1) g', second <- b2 second + (1 - b2) g'^2;
//           w <- w (1 - rate decay) - rate first / c1 / (sqrt(second / c2) + eps), with decay only for matrices;
//           c1 = 1 - b1^n, c2 = 1 - b2^n in the n-th step
// shapes    weights gradient first second [count], of which the first `matrices` numbers are in matrices; copy
//           [matrices] or null; squares [P], whose sum is the squared norm; schedule [4]: rate, 1 - rate decay, c1, c2
// grid      training_steps.py launches any number of blocks, of 512 threads with 4 elements each: a block takes every
//           `blocks`-th run of 2048 elements
// smem      the warps' sums
// barriers  one: the warps' sums are in shared memory
// numerics  float32, the copy rounded once
// source    Loshchilov and Hutter, 2019, algorithm 2
// limits    all start on 16 bytes, count and matrices are multiples of 8 (4 would do here: of a thread's 4
//           elements all are in matrices, or none)
#include "training.cuh"

// From training.cuh:
//   block_sum: the sum over the block, by one barrier; load4, store4: four neighbours, at multiples of 16 bytes

constexpr int THREADS = 512, WARPS = THREADS / 32;

template <typename T> struct Args {
  float* weights;
  const float* gradient;
  float* first;
  float* second;
  T* copy;
  const float* squares;
  const float* schedule;
  i64 count, matrices, P, blocks;
  double clip, beta1, beta2, eps;
};

struct Shared {
  float sums[WARPS];
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_adamw(const Args<T> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  float squares = 0.f;  // this thread's; block_sum gives every thread the block's
  for (i64 p = threadIdx.x; p < args.P; p += THREADS) squares += args.squares[p];
  const float norm = sqrtf(block_sum<WARPS>(squares, s.sums)), limit = float(args.clip);
  // The gradient's factor limit / max(norm, limit). With a NaN in any gradient it is NaN, and so are all parameters.
  const float clip = limit / (norm > limit || norm != norm ? norm : limit);
  const float rate = args.schedule[0], matrix_factor = args.schedule[1], correction1 = args.schedule[2],
              correction2 = args.schedule[3];
  const float b1 = float(args.beta1), b2 = float(args.beta2), one_minus_b1 = float(1 - args.beta1),
              one_minus_b2 = float(1 - args.beta2);
  const float eps = float(args.eps);

  const auto update = [&](float& w, float& first, float& second, float gradient, float weight_factor) {
    const float clipped = gradient * clip;
    first = b1 * first + one_minus_b1 * clipped;
    second = b2 * second + one_minus_b2 * clipped * clipped;
    w = w * weight_factor - rate * (first / correction1 / (sqrtf(second / correction2) + eps));
  };
  const i64 step = 4 * args.blocks * THREADS;  // a stride: elements of all blocks at a time
  for (i64 index = 4 * (i64(blockIdx.x) * THREADS + threadIdx.x); index < args.count; index += step) {
    float4 w = load4(args.weights + index), first = load4(args.first + index), second = load4(args.second + index);
    const float4 gradient = load4(args.gradient + index);
    const float weight_factor = index < args.matrices ? matrix_factor : 1.f;
    update(w.x, first.x, second.x, gradient.x, weight_factor);
    update(w.y, first.y, second.y, gradient.y, weight_factor);
    update(w.z, first.z, second.z, gradient.z, weight_factor);
    update(w.w, first.w, second.w, gradient.w, weight_factor);
    store4(args.weights + index, w);
    store4(args.first + index, first);
    store4(args.second + index, second);
    if (args.copy && index < args.matrices) store4(args.copy + index, w);
  }
}

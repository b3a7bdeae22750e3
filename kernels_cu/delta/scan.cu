// what      The delta rules' walk forwards over prepared chunks of 32 tokens: outputs and final states. Without
//           OUTPUTS, what a segment of a sequence does to a state: from S to F S + G.
// math      S is the state before a chunk, D the decay of each channel over it. E, W, Z and Zb have a row [K] for each
//           token, B is [32, 32]; the kernels *prepare.cu make them (prepared.cuh).   Y = E S;   o = scale (W S + B v);
//           S <- D S + Z^T (v + Y), or, TWO_WRITES (RWKV-7), S <- D S + Zb^T Y + Z^T v
// shapes    v o [B, H, T, V], prepared [B, H, NC], initial and final state [N, H, K, V] float32; starts, F:
//           join_segments.cu. Without OUTPUTS: the state after a walk from zeros (a first segment: from the initial
//           state) is G, stored in `starts` in the place of the next segment; the state after a walk from the identity
//           with values of 0 is F. G of a sequence's last segment, and F of its first and last one, are not needed and
//           not computed
// grid      a block for every (segment, head, BV columns), segment slowest; a warp for every 16 columns. The blocks of
//           F's columns follow those of G's
// smem      a ring of STAGES: a prepared chunk, and its v
// barriers  one in is_whole: its threads agree whether a number is not finite; one a chunk: it has arrived, and the
//           previous chunk has been read
// numerics  S in float32 accumulators; S and v + Y (TWO_WRITES: Y) are rounded to T for products
// source    Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16, single; K <= BK; BK of 64, 128, 256; BV of 64, 128; STAGES >= 2
#include "delta/forward_walk.cuh"

// From the includes:
//   Rows x: a strided array
//   Stage: a prepared chunk, and its v; walk_forwards: walks over the chunks of a block's segment, for which it waits
//     by the function that it gets

template <typename T> struct Args {
  Rows<const T> v;
  Rows<T> o;                  // null without OUTPUTS
  Rows<const float> initial;  // null: zeros
  Rows<float> final;          // null: not wanted
  float *starts, *F;          // null if no sequence is cut into segments; F: also with OUTPUTS
  const void* prepared;       // Prepared of each chunk
  Shape shape;                // segments are sequences here
  i64 P;                      // segments of a sequence
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of v and o start on multiples of it, and are multiples long
};

template <typename T, int BK, int BV, bool TWO_WRITES, int STAGES> struct Shared {
  Stage<T, BK, BV, TWO_WRITES> stages[STAGES];
};

template <typename T, int BK, int BV, bool TWO_WRITES, int STAGES, bool OUTPUTS>
__global__ void __launch_bounds__(2 * BV, BV == 64 ? 2 : 1) delta_scan(const Args<T> args) {
  auto& stages = reinterpret_cast<Shared<T, BK, BV, TWO_WRITES, STAGES>*>(dynamic_smem())->stages;
  walk_forwards<OUTPUTS>(stages, args, blockIdx.x, [](u32, int) {});
}

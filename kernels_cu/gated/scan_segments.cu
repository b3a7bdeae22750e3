// what      Joins the segments of sequences: the state at each one's start, from what each of its parts leaves behind
//           by itself.
// math      S_0 = initial;  S_{i+1} = diag(decay_i) S_i + left_i for part i;  starts_p = S_{R p};  final = S_{P R}
// shapes    left [N, P, R, H, K, V]; decays [N, P, R, H, 2, K], whose product is decay_i, times column_decays
//           [N, P, R, H, V] where columns have gates too: then both are logarithms; starts [N, P, H, K, V]; initial,
//           final [N, H, K, V]
// grid      a block for every (sequence, head, 256 WIDTH values of K x V), sequence slowest; 256 threads, WIDTH each
// smem      none
// barriers  none
// numerics  float32; without `final` what the last segment leaves is not read
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, one after the other
// limits    WIDTH of 1, or of 4 where V is a multiple of it
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int AHEAD = 8;  // parts that are read at once: each waits for memory, none for the one before

struct Args {
  const float *left, *decays, *column_decays, *initial;  // column_decays null: ones; initial null: zeros
  float *starts, *final;                                 // final null where nobody asks
  i64 P, R, H, K, V;
};

template <int WIDTH> struct alignas(4 * WIDTH) Values {
  float x[WIDTH];
};

template <int WIDTH> __global__ void __launch_bounds__(256) gated_scan_segments(const Args args) {
  constexpr u32 TILE = 256 * WIDTH;
  const u32 size = u32(args.K * args.V), tiles = (size + TILE - 1) / TILE, H = u32(args.H), pair = blockIdx.x / tiles;
  const u32 at =
      blockIdx.x % tiles * TILE + threadIdx.x * WIDTH;  // divisions of 64 bits take longer than all else here
  const i64 h = pair % H, n = pair / H;
  const int P = int(args.P), R = int(args.R), parts = args.final ? P * R : (P - 1) * R;
  if (at >= size) return;
  const float* left = args.left + (n * P * R * args.H + h) * size + at;
  const float* decays = args.decays + (n * P * R * args.H + h) * 2 * args.K + at / u32(args.V);
  const float* column_decays =
      args.column_decays ? args.column_decays + (n * P * R * args.H + h) * args.V + at % u32(args.V) : nullptr;
  float* start = args.starts + (n * P * args.H + h) * size + at;
  Values<WIDTH> S = {};
  if (args.initial) {  // the caller's, which may begin anywhere
    const float* from = args.initial + (n * args.H + h) * size + at;
    for (int i = 0; i < WIDTH; ++i) S.x[i] = from[i];
  }
  int r = 0;
  for (int first = 0; first < parts; first += AHEAD) {
    Values<WIDTH> x[AHEAD];
    Values<WIDTH> by[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < parts) {
        x[i] = *reinterpret_cast<const Values<WIDTH>*>(left);
        for (int n = 0; n < WIDTH; ++n)
          by[i].x[n] =
              column_decays ? decay_of(decays[0] + decays[args.K] + column_decays[n]) : decays[0] * decays[args.K];
        left += args.H * size, decays += args.H * 2 * args.K;
        if (column_decays) column_decays += args.H * args.V;
      }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < parts) {
        if (r == 0) *reinterpret_cast<Values<WIDTH>*>(start) = S, start += args.H * size;
        if (++r == R) r = 0;
        // Nothing stays nothing, where gates above 0 add up to a decay that float32 does not hold.
        for (int n = 0; n < WIDTH; ++n) S.x[n] = S.x[n] == 0.f ? x[i].x[n] : fmaf(by[i].x[n], S.x[n], x[i].x[n]);
      }
  }
  *reinterpret_cast<Values<WIDTH>*>(args.final ? args.final + (n * args.H + h) * size + at : start) = S;
}

// what      Whether a segment of a sequence forgets the state before it, in Hopper's kernels of the delta rule with a
//           gate for each token and head, or none; for gradients, whether it forgets the gradient of the state after it
// math      Token t multiplies a state, and backwards in time the gradient of a state, by at most e^g_t max(1, |1 -
//           beta_t |k_t|^2|). A segment forgets if the product of these factors over the last chunks of a walk, in the
//           walk's direction, and of e^g for all gates above 0 that the walk of the sequence meets behind the segment,
//           is at most e^FORGOTTEN_NATS: so little must not grow to what counts again
// smem      s.sums: a sum for each warp
// barriers  __syncthreads: the previous sums have been read; all sums are in shared memory
// numerics  float32
// limits    sm_90a; bfloat16 or float16; K a multiple of 8, rows of k start on 16 bytes
#include "delta/sm90/scalar_chunks.cuh"
#include "lanes.cuh"

// From the includes:
//   WorkTile: the block's sequence, head and tokens; CHUNK = 32 tokens; ALL_THREADS: of a block
//   unpack: two numbers of a word as floats; FORGOTTEN_NATS = -48; tokens_of: those of a segment, in its batch row

// The gate, or beta, of a token of the segment.
template <typename T>
__device__ __forceinline__ float scalar_at(const StridedRows<const void>& from, i64 is_float32, const WorkTile& work,
                                           int token) {
  const i64 index =
      work.batch * from.batch_stride + work.head * from.head_stride + (work.start + token) * from.token_stride;
  return is_float32 ? static_cast<const float*>(from.p)[index] : to_float(static_cast<const T*>(from.p)[index]);
}

// The natural logarithm of the most by which a token multiplies a state: of its decay, and of its key's factor.
template <typename T, class Args>
__device__ __forceinline__ float log_factor(const Args& args, const WorkTile& work, int token) {
  float squares = args.lengths.p ? 1.f : 0.f;  // |k|^2; with shorter keys, normalised ones multiply by less
  const T* key = args.k_rows.row(work.batch, work.head / int(args.group), work.start + token);
#pragma unroll 8
  for (int channel = 0; channel < args.shape.K && !args.lengths.p; channel += 8) {
    const uint4 piece = *reinterpret_cast<const uint4*>(key + channel);
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (const u32 two : words) {
      const float2 x = unpack(two, T{});
      squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
    }
  }
  const float of_key = fabsf(fmaf(-scalar_at<T>(args.beta, args.wide_beta, work, token), squares, 1.f));
  return scalar_at<T>(args.g, args.wide_gate, work, token) + log2_approx(max_nan(of_key, 1.f)) / LOG2E;
}

// The chunks of a segment; the last one may have fewer than CHUNK tokens.
__device__ __forceinline__ int all_chunks(const WorkTile& work) { return (work.tokens + CHUNK - 1) / CHUNK; }

// The number of chunks at the end of a walk over the segment that suffice to forget what was before them; -1 if the
// segment does not forget. BACKWARDS: the walk goes backwards in time and ends with the segment's first chunk. All
// threads call this and get the same answer; it has barriers of the block. Beside what scalar_chunks.cuh says, S has
// sums, a number for each warp.
template <bool BACKWARDS, class Memory, class Args>
__device__ __forceinline__ int remembered_chunks(Memory& s, const Args& args, const WorkTile& work) {
  using T = typename Memory::T;
  constexpr int THREADS = ALL_THREADS<Memory::BV>, WARPS = THREADS / 32;
  static_assert(sizeof s.sums == WARPS * sizeof(float), "a sum for each warp of the block");
  if (!args.g.p) return -1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, chunks = all_chunks(work);
  const auto share = [&](float x) {  // fills s.sums with the sum of x over each warp
    x = warp_sum(x);
    __syncthreads();  // the previous sums have been read
    if (lane == 0) s.sums[warp] = x;
    __syncthreads();  // all sums are in shared memory
  };
  // First the gates alone, of all tokens: keys are many more bytes, and most segments that remember need none of them.
  float sum = 0.f;
#pragma unroll 4
  for (int token = threadIdx.x; token < work.tokens; token += THREADS)
    sum += scalar_at<T>(args.g, args.wide_gate, work, token);
  share(sum);
  float total = 0.f;
  for (const float x : s.sums) total += x;
  // NaN counts as remembering.
  if (!(total <= FORGOTTEN_NATS)) return -1;
  // Then the gates above 0 behind the segment; tokens are counted from the segment's first one on.
  const u32 n = u32(work.sequence),
            first = n % u32(args.shape.row_sequences) - n % u32(args.P);  // the sequence's first segment
  const int begin = BACKWARDS ? int(tokens_of(args.shape, first).start) - work.start : work.tokens;
  const int end = BACKWARDS ? 0 : int(tokens_of(args.shape, first + u32(args.P) - 1).stop) - work.start;
  sum = 0.f;
#pragma unroll 8
  for (int token = begin + int(threadIdx.x); token < end; token += THREADS)
    sum += max_nan(scalar_at<T>(args.g, args.wide_gate, work, token), 0.f);
  share(sum);
  total = 0.f;
  for (const float x : s.sums) total += x;
  for (int counted = 0; counted < chunks; counted += WARPS) {  // chunks before this warp's, from the walk's end
    const int number = counted + warp, token = (BACKWARDS ? number : chunks - 1 - number) * CHUNK + lane;
    share(token >= 0 && token < work.tokens ? log_factor<T>(args, work, token) : 0.f);
    for (int n = 0; n < WARPS; ++n) {
      total += s.sums[n];
      if (total <= FORGOTTEN_NATS) return counted + n + 1;
    }
  }
  return -1;
}

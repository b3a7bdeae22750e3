// what      States in the registers of warpgroups, for the Hopper backward of GLA and RWKV-6: products with them, and
//           sums over a chunk's tokens.
// numerics  A state is read in tf32, which has float32's range, or in two bfloat16 numbers, or in one float16 number.
//           What is cut off adds up in the gate's gradient from chunk to chunk, so the first pass keeps a state every
//           CHECKPOINT_EVERY tokens, from which the second begins anew. What a chunk adds to a state is a product in T,
//           whose queries or keys are two numbers in bfloat16, since what they lose does not cancel in the gate's
//           gradient.
//           float16 has nothing below 6e-8: there queries that meet a state go into products times a power of 2, by the
//           chunk's first gate, and so does C, by its largest value.
#include "gated/sm90/decays.cuh"

constexpr int CHECKPOINT_EVERY = 1024;  // tokens

// Which of the states that are kept is that before a sequence's first token; that before a multiple of
// CHECKPOINT_EVERY tokens behind it is as many further.
__device__ __forceinline__ int first_kept(const Shape& shape, const WorkTile& at) {
  return int((at.batch * shape.H + at.head) * (shape.T / CHECKPOINT_EVERY + 1)) + at.start / CHECKPOINT_EVERY;
}
// A lane's first values of one, the others THREADS apart.
template <int BK, int BV> __device__ __forceinline__ float4* kept_at(float* kept, int which) {
  return reinterpret_cast<float4*>(kept + i64(which) * (BK * BV)) + threadIdx.x;
}

// The segment of a sequence that a block of a pass has. `joined`: of three that a sequence has, a pass takes the one
// that it begins with by itself, and the others as one; so only what the two passes begin with is summarised. The long
// ones are the first half of the blocks. `pair` is the first segment's, `last` the last one's.
struct Segment : WorkTile {
  i64 last;
};
__device__ __forceinline__ WorkTile segment_at(const Shape& shape, u32 block, i64 P) {
  WorkTile at = work_tile(shape, block);
  const u32 segment = u32(at.sequence) % u32(shape.count);
  at.chunk += i64(segment / u32(P)) - segment;  // wherever a pass is cut, a chunk's number is the same
  return at;
}
template <bool BACKWARDS> __device__ __forceinline__ Segment segment_of(const Shape& shape, i64 P, bool joined) {
  const u32 H = u32(shape.H), heads = gridDim.x / 2, n = blockIdx.x % heads;
  const bool both = joined && blockIdx.x < heads;
  // Backwards first those that the other pass ended with: some of their last tokens are in L2.
  const u32 own = BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const u32 block = joined ? (n / H * 3 + (BACKWARDS ? 2 * !both : both)) * H + n % H : own;
  Segment at = {segment_at(shape, block, P), block};
  if (both) at.last += H, at.tokens += work_tile(shape, block + H).tokens;
  return at;
}

// How blocks share out segments: each has one; or, where they are whole sequences, as many blocks as the card holds
// take them in turn, so that the next one's chunks come while the last ones of the one before are computed.
struct OneEach {
  static constexpr bool in_turn = false;
};
struct InTurn {
  static constexpr bool in_turn = true;
};
__device__ __forceinline__ u32 all_segments(const Shape& shape) { return u32(shape.B * shape.count * shape.H); }
__device__ __forceinline__ int chunks_of(const WorkTile& at) { return (at.tokens + CHUNK - 1) / CHUNK; }

// Calls f(segment, how many chunks the block had before) for those that this block takes.
template <class Schedule, bool BACKWARDS, class Args, class F>
__device__ __forceinline__ void each_segment(const Args& args, F f) {
  if constexpr (!Schedule::in_turn) return f(segment_of<BACKWARDS>(args.shape, args.P, args.joined), 0);
  int chunks = 0;
#pragma unroll 1
  for (u32 block = blockIdx.x; block < all_segments(args.shape); block += gridDim.x) {
    const Segment at = {work_tile(args.shape, block), block};
    f(at, chunks);
    chunks += chunks_of(at);
  }
}

// Goes over the chunks of all that this block takes in turn; in shared memory, since registers are scarce.
template <bool BACKWARDS> struct Cursor {
  WorkTile at;
  u32 block;  // past the last one at the end
  int token;  // the chunk's first

  __device__ __forceinline__ bool at_end(const Shape& shape) const { return block >= all_segments(shape); }
  __device__ __forceinline__ void begin(const Shape& shape, u32 first) {
    for (block = first; !at_end(shape); block += gridDim.x) {
      at = work_tile(shape, block);
      token = BACKWARDS ? (chunks_of(at) - 1) * CHUNK : 0;
      if (at.tokens) return;
    }
  }
  // The chunk, and what follows it in time, as if the segment began with it.
  __device__ __forceinline__ WorkTile rest() const {
    WorkTile x = at;
    x.start += token, x.tokens -= token, x.chunk += token / CHUNK;
    return x;
  }
  __device__ __forceinline__ void next(const Shape& shape) {
    token += BACKWARDS ? -CHUNK : CHUNK;
    if (BACKWARDS ? token < 0 : token >= at.tokens) begin(shape, block + gridDim.x);
  }
};

// Where the chunks are that a warp moves, of so many on their way.
template <class Schedule, bool BACKWARDS, int COUNT> struct ChunkPlaces {};
template <bool BACKWARDS, int COUNT> struct ChunkPlaces<InTurn, BACKWARDS, COUNT> {
  WorkTile chunks[COUNT];  // nothing lies before them
  Cursor<BACKWARDS> cursor;

  __device__ __forceinline__ const WorkTile& at(int number) const { return chunks[number % COUNT]; }
  __device__ __forceinline__ void begin(const Shape& shape) {
    if ((threadIdx.x & 31) == 0) cursor.begin(shape, blockIdx.x);
    __syncwarp();  // the first one stands
  }
  // Whether there is another chunk, the number-th.
  __device__ __forceinline__ bool next(const Shape& shape, int number) {
    if (cursor.at_end(shape)) return false;
    __syncwarp();  // all lanes know that
    if ((threadIdx.x & 31) == 0) chunks[number % COUNT] = cursor.rest(), cursor.next(shape);
    __syncwarp();  // its place stands
    return true;
  }
};

template <typename T> constexpr bool NARROW = false;
template <> constexpr bool NARROW<f16> = true;

// 2^x that takes `largest` to float16's upper end, and 2^-x; 1 where it is between 2^-8 and 2^15.
struct Scale {
  float up, down;
};
__device__ __forceinline__ Scale to_range(float largest) {
  const int exponent = max(int(__float_as_uint(largest) >> 23), 14);
  if (exponent >= 127 - 8 && exponent < 127 + 15) return {1.f, 1.f};
  return {__uint_as_float(u32(267 - exponent) << 23), __uint_as_float(u32(exponent - 13) << 23)};
}

// Of two channels: what takes queries that a chunk's first gate has decayed, and what a state has of them, back into
// the range of a NARROW type, and its inverse; 1 where the gate takes less than 2^-8. far: decays from the start of a
// sub-chunk. RWKV-6's first query is not decayed.
struct QueryScale {
  float up[2], down[2];
  bool is_one;  // for all channels of the warp
};
template <class ReadOrder, typename T> __device__ __forceinline__ QueryScale scale_of_queries(const Chunk& far) {
  QueryScale s = {{1.f, 1.f}, {1.f, 1.f}, true};
  if (NARROW<T> && !ReadOrder::reads_before_write) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float first = __shfl_sync(0xffffffffu, far[0][2 * h], threadIdx.x & 28);
      // 2^90 at most: float32 still has what a state, below 2^30, is times that.
      const int own = max(int(__float_as_uint(first) >> 23), 127 - 90), exponent = own < 127 - 8 ? own : 127;
      s.up[h] = __uint_as_float(u32(254 - exponent) << 23), s.down[h] = __uint_as_float(u32(exponent) << 23);
    }
    s.is_one = !__any_sync(0xffffffffu, s.up[0] != 1.f || s.up[1] != 1.f);
  }
  return s;
}
// Whether that is not 1 for some channel of the warp, which is rare.
template <class ReadOrder, typename T> __device__ __forceinline__ bool first_gate_is_strong(const Chunk& far) {
  if (!NARROW<T> || ReadOrder::reads_before_write) return false;
  return __any_sync(0xffffffffu, (threadIdx.x & 3) == 0 && fminf(far[0][0], far[0][2]) < 0x1p-8f);
}

// S <- diag(by) S.
template <int BV> __device__ __forceinline__ void scale_state(float (&S)[BV / 2], float by0, float by1) {
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= i >> 1 & 1 ? by1 : by0;
}
template <class ReadOrder, typename T, int BV>
__device__ __forceinline__ void scale_down(float (&S)[BV / 2], const QueryScale& s) {
  if (!s.is_one) scale_state<BV>(S, s.down[0], s.down[1]);
}

// The largest magnitude of a warp's channels, or up to twice that: of sums of two, since a maximum takes twice the time
// of a sum. As bits, floats that are not negative have the order of integers.
template <int BV> __device__ __forceinline__ float largest_of(const float (&S)[BV / 2]) {
  float parts[4] = {};  // since each waits for itself
#pragma unroll
  for (int i = 0; i < BV / 4; ++i) parts[i % 4] = fmaxf(parts[i % 4], fabsf(S[2 * i]) + fabsf(S[2 * i + 1]));
  const float x = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// A chunk's tokens as read_part takes them: of every 8 columns the even ones, then the odd ones, in float32.
template <int BV> using ReadTile = Tile<float, BV>;

// Writes such a tile from one as it came; warp `warp` of WARPS.
template <int WARPS, typename T, int BV>
__device__ __forceinline__ void put_read_tile(ReadTile<BV>& to, T (&from)[BV / 64][CHUNK][64], int warp, int lane) {
  constexpr int PIECES = BV / 8, ROWS = 32 / PIECES, STEPS = 8 / ROWS;  // 8 columns each; of a warp at once; of 8 rows
  // Of 8 lanes half have a row that is 5 XOR that of the others, so that banks differ both where pieces come from and
  // where they go.
  const int row = (lane >> 2 & 1) * 5 ^ lane / (2 * PIECES) * 2, piece = lane & 3 | lane >> 1 & PIECES - 4;
  const int source = piece / 8 * CHUNK * 128 + swizzled_offset(row, piece % 8),
            target = piece / 4 * CHUNK * 128 + swizzled_offset(row, piece % 4 * 2);
#pragma unroll 1
  for (int step = warp; step < CHUNK / ROWS; step += WARPS) {
    const int down = step / STEPS * 8 * 128, flip = step % STEPS * (128 + 16);  // what other rows add, and XOR
    const uint4 x = *reinterpret_cast<const uint4*>(at_offset(from, (source ^ flip) + down));
    const float2 a = unpack<T>(x.x), b = unpack<T>(x.y), c = unpack<T>(x.z), d = unpack<T>(x.w);
    *reinterpret_cast<float4*>(at_offset(to, (target ^ flip) + down)) = {a.x, b.x, c.x, d.x};
    *reinterpret_cast<float4*>(at_offset(to, (target ^ flip ^ 16) + down)) = {a.y, b.y, c.y, d.y};
  }
}

// Part `part` of SUBCHUNKS of x[channel, token] = S tokens^T in tf32, under way. Waits for the part before, whose
// copies of S it takes the place of.
template <int BV>
__device__ __forceinline__ void read_part(Values& x, u32 (&columns)[BV / 8 / SUBCHUNKS][4], const float (&S)[BV / 2],
                                          ReadTile<BV>& tokens, int part) {
  constexpr int TILES = BV / 8 / SUBCHUNKS;
  if (part) wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m)
      columns[n][m] = __float_as_uint(CUT * S[4 * (part * TILES + n) + (m == 1 ? 2 : m == 2 ? 1 : m)]);
  const u64 b = wgmma_tile(tokens, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int tile = part * TILES + n;
    wgmma<tf32, CHUNK, false>(x, columns[n], b + (tile / 4 * CHUNK * 128 + tile % 4 * 32) / 16, tile > 0);
  }
  wgmma_commit();
}

// The same in two bfloat16 numbers of S, of tokens as they came; `put` is given the first ones of 16 columns.
template <int BV, class Put>
__device__ __forceinline__ void read_part(Values& x, u32 (&columns)[BV / 8 / SUBCHUNKS][4], const float (&S)[BV / 2],
                                          bf16 (&tokens)[BV / 64][CHUNK][64], int part, Put put) {
  constexpr int TILES = BV / 16 / SUBCHUNKS;
  if (part) wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float* from = S + 8 * (part * TILES + n);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      columns[2 * n][m] = pack<bf16>(from[2 * m], from[2 * m + 1]);
      columns[2 * n + 1][m] = remainder_of(columns[2 * n][m], from[2 * m], from[2 * m + 1]);
    }
    put(part * TILES + n, columns[2 * n]);
  }
  const u64 b = wgmma_tile(tokens, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < 2 * TILES; ++n) {
    const int tile = part * TILES + n / 2;
    wgmma<bf16, CHUNK, false>(x, columns[n], b + (tile / 4 * CHUNK * 128 + tile % 4 * 32) / 16, part + n > 0);
  }
  wgmma_commit();
}

// The same in one float16 number of S, which is in its range. Waits for the part before that one.
template <int BV, class Put>
__device__ __forceinline__ void read_part(Values& x, u32 (&columns)[BV / 8 / SUBCHUNKS][4], const float (&S)[BV / 2],
                                          f16 (&tokens)[BV / 64][CHUNK][64], int part, Put put) {
  constexpr int TILES = BV / 16 / SUBCHUNKS;
  const int first = part % 2 * TILES;
  if (part > 1) wgmma_wait<1>();
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float* from = S + 8 * (part * TILES + n);
#pragma unroll
    for (int m = 0; m < 4; ++m) columns[first + n][m] = pack<f16>(from[2 * m], from[2 * m + 1]);
    put(part * TILES + n, columns[first + n]);
  }
  const u64 b = wgmma_tile(tokens, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int tile = part * TILES + n;
    wgmma<f16, CHUNK, false>(x, columns[first + n], b + (tile / 4 * CHUNK * 128 + tile % 4 * 32) / 16, part + n > 0);
  }
  wgmma_commit();
}

// x[channel, token] = S tokens^T in tf32, under way, all at once: where there are registers for a copy of S.
template <int BV>
__device__ __forceinline__ void start_read(Values& x, const float (&S)[BV / 2], ReadTile<BV>& tokens) {
  u32 columns[BV / 8][4];
#pragma unroll
  for (int n = 0; n < BV / 8; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m) columns[n][m] = __float_as_uint(CUT * S[4 * n + (m == 1 ? 2 : m == 2 ? 1 : m)]);
  const u64 b = wgmma_tile(tokens, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < BV / 8; ++n)
    wgmma<tf32, CHUNK, false>(x, columns[n], b + (n / 4 * CHUNK * 128 + n % 4 * 32) / 16, n > 0);
  wgmma_commit();
}

// S += x^T tokens, under way; x the warp's channels.
template <typename T, int BV>
__device__ __forceinline__ void start_write(float (&S)[BV / 2], const Operand& x, T (&tokens)[BV / 64][CHUNK][64]) {
  const u64 b = wgmma_tile(tokens, CHUNK * 128, 1024);
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) wgmma<T, BV, true>(S, x[s], b + s * 16 * 128 / 16, true);
}

// Queries or keys on their way to a state: rounded to T, and for bfloat16 what that leaves over, rounded likewise.
template <typename T> struct StateOperand {
  Operand first, rest;

  __device__ __forceinline__ void put(int n, int h, float x, float y) {
    pair_of(first, n, h) = pack<T>(x, y);
    if (!NARROW<T>) pair_of(rest, n, h) = remainder_of(pair_of(first, n, h), x, y);
  }
};
template <typename T, int BV>
__device__ __forceinline__ void start_write(float (&S)[BV / 2], const StateOperand<T>& x,
                                            T (&tokens)[BV / 64][CHUNK][64]) {
  start_write<T, BV>(S, x.first, tokens);
  if (!NARROW<T>) start_write<T, BV>(S, x.rest, tokens);
}
// Two values of it, for the other pass, which multiplies them by what the state has of their gradients: those products
// and the state's cancel in the gate's gradient.
template <typename T> __device__ __forceinline__ float2 state_values(float x, float y) {
  return NARROW<T> ? unpack<T>(pack<T>(x, y)) : float2{x, y};
}

// S <- diag(up) D S.
template <int BV>
__device__ __forceinline__ void decay_state(float (&S)[BV / 2], const SubChunkDecays& d, float up0 = 1.f,
                                            float up1 = 1.f) {
  scale_state<BV>(S, up0 * d.all(0), up1 * d.all(1));
}

// x[channel, i] <- the sum of x over tokens of the chunk, in products with ones of x as two tf32 numbers: those behind
// i or, otherwise, before it, INCLUSIVE or not of i itself: `some` says which. all: over all of them.
template <bool BEHIND> __device__ __forceinline__ void sum_tokens(Chunk& x, float (&all)[2], const u32 (&some)[2]) {
  const u32 one = __float_as_uint(1.f), ones[2] = {one, one};
  SubChunk sum = {};
#pragma unroll
  for (int step = 0; step < SUBCHUNKS; ++step) {
    SubChunk &at = x[BEHIND ? SUBCHUNKS - 1 - step : step], first, rest;
#pragma unroll
    for (int m = 0; m < 4; ++m) first[m] = cut_off(at[m]), rest[m] = at[m] - first[m], at[m] = sum[m];
    multiply_pairs(at, first, some);
    multiply_pairs(at, rest, some);
    multiply_pairs(sum, first, ones);
    multiply_pairs(sum, rest, ones);
  }
  all[0] = sum[0], all[1] = sum[2];
}

// Which of a lane's two tokens of a sub-chunk count in such a sum.
template <bool BEHIND, bool INCLUSIVE> __device__ __forceinline__ void tokens_in_sum(u32 (&some)[2]) {
  const int thread = opaque(threadIdx.x), i = thread >> 2 & 7, token = 2 * (thread & 3);
  const u32 one = __float_as_uint(1.f);
  const int bound = i + (BEHIND != INCLUSIVE);  // the first token behind, or the first that is not before
  some[0] = token >= bound == BEHIND ? one : 0, some[1] = token + 1 >= bound == BEHIND ? one : 0;
}
// The same without tensor cores, for where these are busy with a state, behind whose products such sums would wait.
template <bool BEHIND, bool INCLUSIVE>
__device__ __forceinline__ void sum_tokens_by_shuffles(Chunk& x, float (&all)[2]) {
  const int t = opaque(threadIdx.x) & 3;
  const bool next_counts = t % 2 == !BEHIND, far_counts = t / 2 == !BEHIND;  // the other lane of two; the other two
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 0; step < SUBCHUNKS; ++step) {
      SubChunk& at = x[BEHIND ? SUBCHUNKS - 1 - step : step];
      float &more = at[2 * h + !BEHIND], &less = at[2 * h + BEHIND];  // more: the token that all others count for
      const float own = more + less, next = __shfl_xor_sync(0xffffffffu, own, 1), two = own + next;
      const float far = __shfl_xor_sync(0xffffffffu, two, 2);
      float others = next_counts ? next : 0.f;
      if (step) others += all[h];
      if (far_counts) others += far;
      all[h] = step ? all[h] + (two + far) : two + far;
      more = others + (INCLUSIVE ? own : less), less = INCLUSIVE ? others + less : others;
    }
  }
}

// The state that a block starts from: given, or zeros.
template <int BV>
__device__ __forceinline__ void load_state(float (&S)[BV / 2], const float* given, const Shape& shape, int channel) {
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] = 0.f;
  if (given)
    each_of_state<BV, true>(S, given, shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });
}

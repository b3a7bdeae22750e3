// what      The delta rules' walk over states, forwards, from chunk to chunk of 32 tokens: outputs and final states.
//           Without OUTPUTS, what a sequence does to a state: from S to F S + G.
// math      S is the state before a chunk; E, W, Z, Zb, B, D: prepared.cuh.   Y = E S;   o = scale (W S + B v);
//           S <- D S + Z^T (v + Y), or, TWO, S <- D S + Zb^T Y + Z^T v
// shapes    v o [B, H, T, V], prepared [B, H, NC], initial and final state [N, H, K, V] float32. Without OUTPUTS, the
//           final state is G, from zeros, and F [N, H, K, K] is one of values of 0, from the identity
// grid      a block for every (sequence, head, BV columns), sequence slowest; a warp for every 16 columns. Columns of F
//           come behind those of G
// smem      a ring of STAGES: a chunk as it was prepared, and its v
// barriers  one a chunk: it is in shared memory, and the previous chunk has been read
// numerics  S in float32 accumulators; S and v + Y (TWO: Y) are rounded to T for products
// source    Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "delta/chunk.cuh"
#include "delta/prepared.cuh"

template <typename T> struct Args {
  Rows<const T> v;
  Rows<T> o;                  // null without OUTPUTS
  Rows<const float> initial;  // or null
  Rows<float> final;          // or null
  float* F;                   // null with OUTPUTS
  const void* prepared;       // Prepared of each chunk
  Shape shape;
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of v and o start on multiples of it, and are multiples long
};

template <typename T, int BK, int BV, bool TWO> struct alignas(16) Stage {
  Prepared<T, BK, TWO> of;
  T v[C * BV];
};

template <typename T, int BK, int BV, bool TWO, int STAGES> struct Shared {
  Stage<T, BK, BV, TWO> stages[STAGES];
};

// y (transposed) += E S and, with OUTPUTS, o += W S, for all tokens and the warp's columns.
template <bool OUTPUTS, int BK, typename T>
__device__ __forceinline__ void read_both(float (&y)[C / 8][4], Columns& o, const State<BK>& S, const T* E,
                                          const T* W) {
  const RowsReader<BK, T> right;
  const LeftReader<BK, T> left;
#pragma unroll
  for (int c = 0; c < BK / 32; ++c) {  // 32 channels
    u32 e[C / 8][4], s[2][4];
#pragma unroll
    for (int n = 0; n < C / 8; ++n) ldmatrix_x4(e[n], right.at(E, 8 * n, 32 * c));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&low)[4] = S[4 * c + 2 * half], (&high)[4] = S[4 * c + 2 * half + 1];
      s[half][0] = pack<T>(low[0], low[1]), s[half][1] = pack<T>(low[2], low[3]);
      s[half][2] = pack<T>(high[0], high[1]), s[half][3] = pack<T>(high[2], high[3]);
#pragma unroll
      for (int n = 0; n < C / 8; ++n) multiply_halves(y[n], s[half], {e[n][2 * half], e[n][2 * half + 1]}, T{});
    }
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < C / 16; ++m) {
          u32 w[4];
          ldmatrix_x4(w, left.at(W, 16 * m, 32 * c + 16 * half));
          multiply_halves(o[m][0], w, {s[half][0], s[half][2]}, T{});
          multiply_halves(o[m][1], w, {s[half][1], s[half][3]}, T{});
        }
    }
  }
}

// S += rows^T x; x: of the warp's columns and 16 tokens at a time, transposed.
template <int BK, typename T>
__device__ __forceinline__ void write_rows(State<BK>& S, const T* rows, const u32 (&x)[C / 16][4]) {
  const RightReader<BK, T> reader;
#pragma unroll
  for (int n = 0; n < C / 16; ++n)
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) {
      u32 b[4];
      ldmatrix_x4_trans(b, reader.at(rows, 16 * n, 16 * c));
      multiply_halves(S[2 * c], x[n], {b[0], b[1]}, T{});
      multiply_halves(S[2 * c + 1], x[n], {b[2], b[3]}, T{});
    }
}

template <typename T, int BK, int BV, bool TWO, bool OUTPUTS, int STAGES>
__global__ void __launch_bounds__(2 * BV, BV == 64 ? 2 : 1) delta_scan(const Args<T> args) {
  constexpr int THREADS = 2 * BV;
  auto& stages = reinterpret_cast<Shared<T, BK, BV, TWO, STAGES>*>(dynamic_smem())->stages;
  const Shape& shape = args.shape;
  const u32 value_tiles = u32(shape.V + BV - 1) / BV, tiles = value_tiles + (OUTPUTS ? 0 : u32(shape.K + BV - 1) / BV);
  const u32 pair = blockIdx.x / tiles, tile = blockIdx.x % tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count;
  const bool of_F = !OUTPUTS && tile >= value_tiles;
  const i64 width = of_F ? shape.K : shape.V;
  const Span span = tokens_of(shape, n % count), chunks = chunks_of(shape, n % count);
  const int v_tile = (of_F ? tile - value_tiles : tile) * BV, tokens = int(span.stop - span.start);
  const int bytes = int(args.bytes), t = threadIdx.x & 3;
  const int channels = int(shape.K), columns = int(min(width - v_tile, i64(BV))), column = threadIdx.x / 32 * 16;
  const auto* prepared =
      static_cast<const Prepared<T, BK, TWO>*>(args.prepared) + (i64(b) * H + h) * shape.NC + chunks.start;

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, 0, width, v_tile, channels, columns, f); };
  {
    const float* from = args.initial.p ? args.initial.row(n, h, 0) : nullptr;
    each([&](float& x, i64 at, bool inside) {
      x = !inside ? 0.f : of_F ? at % (width + 1) == 0 : from ? from[at] : 0.f;
    });
  }

  const auto fetch = [&](int chunk, int stage) {
    if (chunk * C < tokens) {
      auto& to = stages[stage];
      using Image = Prepared<T, BK, TWO>;
      constexpr int SIZE = OUTPUTS ? sizeof(Image) : Image::OF_STATES;
      const int first = 16 * opaque(threadIdx.x);  // `opaque`: addresses take no registers between chunks
      char* const image = reinterpret_cast<char*>(&to.of) + first;
      const char* const from = reinterpret_cast<const char*>(prepared + chunk) + first;
#pragma unroll
      for (int at = 0; at < SIZE; at += THREADS * 16)
        if (at + THREADS * 16 <= SIZE || first + at < SIZE) cp_async<16>(image + at, from + at, true);
      if (!of_F)
        copy_chunk<BV, THREADS>(to.v, args.v.row(b, h, span.start + chunk * C) + v_tile, args.v.t, tokens - chunk * C,
                                columns, bytes);
    }
    cp_async_commit();
  };
  const bool pairs = bytes >= 4 && column + 16 <= columns;  // the warp's outputs are stored two by two
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));  // `opaque`: converted once
  T* out = OUTPUTS ? args.o.row(b, h, span.start + (threadIdx.x >> 2 & 7)) + v_tile + column + 2 * t : nullptr;
  for (int chunk = 0; chunk < STAGES - 1; ++chunk) fetch(chunk, chunk);
#pragma unroll 1
  for (int token = 0, chunk = 0, stage = 0; token < tokens; token += C, ++chunk) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the chunk is in shared memory; the previous chunk has been read
    fetch(chunk + STAGES - 1, stage ? stage - 1 : STAGES - 1);
    const auto& of = stages[stage].of;
    const T* tile = stages[stage].v;
    if (++stage == STAGES) stage = 0;

    u32 v[C / 16][4] = {}, x[C / 16][4];
    if (!of_F) {
      const TransposedReader<BV, T> reader(column);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) ldmatrix_x4_trans(v[m], reader.at(tile, 16 * m, 0));
    }
    float y[C / 8][4] = {};
    Columns o = {};
    read_both<OUTPUTS, BK>(y, o, S, of.E, of.W);
#pragma unroll
    for (int c = 0; c < BK / 8; ++c) {
      const float2 by = *reinterpret_cast<const float2*>(of.whole + 8 * c + 2 * t);
      S[c][0] *= by.x, S[c][1] *= by.y, S[c][2] *= by.x, S[c][3] *= by.y;
    }
    if constexpr (TWO) write_rows<BK>(S, of.Z[0], v);
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* read = y[2 * m + part / 2] + part % 2 * 2;
        const float2 value = TWO ? float2{} : unpack(v[m][part], T{});
        x[m][part] = pack<T>(value.x + read[0], value.y + read[1]);
      }
    write_rows<BK>(S, of.Z[TWO], x);
    if constexpr (OUTPUTS) {
      const int lane = own_lane();
#pragma unroll
      for (int m = 0; m < C / 16; ++m)
#pragma unroll
        for (int before = 0; before <= m; ++before)
#pragma unroll
          for (int number = 0; number < 2; ++number) {
            u32 a[4];
            ldmatrix_x4(
                a, of.B.x + number * of.B.REST + (16 * m + (lane & 15)) * of.B.LDA + 16 * before + (lane >> 4) * 8);
            multiply_halves(o[m][0], a, {v[before][0], v[before][2]}, T{});
            multiply_halves(o[m][1], a, {v[before][1], v[before][3]}, T{});
          }
      if (pairs && token + C <= tokens) {
#pragma unroll
        for (int rows = 0; rows < C / 8; ++rows, out += 8 * args.o.t)
#pragma unroll
          for (int across = 0; across < 2; ++across) {
            const float* two = o[rows / 2][across] + rows % 2 * 2;
            *reinterpret_cast<u32*>(out + 8 * across) = pack<T>(scale * two[0], scale * two[1]);
          }
      } else {
        each_pair([&](int i, int c, int m, int across, int down) {
          const float* two = o[m][across] + 2 * down;
          if (token + i < tokens)
            store_pair(args.o.row(b, h, span.start + token + i) + v_tile, c, columns, bytes, scale * two[0],
                       scale * two[1]);
        });
      }
    }
  }
  float* to = of_F ? args.F + (i64(n) * H + h) * width * width : args.final.p ? args.final.row(n, h, 0) : nullptr;
  if (to) {
    each([&](float& x, i64 at, bool inside) {
      if (inside) to[at] = x;
    });
  }
}

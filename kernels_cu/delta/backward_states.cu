// what      The delta rules backward, from chunk to chunk of 32 tokens, as they were prepared. Forwards: the state S
//           [K, V] before every chunk, and what every token's value lacks, the residual. Backwards: the gradient C of
//           the state after every chunk, the gradients of residuals, and dv. Without OUTPUTS, what a segment of a
//           sequence does to a state, from S to F S + G, and to the gradient of one, from C to F^T C + G.
// math      E, W, Z, Zb, B, H, D, R, L, beta: prepared.cuh. Forwards: Y = E S;  X = v + Y;  residual = R X, or, TWO,
//           R Y + L v;  S <- D S + Z^T beta X, or, TWO, D S + Zb^T Y + Z^T v
//           Backwards: P = Z C;  dresidual = P + scale B^T do, dv = beta dresidual;  C <- D C + scale W^T do +
//           E^T beta P;  or, TWO: P = Zb C, dresidual = P + scale H^T do, dv = Z C + scale B^T do,
//           C <- D C + scale W^T do + E^T P
// shapes    v do dv [B, HV, T, V]; initial dht dh0 [N, HV, K, V] float32; residual dresidual [B, HV, T, V padded to a
//           multiple of 64], a residual, unless TWO, twice: its numbers, and what rounding leaves of them; prepared
//           [B, HV, NC]; kept, S and C: backward_storage.cuh; without OUTPUTS: scan.cu
// grid      a block for every (direction, segment, head of values, BV columns), directions slowest; a warp for every
//           16 columns. Columns of F come behind those of G, forwards
// smem      a ring of STAGES: a chunk as it was prepared, and its v or do
// barriers  one: whether states from which segments start are finite; one a chunk: it is in shared memory, and the
//           previous chunk has been read
// numerics  S and C in float32 accumulators; X, beta X, Y, P, beta P, residuals, their gradients and the kept states
//           are rounded to T
// source    Yang et al., 2024 (2412.06464), section 3.3; the gradient takes the same matrices, transposed
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"
#include "delta/prepared.cuh"
#include "delta/walk.cuh"

template <typename T> struct Args {
  Rows<const T> v, do_;
  Rows<const float> initial, dht;   // null: zero
  Rows<float> dh0;                  // or null
  Rows<T> dv, residual, dresidual;  // these and `kept`: null without OUTPUTS
  T* kept;
  float *starts, *F;     // null if no sequence is cut, and F with OUTPUTS
  const void* prepared;  // PreparedForGradients of each chunk
  Shape shape;           // H: heads of values; segments are sequences here
  i64 P;                 // segments of a sequence
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of v, do and dv start on multiples of it, and are multiples long
};

template <typename T, int BK, int BV, bool TWO> struct alignas(16) Stage {
  PreparedForGradients<T, BK, TWO> of;
  T values[C * BV];
};

template <typename T, int BK, int BV, bool TWO, int STAGES> struct Shared {
  Stage<T, BK, BV, TWO> stages[STAGES];
};

// Goes over the chunks of a segment in one direction. S in the code is C if BACKWARDS. block: the number of the
// (segment, head, BV columns); the first `value_tiles` of `tiles` have columns of values.
template <bool BACKWARDS, bool OUTPUTS, int STAGES, bool TWO, int BK, int BV, typename T>
__device__ __forceinline__ void walk(Stage<T, BK, BV, TWO> (&stages)[STAGES], const Args<T>& args, u32 block,
                                     u32 value_tiles, u32 tiles) {
  using Image = PreparedForGradients<T, BK, TWO>;
  constexpr int THREADS = 2 * BV, RESIDUALS = (1 + TWO) * sizeof(Matrix<T>);
  constexpr int OF_BOTH = (2 + TWO) * C * BK * sizeof(T) + (BK + C) * sizeof(float);
  constexpr int FROM = BACKWARDS || !OUTPUTS ? RESIDUALS : 0;
  constexpr int STOP = BACKWARDS ? sizeof(Image) - !OUTPUTS * sizeof(Image::B) : RESIDUALS + OF_BOTH;
  const Shape& shape = args.shape;
  const u32 pair = block / tiles, tile_of = block % tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count;
  const bool of_F = !OUTPUTS && !BACKWARDS && tile_of >= value_tiles;
  const int v_tile = (of_F ? tile_of - value_tiles : tile_of) * BV;
  const bool whole = OUTPUTS && is_whole<BACKWARDS>(shape, u32(args.P), n, h, args.starts, v_tile, BV);
  const auto segment = segment_of<BACKWARDS>(OUTPUTS, shape, u32(args.P), n, h, BACKWARDS ? args.dht : args.initial,
                                             args.starts, BACKWARDS ? args.dh0 : Rows<float>{}, whole);
  if (!OUTPUTS && (segment.last || (of_F && segment.first))) return;
  const i64 width = of_F ? (shape.K + 3) / 4 * 4 : shape.V;  // of F's rows, K and zeros
  const Span span = segment.tokens;
  const int tokens = int(span.stop - span.start);
  const int bytes = int(args.bytes);
  const int channels = int(shape.K), columns = int(min(width - v_tile, i64(BV))), t = threadIdx.x & 3;
  const int column = threadIdx.x / 32 * 16, kept_columns = padded(shape.V) - v_tile, chunks = (tokens + C - 1) / C;
  const i64 first_chunk = segment.chunks.start;
  const auto* prepared = static_cast<const Image*>(args.prepared) + (i64(b) * H + h) * shape.NC + first_chunk;
  const Rows<const T>& values = BACKWARDS ? args.do_ : args.v;
  const Rows<T>& residual = BACKWARDS ? args.dresidual : args.residual;
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));  // `opaque`: converted once

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, 0, width, v_tile, channels, columns, f); };
  each([&](float& x, i64 at, bool inside) {
    x = !inside ? 0.f : of_F ? at % (width + 1) == 0 : segment.from ? segment.from[at] : 0.f;
  });

  const auto chunk_of = [&](int step) { return BACKWARDS ? chunks - 1 - step : step; };
  const auto fetch = [&](int step, int stage) {
    if (step < chunks) {
      auto& to = stages[stage];
      const int token = chunk_of(step) * C;
      copy_image<FROM, STOP, THREADS>(&to.of, prepared + chunk_of(step));
      if (!of_F)
        copy_chunk<BV, THREADS>(to.values, values.row(b, h, span.start + token) + v_tile, values.t, tokens - token,
                                columns, bytes);
    }
    cp_async_commit();
  };
  for (int step = 0; step < STAGES - 1; ++step) fetch(step, step);
#pragma unroll 1
  for (int step = 0, stage = 0; step < chunks; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the chunk is in shared memory; the previous chunk has been read
    fetch(step + STAGES - 1, stage ? stage - 1 : STAGES - 1);
    const auto& of = stages[stage].of;
    const T* tile = stages[stage].values;
    if (++stage == STAGES) stage = 0;
    const int chunk = chunk_of(step), token = C * chunk;
    const auto write = [&](const Rows<T>& to, const auto& two, int width, int pieces) {
      store_tokens<T>(to.row(b, h, span.start + token) + v_tile, to.t, two, tokens - token, column, width, pieces);
    };

    if (OUTPUTS && column < kept_columns) {
#pragma unroll
      for (int c = 0; c < BK / 8; ++c) {
        T* to = args.kept + kept_at(shape, BACKWARDS, b, h, first_chunk + chunk, c / 8 * KEPT);
        if (c / 8 * KEPT < channels)
#pragma unroll
          for (int right = 0; right < 2; ++right)
            *reinterpret_cast<u32*>(to + (((v_tile + column) / 8 + right) * 8 + c % 8) * 64 + 2 * (threadIdx.x & 31)) =
                pack<T>(S[c][2 * right], S[c][2 * right + 1]);
      }
    }
    u32 v[C / 16][4] = {}, x[C / 16][4];  // v: of values, or of do
    if (!of_F) load_packed<BV>(v, tile, column);
    const auto strength = [&](int first) { return *reinterpret_cast<const float2*>(of.beta + first + 2 * t); };
    const auto as_they_are = [&](const u32(&packed)[C / 16][4]) {
      return [&](int i, int across) { return transpose_pairs(packed[i / 16][i % 16 / 8 * 2 + across / 8]); };
    };
    if constexpr (BACKWARDS) {
      float p[C / 8][4] = {}, w[C / 8][4];
      read_transposed<BK>(p, S, of.Z[TWO]);
      if constexpr (OUTPUTS && TWO) {
        float dv[C / 8][4] = {};
        read_transposed<BK>(dv, S, of.Z[0]);
        add_tokens(dv, v, of.B[0], scale);
        pack_tokens<T>(x, dv);
        write(args.dv, as_they_are(x), columns, bytes);
      }
      if constexpr (OUTPUTS) {
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
          for (int m = 0; m < 4; ++m) w[n][m] = p[n][m];
        add_tokens(w, v, of.B[TWO], scale);
        pack_tokens<T>(x, w);
        write(residual, as_they_are(x), kept_columns, 4);
        if constexpr (!TWO) {
          pack_tokens<T>(x, w, strength);
          write(args.dv, as_they_are(x), columns, bytes);
        }
      }
      if constexpr (!TWO) pack_tokens<T>(x, p, strength);
      else pack_tokens<T>(x, p);
      decay_state<BK>(S, of.whole);
      write_rows<BK>(S, of.W, v);
      write_rows<BK>(S, of.E, x);
    } else {
      float y[C / 8][4] = {};
      read_transposed<BK>(y, S, of.E);
      if constexpr (!TWO) add_packed<T>(y, v);
      pack_tokens<T>(x, y);
      if constexpr (OUTPUTS) {
        Columns r = {};
        multiply_packed(r, of.of_residual[0], x);
        if constexpr (TWO) multiply_packed(r, of.of_residual[1], v);
        write(
            residual,
            [&](int i, int across) {
              const float* two = r[i / 16][across / 8] + i % 16 / 8 * 2;
              return pack<T>(two[0], two[1]);
            },
            kept_columns, 4);
        if constexpr (!TWO) {
          Rows<T> rest = residual;
          rest.p += padded(shape.V);
          write(
              rest,
              [&](int i, int across) {
                const float* two = r[i / 16][across / 8] + i % 16 / 8 * 2;
                const float2 rounded = unpack(pack<T>(two[0], two[1]), T{});
                return pack<T>(two[0] - rounded.x, two[1] - rounded.y);
              },
              kept_columns, 4);
        }
      }
      decay_state<BK>(S, of.whole);
      if constexpr (!TWO) {
        pack_tokens<T>(x, y, strength);
        write_rows<BK>(S, of.Z[0], x);
      } else {
        write_rows<BK>(S, of.Z[0], v);
        write_rows<BK>(S, of.Z[1], x);
      }
    }
  }
  float* to = of_F ? args.F + (i64(n) * H + h) * shape.K * width : segment.to;
  if (to) {
    each([&](float& x, i64 at, bool inside) {
      if (inside) to[at] = x;
    });
  }
}

template <typename T, int BK, int BV, bool TWO, int STAGES, bool OUTPUTS>
__global__ void __launch_bounds__(2 * BV, BV == 64 ? 2 : 1) delta_backward_states(const Args<T> args) {
  auto& stages = reinterpret_cast<Shared<T, BK, BV, TWO, STAGES>*>(dynamic_smem())->stages;
  const Shape& shape = args.shape;
  const u32 back = u32(shape.V + BV - 1) / BV, forth = back + (OUTPUTS ? 0 : u32(shape.K + BV - 1) / BV);
  const u32 half = u32(shape.B * shape.count * shape.H) * forth;  // blocks that go forwards
  if (blockIdx.x >= half) walk<true, OUTPUTS>(stages, args, blockIdx.x - half, back, back);
  else walk<false, OUTPUTS>(stages, args, blockIdx.x, back, forth);
}

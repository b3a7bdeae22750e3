// what      GLA and RWKV-6 backward, first sweep: forwards in time, carrying the state. Gives dq (RWKV-6: dr) and du.
// math      per sub-chunk of 16, S its state before:  dq_i = scale (exp(d_i) (S do_i) + sum_{j<i} dA_ij decay_ij k_j) +
//           own own = scale dA_ii k_i, du += scale dA_ii q_i k_i  (GLA: u = 1);   S <- diag(decay) S + (k decayed)^T v
// shapes    q k g dq [B, H, T, K], v do [B, H, T, V], u [H, K], initial [N, H, K, V], du [N, H, K] float32
//           weight [B, H, T, K] float32: q dq but for its own part, which no gate touches
//           kept [B, H, NC, tiles of K, 64 BV] float32: states after every `chunk` tokens and at a sequence's end, in
//           the order of the registers
// grid      a block for every (sequence, head, 64 channels), sequence slowest; two threads for every column of V
// smem      SubChunk: the 16 tokens at hand as floats; Incoming: the next 16 as they come from memory
// barriers  five a sub-chunk: tiles arrived | spread | parts of dA and of S do stand | dA stands | decayed keys stand
// numerics  S in float32 accumulators; of half data the products with S and with decayed keys are two tf32 products
//           (product.cuh), since the gates' gradient is a sum over tokens that would keep every rounding
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    V <= BV; BV of 64, 128, 256
#include "backward.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v, do_;
  Rows<const G> g;
  Rows<T> dq;
  Rows<float> weight;
  const float *u, *initial;  // null where there is none
  float *kept, *du;          // du null for GLA
  Shape shape;
  double scale;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <class ReadOrder, typename T, typename G, int BV>
__global__ void __launch_bounds__(THREADS<BV>, 512 / THREADS<BV>) gated_backward_queries(const Args<T, G> args) {
  SubChunk<BV>& s = *reinterpret_cast<SubChunk<BV>*>(dynamic_smem());
  Incoming<T, G, BV>& next = *reinterpret_cast<Incoming<T, G, BV>*>(&s + 1);
  const Shape& shape = args.shape;
  const int tiles = int((shape.K + BK - 1) / BK), tile = blockIdx.x % tiles, h = blockIdx.x / tiles % int(shape.H);
  const int n = blockIdx.x / tiles / int(shape.H), b = n / int(shape.count);
  const Span span = tokens_of(shape, n % int(shape.count));
  const i64 state_at = ((i64(n) * shape.H + h) * shape.K + tile * BK) * shape.V;
  const float scale = float(args.scale);

  State<COLUMNS> S;
  each<COLUMNS>(S, [&](float& x, int column, int row) {
    const int across = row / BK * COLUMNS + column, down = row % BK;
    const bool there = args.initial && tile * BK + down < shape.K && across < shape.V;
    x = there ? args.initial[state_at + down * shape.V + across] : 0.f;
  });
  auto fetch = [&](i64 token) {
    fetch_tile<SUB, BK, THREADS<BV>>(next.g, args.g, b, h, token, span.stop, tile * BK, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS<BV>>(next.q, args.q, b, h, token, span.stop, tile * BK, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS<BV>>(next.k, args.k, b, h, token, span.stop, tile * BK, shape.K, args.vectors);
    fetch_tile<SUB, BV, THREADS<BV>>(next.v, args.v, b, h, token, span.stop, 0, shape.V, args.vectors);
    fetch_tile<SUB, BV, THREADS<BV>>(next.do_, args.do_, b, h, token, span.stop, 0, shape.V, args.vectors);
    cp_async_commit();
  };
  auto same = [](float x) { return x; };

  float du = 0.f;
  if (span.start < span.stop) fetch(span.start);
  for (i64 token = span.start; token < span.stop; token += SUB) {
    const Role<BV> role;
    cp_async_wait<0>();
    __syncthreads();  // the next tiles have arrived; the last ones may be overwritten
    spread_tile<SUB, BK, LD<BK>, THREADS<BV>>(s.a, next.g, decay_of);
    spread_tile<SUB, BK, LD<BK>, THREADS<BV>>(s.q, next.q, same);
    spread_tile<SUB, BK, LD<BK>, THREADS<BV>>(s.k, next.k, same);
    spread_tile<SUB, BV, LD<BV>, THREADS<BV>>(s.v, next.v, same);
    spread_tile<SUB, BV, LD<BV>, THREADS<BV>>(s.do_, next.do_, same);
    __syncthreads();  // the tiles stand, the room for the next ones is free
    if (token + SUB < span.stop) fetch(token + SUB);
    multiply_pairs<T>(s, role);
    float read[2][4] = {};
    read_state<Data<T, 4>, Operand<true, 2>, LD<BV>, COLUMNS>(read, S, s.do_ + COLUMNS * role.group);
    put_read(s, role, read);
    __syncthreads();  // the parts of dA and of S do stand
    sum_pairs<false>(s, role);
    __syncthreads();  // dA stands

    float sums[SUB], w[OWN<BV>] = {};  // of the weights; keys decayed to the token at hand
#pragma unroll
    for (int i = 0; i < SUB; ++i) {
      const int at = i * LD<BK> + role.c, known = (i + SHARE<BV> - 1) / SHARE<BV>;
      const float a = s.a[at];
      sums[i] = 0.f;
#pragma unroll
      for (int m = 0; m < known; ++m) {
        if (!ReadOrder::reads_before_write) w[m] *= a;
        sums[i] = fmaf(s.dA[i * SUB + OWN<BV> * role.part + m], w[m], sums[i]);
        if (ReadOrder::reads_before_write) w[m] *= a;
      }
      if (i % SHARE<BV> == role.part) w[i / SHARE<BV>] = s.k[at];
    }
    sum_to_owners<BV>(sums, role.part);
    __syncwarp();  // all threads of a channel have its keys
    const Decays<ReadOrder, BV> decays(s, role);
    const int channel = tile * BK + role.c;
    const bool inside = channel < shape.K;
    const float u = ReadOrder::reads_before_write && inside ? args.u[h * shape.K + channel] : 1.f;
#pragma unroll
    for (int x = 0; x < OWN<BV>; ++x) {
      const int i = role.first + x, at = i * LD<BK> + role.c;
      const float q = s.q[at], k = s.k[at], own = scale * s.dA[pair_at<BV>(i, i)];
      const float past = scale * fmaf(decays.before[x], read_of(s, role, i), sums[x]);
      if (inside && token + i < span.stop) {
        args.weight.row(b, h, token + i)[channel] = q * past;
        args.dq.row(b, h, token + i)[channel] = from_float<T>(fmaf(own, u * k, past));
      }
      if (ReadOrder::reads_before_write) du = fmaf(own * q, k, du);
      s.k[at] = k * decays.after[x];
    }
    if (role.part == 0) s.total[role.c] = decays.total;
    __syncthreads();  // the decayed keys stand
    each<COLUMNS>(S, [&](float& x, int, int row) { x *= s.total[row % BK]; });
    write_state<Operand<true, 4>, Data<T, 2>, LD<BK>, LD<BV>, COLUMNS>(S, s.k + role.rows, s.v + COLUMNS * role.group);

    const i64 done = token + SUB - span.start;
    if (done % shape.chunk == 0 || token + SUB >= span.stop) {
      const i64 chunk = chunks_of(shape, n % int(shape.count)).start + (done - 1) / shape.chunk;
      float4* to = reinterpret_cast<float4*>(args.kept);
      to += (((b * shape.H + h) * shape.NC + chunk) * tiles + tile) * (BK * BV / 4);
#pragma unroll
      for (int x = 0; x < COLUMNS / 8; ++x) to[x * THREADS<BV> + role.thread] = {S[x][0], S[x][1], S[x][2], S[x][3]};
    }
  }
  if (args.du) {
    float sum = 0.f;
    each_part<BV>(du, [&](int, float part) { sum += part; });
    const int channel = tile * BK + threadIdx.x / SHARE<BV>;
    if (channel < shape.K && threadIdx.x % SHARE<BV> == 0) args.du[(i64(n) * shape.H + h) * shape.K + channel] = sum;
  }
}

// what      GLA and RWKV-6 backward, second sweep: backwards in time, carrying the state's gradient. Gives dk, dg and
//           dh0.
// math      per sub-chunk of 16, C the gradient of its state after:
//           dk_j = exp(e_j) (C v_j) + scale (sum_{i>j} dA_ij decay_ij q_i + dA_jj q_j)   (RWKV-6: dA_jj u q_j)
//           C <- diag(decay) C + scale (q decayed)^T do
//           dg_t = sum_{i>=t} q_i dq_i - sum_{j>=t} k_j dk_j + sum_v S C   (RWKV-6: i > t), own parts left out on both
//           sides; S a kept state and C its gradient, so that the sums never reach over more than `chunk` tokens
// shapes    q k g dk dg [B, H, T, K], v do [B, H, T, V], u [H, K], dht and dh0 [N, H, K, V] float32
//           weight, kept: as gated_backward_queries leaves them; weight may be dg itself
// grid      a block for every (sequence, head, 64 channels), sequence slowest; two threads for every column of V
// smem      SubChunk: the 16 tokens at hand as floats; Incoming: the 16 before them as they come from memory
// barriers  five a sub-chunk: tiles arrived | spread | parts of dA and of C v stand | dA stands | decayed queries stand
// numerics  as gated_backward_queries
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
  Rows<T> dk;
  Rows<G> dg;
  Rows<const float> weight;
  const float *u, *dht;  // null where there is none
  const float* kept;
  float* dh0;  // or null
  Shape shape;
  double scale;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <typename T, typename G, int BV> struct alignas(16) IncomingWeights : Incoming<T, G, BV> {
  float weight[SUB * BK];  // [16, BK]
};

template <class ReadOrder, typename T, typename G, int BV>
__global__ void __launch_bounds__(THREADS<BV>, 512 / THREADS<BV>) gated_backward_keys(const Args<T, G> args) {
  SubChunk<BV>& s = *reinterpret_cast<SubChunk<BV>*>(dynamic_smem());
  IncomingWeights<T, G, BV>& next = *reinterpret_cast<IncomingWeights<T, G, BV>*>(&s + 1);
  const Shape& shape = args.shape;
  const int tiles = int((shape.K + BK - 1) / BK), tile = blockIdx.x % tiles, h = blockIdx.x / tiles % int(shape.H);
  const int n = blockIdx.x / tiles / int(shape.H), b = n / int(shape.count);
  const Span span = tokens_of(shape, n % int(shape.count));
  const i64 state_at = ((i64(n) * shape.H + h) * shape.K + tile * BK) * shape.V;
  const float scale = float(args.scale);

  State<COLUMNS> C;
  each<COLUMNS>(C, [&](float& x, int column, int row) {
    const int across = row / BK * COLUMNS + column, down = row % BK;
    const bool there = args.dht && tile * BK + down < shape.K && across < shape.V;
    x = there ? args.dht[state_at + down * shape.V + across] : 0.f;
  });
  auto fetch = [&](i64 token) {
    fetch_tile<SUB, BK, THREADS<BV>>(next.g, args.g, b, h, token, span.stop, tile * BK, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS<BV>>(next.q, args.q, b, h, token, span.stop, tile * BK, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS<BV>>(next.k, args.k, b, h, token, span.stop, tile * BK, shape.K, args.vectors);
    fetch_tile<SUB, BV, THREADS<BV>>(next.v, args.v, b, h, token, span.stop, 0, shape.V, args.vectors);
    fetch_tile<SUB, BV, THREADS<BV>>(next.do_, args.do_, b, h, token, span.stop, 0, shape.V, args.vectors);
    fetch_tile<SUB, BK, THREADS<BV>>(next.weight, args.weight, b, h, token, span.stop, tile * BK, shape.K,
                                     args.vectors);
    cp_async_commit();
  };
  auto same = [](float x) { return x; };

  float behind = 0.f;  // the sum of q dq - k dk over the tokens behind, of this thread's channel
  const i64 last = span.start + (span.stop - span.start - 1) / SUB * SUB;
  if (span.start < span.stop) fetch(last);
  for (i64 token = last; token >= span.start && span.start < span.stop; token -= SUB) {
    const Role<BV> role;
    const i64 done = token + SUB - span.start;
    const bool anew = token == last ? args.dht != nullptr : done % shape.chunk == 0;
    if (anew) {
      const i64 chunk = chunks_of(shape, n % int(shape.count)).start + (done - 1) / shape.chunk;
      const float4* from = reinterpret_cast<const float4*>(args.kept);
      from += (((b * shape.H + h) * shape.NC + chunk) * tiles + tile) * (BK * BV / 4);
      float upper = 0.f, lower = 0.f;
#pragma unroll
      for (int x = 0; x < COLUMNS / 8; ++x) {
        const float4 S = from[x * THREADS<BV> + role.thread];
        upper = fmaf(S.x, C[x][0], fmaf(S.y, C[x][1], upper));
        lower = fmaf(S.z, C[x][2], fmaf(S.w, C[x][3], lower));
      }
      for (int distance = 1; distance < 4; distance *= 2) {
        upper += __shfl_xor_sync(0xffffffffu, upper, distance);
        lower += __shfl_xor_sync(0xffffffffu, lower, distance);
      }
      if (role.t == 0) {
        s.behind[role.group][role.rows + role.g] = upper;
        s.behind[role.group][role.rows + role.g + 8] = lower;
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // the next tiles have arrived; the last ones may be overwritten
    spread_tile<SUB, BK, LD<BK>, THREADS<BV>>(s.a, next.g, decay_of);
    spread_tile<SUB, BK, LD<BK>, THREADS<BV>>(s.q, next.q, [&](float x) { return scale * x; });
    spread_tile<SUB, BK, LD<BK>, THREADS<BV>>(s.k, next.k, same);
    spread_tile<SUB, BV, LD<BV>, THREADS<BV>>(s.v, next.v, same);
    spread_tile<SUB, BV, LD<BV>, THREADS<BV>>(s.do_, next.do_, same);
    float weight[OWN<BV>];
#pragma unroll
    for (int x = 0; x < OWN<BV>; ++x) weight[x] = next.weight[(role.first + x) * BK + role.c];
    __syncthreads();  // the tiles stand, the room for the next ones is free
    if (token > span.start) fetch(token - SUB);
    multiply_pairs<T>(s, role);
    float read[2][4] = {};
    read_state<Data<T, 4>, Operand<true, 2>, LD<BV>, COLUMNS>(read, C, s.v + COLUMNS * role.group);
    put_read(s, role, read);
    __syncthreads();  // the parts of dA and of C v stand
    sum_pairs<true>(s, role);
    __syncthreads();  // dA stands

    float sums[SUB], w[OWN<BV>] = {};  // of the weights; queries decayed to the token at hand
#pragma unroll
    for (int j = SUB - 1; j >= 0; --j) {
      const int at = j * LD<BK> + role.c;
      const float a = s.a[at];
      sums[j] = 0.f;
#pragma unroll
      for (int m = j / SHARE<BV>; m < OWN<BV>; ++m) {
        sums[j] = fmaf(s.dA[j * SUB + OWN<BV> * role.part + m], w[m], sums[j]);
        if (ReadOrder::reads_before_write) w[m] *= a;
      }
      if (j % SHARE<BV> == role.part) w[j / SHARE<BV>] = s.q[at];
#pragma unroll
      for (int m = j / SHARE<BV>; m < OWN<BV>; ++m)
        if (!ReadOrder::reads_before_write) w[m] *= a;
    }
    sum_to_owners<BV>(sums, role.part);
    __syncwarp();  // all threads of a channel have its queries
    const Decays<ReadOrder, BV> decays(s, role);
    const int channel = tile * BK + role.c;
    const bool inside = channel < shape.K;
    const float u = ReadOrder::reads_before_write && inside ? args.u[h * shape.K + channel] : 1.f;
    float change = 0.f;  // of `behind`, by the thread's own tokens
#pragma unroll
    for (int x = 0; x < OWN<BV>; ++x) {
      const int j = role.first + x, at = j * LD<BK> + role.c;
      const float q = s.q[at], own = s.dA[pair_at<BV>(j, j)];
      const float later = fmaf(decays.after[x], read_of(s, role, j), sums[x]);
      if (inside && token + j < span.stop)
        args.dk.row(b, h, token + j)[channel] = from_float<T>(fmaf(own, u * q, later));
      s.q[at] = q * decays.before[x];
      sums[x] = s.k[at] * later;
      change += weight[x] - sums[x];
    }
    if (anew) {
      behind = 0.f;
#pragma unroll
      for (int group = 0; group < GROUPS<BV>; ++group) behind += s.behind[group][role.c];
    }
    float dg = behind;
    each_part<BV>(change, [&](int part, float sum) {
      if (part > role.part) dg += sum;
      behind += sum;
    });
#pragma unroll
    for (int x = OWN<BV> - 1; x >= 0; --x) {
      const int t = role.first + x;
      if (!ReadOrder::reads_before_write) dg += weight[x];
      dg -= sums[x];
      if (inside && token + t < span.stop) args.dg.row(b, h, token + t)[channel] = from_float<G>(dg);
      if (ReadOrder::reads_before_write) dg += weight[x];
    }
    if (role.part == 0) s.total[role.c] = decays.total;
    __syncthreads();  // the decayed queries stand
    each<COLUMNS>(C, [&](float& x, int, int row) { x *= s.total[row % BK]; });
    write_state<Operand<true, 4>, Data<T, 2>, LD<BK>, LD<BV>, COLUMNS>(C, s.q + role.rows,
                                                                       s.do_ + COLUMNS * role.group);
  }
  if (args.dh0)
    each<COLUMNS>(C, [&](float& x, int column, int row) {
      const int across = row / BK * COLUMNS + column, down = row % BK;
      if (tile * BK + down < shape.K && across < shape.V) args.dh0[state_at + down * shape.V + across] = x;
    });
}

// what      Under scalar decays, in one pass on Hopper: outputs or gradients by chunks of 64 tokens, which
//           go into the products as they came.
// math      per chunk, E_i the decay from its start to token i, L_j from behind token j to its end, D_ij between:
//           o_i = scale (E_i S q_i + sum_{j<=i} A_ij v_j), A_ij = D_ij q_i . k_j;  S <- E_64 S + sum_j L_j v_j k_j^T
//           Gradients are such sums too, forwards or backwards in time, where E and L, i and j change places:
//           dq_i of queries do, keys v, values k;  backwards dk_j of queries v, keys do, values q, and dv_j of queries
//           k, keys q, values do, both carrying dS in place of S, with `scale` in what they add to it
//           dg_t = <S, dS> at the end of t's stretch of 256 tokens + sum_{i>=t} (q_i . dq_i - k_i . dk_i) in it,
//           without what i = j gives either, which no gate touches
// shapes    q k [B, H, T, K], v o [B, H, T, V], g [B, H, T] of any strides; initial and final state [N, H, K, V]
//           float32; sums [B, H, parts, T] float32; dg [B, H, T] as g, or [B, H, T, tiles of dk] float32
// grid      a block for every (sequence, head, BV columns of V, sum), sequence slowest: a warpgroup for every 64
//           columns, with their state transposed in its registers, a warpgroup for A, a warp that moves chunks, one
//           that sums up gates, one that sums up dg. GatedKeys of all of K and V: dk and dv are a cluster's, which ask
//           for tokens side by side, so that who comes second finds them in L2
// passes    Whole: everything. Summary: only the state that tokens leave behind, and their decay, without q and o; for
//           sequences cut into segments and these into parts, whose states scan_segments.cu then joins. Gradients: dq,
//           dk and dv at once, where nobody asks for dg. Queries: dq alone; Keys: the others. GatedQueries, GatedKeys:
//           these two with dg, the first of which leaves its sums and states to the second
// smem      weighted_sums_storage.cuh, which names the barriers, too
// numerics  products of bfloat16 numbers in float32: q, k and v as they came, S as the sum of two, in gradients as one,
//           as A and the decayed v are.
//           Decays are powers of sums of the gates that lie between, never of differences of such sums: any gate is
//           exact. Pairs of a chunk cancel in dg to float32, since dq and dk have the same rounded A; others of a
//           stretch to bfloat16
// source    Yang et al., 2024, sections 4 and 4.4; Sun et al., 2023, section 2.2
// limits    sm_90a; bfloat16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "scalar_decay/sm90/weighted_sums_storage.cuh"

// ---- a warp that sums up gates ------------------------------------------------------------------------------------

// The gates of tokens `lane` and 32 + lane.
__device__ __forceinline__ void sum_gates(Gates& to, float first, float second, int lane, float read, float write,
                                          bool backwards) {
  float until[2] = {LOG2E * first, LOG2E * second}, behind[2] = {0.f, 0.f};
#pragma unroll
  for (int level = 0; level < Gates::LEVELS; ++level) {
    const int size = 1 << level;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to.until[level][32 * half + lane] = until[half];
      if (level) to.behind[level - 1][32 * half + lane] = behind[half];
      if (size == 32) continue;
      const float other = __shfl_sync(0xffffffffu, until[half], (lane ^ size) | (size - 1));  // all of the block beside
      until[half] += lane & size ? other : 0.f, behind[half] += lane & size ? 0.f : other;
    }
  }
  const float early = __shfl_sync(0xffffffffu, until[0], 31), late = __shfl_sync(0xffffffffu, until[1], 31);
  const float start[2] = {exp2_approx(until[0]), exp2_approx(early + until[1])};
  const float end[2] = {exp2_approx(behind[0] + late), exp2_approx(behind[1])};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 32 * half + lane;
    to.read[token] = read * (backwards ? end[half] : start[half]);
    const float x = write * (backwards ? start[half] : end[half]);
    const bf16 first = from_float<bf16>(x);
    bf16* const two = reinterpret_cast<bf16*>(&to.write[token / 2]) + token % 2;
    two[0] = first;
    two[2] = from_float<bf16>(fabsf(x) <= LARGEST ? x - to_float(first) : 0.f);
  }
  if (lane == 31) to.all = start[1];
}

template <typename G, class S>
__device__ __forceinline__ void sum_chunks(S& s, const WeightedSum& x, const Rows<const G>& gates, const WorkTile& at,
                                           bool backwards) {
  constexpr int STAGES = S::STAGES;
  const float factors[2] = {float(x.read), float(x.write)};
  const int lane = threadIdx.x & 31;
  G first, second;
  const auto read = [&](int iteration) {
    const int token = first_of(iteration, at, backwards) + lane;
    first = gate_of(gates, at, token), second = gate_of(gates, at, token + 32);
  };
  read(0);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < at.tokens; ++iteration) {
    if (iteration >= STAGES) barrier_wait(s.done[iteration % STAGES], iteration / STAGES - 1 & 1);
    sum_gates(s.gates[iteration % STAGES], to_float(first), to_float(second), lane, factors[0], factors[1], backwards);
    barrier_arrive(s.full[iteration % STAGES]);
    read(iteration + 1);  // long before they are needed
  }
}

// ---- a warp that sums up what the gate's gradient is made of --------------------------------------------------------

// The sums over warps of what they have of tokens 2 lane and 2 lane + 1.
template <int PANELS> __device__ __forceinline__ float2 sums_of_warps(bf16 (&partner)[PANELS][CHUNK][64], int lane) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int warp = 0; warp < 4 * PANELS; ++warp) {
    const float2 its = *reinterpret_cast<const float2*>(swizzled(partner[warp / 4][0], lane, 2 * (warp % 4)));
    sum.x += its.x, sum.y += its.y;
  }
  return sum;
}

// Of the queries' sum what its tokens have, for the other pass.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void sum_queries(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WorkTile& at,
                                            int part) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const int lane = threadIdx.x & 31;
  const i64 head = (i64(at.batch) * args.shape.H + at.head) * args.parts + part;
  float* to = args.token_sums + head * args.shape.T + at.start + 2 * lane;
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < at.tokens; ++iteration, to += CHUNK) {
    barrier_wait(s.done[iteration % STAGES], iteration / STAGES & 1);
    const float2 sum = sums_of_warps(s.stages[iteration % STAGES].partner, lane);
    barrier_arrive(s.summed[iteration % STAGES]);
    const int rest = at.tokens - iteration * CHUNK - 2 * lane;
    if (rest > 0) to[0] = sum.x;
    if (rest > 1) to[1] = sum.y;
  }
}

// Where the states of a token's stretch are kept.
template <int BK, class Args>
__device__ __forceinline__ uint4* kept_of(const Args& args, const WorkTile& at, int token) {
  const i64 heads = (i64(at.batch) * args.shape.H + at.head) * (args.shape.T / STRETCH + args.shape.count);
  const int slot_of_sequence = at.sequence - at.batch * i32(args.shape.count);
  const i64 slot = heads + at.start / STRETCH + slot_of_sequence + token / STRETCH;
  return args.kept + slot * (BK / 16) * (BK / 16) * 32;
}

// The gate's gradient, or this block's part of it.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void sum_gradients(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WorkTile& at,
                                              int part, int parts) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const int lane = threadIdx.x & 31, T = int(args.shape.T), count = part ? 0 : int(args.parts);
  int first = first_of(0, at, true);
  const i64 head = i64(at.batch) * args.shape.H + at.head, token = at.start + first + 2 * lane;
  const float* from = args.token_sums + head * args.parts * T + token;
  i64 to = (head * T + token) * parts + part;
  const auto put = [&](i64 at, float x) {
    if (parts == 1) static_cast<G*>(args.dg)[at] = from_float<G>(x);
    else static_cast<float*>(args.dg)[at] = x;
  };
  float end = 0.f;  // of what is behind in the stretch
  float early[BK / 64], late[BK / 64];
  const auto read = [&](int first) {
#pragma unroll
    for (int p = 0; p < BK / 64; ++p) {
      const bool there = p < count && first >= 0;
      early[p] = there && first + 2 * lane < at.tokens ? from[p * i64(T)] : 0.f;
      late[p] = there && first + 2 * lane + 1 < at.tokens ? from[p * i64(T) + 1] : 0.f;
    }
    from -= CHUNK;
  };
  read(first);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < at.tokens; ++iteration) {
    if (lane == 0 && ends_stretch(first, at) && first >= STRETCH)  // from memory they take as long as a chunk
      prefetch_l2(kept_of<BK>(args, at, first - STRETCH) + part * (BV / 16) * (BK / 16 * 32), BV * BK * sizeof(bf16));
    const bool inside = first + 2 * lane < at.tokens, both = first + 2 * lane + 1 < at.tokens;
    barrier_wait(s.done[iteration % STAGES], iteration / STAGES & 1);
    const float2 sum = sums_of_warps(s.stages[iteration % STAGES].partner, lane);
    barrier_arrive(s.summed[iteration % STAGES]);
    float x = -sum.x, y = -sum.y;
#pragma unroll
    for (int p = 0; p < BK / 64; ++p) x += early[p], y += late[p];
    read(first - CHUNK);   // long before they are needed
    float behind = x + y;  // of this lane and those behind it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_sync(0xffffffffu, behind, lane + distance & 31);
      if (lane + distance < 32) behind += other;
    }
    const float next = __shfl_sync(0xffffffffu, behind, lane + 1 & 31), all = __shfl_sync(0xffffffffu, behind, 0);
    y += end + (lane < 31 ? next : 0.f);
    if (inside) put(to, x + y);
    if (both) put(to + parts, y);
    end = first % STRETCH ? end + all : 0.f;
    first -= CHUNK, to -= CHUNK * parts;
  }
}

// ---- a warp that moves chunks -------------------------------------------------------------------------------------

template <class Pass, int BK, int BV>
__device__ __forceinline__ void move(Shared<Pass, BK, BV>& s, const WeightedSum& x, const WorkTile& at, int column,
                                     bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
#pragma unroll 1
  for (int iteration = -STAGES; iteration * CHUNK < at.tokens; ++iteration) {
    forget(column);  // cheaper made anew than held in a register
    const int next = iteration + STAGES;
    auto& stage = s.stages[next % STAGES];
    if (iteration >= 0) {
      barrier_wait((gathers<Pass>() ? s.summed : s.done)[iteration % STAGES], iteration / STAGES & 1);
      if constexpr (READS<Pass>) {
        fence_async();  // here, since consumers have less time
        store_chunk(at, first_of(iteration, at, backwards),
                    [&](auto f) { f(stage.v, x.o, x.o_rows, x.V, column, x.adds); });
      }
    }
    if (next * CHUNK >= at.tokens) continue;
    if constexpr (PAIRS<Pass, BK, BV>) {
      const int before = next - BESIDE;
      if (before >= 0) barrier_wait(s.asked[before % (2 * BESIDE)], before / (2 * BESIDE) & 1);
      __syncwarp();  // all lanes have looked
      if ((threadIdx.x & 31) == 0) arrive_at_peer(s.asked[next % (2 * BESIDE)]);
    }
    fetch_chunk(s.full[next % STAGES], at, first_of(next, at, backwards), [&](auto f) {
      if constexpr (READS<Pass>) f(stage.q, x.q, x.q_rows, x.K, 0);
      f(stage.k, x.k, x.k_rows, x.K, 0);
      f(stage.v, x.v, x.v_rows, x.V, column);
      if constexpr (GATED<Pass>)
        if (gathers<Pass>()) f(stage.partner, x.partner, x.partner_rows, x.V, column);
    });
    __syncwarp();
  }
}

// ---- a warpgroup that multiplies queries by keys --------------------------------------------------------------------

// The two blocks of 8 queries that a warp has: early ones have few keys and late ones many, so each warp as many as the
// others.
__device__ __forceinline__ constexpr int block_of(int warp, int half) { return half ? CHUNK / 8 - 1 - warp : warp; }

// Puts the scores of a warp, of which a lane has two queries and two neighbours of every 8 keys; those with keys behind
// their queries, or BACKWARDS before them, are 0; so are those of a token with itself where they stand apart. All warps
// have the same code, a quarter of what one for each would be: so some scores are made for nobody.
template <bool BACKWARDS, bool GATE>
__device__ __forceinline__ void put_scores(bf16 (&A)[CHUNK][64], float (&d)[CHUNK / 2], float scale, Gates& gates,
                                           int warp) {
  constexpr int HALF = CHUNK / 16;  // blocks of 8 keys in half a chunk
  const float *const until = gates.until[0], *const behind = gates.behind[0] - CHUNK;
  const float *const of_query = BACKWARDS ? behind : until, *const of_key = BACKWARDS ? until : behind;
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  u32 far[HALF], near[2][HALF];  // of keys in the other half of the chunk, and in this
  float own[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int block = block_of(warp, half), i = 8 * block + g, quarter = block >> 1 & 1;
    const auto decayed = [&](int n, int level) {
      const float query = of_query[level * CHUNK + i];
      const float2 keys = *reinterpret_cast<const float2*>(&of_key[level * CHUNK + 2 * t + 8 * n]);
      return pack<bf16>(d[4 * n + 2 * half] * (scale * exp2_approx(query + keys.x)),
                        d[4 * n + 2 * half + 1] * (scale * exp2_approx(query + keys.y)));
    };
    float same[2];  // of the block whose queries and keys are the same tokens
#pragma unroll
    for (int m = 0; m < HALF; ++m) {
      const int n = HALF * half + m;
      if (m == 0 || n == block) same[0] = d[4 * n + 2 * half], same[1] = d[4 * n + 2 * half + 1];
      if (BACKWARDS != (half == 1)) far[m] = decayed(n ^ HALF, 5);
    }
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int key = 2 * t + p, difference = g ^ key, level = difference > 3 ? 2 : difference > 1,
                later = BACKWARDS ? 8 * block + key : i;
      const int earlier = BACKWARDS ? i : 8 * block + key;
      const float decay = exp2_approx(until[level * CHUNK + later] +
                                      (level ? behind[level * CHUNK + earlier] : 0.f));  // 0: a neighbour
      float& x = same[p];
      x *= scale;
      if (key == g) own[half] = x;
      x = (BACKWARDS ? key < g : key > g) || GATE && key == g ? 0.f : key == g ? x : x * decay;
    }
#pragma unroll
    for (int m = 0; m < HALF; ++m) {
      const int n = HALF * half + m;
      u32 two = 0;
      if (m != (BACKWARDS ? 0 : HALF - 1)) {  // no warp has others of these
        two = decayed(n, m / 2 ? 4 - quarter : 3 + quarter);
        if (BACKWARDS ? n < block : n > block) two = 0;
      }
      near[half][m] = n == block ? pack<bf16>(same[0], same[1]) : two;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // only now: for all the compiler knows, gates could change
    const int block = block_of(warp, half), row = 8 * block + lane % 8, panel = lane / 8;
    stmatrix_x4(swizzled(A[0], row, HALF * half + panel), near[half]);
    if (BACKWARDS != (half == 1)) stmatrix_x4(swizzled(A[0], row, HALF * (1 - half) + panel), far);
    if (GATE && t == g / 2)
      gates.own[8 * block + g] = pack<bf16>(own[half] - to_float(from_float<bf16>(own[half])), own[half]);
  }
}

template <class Pass, int BK, int BV>
__device__ __forceinline__ void multiply_tokens(Shared<Pass, BK, BV>& s, int tokens, float scale, bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < tokens; ++iteration) {
    const int thread = opaque(threadIdx.x), lane = thread & 31,
              warp = thread / 32 % 4;  // addresses are cheaper made anew
    auto& in = s.stages[iteration % STAGES];
    barrier_wait(s.full[iteration % STAGES], iteration / STAGES & 1);
    u32 q[BK / 16][4];
    float d[CHUNK / 2];
#pragma unroll
    for (int c = 0; c < BK / 16; ++c)
      ldmatrix_x4(q[c],
                  swizzled(in.q[c / 4][0], 8 * block_of(warp, lane >> 3 & 1) + (lane & 7), c % 4 * 2 + (lane >> 4)));
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < BK / 16; ++c)
      wgmma<bf16, CHUNK, false>(d, q[c], wgmma_tile(in.k[c / 4], 16, 1024) + c % 4 * 32 / 16, c > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(d);
    Gates& gates = s.gates[iteration % STAGES];
    if (SUMS<Pass> == 2 || SUMS<Pass> > 2 && backwards) put_scores<true, GATED<Pass>>(in.A, d, scale, gates, warp);
    else put_scores<false, GATED<Pass>>(in.A, d, scale, gates, warp);
    fence_async();
    barrier_arrive(s.scores[iteration % STAGES]);
  }
}

// ---- warpgroups with 64 columns of V each --------------------------------------------------------------------------

// Calls f(value, where it is in memory) for those values of the transposed state that are this lane's and exist.
template <int BK, typename P, class F>
__device__ __forceinline__ void each_transposed(float (&S)[BK / 2], P* state, const WeightedSum& of, int column, F f) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < BK / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int channel = 8 * n + 2 * t + (x & 1), own = column + 8 * (x >> 1);
      if (channel < of.K && own < of.V) f(S[4 * n + x], state + channel * of.state_k + own * of.state_v);
    }
    __syncwarp();  // else all addresses are made at once, and there are no registers for that
  }
}

// Calls f(c, the state in bfloat16) for each 16 channels of the 16 columns that a warp has.
template <int BK, class F> __device__ __forceinline__ void each_kept(const float (&S)[BK / 2], F f) {
#pragma unroll
  for (int c = 0; c < BK / 16; ++c) {
    u32 two[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) two[m] = pack<bf16>(S[8 * c + 2 * m], S[8 * c + 2 * m + 1]);
    f(c, two);
  }
}

// What is kept of the 16 columns that a warp has.
template <int BK> using Kept = uint4[BK / 16];

// This lane's share of the sum over the state times what is kept: the diagonals of products of the one with the other
// transposed, in fewer instructions than the numbers one by one.
template <int BK> __device__ __forceinline__ float product_with_kept(const float (&S)[BK / 2], const Kept<BK>& kept) {
  float early[2][4] = {}, late[2][4] = {};  // with the first 8 columns, and with the others; two, since each waits
  each_kept<BK>(S, [&](int c, const u32(&own)[4]) {
    mma_bf16(early[c % 2], own, {kept[c].x, kept[c].z});
    mma_bf16(late[c % 2], own, {kept[c].y, kept[c].w});
  });
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const float odd = early[0][1] + early[1][1] + (late[0][3] + late[1][3]);
  const float even = early[0][0] + early[1][0] + (late[0][2] + late[1][2]);
  return (lane & 3) != g / 2 ? 0.f : g & 1 ? odd : even;
}

// Calls f(where in Values the first of two tokens is, the two of a panel) as `each_two` does, few at a time.
template <class F> __device__ __forceinline__ void each_pair(bf16 (&panel)[CHUNK][64], F f) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) {
    u32 two[4];
    ldmatrix_x4_trans(two, matrix_row(panel[0], 16 * s));
#pragma unroll
    for (int m = 0; m < 4; ++m) f(8 * s + m / 2 * 4 + m % 2 * 2, two[m]);
  }
}

// Adds two lanes' x, of which each keeps a half of HALF.
template <int HALF> __device__ __forceinline__ void halve(float (&x)[CHUNK / 4], bool upper) {
#pragma unroll
  for (int n = 0; n < HALF; ++n) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + HALF], 2 * HALF);
    x[n] = (upper ? x[n + HALF] : x[n]) + other;
  }
}

// Puts the sums over the warp's columns of its partner and o where the partner was; the lanes' sum of `more` is of the
// last token.
__device__ __forceinline__ void put_sums(bf16 (&partner)[CHUNK][64], const Values& o, float more) {
  const int thread = opaque(threadIdx.x), lane = thread & 31, g = lane >> 2;
  float x[CHUNK / 4] = {};  // 2n + p: of token 8n + 2t + p
  each_pair(partner, [&](int i, u32 two) {
    float &first = x[i / 4 * 2], &second = x[i / 4 * 2 + 1];
    first = fmaf(low(two), o[i], first), second = fmaf(high(two), o[i + 1], second);
  });
  more = warp_sum(more);
  halve<8>(x, g & 4), halve<4>(x, g & 2), halve<2>(x, g & 1);  // lane g ends with those of 8g
  if (lane == 31) x[1] += more;
  __syncwarp();  // the partner has been read
  *reinterpret_cast<float2*>(swizzled(partner[0], lane, thread / 32 % 4 * 2)) = {x[0], x[1]};
}

// Adds to o each token's value by its score with itself: products with diagonal matrices, of which a lane has a number
// or none.
__device__ __forceinline__ void add_own(Values& o, bf16 (&panel)[CHUNK][64], const u32 (&own)[CHUNK]) {
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2;
  const bool has_one = (lane & 3) == g / 2;
  const u32 upper = !has_one ? 0x4444 : g & 1 ? 0x3244 : 0x4432, lower = !has_one ? 0x4444 : g & 1 ? 0x1044 : 0x4410;
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) {
    u32 v[4];
    ldmatrix_x4_trans(v, matrix_row(panel[0], 16 * s));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      auto& sums = *reinterpret_cast<float (*)[4]>(o + 8 * s + 4 * m);
      const u32 its = own[16 * s + 8 * m + g];
      mma_bf16(sums, v[2 * m], v[2 * m + 1], __byte_perm(its, 0, upper));
      mma_bf16(sums, v[2 * m], v[2 * m + 1], __byte_perm(its, 0, lower));
    }
  }
}

template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WeightedSum& x,
                                        const WorkTile& at, int first, bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  constexpr int PART = !EXACT<Pass> && BK > BV ? BK / 16 : BK / 64;  // how much of S is read at once, if there is room
  const int warpgroup = threadIdx.x / 128, column = first + threadIdx.x / 32 * 16 + (threadIdx.x >> 2 & 7);
  const i64 state = at.pair * x.K * x.V;
  float S[BK / 2] = {}, total = 1.f;
  if (x.initial)
    each_transposed<BK>(S, x.initial + state, x, column, [](float& value, const float* from) { value = *from; });

  // Where this lane's share of a stretch's state is kept; null where its warp has no columns.
  const auto kept = [&](int token) {
    const int tile = (first + opaque(threadIdx.x) / 2) / 16;  // a warp has 16 columns
    return 16 * tile < x.V ? kept_of<BK>(args, at, token) + tile * (BK / 16 * 32) + (threadIdx.x & 31) : nullptr;
  };
  constexpr bool CROSSES = GATED<Pass> && SUMS<Pass> > 1;
  constexpr bool EARLY = CROSSES && !Registers<BK, BV>::SMALL;  // a turn before, where there are registers for that
  Kept<BK> early = {};
  const uint4* next_kept = nullptr;  // that of the stretch which comes next
  if constexpr (CROSSES)
    if (gathers<Pass>() && at.tokens) next_kept = kept(first_of(0, at, backwards));  // a stretch's end
  const auto load_kept = [&](Kept<BK>& its) {
    if (!next_kept) return;
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) its[c] = next_kept[32 * c];
    next_kept -= BK / 16 * (BK / 16) * 32;
  };
  if constexpr (EARLY)
    if (gathers<Pass>() && at.tokens) load_kept(early);

#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < at.tokens; ++iteration) {
    auto& in = s.stages[iteration % STAGES];
    const Gates& gates = s.gates[iteration % STAGES];
    const u32 phase = iteration / STAGES & 1;
    const bool ends = gathers<Pass>() && ends_stretch(first_of(iteration, at, backwards), at);
    float crossing = 0.f;  // -<S, dS> at the stretch's end, of the warp's columns
    if constexpr (GATED<Pass>) {
      if (ends) {
        if constexpr (EARLY) crossing = -product_with_kept<BK>(S, early);
        else if constexpr (CROSSES) {
          Kept<BK> its = {};
          load_kept(its);
          crossing = -product_with_kept<BK>(S, its);
        } else if (uint4* const to = kept(first_of(iteration, at, backwards)))
          each_kept<BK>(S, [&](int c, const u32(&two)[4]) { to[32 * c] = {two[0], two[1], two[2], two[3]}; });
      }
    }
    barrier_wait(s.full[iteration % STAGES], phase);
    const float all = gates.all, by[2] = {all, all};
    Values o;
    if constexpr (READS<Pass>) {
      read_state<BK, true, PART, EXACT<Pass>>(o, S, by, in.q, [](int, const u32(&)[4], const u32(&)[4]) {});
    } else {
      for (float& value : S) value *= all;
      total *= all;
    }
    Operand v;
    float decay[CHUNK / 4];
    load_channels(v, in.v[warpgroup]);
    decay_tokens(v, gates.write);
    wgmma_keep(S);
    wgmma_fence();
    write_state<BK>(S, v, in.k);
    wgmma_commit();
    if constexpr (READS<Pass>) {
      wgmma_wait<1>();
      wgmma_keep(o);
      load_tokens(decay, gates.read);
      each_two([&](int i, int, int) { o[i] *= decay[i / 4 * 2], o[i + 1] *= decay[i / 4 * 2 + 1]; });
      if constexpr (GATED<Pass> && SUMS<Pass> > 1)
        if (ends) {
          crossing *= all;
          each_pair(in.partner[warpgroup], [&](int i, u32 two) { crossing -= low(two) * o[i] + high(two) * o[i + 1]; });
        }
      if constexpr (EARLY) {
        const int next = first_of(iteration + 1, at, backwards);
        if (gathers<Pass>() && next >= 0 && ends_stretch(next, at)) load_kept(early);
      }
      load_channels(v, in.v[warpgroup]);
      barrier_wait(s.scores[iteration % STAGES], phase);
      wgmma_fence();
      multiply_pairs<false>(o, v, in.A, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_keep(S);
    if constexpr (READS<Pass>) {
      wgmma_keep(o);
      if constexpr (GATED<Pass>) {
        if (gathers<Pass>()) put_sums(in.partner[warpgroup], o, crossing);
        add_own(o, in.v[warpgroup], gates.own);
      }
      __syncwarp();
      store_values(&in.v[warpgroup], o);
    }
    barrier_arrive(s.done[iteration % STAGES]);
  }
  const bool segments = SUMS<Pass> > 1;  // otherwise every state is kept
  if (x.final && !(segments && at.sequence % args.of)) {
    const i64 pair = segments ? at.sequence / args.of * args.shape.H + at.head : at.pair;
    each_transposed<BK>(S, x.final + pair * x.K * x.V, x, column, [](float& value, float* to) { *to = value; });
  }
  if constexpr (!READS<Pass>)
    for (i64 c = threadIdx.x; first == 0 && c < x.K; c += CONSUMERS<BV>) {
      float* const to = args.decays + at.pair * 2 * x.K + c;
      to[0] = total, to[x.K] = 1.f;
    }
}

template <class Pass, typename G, int BK, int BV>
__global__ void __cluster_dims__(PAIRS<Pass, BK, BV> ? 2 : 1)
    __launch_bounds__(ALL_THREADS<BV>, Registers<BK, BV>::BLOCKS)
        scalar_decay_sm90_weighted_sums(const __grid_constant__ Args<Pass, G> args) {
  auto& s = *reinterpret_cast<Shared<Pass, BK, BV>*>(dynamic_smem());
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const WeightedSum& x = args.sums[blockIdx.x % SUMS<Pass>];
  const i64 widest = SUMS<Pass> > 1 && x.K > x.V ? x.K : x.V;
  // With dg the second launch begins with the heads that the first ended with, of which L2 has tokens.
  const u32 tiles = tiles_of(widest, BV),
            turned = GATED<Pass> && SUMS<Pass> > 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const u32 block = turned / SUMS<Pass>;
  const WorkTile at = work_tile(args.shape, block / tiles);
  const int column = block % tiles * BV;
  const bool backwards = SUMS<Pass> == 2 || SUMS<Pass> > 2 && x.backwards;
  if (column >= x.V || !READS<Pass> && at.sequence % args.of >= args.needed) return;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.full[stage], 2 * 32);  // the tokens, then the decays
      barrier_init(s.scores[stage], 128);
      barrier_init(s.done[stage], CONSUMERS<BV>);
      barrier_init(s.summed[stage], 32);
    }
  if constexpr (PAIRS<Pass, BK, BV>)
    if (threadIdx.x == 0)
      for (Barrier& asked : s.asked) barrier_init(asked, 1);
  for (int i = threadIdx.x; i < STAGES * CHUNK * 32; i += ALL_THREADS<BV>)  // no key behind its query
    reinterpret_cast<u32*>(s.stages[i / (CHUNK * 32)].A)[i % (CHUNK * 32)] = 0;
  fence_async();
  if constexpr (PAIRS<Pass, BK, BV>) cluster_sync();
  else __syncthreads();
  using Own = Registers<BK, BV>;
  if (threadIdx.x < CONSUMERS<BV>) {
    registers_up<Own::CONSUMER>();
    consume<Pass, G, BK, BV>(s, args, x, at, column, backwards);
  } else if (threadIdx.x < CONSUMERS<BV> + 128) {
    registers_down<Own::SCORES>();
    if constexpr (READS<Pass>) multiply_tokens<Pass, BK, BV>(s, at.tokens, float(x.read * x.write), backwards);
  } else {
    registers_down<Own::OTHERS>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) {
      if (gathers<Pass>()) move(s, args.sums[0], at, column, backwards);  // constant addresses spare registers
      else move(s, args.sums[GATED<Pass> ? SUMS<Pass> - 1 : blockIdx.x % SUMS<Pass>], at, column, backwards);
    } else if (warp == 1) sum_chunks(s, x, args.g, at, backwards);
    else if constexpr (GATED<Pass>)
      if (warp == 2 && gathers<Pass>()) {
        if constexpr (SUMS<Pass> == 1) sum_queries(s, args, at, column / BV);
        else if constexpr (BK == BV) sum_gradients(s, args, at, 0, 1);  // known: fewer registers
        else sum_gradients(s, args, at, column / BV, tiles_of(x.V, BV));
      }
  }
  if constexpr (PAIRS<Pass, BK, BV>) cluster_sync();  // nobody leaves while the other arrives
}

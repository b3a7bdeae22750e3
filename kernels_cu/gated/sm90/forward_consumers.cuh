// what      The consumer warpgroups of Hopper's forward kernel: each holds 64 columns of the state S [K, V] in its
//           registers, transposed, and multiplies the operands of chunks that the producers have made.
// math      o = A v + (q decayed) S, S <- diag(decay) S + (k decayed)^T v, computed transposed: accumulators are
//           [column of V, token] and [column of V, channel of K]. A and q contain `scale`
// barriers  of a warpgroup, every chunk: o is in shared memory (SegmentState: v has been read). In a sequence's last
//           chunk also: the rows of v after its end are 0. One more only separates two loops, see `consume`
// numerics  S in float32; o reads S rounded to bfloat16, or to tf32 if data are float16
// limits    sm_90a
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_storage.cuh"
#include "wgmma.cuh"

// Calls f(number of S, its address in `state`) for every number of the transposed state that this lane holds and that
// lies within [K, V]. With t = lane % 4, g = lane / 4: S[4n + 2h + p] is channel 8n + 2t + p after `channel`, column
// 16 warp + g + 8h after `column`.
template <int BK, typename P, class F>
__device__ __forceinline__ void each(float (&S)[BK / 2], P* state, const Shape& shape, i64 channel, i64 column, F f) {
  const int t = threadIdx.x & 3;
  column += 16 * int(threadIdx.x / 32 % 4) + (threadIdx.x >> 2 & 7);
  P* row = state + (channel + 2 * t) * shape.V + column;
#pragma unroll
  for (int n = 0; n < BK / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      if (channel + 8 * n + 2 * t + (x & 1) < shape.K && column + 8 * (x >> 1) < shape.V)
        f(S[4 * n + x], row + (x & 1) * shape.V + 8 * (x >> 1));
    row += 8 * shape.V;
    __syncwarp();  // keeps the compiler from computing all addresses first, for which registers are too few
  }
}

// Multiplies N / 4 groups of 8 channels of the state, from channel `first` on, by the chunk's decays, which put_decays
// (forward_rows.cuh) has ordered by lanes: a float4 of each 16 channels. W: 4, or 1 if all channels have one decay.
template <int W, int N>
__device__ __forceinline__ void decay_state(float (&S)[N], const float* decays, int thread, int first = 0) {
  const float shared = decays[0];  // the decay of all channels if W is 1
  const int t = thread & 3;
#pragma unroll
  for (int n = 0; n < N / 4; n += 2) {
    float x[4] = {shared, shared, shared, shared};
    const float* const from = decays + (first + 8 * n) / 16 * 16 + 4 * t;
    if (W > 1 && N / 4 > 1) unpack(x, from);
    if (W > 1 && N / 4 == 1) {
      const float2 two = *reinterpret_cast<const float2*>(from + first % 16 / 8 * 2);
      x[0] = two.x, x[1] = two.y;
    }
#pragma unroll
    for (int m = 0; m < 2 && n + m < N / 4; ++m) {
      float* const y = S + 4 * (n + m);
      y[0] *= x[2 * m], y[1] *= x[2 * m + 1], y[2] *= x[2 * m], y[3] *= x[2 * m + 1];
    }
  }
}

// Starts o = A v. TWO: A holds rounding errors too. v: two operands of 16 tokens.
template <bool TWO, typename T, class Operands>
__device__ __forceinline__ void read_scores(float (&o)[16], const u32 (&v)[2][4], Operands& operands, int stage) {
  auto& tiles = operands.scores(stage);
#pragma unroll
  for (int rank = 0; rank < int(sizeof tiles / sizeof tiles[0]); ++rank) {
    u64 A = wgmma_tile(tiles[rank], 16, 1024) + operands.flip(stage) / 16;
    forget(A);
#pragma unroll
    for (int piece = 0; piece < (TWO ? 4 : 2); ++piece)
      wgmma<T, CHUNK, false>(o, v[piece % 2], A + piece * 32 / 16, rank + piece > 0);
  }
}

// `copy` makes a left operand of DEPTH channels of the state (number `tile`): in tf32, or in bfloat16 if T is.
template <typename T> struct StateOperand {
  static constexpr int DEPTH = 8;
  using Format = tf32;
  // Channels are in the order in which in_tile and put_state_query (forward_rows.cuh) store queries.
  static __device__ __forceinline__ void copy(u32 (&a)[4], const float* S, int tile) {
    const int swap = tile / 4 % 2 * 2;
    a[0 + swap] = copy_of(S[0]), a[1 + swap] = copy_of(S[2]), a[2 - swap] = copy_of(S[1]), a[3 - swap] = copy_of(S[3]);
  }
};
template <> struct StateOperand<bf16> {
  static constexpr int DEPTH = 16;
  using Format = bf16;
  static __device__ __forceinline__ void copy(u32 (&a)[4], const float* S, int) {
#pragma unroll
    for (int x = 0; x < 4; ++x) a[x] = pack<bf16>(S[2 * x], S[2 * x + 1]), forget(reinterpret_cast<int&>(a[x]));
  }
};

// Starts o = A v + (q decayed) S, and computes S <- diag(decay) S. The state is copied in parts of PART operands: while
// the tensor cores multiply one part, this thread copies the next one.
template <bool TWO, int W, int PART, typename T, int N, class Operands>
__device__ __forceinline__ void read_scores_and_state(float (&o)[16], float (&S)[N], const u32 (&v)[2][4],
                                                      Operands& operands, const float* decays, int stage, int thread) {
  using Copy = StateOperand<T>;
  constexpr int DEPTH = Copy::DEPTH, PARTS = 2 * N / DEPTH / PART, ACROSS = 4;  // ACROSS: operands a panel
  u32 a[2][PART][4];
  u64 panels = wgmma_tile(operands.q[stage], 16, 1024);
  forget(panels);
  const auto copy = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      float (&mine)[DEPTH / 2] = *reinterpret_cast<float (*)[DEPTH / 2]>(S + tile * (DEPTH / 2));
      Copy::copy(a[part & 1][n], mine, tile);
      decay_state<W>(mine, decays, thread, tile * DEPTH);
    }
  };
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      const u64 q = panels + (tile / ACROSS * (CHUNK * 128) + tile % ACROSS * 32) / 16;
      wgmma<typename Copy::Format, CHUNK, false>(o, a[part & 1][n], q, true);
    }
    wgmma_commit();
  };
  copy(0);
  if constexpr (PARTS > 1) copy(1);
  wgmma_fence();
  read_scores<TWO, T>(o, v, operands, stage);
  multiply(0);
  if constexpr (PARTS > 1) multiply(1);
#pragma unroll
  for (int part = 2; part < PARTS; ++part) {
    wgmma_wait<1>();
    copy(part);
    wgmma_fence();
    multiply(part);
  }
}

// Stores o of the chunk's token `row` in a tile.
template <typename T> __device__ __forceinline__ void put_row(T* tile, const float (&o)[16], int row, int thread) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = 0.f;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int p = 0; p < 2; ++p) x = row == 8 * n + thread % 4 * 2 + p ? o[4 * n + 2 * h + p] : x;
    T* const to = swizzled(tile, row, thread / 32 * 2 + h) + thread / 4 % 8;
    if (row % 8 / 2 == thread % 4) *to = from_float<T>(x);
  }
}

// Starts copying a chunk of v without a tensor map; for all threads of a warpgroup. A thread overwrites only pieces
// that it has read itself to store o. Rows from `rows` on and columns from `columns` on become zero.
template <typename T>
__device__ __forceinline__ void copy_values(T (&tile)[CHUNK][PANEL], const T* from, i64 stride, int rows, int columns,
                                            Barrier& loaded) {
  const int thread = opaque(threadIdx.x) % 128, piece = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < CHUNK; row += 16)
    cp_async<16>(swizzled(tile[0], row, piece), from + row * stride + 8 * piece, row < rows && 8 * piece < columns);
  copies_arrive(loaded);
}

// The work of one thread of a consumer warpgroup.
template <class Schedule, typename T, typename G, int BK, int BV> struct Consumer {
  using Storage = Shared<Schedule, T, G, BK, BV>;
  static constexpr int K_RANKS = Schedule::K_RANKS, SLOTS = Storage::VALUE_SLOTS, STAGES = Storage::STAGES;
  static constexpr int W = WIDTH<G>;
  // Of read_scores_and_state: two parts if there are many registers, else parts of one operand.
  static constexpr int PART = K_RANKS == 1 && BV == 64 && COARSE<T> ? BK / 32 : 1;
  static constexpr bool MARKS = Schedule::reads && K_RANKS == 1;

  Storage& s;
  const Args<T, G>& args;
  const WorkTile& work;
  const u32 tokens;
  int warpgroup, thread;           // thread: its number in the warpgroup
  float S[K_RANKS * BK / 2] = {};  // the state
  float total = 1.f;  // SegmentState: the decay over all chunks so far of one channel: decays[thread % BK]'s
  float o[16];
  u32 v[2][4];

  __device__ __forceinline__ Consumer(Storage& s, const Args<T, G>& args)
      : s(s), args(args), work(s.work), tokens(s.work.tokens), warpgroup(threadIdx.x / 128), thread(threadIdx.x % 128) {
    bool starts = work.initial;
    if constexpr (!Schedule::reads) total = s.scan.before, starts &= total != 0;
    if (starts) each_of_state(work.initial, [](float& x, const float* from) { x = *from; });
    if (runs_backwards<Schedule>(args))
      for (u32 chunk = 0; chunk < SLOTS; ++chunk) fetch_backwards(chunk);
    else if (thread == 0)
      for (u32 chunk = 0; chunk < SLOTS && chunk * CHUNK < tokens; ++chunk) fetch(chunk);
    __syncwarp();  // else CUDA 13.0's assembler keeps this thread apart from its warp: see tests/convergence.py
  }

  __device__ __forceinline__ int first_column() const { return work.column + warpgroup * PANEL; }
  __device__ __forceinline__ T* tile(u32 chunk) { return s.v[warpgroup][chunk % SLOTS][0]; }

  template <typename P, class F> __device__ __forceinline__ void each_of_state(P* state, F f) {
    each<K_RANKS * BK>(S, state, args.shape, args.channel, first_column(), f);
  }
  // Calls f(row of the chunk, piece of the row) for the 16-byte pieces of v and o that this thread copies or clears.
  template <class F> __device__ __forceinline__ void each_piece(F f) {
#pragma unroll
    for (int lower = 0; lower < CHUNK; lower += 16) f(thread / 8 + lower, thread % 8);
  }
  // The address that this lane gives to ldmatrix and stmatrix for four 8x8 matrices: 16 tokens from `token` on of this
  // warp's 16 columns. In fewer instructions it equals
  // swizzled(tile, token + (thread & 7) + (thread >> 4 & 1) * 8, thread / 32 * 2 + (thread >> 3 & 1)).
  __device__ __forceinline__ T* matrix_row(T* tile, int token) const {
    const int place = (thread & 7) * (128 + 16) ^ (thread & 96) ^ (thread << 1 & 16) ^ (thread << 6 & 1024);
    return reinterpret_cast<T*>(reinterpret_cast<char*>(tile) + place + token * 128);
  }

  // Starts copying a chunk of v; for one thread of the warpgroup.
  __device__ __forceinline__ void fetch(u32 chunk) {
    const u32 slot = chunk % SLOTS;
    Barrier& loaded = s.values[warpgroup][slot];
    barrier_expect(loaded, sizeof s.v[0][0]);
    tensor_load(s.v[warpgroup][slot], args.v, loaded, first_column(), work.start + chunk * CHUNK, work.head,
                work.batch);
  }
  // The same if the token stride is negative; for all threads of the warpgroup. No chunk after the sequence's end.
  __device__ __forceinline__ void fetch_backwards(u32 chunk) {
    const u32 slot = chunk % SLOTS, token = chunk * CHUNK;
    if (token >= tokens) return;
    const T* const from = args.v_rows.row(work.batch, work.head, work.start + token) + first_column();
    copy_values(s.v[warpgroup][slot], from, args.v_rows.t, int(tokens - token), int(args.shape.V) - first_column(),
                s.values[warpgroup][slot]);
  }

  // Starts o = A v + (q decayed) S and then, as a group of products of its own, S <- diag(decay) S + (k decayed)^T v.
  __device__ __forceinline__ void multiply(u32 stage) {
    const float* const decays = s.numbers[stage].decay[0];
    // `thread` costs a register, threadIdx.x computes it again. Each case has what was measured to be faster.
    const int lane = COARSE<T> && sizeof(G) == 2 && K_RANKS == 1 ? thread : int(threadIdx.x);
    if constexpr (Schedule::reads)
      read_scores_and_state<TWO_NUMBERS<Schedule, T>, W, PART, T>(o, S, v, s.operands, decays, stage, lane);
    else decay_state<W>(S, decays, thread), total *= decays[thread % BK];
    wgmma_keep(S);
    wgmma_fence();
    u64 k = wgmma_tile(s.operands.k[stage], CHUNK * 128, 1024);
    forget(k);
    wgmma<T, K_RANKS * BK, true>(S, v[0], k, true);
    wgmma<T, K_RANKS * BK, true>(S, v[1], k + 16 * 128 / 16, true);
    wgmma_commit();
  }

  // Orders this thread's reads of shared memory before the other block's next copy to it.
  __device__ __forceinline__ void before_peers_copy() const {
    if constexpr (Schedule::CLUSTER_SIZE > 1) fence_async();
  }

  // Tells the blocks that made a chunk's operands that this warp has read them; for one lane of a warp.
  __device__ __forceinline__ void release(u32 chunk, u32 stage) {
    before_peers_copy();
    const bool made_here = Schedule::CHUNK_RANKS == 1 || chunk % Schedule::CHUNK_RANKS == rank_of<Schedule>();
    if (made_here) barrier_arrive(s.empty[stage]);
    if (Schedule::K_RANKS > 1 || !made_here) arrive_at_peer(s.empty[stage]);
  }

  // Multiplies a chunk's operands, reads v and writes o over it. Returns whether the producers send the chunk's tokens
  // one by one: then these operands were zero.
  __device__ __forceinline__ bool take_chunk(u32 chunk) {
    const u32 token = chunk * CHUNK;
    const u32 stage = __shfl_sync(0xffffffffu, chunk % STAGES, 0);  // the compiler sees that lanes agree
    forget(thread);  // addresses are computed again, which is cheaper than to hold them in registers
    if constexpr (K_RANKS > 1) forget(warpgroup);
    barrier_wait(s.values[warpgroup][chunk % SLOTS], chunk / SLOTS & 1);
    T* const values = tile(chunk);
    if (token + CHUNK > tokens) {  // rows after the end may hold NaN, and 0 times NaN is NaN
      each_piece([&](int row, int piece) {
        if (token + row >= tokens) *reinterpret_cast<uint4*>(swizzled(values, row, piece)) = {0, 0, 0, 0};
      });
      barrier_sync(VALUES + warpgroup, 128);  // all warps see zeros in these rows
    }
    ldmatrix_x4_trans(v[0], matrix_row(values, 0));
    ldmatrix_x4_trans(v[1], matrix_row(values, 16));
    barrier_wait(s.full[stage], chunk / STAGES & 1);
    multiply(stage);

    if constexpr (!Schedule::reads) {
      fence_async();                          // orders these reads before the next copy of v
      barrier_sync(VALUES + warpgroup, 128);  // every warp has read v: its slot may be filled again
    }
    if (thread == 0 && chunk && token + (SLOTS - 1) * CHUNK < tokens && !runs_backwards<Schedule>(args)) {
      tensor_store_wait();  // the previous chunk's o has left the slot into which v is copied
      fetch(chunk + SLOTS - 1);
    }
    __syncwarp();
    if constexpr (Schedule::reads) {  // o overwrites v
      wgmma_wait<1>();
      wgmma_keep(o);
      forget(thread);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = o + 8 * half;
        const u32 rows[4] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
        stmatrix_x4_trans(matrix_row(values, 16 * half), rows);
      }
    }
    before_peers_copy();
    // Lane 0 reads it, since the same lane releases the stage after that.
    const bool one_by_one = __any_sync(0xffffffffu, thread % 32 == 0 && s.numbers[stage].row[0] != ALL_ROWS);
    wgmma_wait<0>();
    wgmma_keep(S);
    if (thread % 32 == 0) release(chunk, stage);
    return one_by_one;
  }

  // Multiplies a chunk's tokens one by one: the producers fill the stage for each token (forward_growth.cuh).
  __device__ __forceinline__ void take_tokens(u32 chunk) {
    int row = AGAIN;
#pragma unroll 1
    for (int step = 1; row & AGAIN; ++step) {
      const u32 stage = __shfl_sync(0xffffffffu, chunk % STAGES, 0);
      barrier_wait(s.full[stage], chunk / STAGES + step & 1);
      forget(thread);
      multiply(stage);
      wgmma_wait<0>();
      wgmma_keep(S);
      // Lane 0 reads it, since the same lane releases the stage after that; the other lanes get it from lane 0.
      row = __shfl_sync(0xffffffffu, thread % 32 == 0 ? s.numbers[stage].row[0] : 0, 0);
      if constexpr (Schedule::reads) {
        wgmma_keep(o);
        // With K_RANKS blocks `thread` is computed again, to save registers; elsewhere an assembler then serialised.
        const int lane = K_RANKS > 1 ? opaque(threadIdx.x) % 128 : thread;
        put_row(s.v[K_RANKS > 1 ? opaque(threadIdx.x) / 128 : warpgroup]
                   [(sizeof(G) == 4 ? u32(opaque(chunk)) : chunk) % SLOTS][0],
                o, row % AGAIN, lane);
      }
      before_peers_copy();
      __syncwarp();  // all lanes have read the decays
      if (thread % 32 == 0) release(chunk, stage);
    }
  }

  // Stores a chunk of o from the slot of v.
  __device__ __forceinline__ void store(u32 chunk) {
    if constexpr (Schedule::reads) {
      fence_async();
      barrier_sync(VALUES + warpgroup, 128);  // o is in shared memory
      const u32 token = chunk * CHUNK;
      T* const from = tile(chunk);
      if (token + CHUNK > tokens || runs_backwards<Schedule>(args)) {
        T* const to = args.o.row(work.batch, work.head, work.start + token) + first_column();
        const i64 columns = args.shape.V - first_column();
        each_piece([&](int row, int piece) {
          if (token + row < tokens && 8 * piece < columns)
            *reinterpret_cast<uint4*>(to + row * args.o.t + 8 * piece) =
                *reinterpret_cast<const uint4*>(swizzled(from, row, piece));
        });
      } else if (thread == 0) {
        tensor_store(args.o_boxes, from, first_column(), work.start + token, work.head, work.batch);
      }
    }
  }

  // Stores the state before a chunk if the backward pass needs it: if the chunk is a multiple of mask + 1 = mark_every.
  __device__ __forceinline__ void mark(u32 chunk, u32 mask) {
    if (MARKS && args.marks && (chunk & mask) == 0) {
      const i64 place = (work.sequence * args.marks_per_sequence + chunk / (mask + 1)) * args.shape.H + work.head;
      each_of_state(args.marks + place * args.shape.K * args.shape.V, [](float& x, float* to) { *to = x; });
    }
  }

  // Stores the state after the last chunk, and SegmentState's decays.
  __device__ __forceinline__ void finish() {
    tensor_store_wait();
    if constexpr (!Schedule::reads) {
      // The channel whose decay put_decays stores at decays[thread].
      const int channel = int(args.channel) + thread / 16 * 16 + thread / 2 % 2 * 8 + thread / 4 % 4 * 2 + thread % 2;
      float* const decays = args.decays + (i64(work.sequence) * args.shape.H + work.head) * 2 * args.shape.K + channel;
      if (first_column() == 0 && thread < BK && channel < args.shape.K) decays[0] = total, decays[args.shape.K] = 1.f;
    }
    if (work.final) each_of_state(work.final, [](float& x, float* to) { *to = x; });
  }
};

template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args) {
  using Me = Consumer<Schedule, T, G, BK, BV>;
  Me me(s, args);
  const u32 tokens = me.tokens;
  // The inner loop has the common chunks only: the instructions for marks and single tokens would slow it down. The
  // barrier keeps the compiler from merging both loops. With K_RANKS blocks registers are too few for two loops.
  const u32 mask = u32(args.mark_every) - 1;
  for (u32 chunk = 0; chunk * CHUNK < tokens;) {
    me.mark(chunk, mask);
    bool one_by_one = false;
    if constexpr (Me::K_RANKS == 1) barrier_sync(VALUES + me.warpgroup, 128);
    do {
      one_by_one = me.take_chunk(chunk);
      if (__builtin_expect(one_by_one, false)) {
        if constexpr (Me::K_RANKS == 1) break;
        me.take_tokens(chunk);
      }
      me.store(chunk);
      if (__builtin_expect(runs_backwards<Schedule>(args), false)) me.fetch_backwards(chunk + Me::SLOTS);
      ++chunk;
    } while (chunk * CHUNK < tokens && (!Me::MARKS || (chunk & mask) != 0));
    if (Me::K_RANKS == 1 && one_by_one) {
      me.take_tokens(chunk), me.store(chunk);
      if (runs_backwards<Schedule>(args)) me.fetch_backwards(chunk + Me::SLOTS);
      ++chunk;
    }
  }
  me.finish();
}

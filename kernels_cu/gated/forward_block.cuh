// what      What a block of the forward kernels of every card is, and does alike whether values have gates or not: its
//           part of the state, chunks on their way to shared memory, decays of spans, scores.
// limits    Args have q, k, v, g, initial, shape, channel, of, needed and bytes as gated/forward.cu has them
#include "gated/forward_copies.cuh"
#include "gated/forward_operands.cuh"
#include "gated/forward_products.cuh"
#include "gated/forward_storage.cuh"
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <class Args, class Schedule, typename T, typename G, int BK, int BV, int SHARES = 1> struct Block {
  static constexpr int THREADS = 2 * BV * SHARES, WARPS = THREADS / 32, STRIPS = BV / 16, C = CHUNK<T>;
  static constexpr int CHANNELS = BK / SHARES;  // of a warp
  static constexpr bool READS = Schedule::reads;
  static_assert(SHARES == 1 || SHARES == C / 16);
  using Mine = Share<T, BK, WARPS>;
  using Storage = Shared<Schedule, T, G, BK, BV, SHARES>;

  const Args& args;
  Storage& s;
  u32 tiles, pair, n, h, b;  // of columns; (sequence, head); sequence, head, row of the batch
  Span span;
  int v_tile, tokens, bytes, channels, columns;

  __device__ __forceinline__ Block(const Args& args, Storage& s) : args(args), s(s) {
    const Shape& shape = args.shape;
    const u32 H = u32(shape.H), count = u32(shape.count);
    tiles = u32(shape.V + BV - 1) / BV, pair = blockIdx.x / tiles;
    n = pair / H, h = pair % H, b = n / count;
    span = tokens_of(shape, n % count);
    v_tile = blockIdx.x % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
    channels = int(min(shape.K - args.channel, i64(BK))), columns = int(min(shape.V - v_tile, i64(BV)));
  }

  // Which channels and columns a warp has.
  static __device__ __forceinline__ int share_of(int warp) { return SHARES == 1 ? 0 : warp / STRIPS; }
  static __device__ __forceinline__ int strip_of(int warp) { return SHARES == 1 ? warp : warp % STRIPS; }

  // f(value, its place in the array of states, whether it is in there)
  template <class F> __device__ __forceinline__ void each(State<CHANNELS>& S, F f) const {
    const Shape& shape = args.shape;
    const int thread = opaque(threadIdx.x), warp = thread >> 5, g = thread >> 2 & 7, t = thread & 3;
    const int first = share_of(warp) * CHANNELS + 2 * t, column = strip_of(warp) * 16 + g;
    i64 at = (i64(pair) * shape.K + args.channel + first) * shape.V + v_tile + column;
#pragma unroll
    for (int c = 0; c < CHANNELS / 8; ++c) {
#pragma unroll
      for (int x = 0; x < 4; ++x)
        f(S[c][x], at + (x & 1) * shape.V + 8 * (x >> 1),
          8 * c + first + (x & 1) < channels && column + 8 * (x >> 1) < columns);
      at += 8 * opaque(int(shape.V));  // else all addresses are made at once, and there are no registers for that
    }
  }
  __device__ __forceinline__ void start_state(State<CHANNELS>& S) const {
    each(S, [&](float& x, i64 at, bool inside) { x = args.initial && inside ? args.initial[at] : 0.f; });
  }
  __device__ __forceinline__ void store_state(State<CHANNELS>& S) const {
    if (args.final)
      each(S, [&](float& x, i64 at, bool inside) {
        if (inside) args.final[at] = x;
      });
  }

  __device__ __forceinline__ void clear_scores() const {
    for (int at = threadIdx.x; at < s.NUMBERS * C * s.LDA; at += THREADS)
      s.A[at] = from_float<typename OperandOf<T>::Type>(0.f);
    if (threadIdx.x < STAGES) s.grows[threadIdx.x] = false;
    if (Mine::PARTS == 1)
      for (int at = threadIdx.x; at < 2 * C; at += THREADS) s.direct[at / C][1][at % C] = 0.f;
  }

  // Starts to copy the tokens of a chunk.
  __device__ __forceinline__ void fetch(int token, int stage) const {
    const int rows = tokens - token;
    const i64 at = span.start + token;
    const T *k = args.k.row(b, h, at) + args.channel, *v = args.v.row(b, h, at) + v_tile;
    const T* q = READS ? args.q.row(b, h, at) + args.channel : nullptr;
    if (bytes == 16) {
      copy_rows<16, 8, C, BK, THREADS>(s.k[stage], k, args.k.t, rows, channels);
      if constexpr (READS) copy_rows<16, 8, C, BK, THREADS>(s.q[stage], q, args.q.t, rows, channels);
      copy_rows<16, 8, C, BV, THREADS>(s.v[stage], v, args.v.t, rows, columns);
    } else {
      copy_slowly<C, BK, THREADS>(s.k[stage], k, args.k.t, rows, channels, bytes);
      if constexpr (READS) copy_slowly<C, BK, THREADS>(s.q[stage], q, args.q.t, rows, channels, bytes);
      copy_slowly<C, BV, THREADS>(s.v[stage], v, args.v.t, rows, columns, bytes);
    }
  }
  // The same of its gates, each to where this thread alone reads it.
  __device__ __forceinline__ void fetch_gates_of(int token) const {
#pragma unroll
    for (int x = 0; x < Mine::PER; ++x) {
      const Mine me(x);
      const G* from = args.g.row(b, h, span.start + token + me.row(0)) + args.channel + me.channel;
      const int rows = tokens - token - me.row(0);
      if (!me.any()) break;
      if (bytes >= Mine::W * int(sizeof(G))) fetch_gates<BK>(s.gates, me, from, args.g.t, rows, channels - me.channel);
      else
        fetch_gates_slowly<BK, Mine::W>(s.gates + me.row(0) * BK + me.channel, from, args.g.t, rows,
                                        channels - me.channel);
    }
  }

  // Starts to copy as many columns of a chunk's gates of values.
  __device__ __forceinline__ void fetch_columns(G* tile, const Rows<const G>& x, int token) const {
    const G* from = x.row(b, h, span.start + token) + v_tile;
    if (bytes == 16) copy_rows<16, 8, C, BV, THREADS>(tile, from, x.t, tokens - token, columns);
    else copy_slowly<C, BV, THREADS>(tile, from, x.t, tokens - token, columns, bytes);
  }

  // Decays of spans whose gates this thread has fetched; whether any grows.
  __device__ __forceinline__ bool put_spans() const {
    bool grows = false;
#pragma unroll
    for (int x = 0; x < Mine::PER; ++x) {
      const Mine me(x);
      if (!me.any()) break;
      Gates<Mine::W, G> gates;
      float decay[Mine::W];
      load_gates<BK>(gates, s.gates, me);
      decay_of_span<Mine::W>(decay, gates);
      put_decay(s.spans[me.span], me, decay);
      grows |= any_grows<Mine::W>(gates);
    }
    return grows;
  }

  template <class ReadOrder, int PRODUCTS> __device__ __forceinline__ void make_chunk_operands(int stage) const {
#pragma unroll
    for (int x = 0; x < Mine::PER; ++x) {
      const Mine me(x);
      if (me.any()) make_operands<ReadOrder, PRODUCTS>(s, stage, me);
    }
  }

  template <class ReadOrder, int PRODUCTS> __device__ __forceinline__ void score(int token, int stage) const {
#pragma unroll 1
    for (int task = threadIdx.x >> 5; task < TASKS<T>; task += WARPS) {
      if (task < C / BC && s.grows[stage]) {
        const i64 at = span.start + token + BC * task;
        const T *q = args.q.row(b, h, at) + args.channel, *k = args.k.row(b, h, at) + args.channel;
        const G* g = args.g.row(b, h, at) + args.channel;
        score_one_by_one<ReadOrder, PRODUCTS>(s, task, q, k, g, args.q.t, args.k.t, args.g.t,
                                              tokens - token - BC * task, channels);
      } else {
        make_scores<ReadOrder, PRODUCTS, Schedule, T, BK>(s, task);
      }
    }
  }
};

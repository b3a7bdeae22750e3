// what      GLA and RWKV-6 forward in one pass on Hopper: producer warps make the operands of a chunk (decayed queries
//           and keys, scores), consumer warpgroups multiply them by v and the state S [K, V]. A chunk whose log gates
//           are so far above 0 that its operands would overflow is computed token by token (forward_growth.cuh).
// math      per chunk of 32 tokens:  o = (scale q decayed from the chunk's start) S + A v, A [query, key] the scores
//           times scale (forward_scores.cuh);  S <- diag(the chunk's decay) S + (k decayed to the chunk's end)^T v.
//           The decay of several tokens is the product of their a_t = e^(g_t)
// shapes    q k, log gates g [B, H, T, K], v o [B, H, T, V], RWKV-6's bonus u [H, K], initial and final state
//           [N, H, K, V] float32. G, the type of g, may be ScalarDecay: one gate a token, [B, H, T] float32 of any
//           strides, decays all channels
// grid      forward_schedules.cuh. A block's first warps are consumers, four for every 64 columns of V; the other warps
//           are one or two groups of producers, which make the chunks in turn
// smem      Shared, in forward_storage.cuh
// barriers  mbarriers. gates_copied, qk_copied [group]: a chunk's inputs are there; full [stage]: its operands are
//           complete; empty [stage]: consumers have read them; values_copied: a chunk of v is in its slot. Named
//           barriers: forward_storage.cuh
// numerics  S in float32 accumulators; no difference of cumulated gates; see forward_operands.cuh
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    sm_90a; float16 or bfloat16 data T; K and V multiples of 8; a block has at most BK channels of K and BV
//           columns of V, BK and BV 64 or 128; rows start on 16 bytes
// instances Order, T, G, BK and BV of each Schedule:
//             SinglePass     both orders, both T, G of T and float32, all BK and BV; GLA with float16 and ScalarDecay
//             ClusterSplitK  as SinglePass, but BK = 128, and GLA with both T and ScalarDecay
//             ClusterSplitV  as SinglePass, but BV = 64, and never ScalarDecay
//             SegmentState   all of both T, G of T, float32 and ScalarDecay, BK and BV; AfterWrite for either operator
// tests     test_contract, test_segments, test_gate_paths; test_growth_on_hopper (by token); test_compile (no spills)
//
// Names. Of a Schedule: CLUSTER_SIZE, blocks of a cluster; K_RANKS, blocks that share the channels; CHUNK_RANKS, blocks
// that make chunks in turn; rank_in_cluster, the block's number in it. ProducerCoord::THREADS: of a producer group. Of
// Shared: GROUPS, producer groups; STAGES, chunks of operands; VALUE_SLOTS, chunks of v of a warpgroup; out_of_float16:
// a row of q or k exceeds float16's range; headers[stage].row[0]: WHOLE_CHUNK, or the one token that the stage holds;
// votes: whether a block of a ClusterSplitK wants a chunk token by token; scan.loaded: gates for narrow_work are there.
// PANEL = 64: columns of a warpgroup. SENT: how many arrivals at `full` the other block's copies of a chunk make.
// narrow_work sets s.work to this block's part of a segment, without tokens that are forgotten at its end.
// threads_copy_rows: tokens have a negative stride, for which there is no tensor map. Of args: segments of a sequence,
// the first `computed` of which SegmentState computes; parts of a segment, one a block
#include "read_order.cuh"
#include "ptx.cuh"
#include "gated/sm90/forward_consumers.cuh"
#include "gated/sm90/forward_forgotten.cuh"
#include "gated/sm90/forward_producers.cuh"
#include "gated/sm90/forward_storage.cuh"
#include "tensor.cuh"

// Threads of the consumers, a warpgroup of 128 for every 64 columns; and of a block, with its producer groups.
template <int BV> constexpr int CONSUMER_THREADS = BV * 2;
template <class Schedule, typename T, typename G, int BK, int BV>
constexpr int ALL_THREADS = CONSUMER_THREADS<BV> + Shared<Schedule, T, G, BK, BV>::GROUPS * ProducerCoord<BK>::THREADS;

// Order: AfterWrite (GLA: a token reads the state after its own write) or BeforeWrite (RWKV-6), read_order.cuh.
// Schedule: how blocks share the work, forward_schedules.cuh. T: the type of q, k, v and o; G: of g, or ScalarDecay.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__global__ void __cluster_dims__(Schedule::CLUSTER_SIZE)
    __launch_bounds__(ALL_THREADS<Schedule, T, G, BK, BV>, BK == 64 && BV == 64 ? 2 : 1)
        gated_sm90_forward(const __grid_constant__ Args<T, G> args) {
  using Storage = Shared<Schedule, T, G, BK, BV>;
  constexpr int THREADS = ALL_THREADS<Schedule, T, G, BK, BV>, CONSUMERS = CONSUMER_THREADS<BV>;
  constexpr int GROUP_THREADS = ProducerCoord<BK>::THREADS;  // of a producer group
  Storage& s = *reinterpret_cast<Storage*>(dynamic_smem());
  const WorkTile work = work_tile<Schedule, BV>(args, blockIdx.x);
  // Blocks of segments from number args.computed of their sequence on have nothing to do. They may leave before all
  // barriers: SegmentState, the one schedule without outputs, has no cluster. There `sequence` is the number of a part.
  static_assert(Schedule::has_outputs || Schedule::CLUSTER_SIZE == 1, "another block would wait for ever");
  if (!Schedule::has_outputs && work.sequence / i32(args.parts) % i32(args.segments) >= args.computed) return;
  if (threadIdx.x == 0) {
    s.work = work;
    // Who arrives: at *_copied the threads that copy; at full a producer group and the other block's copies; at empty a
    // lane of each warp that multiplies (`release`); at arrived a thread of each block.
    const bool backwards = threads_copy_rows<Schedule>(args);  // then all threads copy and arrive; else one thread
    for (int group = 0; group < Storage::GROUPS; ++group)
      mbarrier_init(s.gates_copied[group], backwards ? GROUP_THREADS : 1),
          mbarrier_init(s.qk_copied[group], backwards ? GROUP_THREADS : 1);
    static_assert(Storage::STAGES % Schedule::CHUNK_RANKS == 0, "one block makes all chunks of a stage");
    for (int stage = 0; stage < Storage::STAGES; ++stage) {
      const bool made_here = Schedule::CHUNK_RANKS == 1 || stage % Schedule::CHUNK_RANKS == rank_in_cluster<Schedule>();
      mbarrier_init(s.full[stage], (made_here ? GROUP_THREADS : 0) + (Schedule::K_RANKS > 1 || !made_here ? SENT : 0));
      mbarrier_init(s.empty[stage], CONSUMERS / 32 * Schedule::CLUSTER_SIZE);
    }
    constexpr int SLOTS = BV / PANEL * Storage::VALUE_SLOTS;  // of all warpgroups, one after the other
    static_assert(sizeof(Storage::values_copied) == SLOTS * sizeof(MBarrier));
    for (int slot = 0; slot < SLOTS; ++slot) mbarrier_init(s.values_copied[0][slot], backwards ? 128 : 1);
    for (int stage = 0; stage < Storage::STAGES; ++stage) s.headers[stage].row[0] = WHOLE_CHUNK;
    if constexpr (Schedule::has_outputs)
      for (int group = 0; group < Storage::GROUPS; ++group) s.score_operands[group].out_of_float16 = false;
    if constexpr (!Schedule::has_outputs) mbarrier_init(s.scan.loaded, 1);
    if constexpr (Schedule::K_RANKS > 1)
      for (MBarrier& arrived : s.votes.arrived) mbarrier_init(arrived, Schedule::K_RANKS);
  }
  if constexpr (Schedule::has_outputs) {
    if (Order::reads_before_write)
      for (int c = threadIdx.x; c < BK; c += THREADS) {
        const i64 channel = (Schedule::K_RANKS > 1 ? rank_in_cluster<Schedule>() * BK : 0) + c;
        s.u[c] = channel < args.shape.K ? args.u[work.head * args.shape.K + channel] : 0.f;
      }
    // Scores of a key later than the query stay zero: producers write none of them.
    u32* const scores = reinterpret_cast<u32*>(s.operands.A);
    for (int i = threadIdx.x; i < sizeof s.operands.A / sizeof(u32); i += THREADS) scores[i] = 0;
  }
  fence_proxy_async();
  if constexpr (Schedule::CLUSTER_SIZE > 1) cluster_sync();  // both blocks' barriers are initialised, and A is zero
  else __syncthreads();                                      // barriers are initialised, and A is zero
  if constexpr (!Schedule::has_outputs) narrow_work<THREADS>(s, args, work);
  // Whether producers give registers to the consumers (two warpgroups, with the channels of both blocks); whether
  // consumers, whose state is small, give some to the producers; a thread's registers by role. A multiprocessor has
  // 65,536 registers, 128 times 512: the registers of a thread, summed over all warpgroups on it, are 512 at most.
  constexpr bool CONSUMERS_NEED = THREADS == 384 && Schedule::K_RANKS > 1,
                 PRODUCERS_NEED = Schedule::has_outputs && BK == 64 && BV == 64;
  constexpr int CONSUMER = CONSUMERS_NEED ? 192 : 112, PRODUCER = CONSUMERS_NEED ? 120 : 144;
  static_assert(!CONSUMERS_NEED || CONSUMERS / 128 * CONSUMER + PRODUCER <= 512, "one block");
  static_assert(!PRODUCERS_NEED || 2 * (CONSUMER + PRODUCER) <= 512 && THREADS == 256, "two blocks of two warpgroups");
  if (threadIdx.x < CONSUMERS) {
    if constexpr (CONSUMERS_NEED) registers_up<CONSUMER>();
    if constexpr (PRODUCERS_NEED) registers_down<CONSUMER>();
    consume(s, args);
  } else {
    if constexpr (CONSUMERS_NEED) registers_down<PRODUCER>();
    if constexpr (PRODUCERS_NEED) registers_up<PRODUCER>();
    produce<Order>(s, args, threadIdx.x - CONSUMERS);
  }
  if constexpr (Schedule::CLUSTER_SIZE > 1) cluster_sync();  // the other block has copied its last data to this one
}

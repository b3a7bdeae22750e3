// what      A decoding step of one sequence in one launch: what RWKV-6 and RWKV-7 share. The including kernel includes
//           its version's decode_phases.cuh first. 256 threads compute; of products each of their warps has a share of
//           K. COPIERS other warps copy weights. Terms:
//             finishing warp  adds the warps' sums of a tile, and stores the results
//             stage           a tile's weights in STAGE neighbouring columns; copied to a ring (decode_weights.cuh)
//             staging area    shared memory for the vectors that are multiplied, as operands of tensor cores
//             epoch           the number of the layer, counted over all launches; HEAD's is one more than the last's,
//                             as the next token's first layer has. HEAD stores no words, and reads the last layer's
//             input           a vector that a phase multiplies; phases with several (mixes of key, value ...) number
//                             them
//             vector          a vector's place in the staging area, which has VECTORS of them for a norm's mixes
//             unit            with int8 weights a number of a vector is an integer of four digits times a unit, a power
//                             of 2 that each warp chooses for the numbers that it multiplies
// math      A layer is a sequence of phases (decode_phases.cuh). Most are products W x of weights [rows, K] with
//           vectors: x is LN(x) mixed with the previous token's, or what an earlier phase has computed. Rows are
//           computed in tiles of ROWS = 16; a block has some tiles of each phase (s.tiles). OUTPUT ends the time mix
//           and FFN_VALUE the channel mix: they add to the residual stream; FFN_INPUTS begins the channel mix; HEAD,
//           after all layers, gives the logits
// shapes    args.x [D]: the residual stream; att_shift, ffn_shift: the previous token's LN(x) of the time and of the
//           channel mix. args.xx [6, D]: see decode_norms.cuh. args.staged: how many numbers of a vector the staging
//           area holds at a time
// smem      Shared (decode_weights.cuh); behind it the staging area, with the operands of vectors
// barriers  mbarriers. full, empty: a stage of weights has been copied, has been read by all lanes; summed: the warps'
//           sums of a tile are in tile_sums; taken: the finishing warp has read them. Named: 1, of the computing
//           threads, see each call of sync(); 2, of these and the finishing warp, once: all have read args.arrived.
//           Results reach other blocks as words, which readers wait for (words.cuh): numbers with their epoch, in words
//           of 8 bytes (float32 weights), or with its lowest bit alone, in words of 4 bytes. These are written in every
//           layer, and not before all readers have read the layer before (decode_few.cu): so one bit is enough
// numerics  each number of a vector is TERMS numbers that tensor cores read exactly (decode_split.cuh); these are
//           columns of one product, and are added at the end
#include "rwkv6/decode_norms.cuh"

// From the includes:
//   THREADS = 256 threads compute, WARPS = 8 warps
//   Lane<T>::STAGE: columns of a stage; STEPS: a lane reads them in so many steps; PIECE: bytes of a row in a stage
//   Split<T>: how numbers are split into TERMS terms; SUMS: sums to which a step's instructions add in turn, as one
//     waits for the one before it in the same sum; Sum<T>::Type: their type, an integer for int8 weights. PACKED:
//     numbers in a word of operands. DIGITS: whether terms are digits of base 256, from -128 to 127: int8 weights
//   put_word: stores a number for other blocks; load_words, settle_words: load words, until they are of this epoch;
//     number: a word's number
//   load_stages: loads operands from the staging area; fetch<FOURS, GATED>: waits for words and stores their operands,
//     FOURS groups of four in each iteration; AT_ONCE<FOURS>: how many numbers all warps have in one iteration.
//     NEIGHBOURS: words that a load of 16 bytes has
//   normalise: stores the operands of a phase's first mix of LN(x), mix_again: those of another one. normed_words,
//     x_words, last_x_words: the words of LN(x), of x after a mix, and of x after the last layer
//   row_of_slot: where the lane's part of the next stage begins; next_slot goes on to the stage after it
//   state_row: the row of the states of all layers
//   init_stages: initialises barriers and the block's tiles (`summed` and `empty` for an arrival of each computing
//     thread, `taken` of each lane of the finishing warp); copy_weights: the loop of the copying warps; rows_of,
//     depth_of: the rows of a tile, and their length K
//   Tiles: count() of them; [n] is the n-th one's number
//   PHASES: of a layer; multiplies: whether a phase multiplies by weights; is_normed: whether by LN(x) or its mixes
//   input_of: the input of a tile
//   opaque: hides a value's origin from the compiler
//   args.arrived: of each block, how many layers it has computed in all launches; first, last: the launch has phases
//     [first, last), numbered layer * PHASES + phase

// Version: the class of the version's phases, which is derived from this one. It has
//   finish   stores results of phases other than OUTPUT, FFN_VALUE and HEAD
//   fetch    waits for the vector of a phase that is not normed, and stores its operands
//   compute  a phase that is no product of weights
//   gate_of  the factor of a channel of FFN_VALUE: RWKV-6's receptance, 1 in RWKV-7
// T: the type of weights, S: of the recurrent state. From its decode_phases.cuh come Phase, Args and
//   VECTORS     2: a block computes both mixes of FFN_INPUTS at once, and no other normed phase has two inputs; 1: one
//               mix at a time; then a version with a normed phase of several inputs has KEEPS_NORM
//   KEEPS_NORM  LN(x) stays in the staging area, for mix_again
//   HOLDS_WEIGHTS  of OUTPUT and FFN_INPUTS lanes load the first weights before the vector is there (`held` in
//               `products`). They are multiplied by the first numbers that are staged, so all of the vector must be
//               staged at once. The host makes args.staged at least D, their K (rwkv6_model_kernels.py); FFN_VALUE's
//               vector may be staged in parts
//   share_of    gives a block the same tiles of OUTPUT and of FFN_VALUE, in every layer: one `case` has both
constexpr int MOST_DIGITS = 8192;  // the most numbers in the staging area with digits

template <class Version, typename T, typename S, int STAGES> struct DecodeLayers : DecodeNorms<T, S, STAGES> {
  typedef DecodeNorms<T, S, STAGES> Block;
  using Block::args, Block::s, Block::staging, Block::D, Block::tid, Block::stage, Block::parity, Block::epoch;
  using Block::TERMS, Block::PACKED, Block::DIGITS, Block::normed_words, Block::x_words, Block::last_x_words;
  typedef typename Block::Operands Operands;
  typedef typename Block::Word Word;
  static_assert(VECTORS == 2 || VECTORS == 1 && KEEPS_NORM, "a phase with two inputs is normed once");
  // Tiles of all phases so far: even and odd ones use the two places in s.tile_sums. `products` and finish_products
  // count the same tiles, each in its own warps; `decode` hands the count, like `next`, from phase to phase.
  int tile_count;

  // next: twice the number of the next stage of weights, plus the parity of its barrier `full`.
  __device__ __forceinline__ DecodeLayers(const Args<T, S>& args, Shared<STAGES>& s, u32 epoch, int next = 0,
                                          int tile_count = 0)
      : Block(args, s, epoch, next), tile_count(tile_count) {}
  __device__ __forceinline__ Version& version() { return static_cast<Version&>(*this); }

  static constexpr int GROUP = PACKED > 1 ? 2 : 1;  // stages multiplied at a time
  static constexpr int CHAINS =
      sizeof(T) == 4 ? 1 : STEPS;  // independent sums, so that products do not wait for one another
  // Stages of a vector's operands that a lane has in registers at a time. With digits, a vector of up to 2048 numbers
  // is loaded once for all tiles.
  static constexpr int VECTOR_STAGES = DIGITS ? 2048 / Lane<T>::STAGE : GROUP;
  static_assert(VECTOR_STAGES % GROUP == 0);  // `products` takes GROUP stages of them at a time
  // Whether lanes load HELD_STAGES stages of weights (`held` in `products`) before the vector is there. Not with int8,
  // whose vector takes these registers (VECTOR_STAGES).
  static constexpr bool HOLDS = HOLDS_WEIGHTS && !DIGITS;
  static constexpr int HELD_STAGES = 2;
  static constexpr int LANES = DIGITS ? 2 : 1;                  // lanes of the finishing warp for each row
  static_assert(LANES * ROWS <= 32 && WARPS / LANES % 4 == 0);  // a lane loads the sums of four warps at a time
  typedef typename Sum<T>::Type Sums[CHAINS][Split<T>::SUMS][4];

  static constexpr bool GATED = true, UNGATED = false;
  // FOURS: groups of four words that a lane waits for at once. If FEW groups are all that it has, it waits for these.
  // Held weights, and gates, leave registers for fewer. With digits FOURS groups must be all of the numbers staged, at
  // most MOST_DIGITS: `fetch` finds one unit for each iteration, and products know one.
  static constexpr int FEW = 2;

  // Waits for `count` words, and stores the operands of their numbers in the staging area, in a row for each term.
  // pitch: from one row to the next, in numbers; `staged` of `products`, also for a last part with fewer numbers.
  __device__ __forceinline__ void fetch_words(const Word* words, int pitch, int count) {
    const Word* const gates = nullptr;
    fetch_staged<Block::NEIGHBOURS + (HOLDS ? 1 : 4), UNGATED>(words, gates, pitch, count);
  }
  // The same for the products of words with the words `gates`.
  __device__ __forceinline__ void fetch_gated(const Word* words, const Word* gates, int pitch, int count) {
    fetch_staged<DIGITS ? 8 : FEW, GATED>(words, gates, pitch, count);
  }
  template <int FOURS, bool HAS_GATES>
  __device__ __forceinline__ void fetch_staged(const Word* words, const Word* gates, int pitch, int count) {
    static_assert(!DIGITS || Block::template AT_ONCE<FOURS> >= MOST_DIGITS);
    __syncwarp();  // the warp has read its part of the staging area, which is overwritten
    if (FOURS == FEW || count <= Block::template AT_ONCE<FEW>)
      Block::template fetch<FEW, HAS_GATES>(words, gates, pitch, count);
    else Block::template fetch<FOURS, HAS_GATES>(words, gates, pitch, count);
  }

  // -- products ------------------------------------------------------------------------------------------------------
  // Stores the result of `row` of a tile, from its sum. Phases with inputs of their own (key, value ...) number them by
  // `input`. xx: LN(x) of the row's channel, for phases that add to x.
  __device__ __forceinline__ void finish_row(i64 layer, int phase, int tile, int input, int row, float sum, float xx) {
    switch (phase) {
      case OUTPUT:
      case FFN_VALUE:
        row += tile * ROWS;  // of the matrix from here on
        if (row >= D) break;
        put_word(x_words(phase == FFN_VALUE) + row, sum, epoch);
        if (phase == FFN_VALUE && layer == args.L - 1) put_word(last_x_words() + row, sum, epoch);
        // This thread alone reads it as the sum so far: OUTPUT and FFN_VALUE have the same tiles. In layer 0 all blocks
        // read it for a norm (take_x), but have done so: the vector of OUTPUT depends on what they computed from it.
        args.x[row] = sum;
        (phase == FFN_VALUE ? args.ffn_shift : args.att_shift)[state_row(args, layer) * D + row] = xx;
        break;
      case HEAD:
        row += tile * ROWS;
        if (row < args.V) args.logits[row] = sum;
        break;
      default:
        version().finish(phase, tile, input, row, sum);
    }
  }

  // A lane's weights of a stage: its columns of rows g = lane / 4 (above) and g + 8 (below), 16 bytes for each step.
  struct Slot {
    uint4 above[STEPS], below[STEPS];
  };

  // Waits for the next N stages of weights, 16 rows each, and loads the lane's weights of them. copy_weights fills
  // stages in the order in which `products` takes them: by phase, tile of s.tiles, and column.
  template <int N> __device__ __forceinline__ void load_slots(Slot* slots, int (&stages)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const unsigned char* row = Block::row_of_slot();
      mbarrier_wait(s.full[stage], parity);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        // Rows of one parity follow each other (Shared::ring): row g + 8 is 4 PIECE bytes after row g.
        const uint4* from = reinterpret_cast<const uint4*>(row + step * (PIECE / STEPS));
        slots[n].above[step] = from[0], slots[n].below[step] = from[4 * PIECE / 16];
      }
      stages[n] = stage;
      Block::next_slot();
    }
  }
  // Lets stages that have been loaded be overwritten. Each lane arrives itself, after a fence of its own: a barrier
  // alone would not order its plain reads of the stages before the bulk copies that overwrite them.
  template <int N> __device__ __forceinline__ void release_slots(const int (&stages)[N]) {
    fence_proxy_async();
#pragma unroll
    for (int n = 0; n < N; ++n) mbarrier_arrive(s.empty[stages[n]]);
  }
  // sums += the weights of N stages times the lane's operands x of the same columns.
  template <int N>
  static __device__ __forceinline__ void multiply_by(Sums& sums, const Slot* slots, const Operands* x) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        Split<T>::multiply(sums[step % CHAINS], slots[n].above[step], slots[n].below[step], x[n][step]);
  }

  // Adds the products of the next N stages of weights with x to `sums`, and releases the stages.
  template <int N> __device__ __forceinline__ void multiply_slots(Sums& sums, const Operands* x) {
    Slot slots[N];
    int stages[N];
    load_slots<N>(slots, stages);
    multiply_by<N>(sums, slots, x);
    release_slots(stages);
  }

  // Adds the products of the next stages of weights with the `count` numbers of a vector that lanes have in x.
  __device__ __forceinline__ void multiply_in_registers(Sums& sums, const Operands* x, int count) {
#pragma unroll
    for (int n = 0; n < VECTOR_STAGES; n += GROUP) {  // n: a stage
      if ((n + GROUP - 1) * Lane<T>::STAGE < count) multiply_slots<GROUP>(sums, x + n);
      else if (n * Lane<T>::STAGE < count) multiply_slots<1>(sums, x + n);
    }
  }
  // The same with the numbers of the staging area from number k on, of which x takes GROUP stages at a time.
  __device__ __forceinline__ void multiply_staged(Sums& sums, Operands* x, int vector, int pitch, int count, int k) {
#pragma unroll 1
    for (; k + (GROUP - 1) * Lane<T>::STAGE < count; k += GROUP * Lane<T>::STAGE) {
      Block::template load_stages<GROUP>(x, vector, pitch, count, k);
      multiply_slots<GROUP>(sums, x);
    }
#pragma unroll 1
    for (; k < count; k += Lane<T>::STAGE) {
      Block::template load_stages<1>(x, vector, pitch, count, k);
      multiply_slots<1>(sums, x);
    }
  }

  // Adds a lane's sums to its totals. Sums i are of column 2 t + i % 2 of the product, t = lane % 4: with digits, of
  // digit number `column`, which is worth 256^column units. Columns from 4 on are not used. The unit differs between
  // the numbers that are staged at a time.
  __device__ __forceinline__ void add_sums(float (&totals)[4], Sums& sums, int vector) const {
    const float unit = DIGITS ? s.units[vector][tid >> 5] * float(1u << (16 * (tid & 1))) : 1.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      typename Sum<T>::Type sum = 0;
#pragma unroll
      for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
        for (int n = 0; n < Split<T>::SUMS; ++n) sum += sums[chain][n][i], sums[chain][n][i] = 0;
      if (DIGITS) totals[i] += unit * (i % 2 ? 256.f : 1.f) * float(sum);
      else totals[i] += sum;
    }
  }

  // Which of the two places in s.tile_sums a tile's sums have, and the parity of the place's barriers.
  struct SumsPlace {
    int buffer;
    u32 parity;
  };
  static __device__ __forceinline__ SumsPlace place_of(int tile) { return {tile & 1, u32(tile) >> 1 & 1}; }

  // Waits until the sums of the place's previous tile have been read.
  __device__ __forceinline__ void wait_for_place(int tile) {
    const SumsPlace place = place_of(tile);
    mbarrier_wait(s.taken[place.buffer], place.parity ^ 1);
  }

  // The computing warps' part of a phase that multiplies by weights: for each of the block's tiles, stores every warp's
  // sums over its columns of K in s.tile_sums. Waits for the vector (normalise, or fetch), for stages of weights, and
  // for the place in tile_sums.
  __device__ __forceinline__ void products(i64 layer, int phase) {
    const Tiles tiles = s.tiles[phase];
    if (tiles.count() == 0) return;  // finish_products and copy_weights have nothing to do either
    const bool normed = is_normed(phase);
    // Only if a tile has HELD_STAGES stages.
    const bool holds = HOLDS && (phase == OUTPUT || phase == FFN_INPUTS) && D > (HELD_STAGES - 1) * Lane<T>::STAGE;
    Slot held[HELD_STAGES];  // the first weights of the first tile
    if (holds) {
      int stages[HELD_STAGES];
      load_slots<HELD_STAGES>(held, stages);
      release_slots(stages);
    }
    if (normed) Block::normalise(layer, phase, tiles[0]);
    const int warp = tid >> 5, g = (tid & 31) >> 2, t = tid & 3;
    const int K = opaque(depth_of(args, phase));
    const int staged = normed ? K : min(K, int(args.staged));                 // numbers in the staging area at a time
    const bool in_registers = DIGITS && K <= VECTOR_STAGES * Lane<T>::STAGE;  // whether lanes hold the whole vector
    int staged_input = -1;                                                    // the input that is in the staging area
    Operands x[VECTOR_STAGES];  // of the vector: all of it if in_registers, otherwise of GROUP stages
#pragma unroll 1
    for (int n = 0; n < tiles.count(); ++n, ++tile_count) {
      const int input = input_of(args, phase, tiles[n]), vector = normed && VECTORS == 2 ? input : 0;
      float totals[4] = {};
      Sums sums = {};
#pragma unroll 1
      for (int start = 0; start < K; start += staged) {
        const int count = min(staged, K - start);
        if (staged_input != input || staged < K) {
          if (!normed) version().fetch(phase, input, start, staged, count);
          else if (KEEPS_NORM && n > 0) Block::mix_again(layer, phase, input);
          if (in_registers) Block::template load_stages<VECTOR_STAGES>(x, vector, staged, count, 0);
          staged_input = input;
        }
        const bool held_first = holds && n == 0;
        if (held_first) {
          Operands first[HELD_STAGES];
          Block::template load_stages<HELD_STAGES>(first, vector, staged, count, 0);
          multiply_by<HELD_STAGES>(sums, held, first);
        }
        if (in_registers) multiply_in_registers(sums, x, count);
        else multiply_staged(sums, x, vector, staged, count, held_first ? HELD_STAGES * Lane<T>::STAGE : 0);
        // With digits after each part of the vector, whose unit is its own. Otherwise once, after the last part.
        if (DIGITS || start + staged >= K) add_sums(totals, sums, vector);
      }
      const SumsPlace place = place_of(tile_count);
      wait_for_place(tile_count);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 2 * t + i % 2;  // of the product: a term of the vector's numbers
        if (column < TERMS) s.tile_sums[place.buffer][column][g + i / 2 * 8][warp] = totals[i];
      }
      mbarrier_arrive(s.summed[place.buffer]);  // by each thread, for what it has stored
    }
  }

  // The sum of row `lane` % ROWS of the tile in a place of s.tile_sums over warps and terms, by LANES lanes.
  __device__ __forceinline__ float sum_of_row(int buffer, int lane) const {
    float sums[TERMS][WARPS / LANES], sum = 0.f;
#pragma unroll
    for (int term = 0; term < TERMS; ++term)
#pragma unroll
      for (int warp = 0; warp < WARPS / LANES; warp += 4) {
        const int first = lane / ROWS % LANES * (WARPS / LANES) + warp;
        const float4 four = load4(&s.tile_sums[buffer][term][lane % ROWS][first]);
        sums[term][warp] = four.x, sums[term][warp + 1] = four.y;
        sums[term][warp + 2] = four.z, sums[term][warp + 3] = four.w;
      }
#pragma unroll
    for (int warp = 0; warp < WARPS / LANES; ++warp) {
      float all = 0.f;
#pragma unroll
      for (int term = 0; term < TERMS; ++term) all += sums[term][warp];
      sum += all;
    }
    if (LANES > 1) sum += __shfl_xor_sync(0xffffffffu, sum, ROWS);
    return sum;
  }

  // `products` for the finishing warp: adds the warps' sums of each tile, with one or two lanes a row, and stores the
  // results.
  __device__ __forceinline__ void finish_products(i64 layer, int phase) {
    const Tiles tiles = s.tiles[phase];
    const int m = tid & 31;
    // The scale of a row of int8 weights; it is loaded one tile ahead.
    const auto scale_of = [&](int n) {
      if (sizeof(T) > 1 || n >= tiles.count() || m >= ROWS) return 1.f;
      return rows_of(args, layer, phase, tiles[n]).scales[m];
    };
    float scale, next = scale_of(0);
#pragma unroll 1
    for (int n = 0; n < tiles.count(); ++n, ++tile_count) {
      scale = next, next = scale_of(n + 1);
      const int tile = tiles[n], input = input_of(args, phase, tile), at = tile * ROWS + m;
      const bool channel_mix = phase == FFN_VALUE, adds = (phase == OUTPUT || channel_mix) && m < ROWS && at < D;
      const Word* const xx_words[1] = {normed_words(channel_mix) + at};
      Word xx[1] = {};
      float before = 0.f, gate = 1.f;
      if (adds) {
        load_words(xx, xx_words), before = args.x[at];
        if (channel_mix) gate = version().gate_of(at);
        settle_words(xx, xx_words, epoch);
      }
      const SumsPlace place = place_of(tile_count);
      mbarrier_wait(s.summed[place.buffer], place.parity);
      const float sum = sum_of_row(place.buffer, m);
      mbarrier_arrive(s.taken[place.buffer]);
      if (m < ROWS) finish_row(layer, phase, tile, input, m, fmaf(gate, scale * sum, before), number(xx[0]));
    }
  }
};

// Computes phases [first, last); for the 256 computing threads and the finishing warp.
template <class Version, typename T, typename S, int STAGES>
__device__ __forceinline__ void decode(const Args<T, S>& args, Shared<STAGES>& s) {
  const bool finishes = threadIdx.x >= THREADS;
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const u32 before = args.arrived[blockIdx.x];
  int next = 0;  // twice the next stage of weights, plus the parity of its barrier `full`
  int tile_count = 0;
#pragma unroll 1
  for (int n = int(args.first); n < int(args.last); ++n) {
    const int layer = n / PHASES, phase = layer == args.L ? int(HEAD) : n % PHASES;
    Version block(args, s, before + layer + 1, next, tile_count);
    if (finishes) {
      if (multiplies(phase)) block.finish_products(layer, phase);
    } else {
      if (n > args.first) sync();  // the previous phase's shared memory has been read
      if (multiplies(phase)) block.products(layer, phase);
      else block.compute(layer, phase);
    }
    next = block.stage * 2 + int(block.parity), tile_count = block.tile_count;
  }
  named_barrier_sync(2, THREADS + 32);  // all threads have read args.arrived, which is overwritten
  // If each phase has a launch of its own, all of a token's launches begin with the same `before`: HEAD's, the last
  // one, adds the layers.
  if (threadIdx.x == 0 && args.last > args.L * PHASES) args.arrived[blockIdx.x] = before + u32(args.L);
}

// The whole kernel: COPIERS warps copy weights, all others compute.
template <class Version, typename T, typename S, int STAGES>
__device__ __forceinline__ void decode_token(const Args<T, S>& args) {
  Shared<STAGES>& s = *reinterpret_cast<Shared<STAGES>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  init_stages(args, s);
  const bool copies = threadIdx.x >= THREADS && threadIdx.x < ALL_THREADS - 32;
  if (copies) copy_weights(args, s);
  else decode<Version, T, S, STAGES>(args, s);
}

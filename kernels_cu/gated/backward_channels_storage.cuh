// what      Arguments and shared memory of gated/backward_channels.cu, and how a lane reads and writes its part of them
// terms     a chunk has 64 tokens in two halves, a half two blocks of 16 tokens, a block two sub-chunks of 8. S [K, V]:
//           the state before the chunk; dS: the gradient of the state after it. dA_ij = scale do_i . v_j of query i and
//           key j. NC: chunks of a batch row
// layout    A warp has 16 channels, from warp_channel on. Of these and of 16 tokens, two sub-chunks, a lane has
//             channels      lane_channel + 8 octet, octet 0 or 1; lane_channel = lane / 4
//             tokens        2 lane_pair and the next of each sub-chunk, as a float2; lane_pair = lane % 4
//             index p       0 to 3: octet p % 2, sub-chunk p / 2
//
// From fragments.cuh: Math<T, PRODUCTS>, how data T are multiplied: Stored, the type of operands in memory; HeldLeft, a
// lane's operand [16 channels, 16 tokens]; load_channels loads a tile [16 tokens, 16 channels] by index p. From
// backward.cuh: matrix_index(row, column), where an 8 x 8 matrix of a tile of a state begins; LD<T, COLUMNS>, the
// distance of rows in a tile of shared memory; STORED_SCORE, NEAR_SCALE; CHUNK = 64 tokens, NUM_SUBCHUNKS = 8, TILE =
// 64 channels or columns; a block has THREADS = 128 threads, in WARPS = 4
#include "backward.cuh"

constexpr int COLUMNS = 32;                           // columns of V in one stage of shared memory
constexpr int STEPS = COLUMNS / 16;                   // matrix products a stage: each contracts 16 columns
constexpr int BLOCKS = CHUNK / 16;                    // blocks of 16 tokens, two sub-chunks each
constexpr int DA_BLOCKS = BLOCKS * (BLOCKS + 1) / 2;  // blocks [16, 16] of dA on and below the diagonal
constexpr int BLOCKS_PER_WARP = (DA_BLOCKS + WARPS - 1) / WARPS;
constexpr int HALF = NUM_SUBCHUNKS / 2;  // sub-chunks of half a chunk: 4, of 8 tokens
static_assert(BLOCKS == 4 && HALF == 4, "row_of, and the borders of HalfChunk, are written for these");

// The template argument Columns. Type: that of v and do in memory, `Value` below. turned: see GatedTurned. Ungated:
// columns of V have no gates, and v and do are the caller's arrays, of type T.
struct Ungated {
  static constexpr bool gated = false, turned = false;
  template <typename T, typename Stored> using Type = T;
};
// Gated: columns of V have gates. v comes decayed to the chunk's end, do decayed from its start, both of the type
// `Stored` that products take.
struct Gated {
  static constexpr bool gated = true, turned = false;
  template <typename T, typename Stored> using Type = Stored;
};
// Gated, with keys and values exchanged, for dv and dgv. The kernel reads the transposes of S and dS. The members of
// Args, on the left, are here, on the right, in the names of the caller, who has log gates gv of the columns of V:
//   q, k, g                do, v, gv
//   given_do, given_v, gv  q, k, g
//   do_, v                 q decayed from the chunk's start, k decayed to its end
//   shape.K, shape.V       V, K
//   scores, diagonal       scale q_i . k_j with decays, in the place of dA
//   decays                 the product of each channel's decays over the chunk, of K
//   row_growth             the growth of the columns of V
//   column_growth          the growth of the channels of K
//   dq, dk, dg             null (nobody wants a gradient of do), dv, dgv
// chunk_states is the same array as for Gated, so that tiles are [column, channel] here; see the use of `turned`
struct GatedTurned : Gated {
  static constexpr bool turned = true;
};

template <typename T, typename G, typename Value> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const Value> v, do_;
  StridedRows<const G> g;
  StridedRows<T> dq, dk;
  StridedRows<G> dg;
  const float* u;            // null for GLA
  const void* chunk_states;  // of the type that products take (Math::Stored)
  float* partial_du;         // null for GLA
  Shape shape;
  i64 first, heads;  // this launch computes heads first ... first + heads - 1
  double scale;
  // The members from here on are used if Columns is gated. The host leaves them null otherwise.

  // dA [B, heads, NC, 64, 64], without its diagonal, times STORED_SCORE, within a sub-chunk also times NEAR_SCALE.
  const void* scores;
  const float* diagonal;       // dA's diagonal [B, heads, NC, 64]
  const float* decays;         // the product of each column's decays over the chunk [B, heads, NC, padded V]
  const float* row_growth;     // [B, heads, NC]: the largest of all channels' sums of positive log gates over the chunk
  const float* column_growth;  // [B, heads, NC]: the largest of all columns' sums of positive log gates
  StridedRows<const T> given_v, given_do;  // v and do as the caller gave them, without decays
  StridedRows<const G> gv;                 // log gates of columns [B, H, T, V]
};

// Distances of neighbouring tokens in v and do, and in dA. Values: a stage of v and do.
constexpr int LDV = COLUMNS + 8, LDA = CHUNK + 8;
static_assert(TILE % COLUMNS == 0, "a stage's columns are of one tile of a state");
template <typename T> struct alignas(16) Values {
  T v[CHUNK * LDV];    // [64 tokens, 32 columns]
  T do_[CHUNK * LDV];  // [64, 32]
};

// What pairs of tokens are computed from. Overwrites the stages of v and do, after all products with them.
template <class M> struct PairData {
  // [64, 64]: query i, key j < i, times STORED_SCORE (if columns have gates, as Args::scores), else zeros, in the ten
  // blocks [16, 16] on and below the diagonal. The six others, which no product reads, are undefined unless columns
  // have gates.
  typename M::Stored dA[CHUNK * LDA];
  float diagonal[CHUNK];  // dA_ii
  // The thread's own operands, which no other thread reads, at the border between the halves, for each block of 16
  // tokens: keys of the first half decayed to it, queries of the second half decayed from it.
  HeldLeft<M> border32[BLOCKS][THREADS];
  float decays[NUM_SUBCHUNKS][TILE];  // the product of each channel's decays over each sub-chunk
  float state_terms[2][THREADS];      // the thread's own share of dg's term of S and dS, by octet
};

template <typename T, typename G, int PRODUCTS, class Columns> struct alignas(16) Shared {
  T q[CHUNK * LD<T, TILE>];  // [64 tokens, 64 channels], overwritten by dq
  T k[CHUNK * LD<T, TILE>];  // overwritten by dk
  G g[CHUNK * LD<G, TILE>];  // overwritten by dg
  union {
    Values<typename Columns::template Type<T, typename Math<T, PRODUCTS>::Stored>> values[2];  // two stages
    PairData<Math<T, PRODUCTS>> pairs;
  };
};

// The row and the column, in blocks of 16 tokens, of a block on or below dA's diagonal. Blocks count row by row.
__device__ __forceinline__ int row_of(int block) { return block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3; }
__device__ __forceinline__ int column_of(int block) {
  const int row = row_of(block);
  return block - row * (row + 1) / 2;
}

// This lane's numbers of S and of dS, of 16 channels by COLUMNS columns: [slot][p], a slot for 16 columns, p as in
// `layout` with columns in the place of tokens.
template <class M, bool TURNED> struct States {
  using Stored = typename M::Stored;
  struct alignas(2 * sizeof(Stored)) Neighbours {  // of one channel, in two neighbouring columns
    Stored x, y;
  };
  Neighbours S[STEPS][4], dS[STEPS][4];

  // A tile [64 channels, 64 columns] of a state is stored as 8 x 8 matrices (matrix_index, backward.cuh). `row` and
  // `column` count these matrices; if TURNED, the tile in memory is [column, channel]. Returns the lane's pair of one
  // matrix: channel lane / 4, columns 2 (lane % 4) and the next.
  static __device__ __forceinline__ Neighbours load_pair(const Stored* tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    if (!TURNED) return *reinterpret_cast<const Neighbours*>(tile + matrix_index(row, column) + 2 * lane);
    const Stored* matrix = tile + matrix_index(column, row) + 2 * (lane & 3) * 8 + (lane >> 2);
    return {matrix[0], matrix[8]};
  }

  // Fills a slot from 2 x 2 of the 8 x 8 matrices of the tiles of S and dS, from (row, column) on.
  __device__ __forceinline__ void load(int slot, const Stored* S_tile, const Stored* dS_tile, int row, int column) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      S[slot][p] = load_pair(S_tile, row + (p & 1), column + (p >> 1));
      dS[slot][p] = load_pair(dS_tile, row + (p & 1), column + (p >> 1));
    }
  }
};

// What a block computes: 64 channels of a chunk.
struct ChannelTile {
  int tile;     // the tile's number: channels 64 tile ... 64 tile + 63
  i64 c, h, b;  // chunk, head, batch
  Span span;    // the chunk's tokens
};

// A warp's 16 channels of the chunk in shared memory, as a lane reads and writes them; see `layout`.
template <typename T, typename G, int PRODUCTS, class Columns> struct WarpChannels {
  using M = Math<T, PRODUCTS>;
  Shared<T, G, PRODUCTS, Columns>& s;
  const int warp_channel, lane_channel, lane_pair;

  // Loads block m of 16 tokens of q or k by index p.
  __device__ __forceinline__ void load(float2 (&x)[4], const T* tile, int m) const {
    load_channels(x, tile + 16 * m * LD<T, TILE> + warp_channel, LD<T, TILE>);
  }
  // Calls f(p, log gates of this lane's two tokens) for each index p of block m.
  template <class F> __device__ __forceinline__ void gates_of_block(int m, F f) const {
    float2 gates[4];
    load_channels(gates, s.g + 16 * m * LD<G, TILE> + warp_channel, LD<G, TILE>);
#pragma unroll
    for (int p = 0; p < 4; ++p) f(p, gates[p]);
  }
  __device__ __forceinline__ float2 gates_of_pair(int m, int p) const {  // the same for one p
    const G* gate =
        s.g + (16 * m + 8 * (p >> 1) + 2 * lane_pair) * LD<G, TILE> + warp_channel + lane_channel + 8 * (p & 1);
    return float2{to_float(gate[0]), to_float(gate[LD<G, TILE>])};
  }
  // The decay of the lane's channel over sub-chunk n, in shared memory.
  __device__ __forceinline__ float& decay_over(int n, int octet) const {
    return s.pairs.decays[n][warp_channel + lane_channel + 8 * octet];
  }
  // The diagonal of dA at this lane's two tokens of sub-chunk n.
  __device__ __forceinline__ float2 diagonal_of(int n) const {
    return *reinterpret_cast<const float2*>(s.pairs.diagonal + 8 * n + 2 * lane_pair);
  }
  // Stores x of this lane's two tokens of sub-chunk n in a tile [64 tokens, 64 channels] of shared memory.
  template <typename X> __device__ __forceinline__ void put_tokens(X* tile, int n, int octet, float2 x) const {
    X* to = tile + (8 * n + 2 * lane_pair) * LD<X, TILE> + warp_channel + lane_channel + 8 * octet;
    to[0] = from_float<X>(x.x), to[LD<X, TILE>] = from_float<X>(x.y);
  }
};

// what      What gated/backward_channels.cu computes in another way where products of decays could leave float32's
//           range: pairs of tokens one by one, dg's term of S and dS, and, if columns have gates, whole chunks token by
//           token
// numerics  float32
//
// From the includes: gradients_of_pairs(t, q, k, decay, dA): the terms of token t's pairs within its sub-chunk of 8
// tokens, in dq_t, dk_t and dg_t; tokens_at(x, b, h, t, channel): x from token t and this channel on; its .at(i,
// channel, channels): a number, 0 for channels from `channels` on; matrix_index(row, column): where an 8 x 8 matrix of
// a tile of a state begins; LD<T, COLUMNS>: the distance of rows in a tile of shared memory; STORED_SCORE<M>: the
// factor of dA in shared memory. Of a block's 16 tokens and a warp's 16 channels a lane has, by index p from 0 to 3,
// tokens 2 lane_pair and the next of sub-chunk p / 2 of channel lane_channel + 8 octet, octet = p % 2
#include "gated/backward_channels_storage.cuh"
#include "value_gate/by_token.cuh"

// For blocks of 16 tokens whose gates exceed GROWTH: the terms of the pairs within sub-chunks in dq,
// dk and dg, by index p.
struct PairSums {
  float2 dq[4], dk[4], dg[4];
};
// Sets `sums` of each block m of 16 tokens whose bit m of `blocks` is set. q, k and gates: 64 tokens, from the warp's
// first channel on. dA: 64 x 64.
template <class ReadOrder, class M, typename T, typename G, typename Stored>
__device__ __noinline__ void sum_pairs_one_by_one(PairSums (&sums)[BLOCKS], const T* q, const T* k, const G* gates,
                                                  const Stored* dA, u32 blocks) {
  const int lane = threadIdx.x & 31, lane_channel = lane >> 2, lane_pair = lane & 3;
#pragma unroll 1
  for (int index = 0; index < 8 * BLOCKS; ++index) {
    const int m = index / 8, p = index / 2 % 4, token = index % 2;
    if (!(blocks >> m & 1)) continue;
    const int channel = lane_channel + 8 * (p & 1), first_token = 16 * m + 8 * (p >> 1);  // of the sub-chunk
    const PairGradients x = gradients_of_pairs<ReadOrder>(
        2 * lane_pair + token, [&](int i) { return to_float(q[(first_token + i) * LD<T, TILE> + channel]); },
        [&](int j) { return to_float(k[(first_token + j) * LD<T, TILE> + channel]); },
        [&](int i) { return decay_of(to_float(gates[(first_token + i) * LD<G, TILE> + channel])); },
        [&](int i, int j) { return 1 / STORED_SCORE<M> * to_float(dA[(first_token + i) * LDA + first_token + j]); });
    const auto set_token = [&](float2& pair, float value) { (token ? pair.y : pair.x) = value; };
    set_token(sums[m].dq[p], x.dq), set_token(sums[m].dk[p], x.dk), set_token(sums[m].dg[p], x.dg);
  }
}

// The products of the decays of columns `column` and `column` + 1 over the chunk, from `chunk_decays` [width]: 1 if
// columns have no gates, 0 for columns from `width` on.
template <class Columns>
__device__ __forceinline__ float2 decays_of_columns(const float* chunk_decays, int column, int width) {
  if (!Columns::gated) return {1.f, 1.f};
  return column < width ? *reinterpret_cast<const float2*>(chunk_decays + column) : float2{0.f, 0.f};
}

// Returns this lane's share of dg's term of S and dS: the sum over V of decay S dS, for channels lane / 4 (x) and
// lane / 4 + 8 (y). S is multiplied by the decay before it is multiplied by dS, since S dS alone may overflow. S, dS:
// the tiles of the first columns in memory. `decay`: of the two channels over the chunk; `column_decays` [width]: of
// the columns; `row`: the warp's first channel, in 8 x 8 matrices; `column_stages`: stages of COLUMNS columns in V;
// `next_tile`: the distance of tiles of columns in memory.
template <class M, class Columns>
__device__ __noinline__ float2 decayed_state_terms(const typename M::Stored* S, const typename M::Stored* dS, int row,
                                                   int column_stages, float2 decay, const float* column_decays,
                                                   int width, int next_tile) {
  float2 sum = {0.f, 0.f};
#pragma unroll 1
  for (int step = 0; step < column_stages * STEPS; ++step) {
    States<M, Columns::turned> states;
    const int offset = step * 16 / TILE * next_tile;
    states.load(0, S + offset, dS + offset, row, step * 16 % TILE / 8);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const auto &S_pair = states.S[0][p], &dS_pair = states.dS[0][p];
      float& channel_sum = p & 1 ? sum.y : sum.x;
      const int column = 16 * step + 8 * (p >> 1) + 2 * (threadIdx.x & 3);
      const float2 both_decays = (p & 1 ? decay.y : decay.x) * decays_of_columns<Columns>(column_decays, column, width);
      channel_sum = fmaf(both_decays.x * to_float(S_pair.x), to_float(dS_pair.x),
                         fmaf(both_decays.y * to_float(S_pair.y), to_float(dS_pair.y), channel_sum));
    }
  }
  return sum;
}

// Computes and stores dq, dk and dg of a chunk token by token, for columns with gates whose log gates are so large that
// products of decays may overflow. A warp has one channel at a time, a lane one column at a time. Starts from the
// chunk's S and dS, at S_tiles and dS_tiles, and reads v and do without decays (given_v, given_do).
template <bool TURNED, typename Stored, typename T, typename G, typename Value>
__device__ __noinline__ void compute_token_by_token(const Args<T, G, Value>& args, const Stored* S_tiles,
                                                    const Stored* dS_tiles, int next_tile, const ChannelTile& work) {
  const int lane = threadIdx.x & 31, tokens = int(work.span.stop - work.span.start);
  const int first_channel = work.tile * TILE, channels = int(args.shape.K), columns = int(args.shape.V);
  const auto chunk_of = [&](const auto& x) { return tokens_at(x, work.b, work.h, work.span.start, 0); };
  const auto q = chunk_of(args.q), k = chunk_of(args.k), v = chunk_of(args.given_v), do_ = chunk_of(args.given_do);
  const auto g = chunk_of(args.g), gv = chunk_of(args.gv);
  const float scale = float(args.scale);
#pragma unroll 1
  for (int row = threadIdx.x >> 5; row < TILE && first_channel + row < channels; row += WARPS) {
    const int channel = first_channel + row;
    float dq[2] = {}, dk[2] = {}, dg[2] = {};  // of tokens `lane` and 32 + `lane`
    // Adds the sum of x over the warp to `to` in the lane that has the token.
    const auto add_over_warp = [&](float (&to)[2], int token, float x) {
#pragma unroll 1
      for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
      if (token % 32 == lane) (token < 32 ? to[0] : to[1]) += x;
    };
#pragma unroll 1
    for (int start = 0; start < columns; start += 32) {
      const int column = start + lane, in_tile = column % TILE;
      const int index =
          column / TILE * next_tile + (TURNED ? matrix_index(in_tile / 8, row / 8) + in_tile % 8 * 8 + row % 8
                                              : matrix_index(row / 8, in_tile / 8) + row % 8 * 8 + in_tile % 8);
      float S = column < columns ? to_float(S_tiles[index]) : 0.f,
            dS = column < columns ? to_float(dS_tiles[index]) : 0.f;
      // [i]: the state after token i's decay, before its key and value are added. grown(x, sum) of tensor.cuh is
      // x exp(sum), finite also if exp(sum) alone overflows.
      float decayed[CHUNK];
#pragma unroll 1
      for (int i = 0; i < tokens; ++i) {
        decayed[i] = grown(S, g.at(i, channel, channels) + gv.at(i, column, columns));
        S = fmaf(k.at(i, channel, channels), v.at(i, column, columns), decayed[i]);
        add_over_warp(dq, i, scale * S * do_.at(i, column, columns));
      }
#pragma unroll 1
      for (int i = tokens - 1; i >= 0; --i) {
        dS = fmaf(scale * q.at(i, channel, channels), do_.at(i, column, columns), dS);
        add_over_warp(dk, i, v.at(i, column, columns) * dS);
        add_over_warp(dg, i, decayed[i] * dS);
        dS = grown(dS, g.at(i, channel, channels) + gv.at(i, column, columns));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 token = work.span.start + 32 * half + lane;
      if (token >= work.span.stop) continue;
      if (!TURNED) args.dq.row(work.b, work.h, token)[channel] = from_float<T>(dq[half]);
      args.dk.row(work.b, work.h, token)[channel] = from_float<T>(dk[half]);
      args.dg.row(work.b, work.h, token)[channel] = from_float<G>(dg[half]);
    }
  }
}

// A merge by several CTAs. If a row tile has many partials, merging them in one CTA takes longer than computing them.
// So CTAs of the merge group that have nothing else to do wait a while for each other, and then take rows in turn. The
// last CTA to arrive always takes part, so that no CTA's wait can be endless: it may wait in vain for CTAs that have
// not started yet, but the merge does not depend on it.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/tile/shared/partial.cuh"

namespace quire {

// MergeGroup::num_arrived as three counters: CTAs that arrived, turns taken, and CTAs that left. The last CTA to leave
// resets it to 0.
struct MergeCounters {
  static constexpr int kBits = 10, kMost = (1 << kBits) - 1;
  static constexpr uint32_t kArrival = 1, kTurn = 1 << kBits, kLeaving = 1 << 2 * kBits;
  static constexpr int kMostArrivals = kMost - 128;  // turns: one for each row, and one in vain for each CTA
  static constexpr int kSpinClocks = 1 << 16;        // clocks

  uint32_t* at;

  QUIRE_DEVICE static int arrived(uint32_t x) { return x & kMost; }
  QUIRE_DEVICE int take_turn() const { return ptx::atomic_add_acq_rel(at, kTurn) >> kBits & kMost; }

  // Arrives. Returns whether all CTAs have arrived; waits a while for them if `may_wait`.
  QUIRE_DEVICE bool arrive(int num_arrivals, bool may_wait) const {
    uint32_t seen = ptx::atomic_add_acq_rel(at, kArrival) + kArrival;
    const long long begin = clock64();
    while (may_wait && arrived(seen) < num_arrivals && clock64() - begin < kSpinClocks) seen = ptx::load_acquire(at);
    return arrived(seen) == num_arrivals;
  }
  QUIRE_DEVICE void count_leaving(int num_arrivals) const {
    const uint32_t left = (ptx::atomic_add_acq_rel(at, kLeaving) >> 2 * kBits) + 1;
    if (static_cast<int>(left) == num_arrivals) *at = 0;
  }
};

// Partial results as the MLA kernel stores them: of each 16 rows 64 blocks of 8 columns, of a block 16 bytes a lane as
// wgmma leaves them: two columns of row lane / 4 and of the one 8 below.
//
// A turn of a merge: 16 rows, and kBlocks blocks for each of 8 warps; kParts partials of each on their way at a time.
// The four lanes that share rows divide the partials' states. Partials are added four at a time, from the first on,
// whatever kParts is: the bits of a row do not depend on how many partials follow that have none of its keys.
template <class V, int kBlocks, int kParts>
QUIRE_DEVICE void merge_turn(const MergeParams& p, const WorkTile& work, const MergeGroup& group, int turn,
                             int thread) {
  constexpr int kSlices = 8 / kBlocks, kPartQuads = V::kTileRows * V::kHeadDimVo / 4, kStates = ceil_div(kParts, 4);
  static_assert(V::kHeadDimVo == 512 && (kParts % 4 == 0 || kParts < 4), "64 blocks of columns; four lanes share rows");
  const int lane = thread % 32, first = turn / kSlices * 16, row = first + lane / 4;
  const int block = turn % kSlices * 8 * kBlocks + thread / 32;
  const int64_t begin = int64_t{group.parts_begin} * V::kTileRows;
  const auto* quads = reinterpret_cast<const float4*>(p.partial_o + (begin + first) * V::kHeadDimVo);
  const auto* states = reinterpret_cast<const float2*>(p.partial_md) + begin + row;
  quads += block * 32 + lane, states += lane % 4 * V::kTileRows;
  float m[2] = {kNoLogit, kNoLogit}, d[2] = {0.f, 0.f};  // d: the part of this lane
  float o[2][kBlocks][2];
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) o[i / 2 % 2][i / 4][i % 2] = 0.f;
  // The compiler knows that two partials take one round, and uses fewer registers.
#pragma unroll 1
  for (int left = group.num_parts(), is_first = 1; is_first || (kParts > 2 && left > 0); left -= kParts) {
    is_first = 0;
    float2 state[2][kStates];
    float4 part[kParts][kBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kStates; ++i) {
      state[i % 2][i / 2] = {kNoLogit, 0.f};
      if (i / 2 * 4 + lane % 4 < min(left, kParts))
        state[i % 2][i / 2] = __ldcg(states + i / 2 * 4 * V::kTileRows + i % 2 * 8);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        part[i][n] = {0.f, 0.f, 0.f, 0.f};
        if (i < left) part[i][n] = __ldcg(quads + i * kPartQuads + n * 8 * 32);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        const float top = quad_max(fmaxf(m[h], state[h][i].x)), keep = ptx::ex2(m[h] - top);
        const float weight = ptx::ex2(state[h][i].x - top);
        m[h] = top, d[h] = fmaf(weight, state[h][i].y, d[h] * keep);
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n) o[h][n / 2][n % 2] *= keep;
#pragma unroll
        for (int j = 4 * i; j < min(4 * i + 4, kParts); ++j) {
          const float w = __shfl_sync(0xffffffffu, weight, lane / 4 * 4 + j % 4);
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            o[h][n][0] = fmaf(w, h == 0 ? part[j][n].x : part[j][n].z, o[h][n][0]);
            o[h][n][1] = fmaf(w, h == 0 ? part[j][n].y : part[j][n].w, o[h][n][1]);
          }
        }
      }
    }
    quads += kParts * kPartQuads, states += kParts * V::kTileRows;
  }
  d[0] = quad_sum(d[0]), d[1] = quad_sum(d[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= group.num_rows) continue;
    const WorkTile::Place to = work.place(p.group, work.tile.row_begin + row + 8 * h);
    const RowResult result = finish_row_of<V>(p, to.head, m[h], d[h]);
    auto* dst = static_cast<typename V::O*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride;
    auto* words = reinterpret_cast<uint32_t*>(dst + block * 8) + lane % 4;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      words[n * 8 * 4] = ptx::pack(typename V::O{}, o[h][n][0] * result.scale, o[h][n][1] * result.scale);
    }
    if (block == 0 && lane % 4 == 0 && p.lse != nullptr) {
      store_statistics<V>(p, work.tile, to, result.lse, m[h], d[h]);
    }
  }
}

// Chooses the number of columns in a turn; the sums are the same. One turn for each CTA is best: a group with many
// partials, and so many CTAs, has turns of fewer columns. With two partials, one CTA has mostly gone on to other work:
// the other CTA merges alone, all columns in one turn.
template <class V>
struct MergeTurns {
  int num_parts, count;

  QUIRE_DEVICE explicit MergeTurns(const MergeGroup& group) : num_parts(group.num_parts()) {
    count = ceil_div(group.num_rows, 16) * (num_parts <= 2 ? 1 : num_parts <= 8 ? 2 : 8);
  }
  QUIRE_DEVICE void take(const MergeParams& p, const WorkTile& work, const MergeGroup& group, int turn,
                         int thread) const {
    if (num_parts <= 2) {
      merge_turn<V, 8, 2>(p, work, group, turn, thread);
    } else if (num_parts <= 8) {
      merge_turn<V, 4, 4>(p, work, group, turn, thread);
    } else {
      merge_turn<V, 1, 16>(p, work, group, turn, thread);
    }
  }
};

// Arrives and merges, after the 256 threads have stored a partial. `may_wait`: the CTA has nothing else to do.
// `shared_turn` lies in shared memory; kBarrier is a named barrier of these threads. A work tile has kCtasPerTile CTAs.
// This is a function call, because the main loop leaves no registers to inline it. The parameters are read once:
// through a reference each row would wait for them again.
template <class V, int kBarrier, int kCtasPerTile>
__device__ __noinline__ void merge_together(const AttentionParams& params, const WorkTile& work, bool may_wait,
                                            int& shared_turn, int thread) {
  const MergeParams p(params);
  const MergeGroup group = params.groups[work.group];
  const MergeTurns<V> turns(group);
  const int num_arrivals = turns.num_parts * kCtasPerTile, num_turns = turns.count;
  const MergeCounters counters = {&params.groups[work.group].num_arrived};
  const bool is_leader = thread == 0, is_shared = num_arrivals <= MergeCounters::kMostArrivals;
  const auto sync = [] { ptx::named_barrier_sync(kBarrier, 256); };
  int turn;
  if (is_shared) {
    sync();
    if (is_leader) shared_turn = counters.arrive(num_arrivals, may_wait) ? counters.take_turn() : num_turns;
    sync();
    turn = shared_turn;
  } else {
    turn = arrives_last(params.groups + work.group, num_arrivals, is_leader, shared_turn, sync) ? 0 : num_turns;
  }
  while (turn < num_turns) {
    int next = turn + 1;
    if (is_shared && is_leader) next = counters.take_turn();
    turns.take(p, work, group, turn, thread);
    if (is_shared) {
      sync();
      if (is_leader) shared_turn = next;
      sync();
      next = shared_turn;
    }
    turn = next;
  }
  if (is_shared && is_leader) counters.count_leaving(num_arrivals);
}

}  // namespace quire

// Merging by all CTAs that are there: where a row tile has many partials, one CTA would merge for longer than all of
// them computed. The CTAs of a merge group that have nothing else to do wait for each other, for a while, and then take
// its rows in turn. The last to arrive always takes part, so that nobody has to come: a CTA may wait for others that
// have not started yet only in vain, never forever.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/tile/partial.cuh"

namespace quire {

// MergeGroup::num_arrived as three counters: of CTAs that arrived, of turns taken, and of CTAs that left. The last one
// to leave makes it 0 again.
struct MergeCounters {
  static constexpr int kBits = 10, kMost = (1 << kBits) - 1;
  static constexpr uint32_t kArrival = 1, kTurn = 1 << kBits, kLeaving = 1 << 2 * kBits;
  static constexpr int kMostArrivals = kMost - 128;  // turns: one for each row, and one in vain for each CTA
  static constexpr int kPatience = 1 << 16;          // clocks

  uint32_t* at;

  QUIRE_DEVICE static int arrived(uint32_t x) { return x & kMost; }
  QUIRE_DEVICE int take_turn() const { return ptx::atomic_add_acq_rel(at, kTurn) >> kBits & kMost; }

  // Whether all have arrived; waits for them if `may_wait`.
  QUIRE_DEVICE bool arrive(int num_arrivals, bool may_wait) const {
    uint32_t seen = ptx::atomic_add_acq_rel(at, kArrival) + kArrival;
    const long long begin = clock64();
    while (may_wait && arrived(seen) < num_arrivals && clock64() - begin < kPatience) seen = ptx::load_acquire(at);
    return arrived(seen) == num_arrivals;
  }
  QUIRE_DEVICE void count_leaving(int num_arrivals) const {
    const uint32_t left = (ptx::atomic_add_acq_rel(at, kLeaving) >> 2 * kBits) + 1;
    if (static_cast<int>(left) == num_arrivals) *at = 0;
  }
};

// Rows first .. first + 2 * kRows of a merge group: 128 threads have four columns each of kRows rows, kParts partials
// of each on their way at a time. 256 threads.
template <class V, int kRows, int kParts>
QUIRE_DEVICE void merge_rows(const MergeParams& p, const WorkTile& work, const MergeGroup& group, int first,
                             int thread) {
  constexpr int kVo = V::kHeadDimVo;
  static_assert(kVo == 512, "128 threads have four columns each");
  const int lane = thread % 32, col = thread % 128 * 4, num_parts = group.num_parts<V::kTileRows>();
  first += thread / 128 * kRows;
  RowQuad sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = kNoKeys;
#pragma unroll 1
  for (int begin = 0; begin < num_parts; begin += kParts) {
    float2 md[kRows];
    float4 o[kRows][kParts];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = group.row_begin + begin * V::kTileRows + min(first + r, group.num_rows - 1);
      const int part = lane % kParts;
      md[r] = {kNoLogit, 0.f};
      if (begin + part < num_parts)
        md[r] = __ldcg(reinterpret_cast<const float2*>(p.partial_md) + row + part * V::kTileRows);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        o[r][i] = {0.f, 0.f, 0.f, 0.f};
        if (begin + i < num_parts)
          o[r][i] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + (row + i * V::kTileRows) * kVo + col));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) add_parts<kParts>(sum[r], md[r], o[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 1; i < kParts; i *= 2) sum[r].d += __shfl_xor_sync(0xffffffffu, sum[r].d, i);
    if (first + r < group.num_rows) store_quad<V>(p, work, work.tile.row_begin + first + r, col, sum[r]);
  }
}

// Rows that are merged in a turn: twice as many where few partials each keep fewer bytes on their way.
QUIRE_DEVICE int rows_of_turn(int num_parts) { return num_parts <= 4 ? 8 : 4; }

template <class V>
QUIRE_DEVICE void merge_turn(const MergeParams& p, const WorkTile& work, const MergeGroup& group, int first,
                             int thread) {
  const int num_parts = group.num_parts<V::kTileRows>();
  if (num_parts <= 4) {
    merge_rows<V, 4, 4>(p, work, group, first, thread);
  } else {
    merge_rows<V, 2, 8>(p, work, group, first, thread);
  }
}

// After the 256 threads have stored a partial result. `may_wait`: the CTA has nothing else to do. `shared_turn` is in
// shared memory, kBarrier a named barrier of these threads. A function that is called: kernels whose registers are
// taken have none to spare beside their main loop. A work tile has kCtasPerTile CTAs.
// It reads the parameters once: by a reference, each row would wait for them again.
template <class V, int kBarrier, int kCtasPerTile>
__device__ __noinline__ void merge_together(const AttentionParams& params, const WorkTile& work, bool may_wait,
                                            int& shared_turn, int thread) {
  const MergeParams p(params);
  const MergeGroup group = params.groups[work.group];
  const int num_parts = group.num_parts<V::kTileRows>();
  const int turn_rows = rows_of_turn(num_parts);
  const int num_arrivals = num_parts * kCtasPerTile, num_turns = ceil_div(group.num_rows, turn_rows);
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
    merge_turn<V>(p, work, group, turn * turn_rows, thread);
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

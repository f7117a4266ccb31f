// The end of a work tile in a cascade: it arrives at each merge group that takes rows of it, and the CTA merges those
// at which it is the last (core/schedule.h).
#pragma once
#include "quire/core/schedule.h"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/math.cuh"
#include "quire/tile/shared/partial.cuh"

namespace quire {

// A merge group that a CTA arrives at: its entry of the merge table, and its KV head.
struct ArrivalAt {
  int entry, kv_head;

  QUIRE_DEVICE static ArrivalAt of(const AttentionParams& p, const WorkTile& work, int i) {
    return {(work.tile.group + i) * p.num_kv_heads + work.kv_head, work.kv_head};
  }
  QUIRE_DEVICE CascadeGroup& group(const AttentionParams& p) const {
    return reinterpret_cast<CascadeGroup*>(p.groups)[entry];
  }
};

// The fields of CascadeGroup that a launch does not change, and the KV head; lane i has those of group i.
struct GroupInfo {
  int row, num_rows, parts_begin, num_parts, kv_head;

  // `fields`: the fields of MergeGroup.
  QUIRE_DEVICE static GroupInfo of(const int4& fields, int row, int kv_head) {
    return {row, fields.z, fields.x, fields.y - fields.x, kv_head};
  }
  QUIRE_DEVICE GroupInfo of_lane(int lane) const {
    return {__shfl_sync(0xffffffffu, row, lane), __shfl_sync(0xffffffffu, num_rows, lane),
            __shfl_sync(0xffffffffu, parts_begin, lane), __shfl_sync(0xffffffffu, num_parts, lane),
            __shfl_sync(0xffffffffu, kv_head, lane)};
  }
  template <class V>
  QUIRE_DEVICE PartRows<V> parts(const MergeGroup* groups, int lane) const {
    return PartRows<V>::of(groups, parts_begin, num_parts, lane);
  }
};

// The rows of several groups, which the warps of a CTA take in turn, kRowsOfTurn at a time.
template <int kRowsOfTurn>
struct RowQueue {
  uint32_t groups;  // groups that are left: a bit for each lane
  int next_turn;    // this warp's next rows, counted from the first group that is left

  QUIRE_DEVICE int at() const { return __ffs(groups) - 1; }

  // Drops the groups before that of next_turn. False: this warp has taken all of its rows.
  QUIRE_DEVICE bool find_next(const GroupInfo& info) {
    for (; groups != 0; groups &= groups - 1) {
      const int num_turns = __shfl_sync(0xffffffffu, ceil_div(info.num_rows, kRowsOfTurn), at());
      if (next_turn < num_turns) return true;
      next_turn -= num_turns;
    }
    return false;
  }
};

// The parts of the first group that a warp would merge. They are read before it is known whether the CTA merges that
// group.
template <class V>
struct FirstParts {
  int at;  // the group, by lane; -1: none
  PartRows<V> parts;

  QUIRE_DEVICE static FirstParts of(const MergeGroup* groups, const GroupInfo& info, int count, int thread) {
    RowQueue<PartBatch<V>::kRows> rows = {count >= 32 ? 0xffffffffu : (1u << count) - 1, thread / 32};
    if (!rows.find_next(info)) return {-1, {}};
    return {rows.at(), info.of_lane(rows.at()).template parts<V>(groups, thread % 32)};
  }
};

// The rows of several groups that a warp merges, as RowsOfGroup are those of one. Lane i's `info` describes group i;
// groups with a bit in `chosen` are merged. The list of parts is read one turn ahead.
template <class V, int kWarps>
class RowsOfGroups {
  using Queue = RowQueue<PartBatch<V>::kRows>;

 public:
  int row;

  QUIRE_DEVICE RowsOfGroups(const MergeGroup* groups, const GroupInfo& info, const FirstParts<V>& first,
                            uint32_t chosen, int thread)
      : groups_(groups), info_(info), later_({chosen, thread / 32}), lane_(thread % 32) {
    has_later_ = later_.find_next(info);
    if (has_later_) parts_later_ = later_.at() == first.at ? first.parts : read_parts();
    advance();
  }
  QUIRE_DEVICE bool exists() const { return exists_; }
  QUIRE_DEVICE int num_rows() const { return group_.num_rows; }
  QUIRE_DEVICE PartRows<V> parts() const { return parts_; }
  QUIRE_DEVICE WorkTile work_tile() const {  // rows of groups are counted from the batch's first: qo_begin is 0
    WorkTile work = {};
    work.kv_head = group_.kv_head, work.tile.row_begin = group_.row;
    return work;
  }
  QUIRE_DEVICE void advance() {
    exists_ = has_later_;
    if (!exists_) return;
    const int at = later_.at();
    group_ = info_.of_lane(at), parts_ = parts_later_, row = later_.next_turn * PartBatch<V>::kRows;
    later_.next_turn += kWarps;
    has_later_ = later_.find_next(info_);
    if (has_later_ && later_.at() != at) parts_later_ = read_parts();
  }

 private:
  QUIRE_DEVICE PartRows<V> read_parts() const { return info_.of_lane(later_.at()).template parts<V>(groups_, lane_); }

  const MergeGroup* groups_;
  GroupInfo info_, group_;
  Queue later_;  // the rows after the present ones
  PartRows<V> parts_, parts_later_;
  bool exists_, has_later_;
  int lane_;
};

// This is a function call, as call_merge_partials() is; the caller has read the parameters.
template <class V, int kWarps>
__device__ __noinline__ void merge_cascade_groups(const MergeParams& p, const MergeGroup* groups, GroupInfo info,
                                                  FirstParts<V> first, uint32_t chosen, int thread) {
  const MergeParams params = p;
  merge_rows<V>(params, RowsOfGroups<V, kWarps>(groups, info, first, chosen, thread), thread % 32);
}

// Waits at most spin_clocks for the partials of shared levels to arrive at a merge group; returns whether all did. A
// CTA of a request waits before it arrives itself, so that it arrives last and merges its few rows. If a CTA of a
// shared level arrived last, it would have to merge the rows of many requests one after another. Results are correct
// either way.
QUIRE_DEVICE bool spin_until_shared_parts(const CascadeGroup& group, int num_shared_parts, int spin_clocks) {
  const long long begin = clock64();
  while (static_cast<int>(ptx::load_acquire(&group.num_arrived)) < num_shared_parts) {
    if (clock64() - begin > spin_clocks) return false;
  }
  return true;
}

// How long a CTA waits, in clocks. kLongSpinClocks: where it has nothing else to do.
constexpr int kSpinClocks = 1 << 15, kLongSpinClocks = 1 << 18;

// Arrives at the groups of a work tile whose partial the threads have stored, and merges those groups at which this CTA
// is the last. `flags` is 32 bits of shared memory, `sync` a barrier of the threads. The description of the groups is
// read while the stores are in flight.
template <class V, int kWarps, class Flags, class Sync>
QUIRE_DEVICE void merge_cascade(const AttentionParams& p, const WorkTile& work, Flags& flags, int thread, Sync&& sync) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int first = 0; first < work.tile.num_groups; first += 32) {
    const int count = min(32, work.tile.num_groups - first);
    CascadeGroup& mine = ArrivalAt::of(p, work, first + min(lane, count - 1)).group(p);
    const GroupInfo info = GroupInfo::of(*reinterpret_cast<const int4*>(&mine), mine.row, work.kv_head);
    const auto parts = FirstParts<V>::of(p.groups, info, count, thread);
    sync();
    if (thread < 32) {
      bool is_last = false;
      if (lane < count) {
        if (work.tile.request >= 0) spin_until_shared_parts(mine, mine.num_shared_parts, kSpinClocks);
        is_last = arrives_last(mine, info.num_parts);
      }
      const uint32_t chosen = __ballot_sync(0xffffffffu, is_last);
      if (thread == 0) flags = chosen;
    }
    sync();
    if (const uint32_t chosen = flags; chosen != 0) {
      merge_cascade_groups<V, kWarps>(MergeParams(p), p.groups, info, parts, chosen, thread);
    }
  }
}

// Groups at which a CTA arrives after all of its work tiles, so that neither stores in flight nor waiting for shared
// keys delay its other work tiles. The CTA arrives at the groups of shared keys first: otherwise CTAs that wait for
// each other's partials would wait in vain. Lies in shared memory; all threads that take part keep equal counts of the
// groups.
struct DeferredArrivals {
  static constexpr int kMost = 32;  // one for each lane of a warp

  struct Counts {
    int shared = 0, own = 0;

    // Index of a work tile's first group; -1 if the groups do not fit.
    QUIRE_DEVICE int reserve(const WorkTile& work) {
      int& count = work.tile.request < 0 ? shared : own;
      if (count + work.tile.num_groups > kMost) return -1;
      return (count += work.tile.num_groups) - work.tile.num_groups;
    }
  };

  struct List {
    int4 fields[kMost];  // of MergeGroup; num_arrived is not the present one
    ArrivalAt at[kMost];

    QUIRE_DEVICE int num_parts(int i) const { return fields[i].y - fields[i].x; }
    QUIRE_DEVICE GroupInfo info(int i, int row) const { return GroupInfo::of(fields[i], row, at[i].kv_head); }
  };
  List shared, own;
  int4 more_of_own[kMost];  // the other fields of CascadeGroup: row, num_shared_parts
  uint32_t flags[2];

  // Adds the groups of a work tile, and starts to load their descriptions.
  QUIRE_DEVICE void put(const AttentionParams& p, const WorkTile& work, int place, int thread) {
    List& list = work.tile.request < 0 ? shared : own;
    if (thread < work.tile.num_groups) {
      const ArrivalAt at = list.at[place + thread] = ArrivalAt::of(p, work, thread);
      const int4* fields = reinterpret_cast<const int4*>(&at.group(p));
      static_assert(sizeof(CascadeGroup) == 32, "two copies of 16 bytes");
      ptx::cp_async_16(ptx::smem_address(&list.fields[place + thread]), fields);
      if (work.tile.request >= 0) ptx::cp_async_16(ptx::smem_address(&more_of_own[place + thread]), fields + 1);
    }
    ptx::cp_async_commit();
  }

  // Arrives at the groups of shared keys, whose partials are stored. Called by one warp. merge() merges the groups at
  // which this CTA is the last.
  QUIRE_DEVICE void arrive_at_shared(const AttentionParams& p, const Counts& counts, int lane) {
    const bool is_last = lane < counts.shared && arrives_last(shared.at[lane].group(p), shared.num_parts(lane));
    const uint32_t chosen = __ballot_sync(0xffffffffu, is_last);
    if (lane == 0) flags[0] = chosen;
  }

  // Called after the threads have stored all of their partials. `has_arrived`: the CTA has arrived at the groups of
  // shared keys.
  template <class V, int kWarps, class Sync>
  QUIRE_DEVICE void merge(const AttentionParams& p, const Counts& counts, bool has_arrived, int thread, Sync&& sync) {
    ptx::cp_async_wait<0>();
    sync();
    const int lane = thread % 32;
    const int i = min(lane, max(counts.own, 1) - 1);
    const GroupInfo mine = own.info(i, more_of_own[i].x);
    const auto parts = FirstParts<V>::of(p.groups, mine, counts.own, thread);
    const MergeParams params(p);
    if (thread < 32) {
      if (!has_arrived) arrive_at_shared(p, counts, lane);
      arrive_at_own(p, counts, lane);
    }
    sync();
    if (const uint32_t chosen = flags[0]; chosen != 0) {
      const int at = min(lane, counts.shared - 1);
      const GroupInfo info = shared.info(at, shared.at[at].group(p).row);
      merge_cascade_groups<V, kWarps>(params, p.groups, info, {-1, {}}, chosen, thread);
    }
    if (const uint32_t chosen = flags[1]; chosen != 0) {
      merge_cascade_groups<V, kWarps>(params, p.groups, mine, parts, chosen, thread);
    }
  }

 private:
  // Called by one warp.
  QUIRE_DEVICE void arrive_at_own(const AttentionParams& p, const Counts& counts, int lane) {
    bool is_last = false;
    if (lane < counts.own) {
      CascadeGroup& group = own.at[lane].group(p);
      const int num_parts = own.num_parts(lane), num_shared_parts = more_of_own[lane].y;
      if (spin_until_shared_parts(group, num_shared_parts, kLongSpinClocks) && num_parts == num_shared_parts + 1) {
        group.num_arrived = 0, is_last = true;  // no other CTA is missing
      } else {
        is_last = arrives_last(group, num_parts);
      }
    }
    const uint32_t chosen = __ballot_sync(0xffffffffu, is_last);
    if (lane == 0) flags[1] = chosen;
  }
};

}  // namespace quire

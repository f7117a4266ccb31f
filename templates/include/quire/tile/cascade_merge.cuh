// The end of a work tile in a cascade: it arrives at each merge group that takes rows of it, and the CTA merges those
// at which it is the last (core/cascade.h).
#pragma once
#include "quire/core/cascade.h"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/math.cuh"
#include "quire/tile/partial.cuh"

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

// What a lane knows of a group: the first four fields of CascadeGroup, which a launch does not change, and its KV head.
struct GroupInfo {
  int row, num_rows, parts_begin, num_parts, kv_head;

  QUIRE_DEVICE GroupInfo of_lane(int lane) const {
    return {__shfl_sync(0xffffffffu, row, lane), __shfl_sync(0xffffffffu, num_rows, lane),
            __shfl_sync(0xffffffffu, parts_begin, lane), __shfl_sync(0xffffffffu, num_parts, lane),
            __shfl_sync(0xffffffffu, kv_head, lane)};
  }

  // The first rows of parts first .. first + 31, one a lane.
  QUIRE_DEVICE int parts_from(const MergeGroup* groups, int first, int lane) const {
    const int* list = reinterpret_cast<const int*>(groups) + parts_begin;
    return first + lane < num_parts ? list[first + lane] : 0;
  }
};

// Deals the rows of groups out to warps in turn: four rows at a time where they have few parts, else two.
struct DealtRows {
  uint32_t groups;  // groups that are left: a bit for each lane
  int turn;         // this warp's next turn, counted from the first group left; dealt() moves it into its own group

  QUIRE_DEVICE static int rows_of_turn(int num_parts) { return num_parts <= 4 ? 4 : 2; }

  QUIRE_DEVICE int at() const { return __ffs(groups) - 1; }
  QUIRE_DEVICE bool dealt(const GroupInfo& info) {
    for (; groups != 0; groups &= groups - 1) {
      const int num_turns = __shfl_sync(0xffffffffu, ceil_div(info.num_rows, rows_of_turn(info.num_parts)), at());
      if (turn < num_turns) return true;
      turn -= num_turns;
    }
    return false;
  }
};

// The first rows of the parts of the first group that a warp would merge. They are read before it is known whether the
// CTA merges that group.
struct FirstParts {
  int at, parts;  // the group, by lane; where its parts begin, one a lane

  template <int kWarps>
  QUIRE_DEVICE static FirstParts of(const MergeGroup* groups, const GroupInfo& info, int count, int thread) {
    DealtRows rows = {count >= 32 ? 0xffffffffu : (1u << count) - 1, thread / 32};
    if (!rows.dealt(info)) return {-1, 0};
    return {rows.at(), info.of_lane(rows.at()).parts_from(groups, 0, thread % 32)};
  }
};

// Merges rows first .. first + kRows of a group: one warp, four columns a lane, with the loads of kParts partials of
// each row in flight together. `parts`: the first rows of the first 32 parts, one a lane. Loads bypass L1, which may
// hold what memory held before another CTA's stores.
template <class V, int kRows, int kParts>
QUIRE_DEVICE void merge_cascade_rows(const MergeParams& p, const MergeGroup* groups, const GroupInfo& group, int first,
                                     int parts, int lane) {
  constexpr int kVo = V::kHeadDimVo;
  WorkTile work = {};
  work.kv_head = group.kv_head;  // rows of groups are counted from the batch's first: qo_begin is 0
#pragma unroll 1
  for (int begin = 0; begin < kVo; begin += 128) {
    const int col = begin + lane * 4;
    const float* columns = p.partial_o + min(col, kVo - 4);
    RowQuad sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = kNoKeys;
#pragma unroll 1
    for (int part = 0; part < group.num_parts; part += kParts) {
      if (group.num_parts > 32 && part % 32 == 0) parts = group.parts_from(groups, part, lane);
      const int mine = __shfl_sync(0xffffffffu, parts, (part + lane % kParts) % 32);
      float2 md[kRows];
      float4 o[kRows][kParts];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = min(first + r, group.num_rows - 1);
        md[r] = {kNoLogit, 0.f};
        if (part + lane % kParts < group.num_parts)
          md[r] = __ldcg(reinterpret_cast<const float2*>(p.partial_md) + mine + row);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const int64_t at = __shfl_sync(0xffffffffu, parts, (part + i) % 32) + row;
          o[r][i] = {0.f, 0.f, 0.f, 0.f};
          if (part + i < group.num_parts) o[r][i] = __ldcg(reinterpret_cast<const float4*>(columns + at * kVo));
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) add_parts<kParts>(sum[r], md[r], o[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 1; i < kParts; i *= 2) sum[r].d += __shfl_xor_sync(0xffffffffu, sum[r].d, i);
      if (first + r < group.num_rows && col < kVo) store_quad<V>(p, work, group.row + first + r, col, sum[r]);
    }
  }
}

// Merges the groups that have a bit in `chosen`; warps take their rows in turn. Lane i's `info` describes group i. The
// list of parts is loaded while earlier rows are merged. This is a function call, as call_merge_partials() is; the
// caller has read the parameters.
template <class V, int kWarps>
__device__ __noinline__ void merge_cascade_groups(const MergeParams& p, const MergeGroup* groups, GroupInfo info,
                                                  FirstParts first, uint32_t chosen, int thread) {
  const MergeParams params = p;
  const int lane = thread % 32;
  DealtRows rows = {chosen, thread / 32};
  const auto parts_of_turn = [&] {
    return rows.at() == first.at ? first.parts : info.of_lane(rows.at()).parts_from(groups, 0, lane);
  };
  bool exists = rows.dealt(info);
  int next_parts = exists ? parts_of_turn() : 0;
#pragma unroll 1
  while (exists) {
    const GroupInfo group = info.of_lane(rows.at());
    const int turn = rows.turn, parts = next_parts;
    rows.turn += kWarps;
    exists = rows.dealt(info);
    if (exists) next_parts = parts_of_turn();
    if (DealtRows::rows_of_turn(group.num_parts) == 4) {
      merge_cascade_rows<V, 4, 4>(params, groups, group, turn * 4, parts, lane);
    } else {
      merge_cascade_rows<V, 2, 8>(params, groups, group, turn * 2, parts, lane);
    }
  }
}

// Waits a while for the partials of shared levels, after those of a request's own keys. The CTAs of shared levels would
// merge the rows of all requests one after another; each CTA of a request merges a few rows. Waiting is not needed for
// correctness: the last CTA to arrive merges. Returns whether all partials are there.
QUIRE_DEVICE bool await_shared_parts(const CascadeGroup& group, int num_shared_parts, int patience) {
  const long long begin = clock64();
  while (static_cast<int>(ptx::load_acquire(&group.num_arrived)) < num_shared_parts) {
    if (clock64() - begin > patience) return false;
  }
  return true;
}

constexpr int kPatience = 1 << 15, kLatePatience = 1 << 18;  // clocks; kLatePatience: the CTA has nothing else to do

QUIRE_DEVICE bool arrives_last(CascadeGroup& group, int num_parts) {
  const uint32_t last = num_parts - 1;
  return ptx::atomic_inc_acq_rel(&group.num_arrived, last) == last;
}

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
    const int4 fields = *reinterpret_cast<const int4*>(&mine);
    const GroupInfo info = {fields.x, fields.y, fields.z, fields.w, work.kv_head};
    const FirstParts parts = FirstParts::of<kWarps>(p.groups, info, count, thread);
    sync();
    if (thread < 32) {
      bool is_last = false;
      if (lane < count) {
        if (work.tile.request >= 0) await_shared_parts(mine, mine.num_shared_parts, kPatience);
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
struct LateArrivals {
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
    int4 fields[kMost];  // the first four fields of CascadeGroup
    ArrivalAt at[kMost];

    QUIRE_DEVICE GroupInfo info(int i) const {
      return {fields[i].x, fields[i].y, fields[i].z, fields[i].w, at[i].kv_head};
    }
  };
  List shared, own;
  int4 more_of_own[kMost];  // the other fields of CascadeGroup; the first, num_arrived, is not the present one
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
    const bool is_last = lane < counts.shared && arrives_last(shared.at[lane].group(p), shared.fields[lane].w);
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
    const GroupInfo mine = own.info(min(lane, max(counts.own, 1) - 1));
    const FirstParts parts = FirstParts::of<kWarps>(p.groups, mine, counts.own, thread);
    const MergeParams params(p);
    if (thread < 32) {
      if (!has_arrived) arrive_at_shared(p, counts, lane);
      arrive_at_own(p, counts, lane);
    }
    sync();
    if (const uint32_t chosen = flags[0]; chosen != 0) {
      const GroupInfo info = shared.info(min(lane, counts.shared - 1));
      merge_cascade_groups<V, kWarps>(params, p.groups, info, {-1, 0}, chosen, thread);
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
      const int num_parts = own.fields[lane].w, num_shared_parts = more_of_own[lane].y;
      if (await_shared_parts(group, num_shared_parts, kLatePatience) && num_parts == num_shared_parts + 1) {
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

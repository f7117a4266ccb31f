// The end of a work tile in a cascade: it arrives at each merge group that takes rows of it, and the CTA merges those
// at which it is the last (core/cascade.h).
#pragma once
#include "quire/core/cascade.h"
#include "quire/ptx/math.cuh"
#include "quire/tile/partial.cuh"

namespace quire {

// What a lane knows of a group: the first four fields of CascadeGroup, which a launch does not change.
struct GroupInfo {
  int row, num_rows, parts_begin, num_parts;

  QUIRE_DEVICE GroupInfo of_lane(int lane) const {
    return {__shfl_sync(0xffffffffu, row, lane), __shfl_sync(0xffffffffu, num_rows, lane),
            __shfl_sync(0xffffffffu, parts_begin, lane), __shfl_sync(0xffffffffu, num_parts, lane)};
  }

  // Where parts first .. first + 31 begin, one a lane.
  QUIRE_DEVICE int parts_from(const MergeGroup* groups, int first, int lane) const {
    const int* list = reinterpret_cast<const int*>(groups) + parts_begin;
    return first + lane < num_parts ? list[first + lane] : 0;
  }
};

constexpr int kCascadeBatch = 8;  // parts of a row whose columns are on their way together

// Parts of a row, `count` of them and at most 32, are added to `sum`; `at`: the row in the lane's part. Four columns a
// lane. Reads go past L1, which may hold what another CTA has written since.
template <int kVo>
QUIRE_DEVICE void add_parts(const MergeParams& p, RowQuad& sum, int at, int count, int col, int lane) {
  const float* columns = p.partial_o + col;
  const auto load = [&](int i) -> float4 {
    const int64_t row = __shfl_sync(0xffffffffu, at, i % 32);
    if (i >= count) return {0.f, 0.f, 0.f, 0.f};
    return __ldcg(reinterpret_cast<const float4*>(columns + row * kVo));
  };
  float2 md = {kNoLogit, 0.f};
  if (lane < count) md = __ldcg(reinterpret_cast<const float2*>(p.partial_md) + at);
  float4 o[kCascadeBatch];
#pragma unroll
  for (int i = 0; i < kCascadeBatch; ++i) o[i] = load(i);
  float top = md.x;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
  top = fmaxf(top, sum.m);
  const float keep = ptx::ex2(sum.m - top), weight = ptx::ex2(md.x - top);
  float d = weight * md.y;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) d += __shfl_xor_sync(0xffffffffu, d, i);
  sum.m = top, sum.d = fmaf(sum.d, keep, d);
  sum.o.x *= keep, sum.o.y *= keep, sum.o.z *= keep, sum.o.w *= keep;
#pragma unroll 1
  for (int first = 0; first < count; first += kCascadeBatch) {
#pragma unroll
    for (int i = 0; i < kCascadeBatch; ++i) {
      scale_add(sum.o, __shfl_sync(0xffffffffu, weight, first + i), o[i]);
      o[i] = load(first + kCascadeBatch + i);
    }
  }
}

// One row of a group by one warp. `parts`: where the first 32 parts begin, one a lane.
template <class V>
QUIRE_DEVICE void merge_cascade_row(const MergeParams& p, const MergeGroup* groups, int kv_head, const GroupInfo& group,
                                    int row, int parts, int lane) {
  constexpr int kVo = V::kHeadDimVo;
  WorkTile work = {};
  work.kv_head = kv_head;  // rows of groups are counted from the batch's first: qo_begin is 0
#pragma unroll 1
  for (int begin = 0; begin < kVo; begin += 128) {
    const int col = begin + lane * 4;
    RowQuad sum = kNoKeys;
    add_parts<kVo>(p, sum, parts + row, min(32, group.num_parts), min(col, kVo - 4), lane);
#pragma unroll 1
    for (int first = 32; first < group.num_parts; first += 32) {
      const int at = group.parts_from(groups, first, lane) + row;
      add_parts<kVo>(p, sum, at, min(32, group.num_parts - first), min(col, kVo - 4), lane);
    }
    if (col < kVo) store_quad<V>(p, work, group.row + row, col, sum);
  }
}

// Rows of the groups that have a bit in `chosen`, dealt out to the warps in turn. `group`: lane i's is group i;
// `parts`: of group 0. The list of a row's parts arrives while the row before it is merged. A function that is called,
// as call_merge_partials() is, and that reads the parameters once.
template <class V, int kWarps>
__device__ __noinline__ void merge_cascade_groups(const AttentionParams& p, int kv_head, GroupInfo group, int parts,
                                                  uint32_t chosen, int thread) {
  const MergeParams params(p);
  const MergeGroup* groups = p.groups;
  const int lane = thread % 32;
  int row = thread / 32, at = 0;  // the next row of this warp, in group `at`
  const auto settle = [&] {
    for (; chosen != 0; chosen &= chosen - 1) {
      at = __ffs(chosen) - 1;
      const int num_rows = __shfl_sync(0xffffffffu, group.num_rows, at);
      if (row < num_rows) return;
      row -= num_rows;
    }
  };
  settle();
  int next_parts = chosen != 0 && at > 0 ? group.of_lane(at).parts_from(groups, 0, lane) : parts;
#pragma unroll 1
  while (chosen != 0) {
    const GroupInfo present = group.of_lane(at);
    const int present_row = row, present_parts = next_parts;
    row += kWarps;
    settle();
    if (chosen != 0) next_parts = group.of_lane(at).parts_from(groups, 0, lane);
    merge_cascade_row<V>(params, groups, kv_head, present, present_row, present_parts, lane);
  }
}

// A request's own keys are done: the shared ones' partial results are awaited for a while, because their CTAs would
// merge the rows of all requests one after another, where requests' CTAs merge a few rows each. Nobody has to come: the
// last to arrive merges, whoever it is.
QUIRE_DEVICE void await_shared_parts(const CascadeGroup& group) {
  constexpr int kPatience = 1 << 15;  // clocks
  const long long begin = clock64();
  while (static_cast<int>(ptx::load_acquire(&group.num_arrived)) < group.num_shared_parts) {
    if (clock64() - begin > kPatience) return;
  }
}

// After the threads have stored a partial result. `flags` is 32 bits of shared memory, `sync` a barrier of all of them.
// What the merge has to know is read while the partial result is on its way to memory.
template <class V, int kWarps, class Flags, class Sync>
QUIRE_DEVICE void merge_cascade(const AttentionParams& p, const WorkTile& work, Flags& flags, int thread, Sync&& sync) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int first = 0; first < work.tile.num_groups; first += 32) {
    CascadeGroup& mine = cascade_group(p, work.tile, min(first + lane, work.tile.num_groups - 1), work.kv_head);
    const int4 fields = *reinterpret_cast<const int4*>(&mine);
    const GroupInfo group = {fields.x, fields.y, fields.z, fields.w};
    const int parts = group.of_lane(0).parts_from(p.groups, 0, lane);
    sync();
    if (thread < 32) {
      bool is_last = false;
      if (first + lane < work.tile.num_groups) {
        if (work.tile.request >= 0) await_shared_parts(mine);
        const uint32_t last = group.num_parts - 1;
        is_last = ptx::atomic_inc_acq_rel(&mine.num_arrived, last) == last;
      }
      const uint32_t chosen = __ballot_sync(0xffffffffu, is_last);
      if (thread == 0) flags = chosen;
    }
    sync();
    if (const uint32_t chosen = flags; chosen != 0) {
      merge_cascade_groups<V, kWarps>(p, work.kv_head, group, parts, chosen, thread);
    }
  }
}

}  // namespace quire

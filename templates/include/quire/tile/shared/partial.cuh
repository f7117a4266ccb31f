// Partial results: a CTA stores one for each work tile that does not cover its row tile, and the last CTA to arrive at
// a merge group merges them.
#pragma once
#include "quire/core/logits.h"
#include "quire/core/schedule.h"
#include "quire/tile/shared/softmax.cuh"

namespace quire {

// The result of a row of query head `head`. Params: AttentionParams, or MergeParams below.
template <class Params>
QUIRE_DEVICE RowResult finish_row(const Params& p, int head, float m, float d) {
  return finish_row(m, d, p.sinks == nullptr ? nullptr : p.sinks + head, output_scale(p));
}

// The same for kernels that serve latents, too: there p.lse_unit says what the lse is, and sinks may be infinite.
template <class V, class Params>
QUIRE_DEVICE RowResult finish_row_of(const Params& p, int head, float m, float d) {
  if constexpr (!kIsLatent<V>) return finish_row(p, head, m, d);
  if (p.sinks == nullptr) return finish_row(m, d, nullptr, output_scale(p));
  const float sink = fminf(p.sinks[head], 1e38f), own = d == 0.f ? kNoLse : m + ptx::lg2(d);
  RowResult result = finish_row(m, d, &sink, output_scale(p));
  if (p.lse_unit < 0.f) result.lse = own;
  return result;
}

// Stores the lse of a row, where p.lse is not null.
template <class V, class Params>
QUIRE_DEVICE void store_lse(const Params& p, const RowTile& tile, const WorkTile::Place& at, float lse) {
  p.lse[at.token * p.num_qo_heads + at.head] = returned_lse<V>(lse, p, tile, at.head);
}

// store_statistics() of a row, where p.lse is not null.
template <class V, class Params>
QUIRE_DEVICE void store_statistics(const Params& p, const RowTile& tile, const WorkTile::Place& at, float lse, float m,
                                   float d) {
  store_statistics<V>(p, tile, at.token, at.head, lse, m, d);
}

// Four columns of a row: o not normalised, with the row's reference maximum and denominator.
struct RowQuad {
  float m, d;
  float4 o;
};

constexpr RowQuad kNoKeys = {kNoLogit, 0.f, {0.f, 0.f, 0.f, 0.f}};

QUIRE_DEVICE void scale_add(float4& o, float weight, float4 x) {
  o.x = fmaf(weight, x.x, o.x), o.y = fmaf(weight, x.y, o.y);
  o.z = fmaf(weight, x.z, o.z), o.w = fmaf(weight, x.w, o.w);
}

// Adds kParts partials of a row, which are in flight together. Lane i % kParts has the maximum and denominator of part
// i, and adds only the weight of that part to `sum.d`.
template <int kParts>
QUIRE_DEVICE void add_parts(RowQuad& sum, float2 md, const float4 (&o)[kParts]) {
  float top = md.x;
#pragma unroll
  for (int i = 1; i < kParts; i *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
  top = fmaxf(top, sum.m);
  const float keep = ptx::ex2(sum.m - top), weight = ptx::ex2(md.x - top);
  sum.m = top, sum.d = fmaf(sum.d, keep, weight * md.y);
  float4& x = sum.o;
  x.x *= keep, x.y *= keep, x.z *= keep, x.w *= keep;
#pragma unroll
  for (int i = 0; i < kParts; ++i) scale_add(x, __shfl_sync(0xffffffffu, weight, i), o[i]);
}

// Normalises and stores columns col .. col + 3 of a packed row. The lane with the first columns also stores the lse.
template <class V, class Params>
QUIRE_DEVICE void store_quad(const Params& p, const WorkTile& work, int row, int col, const RowQuad& quad) {
  using O = typename V::O;
  const WorkTile::Place to = work.place(p.group, row);
  const RowResult result = finish_row_of<V>(p, to.head, quad.m, quad.d);
  const uint2 packed = {ptx::pack(O{}, quad.o.x * result.scale, quad.o.y * result.scale),
                        ptx::pack(O{}, quad.o.z * result.scale, quad.o.w * result.scale)};
  O* dst = static_cast<O*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + col;
  *reinterpret_cast<uint2*>(dst) = packed;
  if (col == 0 && p.lse != nullptr) store_statistics<V>(p, work.tile, to, result.lse, quad.m, quad.d);
}

// Arrives at a merge group of `num_parts`. True for the last: all partials are then visible to it, and the group's
// counter is 0 again.
QUIRE_DEVICE bool arrives_last(MergeGroup& group, int num_parts) {
  const uint32_t last = num_parts - 1;
  return ptx::atomic_inc_acq_rel(&group.num_arrived, last) == last;
}

// The same with `num_stored` partials at once.
QUIRE_DEVICE bool arrives_last(MergeGroup& group, int num_parts, int num_stored) {
  const bool is_last = ptx::atomic_add_acq_rel(&group.num_arrived, num_stored) + num_stored == num_parts;
  if (is_last) group.num_arrived = 0;
  return is_last;
}

// The same for a CTA, in every thread. `sync` is a barrier of all threads that have stored partials and will merge: it
// hands their writes to the leader, whose atomic releases them.
template <class Flag, class Sync, class... Counts>
QUIRE_DEVICE bool arrives_last(MergeGroup* group, int num_parts, bool is_leader, Flag& flag, Sync&& sync,
                               Counts... num_stored) {
  sync();
  if (is_leader) flag = arrives_last(*group, num_parts, num_stored...);
  sync();
  return flag;
}

// Where the parts of a group begin, in rows of partial_o and partial_md. In a cascade a list gives the rows: each lane
// has one of 32 parts.
template <class V>
struct PartRows {
  const MergeGroup* groups;
  int parts_begin, num_parts;
  int listed;  // the row of this lane's part

  QUIRE_DEVICE static PartRows of(const MergeGroup* groups, int parts_begin, int num_parts, int lane) {
    PartRows rows = {groups, parts_begin, num_parts, 0};
    rows.read(0, lane);
    return rows;
  }
  // Reads the rows of part `first` and of the 31 after it.
  QUIRE_DEVICE void read(int first, int lane) {
    if constexpr (V::kCascade != 0) {
      listed = first + lane < num_parts ? static_cast<int>(part_row<V>(groups, parts_begin, first + lane)) : 0;
    }
  }
  // Called by all lanes with the same `part`, in the order of parts.
  QUIRE_DEVICE void reach(int part, int lane) {
    if (V::kCascade != 0 && num_parts > 32 && part % 32 == 0) read(part, lane);
  }
  QUIRE_DEVICE int64_t row(int part) const {
    if constexpr (V::kCascade != 0) return __shfl_sync(0xffffffffu, listed, part % 32);
    return part_row<V>(groups, parts_begin, part);
  }
};

// What a warp has in flight from L2: kParts partials of kRows rows, four columns a lane, and their maxima and
// denominators, those of one part a lane, repeated. A cascade's groups have few parts and many rows. Loads bypass L1,
// which may hold what memory held before another CTA's stores.
template <class V>
struct PartBatch {
  static constexpr int kRows = V::kCascade != 0 ? 2 : 1, kParts = 8 / kRows;

  float2 md[kRows];
  float4 o[kRows][kParts];

  // `row`: the first row in each part; rows from num_rows on are read as the last one. `part`: the first part. Parts
  // that do not exist have weight 0.
  template <class Params>
  QUIRE_DEVICE void load(const Params& p, const PartRows<V>& parts, int part, int row, int num_rows, int col,
                         int lane) {
    const float* columns = p.partial_o + col;
    const int64_t mine = parts.row(part + lane % kParts);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      md[r] = {kNoLogit, 0.f};
      if (part + lane % kParts < parts.num_parts)
        md[r] = __ldcg(reinterpret_cast<const float2*>(p.partial_md) + mine + min(row + r, num_rows - 1));
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int64_t begin = parts.row(part + i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* at = columns + (begin + min(row + r, num_rows - 1)) * V::kHeadDimVo;
        o[r][i] = {0.f, 0.f, 0.f, 0.f};
        if (part + i < parts.num_parts) o[r][i] = __ldcg(reinterpret_cast<const float4*>(at));
      }
    }
  }

  // The sums' d are sums over this lane's parts until finish().
  QUIRE_DEVICE void add_to(RowQuad (&sum)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) add_parts(sum[r], md[r], o[r]);
  }

  QUIRE_DEVICE static void finish(RowQuad& sum) {
#pragma unroll
    for (int i = 1; i < kParts; i *= 2) sum.d += __shfl_xor_sync(0xffffffffu, sum.d, i);
  }
};

// The rows of one group that a warp merges: each kWarps-th turn of PartBatch::kRows rows.
template <class V, int kWarps>
struct RowsOfGroup {
  const WorkTile& work;
  MergeGroup group;
  int row;

  QUIRE_DEVICE RowsOfGroup(const WorkTile& work, const MergeGroup& group, int thread)
      : work(work), group(group), row(thread / 32 * PartBatch<V>::kRows) {}
  QUIRE_DEVICE bool exists() const { return row < group.num_rows; }
  QUIRE_DEVICE int num_rows() const { return group.num_rows; }
  QUIRE_DEVICE void advance() { row += kWarps * PartBatch<V>::kRows; }
  QUIRE_DEVICE PartRows<V> parts() const { return {nullptr, group.parts_begin, group.num_parts(), 0}; }
  QUIRE_DEVICE const WorkTile& work_tile() const { return work; }  // whose rows those of the group are
};

// Merges rows, in the last CTA to arrive: a warp's turns, four columns a lane. While one batch of parts is added, the
// next batch (of these rows or of others) is in flight, because a merge is limited by the rate at which an SM reads L2.
template <class V, class Params, class Turns>
QUIRE_DEVICE void merge_rows(const Params& p, Turns next, int lane) {
  constexpr int kVo = V::kHeadDimVo;
  using Batch = PartBatch<V>;
  if (!next.exists()) return;
  int next_col = 0, next_part = 0;
  PartRows<V> parts = next.parts();
  Batch batch, ahead;
  const auto load_ahead = [&] {
    parts.reach(next_part, lane);
    ahead.load(p, parts, next_part, next.row, next.num_rows(), min(next_col + lane * 4, kVo - 4), lane);
  };
  RowQuad sum[Batch::kRows];
#pragma unroll
  for (int r = 0; r < Batch::kRows; ++r) sum[r] = kNoKeys;
  load_ahead();
#pragma unroll 1
  while (next.exists()) {
    const int row = next.row, num_rows = next.num_rows(), col = next_col + lane * 4;
    decltype(auto) work = next.work_tile();
    batch = ahead;
    if ((next_part += Batch::kParts) >= parts.num_parts) next_part = 0, next_col += 128;
    if (next_col >= kVo) {
      next_col = 0;
      next.advance();
      if (next.exists()) parts = next.parts();
    }
    if (next.exists()) load_ahead();
    batch.add_to(sum);
    if (next_part > 0) continue;
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      Batch::finish(sum[r]);
      if (row + r < num_rows && col < kVo) store_quad<V>(p, work, work.tile.row_begin + row + r, col, sum[r]);
      sum[r] = kNoKeys;
    }
  }
}

// Merges the group of a work tile.
template <class V, int kWarps, class Params>
QUIRE_DEVICE void merge_partials(const Params& p, const WorkTile& work, const MergeGroup& group, int thread) {
  static_assert(V::kCascade == 0, "a cascade's work tile arrives at several groups: cascade_merge.cuh");
  merge_rows<V>(p, RowsOfGroup<V, kWarps>(work, group, thread), thread % 32);
}

// The parameters that a merge reads, under the same names.
struct MergeParams {
  void* o;
  int64_t o_token_stride, o_head_stride;
  float *lse, *partial_o, *partial_md;
  const float* sinks;
  FastDivisor group;
  int32_t num_qo_heads;
  float o_scale, lse_unit;
  static constexpr const float* o_scale_by = nullptr;  // is part of o_scale

  QUIRE_DEVICE explicit MergeParams(const AttentionParams& p)
      : o(p.o),
        o_token_stride(p.o_token_stride),
        o_head_stride(p.o_head_stride),
        lse(p.lse),
        partial_o(p.partial_o),
        partial_md(p.partial_md),
        sinks(p.sinks),
        group(p.group),
        num_qo_heads(p.num_qo_heads),
        o_scale(output_scale(p)),
        lse_unit(p.lse_unit) {}
};

// merge_partials() as a function call, for kernels whose main loop leaves no registers to inline it. kOnce: all
// parameters are read once, which takes registers. Without it they are read through a reference, and each row waits for
// them again.
template <class V, int kWarps, bool kOnce = false>
__device__ __noinline__ void call_merge_partials(const AttentionParams& p, const WorkTile& work, MergeGroup group,
                                                 int thread) {
  if constexpr (kOnce)
    merge_partials<V, kWarps>(MergeParams(p), work, group, thread);
  else
    merge_partials<V, kWarps>(p, work, group, thread);
}

}  // namespace quire

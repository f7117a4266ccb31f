// Partial results: what a CTA leaves of a row tile that it did not see whole, and their merging by the last to arrive.
#pragma once
#include "quire/tile/job.cuh"
#include "quire/tile/softmax.cuh"

namespace quire {

// True in every thread of the CTA that arrives last at the job's group: all parts are then visible to it, and the
// counter is 0 again.
QUIRE_DEVICE bool is_last_arriver(const AttentionParams& p, Job& job, int thread) {
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    const uint32_t last = job.work.group.num_parts - 1;
    job.is_last = ptx::atomic_inc_acq_rel(p.arrivals + job.work.group.counter, last) == last;
  }
  __syncthreads();
  return job.is_last;
}

// Adds the parts up in order, four columns a thread, and writes o and lse of the rows that exist. Reads go past
// the L1 cache, which may hold what another CTA has written since.
template <class T, int kRows, int kVo, int kThreads>
QUIRE_DEVICE void merge_partials(const AttentionParams& p, const Job& job, int thread) {
  constexpr int kQuads = kVo / 4;
  const PartialGroup group = job.work.group;
  const int row_begin = job.work.tile.row_begin, count = min(kRows, job.row_end - row_begin) * kQuads;
  for (int i = thread; i < count; i += kThreads) {
    const int row = i / kQuads, col = (i - row * kQuads) * 4;
    float m = kNoLogit, d = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
    for (int part = 0; part < group.num_parts; ++part) {
      const int64_t at = static_cast<int64_t>(group.slot(part)) * kRows + row;
      const float2 md = __ldcg(reinterpret_cast<const float2*>(p.partial_md) + at);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * kVo + col));
      const float top = fmaxf(m, md.x), keep = ptx::ex2(m - top), join = ptx::ex2(md.x - top);
      m = top, d = d * keep + md.y * join;
      o[0] = o[0] * keep + x.x * join, o[1] = o[1] * keep + x.y * join;
      o[2] = o[2] * keep + x.z * join, o[3] = o[3] * keep + x.w * join;
    }
    const Job::Place to = job.place(p.group, row_begin + row);
    const RowResult result = finish_row(m, d, p.sinks == nullptr ? nullptr : p.sinks + to.head, output_scale(p));
    const uint2 packed = {ptx::pack(T{}, o[0] * result.scale, o[1] * result.scale),
                          ptx::pack(T{}, o[2] * result.scale, o[3] * result.scale)};
    T* dst = static_cast<T*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + col;
    *reinterpret_cast<uint2*>(dst) = packed;
    if (col == 0 && p.lse != nullptr) p.lse[to.token * p.num_qo_heads + to.head] = result.lse;
  }
}

}  // namespace quire

// The first warpgroup of a CTA of attention_fa3: its warps load keys, values and queries, and schedule one work tile
// ahead. Where keys and values have 8 bits, all four widen them.
#pragma once
#include "quire/kernels/attention_fa3_shape.cuh"
#include "quire/tile/hopper/kv_widen.cuh"

namespace quire {

template <class V, class WorkList>
class Fa3Loaders : Fa3Cta<V> {
  using Cta = Fa3Cta<V>;
  using Cta::kTileKv, Cta::kQk, Cta::kVo, Cta::kIsFp8, Cta::kIsGathered, Cta::kIsDistance, Cta::kWorkStages,
      Cta::kQStages, Cta::kStages, Cta::kKAt, Cta::kVAt, Cta::kWorkStagesAt, Cta::kPreparedAt, Cta::kLoadK, Cta::kLoadV,
      Cta::kLoadQ, Cta::kSchedule, Cta::k_tile, Cta::v_tile, Cta::q_by_tma, Cta::is_short_work,
      Cta::for_each_work_stage, Cta::copy_q_by_tma, Cta::bytes_arrived, Cta::bias_at, Cta::ramp_scale, Cta::p_,
      Cta::stages_, Cta::smem_, Cta::work_, Cta::k_, Cta::v_;
  using typename Cta::TileK, typename Cta::TileV, typename Cta::Stage, typename Cta::Loader, typename Cta::Transform,
      typename Cta::Schedule;

 public:
  QUIRE_DEVICE explicit Fa3Loaders(const Cta& cta) : Cta(cta) {}

  QUIRE_DEVICE void produce() const {
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = ptx::lane_id();
    if constexpr (kIsFp8) {
      widen(warp, lane);
      return;
    }
    if (warp == kLoadK) {
      load_kv(KvSource::k(p_), KvSource::k_prefix(p_), k_, [&](int stage) { return k_tile(stage); }, lane);
    }
    if (warp == kLoadV) {
      load_kv(KvSource::v(p_), KvSource::v_prefix(p_), v_, [&](int stage) { return v_tile(stage); }, lane);
    }
    if (warp == kLoadQ) load_q(lane);
    if (warp == kSchedule) schedule(lane);
  }

 private:
  QUIRE_DEVICE void schedule(int lane) const {
    Schedule s;
    if (lane == 0) WorkList::begin(p_, stages_[kWorkStages - 1].cursor, s.number);
    while (s.exists) this->template schedule_next<WorkList>(s, lane);
  }

  // Where kIsFp8, one lane schedules and loads queries beside widening. It keeps this in shared memory, ahead of the
  // mbarriers of bytes.
  struct Prepared {
    int number;
    RingPosition<kQStages> q;
  };

  // Two warps widen keys, two values.
  QUIRE_DEVICE void widen(int warp, int lane) const {
    if constexpr (kQk == kVo) {  // the same code for both
      const bool is_k = warp < 2;
      widen_kv<TileK>(is_k ? KvSource::k(p_) : KvSource::v(p_), is_k ? k_ : v_, is_k ? kKAt : kVAt, warp, lane);
    } else if (warp < 2) {
      widen_kv<TileK>(KvSource::k(p_), k_, kKAt, warp, lane);
    } else {
      widen_kv<TileV>(KvSource::v(p_), v_, kVAt, warp, lane);
    }
  }

  // One of the warps also schedules and loads queries, in between: it may only wait for what the computing warps do
  // without KV tiles that it has yet to widen.
  template <class Tile>
  QUIRE_DEVICE void widen_kv(const KvSource& from, RingBarriers<kStages> ring, int tiles_at, int warp, int lane) const {
    KvWidener<V, Tile, kStages> widener(p_.base, from, ring, smem_ + tiles_at, bytes_arrived(warp), warp % 2, lane);
    Prepared& prepared =
        *reinterpret_cast<Prepared*>(reinterpret_cast<unsigned char*>(stages_) + kPreparedAt - kWorkStagesAt);
    const bool schedules = warp == kSchedule;
    if (schedules && lane == 0) {
      WorkList::begin(p_, stages_[kWorkStages - 1].cursor, prepared.number);
      prepared.q = {};
    }
    if (schedules) schedule_after({-1}, true, prepared, lane);
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      KvTileWalk<V> walk(current);
      // One stage of queries: they are loaded when the last stage of values is about to wait for them.
      constexpr int kSteps = kQStages > 1 ? 2 : 3;
      int most = kQStages > 1 ? kStages + 2 : kStages - 1;
#pragma unroll 1
      for (int step = schedules ? 0 : kSteps - 1; step < kSteps; ++step) {
        if (schedules && step == kSteps - 2) copy_q_by_tma(current, prepared.q, lane);
        if (step == kSteps - 1) {
          // The computing warps have begun with this work tile, and stored the one before.
          if (schedules) schedule_after(at, is_short_work(current), prepared, lane);
          most = INT32_MAX;
        }
        widener.widen(current.work, walk, most);
        most = 3;
      }
      __syncwarp();
      if (!schedules && lane == 0) work_.arrive_empty(at);
    });
  }

  QUIRE_DEVICE void schedule_after(RingPosition<kWorkStages> at, bool is_short, Prepared& prepared, int lane) const {
    Schedule s;
    s.at = at.after(), s.is_short = is_short;
    if (lane == 0) s.number = prepared.number;
    this->template schedule_next<WorkList>(s, lane);
    if (lane == 0) prepared.number = s.number;
  }

  // `prefix`: what shared levels' keys or values are copied from, with kPrefix.
  template <class TileAt>
  QUIRE_DEVICE void load_kv(const KvSource& from, const KvSource& prefix, RingBarriers<kStages> ring, TileAt&& tile_at,
                            int lane) const {
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    RingPosition<kStages> stage;
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      if constexpr (V::kPrefix != 0) {
        static_assert(!kIsGathered && !kIsFp8, "tensors beside the cache come by the copy engine, as the cache does");
        if (is_in_prefix<V>(current.work.tile)) {
          this->template load_work_tile<KvLoader<V, KvLoadPath::kRagged>>(prefix, current, ring, stage, tile_at, lane);
        } else {
          this->template load_work_tile<Loader>(from, current, ring, stage, tile_at, lane);
        }
      } else {
        this->template load_work_tile<Loader>(from, current, ring, stage, tile_at, lane);
      }
      __syncwarp();
      if (lane == 0) work_.arrive_empty(at);
    });
  }

  QUIRE_DEVICE void load_q(int lane) const {
    if (lane == 0 && q_by_tma()) ptx::prefetch_tensor_map(&p_.tensor_q);
    RingPosition<kQStages> stage;
    RingPosition<kStages> keys;
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      copy_q_by_tma(current, stage, lane);
      if constexpr (kIsDistance) fill_biases(current, keys, lane);
      __syncwarp();
      if (lane == 0) work_.arrive_empty(at);
    });
  }

  // The biases of each KV tile are part of a stage of keys.
  QUIRE_DEVICE void fill_biases(const Stage& current, RingPosition<kStages>& stage, int lane) const {
    using Slice = DistanceSlice<V>;
    const Transform transform(p_.base);
    const WorkTile& work = current.work;
    const Slice slice(p_.base.group, work.tile.row_begin);
    const float unit = ptx::divide(kLog2e, ramp_scale());
    KvTileWalk<V> next(current);
    typename Slice::Values values;  // on their way from memory one step ahead
    if (next.exists()) slice.read(values, transform, work, next.tile() * kTileKv, 0, lane);
    int right = -1;
#pragma unroll 1
    while (next.exists()) {
      const int tile = next.tile();
      next.advance();
      k_.wait_empty(stage);
#pragma unroll 1
      for (int head = 0, after; head < slice.num_heads(); head = after) {
        after = head + Slice::kHeads;
        slice.write(bias_at(stage), values, unit, head, lane);
        const bool is_last = after >= slice.num_heads();
        slice.read(values, transform, work, (is_last ? next.tile() : tile) * kTileKv, is_last ? 0 : after, lane);
        if (tile + 1 == right) {
          slice.copy(bias_at(stage), bias_at(stage.before()), head, lane);
        } else {
          slice.compute(bias_at(stage), transform, unit, work, tile * kTileKv, head, lane);
        }
      }
      right = tile;
      __syncwarp();
      if (lane == 0) k_.arrive_full(stage);
      stage.advance();
    }
  }
};

}  // namespace quire

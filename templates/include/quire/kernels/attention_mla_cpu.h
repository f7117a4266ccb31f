// Multi-head latent attention on the CPU: all query heads share one KV head, and the latent part of a key is also the
// value.
//
// From a few heads on, the kernel is limited by the floating-point units, because each key is read once for all heads.
// Work comes from core/schedule.h; an OpenMP thread computes the work tiles of one CTA at a time. Each KV tile is
// copied once, converted to float, next to panels of rows (tile/cpu/panel.h). All arithmetic is in float32, whatever
// the tensors hold. Keys that no row of a panel sees are neither read nor used.
#pragma once
#include <stdlib.h>
#include "quire/core/params.h"
#include "quire/tile/cpu/panel.h"
#include "quire/tile/cpu/rows.h"

namespace quire {

template <class V>
struct AttentionMlaCpu {
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;

  // 0, or 1 when no thread got memory for its scratch: then nothing was done.
  static int run(AttentionMlaParams& p) {
    int next = 0;
#pragma omp parallel if (p.base.num_ctas > 1) shared(next)
    {
      Scratch* scratch = static_cast<Scratch*>(aligned_alloc(alignof(Scratch), sizeof(Scratch)));
      while (scratch != nullptr) {
        const int cta = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (cta >= p.base.num_ctas) break;
        WorkCursor cursor = WorkCursor::of_cta(p.base, cta);
        for (WorkTile work; cursor.next(p.base, kTileKv, work);) attend(p, work, *scratch);
      }
      free(scratch);
    }
    return next == 0 ? 1 : 0;
  }

 private:
  using Q = typename V::Q;
  using Kv = typename V::Kv;
  using Kpe = typename cpu::Keys<V>::K;
  static constexpr int kCkv = V::kHeadDimVo, kKpe = V::kHeadDimQk - V::kHeadDimVo;
  static constexpr int kPaddedRows = static_cast<int>(round_up(kTileRows, cpu::kPanel));
  static_assert(kCkv % 16 == 0 && kKpe % 16 == 0 && kKpe > 0, "a head dimension is whole vectors");
  static_assert(kTileKv % 32 == 0, "a kv tile is whole words of a mask");

  // What a thread computes with: the running softmax, queries transposed, a kv tile, and its logits.
  struct alignas(64) Scratch {
    float m[kPaddedRows], d[kPaddedRows], alpha[cpu::kPanel];
    float o[kPaddedRows * kCkv];
    float q_nope[kPaddedRows * kCkv], q_pe[kPaddedRows * kKpe];
    const Kpe* kpe_rows[kTileKv];
    const Kv* ckv_rows[kTileKv];
    float ckv[kTileKv * kCkv], kpe[kTileKv * kKpe];
    float s[kTileKv * cpu::kPanel], s_pe[kTileKv * cpu::kPanel];
    cpu::PanelRows<cpu::kPanel, kTileKv> panel;
  };

  struct Context {
    const AttentionMlaParams& p;
    const cpu::Rows& rows;
    cpu::LogitsTile<V> logits;
    cpu::Keys<V> keys;  // k is kpe, v is ckv
    Scratch& scratch;

    KeyRange visible(int first_row, int last_row, KeyRange tile) const {
      return logits.mask.any(rows.qo_idx(first_row), rows.qo_idx(last_row)).within(tile);
    }
    bool full(int first_row, int last_row, KeyRange keys) const {
      return V::kScoreMask == 0 && logits.mask.full(rows.qo_idx(first_row), rows.qo_idx(last_row), keys);
    }
    const Q* q_nope(int row) const {
      const WorkTile::Place at = rows.place(row);
      return static_cast<const Q*>(p.q_nope) + at.token * p.q_nope_token_stride + at.head * p.q_nope_head_stride;
    }
  };

  static void attend(const AttentionMlaParams& p, const WorkTile& work, Scratch& scratch) {
    const AttentionParams& base = p.base;
    const cpu::Rows rows(base, work, kTileRows);
    const Mask<V::kMask, V::kWindow != 0> mask = Mask<V::kMask, V::kWindow != 0>::of(base, work.tile);
    const Context c = {p,
                       rows,
                       {rows, work.tile.request, mask, LogitsTransform<V, cpu::Math>(base)},
                       cpu::Keys<V>(base, work.tile, work.kv_head),
                       scratch};
    clear(scratch, rows.count);
    load_queries(c);
    for (int kv = work.kv_begin; kv < work.kv_end; ++kv) {
      const KeyRange tile = cpu::tile_keys<kTileKv>(kv), keys = c.visible(0, rows.count - 1, tile);
      if (!keys.empty()) attend_tile(c, tile, keys);
    }
    cpu::finish_work_tile<V>(rows, scratch.o, scratch.m, scratch.d);
  }

  static void clear(Scratch& x, int count) {
    const int padded = static_cast<int>(round_up(count, cpu::kPanel));
    for (int row = 0; row < padded; ++row) x.m[row] = -cpu::kInfinity, x.d[row] = 0.0f;
    memset(x.o, 0, sizeof(float) * padded * kCkv);
  }

  static void load_queries(const Context& c) {
    Scratch& x = c.scratch;
    for (int row = 0; row < c.rows.count; row += cpu::kLanes) {
      const Q *nope[cpu::kLanes], *pe[cpu::kLanes];
      const int count = min(cpu::kLanes, c.rows.count - row), panel = row / cpu::kPanel, lane = row % cpu::kPanel;
      for (int i = 0; i < count; ++i) nope[i] = c.q_nope(row + i), pe[i] = c.rows.template q<Q>(row + i);
      cpu::transpose_rows<kCkv>(x.q_nope + panel * (kCkv * cpu::kPanel) + lane, nope, count, c.logits.q_scale());
      cpu::transpose_rows<kKpe>(x.q_pe + panel * (kKpe * cpu::kPanel) + lane, pe, count, c.logits.q_scale());
    }
  }

  static void attend_tile(const Context& c, KeyRange tile, KeyRange keys) {
    Scratch& x = c.scratch;
    const int begin = keys.begin - tile.begin, end = keys.end - tile.begin;
    c.keys.resolve(keys, x.kpe_rows, x.ckv_rows);
    cpu::stage_keys<kKpe, kKpe>(x.kpe, x.kpe_rows, begin, end);
    cpu::stage_keys<kCkv, kCkv>(x.ckv, x.ckv_rows, begin, end);
    if constexpr (V::kTileScales != 0) {
      for (int i = begin; i < end; ++i) multiply_by_scales(c, x.ckv + i * kCkv, tile.begin + i);
    }
    const bool finite = c.full(0, c.rows.count - 1, keys) ||
                        cpu::all_finite(x.ckv + begin * kCkv, static_cast<int64_t>(end - begin) * kCkv);
    for (int row = 0; row < c.rows.count; row += cpu::kPanel) panel_tile(c, row, tile, finite);
  }

  // The latent of a token of the request, by its scales, rounded to the type of queries, as FlashMLA does.
  static void multiply_by_scales(const Context& c, float* ckv, int token) {
    const AttentionParams& base = c.p.base;
    const CachePlace at = cache_place(c.p, c.keys.pages[base.page.div(token)], base.page.mod(token));
    const int64_t page = at.page;
    const float* scales = c.p.ckv_scales + page * c.p.ckv_scales_page_stride + at.row * c.p.ckv_scales_token_stride;
    for (int d = 0; d < kCkv; d += cpu::kLanes) {
      Q rounded[cpu::kLanes];
      cpu::store(rounded, cpu::load(ckv + d) * scales[d / kTileDims]);
      cpu::store(ckv + d, cpu::load(rounded));
    }
  }

  // One panel of rows against one staged kv tile.
  static void panel_tile(const Context& c, int row, KeyRange tile, bool finite) {
    Scratch& x = c.scratch;
    const int count = min(cpu::kPanel, c.rows.count - row);
    const KeyRange visible = c.visible(row, row + count - 1, tile);
    if (visible.empty()) return;
    const KeyRange keys = {visible.begin - tile.begin, visible.end - tile.begin};
    cpu::score_panel<kCkv>(x.s, x.ckv, x.q_nope + row * kCkv, keys, count);
    cpu::score_panel<kKpe>(x.s_pe, x.kpe, x.q_pe + row * kKpe, keys, count);
    const cpu::PanelMemory<decltype(x.panel)> memory = {x.panel,          x.s,  x.alpha, x.m + row, x.d + row,
                                                        x.o + row * kCkv, x.ckv};
    const bool is_full = c.full(row, row + count - 1, visible);
    const auto add = [&](cpu::Floats s, int key, int lane) { return s + cpu::load(x.s_pe + key * cpu::kPanel + lane); };
    cpu::add_panel<kCkv>(memory, c.logits, row, count, tile.begin, keys, is_full, finite, add);
  }
};

}  // namespace quire

// Attention on the cpu: prefill, append and decode, ragged or paged.
//
// Bound: prefill by the floating-point units, decode by memory. Work comes from core/schedule.h; an OpenMP thread takes
// one CTA's work tiles at a time. A row tile of up to kFewRows rows streams keys and values through registers
// (tile/cpu_stream.h); one of more copies each kv tile, widened to float, beside a panel of rows (tile/cpu_panel.h).
// All arithmetic is in float32 whatever the tensors hold. No key that no row of a panel sees is read or computed with.
#pragma once
#include <stdlib.h>
#include "quire/tile/cpu_panel.h"
#include "quire/tile/cpu_rows.h"
#include "quire/tile/cpu_stream.h"

namespace quire {

template <class V>
struct AttentionCpu {
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  // Up to here the lanes that a panel leaves idle cost more than reading each key from L1 once per kStreamRows rows.
  static constexpr int kFewRows = 8;

  // 0, or 1 when no thread got memory for its scratch: then nothing was done. A thread without takes no work, so that
  // no group of partial results waits for a part that never comes.
  static int run(AttentionParams& p) {
    int next = 0;
#pragma omp parallel if (p.num_ctas > 1) shared(next)
    {
      Scratch* scratch = static_cast<Scratch*>(aligned_alloc(alignof(Scratch), sizeof(Scratch)));
      while (scratch != nullptr) {
        const int cta = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (cta >= p.num_ctas) break;
        WorkCursor cursor = WorkCursor::of_cta(p, cta);
        for (WorkTile work; cursor.next(p, kTileKv, work);) attend(p, work, *scratch);
      }
      free(scratch);
    }
    return next == 0 ? 1 : 0;
  }

 private:
  using Kv = typename V::Kv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo;
  static constexpr int kPaddedRows = static_cast<int>(round_up(kTileRows, cpu::kPanel));
  static_assert(kQk % 16 == 0 && kVo % 16 == 0, "a head dimension is whole vectors");
  static_assert(kTileKv % 32 == 0, "a kv tile is whole words of a mask");

  // What a thread computes with; the running softmax first, then what few rows and many rows need.
  struct alignas(64) Scratch {
    float m[kPaddedRows], d[kPaddedRows], alpha[cpu::kPanel];
    float o[kPaddedRows * kVo];
    const Kv *k_rows[2][kTileKv], *v_rows[2][kTileKv];

    float q[kFewRows * kQk], s_rows[cpu::kStreamRows * kTileKv];

    float qt[kPaddedRows * kQk], k[kTileKv * kQk], v[kTileKv * kVo], s[kTileKv * cpu::kPanel];
    int32_t begin[cpu::kPanel], end[cpu::kPanel];
    uint32_t words[kTileKv / 32 * cpu::kPanel];
  };

  // What every kv tile of a work needs.
  struct Context {
    const AttentionParams& p;
    const cpu::Rows& rows;
    Mask<V::kMask, V::kWindow != 0> mask;
    Logits<V::kSoftCap != 0> logits;
    cpu::Keys<V> keys;
    Scratch& scratch;

    KeyRange seen(int first_row, int last_row, KeyRange tile) const {
      return mask.any(rows.qo_idx(first_row), rows.qo_idx(last_row)).within(tile);
    }
    bool full(int first_row, int last_row, KeyRange keys) const {
      return mask.full(rows.qo_idx(first_row), rows.qo_idx(last_row), keys);
    }
  };

  static void attend(const AttentionParams& p, const WorkTile& work, Scratch& scratch) {
    const cpu::Rows rows(p, work, kTileRows);
    const Context c = {p,
                       rows,
                       Mask<V::kMask, V::kWindow != 0>::of(p, work.tile),
                       Logits<V::kSoftCap != 0>(p),
                       cpu::Keys<V>(p, work.tile.kv_first, work.kv_head),
                       scratch};
    clear(scratch, rows.count);
    if (rows.count <= kFewRows) {
      stream_work_tile(c, work);
    } else {
      panel_work_tile(c, work);
    }
    cpu::finish_work_tile<V>(rows, scratch.o, scratch.m, scratch.d);
  }

  static void clear(Scratch& state, int count) {
    const int padded = static_cast<int>(round_up(count, cpu::kPanel));
    for (int row = 0; row < padded; ++row) state.m[row] = -cpu::kInfinity, state.d[row] = 0.0f;
    memset(state.o, 0, sizeof(float) * padded * kVo);
  }

  static KeyRange tile_keys(int kv) { return {kv * kTileKv, (kv + 1) * kTileKv}; }

  // ---- few rows ----

  static void stream_work_tile(const Context& c, const WorkTile& work) {
    Scratch& x = c.scratch;
    for (int row = 0; row < c.rows.count; ++row) {
      const auto* q = c.rows.template q<typename V::Q>(row);
      for (int d = 0; d < kQk; d += cpu::kLanes) cpu::store(x.q + row * kQk + d, cpu::load(q + d) * c.logits.scale);
    }
    const auto locate = [&](int kv) {
      const KeyRange keys = c.seen(0, c.rows.count - 1, tile_keys(kv));
      if (kv < work.kv_end && !keys.empty()) c.keys.locate(keys, x.k_rows[kv & 1], x.v_rows[kv & 1]);
      return kv < work.kv_end ? keys : KeyRange{0, 0};
    };
    KeyRange keys = locate(work.kv_begin);
    for (int kv = work.kv_begin; kv < work.kv_end; ++kv) {
      const KeyRange next = locate(kv + 1);
      if (!keys.empty()) stream_tile(c, kv, keys, next);
      keys = next;
    }
  }

  static void stream_tile(const Context& c, int kv, KeyRange keys, KeyRange next) {
    for (int row = 0; row < c.rows.count;) {
      const int left = c.rows.count - row;
      if (cpu::kStreamRows == 4 && left >= 4) {
        stream_rows<cpu::kStreamRows>(c, kv, keys, next, row), row += cpu::kStreamRows;
      } else if (left >= 2) {
        stream_rows<2>(c, kv, keys, next, row), row += 2;
      } else {
        stream_rows<1>(c, kv, keys, next, row), row += 1;
      }
    }
  }

  template <int kRows>
  static void stream_rows(const Context& c, int kv, KeyRange keys, KeyRange next, int row) {
    Scratch& x = c.scratch;
    const int count = keys.end - keys.begin;
    const Kv *const *k_rows = x.k_rows[kv & 1], *const *v_rows = x.v_rows[kv & 1];
    if (row == 0) {
      cpu::stream_scores<kQk, kRows, kTileKv, true>(x.s_rows, x.q, k_rows, v_rows, count);
    } else {
      cpu::stream_scores<kQk, kRows, kTileKv, false>(x.s_rows, x.q + row * kQk, k_rows, v_rows, count);
    }
    for (int i = 0; i < kRows; ++i) {
      x.alpha[i] = cpu::stream_softmax<V>(
          x.s_rows + i * kTileKv, count, c.logits, [&](int key) { return shown(c, row + i, keys, key); }, x.m[row + i],
          x.d[row + i]);
    }
    float* o = x.o + row * kVo;
    if (c.full(row, row + kRows - 1, keys)) {
      const cpu::Fetch<Kv> fetch = {x.k_rows[(kv + 1) & 1], row == 0 ? next.end - next.begin : 0};
      cpu::stream_all_values<kVo, kRows, kTileKv, kQk>(o, x.s_rows, x.alpha, v_rows, count, fetch);
    } else {
      for (int i = 0; i < kRows; ++i) {
        cpu::stream_seen_values<kVo>(o + i * kVo, x.s_rows + i * kTileKv, x.alpha[i], v_rows, count);
      }
    }
  }

  // Which of the kLanes keys from keys.begin + at on a row sees.
  static cpu::Ints shown(const Context& c, int row, KeyRange keys, int at) {
    const int qo_idx = c.rows.qo_idx(row), key = keys.begin + at;
    const KeyRange sees = c.mask.visible(qo_idx).within(keys);
    const cpu::Ints lane = cpu::iota();
    cpu::Ints shown = (lane >= sees.begin - key) & (lane < sees.end - key);
    if constexpr (mask_has_bits(V::kMask)) shown &= ((c.mask.word(qo_idx, key) >> (cpu::Words)lane) & 1u) != 0u;
    return shown;
  }

  // ---- many rows ----

  static void panel_work_tile(const Context& c, const WorkTile& work) {
    Scratch& x = c.scratch;
    for (int row = 0; row < c.rows.count; row += cpu::kLanes) {
      const typename V::Q* q[cpu::kLanes];
      const int count = min(cpu::kLanes, c.rows.count - row);
      for (int i = 0; i < count; ++i) q[i] = c.rows.template q<typename V::Q>(row + i);
      float* to = x.qt + row / cpu::kPanel * (kQk * cpu::kPanel) + row % cpu::kPanel;
      cpu::transpose_rows<kQk>(to, q, count, c.logits.scale);
    }
    for (int kv = work.kv_begin; kv < work.kv_end; ++kv) {
      const KeyRange tile = tile_keys(kv), keys = c.seen(0, c.rows.count - 1, tile);
      if (keys.empty()) continue;
      stage(c, keys, tile.begin);
      const bool finite =
          c.full(0, c.rows.count - 1, keys) ||
          cpu::all_finite(x.v + (keys.begin - tile.begin) * kVo, static_cast<int64_t>(keys.end - keys.begin) * kVo);
      for (int row = 0; row < c.rows.count; row += cpu::kPanel) panel_tile(c, row, tile, finite);
    }
  }

  // Keys and values of the tile that some row sees, as floats; the rest of the first and last key blocks is 0.
  static void stage(const Context& c, KeyRange keys, int tile_begin) {
    Scratch& x = c.scratch;
    const int begin = keys.begin - tile_begin, end = keys.end - tile_begin, count = end - begin;
    const int block_begin = begin / cpu::kKeyBlock * cpu::kKeyBlock;
    const int block_end = static_cast<int>(round_up(end, cpu::kKeyBlock));
    const Kv **k_rows = x.k_rows[0], **v_rows = x.v_rows[0];
    c.keys.locate(keys, k_rows, v_rows);
    memset(x.k + block_begin * kQk, 0, sizeof(float) * (begin - block_begin) * kQk);
    cpu::widen_rows<kQk>(x.k + begin * kQk, k_rows, count);
    memset(x.k + end * kQk, 0, sizeof(float) * (block_end - end) * kQk);
    cpu::widen_rows<kVo>(x.v + begin * kVo, v_rows, count);
  }

  // One panel of rows against one staged kv tile.
  static void panel_tile(const Context& c, int row, KeyRange tile, bool finite) {
    Scratch& x = c.scratch;
    const int count = min(cpu::kPanel, c.rows.count - row);
    const KeyRange seen = c.seen(row, row + count - 1, tile);
    if (seen.empty()) return;
    const KeyRange keys = {seen.begin - tile.begin, seen.end - tile.begin};
    score(x, row, keys, count);
    if (c.full(row, row + count - 1, seen)) {
      soften<false>(c, row, keys, count);
      cpu::accumulate_values<kVo>(x.o + row * kVo, x.s, x.v, x.alpha, keys, count);
      return;
    }
    prepare_mask(c, row, tile, count);
    soften<true>(c, row, keys, count);
    if (finite) {
      cpu::accumulate_values<kVo>(x.o + row * kVo, x.s, x.v, x.alpha, keys, count);
    } else {
      cpu::accumulate_seen_values<kVo>(x.o + row * kVo, x.s, x.v, x.alpha, keys, count);
    }
  }

  static void score(Scratch& x, int row, KeyRange keys, int count) {
    const float* qt = x.qt + row * kQk;
    const int begin = keys.begin / cpu::kKeyBlock * cpu::kKeyBlock;
    if (count > 2 * cpu::kLanes) {
      cpu::score_block<kQk, 3>(x.s, x.k, qt, begin, keys.end);
    } else if (count > cpu::kLanes) {
      cpu::score_block<kQk, 2>(x.s, x.k, qt, begin, keys.end);
    } else {
      cpu::score_block<kQk, 1>(x.s, x.k, qt, begin, keys.end);
    }
  }

  template <bool kMasked>
  static void soften(const Context& c, int row, KeyRange keys, int count) {
    Scratch& x = c.scratch;
    for (int i = 0; i < count; i += cpu::kLanes) {
      const cpu::PanelMask mask = {x.begin + i, x.end + i, x.words + i};
      const cpu::Floats alpha =
          cpu::softmax_rows<V, kMasked>(x.s + i, keys, mask, c.logits, x.m + row + i, x.d + row + i);
      cpu::store(x.alpha + i, alpha);
    }
  }

  static void prepare_mask(const Context& c, int row, KeyRange tile, int count) {
    Scratch& x = c.scratch;
    for (int i = 0; i < count; ++i) {
      const int qo_idx = c.rows.qo_idx(row + i);
      const KeyRange sees = c.mask.visible(qo_idx);
      x.begin[i] = sees.begin - tile.begin, x.end[i] = sees.end - tile.begin;
      if constexpr (mask_has_bits(V::kMask)) {
        for (int w = 0; w < kTileKv / 32; ++w) {
          x.words[w * cpu::kPanel + i] = c.mask.word(qo_idx, tile.begin + 32 * w);
        }
      }
    }
  }
};

}  // namespace quire

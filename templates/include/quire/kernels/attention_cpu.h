// Attention on the CPU: prefill, append and decode, ragged or paged.
//
// Prefill is limited by the floating-point units, decode by memory. Work comes from core/schedule.h; an OpenMP thread
// computes the work tiles of one CTA at a time. A row tile of up to kFewRows rows streams keys and values through
// registers (tile/cpu/stream.h). A larger one copies each KV tile, converted to float, next to a panel of rows
// (tile/cpu/panel.h). RoPE is applied to such copies, so it uses them for few rows, too, and so do head dims that are
// no multiple of a vector. All arithmetic is in float32, whatever the tensors hold; on targets with a matrix unit
// (tile/cpu/tiles.h), bf16 numbers are multiplied and summed in float32. Keys that no row of a panel sees are neither
// read nor used.
#pragma once
#include <stdlib.h>
#include "quire/tile/cpu/panel.h"
#include "quire/tile/cpu/rows.h"
#include "quire/tile/shared/stamps.h"
#include "quire/tile/cpu/stream.h"
#include "quire/tile/cpu/tiles.h"

extern "C" int omp_get_num_threads();  // omp.h declares much more

namespace quire {

template <class V>
struct AttentionCpu {
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  // Up to here the lanes that a panel leaves idle cost more than reading each key from L1 once per kStreamRows rows.
  static constexpr int kFewRows = 8;
  // KV heads of few rows that are computed side by side, at most.
  static constexpr int kMostHeads = 16;

  // 0, or 1 when no thread got memory for its scratch: then nothing was done. A thread without takes no work, so that
  // no group of partial results waits for a part that never comes.
  static int run(AttentionParams& p) {
    int next = 0;
#pragma omp parallel if (p.num_ctas > 1) shared(next)
    {
      Scratch* scratch = static_cast<Scratch*>(aligned_alloc(alignof(Scratch), sizeof(Scratch)));
      [[maybe_unused]] const typename conditional<kOnTiles && cpu::kHasTiles, cpu::UseTiles, Nothing>::type use_tiles{};
      const int heads = heads_at_a_time(p, omp_get_num_threads());
      while (scratch != nullptr) {
        const int cta = __atomic_fetch_add(&next, heads, __ATOMIC_RELAXED);
        if (cta >= p.num_ctas) break;
        attend_ctas(p, cta, heads, *scratch);
      }
      free(scratch);
    }
    return next == 0 ? 1 : 0;
  }
  static int run(AttentionPrefixParams& p) { return run(p.base); }
  static int run(AttentionScaledParams& p) { return run(p.base); }

 private:
  using Q = typename V::Q;
  using Row = typename cpu::RowOf<typename V::Kv>::type;
  static constexpr bool kHasRope = V::kPosEncoding == kPosEncodingRope;
  static constexpr int kQk = cpu::whole_vectors(V::kHeadDimQk), kVo = cpu::whole_vectors(V::kHeadDimVo);
  static constexpr bool kOnTiles =
      (cpu::kHasTiles || cpu::kHasDots) && is_same<Q, bf16_t>::value && !kHasRope && kTileRows > 16;
  static constexpr bool kCopiesRows = kHasRope || kQk != V::kHeadDimQk || kVo != V::kHeadDimVo;
  static constexpr int kPanel = kOnTiles ? cpu::kTilePanel : cpu::kPanel;
  static constexpr int kPaddedRows = static_cast<int>(round_up(kTileRows, kPanel));
  static_assert(kTileKv % 32 == 0, "a kv tile is whole words of a mask");

  struct Nothing {};

  // The queries of few rows, scaled, and their running softmax.
  struct alignas(64) Stream {
    float q[kFewRows * kQk], o[kFewRows * kVo], m[kFewRows], d[kFewRows];
  };

  // What a thread computes with; what few rows need, then what many rows need.
  struct alignas(64) Scratch {
    Row k_rows[2][kTileKv], v_rows[2][kTileKv];
    float alpha[kPanel];
    float s_rows[cpu::kStreamRows * kTileKv];
    Stream streams[kCopiesRows ? 0 : kMostHeads];

    float m[kPaddedRows], d[kPaddedRows], o[kPaddedRows * kVo];

    float wide_q[kCopiesRows && !kOnTiles ? cpu::kLanes : 0][kQk];  // rows of q, rotated
    float qt[kOnTiles ? 0 : kPaddedRows * kQk], k[kOnTiles ? 0 : kTileKv * kQk], v[kOnTiles ? 0 : kTileKv * kVo];
    float s[kTileKv * kPanel];
    cpu::TileOperands<kOnTiles ? kPaddedRows : 0, kOnTiles ? kTileKv : 0, V::kHeadDimQk, kVo> tiles;
    cpu::PanelRows<kPanel, kTileKv> panel;
  };

  // What every kv tile of a work needs.
  struct Context {
    const AttentionParams& p;
    const cpu::Rows& rows;
    cpu::LogitsTile<V> logits;
    cpu::Keys<V> keys;
    Scratch& scratch;

    KeyRange visible(int first_row, int last_row, KeyRange tile) const {
      return logits.mask.any(rows.qo_idx(first_row), rows.qo_idx(last_row)).within(tile);
    }
    bool full(int first_row, int last_row, KeyRange keys) const {
      return block_is_full<V>(logits.transform, rows.work.kv_head, unit(keys.begin / kTileKv)) &&
             logits.mask.full(rows.qo_idx(first_row), rows.qo_idx(last_row), keys);
    }
    // The keys of a kv tile that some row sees; none of a tile that the variant's mask hides.
    KeyRange visible(int kv) const {
      if (!block_is_visible<V>(logits.transform, rows.work.kv_head, unit(kv))) return {0, 0};
      return visible(0, rows.count - 1, tile_keys(kv));
    }
    int unit(int kv) const { return rows.work.tile.work_begin + kv - rows.work.tile.kv_begin; }
  };

  static Context context(const cpu::Rows& rows, Scratch& scratch) {
    const AttentionParams& p = rows.p;
    const RowTile& tile = rows.work.tile;
    return {p,
            rows,
            {rows, tile.request, Mask<V::kMask, V::kWindow != 0>::of(p, tile), LogitsTransform<V, cpu::Math>(p)},
            cpu::Keys<V>(p, tile, rows.work.kv_head),
            scratch};
  }

  // KV heads that a thread attends to side by side, so that it reads more than one head's part of a token's keys.
  // Only where a CTA is a whole row tile, and where each thread still has eight portions or more to take.
  static int heads_at_a_time(const AttentionParams& p, int num_threads) {
    if (kCopiesRows || p.partitions != nullptr || p.k_head_stride > p.k_token_stride) return 1;
    int heads = min(kMostHeads, p.num_kv_heads);
    while (heads > 1 && (p.num_kv_heads % heads != 0 || p.num_ctas < 8 * num_threads * heads)) --heads;
    return heads;
  }

  // The work tiles of one CTA; or, of so many CTAs as there are `heads`, the row tile that they have in common.
  static void attend_ctas(const AttentionParams& p, int cta, int heads, Scratch& scratch) {
    WorkTile works[kMostHeads];
    WorkCursor cursor = WorkCursor::of_cta(p, cta);
    while (cursor.next<V::kCascade != 0>(p, kTileKv, works[0])) {
      for (int i = 1; i < heads; ++i)
        WorkCursor::of_cta(p, cta + i).template next<V::kCascade != 0>(p, kTileKv, works[i]);
      cpu::stamp<V>(p, works, heads, Moment::kBegin);
      attend(p, works, heads, scratch);
      cpu::stamp<V>(p, works, heads, Moment::kEnd);
    }
  }

  static void attend(const AttentionParams& p, const WorkTile* works, int heads, Scratch& scratch) {
    if (!kCopiesRows && p.rows_vary == 0 && cpu::Rows(p, *works, kTileRows).count <= kFewRows) {
      if constexpr (!kCopiesRows) stream_work_tiles(p, works, heads, scratch);
      return;
    }
    for (int i = 0; i < heads; ++i) {
      const cpu::Rows rows(p, works[i], kTileRows);
      const Context c = context(rows, scratch);
      clear(scratch, static_cast<int>(round_up(rows.count, kPanel)));
      if constexpr (kOnTiles) {
        tiles_work_tile(c, works[i]);
      } else {
        panel_work_tile(c, works[i]);
      }
      cpu::finish_work_tile<V>(rows, scratch.o, scratch.m, scratch.d);
    }
  }

  template <class State>
  static void clear(State& state, int count) {
    for (int row = 0; row < count; ++row) state.m[row] = -cpu::kInfinity, state.d[row] = 0.0f;
    memset(state.o, 0, sizeof(float) * count * kVo);
  }

  static KeyRange tile_keys(int kv) { return cpu::tile_keys<kTileKv>(kv); }

  // ---- few rows ----

  // All heads of a kv tile, then those of the next. While one is computed the next one's keys are on their way.
  static void stream_work_tiles(const AttentionParams& p, const WorkTile* works, int heads, Scratch& x) {
    for (int i = 0; i < heads; ++i) begin_stream(cpu::Rows(p, works[i], kTileRows), x.streams[i], x);
    const int count = heads * (works->kv_end - works->kv_begin);
    const auto resolve = [&](int at) {
      if (at >= count) return KeyRange{0, 0};
      const cpu::Rows rows(p, works[at % heads], kTileRows);
      const Context c = context(rows, x);
      const KeyRange keys = c.visible(works->kv_begin + at / heads);
      if (!keys.empty()) c.keys.resolve(keys, x.k_rows[at & 1], x.v_rows[at & 1]);
      return keys;
    };
    KeyRange keys = resolve(0);
    for (int at = 0; at < count; ++at) {
      const KeyRange next = resolve(at + 1);
      const cpu::Rows rows(p, works[at % heads], kTileRows);
      if (!keys.empty()) stream_tile(context(rows, x), x.streams[at % heads], at & 1, keys, next);
      keys = next;
    }
    for (int i = 0; i < heads; ++i) {
      const cpu::Rows rows(p, works[i], kTileRows);
      for (int row = 0; row < rows.count; ++row) cpu::order_streamed<kVo, Row>(x.streams[i].o + row * kVo);
      cpu::finish_work_tile<V>(rows, x.streams[i].o, x.streams[i].m, x.streams[i].d);
    }
  }

  static void begin_stream(const cpu::Rows& rows, Stream& stream, Scratch& x) {
    clear(stream, rows.count);
    const float scale = context(rows, x).logits.q_scale();
    for (int row = 0; row < rows.count; ++row) {
      const auto* q = rows.template q<typename V::Q>(row);
      for (int d = 0; d < kQk; d += cpu::kLanes) {
        cpu::store(stream.q + row * kQk + d, cpu::load_streamed<cpu::kReadsPairs<kQk, Row>>(q, d) * scale);
      }
    }
  }

  // `at`: which of x.k_rows and x.v_rows are the tile's; the others are those of the next.
  static void stream_tile(const Context& c, Stream& stream, int at, KeyRange keys, KeyRange next) {
    for (int row = 0; row < c.rows.count;) {
      const int left = c.rows.count - row;
      if (cpu::kStreamRows == 4 && left >= 4) {
        stream_rows<cpu::kStreamRows>(c, stream, at, keys, next, row), row += cpu::kStreamRows;
      } else if (left >= 2) {
        stream_rows<2>(c, stream, at, keys, next, row), row += 2;
      } else {
        stream_rows<1>(c, stream, at, keys, next, row), row += 1;
      }
    }
  }

  // The logits of one row and `keys` of a KV tile, of which the row sees those of `range`. No lambda of stream_rows, so
  // that softmax is compiled once for all kRows.
  struct StreamScore {
    const cpu::LogitsTile<V>& logits;
    int row, query;
    KeyRange keys, range;

    StreamScore(const cpu::LogitsTile<V>& logits, int row, KeyRange keys)
        : logits(logits),
          row(row),
          query(logits.rows.qo_idx(row)),
          keys(keys),
          range(logits.mask.visible(query).within(keys)) {}

    cpu::Floats operator()(cpu::Floats s, int key) const {
      return cpu::score_logits<true>(logits, s, cpu::KeyLanes<V>{logits, row, query, keys.begin + key, range});
    }
  };

  template <int kRows>
  static void stream_rows(const Context& c, Stream& stream, int at, KeyRange keys, KeyRange next, int row) {
    Scratch& x = c.scratch;
    const int count = keys.end - keys.begin;
    const Row *k_rows = x.k_rows[at], *v_rows = x.v_rows[at];
    const float* q = stream.q + row * kQk;
    cpu::stream_scores<kQk, kRows, kTileKv>(x.s_rows, q, k_rows, count, {v_rows, row == 0 ? count : 0});
    for (int i = 0; i < kRows; ++i) {
      const StreamScore score(c.logits, row + i, keys);
      x.alpha[i] = cpu::stream_softmax(x.s_rows + i * kTileKv, count, score, stream.m[row + i], stream.d[row + i]);
    }
    float* o = stream.o + row * kVo;
    if (c.full(row, row + kRows - 1, keys)) {
      const cpu::Prefetch<Row> prefetch = {x.k_rows[1 - at], row == 0 ? next.end - next.begin : 0};
      cpu::stream_all_values<kVo, kRows, kTileKv, kQk>(o, x.s_rows, x.alpha, v_rows, count, prefetch);
    } else {
      for (int i = 0; i < kRows; ++i) {
        cpu::stream_visible_values<kVo>(o + i * kVo, x.s_rows + i * kTileKv, x.alpha[i], v_rows, count);
      }
    }
  }

  // ---- many rows ----

  static void panel_work_tile(const Context& c, const WorkTile& work) {
    Scratch& x = c.scratch;
    for (int row = 0; row < c.rows.count; row += cpu::kLanes) {
      typename conditional<kCopiesRows, const float, const Q>::type* q[cpu::kLanes];
      const int count = min(cpu::kLanes, c.rows.count - row);
      for (int i = 0; i < count; ++i) {
        if constexpr (kCopiesRows) {
          q[i] = copied_q(c, row + i, x.wide_q[i]);
        } else {
          q[i] = c.rows.template q<Q>(row + i);
        }
      }
      float* to = x.qt + row / cpu::kPanel * (kQk * cpu::kPanel) + row % cpu::kPanel;
      cpu::transpose_rows<kQk>(to, q, count, c.logits.q_scale());
    }
    for (int kv = work.kv_begin; kv < work.kv_end; ++kv) {
      const KeyRange tile = tile_keys(kv), keys = c.visible(kv);
      if (keys.empty()) continue;
      stage(c, keys, tile.begin);
      const bool finite =
          c.full(0, c.rows.count - 1, keys) ||
          cpu::all_finite(x.v + (keys.begin - tile.begin) * kVo, static_cast<int64_t>(keys.end - keys.begin) * kVo);
      for (int row = 0; row < c.rows.count; row += cpu::kPanel) panel_tile(c, row, tile, finite);
    }
  }

  static const float* copied_q(const Context& c, int row, float (&to)[kQk]) {
    const Q* from = c.rows.template q<Q>(row);
    cpu::widen_rows<V::kHeadDimQk>(to, &from, 1);
    if constexpr (kHasRope) {
      cpu::rotate_row<V::kHeadDimQk>(to, c.rows.qo_idx(row) + c.logits.diagonal(), c.p.rope_frequencies);
    }
    return to;
  }

  // Keys and values of the tile that some row sees, as floats; the rest of the first and last key blocks is 0.
  static void stage(const Context& c, KeyRange keys, int tile_begin) {
    Scratch& x = c.scratch;
    const int begin = keys.begin - tile_begin, end = keys.end - tile_begin, count = end - begin;
    Row *k_rows = x.k_rows[0], *v_rows = x.v_rows[0];
    c.keys.resolve(keys, k_rows, v_rows);
    cpu::stage_keys<V::kHeadDimQk, kQk>(x.k, k_rows, begin, end);
    if constexpr (kHasRope) {
      for (int i = 0; i < count; ++i) {
        cpu::rotate_row<V::kHeadDimQk>(x.k + (begin + i) * kQk, keys.begin + i, c.p.rope_frequencies);
      }
    }
    cpu::widen_rows<V::kHeadDimVo>(x.v + begin * kVo, v_rows, count);
  }

  // One panel of rows against one staged kv tile.
  static void panel_tile(const Context& c, int row, KeyRange tile, bool finite) {
    Scratch& x = c.scratch;
    const int count = min(cpu::kPanel, c.rows.count - row);
    const KeyRange visible = c.visible(row, row + count - 1, tile);
    if (visible.empty()) return;
    const KeyRange keys = {visible.begin - tile.begin, visible.end - tile.begin};
    cpu::score_panel<kQk>(x.s, x.k, x.qt + row * kQk, keys, count);
    const cpu::PanelMemory<decltype(x.panel)> memory = {x.panel,         x.s, x.alpha, x.m + row, x.d + row,
                                                        x.o + row * kVo, x.v};
    const bool is_full = c.full(row, row + count - 1, visible);
    const auto add = [](cpu::Floats s, int, int) { return s; };
    cpu::add_panel<kVo>(memory, c.logits, row, count, tile.begin, keys, is_full, finite, add);
  }

  // ---- many rows, on a matrix unit ----

  static void tiles_work_tile(const Context& c, const WorkTile& work) {
    Scratch& x = c.scratch;
    for (int row = 0; row < c.rows.count; row += cpu::kTileSide) pack_queries(c, row);
    for (int kv = work.kv_begin; kv < work.kv_end; ++kv) {
      const KeyRange tile = tile_keys(kv), keys = c.visible(kv);
      if (keys.empty()) continue;
      const KeyRange staged = {keys.begin - tile.begin, keys.end - tile.begin};
      stage_tiles(c, keys, staged);
      const bool finite = c.full(0, c.rows.count - 1, keys) || x.tiles.values_are_finite(staged);
      for (int row = 0; row < c.rows.count; row += kPanel) {
        if (c.rows.count - row > cpu::kTileSide) {
          tiles_panel<2>(c, row, tile, finite);
        } else {
          tiles_panel<1>(c, row, tile, finite);
        }
      }
    }
    for (int row = 0; row < c.rows.count; row += cpu::kTileSide) cpu::transpose_outputs<kVo>(x.o + row * kVo);
  }

  static void pack_queries(const Context& c, int row) {
    auto& tiles = c.scratch.tiles;
    const bf16_t* rows[cpu::kTileSide];
    const int count = min(cpu::kTileSide, c.rows.count - row);
    for (int i = 0; i < count; ++i) {
      rows[i] = cpu::row_of_tiles<V::kHeadDimQk>(c.rows.template q<Q>(row + i), tiles.copies[i]);
    }
    tiles.pack_queries(row, rows, count);
  }

  // Keys and values `keys` of a kv tile, in which they lie at `at`.
  static void stage_tiles(const Context& c, KeyRange keys, KeyRange at) {
    Scratch& x = c.scratch;
    Row *k_rows = x.k_rows[0], *v_rows = x.v_rows[0];
    const int count = at.end - at.begin;
    c.keys.resolve(keys, k_rows, v_rows);
    for (int i = 0; i < count; ++i) {
      cpu::prefetch_ahead<V::kHeadDimQk>(k_rows, i, count), cpu::prefetch_ahead<V::kHeadDimVo>(v_rows, i, count);
      x.tiles.pack_key(at.begin + i, cpu::row_of_tiles<V::kHeadDimQk>(k_rows[i], x.tiles.copies[0]));
    }
    x.tiles.template pack_values<V::kHeadDimVo>(v_rows, at);
  }

  // As StreamScore, for all kRowTiles. kScales: of q . k times the factor of queries.
  template <bool kScales>
  struct TilesScore {
    const cpu::LogitsTile<V>& logits;
    const decltype(Scratch::panel)& panel;
    int row_tile, tile_begin;

    cpu::Floats operator()(cpu::Floats s, int key) const {
      if constexpr (kScales) s = s * logits.q_scale();
      const cpu::RowLanes<V, decltype(Scratch::panel)> lanes = {logits, panel, row_tile * cpu::kTileSide, tile_begin,
                                                                key};
      return cpu::score_logits<true>(logits, s, lanes);
    }
  };

  // One panel of rows against one staged kv tile.
  template <int kRowTiles>
  static void tiles_panel(const Context& c, int row, KeyRange tile, bool finite) {
    Scratch& x = c.scratch;
    const int count = min(kPanel, c.rows.count - row);
    const KeyRange visible = c.visible(row, row + count - 1, tile);
    if (visible.empty()) return;
    const KeyRange keys = {visible.begin - tile.begin, visible.end - tile.begin}, whole = cpu::whole_tiles(keys);
    x.tiles.template score<kRowTiles>(x.s, row, whole);
    const bool scales = LogitsTransform<V, cpu::Math>::kIsIdentity && cpu::SoftmaxTile<kVo>::takes(c.logits.q_scale());
    const bool plain =
        scales && whole.begin == keys.begin && whole.end == keys.end && c.full(row, row + count - 1, visible);
    if (!plain) cpu::describe_panel(x.panel, c.logits, row, count, tile.begin);
    for (int i = 0; i < kRowTiles; ++i) {
      const int at = row + i * cpu::kTileSide;
      cpu::SoftmaxTile<kVo> softmax = {x.tiles.weights(i), x.s + i * (kTileKv * cpu::kTileSide), x.m + at, x.d + at,
                                       x.o + at * kVo};
      if (plain) {
        softmax.of_all(whole, c.logits.q_scale());
      } else if (scales) {
        softmax.template of<true>(keys, c.logits.q_scale(), TilesScore<false>{c.logits, x.panel, i, tile.begin});
      } else {
        softmax.template of<false>(keys, 1.0f, TilesScore<true>{c.logits, x.panel, i, tile.begin});
      }
    }
    if (finite) {
      x.tiles.template accumulate<kRowTiles>(x.o + row * kVo, whole);
    } else {
      for (int i = 0; i < kRowTiles; ++i) x.tiles.accumulate_visible(x.o + (row + i * cpu::kTileSide) * kVo, i, keys);
    }
  }
};

}  // namespace quire

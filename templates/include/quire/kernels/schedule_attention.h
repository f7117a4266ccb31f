// Plans on the host: copies the index arrays, so that nobody writes them meanwhile, validates them, measures the
// schedule, and fills one packed buffer that goes to the device in one copy. Host code, a few microseconds; called
// again with a larger buffer where the first one was too small.
#pragma once
#include <stdlib.h>
#include <string.h>
#include "quire/core/schedule.h"

namespace quire {

enum class ScheduleError : int32_t {
  kNone = 0,
  kQoIndptrStart,  // qo_indptr[0] != 0
  kQoIndptrOrder,  // qo_indptr decreases at `error_request`
  kKvIndptrStart,
  kKvIndptrOrder,
  kLastPageLen,  // kv_last_page_len[error_request] not in 1..page_size (0 is allowed for a request without pages)
  kTooLong,      // a count exceeds 2^31 - 1
  kCapacity,     // more tiles than tile_capacity
  kMemory,
  kPages,  // fewer page numbers than kv_indptr[batch_size]
};

struct ScheduleParams {
  // in
  const int32_t* qo_indptr;         // [batch_size + 1]; null: one row per request
  const int32_t* kv_indptr;         // [batch_size + 1] tokens, or pages with kv_last_page_len
  const int32_t* kv_last_page_len;  // [batch_size]; null: ragged
  const int32_t* kv_indices;        // [nnz_kv] page numbers that travel in the buffer; null: none do
  int32_t* kept;                    // room for all but kv_indices, one after another; from then on they lie there
  void* buffer;                     // filled if it has room for staged_bytes
  int64_t capacity;                 // bytes of it
  int64_t num_pages;                // page numbers that there are, here or on the device; -1: ragged
  int32_t batch_size;
  int32_t qo_len;  // rows per request when qo_indptr is null
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t page_size;
  int32_t tile_rows;         // packed rows of a tile
  int32_t tile_kv;           // tokens of a kv tile
  int32_t causal;            // bottom-right
  int32_t window_left;       // -1: none
  int32_t max_ctas;          // CTAs that fill the machine: the number of partitions when tiles are cut
  int32_t fixed_split_size;  // tokens, a multiple of tile_kv: cut there and nowhere else; 0: automatic; -1: never cut
  int32_t has_mask;
  int32_t has_tile_counter;  // CTAs stay, and take whole tiles as they get to them
  int32_t l2_tokens;         // with queue: tokens of one kv head that may lie in L2 at a time
  int32_t tile_capacity;     // 0: exact; else for a CUDA graph: max_ctas partitions and arrays at fixed places, always
  // out
  int32_t error;  // ScheduleError
  int32_t error_request;
  int32_t num_tiles;
  int32_t num_ctas;            // partitions, or whole tiles times kv heads
  int32_t is_partitioned;      // there are partitions: tiles are cut, unless is_dynamic
  int32_t is_dynamic;          // partitions that say that tiles are whole
  int32_t heads_per_l2_group;  // with queue: kv heads whose keys and values stay in L2 meanwhile, a divisor of all
  int32_t work_per_head;
  int32_t partials_per_head;
  int32_t nnz_qo;
  int64_t nnz_kv;        // ragged: rows of k; paged: entries of kv_indices
  int64_t num_partials;  // partial results
  int64_t num_counters;
  int64_t mask_bytes;    // bytes of the packed custom mask
  int64_t kv_tokens;     // tokens in all
  int32_t least_page;    // of kv_indices; 0 without any
  int32_t largest_page;  // of kv_indices; -1 without any
  // the packed buffer: byte offsets of its arrays, its size, how much of that is filled, and with page numbers behind
  // it
  int64_t arrivals_offset, partitions_offset, mask_indptr_offset, tiles_offset;
  int64_t buffer_bytes, filled_bytes, staged_bytes;
};

template <class Variant>
struct ScheduleAttention {
  static int run(ScheduleParams& p) {
    keep_arrays(p);
    p.error = static_cast<int32_t>(check(p));
    if (p.error != 0) return p.error;
    measure(p);
    return p.error != 0 || p.staged_bytes > p.capacity ? p.error : fill(p);
  }

 private:
  static void keep_arrays(ScheduleParams& p) {
    if (p.kept == nullptr) return;
    const auto keep = [&p](const int32_t*& array, int64_t n) {
      if (array != nullptr) array = static_cast<int32_t*>(memcpy(p.kept, array, n * sizeof(int32_t))), p.kept += n;
    };
    keep(p.qo_indptr, p.batch_size + 1), keep(p.kv_indptr, p.batch_size + 1);
    keep(p.kv_last_page_len, p.batch_size);
    p.kept = nullptr;
  }

  static int qo_begin(const ScheduleParams& p, int b) { return p.qo_indptr ? p.qo_indptr[b] : b * p.qo_len; }

  static int kv_length(const ScheduleParams& p, int b) {
    const int n = p.kv_indptr[b + 1] - p.kv_indptr[b];
    if (p.kv_last_page_len == nullptr) return n;
    return n == 0 ? 0 : (n - 1) * p.page_size + p.kv_last_page_len[b];
  }

  static ScheduleError check(ScheduleParams& p) {
    p.error_request = 0;
    if (qo_begin(p, 0) != 0) return ScheduleError::kQoIndptrStart;
    if (p.kv_indptr[0] != 0) return ScheduleError::kKvIndptrStart;
    int64_t tokens = 0;
    for (int b = 0; b < p.batch_size; ++b) {
      p.error_request = b;
      if (qo_begin(p, b + 1) < qo_begin(p, b)) return ScheduleError::kQoIndptrOrder;
      const int64_t pages = static_cast<int64_t>(p.kv_indptr[b + 1]) - p.kv_indptr[b];
      if (pages < 0) return ScheduleError::kKvIndptrOrder;
      if (p.kv_last_page_len != nullptr) {
        const int last = p.kv_last_page_len[b];
        if (last < (pages == 0 ? 0 : 1) || last > p.page_size) return ScheduleError::kLastPageLen;
        if (pages * p.page_size > INT32_MAX) return ScheduleError::kTooLong;
      }
      if (static_cast<int64_t>(qo_begin(p, b + 1)) * p.group_size > INT32_MAX) return ScheduleError::kTooLong;
      tokens += kv_length(p, b);
    }
    p.kv_tokens = tokens;
    p.nnz_qo = qo_begin(p, p.batch_size);
    p.nnz_kv = p.kv_indptr[p.batch_size];
    return p.num_pages >= 0 && p.num_pages < p.nnz_kv ? ScheduleError::kPages : ScheduleError::kNone;
  }

  // Calls emit(RowTile&) for each tile, in order of requests and rows.
  template <class Emit>
  static void for_each_tile(const ScheduleParams& p, Emit&& emit) {
    int slot = 0;
    for (int b = 0; b < p.batch_size; ++b) {
      const int qo_len = qo_begin(p, b + 1) - qo_begin(p, b), kv_len = kv_length(p, b), rows = qo_len * p.group_size;
      for (int row = 0; row < rows; row += p.tile_rows) {
        RowTile tile = {b, row, 0, 0, 0, -1, 0, 1, p.kv_indptr[b], kv_len, qo_begin(p, b), qo_len};
        set_kv_range(p, tile);
        emit_parts(p, tile, slot, emit);
      }
    }
  }

  // Cuts a tile at multiples of fixed_split_size counted from key 0, never from the tile's own first key: where a
  // window begins must not move the cuts.
  template <class Emit>
  static void emit_parts(const ScheduleParams& p, const RowTile& tile, int& slot, Emit& emit) {
    const int step = p.fixed_split_size > 0 ? p.fixed_split_size / p.tile_kv : 0;
    const int first = step ? tile.kv_begin / step : 0,
              last = step ? (max(tile.kv_end, tile.kv_begin + 1) - 1) / step : 0;
    const int num_parts = last - first + 1;
    for (int i = 0; i < num_parts; ++i) {
      RowTile part = tile;
      part.part = i, part.num_parts = num_parts;
      if (num_parts > 1) {
        part.partial = slot;
        part.kv_begin = max(tile.kv_begin, (first + i) * step);
        part.kv_end = min(tile.kv_end, (first + i + 1) * step);
      }
      emit(part);
    }
    if (num_parts > 1) slot += num_parts;
  }

  static void measure(ScheduleParams& p) {
    int64_t tiles = 0, units = 0, slots = 0;
    int longest = 0;
    for_each_tile(p, [&](const RowTile& t) {
      ++tiles, units += tile_units(t), longest = max(longest, tile_units(t));
      if (t.partial >= 0) slots = t.partial + t.num_parts;
    });
    const int64_t all = units * p.num_kv_heads;
    if (tiles * p.num_kv_heads > INT32_MAX || all > INT32_MAX || slots * p.num_kv_heads > INT32_MAX) {
      p.error = static_cast<int32_t>(ScheduleError::kTooLong);
      return;
    }
    p.num_tiles = static_cast<int32_t>(tiles);
    p.work_per_head = static_cast<int32_t>(units);
    p.partials_per_head = static_cast<int32_t>(slots);
    const bool whole = p.fixed_split_size != 0 || whole_tiles_suffice(p, longest, all);
    p.is_partitioned = !whole;
    p.is_dynamic = 0;
    p.num_ctas =
        static_cast<int32_t>(whole ? tiles * p.num_kv_heads
                                   : num_partitions(p.num_tiles, p.work_per_head, static_cast<int>(all), p.max_ctas));
    p.heads_per_l2_group = heads_per_l2_group(p);
    if (p.tile_capacity > 0) measure_for_graph(p, whole);
    const bool cut_in_advance = p.fixed_split_size != 0;
    p.num_partials = cut_in_advance     ? static_cast<int64_t>(p.partials_per_head) * p.num_kv_heads
                     : p.is_partitioned ? 2 * static_cast<int64_t>(p.num_ctas)
                                        : 0;
    p.num_counters = cut_in_advance ? p.num_partials : p.is_partitioned ? p.num_ctas : 0;
    lay_out(p);
  }

  static int heads_per_l2_group(const ScheduleParams& p) {
    for (int heads = p.num_kv_heads; heads > 1; --heads) {
      if (p.num_kv_heads % heads == 0 && heads * p.kv_tokens <= p.l2_tokens) return heads;
    }
    return 1;
  }

  // What a launch is given, and where in the buffer arrays lie, must not depend on lengths.
  static void measure_for_graph(ScheduleParams& p, bool whole) {
    if (p.num_tiles > p.tile_capacity) p.error = static_cast<int32_t>(ScheduleError::kCapacity);
    p.is_dynamic = p.has_tile_counter && whole && p.num_tiles > 0;
    p.is_partitioned = 1;
    p.num_ctas = p.max_ctas;
    p.partials_per_head = p.fixed_split_size > 0 ? p.tile_capacity : 0;
  }

  // Whole tiles when the longest is at most a quarter of a CTA's fair partition (longest first, the tail is then
  // short), or when waves of longest tiles waste less than merging would: a chunk of 3.9 waves took 1673 us whole, 1748
  // us in partitions (H200, 2026-11-21). Tiles of one unit cannot be cut: partitions of them are runs of whole tiles,
  // and a CTA that stays reads ahead (window 128, B 128: 19.5 instead of 22.3 us). WorkQueue do as well.
  static bool whole_tiles_suffice(const ScheduleParams& p, int longest, int64_t all) {
    if (longest <= 1) return all == 0 || p.has_tile_counter != 0;
    const int64_t wave = static_cast<int64_t>(longest) * p.max_ctas;
    return 4 * wave <= all || 100 * ceil_div(all, wave) * wave <= 107 * all;
  }

  // Tiles come last, so that what is filled leads.
  static void lay_out(ScheduleParams& p) {
    int64_t at = 0;
    const auto place = [&at](int64_t& offset, int64_t bytes) { offset = at, at = round_up(at + bytes, 16); };
    place(p.arrivals_offset, (p.num_counters + 1) * static_cast<int64_t>(sizeof(uint32_t)));  // and a tile_counter
    place(p.partitions_offset, p.is_partitioned ? p.num_ctas * static_cast<int64_t>(sizeof(Partition)) : 0);
    place(p.mask_indptr_offset, p.has_mask ? p.batch_size * static_cast<int64_t>(sizeof(int64_t)) : 0);
    place(p.tiles_offset, p.num_tiles * static_cast<int64_t>(sizeof(RowTile)));
    p.filled_bytes = p.staged_bytes = at;
    if (p.kv_indices != nullptr) p.staged_bytes += p.nnz_kv * static_cast<int64_t>(sizeof(int32_t));
    p.buffer_bytes = max(at, p.tiles_offset + p.tile_capacity * static_cast<int64_t>(sizeof(RowTile)));
    p.mask_bytes = 0;
    for (int b = 0; p.has_mask && b < p.batch_size; ++b) p.mask_bytes += mask_bytes(p, b);
  }

  static int64_t mask_bytes(const ScheduleParams& p, int b) {
    return ceil_div(static_cast<int64_t>(qo_begin(p, b + 1) - qo_begin(p, b)) * kv_length(p, b), int64_t{8});
  }

  template <class T>
  static T* at(const ScheduleParams& p, int64_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(p.buffer) + offset);
  }

  static int fill(ScheduleParams& p) {
    RowTile* tiles = at<RowTile>(p, p.tiles_offset);
    int n = 0, work = 0;
    for_each_tile(p, [&](RowTile& t) { t.work_begin = work, work += tile_units(t), tiles[n++] = t; });
    if ((!p.is_partitioned || p.is_dynamic) && !sort_longest_first(tiles, n)) {
      return p.error = static_cast<int32_t>(ScheduleError::kMemory);
    }
    if (p.is_partitioned) fill_partitions(p, tiles);
    int64_t* mask_indptr = at<int64_t>(p, p.mask_indptr_offset);
    int64_t mask = 0;
    for (int b = 0; p.has_mask && b < p.batch_size; ++b) mask_indptr[b] = mask, mask += mask_bytes(p, b);
    memset(at<uint32_t>(p, p.arrivals_offset), 0, (p.num_counters + 1) * sizeof(uint32_t));
    copy_pages(p);
    return 0;
  }

  static void copy_pages(ScheduleParams& p) {
    int32_t* pages = at<int32_t>(p, p.filled_bytes);
    int32_t least = INT32_MAX, largest = -1;
    const int64_t n = p.kv_indices == nullptr ? 0 : p.nnz_kv;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t page = p.kv_indices[i];
      least = min(least, page), largest = max(largest, page), pages[i] = page;
    }
    p.least_page = n == 0 ? 0 : least, p.largest_page = largest;
  }

  // One pass over the tiles: a partition begins in the tile where the last one ended. Tiles that were cut in advance
  // are not cut again: a partition begins at the first of them that begins within its run.
  static void fill_partitions(const ScheduleParams& p, const RowTile* tiles) {
    Partition* partitions = at<Partition>(p, p.partitions_offset);
    const int total = p.work_per_head * p.num_kv_heads;
    const Partition all = cut_into_partitions(p.num_tiles, p.work_per_head, total, p.max_ctas);
    int tile = 0, kv_head = 0;
    const auto unit = [&] { return p.work_per_head * kv_head + tiles[tile].work_begin; };
    const auto advance = [&] {
      if (++tile == p.num_tiles) tile = 0, ++kv_head;
    };
    for (int c = 0; c < p.num_ctas; ++c) {
      Partition& partition = partitions[c] = all;
      if (p.is_dynamic) {
        partition.units = Partition::kDynamic, partition.offset = p.num_tiles * p.num_kv_heads,
        partition.tile = p.heads_per_l2_group;
        continue;
      }
      const int begin = min(partition_begin(all, c), total), end = min(partition_begin(all, c + 1), total);
      if (begin == end) continue;  // there may be no tile at all
      if (p.fixed_split_size != 0) {
        partition.kv_head = kv_head, partition.tile = tile;
        for (; kv_head < p.num_kv_heads && unit() < end; advance()) partition.units += tile_units(tiles[tile]);
        continue;
      }
      while (unit() + tile_units(tiles[tile]) <= begin) advance();
      partition.kv_head = kv_head, partition.tile = tile, partition.offset = begin - unit(),
      partition.units = end - begin;
    }
  }

  // A stable counting sort by work, descending: the last tiles to start are the shortest.
  static bool sort_longest_first(RowTile* tiles, int n) {
    int longest = 0;
    for (int i = 0; i < n; ++i) longest = max(longest, tile_units(tiles[i]));
    if (longest <= 1) return true;
    int* first = static_cast<int*>(calloc(longest + 2, sizeof(int)));
    RowTile* sorted = static_cast<RowTile*>(malloc(n * sizeof(RowTile)));
    const bool ok = first != nullptr && sorted != nullptr;
    if (ok) {
      for (int i = 0; i < n; ++i) ++first[longest - tile_units(tiles[i]) + 1];
      for (int w = 0; w < longest; ++w) first[w + 1] += first[w];
      for (int i = 0; i < n; ++i) sorted[first[longest - tile_units(tiles[i])]++] = tiles[i];
      memcpy(tiles, sorted, n * sizeof(RowTile));
    }
    free(first);
    free(sorted);
    return ok;
  }
};

}  // namespace quire

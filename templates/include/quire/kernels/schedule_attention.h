// Schedules on the host: copies the index arrays, so that nobody changes them meanwhile, validates them, measures the
// schedule, and fills one packed buffer, which one copy sends to the device. This takes a few microseconds. If the
// buffer is too small, the function is called again with a larger one.
#pragma once
#pragma GCC optimize("O3")  // plan() waits for it; with the toolchain's -O2 it takes two to three times as long

#include <stdlib.h>
#include <string.h>
#include "quire/core/schedule.h"
#include "quire/kernels/schedule_cascade.h"

namespace quire {

template <class Variant>
struct ScheduleAttention {
  static int run(ScheduleParams& p) {
    ScheduleAttention scheduler(p);
    scheduler.keep_arrays();
    scheduler.fail(scheduler.check());
    if (p.output.error == 0) scheduler.is_cascade() ? scheduler.measure_cascade() : scheduler.measure();
    if (p.output.error == 0 && p.output.staged_bytes <= p.input.capacity) scheduler.fill();
    return p.output.error;
  }

 private:
  // Row tiles times KV heads are fewer. A schedule of so many takes 400 MB and some 100 ms; of 256 rows each, the row
  // behind the last of them would be no int.
  static constexpr int64_t kMaxTiles = 1 << 23;
  static constexpr int kMostShort = 24;  // units of a short row tile

  ScheduleInput in_;  // with the index arrays as they were kept
  ScheduleOutput& out_;
  CascadeSchedule cascade_;
  bool counts_starts_ = false;

  explicit ScheduleAttention(ScheduleParams& p) : in_(p.input), out_(p.output), cascade_(in_, out_) {}

  bool is_cascade() const { return in_.num_shared_nodes > 0; }
  bool is_in_prefix(int b) const { return in_.prefix_indptr != nullptr && b < in_.num_shared_nodes; }

  void fail(ScheduleError error) { out_.error = static_cast<int32_t>(error); }

  void keep_arrays() {
    const auto keep = [this](const int32_t*& array, int64_t n) {
      if (array == nullptr) return;
      if (!out_.has_kept) memcpy(in_.kept, array, n * sizeof(int32_t));
      array = in_.kept, in_.kept += n;
    };
    keep(in_.qo_indptr, is_cascade() ? 2 * in_.batch_size : in_.batch_size + 1),
        keep(in_.kv_indptr, in_.batch_size + 1);
    keep(in_.kv_last_page_len, in_.batch_size);
    out_.has_kept = 1;
  }

  int64_t qo_begin(int b) const {
    if (is_cascade()) return in_.qo_indptr[2 * b];
    return in_.qo_indptr ? in_.qo_indptr[b] : static_cast<int64_t>(b) * in_.qo_len;
  }
  int64_t qo_end(int b) const { return is_cascade() ? in_.qo_indptr[2 * b + 1] : qo_begin(b + 1); }

  int qo_length(int b) const { return static_cast<int>(qo_end(b) - qo_begin(b)); }

  int kv_length(int b) const {
    if (is_in_prefix(b)) return in_.prefix_indptr[b + 1] - in_.prefix_indptr[b];
    const int n = in_.kv_indptr[b + 1] - in_.kv_indptr[b];
    if (in_.kv_last_page_len == nullptr) return n;
    return n == 0 ? 0 : (n - 1) * in_.page_size + in_.kv_last_page_len[b];
  }

  ScheduleError check() {
    out_.error_request = 0;
    if (qo_begin(0) != 0) return ScheduleError::kQoIndptrStart;
    if (in_.kv_indptr[0] < 0) return ScheduleError::kKvIndptrStart;
    out_.kv_tokens = 0;
    int64_t tiles = 0;
    for (int b = 0; b < in_.batch_size; ++b) {
      out_.error_request = b;
      if (const ScheduleError error = check_request(b); error != ScheduleError::kNone) return error;
      if (in_.seq_lens != nullptr && in_.seq_lens[b] != kv_length(b)) return ScheduleError::kSeqLens;
      out_.kv_tokens += kv_length(b);
      const int64_t rows = static_cast<int64_t>(qo_length(b)) * in_.group_size;
      tiles += ceil_div(rows, static_cast<int64_t>(in_.tile_rows)) * max_parts(b);
      if (tiles * in_.num_kv_heads >= kMaxTiles) return ScheduleError::kTooManyTiles;
    }
    out_.nnz_qo = static_cast<int32_t>(is_cascade() ? qo_end(in_.batch_size - 1) : qo_begin(in_.batch_size));
    out_.nnz_kv = in_.kv_indptr[in_.batch_size];
    return in_.num_pages >= 0 && in_.num_pages < out_.nnz_kv ? ScheduleError::kPages : ScheduleError::kNone;
  }

  ScheduleError check_request(int b) const {
    if (qo_end(b) < qo_begin(b)) return ScheduleError::kQoIndptrOrder;
    const int64_t pages = static_cast<int64_t>(in_.kv_indptr[b + 1]) - in_.kv_indptr[b];
    if (pages < 0) return ScheduleError::kKvIndptrOrder;
    if (in_.kv_last_page_len != nullptr) {
      const int last = in_.kv_last_page_len[b];
      if (last < (pages == 0 ? 0 : 1) || last > in_.page_size) return ScheduleError::kLastPageLen;
      if (pages * in_.page_size > INT32_MAX) return ScheduleError::kTooLong;
    }
    return qo_end(b) * in_.group_size > INT32_MAX ? ScheduleError::kTooManyRows : ScheduleError::kNone;
  }

  // Tokens of the fixed splits of a request; 0: its row tiles are not divided in advance.
  int split_tokens(int kv_len) const {
    return in_.splits_by_length != 0 ? splits_of(kv_len) : max(0, in_.fixed_split_size);
  }

  // Parts of each row tile of a request, at most.
  int64_t max_parts(int b) const {
    const int kv_len = kv_length(b), tokens = split_tokens(kv_len);
    return tokens > 0 ? kv_len / tokens + 1 : 1;
  }

  // Calls emit(RowTile&) for each row tile, in order of requests and rows.
  template <class Emit>
  void for_each_tile(Emit&& emit) const {
    int partials = 0, groups = 0;  // of one KV head, so far
    for (int b = 0; b < in_.batch_size; ++b) {
      const int qo_len = qo_length(b), rows = qo_len * in_.group_size;
      for (int row = 0; row < rows; row += in_.tile_rows) {
        const int first = in_.kv_indptr[b], begin = static_cast<int>(qo_begin(b));
        RowTile tile = {b, row, 0, 0, 0, {-1}, {1}, -1, first, kv_length(b), begin, qo_len};
        set_kv_range(in_, tile);
        emit_parts(tile, partials, groups, emit);
      }
    }
  }

  // Divides a row tile at multiples of fixed_split_size counted from key 0, never from the row tile's first key, so
  // that the places do not depend on where a window begins.
  template <class Emit>
  void emit_parts(RowTile tile, int& partials, int& groups, Emit& emit) const {
    const int step = split_tokens(tile.kv_len) / in_.tile_kv;
    const int first = step ? tile.kv_begin / step : 0,
              last = step ? (max(tile.kv_end, tile.kv_begin + 1) - 1) / step : 0;
    if (first == last) return emit(tile);
    const int kv_begin = tile.kv_begin, kv_end = tile.kv_end;
    tile.num_parts = last - first + 1, tile.group = groups++ * in_.num_kv_heads;
    for (int i = first; i <= last; ++i) {
      tile.partial = partials * in_.num_kv_heads + i - first;
      tile.kv_begin = max(kv_begin, i * step), tile.kv_end = min(kv_end, (i + 1) * step);
      emit(tile);
    }
    partials += tile.num_parts;
  }

  void measure() {
    int64_t tiles = 0, units = 0, partials = 0, groups = 0;
    int longest = 0;
    for_each_tile([&](const RowTile& t) {
      ++tiles, units += tile_units(t), longest = max(longest, tile_units(t));
      if (t.partial >= 0) groups = t.group + in_.num_kv_heads, ++partials;
    });
    const int64_t all = units * in_.num_kv_heads;
    partials *= in_.num_kv_heads;
    if (max(all, partials * in_.tile_rows) > INT32_MAX) return fail(ScheduleError::kTooManyUnits);
    out_.num_tiles = static_cast<int32_t>(tiles);
    out_.work_per_head = static_cast<int32_t>(units);
    const bool whole =
        in_.fixed_split_size != 0 ? !are_short(tiles, units, longest) : whole_tiles_suffice(tiles, units, longest);
    out_.is_partitioned = !whole;
    out_.is_dynamic = 0;
    counts_starts_ = in_.fixed_split_size == 0 && !whole && starts_matter(longest);
    out_.num_ctas = static_cast<int32_t>(whole ? tiles * in_.num_kv_heads : most_partitions(static_cast<int>(all)));
    out_.heads_per_l2_group = heads_per_l2_group();
    if (in_.tile_capacity > 0) measure_for_graph(whole, partials, groups);
    const bool is_automatic = in_.fixed_split_size == 0 && out_.is_partitioned;
    out_.num_partials = is_automatic ? 2 * static_cast<int64_t>(out_.num_ctas) : partials;
    out_.num_groups = is_automatic ? out_.num_ctas : groups;
    lay_out();
  }

  void measure_cascade() {
    fail(cascade_.measure([this](int b) -> RowTile {
      const int first = is_in_prefix(b) ? in_.prefix_indptr[b] : in_.kv_indptr[b];
      const int begin = static_cast<int>(qo_begin(b));
      return {b, 0, 0, 0, 0, {0}, {0}, 0, first, kv_length(b), begin, qo_length(b)};
    }));
    if (out_.error == 0) lay_out();
  }

  int heads_per_l2_group() const {
    for (int heads = in_.num_kv_heads; heads > 1; --heads) {
      if (in_.num_kv_heads % heads == 0 && heads * out_.kv_tokens <= in_.l2_tokens) return heads;
    }
    return 1;
  }

  // What a launch is given, and where in the buffer arrays lie, must not depend on lengths.
  void measure_for_graph(bool whole, int64_t& partials, int64_t& groups) {
    if (out_.num_tiles > in_.tile_capacity) fail(ScheduleError::kCapacity);
    out_.is_dynamic = in_.has_tile_counter && whole && out_.num_tiles > 0;
    out_.is_partitioned = 1;
    out_.num_ctas = in_.max_ctas;
    partials = in_.fixed_split_size > 0 ? static_cast<int64_t>(in_.tile_capacity) * in_.num_kv_heads : 0;
    groups = partials / 2;
  }

  // Whole row tiles when the longest is at most a quarter of a CTA's fair part (longest first, the tail is then short),
  // or when waves of longest ones waste less than merging would. Not where row tiles are short, because a CTA that has
  // several reads the keys of the next while it ends one: of one unit, or of so few that a start is a 16th of their
  // cost, but no more than kMostShort. A tile counter does as well.
  bool whole_tiles_suffice(int64_t tiles, int64_t units, int longest) const {
    if (units <= tiles * max(1, min(in_.start_cost, kMostShort))) return units == 0 || in_.has_tile_counter != 0;
    const int64_t all = units * in_.num_kv_heads, wave = static_cast<int64_t>(longest) * in_.max_ctas;
    return 4 * wave <= all || 100 * ceil_div(all, wave) * wave <= 107 * all;
  }

  // Whether partitions have several row tiles of fixed splits, which are whole to the scheduler. A CTA reads the keys
  // of the next while it ends one, which saves half of a unit. But partitions end up to half of the longest row tile
  // too late, unless all are equal.
  bool are_short(int64_t tiles, int64_t units, int longest) const {
    const bool is_saved = units == tiles * longest || tiles * in_.num_kv_heads >= int64_t{longest} * in_.max_ctas;
    return in_.start_cost > 0 && in_.has_tile_counter == 0 && units > 0 && is_saved &&
           units <= tiles * min(in_.start_cost, kMostShort);
  }

  // Whether a partition's cost counts the starts that it really has, rather than starts spread evenly over units. It
  // does where a start costs much, row tiles differ, and there are so few row tiles that visiting all of them is quick.
  bool starts_matter(int longest) const {
    return in_.start_cost >= 2 * WorkSequence::kUnitCost &&
           static_cast<int64_t>(longest) * out_.num_tiles != out_.work_per_head &&
           static_cast<int64_t>(out_.num_tiles) * in_.num_kv_heads <= 4 * in_.max_ctas;
  }
  int most_partitions(int units) const {
    if (counts_starts_) return min(in_.max_ctas, ceil_div(units, 2));
    return num_partitions(out_.num_tiles, out_.work_per_head, units, in_.max_ctas);
  }

  // Row tiles come last, so that what is filled leads.
  void lay_out() {
    int64_t at = 0;
    const auto place = [&at](int64_t& offset, int64_t bytes) { offset = at, at = round_up(at + bytes, 16); };
    const bool has_mask = in_.mask_mode == kMaskCustom;
    place(out_.tile_counter_offset, sizeof(uint32_t));
    const int64_t groups = out_.num_groups * static_cast<int64_t>(sizeof(MergeGroup)),
                  partitions = out_.is_partitioned ? out_.num_ctas * static_cast<int64_t>(sizeof(Partition)) : 0;
    place(out_.groups_offset, is_cascade() ? cascade_.groups_bytes() : groups);
    place(out_.partitions_offset, is_cascade() ? cascade_.partitions_bytes() : partitions);
    place(out_.mask_indptr_offset, has_mask ? in_.batch_size * static_cast<int64_t>(sizeof(int64_t)) : 0);
    place(out_.tiles_offset, out_.num_tiles * static_cast<int64_t>(sizeof(RowTile)));
    out_.filled_bytes = out_.staged_bytes = at;
    if (in_.kv_indices != nullptr) out_.staged_bytes += out_.nnz_kv * static_cast<int64_t>(sizeof(int32_t));
    out_.buffer_bytes = max(at, out_.tiles_offset + in_.tile_capacity * static_cast<int64_t>(sizeof(RowTile)));
    out_.mask_bytes = 0;
    for (int b = 0; has_mask && b < in_.batch_size; ++b) out_.mask_bytes += mask_bytes(b);
  }

  int64_t mask_bytes(int b) const { return ceil_div(static_cast<int64_t>(qo_length(b)) * kv_length(b), int64_t{8}); }

  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(in_.buffer) + offset);
  }

  void fill() {
    RowTile* tiles = at<RowTile>(out_.tiles_offset);
    if (is_cascade()) {
      *at<uint32_t>(out_.tile_counter_offset) = 0;
      cascade_.copy_to(tiles, at<void>(out_.partitions_offset), at<void>(out_.groups_offset));
      return copy_pages();
    }
    int n = 0, work = 0;
    for_each_tile([&](RowTile& t) { t.work_begin = work, work += tile_units(t), tiles[n++] = t; });
    *at<uint32_t>(out_.tile_counter_offset) = 0;
    if (in_.fixed_split_size > 0) fill_groups(tiles);
    if (out_.is_partitioned) fill_partitions(tiles);
    if ((!out_.is_partitioned || out_.is_dynamic) && !sort_longest_first(tiles, n)) fail(ScheduleError::kMemory);
    int64_t* mask_indptr = at<int64_t>(out_.mask_indptr_offset);
    int64_t mask = 0;
    for (int b = 0; in_.mask_mode == kMaskCustom && b < in_.batch_size; ++b)
      mask_indptr[b] = mask, mask += mask_bytes(b);
    copy_pages();
  }

  void copy_pages() {
    int32_t* pages = at<int32_t>(out_.filled_bytes);
    int32_t least = INT32_MAX, largest = -1;
    const int64_t n = in_.kv_indices == nullptr ? 0 : out_.nnz_kv;
    for (int64_t i = in_.kv_indptr[0]; i < n; ++i) {  // those ahead belong to requests of another call
      const int32_t page = in_.kv_indices[i];
      least = min(least, page), largest = max(largest, page), pages[i] = page;
    }
    out_.least_page = least == INT32_MAX ? 0 : least, out_.largest_page = largest;
  }

  // The merge groups of fixed splits: one for each KV head of each row tile that is divided.
  void fill_groups(const RowTile* tiles) const {
    MergeGroup* groups = at<MergeGroup>(out_.groups_offset);
    for (int i = 0; i < out_.num_tiles; i += tiles[i].num_parts) {
      const RowTile& t = tiles[i];
      const int num_rows = min(in_.tile_rows, t.qo_len * in_.group_size - t.row_begin);
      for (int head = 0; t.partial >= 0 && head < in_.num_kv_heads; ++head) {
        const int begin = t.partial + head * t.num_parts;
        groups[t.group + head] = {begin, begin + t.num_parts, num_rows, 0};
      }
    }
  }

  void fill_partitions(const RowTile* tiles) const {
    Partition* partitions = at<Partition>(out_.partitions_offset);
    MergeGroup* groups = at<MergeGroup>(out_.groups_offset);
    const WorkSequence sequence = WorkSequence::of(tiles, out_.num_tiles, in_.num_kv_heads, out_.work_per_head,
                                                   in_.start_cost, in_.fixed_split_size == 0, in_.max_ctas);
    int num_partials = 0, num_groups = 0;
    const int64_t budget = counts_starts_ ? sequence.budget_of(out_.num_ctas) : 0;
    WorkPosition begin = sequence.begin_of_partition(0);
    for (int i = 0; i < out_.num_ctas; ++i) {
      if (out_.is_dynamic) {
        partitions[i] = {0, 0, 0, 0, 0, 0, out_.num_tiles, out_.heads_per_l2_group};
        continue;
      }
      const WorkPosition end =
          counts_starts_ ? sequence.end_within_budget(begin, budget) : sequence.begin_of_partition(i + 1, &begin);
      const PartialsOfPartition adds(begin, end);
      const Partition partition = sequence.between(begin, end, num_partials, num_groups);
      partitions[i] = partition;
      adds.write(sequence, partition, end, in_.tile_rows, in_.group_size, groups);
      num_partials += adds.count(), num_groups += adds.begins;
      begin = end;
    }
  }

  // A stable counting sort by work, descending: the last tiles to start are the shortest.
  static bool sort_longest_first(RowTile* tiles, int n) {
    int longest = 0;
    bool is_sorted = true;  // as where all requests are alike
    for (int i = 0; i < n; ++i) {
      const int units = tile_units(tiles[i]);
      is_sorted = is_sorted && (i == 0 || units <= tile_units(tiles[i - 1]));
      longest = max(longest, units);
    }
    if (is_sorted) return true;
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

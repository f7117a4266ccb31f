// Schedules a cascade (core/schedule.h): row tiles of all levels, the partitions that divide them, and the merge table.
//
// There are two sequences of work units, one for the shared levels and one for the last level, each divided into
// partitions of equal cost. A CTA computes one partition of each, shared keys first. When the requests' own keys are
// done, the partial results of the shared keys are then available, so that merges are many, small, and distributed over
// all CTAs. If CTAs merge only when they have no other work, every other CTA begins with the requests' own keys
// instead: shared keys keep the tensor cores busy and own keys the memory, so that half of the CTAs use each at a time.
#pragma once
#include <stdlib.h>
#include <string.h>
#include "quire/core/schedule.h"
#include "quire/kernels/schedule_input.h"

namespace quire {

class CascadeSchedule {
 public:
  CascadeSchedule(const ScheduleInput& in, ScheduleOutput& out) : in_(in), out_(out) {}
  CascadeSchedule(const CascadeSchedule&) = delete;
  ~CascadeSchedule() { free(tiles_), free(partitions_), free(groups_); }

  // Nodes have been checked. `node(b)` returns the first row of q and the rows of node b, and its tokens.
  template <class Node>
  ScheduleError measure(Node&& node) {
    if (!make_tiles(node)) return ScheduleError::kMemory;
    if (units_[0] + units_[1] > INT32_MAX / in_.num_kv_heads) return ScheduleError::kTooManyUnits;
    if (!make_partitions()) return ScheduleError::kMemory;
    if (partial_rows_ > INT32_MAX) return ScheduleError::kTooManyUnits;
    if (!make_groups()) return ScheduleError::kMemory;
    out_.num_tiles = num_tiles_, out_.num_ctas = num_ctas_, out_.is_partitioned = 1, out_.is_dynamic = 0;
    out_.work_per_head = static_cast<int32_t>(units_[0] + units_[1]), out_.heads_per_l2_group = 1;
    out_.num_partials = ceil_div(partial_rows_, static_cast<int64_t>(in_.tile_rows));
    out_.num_groups = num_groups_;
    return ScheduleError::kNone;
  }

  int64_t groups_bytes() const {
    return num_groups_ * static_cast<int64_t>(sizeof(CascadeGroup)) +
           num_parts_ * static_cast<int64_t>(sizeof(int32_t));
  }
  int64_t partitions_bytes() const { return (count_[0] + count_[1]) * static_cast<int64_t>(sizeof(Partition)); }

  void copy_to(void* tiles, void* partitions, void* groups) const {
    memcpy(tiles, tiles_, num_tiles_ * sizeof(RowTile));
    memcpy(partitions, partitions_, partitions_bytes());
    memcpy(groups, groups_, groups_bytes());
  }

 private:
  const ScheduleInput& in_;
  ScheduleOutput& out_;
  RowTile* tiles_ = nullptr;
  Partition* partitions_ = nullptr;
  CascadeGroup* groups_ = nullptr;  // and the list of parts
  int num_tiles_ = 0, num_shared_tiles_ = 0, num_ctas_ = 0;
  int count_[2] = {0, 0};  // partitions of the shared levels and of the last one
  int64_t num_groups_ = 0, num_parts_ = 0, partial_rows_ = 0;
  int64_t units_[2] = {0, 0};   // of one KV head, in the shared levels and in the last one
  int64_t longest_shared_ = 0;  // units of a shared row tile
  bool has_whole_tiles_ = false;

  template <class Node>
  bool make_tiles(Node&& node) {
    int64_t capacity = 0;
    for (int b = 0; b < in_.batch_size; ++b) capacity += ceil_div(node(b).qo_len * in_.group_size, in_.tile_rows);
    tiles_ = static_cast<RowTile*>(malloc(max(int64_t{1}, capacity) * sizeof(RowTile)));
    if (tiles_ == nullptr) return false;
    for (int b = 0; b < in_.batch_size; ++b) {
      const RowTile of_node = node(b);
      const bool is_shared = b < in_.num_shared_nodes;
      if (is_shared && of_node.kv_len == 0) continue;  // the last level's row tiles write what no key is seen of
      const int rows = of_node.qo_len * in_.group_size;
      for (int row = 0; row < rows; row += in_.tile_rows) {
        RowTile tile = of_node;
        tile.row_begin = row, tile.row_end = min(row + in_.tile_rows, rows);
        if (is_shared) {
          tile.request = -1, tile.qo_len = 0;  // so that each query stands behind all keys
          tile.kv_begin = 0, tile.kv_end = (tile.kv_len - 1) / in_.tile_kv + 1;
        } else {
          set_kv_range(in_, tile);
        }
        if (is_shared) longest_shared_ = max<int64_t>(longest_shared_, tile_units(tile));
        tile.work_begin = static_cast<int32_t>(units_[!is_shared]);
        units_[!is_shared] += tile_units(tile);
        tiles_[num_tiles_++] = tile;
      }
      if (is_shared) num_shared_tiles_ = num_tiles_;
    }
    return true;
  }

  WorkSequence sequence(bool is_last, int max_partitions) const {
    const int first = is_last ? num_shared_tiles_ : 0, count = is_last ? num_tiles_ - first : num_shared_tiles_;
    return WorkSequence::of(tiles_ + first, count, in_.num_kv_heads, static_cast<int>(units_[is_last]), in_.start_cost,
                            true, max_partitions);
  }

  // Whether whole shared row tiles, dealt out to CTAs in turn, end at nearly equal times.
  bool whole_shared_tiles_suffice() const {
    const int64_t all = units_[0] * in_.num_kv_heads, wave = longest_shared_ * in_.max_ctas;
    return all >= wave && wave > 0 && 100 * ceil_div(all, wave) * wave <= 107 * all;
  }

  // CTAs for the last level. Where some have a shared row tile less than others, these alone if that suffices.
  int most_last_ctas() const {
    if (!has_whole_tiles_) return in_.max_ctas;
    const int spare = in_.max_ctas - count_[0] % in_.max_ctas;
    return units_[1] * in_.num_kv_heads <= spare * longest_shared_ ? spare : in_.max_ctas;
  }

  bool make_partitions() {
    has_whole_tiles_ = whole_shared_tiles_suffice();
    const WorkSequence shared = sequence(false, in_.max_ctas);
    count_[0] = has_whole_tiles_ ? num_shared_tiles_ * in_.num_kv_heads : shared.num_partitions;
    const WorkSequence last = sequence(true, most_last_ctas());
    count_[1] = last.num_partitions;
    num_ctas_ = min(in_.max_ctas, count_[0] + count_[1]);
    partitions_ = static_cast<Partition*>(calloc(max(1, count_[0] + count_[1]), sizeof(Partition)));
    if (partitions_ == nullptr) return false;
    has_whole_tiles_ ? fill_whole_tiles() : fill_sequence(shared, false);
    fill_sequence(last, true);
    if (has_whole_tiles_) return true;
    for (int cta = num_ctas_ - count_[1]; cta < count_[0]; ++cta) partitions_[cta].next = count_[1] + cta;
    return true;
  }

  // Where partition i of a sequence lies: at its CTA's number where the CTA begins with it, else behind all of those.
  int place_of(bool is_last, int i) const {
    if (has_whole_tiles_) return is_last ? count_[0] + i : i;
    const int cta = is_last ? num_ctas_ - 1 - i : i;
    const bool has_both = cta < count_[0] && cta >= num_ctas_ - count_[1];
    const bool begins_with_last = in_.arrives_late && cta % 2 == 1;
    return has_both && is_last != begins_with_last ? count_[1] + cta : cta;
  }

  // Partition i is a shared row tile, those of a KV head one after another. A CTA has each num_ctas_-th of them, and
  // then a partition of the last level, of which the last CTAs have the first ones.
  void fill_whole_tiles() {
    for (int i = 0; i < count_[0]; ++i) {
      const int head = i / num_shared_tiles_, tile = i - head * num_shared_tiles_;
      const int last = num_ctas_ - 1 - i % num_ctas_;
      Partition& partition = partitions_[i];
      partition = {head, tile, 0, tile_units(tiles_[tile]), static_cast<int32_t>(partial_rows_), {0}, num_tiles_, {0}};
      partition.next = i + num_ctas_ < count_[0] ? i + num_ctas_ : last < count_[1] ? count_[0] + last : 0;
      partial_rows_ += tiles_[tile].row_end - tiles_[tile].row_begin;
    }
  }

  void fill_sequence(const WorkSequence& sequence, bool is_last) {
    const int first_tile = is_last ? num_shared_tiles_ : 0;
    WorkPosition begin = sequence.num_partitions > 0 ? sequence.begin_of_partition(0) : WorkPosition{0, 0, 0};
    for (int i = 0; i < sequence.num_partitions; ++i) {
      const WorkPosition end = sequence.begin_of_partition(i + 1, &begin);
      Partition& partition = partitions_[place_of(is_last, i)];
      partition = sequence.between(begin, end, 0, 0);
      partition.partial = static_cast<int32_t>(partial_rows_);
      partition.first_tile = first_tile, partition.tile += first_tile, partition.num_tiles += first_tile;
      partition.next = 0;
      for_each_work_tile(partition,
                         [&](const RowTile& tile, int, int) { partial_rows_ += tile.row_end - tile.row_begin; });
      begin = end;
    }
  }

  // Calls body(row tile, KV head, first row of its partial result) for the work tiles of one partition.
  template <class Body>
  void for_each_work_tile(const Partition& partition, Body&& body) const {
    int partial = partition.partial;
    for (WorkCursor cursor = {partition}; cursor.exists();) {
      const RowTile& tile = tiles_[cursor.left.tile];
      body(tile, cursor.left.kv_head, partial);
      partial += tile.row_end - tile.row_begin;
      cursor.advance<true>(min(cursor.left.units, tile_units(tile) - cursor.left.offset));
    }
  }

  // In the order of levels and keys.
  template <class Body>
  void for_each_work_tile(Body&& body) const {
    for (int i = 0; i < count_[0]; ++i) for_each_work_tile(partitions_[place_of(false, i)], body);
    for (int i = 0; i < count_[1]; ++i) for_each_work_tile(partitions_[place_of(true, i)], body);
  }

  bool make_groups() {
    const int64_t num_rows = static_cast<int64_t>(out_.nnz_qo) * in_.group_size;
    int32_t* group_of = static_cast<int32_t*>(calloc(num_rows + 1, sizeof(int32_t)));
    if (group_of == nullptr) return false;
    const int count = number_groups(group_of, num_rows);
    num_groups_ = static_cast<int64_t>(count) * in_.num_kv_heads;
    bool ok =
        count == 0 || (groups_ = static_cast<CascadeGroup*>(calloc(num_groups_, sizeof(CascadeGroup)))) != nullptr;
    if (ok) set_group_rows(group_of, num_rows);
    free(group_of);
    return ok && list_parts();
  }

  int64_t first_row(const RowTile& tile) const {
    return static_cast<int64_t>(tile.qo_begin) * in_.group_size + tile.row_begin;
  }

  // A group begins where a row tile of any level begins or ends. group_of[row]: the groups that begin at or before it,
  // less one. Row tiles learn their groups.
  int number_groups(int32_t* group_of, int64_t num_rows) {
    for (int i = 0; i < num_tiles_; ++i) {
      const int64_t row = first_row(tiles_[i]);
      group_of[row] = group_of[row + tiles_[i].row_end - tiles_[i].row_begin] = 1;
    }
    int count = -1;
    for (int64_t row = 0; row <= num_rows; ++row) count += group_of[row], group_of[row] = count;
    for (int i = 0; i < num_tiles_; ++i) {
      RowTile& tile = tiles_[i];
      const int64_t row = first_row(tile);
      tile.group = group_of[row], tile.num_groups = group_of[row + tile.row_end - tile.row_begin] - tile.group;
    }
    return max(count, 0);
  }

  void set_group_rows(const int32_t* group_of, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int head = 0; head < in_.num_kv_heads; ++head) {
        CascadeGroup& group = groups_[static_cast<int64_t>(group_of[row]) * in_.num_kv_heads + head];
        if (group.num_rows++ == 0) group.row = static_cast<int32_t>(row);
      }
    }
  }

  template <class Body>
  void for_each_part(Body&& body) {
    for_each_work_tile([&](const RowTile& tile, int head, int partial) {
      for (int i = 0; i < tile.num_groups; ++i) {
        CascadeGroup& group = groups_[static_cast<int64_t>(tile.group + i) * in_.num_kv_heads + head];
        body(group, tile, static_cast<int32_t>(partial + (group.row - first_row(tile))));
      }
    });
  }

  bool list_parts() {
    for_each_part([&](CascadeGroup& group, const RowTile& tile, int32_t) {
      ++group.parts_end, ++num_parts_;
      group.num_shared_parts += tile.request < 0;
    });
    const int64_t begin = num_groups_ * static_cast<int64_t>(sizeof(CascadeGroup) / sizeof(int32_t));
    if (begin + num_parts_ > INT32_MAX) return false;
    if (void* more = realloc(groups_, max(int64_t{1}, groups_bytes())); more != nullptr) {
      groups_ = static_cast<CascadeGroup*>(more);
    } else {
      return false;
    }
    int32_t at = static_cast<int32_t>(begin);
    for (int64_t i = 0; i < num_groups_; ++i) {
      const int32_t count = groups_[i].parts_end;
      groups_[i].parts_begin = groups_[i].parts_end = at, at += count;
    }
    int32_t* list = reinterpret_cast<int32_t*>(groups_);
    for_each_part([&](CascadeGroup& group, const RowTile&, int32_t row) { list[group.parts_end++] = row; });
    return true;
  }
};

}  // namespace quire

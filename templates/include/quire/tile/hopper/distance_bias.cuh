// Scores that add a bias of the query head and of the distance from query to key: a bias table, or T5's buckets. A KV
// tile and a row tile have few distances, so a loading warp computes the bias of each head and distance once, for all
// rows, into shared memory. Computing warps begin S = Q K^T with the bias, which therefore takes no registers and no
// addition, and is read while products of other warpgroups run.
#pragma once
#include "quire/core/schedule.h"
#include "quire/tile/shared/logits.cuh"

namespace quire {

// Whether the only transform is such a bias, and has_ramps() has no cheaper way for it.
template <class V, class Math>
QUIRE_DEVICE constexpr bool has_distance_bias() {
  if constexpr (score_pattern<V>() == kPatternBias) return V::kIsOfDistance != 0 && !has_ramps<V, Math>();
  return false;
}

// A key and a query head.
struct KeyOfHead {
  const WorkTile& work;
  int query, key, query_head;

  QUIRE_DEVICE int q_idx() const { return query; }
  QUIRE_DEVICE int kv_idx() const { return key; }
  QUIRE_DEVICE int head() const { return query_head; }
  QUIRE_DEVICE int request() const { return work.tile.request; }
  QUIRE_DEVICE int qo_len() const { return work.tile.qo_len; }
  QUIRE_DEVICE int kv_len() const { return work.tile.kv_len; }
};

// The biases of a row tile and a KV tile: for each head of the group, those of the distances from the tile's last query
// to its first key, up to its first query and its last key. Neighbouring KV tiles share distances.
template <class V>
class DistanceSlice {
  // From the first query of a row tile to its last one, the distances of a head, and words from head to head, which
  // begin 8 banks apart.
  QUIRE_HD static constexpr int last_query(int heads) { return (V::kTileRows + heads - 2) / heads; }
  QUIRE_HD static constexpr int width(int heads) { return V::kTileKv + last_query(heads); }
  QUIRE_HD static constexpr int pitch(int heads) { return (width(heads) + 23) / 32 * 32 + 8; }
  QUIRE_HD static constexpr int most_words(int heads) {
    return heads == 0 ? 0 : max(heads * pitch(heads), most_words(heads - 1));
  }

 public:
  static constexpr int kMostHeads = 32;  // of a group; more would leave no shared memory for keys and values
  static constexpr int kBytes = ceil_div(most_words(kMostHeads), 4) * 16;
  // Columns and heads that a lane computes at a time, so that their loads are in flight together.
  static constexpr int kColumns = V::kTileKv / 32, kHeads = 8 / kColumns;
  using Values = float[kHeads][kColumns];

  QUIRE_DEVICE DistanceSlice(const FastDivisor& group, int row_begin)
      : num_heads_(static_cast<int>(group.divisor)),
        query_(group.div(row_begin)),
        last_query_(group.div(V::kTileRows + num_heads_ - 2)),
        width_(V::kTileKv + last_query_),
        pitch_((width_ + 23) / 32 * 32 + 8) {
    static_assert(V::kTileKv % 32 == 0, "a lane has every 32nd distance");
  }

  QUIRE_DEVICE int num_heads() const { return num_heads_; }

  // Reads the biases of a lane's columns column, + 32, ... for a few heads and the KV tile from `first_key` on.
  template <class Math>
  QUIRE_DEVICE void read(Values& values, const LogitsTransform<V, Math>& transform, const WorkTile& work, int first_key,
                         int head, int column) const {
    const int first_head = work.kv_head * num_heads_ + head, key = first_key - last_query_ + column;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const KeyOfHead place = {work, query_, key + 32 * i, first_head + h};
        values[h][i] = static_cast<float>(V::template bias<Math>(transform.operands, place));
      }
    }
  }

  // Writes the biases to shared memory, in the scale of S = Q K^T: multiplied by `unit`. A finite
  // bias stays finite.
  QUIRE_DEVICE void write(uint32_t to, const Values& values, float unit, int head, int column) const {
    const uint32_t at = to + (head * pitch_ + column) * 4;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const bool exists = head + h < num_heads_ && column + 32 * i < width_;
        ptx::st_shared_if(exists, at + h * pitch_ * 4 + 128 * i, ptx::multiply_finite(values[h][i], unit));
      }
    }
  }

  // Copies the columns behind the first V::kTileKv from the slice of the KV tile to the right, whose first columns they
  // are.
  QUIRE_DEVICE void copy(uint32_t to, uint32_t right, int head, int lane) const {
    for (int column = lane; V::kTileKv + column < width_; column += V::kTileKv) {
      const uint32_t at = (head * pitch_ + column) * 4;
      Values values;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const uint32_t from = right + at + min(h, num_heads_ - 1 - head) * pitch_ * 4;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[h][i] = ptx::ld_shared(from + 128 * i);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const bool exists = head + h < num_heads_ && V::kTileKv + column + 32 * i < width_;
          ptx::st_shared_if(exists, to + at + (h * pitch_ + V::kTileKv + 32 * i) * 4, values[h][i]);
        }
      }
    }
  }

  // Computes the same columns, if there is no slice to the right.
  template <class Math>
  QUIRE_DEVICE void compute(uint32_t to, const LogitsTransform<V, Math>& transform, float unit, const WorkTile& work,
                            int first_key, int head, int lane) const {
#pragma unroll 1
    for (int column = V::kTileKv + lane; column < width_ + lane; column += V::kTileKv) {
      Values values;
      read(values, transform, work, first_key, head, column);
      write(to, values, unit, head, column);
    }
  }

  // The offset in bytes of the bias of the lane's row i and first key.
  QUIRE_DEVICE uint32_t place(const LogitsTile<V>& tile, int i) const {
    const int head = tile.group.mod(tile.row + 8 * i), query = tile.qo_idx(i) - query_;
    return (head * pitch_ + last_query_ - query + 2 * (tile.lane & 3)) * 4;
  }

 private:
  int num_heads_, query_, last_query_, width_, pitch_;
};

// The offsets of a lane's two rows in slices.
struct DistanceRows {
  uint32_t at[2];

  template <class V>
  QUIRE_DEVICE void set(const LogitsTile<V>& tile, int row_begin) {
    const DistanceSlice<V> slice(tile.group, row_begin);
#pragma unroll
    for (int i = 0; i < 2; ++i) at[i] = slice.place(tile, i);
  }

  // Sets s to the biases of the slice at `from`.
  template <int n>
  QUIRE_DEVICE void read(float (&s)[n], uint32_t from) const {
    const uint32_t rows[2] = {from + at[0], from + at[1]};
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] = ptx::ld_shared(rows[i / 2 % 2] + (i / 4 * 8 + i % 2) * 4);
  }
};

}  // namespace quire

// Timed variants record when and where they compute work tiles, for pictures of a plan (quire.viz). Other variants
// contain none of this code.
#pragma once
#include "quire/core/expression.h"
#include "quire/core/schedule.h"

namespace quire {

enum class Moment { kBegin, kEnd };

// One note; engine/inspection.py reads its numbers in this order.
struct Stamp {
  int64_t nanoseconds;
  int64_t moment;
  int64_t cta, place;                        // where it was computed: on an SM; on a host both are the thread's number
  int64_t request, kv_head, row_begin, key;  // which work tile: its first packed row and first token

  template <class V>
  QUIRE_HD static Stamp of(const WorkTile& work, Moment moment, int64_t nanoseconds, int64_t cta, int64_t place) {
    return {nanoseconds,
            static_cast<int64_t>(moment),
            cta,
            place,
            work.tile.request,
            work.kv_head,
            work.tile.row_begin,
            static_cast<int64_t>(work.kv_begin) * V::kTileKv};
  }
};

// The operands of a timed variant: they lie behind the parameters.
struct StampList {
  Stamp* rows;  // [1 + capacity]; the first number of the first row counts the others
  int64_t capacity;

  template <class V>
  QUIRE_HD static const StampList& of(const AttentionParams& p) {
    return *reinterpret_cast<const StampList*>(reinterpret_cast<const unsigned char*>(&p) + V::kOperandsAt);
  }
};

}  // namespace quire

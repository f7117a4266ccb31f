// The work of work that a CTA is busy with.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// What a CTA works on. It lives in shared memory: registers are short in the main loop.
struct Job {
  WorkCursor cursor;
  WorkTile work;
  int64_t qo_begin;  // first row of q of this request
  int32_t kv_first;  // ragged: its first row of k; paged: its first entry of kv_indices
  int32_t qo_len, kv_len;
  int32_t kv_limit;  // first token that this work does not read
  int32_t row_end;   // one past the request's last packed row
  bool exists;       // false: the CTA is done
  bool is_last;      // of the group's CTAs to arrive

  // Where a packed row is in q, o and lse.
  struct Place {
    int64_t token;
    int32_t head;
  };

  // One thread's: the CTA's next work, if there is one.
  QUIRE_DEVICE void next(const AttentionParams& p, int cta, int tile_kv) {
    exists = cursor.next(p, cta, work);
    if (!exists) return;
    qo_begin = work.tile.qo_begin, qo_len = work.tile.qo_len;
    kv_first = work.tile.kv_first, kv_len = work.tile.kv_len;
    kv_limit = min(kv_len, work.kv_end * tile_kv);
    row_end = qo_len * static_cast<int>(p.group.divisor);
  }

  QUIRE_DEVICE Place place(const FastDivisor& group, int row) const {
    const int group_size = static_cast<int>(group.divisor), qo_idx = group.div(row);
    return {qo_begin + qo_idx, work.kv_head * group_size + row - qo_idx * group_size};
  }
};

}  // namespace quire

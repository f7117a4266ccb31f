// The work tile that a CTA is busy with.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// CurrentWork lies in shared memory, because the main loop has no registers left for it.
struct CurrentWork {
  WorkTile work;
  WorkCursor cursor;  // the work tiles that follow
  bool exists;        // false: the CTA is done
  bool is_last;       // the CTA is the last one to arrive at the merge group
};

}  // namespace quire

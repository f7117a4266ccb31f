// The work tile that a CTA is busy with.
#pragma once
#include "quire/core/schedule.h"

namespace quire {

// It lives in shared memory: registers are short in the main loop.
struct CurrentWork {
  WorkTile work;
  WorkCursor cursor;  // what follows
  bool exists;        // false: the CTA is done
  bool is_last;       // of its merge group to arrive
};

}  // namespace quire

// One loop over independent items, for host and device alike: threads of a grid, or OpenMP threads.
#pragma once
#include "quire/core/types.h"

namespace quire {

constexpr int kParallelThreads = 256;

// Calls body(i) for each i in [0, n).
template <class Body>
QUIRE_HD void parallel_for(int64_t n, Body&& body) {
#ifdef __CUDA_ARCH__
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) body(i);
#else
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) body(i);
#endif
}

}  // namespace quire

// Sorts row tiles by the number of KV tiles that a block mask shows them, longest first, because a launch ends when its
// last row tile does. The host could only sort them by their lengths. Schedules with partitions are not sorted:
// partitions refer to row tiles by their positions.
#pragma once
#include "quire/core/parallel.h"
#include "quire/core/schedule.h"

namespace quire {

// Each CTA of a grid says what its share of a row tile costs; the last one to do so sorts. CTA i has row tile
// i % num_tiles.
class TileOrder {
 public:
  static constexpr int kFullCost = 3, kMaskedCost = 5;  // of a KV tile

  // scratch: [num_tiles] row tiles, then a number for each CTA; null: no order. arrivals: counts CTAs, 0 between
  // launches.
  QUIRE_DEVICE TileOrder(RowTile* tiles, int num_tiles, void* scratch, uint32_t* arrivals)
      : tiles_(tiles),
        sorted_(static_cast<RowTile*>(scratch)),
        costs_(reinterpret_cast<uint32_t*>(sorted_ + num_tiles)),
        arrivals_(arrivals),
        num_tiles_(num_tiles),
        num_ctas_(static_cast<int>(gridDim.x)) {}

  // Called by all threads of a CTA, each with a part of the cost.
  QUIRE_DEVICE void sort_after(uint32_t cost) const {
    if (sorted_ == nullptr) return;
    __shared__ uint32_t total, is_last;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) total = 0;
    __syncthreads();
    if (cost != 0) atomicAdd(&total, cost);
    __syncthreads();
    if (thread == 0) {
      costs_[blockIdx.x] = total;
      __threadfence();
      is_last = atomicInc(arrivals_, gridDim.x - 1) == gridDim.x - 1;
      __threadfence();
    }
    __syncthreads();
    if (is_last != 0) sort(thread);
  }

 private:
  static constexpr int kBuckets = kParallelThreads;

  QUIRE_DEVICE uint32_t cost_of(int tile) const {
    uint32_t cost = 0;
    for (int i = tile; i < num_ctas_; i += num_tiles_) cost += __ldcg(costs_ + i);
    return cost;
  }

  // A counting sort by cost, descending. Within a bucket row tiles stay near their neighbours, with which they share
  // keys in the L2.
  QUIRE_DEVICE void sort(int thread) const {
    __shared__ uint32_t most, places[kBuckets];
    if (thread == 0) most = 1;
    places[thread] = 0;
    __syncthreads();
    for (int i = thread; i < num_tiles_; i += kParallelThreads) atomicMax(&most, cost_of(i));
    __syncthreads();
    const auto bucket = [&](int i) {
      return kBuckets - 1 - static_cast<int>(static_cast<uint64_t>(cost_of(i)) * (kBuckets - 1) / most);
    };
    for (int i = thread; i < num_tiles_; i += kParallelThreads) atomicAdd(&places[bucket(i)], 1u);
    __syncthreads();
    if (thread == 0) {
      for (uint32_t i = 0, begin = 0; i < kBuckets; ++i) {
        const uint32_t size = places[i];
        places[i] = begin, begin += size;
      }
    }
    __syncthreads();
    for (int first = 0; first < num_tiles_; first += kParallelThreads) {
      if (first + thread < num_tiles_) sorted_[atomicAdd(&places[bucket(first + thread)], 1u)] = tiles_[first + thread];
      __syncthreads();
    }
    for (int i = thread; i < num_tiles_; i += kParallelThreads) tiles_[i] = sorted_[i];
  }

  RowTile *tiles_, *sorted_;
  uint32_t *costs_, *arrivals_;
  int num_tiles_, num_ctas_;
};

}  // namespace quire

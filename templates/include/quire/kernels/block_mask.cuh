// Makes the block mask of a custom mask in plan(): which KV tiles a row tile sees in full, in part or not at all.
// Kernels then skip empty tiles, and read mask bits only in partial tiles. The mask is the same for all KV heads.
#pragma once
#include "quire/core/parallel.h"
#include "quire/ptx/barrier.cuh"
#include "quire/tile/shared/mask_bits.cuh"
#include "quire/tile/shared/tile_order.cuh"

namespace quire {

struct BlockMaskParams {
  const uint8_t* mask;  // as AttentionParams has them
  const int64_t* mask_indptr;
  RowTile*
      tiles;  // [num_tiles], in any order; sorted in the end if there is scratch memory (tile/shared/tile_order.cuh)
  void* scratch;
  uint32_t* arrivals;
  uint8_t* block_mask;  // [work units of one kv head], a tile's from its work_begin on
  int32_t num_tiles;    // a divisor of the grid
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t group_size;
  int32_t window_left;
};

// CTA i has row tile i % num_tiles, and 32 KV tiles of it at a time. A lane has one of these, a warp every eighth
// query.
template <class Variant>
struct BuildBlockMask {
  static constexpr int kThreads = kParallelThreads, kMinCtas = 4, kSmemBytes = 0;

  QUIRE_DEVICE static void run(const BlockMaskParams& p, unsigned char*) {
    ptx::wait_for_predecessor();
    const int parts = static_cast<int>(gridDim.x) / p.num_tiles, part = static_cast<int>(blockIdx.x) / p.num_tiles;
    const RowTile tile = p.tiles[static_cast<int>(blockIdx.x) - part * p.num_tiles];
    uint32_t cost = 0;
    for (int first = tile.kv_begin + 32 * part; first < tile.kv_end; first += 32 * parts) {
      cost += classify(p, tile, first);
    }
    TileOrder(p.tiles, p.num_tiles, p.scratch, p.arrivals).sort_after(cost);
  }

 private:
  static constexpr int kWarps = kThreads / 32;

  // Returns this thread's part of the cost.
  QUIRE_DEVICE static uint32_t classify(const BlockMaskParams& p, const RowTile& tile, int first) {
    __shared__ uint32_t visible[kWarps], full[kWarps];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    bool is_visible = false, is_full = true;
    read_tile(p, tile, min(first + lane, tile.kv_end - 1), warp, is_visible, is_full);
    const uint32_t visible_lanes = __ballot_sync(0xffffffffu, is_visible);
    const uint32_t full_lanes = __ballot_sync(0xffffffffu, is_full);
    if (lane == 0) visible[warp] = visible_lanes, full[warp] = full_lanes;
    __syncthreads();
    uint32_t cost = 0;
    if (warp == 0 && first + lane < tile.kv_end) {
      uint32_t any = 0, all = 0xffffffffu;
      for (int i = 0; i < kWarps; ++i) any |= visible[i], all &= full[i];
      const int visible_bit = (any >> lane & 1) * kBlockVisible, full_bit = (all >> lane & 1) * kBlockFull;
      p.block_mask[tile.work_begin + first + lane - tile.kv_begin] = static_cast<uint8_t>(visible_bit | full_bit);
      if (visible_bit != 0) cost = full_bit != 0 ? TileOrder::kFullCost : TileOrder::kMaskedCost;
    }
    __syncthreads();  // the votes have been read
    return cost;
  }

  // Whether each kWarps-th query, from the warp's first on, sees some or all keys of one KV tile.
  QUIRE_DEVICE static void read_tile(const BlockMaskParams& p, const RowTile& tile, int kv_tile, int warp,
                                     bool& is_visible, bool& is_full) {
    const int row_last = min(tile.row_begin + p.tile_rows, tile.qo_len * p.group_size) - 1;
    const int first = tile.row_begin / p.group_size, last = row_last / p.group_size;
    const int begin = kv_tile * p.tile_kv, end = min(begin + p.tile_kv, tile.kv_len);
    const Mask<kMaskNone, true> window = {tile.qo_len, tile.kv_len, p.window_left, nullptr};
    is_full = window.all(first, last).covers({begin, begin + p.tile_kv});
    const uint8_t* bits = p.mask + p.mask_indptr[tile.request];
    for (int key = begin; key < end; key += 32) {
      const uint32_t wanted = low_bits(end - key);
#pragma unroll 4
      for (int q = first + warp; q <= last; q += kWarps) {
        MaskBits<1> found;
        found.read(bits, static_cast<int64_t>(q) * tile.kv_len + key, min(32, end - key));
        is_visible |= (found.word(0) & wanted) != 0, is_full &= (found.word(0) & wanted) == wanted;
      }
    }
  }
};

}  // namespace quire

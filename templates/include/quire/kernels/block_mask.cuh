// Classes of a custom mask's tiles, made while planning: the kernels then pass over tiles that nobody sees, and look at
// bits only where a tile is neither that nor whole. The bits of all kv heads are the same, and are read once.
#pragma once
#include "quire/core/parallel.h"
#include "quire/ptx/grid.cuh"
#include "quire/tile/mask_bits.cuh"

namespace quire {

struct BlockMaskParams {
  const uint8_t* mask;  // as AttentionParams has them
  const int64_t* mask_indptr;
  const RowTile* tiles;  // [num_tiles], in any order
  uint8_t* block_mask;   // [work units of one kv head], a tile's from its work_begin on
  int32_t num_tiles;     // a divisor of the grid
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t group_size;
  int32_t window_left;
};

// CTA i does tile i % num_tiles, 32 kv tiles at a time. A lane looks at one of them, a warp at every eighth query.
template <class Variant>
struct BuildBlockMask {
  static constexpr int kThreads = kParallelThreads, kMinCtas = 4, kSmemBytes = 0;

  QUIRE_DEVICE static void run(const BlockMaskParams& p, unsigned char*) {
    ptx::wait_for_predecessor();
    const int parts = static_cast<int>(gridDim.x) / p.num_tiles, part = static_cast<int>(blockIdx.x) / p.num_tiles;
    const RowTile tile = p.tiles[static_cast<int>(blockIdx.x) - part * p.num_tiles];
    for (int first = tile.kv_begin + 32 * part; first < tile.kv_end; first += 32 * parts) classify(p, tile, first);
  }

 private:
  static constexpr int kWarps = kThreads / 32;

  QUIRE_DEVICE static void classify(const BlockMaskParams& p, const RowTile& tile, int first) {
    __shared__ uint32_t seen[kWarps], whole[kWarps];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    bool is_seen = false, is_whole = true;
    look(p, tile, min(first + lane, tile.kv_end - 1), warp, is_seen, is_whole);
    const uint32_t lanes_seen = __ballot_sync(0xffffffffu, is_seen), lanes_whole = __ballot_sync(0xffffffffu, is_whole);
    if (lane == 0) seen[warp] = lanes_seen, whole[warp] = lanes_whole;
    __syncthreads();
    if (warp == 0 && first + lane < tile.kv_end) {
      uint32_t any = 0, all = 0xffffffffu;
      for (int i = 0; i < kWarps; ++i) any |= seen[i], all &= whole[i];
      const int seen_bit = (any >> lane & 1) * kBlockVisible, whole_bit = (all >> lane & 1) * kBlockFull;
      p.block_mask[tile.work_begin + first + lane - tile.kv_begin] = static_cast<uint8_t>(seen_bit | whole_bit);
    }
    __syncthreads();  // the votes have been read
  }

  // One kv tile, as every kWarps-th query from the warp's own on sees it.
  QUIRE_DEVICE static void look(const BlockMaskParams& p, const RowTile& tile, int kv_tile, int warp, bool& is_seen,
                                bool& is_whole) {
    const int row_last = min(tile.row_begin + p.tile_rows, tile.qo_len * p.group_size) - 1;
    const int first = tile.row_begin / p.group_size, last = row_last / p.group_size;
    const int begin = kv_tile * p.tile_kv, end = min(begin + p.tile_kv, tile.kv_len);
    const Mask<kMaskNone, true> window = {tile.qo_len, tile.kv_len, p.window_left, nullptr};
    is_whole = window.all(first, last).covers({begin, begin + p.tile_kv});
    const uint8_t* bits = p.mask + p.mask_indptr[tile.request];
    for (int key = begin; key < end; key += 32) {
      const uint32_t wanted = low_bits(end - key);
#pragma unroll 4
      for (int q = first + warp; q <= last; q += kWarps) {
        MaskBits<1> found;
        found.read(bits, static_cast<int64_t>(q) * tile.kv_len + key, min(32, end - key));
        is_seen |= (found.word(0) & wanted) != 0, is_whole &= (found.word(0) & wanted) == wanted;
      }
    }
  }
};

}  // namespace quire

// KV tiles of the MLA kernel by the copy engine: boxes of pages. The first warps of a warpgroup of O, as many as a KV
// tile has boxes, reload the half of ckv's columns that the warpgroup has used up.
#pragma once
#include "quire/ptx/tma.cuh"
#include "quire/tile/hopper/mla_cta.cuh"

namespace quire {

template <class V>
class MlaSource<V, KvPath::kPages, false> {
  using Cta = MlaCta<V>;
  using Box = typename Cta::Box;
  using TileCkv = typename Cta::TileCkv;
  using TileKpe = typename Cta::TileKpe;

 public:
  QUIRE_DEVICE explicit MlaSource(const Cta& cta) : cta_(cta) {}

  // Fills the ring. The first queries take the way through the last stage.
  QUIRE_DEVICE void load_first_tiles() const {
    if (!Cta::loads()) return;
#pragma unroll 1
    for (int i = 0; i < Cta::kStages; ++i) {
      Box box;
      const bool exists = cta_.find_next(i == 0, *this, box);
      if (i == Cta::kStages - 1 && exists) ptx::mbarrier_wait(cta_.queries_barrier(), 0);
      if (exists) load_half(box, i);
      if (i == 0 && Cta::is_leader()) ptx::mbarrier_arrive(cta_.first_tile_barrier());
      if (Cta::half_of_o() != Cta::kHalves - 1) continue;
      if (i == Cta::kStages - 1) {
        put_off(exists, box);
      } else if (exists) {
        load_kpe(box, {i});
      }
    }
  }

  // Before, beside and after the product of a half with a KV tile, in whose place the next one comes.
  QUIRE_DEVICE void before_product(RingPosition<2>) const {}
  QUIRE_DEVICE void beside_product(RingPosition<2>) {
    exists_ = false;
    if (Cta::loads()) exists_ = cta_.find_next(false, *this, box_);
  }
  QUIRE_DEVICE void after_product(RingPosition<2> kpe, int stage) const {
    if (Cta::is_leader()) cta_.kpe_ring().arrive_empty(kpe);
    const bool loads_kpe = Cta::loads() && Cta::half_of_o() == Cta::kHalves - 1;
    if (loads_kpe) load_put_off({kpe.count + 2});  // first, because it is needed first
    if (exists_) load_half(box_, stage);
    if (loads_kpe) put_off(exists_, box_);
  }

  QUIRE_DEVICE void finish() const {}

  // For Cta::find_next().
  QUIRE_DEVICE void begin(const WorkTile&) const {}
  QUIRE_DEVICE void find(const WorkTile& work, int tile, Box& box) const { box = find_box(work, tile); }

 private:
  QUIRE_DEVICE Box find_box(const WorkTile& work, int tile) const {
    const int token = tile * Cta::kTileKv + first_row();
    Box box = {-1, token % V::kPageSize};
    if (token < work.tile.kv_len) box.page = cta_.p.base.kv_indices[work.tile.kv_first + token / V::kPageSize];
    return box.uniform();
  }

  // Of this warp's box in a KV tile. All lanes ask together.
  QUIRE_DEVICE static int first_row() { return Cta::kBoxes == 1 ? 0 : Cta::warp_of_group() * Cta::kBoxRows; }

  QUIRE_DEVICE void load_kpe(Box box, RingPosition<2> at) const {
    cta_.kpe_ring().wait_empty(at);
    const uint32_t barrier = cta_.kpe_ring().full(at.stage());
    const uint32_t to = cta_.kpe_tile(at.stage()).base + first_row() * 128;
    if (Cta::is_leader()) ptx::mbarrier_arrive_expect(barrier, TileKpe::kBytes);
    __syncwarp();
    if (ptx::lane_id() == 0) ptx::tma_load_4d(to, &cta_.p.tensor_k, barrier, 0, box.row, 0, box.page);
  }

  // Half of ckv of a KV tile, to a stage whose half nobody reads.
  QUIRE_DEVICE void load_half(Box box, int stage) const {
    const int half = Cta::half_of_o();
    constexpr int kAtoms = TileCkv::kAtoms / Cta::kHalves, kHalfParts = Cta::kParts / Cta::kHalves;
    const int lane = ptx::lane_id();
    if (Cta::warp_of_group() == 0 && lane < kHalfParts) {
      ptx::mbarrier_arrive_expect(cta_.ckv_full(stage, half * kHalfParts + lane), Cta::kPartBytes);
    }
    const uint32_t to = cta_.ckv_tile(stage).base + half * kAtoms * TileCkv::kAtomBytes + first_row() * 128;
    __syncwarp();
    if (lane != 0) return;
    // kpe is loaded later, when the weights in its place have been used. Where reading the cache is the bound, it may
    // come from memory then.
    if (half == 0 && Cta::kCtasPerTile > 1) ptx::tma_prefetch_4d(&cta_.p.tensor_k, 0, box.row, 0, box.page);
#pragma unroll 2  // all four at a time spill a register
    for (int i = 0; i < kAtoms; i += Cta::kBoxAtoms) {
      const uint32_t barrier = cta_.ckv_full(stage, half * kHalfParts + i * kHalfParts / kAtoms);
      ptx::tma_load_4d(to + i * TileCkv::kAtomBytes, &cta_.p.tensor_v, barrier, 0, box.row, half * kAtoms + i,
                       box.page);
    }
  }

  // kpe of a KV tile is loaded a KV tile after its ckv, when the weights in its place have been used.
  QUIRE_DEVICE void put_off(bool exists, Box box) const {
    Box& to = cta_.shared.put_off[Cta::warp_of_group() % Cta::kBoxes];
    if (ptx::lane_id() == 0) to = exists ? box : Box{0, -1};
    __syncwarp();
  }
  QUIRE_DEVICE void load_put_off(RingPosition<2> at) const {
    const Box box = cta_.shared.put_off[Cta::warp_of_group() % Cta::kBoxes].uniform();
    if (box.row >= 0) load_kpe(box, at);
    __syncwarp();
  }

  const Cta& cta_;
  Box box_;
  bool exists_;
};

}  // namespace quire

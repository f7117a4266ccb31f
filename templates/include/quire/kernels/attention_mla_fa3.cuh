// Decode with multi-head latent attention (MLA) on the warpgroup matrix instruction and the bulk copy engine: sm_90a.
//
// With 64 rows and more the kernel is limited by the tensor cores, with fewer by reading the cache once. All query
// heads share one head of keys [ckv, kpe], and the latent ckv is the value too: a KV tile lies in shared memory once
// and serves S = Q [ckv, kpe]^T and O += P ckv.
//
// Three warpgroups: one computes S and its softmax, and each of the two others half of O's columns. The first holds
// most of Q in registers, so that three KV tiles fit into shared memory: one in each product and one that is being
// loaded. Weights P replace the kpe that they were computed with.
//
// The two products take turns at the tensor cores. P of a KV tile is handed on when S of the next KV tile is done, and
// the softmax of that S runs beside O += P ckv. One warpgroup could not overlap the two products: a product with
// queries in registers keeps its warps waiting until the product before it is under way.
//
// No warp only loads. A half of ckv's columns is reloaded by the warpgroup that has used it up, by the copy engine
// where pages are boxes, else token by token (tile/hopper/mla_loader.cuh). In sparse attention, pages of one
// token are the indices of the tokens that a query sees. Latents of 8 bits are loaded and widened token by token, by a
// fourth warpgroup (tile/hopper/mla_widen.cuh). It takes the registers of queries, which then lie in shared memory in
// the place of the third KV tile.
//
// Schedule: persistent CTAs, one per SM. Row tiles of more than 64 rows belong to pairs of CTAs that read the same keys
// at the same time, once from memory. The last warpgroup takes work tiles when it starts to load them, up to three KV
// tiles ahead.
//
// Sources: FlashMLA (DeepSeek, 2025) for halves of O in two warpgroups.
#pragma once
#include "quire/tile/hopper/mla_scores.cuh"
#include "quire/tile/hopper/mla_widen.cuh"
#include "quire/tile/hopper/mla_merge.cuh"
#include "quire/tile/hopper/rows.cuh"

namespace quire {

template <class V>
class AttentionMlaFa3 {
  using Cta = MlaCta<V>;
  using T = typename Cta::T;
  using Stage = typename Cta::Stage;
  using TileCkv = typename Cta::TileCkv;
  using Source = MlaSource<V>;

  // Registers a thread: of the warpgroup of S, of those of O, and of the one that widens.
  static constexpr int kScoreRegisters = Cta::kWidens ? 64 : 184, kValueRegisters = 160, kWidenRegisters = 128;
  static_assert(kScoreRegisters + 2 * kValueRegisters + (Cta::kWidens ? kWidenRegisters : 0) <=
                    65536 / Cta::kThreads / 8 * 8 * (Cta::kThreads / 128),
                "the warps ask for more registers than the launch has, and would wait for them forever");
  // Columns of an instruction: ptxas takes 256 only where a launch of these threads leaves each 154 registers.
  static constexpr int kProductCols = Cta::kWidens ? Cta::kHalfCols / 2 : Cta::kHalfCols;

 public:
  static constexpr int kTileRows = Cta::kTileRows, kTileKv = Cta::kTileKv;
  static constexpr int kThreads = Cta::kThreads, kMinCtas = 1, kSmemBytes = Cta::kSmemBytes;

  QUIRE_DEVICE static void run(const AttentionMlaFa3Params& p, unsigned char* smem) {
    const Cta cta(p, smem);
    if (threadIdx.x == 0) {
      if constexpr (!Cta::kGathers) {
        ptx::prefetch_tensor_map(&p.tensor_k);
        ptx::prefetch_tensor_map(&p.tensor_v);
      }
      cta.init_barriers();
    }
    ptx::wait_for_predecessor();
    if (threadIdx.x == Cta::kThreads - 128) cta.take_first_work_tile();
    if (threadIdx.x == Cta::kThreads - 64) prefetch_row_tiles(p.base);
    __syncthreads();
    ptx::launch_dependents();
    if constexpr (Cta::kWidens) {
      if (Cta::warpgroup() == 0) {
        ptx::give_registers<kScoreRegisters>();
        MlaScores<V>(cta).run();
      } else if (Cta::warpgroup() > 2) {
        ptx::give_registers<kWidenRegisters>();
        Source(cta).run();
      } else {
        ptx::take_registers<kValueRegisters>();
        AttentionMlaFa3(cta).compute_values(NoSource{cta});
      }
    } else if (Cta::warpgroup() == 0) {
      ptx::take_registers<kScoreRegisters>();
      MlaScores<V>(cta).run();
    } else {
      ptx::give_registers<kValueRegisters>();
      AttentionMlaFa3(cta).compute_values(Source(cta));
    }
  }

 private:
  const Cta& cta_;

  QUIRE_DEVICE explicit AttentionMlaFa3(const Cta& cta) : cta_(cta) {}

  // In the place of a source, where another warpgroup loads.
  struct NoSource {
    const Cta& cta;

    QUIRE_DEVICE void load_first_tiles() const {}
    QUIRE_DEVICE void beside_product(RingPosition<2>) const {}
    QUIRE_DEVICE void after_product(RingPosition<2>, int stage) const {
      const uint32_t barrier = cta.ckv_free(stage, Cta::half_of_o());
      if (ptx::lane_id() == 0) ptx::mbarrier_arrive(barrier);
    }
    QUIRE_DEVICE void finish() const {}
  };

  // The warpgroups of O: half of the columns each.
  template <class Keys>
  QUIRE_DEVICE void compute_values(Keys source) const {
    source.load_first_tiles();
    RingPosition<Cta::kWorkStages> at;
    RingPosition<2> kpe;  // counts KV tiles
    for (;;) {
      cta_.work_ring().wait_full(at);
      Stage& stage = cta_.shared.work[at.stage()];
      if (!ptx::uniform(stage.exists)) break;
      float o[Cta::kHalfCols / 2];
#pragma unroll
      for (int i = 0; i < Cta::kHalfCols / 2; ++i) o[i] = 0.f;
#pragma unroll 1
      for (bool is_last = false; !is_last; kpe.advance()) is_last = add_tile(o, kpe, source);
      store(o, stage, {at.count});
      cta_.release_work_tile(at);
    }
    source.finish();
  }

  // Computes o += p ckv of a KV tile, and loads another KV tile in its place. Returns whether it was the work tile's
  // last one.
  template <class Keys>
  QUIRE_DEVICE bool add_tile(float (&o)[Cta::kHalfCols / 2], RingPosition<2> kpe, Keys& source) const {
    const int stage = kpe.count % Cta::kStages;
    // Start O += P V as soon as the weights are there.
    const bool is_last = start_values(o, kpe, stage);
    // Find a later KV tile meanwhile.
    source.beside_product(kpe);
    // Wait for O.
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    // Release V and the weights, or load into their places.
    source.after_product(kpe, stage);
    return is_last;
  }

  // Starts o += p ckv of a KV tile. Returns whether it is the work tile's last one.
  QUIRE_DEVICE bool start_values(float (&o)[Cta::kHalfCols / 2], RingPosition<2> at, int stage) const {
    const TileDescriptor weights(cta_.weights_tile(at.stage()).base, 16);
    const TileDescriptor values(cta_.ckv_tile(stage).base + Cta::half_of_o() * (TileCkv::kBytes / Cta::kHalves),
                                TileCkv::kAtomBytes);
    cta_.weights_ring().wait_full(at);
    const int flags = ptx::uniform(cta_.shared.flags[at.stage()][Cta::warp_of_group()]);
    if (flags & Cta::kIsRaised) {
      const float* factors = cta_.shared.factors[at.stage()] + Cta::lane_row();
      const float factor[2] = {factors[0], factors[8]};
#pragma unroll
      for (int i = 0; i < Cta::kHalfCols / 2; ++i) o[i] *= factor[i / 2 % 2];
    }
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Cta::kTileKv / 16; ++i) {
#pragma unroll
      for (int col = 0; col < Cta::kHalfCols; col += kProductCols) {
        ptx::Wgmma<kProductCols>::template ss<ptx::Contiguous::kN>(
            T{}, reinterpret_cast<float (&)[kProductCols / 2]>(o[col / 2]), weights.at(i * 32),
            values.at(i * 16 * 128 + col / 64 * TileCkv::kAtomBytes), 1);
      }
    }
    ptx::wgmma_commit();
    return (flags & Cta::kIsLast) != 0;
  }

  QUIRE_DEVICE void store(float (&o)[Cta::kHalfCols / 2], Stage& stage, RingPosition<2> at) const {
    const WorkTile& work = stage.work;
    float m[2], d[2];
    cta_.states_ring().wait_full(at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 state = cta_.shared.states[at.stage()][Cta::lane_row() + 8 * h];
      m[h] = state.x, d[h] = state.y;
    }
    __syncwarp();
    if (ptx::lane_id() == 0) cta_.states_ring().arrive_empty(at);
    if (work.is_whole()) {
      store_whole(o, work, m, d);
    } else {
      store_partial(o, stage, m, d);
    }
  }

  QUIRE_DEVICE void store_whole(const float (&o)[Cta::kHalfCols / 2], const WorkTile& work, const float (&m)[2],
                                const float (&d)[2]) const {
    const AttentionParams& p = cta_.p.base;
    const int half = Cta::half_of_o();
    const int lane = ptx::lane_id();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Cta::first_row(work) + Cta::lane_row() + 8 * h;
      const WorkTile::Place to = cta_.place(work, Cta::lane_row() + 8 * h);
      const RowResult result = finish_row_of<V>(p, to.head, m[h], d[h]);
      if (half == 0 && p.lse != nullptr && lane % 4 == 0 && row < work.row_end) {
        store_statistics<V>(p, work.tile, to, result.lse, m[h], d[h]);
      }
      T* dst = static_cast<T*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + half * Cta::kHalfCols;
      store_row(dst, o, h, result.scale, row < work.row_end, lane);
    }
  }

  QUIRE_DEVICE void store_partial(const float (&o)[Cta::kHalfCols / 2], Stage& stage, const float (&m)[2],
                                  const float (&d)[2]) const {
    const AttentionParams& p = cta_.p.base;
    const int half = Cta::half_of_o();
    const WorkTile& work = stage.work;
    const int lane = ptx::lane_id(), first = Cta::first_row(work) + Cta::warp_of_group() * 16;
    if (first < work.row_end) {
      const int64_t row = static_cast<int64_t>(work.partial) * Cta::kTileRows + first - work.tile.row_begin;
      float4* dst = reinterpret_cast<float4*>(p.partial_o + row * Cta::kCkv) + half * Cta::kHalfCols * 4 + lane;
#pragma unroll
      for (int i = 0; i < Cta::kHalfCols / 2; i += 4) dst[i * 8] = {o[i], o[i + 1], o[i + 2], o[i + 3]};
      float2* states = reinterpret_cast<float2*>(p.partial_md) + row + lane / 4;
      if (half == 0 && lane % 4 == 0) states[0] = {m[0], d[0]}, states[8] = {m[1], d[1]};
    }
    const bool has_more = p.partitions == nullptr || stage.cursor.exists();
    merge_together<V, Cta::kValues, Cta::kCtasPerTile>(p, work, !has_more, cta_.shared.turn, ptx::thread_id() - 128);
  }
};

}  // namespace quire

// The warpgroup of S in the MLA kernel: weights of each KV tile, S = Q [ckv, kpe]^T and its softmax.
#pragma once
#include "quire/tile/shared/logits.cuh"
#include "quire/tile/hopper/mla_cta.cuh"
#include "quire/tile/hopper/softmax.cuh"
#include "quire/tile/hopper/rows.cuh"
#include "quire/tile/hopper/gemm.cuh"

namespace quire {

template <class V>
class MlaScores {
  using Cta = MlaCta<V>;
  using T = typename Cta::T;
  using TileCkv = typename Cta::TileCkv;
  using TileP = typename Cta::TileP;
  using TileQ = typename Cta::TileQ;

  struct Scores {
    uint32_t q[max(Cta::kHeldSteps, 1)][4];
    WarpgroupSoftmax softmax;
    float most[V::kMaxLogits != 0 ? 2 : 1];  // with kMaxLogits: the largest logits of this lane's part of its rows
    uint32_t weights[Cta::kTileKv / 4];      // of the latest KV tile, two a register
    int num_missing;      // of its tokens, from the last on: values to be cleared; gathered: not 0 if any
    uint32_t weights_to;  // where this lane stores its first ones in the first stage
  };
  using TileOfS = float[Cta::kTileKv / 2];

 public:
  QUIRE_DEVICE explicit MlaScores(const Cta& cta) : cta_(cta) {}

  QUIRE_DEVICE void run() const {
    touch_parameters();
    RingPosition<Cta::kWorkStages> at;
    RingPosition<Cta::kStages> ckv;
    RingPosition<2> kpe;
    for (;;) {
      cta_.work_ring().wait_full(at);
      if (!ptx::uniform(cta_.shared.work[at.stage()].exists)) break;
      const WorkTile& work = cta_.shared.work[at.stage()].work;
      Scores scores;
      scores.weights_to = BlockCursor<TileP>(cta_.weights_tile(0), ptx::lane_id()).at(Cta::warp_of_group(), 0);
      if constexpr (Cta::kHeldSteps == 0) {
        copy_queries(work);
      } else if (Cta::kGathers || at.count > 0) {
        load_queries(scores, work);
      } else {
        load_first_queries(scores, work);
      }
      if (at.count == 0 && ptx::lane_id() == 0) ptx::mbarrier_arrive(cta_.queries_barrier());
      scores.softmax.clear();
      if constexpr (V::kMaxLogits != 0) scores.most[0] = scores.most[1] = kNoLogit;
      compute_weights(scores, work, ckv, kpe);
      put_states(scores, {at.count});
      cta_.release_work_tile(at);
    }
  }

 private:
  // Parameters come from memory at their first use, one line after another: here while the first work tile is sought.
  QUIRE_DEVICE void touch_parameters() const {
    const AttentionParams& p = cta_.p.base;
    asm volatile("" ::"l"(cta_.p.q_nope), "l"(cta_.p.q_nope_token_stride), "l"(cta_.p.q_nope_head_stride), "l"(p.q),
                 "l"(p.q_token_stride), "l"(p.q_head_stride), "r"(p.group.divisor), "f"(logits_scale<V>(p)));
    asm volatile("" ::"l"(p.o), "l"(p.o_token_stride), "l"(p.o_head_stride), "l"(p.lse), "l"(p.partial_o),
                 "l"(p.groups));
  }

  // Weights of a work tile.
  QUIRE_DEVICE void compute_weights(Scores& scores, const WorkTile& work, RingPosition<Cta::kStages>& ckv,
                                    RingPosition<2>& kpe) const {
    const int begin = ptx::uniform(work.kv_begin), end = ptx::uniform(Cta::kv_end(work));
    const int all_see = ptx::uniform(first_masked_key(work));
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      ckv = ckv.uniform(), kpe = kpe.uniform();
      TileOfS s;
      multiply(s, scores, ckv, kpe, !Cta::kHandsOnAtOnce && tile > begin);
      const bool is_masked = (!Cta::kGathers || V::kMask == kMaskCausal) && (tile + 1) * Cta::kTileKv > all_see;
      if (is_masked) mask(s, work, tile * Cta::kTileKv);
      if constexpr (Cta::kGathers) {
        if (scores.num_missing != 0) hide_gaps(s, cta_.existing(ckv.stage()));
      }
      scores.num_missing =
          is_masked && !Cta::kGathers ? min(Cta::kTileKv, (tile + 1) * Cta::kTileKv - work.tile.kv_len) : 0;
      exponentiate(s, scores, tile + 1 == end);
      if constexpr (Cta::kHandsOnAtOnce) {
        store_weights(scores, ckv, kpe, tile + 1 == end ? Cta::kIsLast : 0);
        hand_on(kpe);
      }
      ckv.advance(), kpe.advance();
    }
    if constexpr (Cta::kHandsOnAtOnce) return;
    store_weights(scores, ckv.before(), kpe.before(), Cta::kIsLast);
    hand_on(kpe.before());
  }

  // The first key that some row does not see.
  QUIRE_DEVICE int first_masked_key(const WorkTile& work) const {
    const int first = cta_.p.base.group.div(min(Cta::first_row(work), work.row_end - 1));
    return Mask<V::kMask, V::kWindow != 0>{work.tile.qo_len, work.tile.kv_len, -1, nullptr}.visible(first).end;
  }

  // Computes S of a KV tile in one group of products. kpe comes last, because it is loaded last. The first products
  // have both operands in shared memory, so that the warps go on at once; a product with queries in registers would
  // keep them waiting. If `has_before`, the weights of the KV tile before are stored while the first products run. They
  // are handed on before the last products, as long before as the other warpgroups take to begin.
  QUIRE_DEVICE void multiply(TileOfS& s, Scores& scores, RingPosition<Cta::kStages> ckv, RingPosition<2> kpe,
                             bool has_before) const {
    const TileDescriptor keys(cta_.ckv_tile(ckv.stage()).base, 16), positions(cta_.kpe_tile(kpe.stage()).base, 16);
    const TileDescriptor q(cta_.q_tile().base, 16);
    constexpr int kPartSteps = Cta::kCkv / 16 / Cta::kParts;
    pin(s, scores);
#pragma unroll
    for (int part = 0; part < Cta::kParts; ++part) {
      if (!Cta::kGathers || Cta::kWidens || part % (Cta::kParts / Cta::kHalves) == 0) {
        ptx::mbarrier_wait(cta_.ckv_full(ckv.stage(), part), ckv.parity());
        order_gathered();
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int i = part * kPartSteps; i < (part + 1) * kPartSteps; ++i) {
        if (i == Cta::kFirstSteps) {
          if (has_before) store_weights(scores, ckv.before(), kpe.before(), 0);
          ptx::wgmma_fence();  // ahead of products with registers
        }
        multiply_step(s, scores, q, keys.at(i / 4 * TileCkv::kAtomBytes + i % 4 * 32), i, i > 0);
      }
    }
    if constexpr (Cta::kGathers) {
      const uint2 bits = cta_.existing(ckv.stage());
      scores.num_missing = (bits.x & bits.y) != 0xffffffffu;
    }
    if (has_before) hand_on(kpe.before());
    cta_.kpe_ring().wait_full(kpe);
    order_gathered();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Cta::kKpe / 16; ++i) multiply_step(s, scores, q, positions.at(i * 32), Cta::kCkv / 16 + i, 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
  }

  // Orders the copies of threads that gather before reads by the tensor cores.
  QUIRE_DEVICE static void order_gathered() {
    if constexpr (Cta::kGathers) ptx::fence_proxy_async();
  }

  QUIRE_DEVICE void hand_on(RingPosition<2> at) const {
    if (ptx::lane_id() == 0) cta_.weights_ring().arrive_full(at);
  }

  QUIRE_DEVICE static void pin(TileOfS& s, Scores& scores) {
    ptx::pin(s);
#pragma unroll
    for (int i = 0; i < Cta::kHeldSteps; ++i) ptx::pin(scores.q[i]);
  }

  // s (+)= q k^T of 16 columns, the i-th of S.
  QUIRE_DEVICE static void multiply_step(TileOfS& s, Scores& scores, const TileDescriptor& q, uint64_t keys, int i,
                                         int accumulate) {
    const int held = i - Cta::kFirstSteps;
    if (held >= 0 && held < Cta::kHeldSteps) {
      ptx::Wgmma<Cta::kTileKv>::template rs<ptx::Contiguous::kInner>(T{}, s, scores.q[held], keys, accumulate);
    } else {
      const int step = held < 0 ? i : i - Cta::kHeldSteps;
      ptx::Wgmma<Cta::kTileKv>::ss(T{}, s, q.at(step / 4 * TileQ::kAtomBytes + step % 4 * 32), keys, accumulate);
    }
  }

  // Turns S into weights. With kMaxLogits the reference of the last KV tile of a work tile is the largest logit of all.
  QUIRE_DEVICE void exponentiate(TileOfS& s, Scores& scores, bool is_last) const {
    const float scale = logits_scale<V>(cta_.p.base);
    if constexpr (V::kMaxLogits != 0) {
      float top[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = WarpgroupSoftmax::row_max(s, h) * scale;
        scores.most[h] = fmaxf(scores.most[h], top[h]);
        if (is_last) top[h] = scores.most[h];
      }
      scores.softmax.raise_to(top, [](float x) { return x; }, is_last ? 0.f : kMaxLag);
    } else {
      scores.softmax.raise_max(s, scale);
    }
    scores.softmax.exponentiate(s, scale);
#pragma unroll
    for (int i = 0; i < Cta::kTileKv / 4; ++i) scores.weights[i] = ptx::pack(T{}, s[2 * i], s[2 * i + 1]);
    ptx::pin(scores.weights);
  }

  QUIRE_DEVICE void mask(TileOfS& s, const WorkTile& work, int key) const {
    const LogitsTransform<V, FragmentMath<false>> transform(cta_.p.base);
    static_assert(decltype(transform)::kIsIdentity, "a mask is all that changes logits");
    const LogitsTile<V> logits = {{work.tile.qo_len, work.tile.kv_len, -1, nullptr},
                                  cta_.p.base.group,
                                  work.tile.request,
                                  work.kv_head,
                                  Cta::first_row(work) + Cta::lane_row(),
                                  key,
                                  ptx::lane_id()};
    score_logits<true>(s, transform, logits);
  }

  // Hides tokens that do not exist from all rows.
  QUIRE_DEVICE static void hide_gaps(TileOfS& s, uint2 existing) {
    const int shift = ptx::lane_id() % 4 * 2;
    const uint32_t words[2] = {existing.x >> shift, existing.y >> shift};
#pragma unroll
    for (int i = 0; i < Cta::kTileKv / 2; ++i) {
      const int block = i / 4, bit = block % 4 * 8 + i % 2;
      if ((words[block / 4] >> bit & 1) == 0) s[i] = __int_as_float(0xff800000);
    }
  }

  // Stores the weights in the place of kpe, and the factors by which o is multiplied before they are used. hand_on()
  // then passes them to the warpgroups of O.
  QUIRE_DEVICE void store_weights(const Scores& scores, RingPosition<Cta::kStages> ckv, RingPosition<2> kpe,
                                  int flags) const {
    const uint32_t to = scores.weights_to + kpe.stage() * TileP::kBytes;
    const int lane = ptx::lane_id(), warp = Cta::warp_of_group();
    const WarpgroupSoftmax& softmax = scores.softmax;
    ptx::named_barrier_sync(Cta::kScore, 128);  // every warp has read these keys
    if (scores.num_missing > 0) clear_values(cta_.ckv_tile(ckv.stage()), scores.num_missing);
#pragma unroll
    for (int i = 0; i < Cta::kTileKv / 16; ++i) {
      const uint32_t* w = scores.weights + 4 * i;
      ptx::st_matrix(to ^ i * 32, {w[0], w[1], w[2], w[3]});
    }
    if (lane == 0) cta_.shared.flags[kpe.stage()][warp] = flags | (softmax.is_raised ? Cta::kIsRaised : 0);
    if (softmax.is_raised && lane % 4 == 0) {
      cta_.shared.factors[kpe.stage()][Cta::lane_row()] = softmax.factor[0];
      cta_.shared.factors[kpe.stage()][Cta::lane_row() + 8] = softmax.factor[1];
    }
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // Values that do not exist may be anything, and 0 * NaN is NaN: zeros in the last `rows` tokens of a KV tile.
  QUIRE_DEVICE static void clear_values(TileCkv ckv, int rows) {
#pragma unroll 1
    for (int i = ptx::thread_id() % 128; i < rows * TileCkv::kChunks; i += 128) {
      const int row = i / TileCkv::kChunks;
      const uint32_t chunk = ckv.chunk(Cta::kTileKv - 1 - row, i - row * TileCkv::kChunks);
#pragma unroll
      for (int word = 0; word < 4; ++word) ptx::st_shared(chunk + 4 * word, 0);
    }
  }

  QUIRE_DEVICE void put_states(Scores& scores, RingPosition<2> at) const {
    WarpgroupSoftmax& softmax = scores.softmax;
    softmax.reduce();
    cta_.states_ring().wait_empty(at);
    if (ptx::lane_id() % 4 == 0) {
      cta_.shared.states[at.stage()][Cta::lane_row()] = {softmax.m[0], softmax.d[0]};
      cta_.shared.states[at.stage()][Cta::lane_row() + 8] = {softmax.m[1], softmax.d[1]};
    }
    __syncwarp();
    if (ptx::lane_id() == 0) cta_.states_ring().arrive_full(at);
  }

  // ---- Queries: Cta::kHeldSteps of 16 columns in registers, the rest of q_nope and q_pe in shared memory.

  // A warp's rows, 16 bytes a load, four lanes a row: chunk `chunk` of this lane's upper and lower row.
  struct QueryRows {
    const uint4 *nope[2], *pe[2];

    QUIRE_DEVICE uint4 load(int half, int chunk) const {
      return __ldg(chunk < Cta::kCkv / 8 ? nope[half] + chunk : pe[half] + (chunk - Cta::kCkv / 8));
    }
  };
  QUIRE_DEVICE QueryRows query_rows(const WorkTile& work) const {
    QueryRows rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.nope[h] = reinterpret_cast<const uint4*>(cta_.nope_row(work, Cta::lane_row() + 8 * h)) + ptx::lane_id() % 4;
      rows.pe[h] = reinterpret_cast<const uint4*>(cta_.pe_row(work, Cta::lane_row() + 8 * h)) + ptx::lane_id() % 4;
    }
    return rows;
  }

  // A warp's 16 rows of one operand, an atom of four rows at a time, eight lanes a row: this lane's of them. `row` is
  // that of lane % 16.
  struct RowsToCopy {
    const uint4* at[4];

    QUIRE_DEVICE explicit RowsToCopy(const T* row) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int lane = ptx::lane_id();
        const uint64_t from = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(row), i * 4 + lane / 8);
        at[i] = reinterpret_cast<const uint4*>(from) + lane % 8;
      }
    }
    // Columns 64 * from and on, to an atom of a tile of all rows.
    template <class Tile>
    QUIRE_DEVICE void copy(Tile tile, int from, int atom) const {
      const int lane = ptx::lane_id(), row = Cta::warp_of_group() * 16 + lane / 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::cp_async_16(tile.chunk(row + i * 4, atom * 8 + lane % 8), at[i] + from * 8);
    }
  };

  // All to shared memory, where each warp has read the last of the work tile before.
  QUIRE_DEVICE void copy_queries(const WorkTile& work) const {
    const int row = Cta::warp_of_group() * 16 + ptx::lane_id() % 16;
    const RowsToCopy nope(cta_.nope_row(work, row)), pe(cta_.pe_row(work, row));
#pragma unroll
    for (int i = 0; i < Cta::kCkv / 64; ++i) nope.copy(cta_.q_tile(), i, i);
    pe.copy(cta_.q_tile(), 0, Cta::kCkv / 64);
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Cta::kScore, 128);
  }

  // The first work tile's, by way of the last stage of ckv, which is empty: all on their way together. The first KV
  // tile is requested before them: page numbers and requests would have to wait behind so many copies.
  QUIRE_DEVICE void load_first_queries(Scores& scores, const WorkTile& work) const {
    constexpr int kHeldAtoms = Cta::kHeldSteps / 4;
    static_assert(TileQ::kAtoms == 2 && Cta::kKpe == 64 && Cta::kFirstSteps == 4, "an atom of q_nope and one of q_pe");
    const SwizzledTile<Cta::kRows, Cta::kHeldSteps * 16> held = {cta_.ckv_tile(Cta::kStages - 1).base};
    const int lane = ptx::lane_id(), first = Cta::warp_of_group() * 16;
    const RowsToCopy nope(cta_.nope_row(work, first + lane % 16)), pe(cta_.pe_row(work, first + lane % 16));
    ptx::mbarrier_wait(cta_.first_tile_barrier(), 0);
#pragma unroll
    for (int i = 0; i < kHeldAtoms; ++i) nope.copy(held, i + 1, i);
    nope.copy(cta_.q_tile(), 0, 0);
    pe.copy(cta_.q_tile(), 0, 1);
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Cta::kScore, 128);
#pragma unroll
    for (int i = 0; i < Cta::kHeldSteps; ++i)
      ptx::ldmatrix_x4(scores.q[i], held.chunk(first + lane % 16, i * 2 + lane / 16));
    __syncwarp();
  }

  // All loads are on their way together. Held columns pass through the tile of the others, as many at a time as it has
  // columns: matrix loads from there turn rows into fragments.
  QUIRE_DEVICE void load_queries(Scores& scores, const WorkTile& work) const {
    constexpr int kLoads = V::kHeadDimQk / 32, kHeldLoads = Cta::kHeldSteps / 2, kTileLoads = kLoads - kHeldLoads,
                  kFirst = Cta::kFirstSteps / 2;
    const QueryRows rows = query_rows(work);
    const TileQ tile = cta_.q_tile();
    const int lane = ptx::lane_id();
    uint32_t others[kTileLoads * 2][4];
#pragma unroll
    for (int i = 0; i < 2 * kLoads; ++i) {
      uint32_t (&to)[4] = i < 2 * kHeldLoads ? scores.q[i] : others[i - 2 * kHeldLoads];
      const int load = i / 2, other = load - kHeldLoads;  // of the columns before the held ones, or behind them
      const uint4 x = rows.load(i % 2, (other < 0 ? load + kFirst : other < kFirst ? other : load) * 4);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 2 * kLoads; ++i) ptx::pin(i < 2 * kHeldLoads ? scores.q[i] : others[i - 2 * kHeldLoads]);
    const auto store = [&](const uint32_t (&x)[4], int i) {
      ptx::st_shared_16(tile.chunk(Cta::lane_row() + i % 2 * 8, i / 2 % kTileLoads * 4 + lane % 4), x);
    };
#pragma unroll
    for (int first = 0; first < Cta::kHeldSteps; first += 2 * kTileLoads) {
#pragma unroll
      for (int i = first; i < min(first + 2 * kTileLoads, Cta::kHeldSteps); ++i) store(scores.q[i], i);
      __syncwarp();
#pragma unroll
      for (int i = first; i < min(first + 2 * kTileLoads, Cta::kHeldSteps); ++i) {
        ptx::ldmatrix_x4(scores.q[i], tile.chunk(Cta::warp_of_group() * 16 + lane % 16, 2 * (i - first) + lane / 16));
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 2 * kTileLoads; ++i) store(others[i], i);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Cta::kScore, 128);
  }

  const Cta& cta_;
};

}  // namespace quire

// Loads KV tiles of the MLA kernel from latents of 8 bits, token by token as in tile/hopper/mla_loader.cuh. The warps
// of O widen them in shared memory, in place: a token's bytes are copied to the end of the space that its 16-bit
// numbers will fill. Bytes are copied while S of the next KV tile is computed, and widened while a product of O runs.
//
// Widening is limited by the instructions that an SM issues. Conversion of a pair to bf16 takes four: one to fp16, two
// to float and one to bf16. Scales of latents take two multiplications more.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/params.h"
#include "quire/ptx/math.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/mla_loader.cuh"

namespace quire {

// Which 16-byte chunks of 8-bit rows a lane of a warp copies: kLanes lanes share a row, and a step copies kRows rows. A
// chunk becomes two chunks of 16-bit numbers. The chunks of an atom would then fall into the same banks as the chunks
// of the next atom. Eight lanes therefore copy four chunks of two neighbouring rows, which the swizzle puts into
// different banks.
template <int kChunks>
struct ChunkSplit {
  static constexpr int kLanes = min(kChunks & -kChunks, 32), kRows = 32 / kLanes, kChunksPerLane = kChunks / kLanes;
  static constexpr bool kPairsRows = kLanes == 8 || kLanes == 16;

  QUIRE_DEVICE static int row(int lane) {
    return kPairsRows ? (lane / (2 * kLanes)) * 2 + (lane >> 2 & 1) : lane / kLanes;
  }
  QUIRE_DEVICE static int chunk(int lane) {
    return kPairsRows ? ((lane >> 3) * 4 + (lane & 3)) % kLanes : lane % kLanes;
  }
};

template <class V>
class MlaSource<V, KvLoadPath::kGather, true> : MlaSource<V, KvLoadPath::kGather, false> {
  using Base = MlaSource<V, KvLoadPath::kGather, false>;
  using Cta = MlaCta<V>;
  using T = typename Cta::T;
  using TileCkv = typename Cta::TileCkv;
  using TileKpe = typename Cta::TileKpe;
  using Token = typename Base::Token;
  using Base::cta_, Base::exists_, Base::put_off_, Base::token_, Base::has_kpe;

  static constexpr bool kScaled = V::kTileScales != 0, kWidensKpe = !kScaled;
  static constexpr int kWarpRows = 16;

 public:
  using Base::Base, Base::before_product, Base::finish, Base::begin, Base::find;

  // Fills the ring, but for the last stage, whose bytes are on their way, and its kpe.
  QUIRE_DEVICE void load_first_tiles() {
    exists_ = false;
#pragma unroll 1
    for (int i = 0; i < Cta::kStages; ++i) {
      const bool is_copied = exists_;
      const float scale = scale_;
      if (i > 0 && has_kpe()) copy_kpe({i - 1});
      token_ = {};
      exists_ = cta_.find_next(i == 0, *this, token_);
      copy_found(i);
      if (i == 0) continue;
      ptx::cp_async_wait<1>();
      if (has_kpe()) widen_kpe({i - 1});
      if (is_copied) widen_half(i - 1, scale);
    }
  }

  QUIRE_DEVICE void beside_product(RingPosition<2> kpe) {
    token_ = {};
    const bool exists = cta_.find_next(false, *this, token_);
    ptx::cp_async_wait<0>();
    if (exists_) widen_half((kpe.count + 2) % Cta::kStages, scale_);
    exists_ = exists;
  }
  QUIRE_DEVICE void after_product(RingPosition<2> kpe, int stage) {
    ptx::named_barrier_sync(Cta::kHalf + Cta::half_of_o(), 128);  // every warp has used these keys and weights
    if (Cta::is_leader()) cta_.kpe_ring().arrive_empty(kpe);
    if (has_kpe()) copy_kpe({kpe.count + 2});
    copy_found(stage);
    if (!has_kpe()) return;
    if constexpr (kWidensKpe) ptx::cp_async_wait<1>();
    widen_kpe({kpe.count + 2});
  }

 private:
  // A lane widens the chunks that it has copied itself.
  // Chunks of 16 bytes of 8-bit numbers, kChunks a token, become two each.
  template <int kChunks>
  struct Fp8 {
    using Split = ChunkSplit<kChunks>;
    static constexpr int kSteps = kWarpRows / Split::kRows, kStepBytes = Split::kRows * 128;
    static constexpr int kAtomBytes = TileCkv::kAtomBytes, kFirstAtom = ceil_div(kChunks, 4) - ceil_div(kChunks, 8);

    // Where this lane's bytes of the first step are. Neighbouring rows are permuted differently, so that eight lanes
    // have eight banks. `tile`: the warp's first row.
    QUIRE_DEVICE static uint32_t bytes_at(uint32_t tile, int lane) {
      const int row = Split::row(lane), chunk = Split::chunk(lane);
      return tile + (kFirstAtom + chunk / 8) * kAtomBytes + row * 128 + ((chunk ^ row % 2 * 4) % 8) * 16;
    }

    QUIRE_DEVICE static void copy(uint32_t tile, const void* from, int64_t place) {
      const int lane = ptx::lane_id();
      const uint32_t to = bytes_at(tile, lane);
      const unsigned char* base = static_cast<const unsigned char*>(from) + Split::chunk(lane) * 16;
#pragma unroll 2
      for (int i = 0; i < kSteps; ++i) {
        const int64_t at = __shfl_sync(0xffffffffu, static_cast<long long>(place), i * Split::kRows + Split::row(lane));
        ptx::cp_async_16(to + i * kStepBytes, base + max<int64_t>(at, 0), at < 0 ? 0 : 16);
      }
    }

    // `scale`: of row lane % 16, in the upper lanes of the second half of the columns.
    QUIRE_DEVICE static void widen(uint32_t tile, float scale) {
      constexpr int kAtOnce = 2;
      const int lane = ptx::lane_id(), row = Split::row(lane), chunk = Split::chunk(lane);
      const uint32_t from = bytes_at(tile, lane);
      const uint32_t to = tile + chunk / 4 * kAtomBytes + row * 128 + ((2 * chunk ^ row) & 7) * 16;
#pragma unroll 1
      for (int first = 0; first < kSteps; first += kAtOnce) {
        uint4 x[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) x[i] = ptx::ld_shared_16(from + (first + i) * kStepBytes);
        __syncwarp();  // every lane has read before any overwrites
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int rows = (first + i) * Split::kRows;
          const float factor = kScaled ? __shfl_sync(0xffffffffu, scale, lane / 16 * 16 + rows + row) : 1.f;
          const uint32_t at = (to ^ (rows & 7) << 4) + rows * 128;
          store(at, x[i].x, x[i].y, factor);
          store(at ^ 16, x[i].z, x[i].w, factor);
        }
      }
    }

    QUIRE_DEVICE static void store(uint32_t to, uint32_t left, uint32_t right, float scale) {
      uint32_t wide[4];
      ptx::widen(typename V::Kv{}, left, wide[0], wide[1]);
      ptx::widen(typename V::Kv{}, right, wide[2], wide[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) wide[i] = multiplied(wide[i], scale);
      ptx::st_shared_16(to, wide);
    }

    QUIRE_DEVICE static uint32_t multiplied(uint32_t x, float scale) {
      if constexpr (!kScaled) return ptx::widened_to(T{}, x);
      const float low = to_float(fp16_t{static_cast<uint16_t>(x)}),
                  high = to_float(fp16_t{static_cast<uint16_t>(x >> 16)});
      return ptx::pack(T{}, low * scale, high * scale);
    }
  };
  using Fp8Half = Fp8<Cta::kHalfCols / 16>;
  using Fp8Kpe = Fp8<Cta::kKpe / 16>;

  QUIRE_DEVICE uint32_t half_tile(int stage) const {
    return cta_.ckv_tile(stage).base + Cta::half_of_o() * (TileCkv::kBytes / Cta::kHalves) +
           Cta::warp_of_group() * kWarpRows * 128;
  }
  QUIRE_DEVICE uint32_t kpe_tile(RingPosition<2> at) const {
    return cta_.kpe_tile(at.stage()).base + Cta::warp_of_group() * kWarpRows * 128;
  }

  // Starts to copy the KV tile of `token_`, but for its kpe.
  QUIRE_DEVICE void copy_found(int stage) {
    if (exists_) {
      const AttentionParams& p = cta_.p.base;
      const int64_t place = this->place_of(token_, p.v_page_stride, p.v_token_stride);
      const unsigned char* from = static_cast<const unsigned char*>(p.v) + Cta::half_of_o() * Cta::kHalfCols;
      Fp8Half::copy(half_tile(stage), from, place);
      if constexpr (kScaled) scale_ = load_scale();
      if (has_kpe()) this->note_existing(token_, stage);
    }
    ptx::cp_async_commit();
    put_off_ = this->place_of_kpe(token_);
    if (!has_kpe()) this->prefetch_kpe(put_off_);
  }

  // Of row lane % 16, and of the second 128 columns of the half in the upper lanes.
  QUIRE_DEVICE float load_scale() const {
    const AttentionMlaFa3Params& p = cta_.p;
    const float* scales = p.ckv_scales + Cta::half_of_o() * (Cta::kHalfCols / kTileDims) + ptx::lane_id() / 16;
    const int64_t at = this->place_of(token_, p.ckv_scales_page_stride, p.ckv_scales_token_stride);
    return at >= 0 ? __ldg(scales + at) : 0.f;
  }

  QUIRE_DEVICE void widen_half(int stage, float scale) const {
    Fp8Half::widen(half_tile(stage), scale);
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(cta_.ckv_full(stage, Cta::half_of_o() * (Cta::kParts / Cta::kHalves)));
  }

  // kpe is copied when the weights in its place have been used.
  QUIRE_DEVICE void copy_kpe(RingPosition<2> at) const {
    if constexpr (kWidensKpe) {
      cta_.kpe_ring().wait_empty(at);
      Fp8Kpe::copy(kpe_tile(at), cta_.p.base.k, put_off_);
      ptx::cp_async_commit();
    } else {
      this->gather_kpe(put_off_, at);
    }
  }
  QUIRE_DEVICE void widen_kpe(RingPosition<2> at) const {
    if constexpr (kWidensKpe) {
      Fp8Kpe::widen(kpe_tile(at), 1.f);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(cta_.kpe_ring().full(at.stage()));
    }
  }

  float scale_ = 0.f;  // of the KV tile that is on its way
};

}  // namespace quire

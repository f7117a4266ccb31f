// The warpgroup that loads KV tiles of the MLA kernel from latents of 8 bits, token by token, and widens them.
//
// Latents pass through registers: read from global memory half a KV tile ahead, widened, and written to shared memory
// as the products want them.
//
// Conversion of a pair to bf16 takes four instructions: one to fp16, two to float and one to bf16. Scales of latents
// take two multiplications more.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/params.h"
#include "quire/ptx/math.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/mla_loader.cuh"

namespace quire {

// What is read in the place of a token that does not exist: as many zeros as a row has bytes, which nobody writes. It
// is no constant, because the names of these contain a number that is another one in each build.
template <class = void>
__device__ uint4 kNoToken[64];

// Which 16-byte chunks of 8-bit rows a lane of a warp loads: kLanes lanes share a row, and a step loads kRows rows. A
// chunk becomes two chunks of 16-bit numbers. The chunks of an atom would then fall into the same banks as the chunks
// of the next atom. Eight lanes therefore load four chunks of two neighbouring rows, which the swizzle puts into
// different banks.
template <int kChunks>
struct ChunkSplit {
  static constexpr int kLanes = min(kChunks & -kChunks, 32), kRows = 32 / kLanes;
  static constexpr bool kPairsRows = kLanes == 8 || kLanes == 16;
  static_assert(kChunks == kLanes, "a lane has one chunk of a row");

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
  using Token = typename Base::Token;
  using Position = RingPosition<Cta::kStages>;
  using Base::cta_;

  static constexpr bool kScaled = V::kTileScales != 0;
  static constexpr int kWarpRows = Cta::kTileKv / Cta::kLoaders, kPartCols = Cta::kCkv / Cta::kParts;
  static_assert(!kScaled || kPartCols == kTileDims, "a part has one scale a token");

 public:
  QUIRE_DEVICE explicit MlaSource(const Cta& cta)
      : Base(cta),
        lane_(ptx::lane_id()),
        warp_(Cta::warp_of_group()),
        at_warp_(Cta::base() + warp_ * kWarpRows * 128) {}

  // A warp, from the first KV tile to the last. Page numbers are read two KV tiles ahead, rows are fetched into the L2
  // one KV tile ahead, and a part is read while the part before it is widened.
  QUIRE_DEVICE void run() const {
    Token token;
    if (!cta_.find_next(true, *this, token)) return;
    Row row(*this, token);
    bool has_next = cta_.find_next(false, *this, token);
    PartSource from(row.latents, lane_);
    Scales scales(row.scales, lane_);
    PartRows a, b;
    a.load(from, 0);
    b.load(from, kPartCols);
    for (Position at;; at.advance()) {
      // Find the next KV tile, and the one after it.
      Row next = row;
      bool has_after = false;
      if (has_next) {
        next = Row(*this, token);
        next.prefetch(lane_);
        has_after = cta_.find_next(false, *this, token);
      }
      // Widen the first half.
      wait_free(at, 0);
      note_existing(at, row.existing);
      widen(a, scales, at, 0);
      a.load(from, 2 * kPartCols);
      widen(b, scales, at, 1);
      b.load(from, 3 * kPartCols);
      // Widen the second half, and begin to load the next KV tile.
      wait_free(at, 1);
      const Rope rope(*this, row, at);
      widen(a, scales, at, 2);
      from = PartSource(next.latents, lane_);
      a.load(from, 0);
      widen(b, scales, at, 3);
      b.load(from, kPartCols);
      rope.widen(*this, at);
      if (!has_next) return;
      scales = Scales(next.scales, lane_);
      row = next;
      has_next = has_after;
    }
  }

  // For Cta::find_next().
  QUIRE_DEVICE void begin(const WorkTile& work) const { this->prefetch_queries(work); }
  // Where token lane % kWarpRows of this warp lies. Its page number is read at once, not when it is needed.
  QUIRE_DEVICE void find(const WorkTile& work, int tile, Token& found) const {
    const int token = tile * Cta::kTileKv + warp_ * kWarpRows + lane_ % kWarpRows;
    found = {};
    if (token >= work.tile.kv_len) return;
    const AttentionParams& p = cta_.p.base;
    const int index = p.page.div(token);
    found.row = token - index * static_cast<int>(p.page.divisor);
    found.page = ptx::ld_global_constant(reinterpret_cast<const uint32_t*>(p.kv_indices) + work.tile.kv_first + index);
  }

 private:
  QUIRE_DEVICE void wait_free(Position at, int half) const {
    ptx::mbarrier_wait(cta_.ckv_free(at.stage(), half), at.parity() ^ 1);
  }
  // The warps of S order these writes before products: a fence here would wait for the parts that are being read.
  QUIRE_DEVICE void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(barrier);
  }

  QUIRE_DEVICE void note_existing(Position at, uint32_t bits) const {
    if (lane_ == 0) reinterpret_cast<uint16_t*>(&cta_.existing(at.stage()))[warp_] = bits;
  }
  // The rows of a warp, of kChunks chunks of 8-bit numbers: in registers, then as 16-bit numbers in shared memory.
  template <int kChunks>
  struct Rows {
    using Split = ChunkSplit<kChunks>;
    static constexpr int kSteps = kWarpRows / Split::kRows;

    // This lane's chunk of one row for each step. `row`: of token lane % kWarpRows.
    struct Source {
      const unsigned char* at[kSteps];

      QUIRE_DEVICE Source(const unsigned char* row, int lane) {
        const auto own = static_cast<unsigned long long>(reinterpret_cast<uint64_t>(row));
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint64_t from = __shfl_sync(0xffffffffu, own, i * Split::kRows + Split::row(lane));
          at[i] = reinterpret_cast<const unsigned char*>(from) + Split::chunk(lane) * 16;
        }
      }
    };

    uint4 x[kSteps];

    QUIRE_DEVICE void load(const Source& from, int bytes) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) x[i] = ptx::ld_global_16_once(from.at[i] + bytes);
    }

    // `factors`: of this lane's rows.
    template <bool kMultiplies>
    QUIRE_DEVICE void widen(uint32_t tile, int lane, const float (&factors)[kSteps]) const {
      const int row = Split::row(lane), chunk = Split::chunk(lane);
      const uint32_t to = tile + chunk / 4 * TileCkv::kAtomBytes + row * 128 + ((2 * chunk ^ row) & 7) * 16;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int rows = i * Split::kRows;
        const uint32_t at = (to ^ (rows & 7) << 4) + rows * 128;
        store<kMultiplies>(at, x[i].x, x[i].y, factors[i]);
        store<kMultiplies>(at ^ 16, x[i].z, x[i].w, factors[i]);
      }
    }

   private:
    template <bool kMultiplies>
    QUIRE_DEVICE static void store(uint32_t to, uint32_t left, uint32_t right, float factor) {
      uint32_t wide[4];
      ptx::widen(typename V::Kv{}, left, wide[0], wide[1]);
      ptx::widen(typename V::Kv{}, right, wide[2], wide[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) wide[i] = kMultiplies ? multiplied(wide[i], factor) : ptx::widened_to(T{}, wide[i]);
      ptx::st_shared_16(to, wide);
    }
    QUIRE_DEVICE static uint32_t multiplied(uint32_t x, float factor) {
      const float low = to_float(fp16_t{static_cast<uint16_t>(x)}),
                  high = to_float(fp16_t{static_cast<uint16_t>(x >> 16)});
      return ptx::pack(T{}, low * factor, high * factor);
    }
  };
  using PartRows = Rows<kPartCols / 16>;
  using PartSource = typename PartRows::Source;

  // Scales of this warp's tokens: lane 0 has the first token's of the first part, and so on.
  struct Scales {
    static constexpr int kCount = kScaled ? kWarpRows * Cta::kParts / 32 : 0;
    uint32_t x[max(kCount, 1)];

    // `row`: of token lane % kWarpRows.
    QUIRE_DEVICE Scales(const unsigned char* row, int lane) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = ptx::ld_global_constant(reinterpret_cast<const uint32_t*>(row) + (32 * i + lane) / kWarpRows);
      }
    }
    QUIRE_DEVICE float get(int part, int row) const {
      return __uint_as_float(__shfl_sync(0xffffffffu, x[part * kWarpRows / 32], part * kWarpRows % 32 + row));
    }
  };

  // Where token lane % kWarpRows of this warp lies.
  struct Row {
    const unsigned char *latents, *kpe, *scales;
    uint32_t existing;  // which of this warp's tokens exist, a bit each

    QUIRE_DEVICE Row(const MlaSource& source, Token token) {
      const AttentionMlaFa3Params& p = source.cta_.p;
      const bool exists = source.exists(token);
      existing = __ballot_sync(0xffffffffu, exists);
      const auto at = [&](const void* base, int64_t place, int bytes) {
        const void *some = static_cast<const unsigned char*>(base) + place * bytes, *none = kNoToken<>;
        return static_cast<const unsigned char*>(exists ? some : none);
      };
      latents = at(p.base.v, source.place_of(token, p.base.v_page_stride, p.base.v_token_stride), 1);
      kpe = at(p.base.k, source.place_of_kpe(token), kKpeBytes / Cta::kKpe);
      if constexpr (kScaled) {
        scales = at(p.ckv_scales, source.place_of(token, p.ckv_scales_page_stride, p.ckv_scales_token_stride), 4);
      }
    }
    // Into the L2. Two lanes share a row; it begins and ends anywhere in a line.
    QUIRE_DEVICE void prefetch(int lane) const {
      static_assert(kWarpRows == 16 && Cta::kCkv == 512, "each of two lanes fetches two whole lines of latents");
      const bool is_first = lane < kWarpRows;
      ptx::prefetch_l2(is_first ? latents : latents + 256);
      ptx::prefetch_l2(is_first ? latents + 128 : latents + 384);
      ptx::prefetch_l2(is_first ? latents + 511 : kpe);
      ptx::prefetch_l2(is_first || !kScaled ? kpe + kKpeBytes - 1 : scales);
    }
  };

  QUIRE_DEVICE void widen(const PartRows& x, const Scales& scales, Position at, int part) const {
    float factors[PartRows::kSteps];
#pragma unroll
    for (int i = 0; i < PartRows::kSteps; ++i) {
      factors[i] = kScaled ? scales.get(part, i * PartRows::Split::kRows + PartRows::Split::row(lane_)) : 1.f;
    }
    x.template widen<kScaled>(at_warp_ + at.stage() * TileCkv::kBytes + part * Cta::kPartBytes, lane_, factors);
    arrive(cta_.ckv_full(at.stage(), part));
  }

  // The rest of the keys, loaded when it is made. Beside latents with scales it has 16 bits, and is copied; else it has
  // 8 and is widened.
  static constexpr int kKpeBytes = Cta::kKpe * static_cast<int>(sizeof(typename Cta::Kpe));
  QUIRE_DEVICE uint32_t rope_tile(Position at) const {
    return at_warp_ + Cta::kKpeAt + at.stage() * Cta::TileKpe::kBytes;
  }
  struct WideRope {
    QUIRE_DEVICE WideRope(const MlaSource& source, const Row& of, Position at) {
      const int lane = source.lane_;
      const auto own = static_cast<unsigned long long>(reinterpret_cast<uint64_t>(of.kpe));
      const uint32_t to = source.rope_tile(at) + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
#pragma unroll
      for (int i = 0; i < kWarpRows / 4; ++i) {
        const uint64_t row = __shfl_sync(0xffffffffu, own, 4 * i + lane / 8);
        ptx::cp_async_16((to ^ i % 2 * 64) + i * 512, reinterpret_cast<const unsigned char*>(row) + lane % 8 * 16);
      }
      ptx::cp_async_arrive(source.cta_.kpe_ring().full(at.stage()));
    }
    QUIRE_DEVICE void widen(const MlaSource&, Position) const {}
  };
  struct NarrowRope {
    using RopeRows = Rows<Cta::kKpe / 16>;
    RopeRows rows;

    QUIRE_DEVICE NarrowRope(const MlaSource& source, const Row& of, Position) {
      rows.load(typename RopeRows::Source(of.kpe, source.lane_), 0);
    }
    QUIRE_DEVICE void widen(const MlaSource& source, Position at) const {
      const float none[RopeRows::kSteps] = {};
      rows.template widen<false>(source.rope_tile(at), source.lane_, none);
      source.arrive(source.cta_.kpe_ring().full(at.stage()));
    }
  };
  using Rope = typename conditional<kScaled, WideRope, NarrowRope>::type;

  int lane_, warp_;
  uint32_t at_warp_;  // this warp's rows of the first tile
};

}  // namespace quire

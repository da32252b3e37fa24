// The multiply-adds of an indirect convolution: register tiles over positions that are read where they lie,
// compiled once per SIMD target.
//
//   sums[rows[p] * sums_stride + o] (+)= bias[o] + sum over r and c of x[r][p][c] * weights[r][c][o]
// Lanes are output channels. NEON loads four channels of a position and multiplies by lane: a tile of 5
// positions and 16 outputs has 21 loads for 80 multiply-adds. x86 broadcasts each from memory.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/indirect_tile.cc"
#include <hwy/foreach_target.h>
//
#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/vectors-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu::HWY_NAMESPACE {
constexpr int indirect_lanes = static_cast<int>(hn::MaxLanes(D()));

// Accumulators, a vector for each position and one of weights fit 32 registers, or 16 on AVX2. Neoverse-V1,
// four vectors and 4, 5 or 6 positions: 73, 77 and 69 GFLOP/s of a peak of 83; three and 5, 6 or 7: 69, 66
// and 61.
#if HWY_TARGET == HWY_AVX2
constexpr int indirect_vectors = 2;
constexpr int indirect_positions(int vectors) { return vectors == 1 ? 8 : 6; }
#elif HWY_TARGET == HWY_AVX3
constexpr int indirect_vectors = 2;
constexpr int indirect_positions(int vectors) { return vectors == 1 ? 10 : 8; }
#else
constexpr int indirect_vectors = 4;
constexpr int indirect_positions(int vectors) { return vectors == 1 ? 10 : vectors == 2 ? 7 : 5; }
#endif

// acc[p][v] += x[p] * w[v] for one channel.
template <int kVectors, int kPositions>
HWY_INLINE void multiply_add_channel(V (&acc)[kPositions][kVectors], const float* const (&x)[kPositions],
                                     int64_t channel, const float* HWY_RESTRICT weights) {
  const D d;
  V w[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = hn::LoadU(d, weights + v * indirect_lanes);
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    const V value = hn::Set(d, x[p][channel]);
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[p][v] = hn::MulAdd(w[v], value, acc[p][v]);
  }
}

#if HWY_ARCH_ARM
// The same for lane kLane of the positions' vectors.
template <int kLane, int kVectors, int kPositions>
HWY_INLINE void multiply_add_lane(V (&acc)[kPositions][kVectors], const V (&x)[kPositions],
                                  const float* HWY_RESTRICT weights) {
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    const V w = hn::LoadU(D(), weights + v * indirect_lanes);
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
      acc[p][v] = hn::MulAdd(w, hn::Broadcast<kLane>(x[p]), acc[p][v]);
    }
  }
}
#endif

// All channels of a run.
template <int kVectors, int kPositions>
HWY_INLINE void multiply_add_run(V (&acc)[kPositions][kVectors], const float* const (&x)[kPositions],
                                 int64_t channels, const float* HWY_RESTRICT weights) {
  constexpr int width = kVectors * indirect_lanes;
  int64_t c = 0;
#if HWY_ARCH_ARM
  const D d;
  for (; c + indirect_lanes <= channels; c += indirect_lanes, weights += indirect_lanes * width) {
    V values[kPositions];
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) values[p] = hn::LoadU(d, x[p] + c);
    multiply_add_lane<0>(acc, values, weights);
    multiply_add_lane<1>(acc, values, weights + width);
    multiply_add_lane<2>(acc, values, weights + 2 * width);
    multiply_add_lane<3>(acc, values, weights + 3 * width);
  }
#endif
  for (; c < channels; ++c, weights += width) multiply_add_channel(acc, x, c, weights);
}

template <int kVectors, int kPositions>
HWY_INLINE void indirect_tile_at(const IndirectTileArguments& t, int64_t position) {
  const D d;
  V acc[kPositions][kVectors];
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[p][v] = hn::Zero(d);
  }
  const float* const* pointers = t.x + position;
  const float* weights = t.weights;
  for (int64_t run = 0; run < t.runs; ++run) {
    const float* x[kPositions];
    bool meets = t.zeros == nullptr;
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
      const bool inside = pointers[p] != t.zeros;
      x[p] = pointers[p] + (inside ? t.x_shift : 0);
      meets |= inside;
    }
    if (meets) multiply_add_run<kVectors, kPositions>(acc, x, t.channels, weights);
    pointers += t.x_stride;
    weights += t.channels * kVectors * indirect_lanes;
  }
  V bias[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) bias[v] = hn::LoadU(d, t.bias + v * indirect_lanes);
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    float* HWY_RESTRICT to = t.sums + t.rows[position + p] * t.sums_stride;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V old = t.add ? hn::LoadU(d, to + v * indirect_lanes) : bias[v];
      hn::StoreU(hn::Add(acc[p][v], old), d, to + v * indirect_lanes);
    }
  }
}

// `count` tiles side by side from position `first` on.
template <int kVectors, int kPositions>
HWY_NOINLINE void indirect_tiles_of(const IndirectTileArguments& arguments, int64_t first, int64_t count) {
  const IndirectTileArguments t = arguments;
  for (int64_t i = 0; i < count; ++i) indirect_tile_at<kVectors, kPositions>(t, first + i * kPositions);
}

// Runs `count` tiles of exactly `positions` positions.
template <int kVectors, int kPositions = indirect_positions(kVectors)>
HWY_INLINE void indirect_tiles(const IndirectTileArguments& t, int64_t positions, int64_t first,
                               int64_t count) {
  if (positions == kPositions) return indirect_tiles_of<kVectors, kPositions>(t, first, count);
  if constexpr (kPositions > 1) indirect_tiles<kVectors, kPositions - 1>(t, positions, first, count);
}

// Positions are split evenly over tiles: 29 as 6+6+6+6+5.
template <int kVectors = indirect_vectors>
void indirect_tile_vectors(const IndirectTileArguments& t) {
  if (t.vectors == kVectors) {
    constexpr int64_t most = indirect_positions(kVectors);
    const int64_t tiles = (t.positions + most - 1) / most;
    const int64_t small = t.positions / tiles;
    const int64_t large_count = t.positions % tiles;
    if (large_count > 0) indirect_tiles<kVectors>(t, small + 1, 0, large_count);
    indirect_tiles<kVectors>(t, small, large_count * (small + 1), tiles - large_count);
  } else if constexpr (kVectors > 1) {
    indirect_tile_vectors<kVectors - 1>(t);
  }
}

void indirect_tile(const IndirectTileArguments& t) {
  if (t.positions > 0) indirect_tile_vectors(t);
}

void fill_indirect_tile(Isa& isa) { isa.indirect_tile = &indirect_tile; }

}  // namespace onepass::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

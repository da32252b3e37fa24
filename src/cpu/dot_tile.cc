// The multiply-adds of a convolution with lanes along the terms of a sum, compiled once per SIMD target.
//
//   sums[p * sums_stride + o] (+)= bias[o] + sum over t of x[p * x_stride + t] * weights[o * weight_stride +
//   t]
// Weights are read as they lie in memory, so nothing is packed. A tile is a few positions times four
// channels: with six positions 24 multiply-adds take 10 loads. A sum has the same order of additions in every
// tile.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dot_tile.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/vectors-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
constexpr int dot_lanes = static_cast<int>(hn::MaxLanes(D()));
constexpr int dot_channels = 4;
// Accumulators, a vector of weights and one for each position fit 32 registers, or 16 on AVX2.
#if HWY_TARGET == HWY_AVX2
constexpr int dot_positions = 2;
#else
constexpr int dot_positions = 6;
#endif
// Channels whose weights stay in L1 while all positions pass.
constexpr int64_t dot_block_channels = 8;

template <int kChannels, int kPositions>
HWY_INLINE void multiply_add(V (&acc)[kPositions][kChannels], const V (&x)[kPositions],
                             const V (&w)[kChannels]) {
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) acc[p][c] = hn::MulAdd(x[p], w[c], acc[p][c]);
  }
}

// The first `count` floats, then zeros.
HWY_INLINE V load_first(const float* from, int64_t count) {
  HWY_ALIGN float buffer[dot_lanes] = {};
  std::copy_n(from, count, buffer);
  return hn::Load(D(), buffer);
}

// The sums of the lanes of each accumulator.
template <int kChannels>
HWY_INLINE void add_lanes(const V (&acc)[kChannels], float* to) {
#if HWY_ARCH_ARM_A64
  if constexpr (kChannels == 4) {
    const float32x4_t low = vpaddq_f32(acc[0].raw, acc[1].raw);
    const float32x4_t high = vpaddq_f32(acc[2].raw, acc[3].raw);
    vst1q_f32(to, vpaddq_f32(low, high));
    return;
  }
#endif
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) to[c] = hn::GetLane(hn::SumOfLanes(D(), acc[c]));
}

template <int kChannels, int kPositions>
HWY_NOINLINE void dot_tile_at(const DotTileArguments& t, int64_t position, int64_t channel) {
  const D d;
  V acc[kPositions][kChannels];
  const float* x[kPositions];
  const float* w[kChannels];
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    x[p] = t.x + (position + p) * t.x_stride;
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) acc[p][c] = hn::Zero(d);
  }
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) w[c] = t.weights + (channel + c) * t.weight_stride;
  int64_t term = 0;
  for (; term + dot_lanes <= t.terms; term += dot_lanes) {
    V pixels[kPositions];
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) pixels[p] = hn::LoadU(d, x[p] + term);
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
      const V weight = hn::LoadU(d, w[c] + term);
      ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) acc[p][c] =
          hn::MulAdd(pixels[p], weight, acc[p][c]);
    }
  }
  if (term < t.terms) {  // what lies behind the terms is never multiplied: it may be infinite
    const int64_t left = t.terms - term;
    V pixels[kPositions];
    V weights[kChannels];
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) pixels[p] = load_first(x[p] + term, left);
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) weights[c] = load_first(w[c] + term, left);
    multiply_add<kChannels, kPositions>(acc, pixels, weights);
  }
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    float sums[kChannels];
    add_lanes<kChannels>(acc[p], sums);
    float* to = t.sums + (position + p) * t.sums_stride + channel;
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
      to[c] = sums[c] + (t.add ? to[c] : t.bias[channel + c]);
    }
  }
}

template <int kChannels, int kPositions = dot_positions>
void dot_tiles(const DotTileArguments& t, int64_t positions, int64_t position, int64_t channel) {
  if (positions == kPositions) return dot_tile_at<kChannels, kPositions>(t, position, channel);
  if constexpr (kPositions > 1) dot_tiles<kChannels, kPositions - 1>(t, positions, position, channel);
}

// Positions are split evenly over tiles: 7 as 4 + 3.
void dot_tile(const DotTileArguments& t) {
  const int64_t tiles = (t.positions + dot_positions - 1) / dot_positions;
  const int64_t small = t.positions / tiles;
  const int64_t large_count = t.positions % tiles;
  for (int64_t block = 0; block < t.channels; block += dot_block_channels) {
    const int64_t end = std::min(t.channels, block + dot_block_channels);
    int64_t position = 0;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t count = small + (i < large_count ? 1 : 0);
      int64_t c = block;
      for (; c + dot_channels <= end; c += dot_channels) dot_tiles<dot_channels>(t, count, position, c);
      for (; c < end; ++c) dot_tiles<1>(t, count, position, c);
      position += count;
    }
  }
}

void fill_dot_tile(Isa& isa) { isa.dot_tile = &dot_tile; }

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

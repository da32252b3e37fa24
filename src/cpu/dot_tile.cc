// The multiply-adds of a convolution with lanes along the terms of a sum, compiled once per SIMD target.
//
//   sums[p * sums_stride + o] (+)= bias[o] + sum over t of x[p * x_stride + t] * weights[o * weight_stride +
//   t]
// Weights are read as they lie in memory, so nothing is packed. A tile is a few positions times four
// channels: with six positions 24 multiply-adds take 10 loads. A sum has the same order of additions in every
// tile. dot_runs does the same with a pointer for each position and several runs of terms.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dot_tile.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
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

#if !HWY_ARCH_ARM_A64
// Lane c of a block of four: the sum of the block's lanes of acc[c].
HWY_INLINE V block_sums(V a, V b, V c, V d) {
  const D floats;
  const hn::Repartition<double, D> pairs;
  const V ab = hn::Add(hn::InterleaveLower(floats, a, b), hn::InterleaveUpper(floats, a, b));
  const V cd = hn::Add(hn::InterleaveLower(floats, c, d), hn::InterleaveUpper(floats, c, d));
  const auto first = hn::BitCast(pairs, ab);
  const auto second = hn::BitCast(pairs, cd);
  return hn::Add(hn::BitCast(floats, hn::InterleaveLower(pairs, first, second)),
                 hn::BitCast(floats, hn::InterleaveUpper(pairs, first, second)));
}

// Halves of vectors until a block of four is left.
template <class Vector>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> sum_of_blocks(Vector v) {
  const hn::DFromV<Vector> d;
  if constexpr (hn::MaxLanes(d) == 4) {
    return v;
  } else {
    const hn::Half<decltype(d)> half;
    return sum_of_blocks(hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

// The sums of the lanes of each accumulator. Those of four take 13 instructions together on AVX-512, one by
// one about 40: conv1d(8,256,k=1) | group_norm(16) | mean @ 32x8x147 2.2 ms, one by one 7.5.
template <int kChannels>
HWY_INLINE void add_lanes(const V (&acc)[kChannels], float* to) {
  static_assert(kChannels == 1 || kChannels == dot_channels);
  const V& a = acc[0];
  const V& b = acc[kChannels > 1 ? 1 : 0];
  const V& c = acc[kChannels > 1 ? 2 : 0];
  const V& d = acc[kChannels > 1 ? 3 : 0];
#if HWY_ARCH_ARM_A64
  const float32x4_t sums = vpaddq_f32(vpaddq_f32(a.raw, b.raw), vpaddq_f32(c.raw, d.raw));
  if constexpr (kChannels == 1) {
    to[0] = vgetq_lane_f32(sums, 0);
  } else {
    vst1q_f32(to, sums);
  }
#else
  const hn::FixedTag<float, 4> block;
  const auto sums = sum_of_blocks(block_sums(a, b, c, d));
  if constexpr (kChannels == 1) {
    to[0] = hn::GetLane(sums);
  } else {
    hn::StoreU(sums, block, to);
  }
#endif
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
  for (; term + lanes <= t.terms; term += lanes) {
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
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) pixels[p] = load_some(x[p] + term, left);
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) weights[c] = load_some(w[c] + term, left);
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

// One to four channels: sums of lanes are added as those of four.
template <int kChannels, int kPositions>
HWY_NOINLINE void dot_runs_at(const DotRunArguments& t, int64_t position, int64_t channel) {
  const D d;
  V acc[kPositions][kChannels];
  const float* x[kPositions];
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    x[p] = t.x[position + p];
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) acc[p][c] = hn::Zero(d);
  }
  const float* const weights = t.weights + channel * t.weight_stride;
  for (const DotRun* run = t.runs; run != t.runs + t.run_count; ++run) {
    const float* w[kChannels];
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) w[c] = weights + c * t.weight_stride + run->weight;
    int64_t term = 0;
    for (; term + lanes <= run->terms; term += lanes) {
      V pixels[kPositions];
      ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) pixels[p] = hn::LoadU(d, x[p] + run->x + term);
      ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
        const V weight = hn::LoadU(d, w[c] + term);
        ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) acc[p][c] =
            hn::MulAdd(pixels[p], weight, acc[p][c]);
      }
    }
    if (term == run->terms) continue;
    const int64_t left = run->terms - term;  // what lies behind them may be infinite
    V pixels[kPositions];
    V last[kChannels];
    ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) pixels[p] = load_some(x[p] + run->x + term, left);
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) last[c] = load_some(w[c] + term, left);
    multiply_add<kChannels, kPositions>(acc, pixels, last);
  }
  ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
    float sums[dot_channels];
    if constexpr (kChannels == 1) {
      add_lanes<1>(acc[p], sums);
    } else {
      V four[dot_channels];
      ONEPASS_UNROLL for (int c = 0; c < dot_channels; ++c) four[c] = acc[p][std::min(c, kChannels - 1)];
      add_lanes<dot_channels>(four, sums);
    }
    float* to = t.sums + t.rows[position + p] * t.sums_stride + channel;
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
      to[c] = sums[c] + (t.add ? to[c] : t.bias[channel + c]);
    }
  }
}

template <int kChannels, int kPositions = dot_positions>
void dot_runs_of(const DotRunArguments& t, int64_t positions, int64_t position, int64_t channel) {
  if (positions == kPositions) return dot_runs_at<kChannels, kPositions>(t, position, channel);
  if constexpr (kPositions > 1) dot_runs_of<kChannels, kPositions - 1>(t, positions, position, channel);
}

template <int kChannels = dot_channels>
void dot_runs_of_channels(const DotRunArguments& t, int64_t channels, int64_t channel, int64_t positions,
                          int64_t position) {
  if (channels == kChannels) return dot_runs_of<kChannels>(t, positions, position, channel);
  if constexpr (kChannels > 1) dot_runs_of_channels<kChannels - 1>(t, channels, channel, positions, position);
}

// Channels and positions are split evenly over tiles: 6 channels as 3 + 3.
void dot_runs(const DotRunArguments& t) {
  if (t.positions == 0) return;
  constexpr int64_t block_tiles = dot_block_channels / dot_channels;
  const int64_t channel_tiles = (t.channels + dot_channels - 1) / dot_channels;
  const int64_t position_tiles = (t.positions + dot_positions - 1) / dot_positions;
  const auto part = [](int64_t size, int64_t count, int64_t i) { return size / count + (i < size % count); };
  int64_t first = 0;  // channel of the block
  for (int64_t block = 0; block < channel_tiles; block += block_tiles) {
    const int64_t end = std::min(channel_tiles, block + block_tiles);
    int64_t position = 0, channel = first;
    for (int64_t i = 0; i < position_tiles; ++i) {
      const int64_t positions = part(t.positions, position_tiles, i);
      channel = first;
      for (int64_t tile = block; tile < end; ++tile) {
        const int64_t channels = part(t.channels, channel_tiles, tile);
        dot_runs_of_channels(t, channels, channel, positions, position);
        channel += channels;
      }
      position += positions;
    }
    first = channel;
  }
}

void fill_dot_tile(Isa& isa) {
  isa.dot_tile = &dot_tile;
  isa.dot_runs = &dot_runs;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

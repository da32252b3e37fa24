// The multiply-adds of a convolution: register tiles over staged input rows, compiled once per SIMD target.
//
// Channel tile: lanes are output channels, a tile is `vectors` vectors x `pixels` pixels, and a term costs
// `vectors` weight loads and one load per lane group of pixels. Any pixel count up to the tile's fits without
// waste, so a row of 29 pixels runs as 6+6+6+6+5. NEON multiplies by a lane of the loaded pixels (Broadcast
// folds into the instruction), x86 by a broadcast load.
// Pixel tile: lanes are pixels, for depthwise and other convolutions with a handful of output channels.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/convolution.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/isa.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int lanes = static_cast<int>(hn::MaxLanes(D()));

// Registers decide the tile: accumulators + weights + pixels must stay below 32 (NEON, AVX-512) or 16 (AVX2).
#if HWY_TARGET == HWY_AVX2
constexpr int max_vectors = 2;
constexpr int tile_pixels(int vectors) { return vectors == 1 ? 12 : 6; }
#elif HWY_TARGET == HWY_AVX3
constexpr int max_vectors = 2;
constexpr int tile_pixels(int vectors) { return vectors == 1 ? 14 : 12; }
#else
constexpr int max_vectors = 4;
constexpr int tile_pixels(int vectors) { return vectors == 1 ? 16 : 24 / vectors; }
#endif

// acc[p][v] += x[p] * w[v] for one term.
#if HWY_ARCH_ARM
// Pixels stay in vectors and are multiplied by lane; each vector of weights is loaded just before its use.
template <int kVectors, int kPixels, int kPixel = 0>
HWY_INLINE void multiply_add_lanes(V (&acc)[kPixels][kVectors], int v, V w, const V* pixels) {
  acc[kPixel][v] = hn::MulAdd(w, hn::Broadcast<kPixel % lanes>(pixels[kPixel / lanes]), acc[kPixel][v]);
  if constexpr (kPixel + 1 < kPixels) multiply_add_lanes<kVectors, kPixels, kPixel + 1>(acc, v, w, pixels);
}

template <int kVectors, int kPixels>
HWY_INLINE void multiply_add(V (&acc)[kPixels][kVectors], const float* HWY_RESTRICT x,
                             const float* HWY_RESTRICT weights) {
  const D d;
  constexpr int pixel_vectors = (kPixels + lanes - 1) / lanes;
  V pixels[pixel_vectors];
  ONEPASS_UNROLL for (int i = 0; i < pixel_vectors; ++i) pixels[i] = hn::LoadU(d, x + i * lanes);
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    multiply_add_lanes<kVectors, kPixels>(acc, v, hn::LoadU(d, weights + v * lanes), pixels);
  }
}
#else
// Weights stay in registers and each pixel is broadcast from memory.
template <int kVectors, int kPixels>
HWY_INLINE void multiply_add(V (&acc)[kPixels][kVectors], const float* HWY_RESTRICT x,
                             const float* HWY_RESTRICT weights) {
  const D d;
  V w[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = hn::LoadU(d, weights + v * lanes);
  ONEPASS_UNROLL for (int p = 0; p < kPixels; ++p) {
    const V pixel = hn::Set(d, x[p]);
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[p][v] = hn::MulAdd(w[v], pixel, acc[p][v]);
  }
}
#endif

// One tile at x. The next term's address is computed a term ahead: multiply-adds that wait for an address
// fill the scheduler, and on Neoverse-V1 that costs 67 instead of 75 of a peak of 83 GFLOP/s. So offsets has
// an entry behind the last.
template <int kVectors, int kPixels>
HWY_INLINE void channel_tile_at(const ChannelTileArguments& t, const float* HWY_RESTRICT x,
                                float* HWY_RESTRICT out) {
  const D d;
  V acc[kPixels][kVectors];
  ONEPASS_UNROLL for (int p = 0; p < kPixels; ++p) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[p][v] = hn::Zero(d);
  }
  const float* HWY_RESTRICT weights = t.weights;
  const int32_t* HWY_RESTRICT offset = t.offsets;
  const int32_t* const end = offset + t.terms;
  const float* at = x + *offset;
  while (offset != end) {
    const float* HWY_RESTRICT pixels = at;
    at = x + *++offset;
    multiply_add<kVectors, kPixels>(acc, pixels, weights);
    weights += kVectors * lanes;
  }
  ONEPASS_UNROLL for (int p = 0; p < kPixels; ++p) {
    float* HWY_RESTRICT to = out + p * t.pixel_stride;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V old = t.add ? hn::LoadU(d, to + v * lanes) : hn::Zero(d);
      hn::StoreU(hn::Add(acc[p][v], old), d, to + v * lanes);
    }
  }
}

// `count` tiles side by side from pixel `first` on: one call for all of them, a convolution of few terms
// feels it.
template <int kVectors, int kPixels>
HWY_NOINLINE void channel_tiles_of(const ChannelTileArguments& arguments, int64_t first, int64_t count) {
  const ChannelTileArguments t = arguments;
  const float* x = t.x + first;
  float* out = t.acc + first * t.pixel_stride;
  for (int64_t i = 0; i < count; ++i, x += kPixels, out += kPixels * t.pixel_stride) {
    channel_tile_at<kVectors, kPixels>(t, x, out);
  }
}

// Runs `count` tiles of exactly `pixels` pixels.
template <int kVectors, int kPixels = tile_pixels(kVectors)>
HWY_INLINE void channel_tiles(const ChannelTileArguments& t, int64_t pixels, int64_t first, int64_t count) {
  if (pixels == kPixels) return channel_tiles_of<kVectors, kPixels>(t, first, count);
  if constexpr (kPixels > 1) channel_tiles<kVectors, kPixels - 1>(t, pixels, first, count);
}

// Splits the row evenly over tiles: 29 pixels as 6+6+6+6+5, never as four full tiles and a thin one.
template <int kVectors>
void channel_tile_row(const ChannelTileArguments& t) {
  const int64_t tiles = (t.pixels + tile_pixels(kVectors) - 1) / tile_pixels(kVectors);
  const int64_t small = t.pixels / tiles;
  const int64_t large_count = t.pixels % tiles;
  channel_tiles<kVectors>(t, small + 1, 0, large_count);
  channel_tiles<kVectors>(t, small, large_count * (small + 1), tiles - large_count);
}

template <int kVectors = max_vectors>
void channel_tile_vectors(const ChannelTileArguments& t) {
  if (t.vectors == kVectors) return channel_tile_row<kVectors>(t);
  if constexpr (kVectors > 1) channel_tile_vectors<kVectors - 1>(t);
}

void channel_tile(const ChannelTileArguments& t) { channel_tile_vectors(t); }

// kChannels output channels x kVectors vectors of pixels at x, written to `out` with kVectors * lanes floats
// a channel: the caller moves the valid ones to where they belong.
template <int kChannels, int kVectors>
HWY_NOINLINE void pixel_tile_of(const PixelTileArguments& t, const float* HWY_RESTRICT x,
                                float* HWY_RESTRICT out) {
  const D d;
  V acc[kChannels][kVectors];
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[c][v] = hn::Zero(d);
  }
  const float* HWY_RESTRICT weights = t.weights;
  for (int64_t i = 0; i < t.terms; ++i, weights += kChannels) {
    V pixels[kVectors];
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) pixels[v] = hn::LoadU(d, x + t.offsets[i] + v * lanes);
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
      const V w = hn::Set(d, weights[c]);
      ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[c][v] = hn::MulAdd(w, pixels[v], acc[c][v]);
    }
  }
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(acc[c][v], d, out + (c * kVectors + v) * lanes);
    }
  }
}

constexpr int pixel_tile_vectors(int channels) { return channels == 1 ? 6 : channels == 2 ? 4 : 3; }

// Moves `count` finished sums of one channel to their place.
HWY_INLINE void place_pixels(const float* HWY_RESTRICT from, int64_t count, float* HWY_RESTRICT to,
                             int64_t stride, bool add) {
  if (stride == 1) {
    for (int64_t p = 0; p < count; ++p) to[p] = add ? to[p] + from[p] : from[p];
  } else {
    for (int64_t p = 0; p < count; ++p) to[p * stride] = add ? to[p * stride] + from[p] : from[p];
  }
}

template <int kChannels, int kVectors>
HWY_INLINE void pixel_tile_step(const PixelTileArguments& t, int64_t first, int64_t count) {
  HWY_ALIGN float sums[kChannels * kVectors * lanes];
  pixel_tile_of<kChannels, kVectors>(t, t.x + first, sums);
  for (int c = 0; c < kChannels; ++c) {
    place_pixels(sums + c * kVectors * lanes, count, t.acc + c * t.channel_stride + first * t.pixel_stride,
                 t.pixel_stride, t.add);
  }
}

template <int kChannels>
void pixel_tile_row(const PixelTileArguments& t) {
  constexpr int wide = pixel_tile_vectors(kChannels);
  int64_t p = 0;
  for (; t.pixels - p >= wide * lanes; p += wide * lanes)
    pixel_tile_step<kChannels, wide>(t, p, wide * lanes);
  for (; p < t.pixels; p += lanes) {
    pixel_tile_step<kChannels, 1>(t, p, std::min<int64_t>(lanes, t.pixels - p));
  }
}

template <int kChannels = max_pixel_tile_channels>
void pixel_tile_channels(const PixelTileArguments& t) {
  if (t.channels == kChannels) return pixel_tile_row<kChannels>(t);
  if constexpr (kChannels > 1) pixel_tile_channels<kChannels - 1>(t);
}

void pixel_tile(const PixelTileArguments& t) { pixel_tile_channels(t); }

void fill_convolution(Isa& isa) {
  isa.max_tile_vectors = max_vectors;
  isa.tile_pixels = tile_pixels(max_vectors);
  isa.channel_tile = &channel_tile;
  isa.pixel_tile = &pixel_tile;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace onepass::cpu {

void add_convolution_functions(int64_t target, Isa& isa) {
  ONEPASS_FOR_TARGET(target, fill_convolution(isa));
}

}  // namespace onepass::cpu
#endif

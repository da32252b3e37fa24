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
  V bias[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    bias[v] = t.bias == nullptr ? hn::Zero(d) : hn::LoadU(d, t.bias + v * lanes);
  }
  ONEPASS_UNROLL for (int p = 0; p < kPixels; ++p) {
    float* HWY_RESTRICT to = out + p * t.pixel_stride;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V old = t.add ? hn::LoadU(d, to + v * lanes) : bias[v];
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

// Vectors of pixels of each class in a tile: with four channels 16 or 24 accumulators, on AVX2 12 or 8.
#if HWY_TARGET == HWY_AVX2
constexpr int max_pixel_vectors(int classes) { return classes == 1 ? 3 : 1; }
#else
constexpr int max_pixel_vectors(int classes) { return classes == 1 ? 4 : 3; }
#endif

// acc[c][v] += w[c] * x[v] for one term; kFirst: acc is not read, which saves setting it to zero.
template <bool kFirst, int kChannels, int kVectors>
HWY_INLINE void multiply_add_pixels(V (&acc)[kChannels][kVectors], const float* HWY_RESTRICT x,
                                    const float* HWY_RESTRICT weights) {
  const D d;
  V pixels[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) pixels[v] = hn::LoadU(d, x + v * lanes);
  const auto add = [](V& sum, V a, V b) HWY_ATTR { sum = kFirst ? hn::Mul(a, b) : hn::MulAdd(a, b, sum); };
#if HWY_ARCH_ARM
  if constexpr (kChannels == lanes) {
    const V w = hn::LoadU(d, weights);
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      add(acc[0][v], pixels[v], hn::Broadcast<0>(w));
      add(acc[1][v], pixels[v], hn::Broadcast<1>(w));
      add(acc[2][v], pixels[v], hn::Broadcast<2>(w));
      add(acc[3][v], pixels[v], hn::Broadcast<3>(w));
    }
    return;
  }
#endif
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    const V w = hn::Set(d, weights[c]);
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) add(acc[c][v], pixels[v], w);
  }
}

// The sums of one class over kVectors vectors of pixels from `first` on.
template <int kChannels, int kVectors>
HWY_INLINE void pixel_sums(const PixelTerms& t, int64_t first, V (&acc)[kChannels][kVectors]) {
  if (t.terms == 0) {
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
      ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[c][v] = hn::Zero(D());
    }
    return;
  }
  // The next address a term ahead, as in a channel tile.
  const float* const x = t.x + first;
  const float* HWY_RESTRICT weights = t.weights;
  const int32_t* HWY_RESTRICT offset = t.offsets;
  const int32_t* const end = offset + t.terms;
  multiply_add_pixels<true>(acc, x + *offset, weights);
  const float* at = x + *++offset;
  while (offset != end) {
    const float* HWY_RESTRICT pixels = at;
    at = x + *++offset;
    weights += kChannels;
    multiply_add_pixels<false>(acc, pixels, weights);
  }
}

// a0 a1 .., b0 b1 .. become a0 b0 a1 b1 ..
HWY_INLINE void interleave(V& a, V& b) {
  const D d;
  if constexpr (lanes == 4) {
    const V low = hn::InterleaveLower(d, a, b);
    b = hn::InterleaveUpper(d, a, b);
    a = low;
  } else {
    HWY_ALIGN float both[2 * lanes];
    hn::StoreInterleaved2(a, b, d, both);
    a = hn::Load(d, both);
    b = hn::Load(d, both + lanes);
  }
}

// The first `count` of a vector's sums to their place: added to what is there, or finished.
HWY_INLINE void place_pixels(V sums, int64_t count, float* HWY_RESTRICT to, int64_t stride, bool add) {
  const D d;
  if (count >= lanes && stride == 1) {
    if (add) sums = hn::Add(sums, hn::LoadU(d, to));
    hn::StoreU(sums, d, to);
    return;
  }
  HWY_ALIGN float buffer[lanes];
  hn::Store(sums, d, buffer);
  ONEPASS_UNROLL for (int p = 0; p < lanes; ++p) {
    if (p < count) to[p * stride] = add ? to[p * stride] + buffer[p] : buffer[p];
  }
}

// kVectors vectors of each class from pixel `first` of it on; kWhole: all of their pixels exist.
template <int kChannels, int kVectors, int kClasses, bool kWhole>
HWY_INLINE void pixel_tile_at(const PixelTileArguments& t, int64_t row, int64_t first) {
  const D d;
  V acc[kClasses][kChannels][kVectors];
  ONEPASS_UNROLL for (int k = 0; k < kClasses; ++k) {
    pixel_sums(t.terms[k], row * t.x_row_stride + first, acc[k]);
  }
  float* acc_row = t.acc + row * t.acc_row_stride + first * kClasses * t.pixel_stride;
  const int64_t pixels = kWhole ? kVectors * kClasses * lanes : t.pixels - first * kClasses;
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    float* to = acc_row + c * t.channel_stride;
    const V bias = t.add || t.bias == nullptr ? hn::Zero(d) : hn::Set(d, t.bias[c]);
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      V sums = hn::Add(acc[0][c][v], bias);
      if constexpr (kClasses == 1) {
        place_pixels(sums, pixels - v * lanes, to + v * lanes * t.pixel_stride, t.pixel_stride, t.add);
      } else {
        V others = hn::Add(acc[1][c][v], bias);
        interleave(sums, others);
        place_pixels(sums, pixels - 2 * v * lanes, to + 2 * v * lanes, 1, t.add);
        place_pixels(others, pixels - (2 * v + 1) * lanes, to + (2 * v + 1) * lanes, 1, t.add);
      }
    }
  }
}

// `count` tiles of kVectors vectors side by side in each row, from pixel `first` of each class on.
template <int kChannels, int kVectors, int kClasses>
HWY_NOINLINE void pixel_tiles_of(const PixelTileArguments& arguments, int64_t first, int64_t count) {
  const PixelTileArguments t = arguments;
  for (int64_t row = 0; row < t.rows; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = first + i * kVectors * lanes;
      if (t.pixel_stride == 1 && t.pixels >= (at + kVectors * lanes) * kClasses) {
        pixel_tile_at<kChannels, kVectors, kClasses, true>(t, row, at);
      } else {
        pixel_tile_at<kChannels, kVectors, kClasses, false>(t, row, at);
      }
    }
  }
}

// Runs `count` tiles of exactly `vectors` vectors.
template <int kChannels, int kClasses, int kVectors = max_pixel_vectors(kClasses)>
HWY_INLINE void pixel_tiles(const PixelTileArguments& t, int64_t vectors, int64_t first, int64_t count) {
  if (vectors == kVectors) return pixel_tiles_of<kChannels, kVectors, kClasses>(t, first, count);
  if constexpr (kVectors > 1) pixel_tiles<kChannels, kClasses, kVectors - 1>(t, vectors, first, count);
}

// Splits the rows' vectors evenly over tiles, as the rows of channel tiles.
template <int kChannels, int kClasses>
void pixel_tile_rows(const PixelTileArguments& t) {
  const int64_t of_class = (t.pixels + kClasses - 1) / kClasses;
  const int64_t vectors = (of_class + lanes - 1) / lanes;
  constexpr int most = max_pixel_vectors(kClasses);
  const int64_t tiles = (vectors + most - 1) / most;
  const int64_t small = vectors / tiles;
  const int64_t large_count = vectors % tiles;
  pixel_tiles<kChannels, kClasses>(t, small + 1, 0, large_count);
  pixel_tiles<kChannels, kClasses>(t, small, large_count * (small + 1) * lanes, tiles - large_count);
}

template <int kChannels = max_pixel_tile_channels>
void pixel_tile_channels(const PixelTileArguments& t) {
  if (t.channels == kChannels) {
    t.classes == 2 ? pixel_tile_rows<kChannels, 2>(t) : pixel_tile_rows<kChannels, 1>(t);
  } else if constexpr (kChannels > 1) {
    pixel_tile_channels<kChannels - 1>(t);
  }
}

void pixel_tile(const PixelTileArguments& t) { pixel_tile_channels(t); }

void fill_convolution(Isa& isa) {
  isa.max_tile_vectors = max_vectors;
  isa.tile_pixels = tile_pixels(max_vectors);
  isa.pixel_tile_pixels = max_pixel_vectors(1) * lanes;
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

// The multiply-adds of a convolution: register tiles over staged input rows, compiled once per SIMD target.
//
// Channel tile: lanes are output channels, and a tile is `vectors` vectors x `pixels` pixels. A term costs
// `vectors` weight loads and one load per lane group of pixels. Any pixel count up to the tile's fits without
// waste, so a row of 29 pixels runs as 6+6+6+6+5. NEON multiplies by a lane of the loaded pixels (Broadcast
// folds into the instruction), x86 by a broadcast load. Pixel tile: lanes are pixels, for depthwise and other
// convolutions with a handful of output channels.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/convolution.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/vectors-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu::HWY_NAMESPACE {
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
// fill the scheduler. On Neoverse-V1 a tile so runs at 75 instead of 67 of a peak of 83 GFLOP/s. So offsets
// has an entry behind the last.
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

// sums[c][v] += w[c] * x[v] for one vector of pixels, or for all of a tile.
#if HWY_ARCH_ARM
template <int kVectors>
HWY_INLINE void add_products(V (&sums)[lanes][kVectors], int v, V x, V w) {
  sums[0][v] = hn::MulAdd(x, hn::Broadcast<0>(w), sums[0][v]);
  sums[1][v] = hn::MulAdd(x, hn::Broadcast<1>(w), sums[1][v]);
  sums[2][v] = hn::MulAdd(x, hn::Broadcast<2>(w), sums[2][v]);
  sums[3][v] = hn::MulAdd(x, hn::Broadcast<3>(w), sums[3][v]);
}
#endif
template <int kVectors>
HWY_INLINE void add_products(V (&sums)[kVectors], const V (&x)[kVectors], float weight) {
  const V w = hn::Set(D(), weight);
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) sums[v] = hn::MulAdd(x[v], w, sums[v]);
}

// Where a list of terms is. The next address is read a term ahead, as in a channel tile.
struct PixelCursor {
  const float* x;
  const float* weights;
  const int32_t* offset;
  const int32_t* end;
  const float* at;

  HWY_INLINE PixelCursor(const PixelTerms& t, const float* from)
      : x(from), weights(t.weights), offset(t.offsets), end(t.offsets + t.terms), at(from) {
    if (t.terms > 0) at += *offset;
  }
  HWY_INLINE int64_t left() const { return end - offset; }
  HWY_INLINE const float* next() {
    const float* const pixels = at;
    at = x + *++offset;
    return pixels;
  }
};

// `steps` times a term of both classes (kBoth) and one of a single class, whose sums are `one` (kOne). These
// are 36 products of registers that 9 loads fill. On Neoverse-V1 they run at 3.5 a cycle, a class at a time
// at 2.7.
template <bool kBoth, bool kOne, int kChannels, int kVectors>
HWY_INLINE void add_pixel_terms(V (&first)[kChannels][kVectors], V (&second)[kChannels][kVectors],
                                V (&one)[kChannels][kVectors], PixelCursor& both, PixelCursor& single,
                                int64_t steps) {
  const D d;
  for (; steps > 0; --steps) {
    const float* HWY_RESTRICT x = kBoth ? both.next() : nullptr;
    const float* HWY_RESTRICT y = kOne ? single.next() : nullptr;
#if HWY_ARCH_ARM
    if constexpr (kChannels == lanes) {
      const V w0 = kBoth ? hn::LoadU(d, both.weights) : hn::Zero(d);
      const V w1 = kBoth ? hn::LoadU(d, both.weights + lanes) : hn::Zero(d);
      const V w = kOne ? hn::LoadU(d, single.weights) : hn::Zero(d);
      ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
        const V shared = kBoth ? hn::LoadU(d, x + v * lanes) : hn::Zero(d);
        const V alone = kOne ? hn::LoadU(d, y + v * lanes) : hn::Zero(d);
        if constexpr (kBoth) add_products(first, v, shared, w0);
        if constexpr (kBoth) add_products(second, v, shared, w1);
        if constexpr (kOne) add_products(one, v, alone, w);
      }
      if constexpr (kBoth) both.weights += 2 * kChannels;
      if constexpr (kOne) single.weights += kChannels;
      continue;
    }
#endif
    V shared[kVectors];
    V alone[kVectors];
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      if constexpr (kBoth) shared[v] = hn::LoadU(d, x + v * lanes);
      if constexpr (kOne) alone[v] = hn::LoadU(d, y + v * lanes);
    }
    ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
      if constexpr (kBoth) add_products(first[c], shared, both.weights[c]);
      if constexpr (kBoth) add_products(second[c], shared, both.weights[kChannels + c]);
      if constexpr (kOne) add_products(one[c], alone, single.weights[c]);
    }
    if constexpr (kBoth) both.weights += 2 * kChannels;
    if constexpr (kOne) single.weights += kChannels;
  }
}

// Which lists of terms a call has. A kernel of three and a stride of two make as many terms of both classes
// as of one of them. A single loop serves both. The branches of the general case would take a fifth of a tile
// of nine terms.
enum class TermLists : uint8_t { one_class, both_and_first, both_and_second, any };

template <TermLists kLists, int kClasses, int kChannels, int kVectors>
HWY_INLINE void add_pixels(const PixelTileArguments& t, const float* x,
                           V (&sums)[kClasses][kChannels][kVectors]) {
  V(&a)[kChannels][kVectors] = sums[0];
  V(&b)[kChannels][kVectors] = sums[kClasses - 1];
  PixelCursor both(t.lists[0], x);
  if constexpr (kLists == TermLists::one_class) {
    add_pixel_terms<false, true>(a, a, a, both, both, both.left());
  } else if constexpr (kLists == TermLists::both_and_first) {
    PixelCursor first(t.lists[1], x);
    add_pixel_terms<true, true>(a, b, a, both, first, both.left());
  } else if constexpr (kLists == TermLists::both_and_second) {
    PixelCursor second(t.lists[2], x);
    add_pixel_terms<true, true>(a, b, b, both, second, both.left());
  } else {
    PixelCursor first(t.lists[1], x);
    PixelCursor second(t.lists[2], x);
    add_pixel_terms<true, false>(a, b, a, both, first, both.left());
    add_pixel_terms<false, true>(a, b, a, both, first, first.left());
    add_pixel_terms<false, true>(a, b, b, both, second, second.left());
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

// How the sums of a tile are stored. First: all pixels exist, are contiguous and are overwritten. Second: the
// same at the end of a row, where pixels of the last vector may be missing. Third: any other way.
enum class Placing : uint8_t { whole, row_end, any };

// The first `count` of a vector's sums. What lies behind the end of a row is read and written back.
template <Placing kPlacing>
HWY_INLINE void place_pixels(V sums, int64_t count, float* HWY_RESTRICT to, int64_t stride, bool add) {
  const D d;
  if constexpr (kPlacing == Placing::whole) return hn::StoreU(sums, d, to);
  if constexpr (kPlacing == Placing::row_end) {
    if (count <= 0) return;
    const auto exists = hn::FirstN(d, static_cast<size_t>(std::min<int64_t>(count, lanes)));
    return hn::StoreU(hn::IfThenElse(exists, sums, hn::LoadU(d, to)), d, to);
  }
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

// kVectors vectors of each class from pixel `first` of it on.
template <int kChannels, int kVectors, int kClasses, TermLists kLists, Placing kPlacing>
HWY_INLINE void pixel_tile_at(const PixelTileArguments& t, int64_t row, int64_t first) {
  const D d;
  constexpr bool any = kPlacing == Placing::any;
  const bool add = any && t.add;
  V sums[kClasses][kChannels][kVectors];
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    const V bias = add ? hn::Zero(d) : hn::Set(d, t.bias[c]);
    ONEPASS_UNROLL for (int k = 0; k < kClasses; ++k) {
      ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) sums[k][c][v] = bias;
    }
  }
  add_pixels<kLists>(t, t.x + row * t.x_row_stride + first, sums);
  const int64_t pixel_stride = any ? t.pixel_stride : 1;
  float* acc_row = t.acc + row * t.acc_row_stride + first * kClasses * pixel_stride;
  const int64_t pixels = t.pixels - first * kClasses;
  ONEPASS_UNROLL for (int c = 0; c < kChannels; ++c) {
    float* to = acc_row + c * t.channel_stride;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      if constexpr (kClasses == 2) interleave(sums[0][c][v], sums[1][c][v]);
      ONEPASS_UNROLL for (int k = 0; k < kClasses; ++k) {
        const int at = (kClasses * v + k) * lanes;
        if (kPlacing == Placing::row_end && v + 1 < kVectors) {
          place_pixels<Placing::whole>(sums[k][c][v], pixels - at, to + at, 1, add);
        } else {
          place_pixels<kPlacing>(sums[k][c][v], pixels - at, to + at * pixel_stride, pixel_stride, add);
        }
      }
    }
  }
}

// `count` tiles of kVectors vectors side by side in each row, from pixel `first` of each class on.
template <int kChannels, int kVectors, int kClasses, TermLists kLists, Placing kPlacing>
HWY_NOINLINE void pixel_tiles_in_rows(const PixelTileArguments& arguments, int64_t first, int64_t count) {
  const PixelTileArguments t = arguments;
  for (int64_t row = 0; row < t.rows; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      pixel_tile_at<kChannels, kVectors, kClasses, kLists, kPlacing>(t, row, first + i * kVectors * lanes);
    }
  }
}

template <int kChannels, int kVectors, int kClasses, TermLists kLists>
HWY_INLINE void pixel_tiles_over(const PixelTileArguments& t, int64_t first, int64_t count) {
  constexpr int64_t pixels = kVectors * lanes;  // of each class
  if (t.pixel_stride != 1 || t.add) {
    constexpr TermLists any = kClasses == 1 ? TermLists::one_class : TermLists::any;
    return pixel_tiles_in_rows<kChannels, kVectors, kClasses, any, Placing::any>(t, first, count);
  }
  // At most the last tile of a row is not whole.
  const int64_t whole = t.pixels >= (first + count * pixels) * kClasses ? count : count - 1;
  if (whole > 0) {
    pixel_tiles_in_rows<kChannels, kVectors, kClasses, kLists, Placing::whole>(t, first, whole);
  }
  if (whole < count) {
    pixel_tiles_in_rows<kChannels, kVectors, kClasses, kLists, Placing::row_end>(t, first + whole * pixels,
                                                                                 1);
  }
}

template <int kChannels, int kVectors, int kClasses>
HWY_INLINE void pixel_tiles_of(const PixelTileArguments& t, int64_t first, int64_t count) {
  if constexpr (kClasses == 1) {
    return pixel_tiles_over<kChannels, kVectors, kClasses, TermLists::one_class>(t, first, count);
  } else {
    if constexpr (kChannels == max_pixel_tile_channels) {
      const int64_t both = t.lists[0].terms;
      if (t.lists[1].terms == both && t.lists[2].terms == 0) {
        return pixel_tiles_over<kChannels, kVectors, kClasses, TermLists::both_and_first>(t, first, count);
      }
      if (t.lists[1].terms == 0 && t.lists[2].terms == both) {
        return pixel_tiles_over<kChannels, kVectors, kClasses, TermLists::both_and_second>(t, first, count);
      }
    }
    pixel_tiles_over<kChannels, kVectors, kClasses, TermLists::any>(t, first, count);
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

}  // namespace onepass::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

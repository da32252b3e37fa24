// Convolutions in groups of few channels with lanes along channels, compiled once per SIMD target.
//
// A tile is a few neighbouring positions of one or more rows times one or two vectors of channels. Short rows
// are taken together, so that enough sums are in flight. Where neighbouring positions meet neighbouring taps,
// a pixel is loaded once for all taps of a row. A sum has the same order of additions in every tile.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/group_tile.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>

#include "cpu/axis.h"
#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/vectors-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
constexpr int vector_floats = static_cast<int>(hn::MaxLanes(D()));
// Sums of a tile, weights of a row of taps and a pixel fit 32 registers, or 16 on AVX2.
#if HWY_TARGET == HWY_AVX2
constexpr int group_positions = 4;
constexpr int tile_sums = 8;
constexpr int most_held_weights = 6;  // vectors
#else
constexpr int group_positions = 8;
constexpr int tile_sums = 16;
constexpr int most_held_weights = 10;
#endif
constexpr int most_sliding_taps = 7;
constexpr int most_gradient_taps = 5;

// Rows of a tile.
constexpr int tile_rows(int positions, int vectors) { return std::max(1, tile_sums / (positions * vectors)); }

// --------------------------------------------------------------------------------------------- forward

// One vector's step on. GCC would otherwise keep the address of each position in a register of its own, and
// spill them.
HWY_INLINE const float* step_on(const float* at, int64_t stride) {
  at += stride;
  __asm__("" : "+r"(at));
  return at;
}

template <int kRows, int kPositions, int kVectors>
using Sums = V[kRows][kPositions][kVectors];

// The rows of outputs of a tile, from `first` on, that meet one row of taps.
template <int kRows, class Add>
HWY_INLINE void for_rows_met(const GroupTileArguments& t, const GroupTapRow& row, int64_t first,
                             const float* x, Add add) {
  x += std::max<int64_t>(0, first - row.first) * t.row_step;
  ONEPASS_UNROLL for (int r = 0; r < kRows; ++r) {
    if (first + r < row.first || first + r >= row.end) continue;
    add(r, x);
    x += t.row_step;
  }
}

// One row of kTaps taps that lie side by side.
template <int kTaps, int kRows, int kPositions, int kVectors>
HWY_INLINE void add_sliding(const GroupTileArguments& t, const GroupTapRow& row, int64_t first,
                            const float* x, const float* weights, Sums<kRows, kPositions, kVectors>& acc) {
  if constexpr (kTaps * kVectors > most_held_weights) {
    constexpr int kBefore = (kTaps + 1) / 2;
    add_sliding<kBefore, kRows, kPositions, kVectors>(t, row, first, x, weights, acc);
    add_sliding<kTaps - kBefore, kRows, kPositions, kVectors>(t, row, first, x + kBefore * t.x_stride,
                                                              weights + kBefore * t.weight_stride, acc);
  } else {
    const D d;
    V w[kTaps][kVectors];
    ONEPASS_UNROLL for (int k = 0; k < kTaps; ++k) {
      ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) w[k][v] = hn::LoadU(d, weights + v * vector_floats);
      weights = step_on(weights, t.weight_stride);
    }
    for_rows_met<kRows>(t, row, first, x, [&](int r, const float* at) HWY_ATTR {
      ONEPASS_UNROLL for (int i = 0; i < kPositions + kTaps - 1; ++i) {
        ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
          const V pixel = hn::LoadU(d, at + v * vector_floats);
          ONEPASS_UNROLL for (int k = 0; k < kTaps; ++k) {
            if (i - k < 0 || i - k >= kPositions) continue;
            acc[r][i - k][v] = hn::MulAdd(pixel, w[k][v], acc[r][i - k][v]);
          }
        }
        at = step_on(at, t.x_stride);
      }
    });
  }
}

template <int kRows, int kPositions, int kVectors>
HWY_INLINE void add_taps(const GroupTileArguments& t, const GroupTapRow& row, int64_t first, const float* x,
                         const float* weights, Sums<kRows, kPositions, kVectors>& acc) {
  const D d;
  for (int64_t k = 0; k < t.taps; ++k, x += t.tap_stride, weights += t.weight_stride) {
    V w[kVectors];
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = hn::LoadU(d, weights + v * vector_floats);
    for_rows_met<kRows>(t, row, first, x, [&](int r, const float* at) HWY_ATTR {
      ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
        ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[r][p][v] =
            hn::MulAdd(hn::LoadU(d, at + v * vector_floats), w[v], acc[r][p][v]);
        at = step_on(at, t.x_stride);
      }
    });
  }
}

// One tile: outputs of `rows` rows from `first` on.
template <int kTaps, int kVectors, int kPositions>
HWY_INLINE void group_tile_at(const GroupTileArguments& t, int64_t first, int64_t rows, int64_t position,
                              int64_t channel) {
  constexpr int kRows = tile_rows(kPositions, kVectors);
  const D d;
  const int64_t x_offset = t.x_shift + position * t.x_stride + channel;
  const int64_t weight_offset = t.weight_shift + channel;
  int64_t begin = 0;
  do {
    Sums<kRows, kPositions, kVectors> acc;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V start = begin == 0 ? hn::LoadU(d, t.bias + channel + v * vector_floats) : hn::Zero(d);
      ONEPASS_UNROLL for (int r = 0; r < kRows; ++r) {
        ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) acc[r][p][v] = start;
      }
    }
    const int64_t end = std::min(t.row_count, begin + t.rows_of_chain);
    for (int64_t i = begin; i < end; ++i) {
      const GroupTapRow& row = t.rows[i];
      if (first >= row.end || first + rows <= row.first) continue;
      const float* x = row.x + x_offset;
      const float* weights = row.weights + weight_offset;
      if constexpr (kTaps > 0) {
        add_sliding<kTaps, kRows, kPositions, kVectors>(t, row, first, x, weights, acc);
      } else {
        add_taps<kRows, kPositions, kVectors>(t, row, first, x, weights, acc);
      }
    }
    ONEPASS_UNROLL for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      float* to = t.acc + (first + r) * t.acc_row + position * t.acc_stride + channel;
      ONEPASS_UNROLL for (int p = 0; p < kPositions; ++p) {
        ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
          float* at = to + v * vector_floats;
          hn::StoreU(begin == 0 ? acc[r][p][v] : hn::Add(hn::LoadU(d, at), acc[r][p][v]), d, at);
        }
        to = const_cast<float*>(step_on(to, t.acc_stride));
      }
    }
    begin = end;
  } while (begin < t.row_count);
}

// Some tiles beside each other, and all below them. kTaps 0: any number of taps, anywhere.
template <int kTaps, int kVectors, int kPositions>
HWY_NOINLINE void group_tiles_at(const GroupTileArguments& t, int64_t tiles, int64_t position,
                                 int64_t channel) {
  constexpr int64_t rows = tile_rows(kPositions, kVectors);
  for (; tiles > 0; --tiles, position += kPositions) {
    for (int64_t first = 0; first < t.out_rows; first += rows) {
      const int64_t count = std::min(rows, t.out_rows - first);
      group_tile_at<kTaps, kVectors, kPositions>(t, first, count, position, channel);
    }
  }
}

template <int kTaps, int kVectors, int kPositions = group_positions>
void group_tiles(const GroupTileArguments& t, int64_t positions, int64_t tiles, int64_t position,
                 int64_t channel) {
  if (positions == kPositions)
    return group_tiles_at<kTaps, kVectors, kPositions>(t, tiles, position, channel);
  if constexpr (kPositions > 1) {
    group_tiles<kTaps, kVectors, kPositions - 1>(t, positions, tiles, position, channel);
  }
}

// Positions are split evenly over tiles: 9 as 5 + 4.
template <int kTaps>
void group_tile_of(const GroupTileArguments& t) {
  const int64_t tiles = ceil_div(t.pixels, group_positions);
  const int64_t small = t.pixels / tiles;
  const int64_t large = t.pixels % tiles;  // tiles of one position more
  const auto all_positions = [&](auto some_tiles, int64_t c) {
    if (large > 0) some_tiles(t, small + 1, large, 0, c);
    some_tiles(t, small, tiles - large, large * (small + 1), c);
  };
  // The last channels first: where pixels of acc lie close, their last vector reaches into the next pixel.
  int64_t vectors = ceil_div(t.channels, vector_floats);
  if (vectors % 2 != 0) all_positions(group_tiles<kTaps, 1>, --vectors * vector_floats);
  while (vectors > 0) {
    vectors -= 2;
    all_positions(group_tiles<kTaps, 2>, vectors * vector_floats);
  }
}

template <int kTaps = most_sliding_taps>
void group_tile_sliding(const GroupTileArguments& t) {
  if (t.taps == kTaps) return group_tile_of<kTaps>(t);
  if constexpr (kTaps > 2) return group_tile_sliding<kTaps - 1>(t);
  group_tile_of<0>(t);
}

void group_tile(const GroupTileArguments& t) {
  if (t.pixels <= 0) return;
  t.tap_stride == t.x_stride ? group_tile_sliding(t) : group_tile_of<0>(t);
}

// ------------------------------------------------------------------------------------ weight gradients

template <int kTaps, int kVectors>
HWY_NOINLINE void group_gradient_at(const GroupGradientArguments& t, int64_t tap, int64_t channel) {
  const D d;
  V acc[kTaps][kVectors];
  ONEPASS_UNROLL for (int k = 0; k < kTaps; ++k) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) acc[k][v] = hn::Zero(d);
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    const float* coarse = t.coarse + r * t.coarse_row + channel;
    const float* fine = t.fine + r * t.fine_row + tap * t.tap_stride + channel;
    for (int64_t p = 0; p < t.pixels; ++p, coarse += t.coarse_stride, fine += t.fine_stride) {
      ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
        const V gradient = hn::LoadU(d, coarse + v * vector_floats);
        ONEPASS_UNROLL for (int k = 0; k < kTaps; ++k) acc[k][v] =
            hn::MulAdd(hn::LoadU(d, fine + k * t.tap_stride + v * vector_floats), gradient, acc[k][v]);
      }
    }
  }
  ONEPASS_UNROLL for (int k = 0; k < kTaps; ++k) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* to = t.sums + (tap + k) * t.sums_stride + channel + v * vector_floats;
      hn::StoreU(hn::Add(hn::LoadU(d, to), acc[k][v]), d, to);
    }
  }
}

template <int kVectors, int kTaps = most_gradient_taps>
void group_gradient_of(const GroupGradientArguments& t, int64_t taps, int64_t tap, int64_t channel) {
  if (taps == kTaps) return group_gradient_at<kTaps, kVectors>(t, tap, channel);
  if constexpr (kTaps > 1) group_gradient_of<kVectors, kTaps - 1>(t, taps, tap, channel);
}

// Taps are split evenly: 7 as 4 + 3.
void group_gradient(const GroupGradientArguments& t) {
  const int64_t parts = ceil_div(t.taps, most_gradient_taps);
  for (int64_t i = 0; i < parts; ++i) {
    const Range taps = even_part(t.taps, parts, i);
    int64_t c = 0;
    for (; c + 3 * vector_floats < t.channels; c += 4 * vector_floats) {
      group_gradient_of<4>(t, taps.size(), taps.begin, c);
    }
    for (; c < t.channels; c += vector_floats) group_gradient_of<1>(t, taps.size(), taps.begin, c);
  }
}

// ------------------------------------------------------------------------------------ staging

// Where the lanes of a vector find their channels. They may all be in one vector of channels.
struct LaneSources {
  int64_t first = 0;
  bool together = false;
  HWY_ALIGN int32_t index[vector_floats] = {};
};
constexpr int64_t spread_vectors = 16;

void spread_some(const SpreadArguments& t, const LaneSources* sources, int64_t lane, int64_t end) {
  const D d;
  for (int64_t p = 0; p < t.pixels; ++p) {
    const LaneSources* source = sources;
    for (int64_t l = lane; l < end; l += vector_floats, ++source) {
      const float* from = t.from + p * t.from_stride + source->first;
      float* to = t.to + p * t.to_stride + l;
      if (source->together) {
        const auto indices = hn::SetTableIndices(d, source->index);
        for (int64_t i = 0; i < t.group_channels; ++i) {
          const V all = hn::LoadU(d, from + i);
          hn::StoreU(hn::TableLookupLanes(all, indices), d, to + i * t.channel_stride);
        }
        continue;
      }
      const int64_t count = std::min<int64_t>(vector_floats, end - l);
      for (int64_t i = 0; i < t.group_channels; ++i) {
        for (int64_t k = 0; k < count; ++k) to[i * t.channel_stride + k] = from[source->index[k] + i];
      }
    }
  }
}

void spread(const SpreadArguments& t) {
  const auto channel_of = [&](int64_t l) {
    return (t.first_lane + std::min(l, t.lanes - 1)) / t.group_lanes * t.group_channels;
  };
  LaneSources sources[spread_vectors];
  for (int64_t lane = 0; lane < t.lanes; lane += spread_vectors * vector_floats) {
    const int64_t end = std::min(t.lanes, lane + spread_vectors * vector_floats);
    for (int64_t v = 0; lane + v * vector_floats < end; ++v) {
      LaneSources& source = sources[v];
      const int64_t l = lane + v * vector_floats;
      source.first = channel_of(l);
      source.together = channel_of(l + vector_floats - 1) - source.first < vector_floats;
      for (int k = 0; k < vector_floats; ++k) {
        source.index[k] = static_cast<int32_t>(channel_of(l + k) - source.first);
      }
    }
    spread_some(t, sources, lane, end);
  }
}

void fill_group_tile(Isa& isa) {
  isa.group_tile = &group_tile;
  isa.group_tile_pixels = group_positions;
  isa.group_gradient = &group_gradient;
  isa.spread = &spread;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

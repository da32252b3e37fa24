// Running statistics of panels, compiled once per SIMD target: mean, M2 and the largest magnitude.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/statistics.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cmath>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// Weights of the merge of nb new values into na old ones (Chan): the counts are known, so one division each.
struct Merge {
  float toward_new;  // nb / (na + nb)
  float spread;      // na * nb / (na + nb)

  Merge(int64_t na, int64_t nb)
      : toward_new(static_cast<float>(static_cast<double>(nb) / static_cast<double>(na + nb))),
        spread(static_cast<float>(static_cast<double>(na) * static_cast<double>(nb) /
                                  static_cast<double>(na + nb))) {}
};

// Moments of kVectors vectors of channels.
template <int kVectors>
struct Moments {
  V mean[kVectors];
  V m2[kVectors];

  HWY_INLINE Moments() {}  // GCC does not give an implicit one the target's attributes
};

// The vector at `x`: a whole one, or the columns that are left from c on.
template <bool kWhole>
HWY_INLINE V load_columns(const StatisticsArguments& s, const float* x, int64_t c) {
  return kWhole ? hn::LoadU(D(), x) : load_some(x, s.cols - c);
}

// Two passes over the panel, which is in L1: a mean, then the distances from it and their own mean. The
// second mean removes the rounding of the first: a constant slab has variance 0, not its ulp squared.
template <int kVectors, bool kWhole>
HWY_NOINLINE void two_pass_moments(const StatisticsArguments& s, int64_t c, Moments<kVectors>& moments) {
  const D d;
  V* sum = moments.mean;
  V* m2 = moments.m2;
  V rest[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = rest[v] = m2[v] = hn::Zero(d);
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* x = s.src + r * s.stride + c;
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Add(sum[v], load_columns<kWhole>(s, x + v * lanes, c));
  }
  const V per_row = hn::Set(d, 1.0f / static_cast<float>(s.rows));
  for (int v = 0; v < kVectors; ++v) sum[v] = hn::Mul(sum[v], per_row);
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* x = s.src + r * s.stride + c;
    for (int v = 0; v < kVectors; ++v) {
      const V distance = hn::Sub(load_columns<kWhole>(s, x + v * lanes, c), sum[v]);
      rest[v] = hn::Add(rest[v], distance);
      m2[v] = hn::MulAdd(distance, distance, m2[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    // Around an infinite mean there are no distances: it stays as it is.
    const V correction = hn::Mul(rest[v], per_row);
    sum[v] = hn::Add(sum[v], hn::IfThenElseZero(hn::IsFinite(correction), correction));
    m2[v] = hn::NegMulAdd(correction, rest[v], m2[v]);
  }
}

// Rows whose distances are added in one chain, and whose columns are taken together: few streams from memory.
constexpr int64_t block_rows = 8;
constexpr int64_t most_columns = 512;

// Distances from the mean so far, or from that of the first rows, of up to most_columns columns.
struct Distances {
  HWY_ALIGN float around[most_columns];
  HWY_ALIGN float sum[most_columns];
  HWY_ALIGN float squares[most_columns];
};

template <bool kWhole>
HWY_INLINE V first_mean(const StatisticsArguments& s, int64_t c) {
  const D d;
  if (s.pixels_before > 0) return hn::LoadU(d, s.mean + c);
  const auto row = [&](int64_t r) HWY_ATTR { return load_columns<kWhole>(s, s.src + r * s.stride + c, c); };
  if (s.rows < 4) return row(0);
  const V pair = hn::Add(row(0), row(1));
  const V other = hn::Add(row(2), row(3));
  return hn::Mul(hn::Add(pair, other), hn::Set(d, 0.25f));
}

// Rows [begin, end) of kVectors vectors of columns: c is the first in the panel, `at` in the strip.
template <int kVectors, bool kWhole>
HWY_INLINE void add_distances(const StatisticsArguments& s, int64_t c, int64_t at, int64_t begin, int64_t end,
                              Distances& distances) {
  const D d;
  V around[kVectors], sum[kVectors], squares[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    around[v] =
        begin == 0 ? first_mean<kWhole>(s, c + v * lanes) : hn::Load(d, distances.around + at + v * lanes);
    sum[v] = squares[v] = hn::Zero(d);
  }
  const int64_t stride = s.stride;
  const float* x = s.src + begin * stride + c;
  for (int64_t r = begin; r < end; ++r, x += stride) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V distance = hn::Sub(load_columns<kWhole>(s, x + v * lanes, c), around[v]);
      sum[v] = hn::Add(sum[v], distance);
      squares[v] = hn::MulAdd(distance, distance, squares[v]);
    }
  }
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    if (begin == 0) {
      hn::Store(around[v], d, distances.around + at + v * lanes);
    } else {
      sum[v] = hn::Add(sum[v], hn::Load(d, distances.sum + at + v * lanes));
      squares[v] = hn::Add(squares[v], hn::Load(d, distances.squares + at + v * lanes));
    }
    hn::Store(sum[v], d, distances.sum + at + v * lanes);
    hn::Store(squares[v], d, distances.squares + at + v * lanes);
  }
}

// One vector of columns, from its distances. Where its mean lies too far from what they were taken from, two
// passes are made.
template <bool kWhole>
HWY_INLINE void finish_columns(const StatisticsArguments& s, int64_t c, int64_t at, const Merge& merge,
                               const Distances& distances) {
  const D d;
  const V sum = hn::Load(d, distances.sum + at);
  const V squares = hn::Load(d, distances.squares + at);
  const V distance = hn::Mul(sum, hn::Set(d, 1.0f / static_cast<float>(s.rows)));
  V mean = hn::Add(hn::Load(d, distances.around + at), distance);
  V m2 = hn::NegMulAdd(distance, sum, squares);
  if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Ge(m2, hn::Mul(hn::Set(d, least_spread), squares))))) {
    Moments<1> moments;
    two_pass_moments<1, kWhole>(s, c, moments);
    mean = moments.mean[0];
    m2 = moments.m2[0];
  }
  float* mean_at = s.mean + c;
  float* m2_at = s.m2 + c;
  if (s.pixels_before > 0) {
    const V old_mean = hn::LoadU(d, mean_at);
    const V delta = hn::Sub(mean, old_mean);
    const V merged = hn::MulAdd(delta, hn::Set(d, merge.toward_new), old_mean);
    mean = hn::IfThenElse(hn::IsFinite(delta), merged, hn::Add(mean, old_mean));
    const V between = hn::Mul(hn::Mul(delta, delta), hn::Set(d, merge.spread));
    m2 = hn::Add(hn::Add(hn::LoadU(d, m2_at), m2), between);
  }
  hn::StoreU(mean, d, mean_at);
  hn::StoreU(m2, d, m2_at);
}

// Lanes are channels: pixels are rows. Columns [begin, end) are vectors, the last one a part of one where
// kWhole is false.
template <bool kWhole = true>
void column_statistics(const StatisticsArguments& s, int64_t begin, int64_t end, const Merge& merge) {
  Distances distances;
  for (int64_t r = 0; r < s.rows; r += block_rows) {
    const int64_t last = s.rows - r < block_rows ? s.rows : r + block_rows;
    int64_t c = begin;
    if constexpr (kWhole) {
      for (; c + 4 * lanes <= end; c += 4 * lanes) {
        add_distances<4, true>(s, c, c - begin, r, last, distances);
      }
    }
    for (; c < end; c += lanes) add_distances<1, kWhole>(s, c, c - begin, r, last, distances);
  }
  for (int64_t c = begin; c < end; c += lanes) finish_columns<kWhole>(s, c, c - begin, merge, distances);
}

// Without masks a last vector that columns do not fill goes through a copy: memory behind the last column
// belongs to another tensor.
void copied_statistics(const StatisticsArguments& s, int64_t c, const Merge& merge) {
  constexpr int64_t rows_at_once = 64;
  HWY_ALIGN float copy[rows_at_once * lanes] = {};
  const int64_t rest = s.cols - c;
  StatisticsArguments part = s;
  part.src = copy;
  part.stride = lanes;
  part.mean = s.mean + c;
  part.m2 = s.m2 + c;
  if (s.rows <= rows_at_once) {
    for (int64_t r = 0; r < s.rows; ++r) {
      std::memcpy(copy + r * lanes, s.src + r * s.stride + c, static_cast<size_t>(rest) * sizeof(float));
    }
    return column_statistics(part, 0, lanes, merge);
  }
  for (int64_t first = 0; first < s.rows; first += rows_at_once) {
    StatisticsArguments strip = s;
    strip.src = s.src + first * s.stride;
    strip.rows = first + rows_at_once < s.rows ? rows_at_once : s.rows - first;
    strip.pixels_before = s.pixels_before + first;
    copied_statistics(strip, c, Merge(strip.pixels_before, strip.rows));
  }
}

// Adds `rows` values with this mean and M2 to those of a column.
HWY_INLINE void merge_moments(float& mean, float& m2, int64_t rows_before, float more_mean, float more_m2,
                              int64_t rows) {
  const Merge merge(rows_before, rows);
  const float delta = more_mean - mean;
  mean += std::isfinite(delta) ? delta * merge.toward_new : more_mean;
  m2 += more_m2 + delta * delta * merge.spread;
}

// Few columns: rows of several pixels (Fold).
void folded_statistics(const StatisticsArguments& s, const Fold& fold) {
  HWY_ALIGN float means[most_folded + lanes];
  HWY_ALIGN float spreads[most_folded + lanes];
  StatisticsArguments part = s;
  part.cols = part.stride = fold.cols;
  part.rows = s.rows / fold.pixels;
  part.mean = means;
  part.m2 = spreads;
  part.pixels_before = 0;
  column_statistics(part, 0, fold.cols, Merge(0, part.rows));
  for (int64_t c = 0; c < s.cols; ++c) {
    float mean = means[c];
    float m2 = spreads[c];
    for (int64_t i = 1; i < fold.pixels; ++i) {
      merge_moments(mean, m2, i * part.rows, means[i * s.cols + c], spreads[i * s.cols + c], part.rows);
    }
    for (int64_t r = part.rows * fold.pixels; r < s.rows; ++r) {
      merge_moments(mean, m2, r, s.src[r * s.cols + c], 0, 1);
    }
    if (s.pixels_before == 0) {
      s.mean[c] = mean;
      s.m2[c] = m2;
    } else {
      merge_moments(s.mean[c], s.m2[c], s.pixels_before, mean, m2, s.rows);
    }
  }
}

void interleaved_statistics(const StatisticsArguments& s) {
  if (const Fold fold(s.rows, s.cols); fold && s.stride == s.cols) return folded_statistics(s, fold);
  const Merge merge(s.pixels_before, s.rows);
  const int64_t whole = s.cols - s.cols % lanes;
  for (int64_t c = 0; c < whole; c += most_columns) {
    column_statistics(s, c, whole - c < most_columns ? whole : c + most_columns, merge);
  }
  if (whole == s.cols) return;
  if constexpr (has_masked_access) {
    column_statistics<false>(s, whole, whole + lanes, merge);
  } else {
    copied_statistics(s, whole, merge);
  }
}

HWY_INLINE float planar_sum(const float* x, int64_t count) {
  const D d;
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t c = 0;
  for (; c + 4 * lanes <= count; c += 4 * lanes) {
    for (int v = 0; v < 4; ++v) sum[v] = hn::Add(sum[v], hn::LoadU(d, x + c + v * lanes));
  }
  for (; c + lanes <= count; c += lanes) sum[0] = hn::Add(sum[0], hn::LoadU(d, x + c));
  if (c < count) {
    const V rest = count > lanes ? last_lanes(load_last(x, count), count - c) : load_some(x + c, count - c);
    sum[1] = hn::Add(sum[1], rest);
  }
  return lane_sum(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
}

// Lanes are pixels: one channel a row. Sums are taken around 0 where neither the values before nor the panel
// have a mean that outweighs their deviation. That costs one pass at most. Otherwise the first panel of a
// block takes two passes: its mean, then distances from it. Later panels take one pass around the running
// mean. If their own mean is far from it, the distance between the two dominates the merged M2.
void planar_statistics(const StatisticsArguments& s) {
  const Merge merge(s.pixels_before, s.cols);
  const float per_pixel = 1.0f / static_cast<float>(s.cols);
  const bool known = s.sums != nullptr && s.sums->known;
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* x = s.src + r * s.stride;
    const auto merge_with = [&](float mean, float m2) HWY_ATTR {
      if (s.pixels_before == 0) {
        s.mean[r] = mean;
        s.m2[r] = m2;
        return;
      }
      const float delta = mean - s.mean[r];
      s.mean[r] += std::isfinite(delta) ? delta * merge.toward_new : mean;
      s.m2[r] += m2 + delta * delta * merge.spread;
    };
    const bool first_panel = s.pixels_before == 0;
    const auto spread_before = [&]() HWY_ATTR {
      const float of_mean = s.mean[r] * s.mean[r] * static_cast<float>(s.pixels_before);
      return s.m2[r] >= least_spread * (s.m2[r] + of_mean);
    };
    if (first_panel ? known : spread_before()) {
      const RowSums around = known ? *s.sums : planar_distances<false>(x, s.cols);
      const float m2 = around.squares - around.sum * (around.sum * per_pixel);
      if (m2 >= least_spread * around.squares && std::isfinite(m2)) {
        merge_with(around.sum * per_pixel, m2);
        continue;
      }
    }
    if (!first_panel) {
      const RowSums around = planar_distances(x, s.cols, s.mean[r]);
      const float delta = around.sum * per_pixel;
      const float m2 = around.squares - around.sum * delta + delta * delta * merge.spread;
      if (std::isfinite(m2)) {
        s.mean[r] += delta * merge.toward_new;
        s.m2[r] += m2;
        continue;
      }
    }
    const float first = planar_sum(x, s.cols) * per_pixel;
    const RowSums distances = planar_distances(x, s.cols, first);
    const float correction = distances.sum * per_pixel;
    merge_with(std::isfinite(correction) ? first + correction : first,
               distances.squares - distances.sum * correction);
  }
}

// Means of short rows that lie one behind the other, as distances from a centre.
void row_means(const float* x, int64_t rows, int64_t cols, float centre, float* means) {
  const D d;
  const float share = 1.0f / static_cast<float>(cols);
  const V around = hn::Set(d, centre);
  for (int64_t r = 0; r < rows; ++r, x += cols) {
    int64_t c = 0;
    float sum = 0;
    if (cols >= lanes) {
      V sums = hn::Zero(d);
      for (; c + lanes <= cols; c += lanes) sums = hn::Add(sums, hn::Sub(hn::LoadU(d, x + c), around));
      if (c < cols) sums = hn::Add(sums, last_lanes(hn::Sub(load_last(x, cols), around), cols - c));
      sum = lane_sum(sums);
    } else {
      for (; c < cols; ++c) sum += x[c] - centre;
    }
    means[r] = sum * share;
  }
}

// Magnitudes compare as integers, NaN above infinity.
float largest(const float* panel, int64_t stride, int64_t rows, int64_t cols) {
  const D d;
  const hn::RebindToSigned<D> bits;
  const auto magnitude = [&](V x) { return hn::BitCast(bits, hn::Abs(x)); };
  auto most = hn::Zero(bits);
  auto other = most;
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = panel + r * stride;
    int64_t c = 0;
    for (; c + 2 * lanes <= cols; c += 2 * lanes) {
      most = hn::Max(most, magnitude(hn::LoadU(d, x + c)));
      other = hn::Max(other, magnitude(hn::LoadU(d, x + c + lanes)));
    }
    for (; c + lanes <= cols; c += lanes) most = hn::Max(most, magnitude(hn::LoadU(d, x + c)));
    if (c < cols) other = hn::Max(other, magnitude(load_some(x + c, cols - c)));
  }
  return hn::GetLane(hn::BitCast(d, hn::MaxOfLanes(bits, hn::Max(most, other))));
}

void fill_statistics(Isa& isa) {
  isa.statistics[static_cast<int>(Orientation::planar)] = &planar_statistics;
  isa.statistics[static_cast<int>(Orientation::interleaved)] = &interleaved_statistics;
  isa.row_means = &row_means;
  isa.largest = &largest;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

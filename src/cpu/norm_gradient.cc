// The gradient of a norm over interleaved panels, compiled once per SIMD target. Lanes are channels.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/norm_gradient.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// Rows at a time: few streams from memory, and short chains of additions. Coefficients of some columns stay
// in registers for so many rows. Everything is in local variables: what vectors are stored to may alias
// members of an object.
constexpr int64_t block_rows = 16;
constexpr int column_vectors = 4;

// kVectors vectors of columns from c on, rows [begin, end). kWhole: whole vectors; else `count` columns.
template <int kVectors, bool kWhole>
HWY_INLINE void add_norm_sums(const NormGradientArguments& n, int64_t c, int64_t begin, int64_t end,
                              int64_t count) {
  const D d;
  const float* x = n.x + begin * n.x_stride + c;
  const float* g = n.gradient + begin * n.gradient_stride + c;
  const int64_t x_stride = n.x_stride;
  const int64_t g_stride = n.gradient_stride;
  const int64_t rows = end - begin;
  float* sums = n.sums + c;
  float* products = n.products + c;
  V centre[kVectors], inverse[kVectors], sum[kVectors], product[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    centre[v] = hn::LoadU(d, n.centre + c + v * lanes);
    inverse[v] = hn::LoadU(d, n.inverse + c + v * lanes);
    sum[v] = product[v] = hn::Zero(d);
  }
  for (int64_t r = 0; r < rows; ++r, x += x_stride, g += g_stride) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V of_g = kWhole ? hn::LoadU(d, g + v * lanes) : load_some(g, count);
      const V of_x = kWhole ? hn::LoadU(d, x + v * lanes) : load_some(x, count);
      V xhat = hn::Mul(hn::Sub(of_x, centre[v]), inverse[v]);
      // Lanes behind the last column add nothing, whatever their centre is.
      if constexpr (!kWhole) xhat = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(count)), xhat);
      sum[v] = hn::Add(sum[v], of_g);
      product[v] = hn::MulAdd(of_g, xhat, product[v]);
    }
  }
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    if (begin > 0) {
      sum[v] = hn::Add(sum[v], hn::LoadU(d, sums + v * lanes));
      product[v] = hn::Add(product[v], hn::LoadU(d, products + v * lanes));
    }
    hn::StoreU(sum[v], d, sums + v * lanes);
    hn::StoreU(product[v], d, products + v * lanes);
  }
}

// dst = gradient * scale - offset - xhat * slope
template <int kVectors, bool kWhole>
HWY_INLINE void take_norm_back(const NormGradientArguments& n, int64_t c, int64_t begin, int64_t end,
                               int64_t count) {
  const D d;
  const float* x = n.x + begin * n.x_stride + c;
  const float* g = n.gradient + begin * n.gradient_stride + c;
  float* dst = n.dst + begin * n.dst_stride + c;
  const int64_t x_stride = n.x_stride;
  const int64_t g_stride = n.gradient_stride;
  const int64_t dst_stride = n.dst_stride;
  const int64_t rows = end - begin;
  V centre[kVectors], inverse[kVectors], slope[kVectors], scale[kVectors], offset[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    centre[v] = hn::LoadU(d, n.centre + c + v * lanes);
    inverse[v] = hn::LoadU(d, n.inverse + c + v * lanes);
    slope[v] = hn::LoadU(d, n.slope + c + v * lanes);
    scale[v] = hn::LoadU(d, n.scale + c + v * lanes);
    offset[v] = hn::LoadU(d, n.offset + c + v * lanes);
  }
  for (int64_t r = 0; r < rows; ++r, x += x_stride, g += g_stride, dst += dst_stride) {
    V result[kVectors];
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V of_g = kWhole ? hn::LoadU(d, g + v * lanes) : load_some(g, count);
      const V of_x = kWhole ? hn::LoadU(d, x + v * lanes) : load_some(x, count);
      const V xhat = hn::Mul(hn::Sub(of_x, centre[v]), inverse[v]);
      result[v] = hn::MulSub(of_g, scale[v], hn::MulAdd(xhat, slope[v], offset[v]));
    }
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      if constexpr (kWhole) {
        hn::StoreU(result[v], d, dst + v * lanes);
      } else {
        store_some(result[v], dst, count);
      }
    }
  }
}

struct ColumnSums {
  static constexpr bool has_sums = true;
  template <int kVectors, bool kWhole>
  static HWY_INLINE void run(const NormGradientArguments& n, int64_t c, int64_t begin, int64_t end,
                             int64_t count) {
    add_norm_sums<kVectors, kWhole>(n, c, begin, end, count);
  }
};

struct ColumnBack {
  static constexpr bool has_sums = false;
  template <int kVectors, bool kWhole>
  static HWY_INLINE void run(const NormGradientArguments& n, int64_t c, int64_t begin, int64_t end,
                             int64_t count) {
    take_norm_back<kVectors, kWhole>(n, c, begin, end, count);
  }
};

template <class Function>
HWY_INLINE void all_blocks(const NormGradientArguments& n) {
  for (int64_t begin = 0; begin < n.rows; begin += block_rows) {
    const int64_t end = begin + block_rows < n.rows ? begin + block_rows : n.rows;
    int64_t c = 0;
    for (; c + column_vectors * lanes <= n.cols; c += column_vectors * lanes) {
      Function::template run<column_vectors, true>(n, c, begin, end, 0);
    }
    for (; c + lanes <= n.cols; c += lanes) Function::template run<1, true>(n, c, begin, end, 0);
    if (c < n.cols) Function::template run<1, false>(n, c, begin, end, n.cols - c);
  }
}

// Few columns: rows of several pixels (Fold). Pixels that fill no row are one that is shorter.
template <class Function>
void folded_blocks(const NormGradientArguments& arguments, const Fold& fold) {
  HWY_ALIGN float values[5][most_folded];
  HWY_ALIGN float sums[2][most_folded];
  NormGradientArguments n = arguments;
  const int64_t cols = n.cols;
  fold.repeat(n.centre, cols, values[0]);
  fold.repeat(n.inverse, cols, values[1]);
  if constexpr (!Function::has_sums) fold.repeat(n.scale, cols, values[2]);
  if constexpr (!Function::has_sums) fold.repeat(n.offset, cols, values[3]);
  if constexpr (!Function::has_sums) fold.repeat(n.slope, cols, values[4]);
  n.centre = values[0], n.inverse = values[1], n.scale = values[2], n.offset = values[3], n.slope = values[4];
  n.sums = sums[0], n.products = sums[1];
  n.x_stride = n.gradient_stride = n.dst_stride = fold.cols;
  for (const Fold::Part& part : fold.parts(arguments.rows, cols)) {
    n.rows = part.rows;
    n.cols = part.cols;
    n.x = arguments.x + part.begin;
    n.gradient = arguments.gradient + part.begin;
    if constexpr (!Function::has_sums) n.dst = arguments.dst + part.begin;
    all_blocks<Function>(n);
    if constexpr (Function::has_sums) Fold::add(part, sums[0], cols, arguments.sums);
    if constexpr (Function::has_sums) Fold::add(part, sums[1], cols, arguments.products);
  }
}

template <class Function>
void over_blocks(const NormGradientArguments& arguments) {
  const NormGradientArguments n = arguments;
  bool dense = n.x_stride == n.cols && n.gradient_stride == n.cols;
  dense &= Function::has_sums || n.dst_stride == n.cols;
  if (const Fold fold(n.rows, n.cols); fold && dense) return folded_blocks<Function>(n, fold);
  all_blocks<Function>(n);
}

void fill_norm_gradient(Isa& isa) {
  constexpr int interleaved = static_cast<int>(Orientation::interleaved);
  isa.norm_sums[interleaved] = &over_blocks<ColumnSums>;
  isa.norm_gradient[interleaved] = &over_blocks<ColumnBack>;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

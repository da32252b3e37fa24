// Taps along x as rows of a product instead of terms (gemm/mma/row_taps.cuh).
#pragma once

#include <vector>

#include "cuda/thin/thin.h"

namespace onepass::cuda {

// A column q of the product has outputs j * outputs + k, k < outputs. Each is the sum of its taps' rows at
// columns j + shift.
struct RowTaps {
  struct Tap {
    int64_t output = 0;
    int64_t shift = 0;
  };
  std::vector<Tap> taps;  // of an output channel, in the order of the kernel; none: taps are terms
  int64_t outputs = 1;
  int64_t halo = 0;  // the largest shift
  ThinAxis axis;     // of the product: what is left of x; `positions` are columns with outputs

  RowTaps() = default;
  explicit RowTaps(const ThinAxis& x);

  // With more columns before and behind, so that rows of boxes begin and end at whole runs of elements.
  RowTaps aligned(int64_t run) const;
  int64_t count() const { return std::max<int64_t>(1, std::ssize(taps)); }
  // The convolution that the product computes.
  ThinShape product(const ThinShape& shape) const;
  // Members of `struct Numbers`.
  std::string source() const;
};

}  // namespace onepass::cuda

// The parameters of the kernels of the row "narrow_backward".
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// NarrowWeightGradient. u lies at the convolution's outputs, v at its inputs.
ONEPASS_PARAMETERS(NarrowWeightGradientParameters) {
  ONEPASS_WORD(const void*, u);
  ONEPASS_WORD(const void*, v);
  ONEPASS_WORD(float*, parts);       // [part][weight]
  ONEPASS_WORD(float*, bias_parts);  // [part][channel of u]
  ONEPASS_WORD(int64, chunks);       // boxes of all samples
  ONEPASS_WORD(int64, part_chunks);  // boxes of a part
};

// NarrowBiasGradient.
ONEPASS_PARAMETERS(NarrowBiasGradientParameters) {
  ONEPASS_WORD(const void*, gradient);
  ONEPASS_WORD(float*, bias_parts);  // [part][channel]
  ONEPASS_WORD(int64, positions);    // of all samples
};

// NarrowGradientSum.
ONEPASS_PARAMETERS(NarrowGradientSumParameters) {
  ONEPASS_WORD(const void*, u);
  ONEPASS_WORD(const void*, v);
  ONEPASS_WORD(const float*, parts);
  ONEPASS_WORD(const float*, bias_parts);
  ONEPASS_WORD(void*, weight);
  ONEPASS_WORD(void*, bias);
  ONEPASS_WORD(int64, splits);       // parts of the weights
  ONEPASS_WORD(int64, bias_splits);  // and of the bias
  ONEPASS_WORD(int64, positions);    // of u, of all samples
};

}  // namespace onepass

// The parameters of the kernels of the row "gemm_backward".
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// The launches that pack a tensor: a look at some elements, all elements, all of them again if they did not
// fit.
enum GemmPackPass { pack_probe, pack_all, pack_again };

// GemmPackTensor.
ONEPASS_PARAMETERS(GemmPackTensorParameters) {
  ONEPASS_WORD(const void*, tensor);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(uint32*, largest);  // two words, zero before the first launch
  ONEPASS_WORD(float*, sums);      // [channel][part of the positions], for dbias
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, length);  // positions of eight packed channels
  ONEPASS_WORD(int64, parts);   // of the positions
  ONEPASS_WORD(int64, pass);    // a GemmPackPass
};

// GemmWeightGradient.
ONEPASS_PARAMETERS(GemmWeightGradientParameters) {
  ONEPASS_WORD(const void*, u);  // packed
  ONEPASS_WORD(const void*, v);
  ONEPASS_WORD(float*, parts);
  ONEPASS_WORD(int64, length);  // positions of eight packed channels
  ONEPASS_WORD(int64, chunks);  // of positions
  ONEPASS_WORD(int64, splits);
};

// GemmWeightSum.
ONEPASS_PARAMETERS(GemmWeightSumParameters) {
  ONEPASS_WORD(const float*, parts);
  ONEPASS_WORD(const float*, sums);  // as GemmPackTensor leaves them
  ONEPASS_WORD(const uint32*, gradient_largest);
  ONEPASS_WORD(const uint32*, input_largest);
  ONEPASS_WORD(void*, weight);  // null where it is not wanted
  ONEPASS_WORD(void*, bias);    // the same
  ONEPASS_WORD(int64, splits);
  ONEPASS_WORD(int64, sum_parts);  // GemmPackTensor's parts
};

// GemmPackAdjoint.
ONEPASS_PARAMETERS(GemmPackAdjointParameters) {
  ONEPASS_WORD(const void*, weights);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(float*, scales);
};

// GemmInputGradient.
ONEPASS_PARAMETERS(GemmInputGradientParameters) {
  ONEPASS_WORD(const void*, packed);   // dh
  ONEPASS_WORD(const void*, weights);  // as GemmPackAdjoint leaves them
  ONEPASS_WORD(const float*, scales);  // of each channel's sums
  ONEPASS_WORD(const uint32*, largest);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, length);
  ONEPASS_WORD(int64, tiles);  // of positions
};

}  // namespace onepass

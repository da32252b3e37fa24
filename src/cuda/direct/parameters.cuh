// What the kernels of the rows "direct" and "narrow" are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

ONEPASS_PARAMETERS(DirectParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(const void*, weight);
  ONEPASS_WORD(const void*, bias);
  ONEPASS_WORD(int64, batch);
};

// Of direct/narrow.cuh; the parameters are the block's, or those of the convolution alone.
ONEPASS_COUNTED_PARAMETERS(NarrowParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORDS(const void*, parameter);
};

}  // namespace onepass

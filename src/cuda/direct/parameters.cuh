// What the kernel of the row "direct" is given.
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

}  // namespace onepass

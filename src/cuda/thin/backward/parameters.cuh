// The parameters of the kernels of the row "thin_backward".
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// Of ThinBackward: its kernel and Reduce.
ONEPASS_COUNTED_PARAMETERS(ThinBackwardParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(const void*, output_gradient);
  ONEPASS_WORD(const void*, output);  // or null; it may replace pass 1
  ONEPASS_WORD(const float*, statistics);
  // Zero before the launch: a ticket, then for each sample arrivals of pass 1, a flag, arrivals of passes 2
  // and 3.
  ONEPASS_WORD(uint32*, control);
  ONEPASS_WORD(uint32*, columns);     // zero before the launch: arrivals of Reduce
  ONEPASS_WORD(uint32*, peaks);       // zero before the launch: bounds of dh of each sample, for f16 operands
  ONEPASS_WORD(float*, scales);       // [batch][2]: powers of two for x and dh, for f16 operands
  ONEPASS_WORD(float*, first_parts);  // [batch][segments][channels][sums of pass 1]
  ONEPASS_WORD(float*, second_parts);    // [batch][segments][channels][sums of pass 2]
  ONEPASS_WORD(float*, slab_sums);       // [batch][groups][2]
  ONEPASS_WORD(float*, weight_parts);    // [ring_samples][segments][units][128]
  ONEPASS_WORD(float*, weight_samples);  // [batch][units][128]
  ONEPASS_WORD(double*, slices);         // of Reduce
  ONEPASS_WORD(void*, ring);  // [ring_samples][positions of the output][channels, a multiple of 16]
  ONEPASS_WORD(void*, input_gradient);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, first_lag);   // samples from pass 1 to pass 2
  ONEPASS_WORD(int64, second_lag);  // from pass 2 to pass 3
  ONEPASS_WORD(int64, ring_samples);
  ONEPASS_WORDS(const void*, parameter);
  ONEPASS_WORDS(void*, gradient);
};

}  // namespace onepass

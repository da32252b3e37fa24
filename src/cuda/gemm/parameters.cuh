// What the kernels of wide convolutions are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// Packing of weights (gemm/source/pack.cuh).
ONEPASS_PARAMETERS(GemmPackParameters) {
  ONEPASS_WORD(const void*, weights);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(float*, scales);  // per channel: 1 / its scale; then (zero) the largest sum of magnitudes
  ONEPASS_WORD(uint32*, only);   // redo marks; [batch] is set where a weight is not finite
  ONEPASS_WORD(int64, batch);
};

// Packing of weights for the row "gemm_pingpong", which builds the tensor map of x too.
ONEPASS_PARAMETERS(PingpongPackParameters) {
  ONEPASS_WORD(const void*, weights);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(float*, scales);
  ONEPASS_WORD(uint32*, only);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, map);
};

// The row "gemm_pingpong".
ONEPASS_COUNTED_PARAMETERS(PingpongParameters) {
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint64*, parts);      // zero: moments of each slab's parts, then the merged statistics
  ONEPASS_WORD(float*, counts);      // zero: elements of each part, plus one
  ONEPASS_WORD(uint32*, only);       // zero: a redo mark for each sample, then one for all (RedoWord)
  ONEPASS_WORD(uint32*, guard);      // zero: bits of the largest magnitude that each converting warp saw
  ONEPASS_WORD(const void*, packed);
  ONEPASS_WORD(const float*, scales);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(const void*, map);  // the tensor map of x
  ONEPASS_WORDS(const void*, parameter);
};

}  // namespace onepass

// What the backward kernels of tails are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

ONEPASS_COUNTED_PARAMETERS(TailBackwardParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(const void*, output_gradient);
  ONEPASS_WORD(const float*, statistics);
  // Zero: a ticket, a count of finished units, then two counters and a flag for each unit.
  ONEPASS_WORD(uint32*, control);
  ONEPASS_WORD(float*, parts);      // of rows, for each piece: the sums of the first pass
  ONEPASS_WORD(float*, sums);       // of rows, for each piece: the sums of the second pass
  ONEPASS_WORD(float*, totals);     // of rows: the sums of both passes over all pieces
  ONEPASS_WORD(float*, slab_sums);  // of slabs: what the second pass needs of the first
  ONEPASS_WORD(void*, input_gradient);
  ONEPASS_WORD(uint64, aligned);
  ONEPASS_WORD(int64, phase);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, wave_units);
  ONEPASS_WORDS(const void*, parameter);
  ONEPASS_WORDS(void*, gradient);
};

}  // namespace onepass

// What the forward kernels of tails, and the kernel before them, are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// Words of TailParameters::control that count blocks where tail_staged exchanges moments through memory; the
// moments of each slab's blocks are behind them.
constexpr int exchange_counters = 64;

ONEPASS_COUNTED_PARAMETERS(TailParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, control);    // zero: a ticket, then two counters and a flag for each unit
  ONEPASS_WORD(float*, parts);       // moments of rows, one set for each piece
  ONEPASS_WORD(float*, sums);        // sums of rows, one for each piece
  ONEPASS_WORD(uint64, aligned);     // bits of AlignedBit
  ONEPASS_WORD(int64, phase);        // elements from the last 16-byte boundary to the input's first
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, wave_units);
  ONEPASS_WORDS(const void*, parameter);
};

// Of tail/scale_and_shift.cc: one value per channel each. A null weight is 1, a null bias 0.
ONEPASS_PARAMETERS(ScaleAndShiftParameters) {
  ONEPASS_WORD(const void*, mean);
  ONEPASS_WORD(const void*, variance);
  ONEPASS_WORD(const void*, weight);
  ONEPASS_WORD(const void*, bias);
  ONEPASS_WORD(float*, scale);
  ONEPASS_WORD(float*, shift);
  ONEPASS_WORD(int64, channels);
  ONEPASS_WORD(double, eps);
};

}  // namespace onepass

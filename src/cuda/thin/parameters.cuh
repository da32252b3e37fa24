// What the forward kernels of thin convolutions are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

ONEPASS_COUNTED_PARAMETERS(ThinParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, control);    // zero: a ticket, then two counters and a flag for each sample
  ONEPASS_WORD(float*, parts);       // moments of channels, for each tile: count, mean, M2
  ONEPASS_WORD(float*, sums);        // sums of channels, for each tile; or the ring of thin_inplace
  ONEPASS_WORD(uint32*, only);       // null: all samples; else a word for each sample, then RedoWords
  ONEPASS_WORD(uint32*, guard);      // zero: counters or findings of each sample
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, wave_units);  // units between the passes
  ONEPASS_WORD(int64, only_words);  // RedoWords behind those of the samples; or samples in the ring
  ONEPASS_WORD(uint64*, redone);    // not null: counts the samples that `only` marks
  ONEPASS_WORDS(const void*, parameter);
};

}  // namespace onepass

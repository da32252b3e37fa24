// What the forward kernels of thin convolutions are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// Of thin/thin.cuh: kernels on a mainloop and an epilogue.
ONEPASS_COUNTED_PARAMETERS(ThinParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, control);    // zero: a ticket, then two counters and a flag for each sample
  ONEPASS_WORD(float*, parts);       // moments of channels, for each tile: count, mean, M2
  ONEPASS_WORD(float*, sums);        // sums of channels, for each tile
  ONEPASS_WORD(uint32*, only);       // null: all samples; else a word for each sample, then RedoWords
  ONEPASS_WORD(uint32*, guard);      // zero: findings of the mainloop for each sample
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, wave_units);  // units between the passes
  ONEPASS_WORD(int64, only_words);  // RedoWords behind the words of the samples
  ONEPASS_WORD(uint64*, redone);    // not null: counts the samples that `only` marks
  ONEPASS_WORDS(const void*, parameter);
};

// Of thin/mma.cuh where values are recomputed, or wait in memory.
ONEPASS_COUNTED_PARAMETERS(ThinMmaParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, control);    // zero: a ticket, then two counters and a flag for each sample
  ONEPASS_WORD(uint32*, sets);       // zero: finished tiles of each set of tiles of a sample
  ONEPASS_WORD(float*, parts);       // moments of groups, for each tile: count, mean, M2
  ONEPASS_WORD(float*, ring);        // values that do not wait in the output
  ONEPASS_WORD(int64, ring_samples);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, lag);  // between the passes: samples where values are recomputed, else tiles
  ONEPASS_WORDS(const void*, parameter);
};

// Of thin/mma.cuh where values wait in shared memory.
ONEPASS_COUNTED_PARAMETERS(ThinClusterParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // null where nobody reads them
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORDS(const void*, parameter);
};

// Of thin/wgmma.cuh.
ONEPASS_COUNTED_PARAMETERS(ThinWgmmaParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, control);    // gets zeros: counters of the launch that computes samples again
  ONEPASS_WORD(uint32*, only);       // gets the samples to compute again, then a RedoWord of each cluster
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORDS(const void*, parameter);
};

}  // namespace onepass

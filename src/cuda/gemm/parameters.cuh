// What the kernels of wide convolutions are given.
#pragma once

#include "device/parameters.cuh"

namespace onepass {

// The row "gemm_wgmma", and the launch that merges moments where values are stored between passes.
ONEPASS_COUNTED_PARAMETERS(GemmParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, values);        // between the passes, laid out as the output
  ONEPASS_WORD(float*, statistics);    // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, control);      // zero: two counters and a flag for each unit, four words
  ONEPASS_WORD(float4*, parts);        // of slabs, for each tile with channels of it: count, mean, M2
  ONEPASS_WORD(float*, sums);          // of rows, for each range of positions
  ONEPASS_WORD(uint32*, only);         // zero: a redo mark for each sample, then one for all (RedoWord)
  ONEPASS_WORD(uint32*, guard);        // zero: bits of the largest magnitude in each sample
  ONEPASS_WORD(const void*, packed);   // weights as gemm/source/pack.cuh leaves them
  ONEPASS_WORD(const float*, scales);  // as gemm/source/pack.cuh leaves them
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, wave_units);
  ONEPASS_WORDS(const void*, parameter);
};

// The row "gemm_mma": as GemmParameters.
ONEPASS_COUNTED_PARAMETERS(GemmMmaParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, values);
  ONEPASS_WORD(float*, statistics);
  ONEPASS_WORD(uint32*, control);  // zero: a counter for each sample, then for each sample and channel tile
  ONEPASS_WORD(float4*, parts);
  ONEPASS_WORD(float*, sums);
  ONEPASS_WORD(uint32*, only);
  ONEPASS_WORD(uint32*, guard);
  ONEPASS_WORD(const void*, packed);
  ONEPASS_WORD(const float*, scales);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, again);  // whether it computes values again, now that the norm's statistics are known
  ONEPASS_WORDS(const void*, parameter);
};

// Packing of weights for the row "gemm_mma" where classes of a transposed convolution are tiles of their own.
ONEPASS_PARAMETERS(GemmMmaPackParameters) {
  ONEPASS_WORD(const void*, weights);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(uint32*, mark);  // zero: becomes redo_all where a weight is not finite
};

// The norm and what follows, of values that another launch left in memory (gemm/store/finish.cuh).
ONEPASS_COUNTED_PARAMETERS(GemmFinishParameters) {
  ONEPASS_WORD(const float*, values);  // laid out as the output, perhaps in its place
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(const float*, statistics);  // [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORDS(const void*, parameter);
};

// The row "gemm_packed".
ONEPASS_COUNTED_PARAMETERS(PackedGemmParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(float*, values);            // the convolution's output
  ONEPASS_WORD(const float*, statistics);  // of the norm, [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(uint32*, only);   // f32: zero. A redo mark for each sample, then one for all (RedoWord)
  ONEPASS_WORD(uint32*, guard);  // zero: bits of the largest magnitude in each sample, as it is packed
  ONEPASS_WORD(void*, packed_input);
  ONEPASS_WORD(void*, packed_weights);
  // f32: factor of each channel's sums, then (zero) the largest row sum and a mark as gemm/source/pack.cuh's
  ONEPASS_WORD(float*, scales);
  ONEPASS_WORD(uint32*, row_largest);  // zero: bits of the largest magnitude of each row of f32 weights
  ONEPASS_WORD(uint64*, row_sums);     // zero: sums of their magnitudes, in units of 2^-20
  ONEPASS_WORD(uint32*, piece_marks);  // 16 bits: for each piece of weights, whether all are finite
  ONEPASS_WORD(uint32*, control);      // of the redo kernel: four words for each sample and four more
  ONEPASS_WORD(int64, step);           // which launch this is (PackedGemmStep)
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, length);  // positions of eight packed channels
  ONEPASS_WORD(int64, tiles);   // of positions
  ONEPASS_WORDS(const void*, parameter);
};

// What the row "gemm_boxes" launches besides the product.
ONEPASS_COUNTED_PARAMETERS(BoxesStepParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, statistics);    // of the norm, [batch][groups][2]: mean, 1 / deviation
  ONEPASS_WORD(const float4*, parts);  // as BoxesParameters, to sums
  ONEPASS_WORD(float2*, lines);
  ONEPASS_WORD(const float*, sums);
  ONEPASS_WORD(void*, packed_input);  // the copy of x, where there is one
  ONEPASS_WORD(void*, packed_weights);
  ONEPASS_WORD(void*, map);
  ONEPASS_WORD(uint32*, only);   // a redo mark for each sample, then one for all (RedoWord)
  ONEPASS_WORD(uint32*, guard);  // f32: as PackedGemmParameters, to piece_marks
  ONEPASS_WORD(float*, scales);
  ONEPASS_WORD(uint32*, row_largest);
  ONEPASS_WORD(uint64*, row_sums);
  ONEPASS_WORD(uint32*, piece_marks);
  ONEPASS_WORD(uint32*, control);  // of the redo kernel: four words for each sample and four more
  ONEPASS_WORD(uint32*, arrived);  // gets zeros: a counter for each unit
  ONEPASS_WORD(int64, units);      // whose values are held
  ONEPASS_WORD(int64, step);       // which launch this is (PackedGemmStep)
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORDS(const void*, parameter);
};

// The row "gemm_boxes".
ONEPASS_COUNTED_PARAMETERS(BoxesParameters) {
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, output);
  ONEPASS_WORD(float*, values);        // the convolution's output, where a tail follows
  ONEPASS_WORD(float*, statistics);    // [batch][groups][2]: mean, 1 / deviation; where values are held
  ONEPASS_WORD(float4*, parts);        // moments of slabs in each tile: count, mean, M2
  ONEPASS_WORD(const float2*, lines);  // of slabs: mean, and what the norm multiplies by
  ONEPASS_WORD(float*, sums);          // of channels of a sample in each tile, for a mean
  ONEPASS_WORD(uint32*, control);      // counters of units' tiles
  ONEPASS_WORD(const void*, packed_weights);
  ONEPASS_WORD(const float*, scales);  // f32: factor of each channel's sums
  ONEPASS_WORD(const void*, map);      // the tensor map of x
  ONEPASS_WORD(uint32*, only);
  ONEPASS_WORD(const uint32*, piece_marks);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(int64, tiles);  // of positions
  ONEPASS_WORD(int64, pass);   // 0: moments alone leave, where values are computed twice
  ONEPASS_WORDS(const void*, parameter);
};

// What a launch of the rows "gemm_packed" and "gemm_boxes" does besides the product.
enum PackedGemmStep : int {
  step_pack,
  step_pack_again,
  step_judge,
  step_pack_weights,
  step_pack_input,
  step_merge,
  step_means
};

// Packing of weights (gemm/source/pack.cuh).
ONEPASS_PARAMETERS(GemmPackParameters) {
  ONEPASS_WORD(const void*, weights);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(float*, scales);  // per channel: 1 / its scale; then (zero) the largest sum of magnitudes
  ONEPASS_WORD(uint32*, mark);   // zero: becomes redo_all where a weight is not finite
};

// Packing of weights for the row "gemm_pingpong", which builds the tensor map of x too.
ONEPASS_PARAMETERS(PingpongPackParameters) {
  ONEPASS_WORD(const void*, weights);
  ONEPASS_WORD(void*, packed);
  ONEPASS_WORD(float*, scales);
  ONEPASS_WORD(float*, sums);  // of each channel's magnitudes; NaN where a weight is not finite
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(void*, map);
  ONEPASS_WORD(void*, cleared);  // set to zero
  ONEPASS_WORD(int64, cleared_bytes);
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
  ONEPASS_WORD(float*, scales);  // factor of each channel's sums, then room for the largest of `sums`
  ONEPASS_WORD(const float*, sums);
  ONEPASS_WORD(int64, batch);
  ONEPASS_WORD(const void*, input);
  ONEPASS_WORD(const void*, map);  // the tensor map of x
  ONEPASS_WORDS(const void*, parameter);
};

}  // namespace onepass

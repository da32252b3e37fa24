// What rows of wide convolutions share around their kernel: the launch that packs weights, and the workspace.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/gemm/gemm.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass::cuda {

// How gemm/source/pack.cuh packs weights. Several channels share a block where they are many, since it writes
// 16 bytes of each; their weights pass once through shared memory where they fit.
class WeightPack {
 public:
  static constexpr int64_t threads = 256;

  // `taps`: of a row's weights. `joint_taps`: those that lie side by side. `row_taps`: that are rows of a
  // channel; `span`: along x, that share a vector (gemm/mma/layout.cuh).
  WeightPack(const Problem& problem, const ThinShape& shape, int64_t padded_channels, int64_t taps,
             int64_t joint_taps = 1, int64_t row_taps = 1, int64_t span = 1);

  // Members of `struct Numbers`.
  std::string constants() const;
  Launch launch() const;
  // `structs`: what the kernel's agent is a template of.
  static Source source(const std::string& structs);

 private:
  int64_t bytes() const { return channels_ * channel_bytes_; }

  int64_t padded_channels_;
  int64_t channel_bytes_;
  int64_t joint_taps_, row_taps_, span_;
  int64_t channels_ = 1;  // of a block
  bool staged_;
};

// A number for what a packing launch leaves: that of its machine code, its blocks and its bytes.
uint64_t packing_of(const Function& pack, const Number& blocks, int64_t bytes);

// Where a region of packed weights lies: in the workspace of the call, or in Arguments::packed, which begins
// with the region `first`.
inline void* packed_at(const Arguments& arguments, void* workspace, const Region& region,
                       const Region& first) {
  if (arguments.packed == nullptr) return at(workspace, region);
  return at(const_cast<void*>(arguments.packed), {region.begin - first.begin, region.bytes});
}
// The arguments of a launch that packs into memory that is kept.
inline Arguments arguments_of_packing(const std::vector<const void*>& parameters, void* packed) {
  Arguments kept;
  kept.parameters = parameters;
  kept.packed = packed;
  return kept;
}

// Packed weights and what belongs to them, side by side: factors of channels, two words that packing begins
// with as zeros (the largest sum of magnitudes, a mark), the weights.
class PackedWeights {
 public:
  PackedWeights() = default;
  // The zeros end what a call clears before it packs.
  PackedWeights(Regions& workspace, const Number& channels, const Number& weight_bytes)
      : channels_(channels),
        scales_(workspace.add((channels + 2) * 4)),
        weights_(workspace.add(weight_bytes)) {}

  int64_t bytes() const { return scales_.bytes.value() + weights_.bytes.value(); }
  const Region& scales() const { return scales_; }
  void* scales_of(const Arguments& arguments, void* workspace) const {
    return packed_at(arguments, workspace, scales_, scales_);
  }
  void* weights_of(const Arguments& arguments, void* workspace) const {
    return packed_at(arguments, workspace, weights_, scales_);
  }
  void* mark_of(const Arguments& arguments, void* workspace) const {
    return packed_at(arguments, workspace, {scales_.begin + (channels_ + 1) * 4, 4}, scales_);
  }
  // Zeros what packing begins with.
  void clear(void* packed, Stream stream, const Device& device) const {
    cuda::clear(packed, scales_.bytes, stream, device);
  }

 private:
  Number channels_;
  Region scales_, weights_;
};

// The workspace of gemm_wgmma and gemm_mma, and the launches after their kernel.
class WideWorkspace {
 public:
  struct Sizes {
    Number control_words;     // counters
    int64_t padded_channels;  // that weights are packed for
    int64_t weight_bytes;     // packed
    int64_t slab_parts;       // moments of 16 bytes for each slab
    int64_t row_sums;         // for each channel of a sample
    bool own_values;          // values between the passes have no room in the output
    bool finishes;            // another launch computes the norm and what follows
    bool planar;              // those values lie with channels before space
  };
  WideWorkspace(const Problem& problem, const ThinShape& shape, const Sizes& sizes);

  size_t bytes() const;
  int64_t packed_bytes() const { return packed_.bytes(); }
  bool own_values() const { return own_values_; }
  bool finishes() const { return finish_.has_value(); }

  // Zeros what must be zero before a launch.
  void clear(const Arguments& arguments, void* workspace, Stream stream) const;
  void clear_packed(void* packed, Stream stream) const { packed_.clear(packed, stream, device_); }
  // Sets what all packing kernels are given.
  template <class Parameters>
  void fill_pack(Parameters& pack, const Arguments& arguments, void* workspace) const {
    pack.weights = arguments.parameters[0];
    pack.packed = packed_.weights_of(arguments, workspace);
    pack.mark = packed_.mark_of(arguments, workspace);
  }
  void* scales_of(const Arguments& arguments, void* workspace) const {
    return packed_.scales_of(arguments, workspace);
  }
  // Sets what both kernels are given.
  template <class Parameters>
  void fill(Parameters& p, const Arguments& arguments, void* workspace) const {
    p.input = arguments.input;
    p.output = arguments.output;
    p.parameter = arguments.parameters;
    p.batch = batch_;
    p.values = values(arguments, workspace);
    p.statistics = statistics_of(arguments, workspace);
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed = packed_.weights_of(arguments, workspace);
    p.scales = packed_.scales_of(arguments, workspace);
    p.control = at(workspace, control_);
    p.parts = at(workspace, parts_);
    p.sums = at(workspace, sums_);
  }
  // The norm and what follows, then the samples that are marked.
  void launch_rest(const Arguments& arguments, void* workspace, Stream stream) const;

 private:
  void* values(const Arguments& arguments, void* workspace) const {
    return own_values_ ? at(workspace, values_) : arguments.output;
  }
  void* statistics_of(const Arguments& arguments, void* workspace) const {
    return arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
  }

  Device device_;
  Number batch_;
  bool own_values_;
  std::optional<GemmFinish> finish_;
  ThinCores redo_;
  Regions regions_;
  PackedWeights packed_;
  Region control_;
  Region marks_;       // of samples to compute again
  Region guard_;       // of f32: largest magnitudes
  Region statistics_;  // of slabs, where the caller wants none
  Region parts_, sums_, values_;
  Number cleared_bytes_;  // before those of packed weights
};

}  // namespace onepass::cuda

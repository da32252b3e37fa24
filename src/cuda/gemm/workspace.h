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

  // `joint_taps`: taps that lie side by side (gemm/mma/layout.cuh).
  WeightPack(const Problem& problem, const ThinShape& shape, int64_t padded_channels, int64_t taps,
             int64_t joint_taps = 1);

  // Members of `struct Numbers`.
  std::string constants() const;
  Launch launch() const;
  // `structs`: what the kernel's agent is a template of.
  static Source source(const std::string& structs);

 private:
  int64_t bytes() const { return channels_ * channel_bytes_; }

  int64_t padded_channels_;
  int64_t channel_bytes_;
  int64_t joint_taps_;
  int64_t channels_ = 1;  // of a block
  bool staged_;
};

// The regions that every row with packed weights has.
struct PackedRegions {
  Region packed, scales;  // weights, and factors of their channels
  Region marks;           // of samples to compute again
  Region guard;           // of f32: largest magnitudes
  Region statistics;      // of slabs, where the caller wants none

  void* statistics_of(const Arguments& arguments, void* workspace) const {
    return arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics);
  }
  // Sets what every packing kernel is given.
  template <class Parameters>
  void fill_pack(Parameters& pack, const Arguments& arguments, void* workspace, const Number& batch) const {
    pack.weights = arguments.parameters[0];
    pack.packed = at(workspace, packed);
    pack.only = at(workspace, marks);
    pack.batch = batch;
  }
  // Sets what every kernel is given.
  template <class Parameters>
  void fill(Parameters& p, const Arguments& arguments, void* workspace, const Number& batch) const {
    p.output = arguments.output;
    p.parameter = arguments.parameters;
    p.batch = batch;
    p.statistics = statistics_of(arguments, workspace);
    p.only = at(workspace, marks);
    p.guard = at(workspace, guard);
    p.packed = at(workspace, packed);
    p.scales = at(workspace, scales);
  }
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
  bool own_values() const { return own_values_; }
  bool finishes() const { return finish_.has_value(); }

  // Zeros what must be zero before a launch.
  void clear(void* workspace, Stream stream) const;
  void fill(GemmPackParameters& pack, const Arguments& arguments, void* workspace) const;
  void fill(GemmMmaPackParameters& pack, const Arguments& arguments, void* workspace) const;
  // Sets what both kernels are given.
  template <class Parameters>
  void fill(Parameters& p, const Arguments& arguments, void* workspace) const {
    shared_.fill(p, arguments, workspace, batch_);
    p.input = arguments.input;
    p.values = values(arguments, workspace);
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

  Device device_;
  Number batch_;
  bool own_values_;
  std::optional<GemmFinish> finish_;
  ThinCores redo_;
  Regions regions_;
  PackedRegions shared_;
  Region control_, parts_, sums_, values_;
  Number cleared_bytes_;
};

}  // namespace onepass::cuda

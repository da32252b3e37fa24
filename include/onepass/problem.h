// A problem: a block with everything that decides how it can run (shapes, strides, types, device).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "onepass/block.h"
#include "onepass/export.h"
#include "onepass/tensor.h"

namespace onepass {

struct Device {
  enum class Kind : uint8_t { cpu };
  Kind kind = Kind::cpu;
  int threads = 1;  // the most threads a run may use; results do not depend on it

  static Device cpu(int threads = 1) { return {Kind::cpu, threads}; }
  bool operator==(const Device&) const = default;
};

struct ONEPASS_API Problem {
  Block block;
  TensorSpec input;
  TensorSpec output;
  std::vector<TensorSpec> parameters;  // one for each of block.parameters(input.sizes)
  Device device;

  // All tensors dense, of one type and layout. Throws Error where the block cannot take the input.
  Problem(Block block, Shape input_sizes, DType dtype = DType::f32, Device device = Device::cpu(),
          Layout layout = Layout::nchw);

  // The problem string "BLOCK @ SIZES [DTYPE] [LAYOUT]": "conv2d(3,8) | relu @ 2x3x9x9 bf16 nhwc".
  static Problem parse(std::string_view text, Device device = Device::cpu());
  // Throws Error unless the specs have the shapes the block gives them and can be addressed.
  void validate() const;
  // Block, sizes, types and, where they are not dense, strides.
  std::string text() const;

  // Multiply-adds of the convolution that meet an input element (taps on padding do not count).
  int64_t conv_multiply_adds() const;

  bool operator==(const Problem&) const = default;
};

}  // namespace onepass

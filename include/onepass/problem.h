// A problem: a block with the shapes, strides, types, device and numerics that decide how it can run.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "onepass/block.h"
#include "onepass/export.h"
#include "onepass/tensor.h"

namespace onepass {

struct ONEPASS_API Device {
  enum class Kind : uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int threads = 1;           // cpu: the most threads a run may use; results do not depend on it
  int index = 0;             // cuda: which GPU
  std::string architecture;  // cuda: plan for this one ("sm_90a"), present or not; empty: that of the GPU

  static Device cpu(int threads = 1) { return {Kind::cpu, threads, 0, {}}; }
  static Device cuda(int index = 0) { return {Kind::cuda, 1, index, {}}; }
  // Plans of it are explained and compiled; they run nowhere.
  static Device cuda_architecture(std::string name) { return {Kind::cuda, 1, 0, std::move(name)}; }
  // "cpu", "cuda", "cuda:1" or "cuda:sm_90a"; throws Error for anything else.
  static Device parse(std::string_view text, int threads = 1);

  std::string text() const;
  bool operator==(const Device&) const = default;
};

// How a convolution multiplies f32 operands. Its sums are always f32.
//   f32       as they are
//   tf32      rounded to nearest even at 10 bits first, as cuDNN's TF32 kernels of sm_90 do
//   tf32_away rounded to nearest at 10 bits, ties away from zero, as cuDNN's TF32 kernels of sm_80 do
//   near_f32  TF32 is allowed, and PyTorch computes this convolution in f32 all the same: results agree with
//             f32 to about 1e-5, not product by product
enum class Precision : uint8_t { f32, tf32, near_f32, tf32_away };

// What a result is compared with.
//   pytorch  what PyTorch computes in this precision
//   strict   f32 throughout, 16-bit tensors too: values before a norm are held in f32, no activation is
//            approximate
//   fast     quicker and coarser than PyTorch: tf32 convolutions may dither their weights
enum class Numerics : uint8_t { pytorch, strict, fast };

// The words of a problem string that name the arithmetic.
struct ONEPASS_API Mode {
  DType dtype = DType::f32;
  Precision precision = Precision::f32;
  Numerics numerics = Numerics::pytorch;

  // "[DTYPE] [NUMERICS]", each once: "", "f32", "tf32 fast", "tf32_away", "near_f32", "strict".
  static Mode parse(std::string_view text);
  // The words that parse reads; "pytorch" is left out.
  std::string text() const;

  bool operator==(const Mode&) const = default;
};

struct ONEPASS_API Problem {
  Block block;
  TensorSpec input;
  TensorSpec output;
  // One for each of block.parameters(input.sizes). Vectors and weights are contiguous. On a CPU the weights
  // of a convolution may lie channels last.
  std::vector<TensorSpec> parameters;
  Device device;
  Precision precision = Precision::f32;
  Numerics numerics = Numerics::pytorch;

  // All tensors dense, of one type and layout. Throws Error where the block cannot take the input.
  Problem(Block block, Shape input_sizes, DType dtype = DType::f32, Device device = Device::cpu(),
          Layout layout = Layout::nchw);

  // The problem string "BLOCK @ SIZES [DTYPE] [LAYOUT] [NUMERICS]": "conv2d(3,8) | relu @ 2x3x9x9 bf16 nhwc
  // strict". "tf32", "tf32_away" and "near_f32" as DTYPE are f32 with that precision, on a GPU alone.
  static Problem parse(std::string_view text, Device device = Device::cpu());
  // Throws Error unless the specs have the shapes that the block gives them and can be addressed. The device
  // and the types must support the precision and the numerics.
  void validate() const;
  // Whether the convolution's operands are rounded to tf32, whichever way ties go.
  bool rounds_to_tf32() const { return precision == Precision::tf32 || precision == Precision::tf32_away; }
  // Block, sizes, types, numerics and, where they are not dense, strides.
  std::string text() const;

  // Multiply-adds of the convolution that meet an input element (taps on padding do not count).
  int64_t conv_multiply_adds() const;

  bool operator==(const Problem&) const = default;
};

}  // namespace onepass

// The operands of an affine stage from a batch norm's statistics: one thread for a channel, f32 throughout.
// It is no row. Callers run it before the block that takes its results as channel_mul and channel_add.
#include <string>

#include "cuda/runtime/function.h"
#include "cuda/runtime/parameters.h"
#include "cuda/source.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "tail/parameters.cuh"

namespace onepass::cuda {
namespace {

constexpr uint32_t threads = 128;

Source source_of(DType dtype) {
  if (dtype == DType::f64) throw Error("batch norm: f64 is not computed by the GPU kernels");
  return agent_kernel("onepass_scale_and_shift", "#include \"tail/scale_and_shift.cuh\"\n",
                      "ScaleAndShift<onepass::" + std::string(name(dtype)) + ">", std::to_string(threads),
                      SharedAs::none);
}

}  // namespace

struct ScaleAndShift::Loaded {
  Function function;
};

ScaleAndShift::ScaleAndShift(DType dtype, const Device& device)
    : loaded_(std::make_shared<const Loaded>(
          Loaded{Function(source_of(dtype), device, {.blocks = 1, .threads = threads})})) {}

void ScaleAndShift::run(const Arguments& arguments, Stream stream) const {
  if (arguments.channels == 0) return;
  ScaleAndShiftParameters parameters;
  parameters.mean = arguments.mean;
  parameters.variance = arguments.variance;
  parameters.weight = arguments.weight;
  parameters.bias = arguments.bias;
  parameters.scale = arguments.scale;
  parameters.shift = arguments.shift;
  parameters.channels = arguments.channels;
  parameters.eps = arguments.eps;
  parameters.launch(loaded_->function, stream, (arguments.channels + threads - 1) / threads);
}

}  // namespace onepass::cuda

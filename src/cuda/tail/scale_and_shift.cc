// The operands of an affine stage from a batch norm's statistics: one thread for a channel, f32 throughout.
// It is no row. Callers run it before the block that takes its results as channel_mul and channel_add.
#include <string>

#include "cuda/runtime/function.h"
#include "cuda/runtime/parameters.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "tail/parameters.cuh"

namespace onepass::cuda {
namespace {

constexpr uint32_t threads = 128;

Source source_of(DType dtype) {
  if (dtype == DType::f64) throw Error("batch norm: f64 is not computed by the GPU kernels");
  return {"onepass_scale_and_shift", R"(#include "tail/parameters.cuh"
extern "C" __global__ void onepass_scale_and_shift(
    const __grid_constant__ onepass::ScaleAndShiftParameters p) {
  using Element = onepass::)" + std::string(name(dtype)) +
                                         R"(;
  const onepass::int64 c = static_cast<onepass::int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= p.channels) return;
  const float variance = onepass::load_one<Element>(p.variance, c);
  const float weight = p.weight ? onepass::load_one<Element>(p.weight, c) : 1.0f;
  const float bias = p.bias ? onepass::load_one<Element>(p.bias, c) : 0.0f;
  const float scale = weight / sqrtf(variance + static_cast<float>(p.eps));
  p.scale[c] = scale;
  p.shift[c] = bias - onepass::load_one<Element>(p.mean, c) * scale;
}
)"};
}

}  // namespace

struct ScaleAndShift::Loaded {
  Function function;
};

ScaleAndShift::ScaleAndShift(DType dtype, const Device& device)
    : loaded_(std::make_shared<const Loaded>(
          Loaded{Function(source_of(dtype), device, {.blocks = 1, .threads = threads})})) {}

void ScaleAndShift::run(const Arguments& arguments, Stream stream) const {
  ScaleAndShiftParameters parameters;
  const int64_t blocks = (arguments.channels + threads - 1) / threads;
  if (blocks == 0) return;
  parameters.mean = arguments.mean;
  parameters.variance = arguments.variance;
  parameters.weight = arguments.weight;
  parameters.bias = arguments.bias;
  parameters.scale = arguments.scale;
  parameters.shift = arguments.shift;
  parameters.channels = arguments.channels;
  parameters.eps = arguments.eps;
  parameters.launch(loaded_->function, stream, blocks);
}

}  // namespace onepass::cuda

// The least time a block can take, whatever its convolution costs. Measured on a CPU, computed from the copy
// rate for a GPU.
#include "tool/floor.h"

#include <memory>

#include "onepass/cuda.h"
#include "tool/buffers.h"
#include "tool/executor.h"
#include "tool/peaks.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

// 64 KiB in and 64 KiB out: in L2, and long enough to hide what a call costs.
const Shape cached_sizes{1, 16, 1024};
constexpr int runs_per_sample = 20;

// f16 and bf16 are computed in f32, and converted once in a block, not once a stage.
DType arithmetic_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// Seconds an element with all threads at work.
double seconds_per_element(const Pointwise& stage, DType dtype, int threads, const std::string& target) {
  const Problem problem(Block({stage}), cached_sizes, arithmetic_type(dtype));
  const Plan stage_plan = plan(problem, {.strategy = "", .target = target});
  std::vector<Tensors> tensors;
  tensors.reserve(static_cast<size_t>(threads));
  SerialExecutor serial;
  for (int worker = 0; worker < threads; ++worker) tensors.emplace_back(stage_plan, 1, serial);
  const Samples samples = collect(0.03, 5, [&] {
    return seconds_on_all(threads, [&](int worker) {
      const Tensors& own = tensors[static_cast<size_t>(worker)];
      SerialExecutor executor;
      for (int run = 0; run < runs_per_sample; ++run) {
        stage_plan.run(own.arguments(), own.workspace.data(), executor);
      }
    });
  });
  const auto elements = static_cast<double>(element_count(cached_sizes)) * runs_per_sample * threads;
  return samples.best() / elements;
}

}  // namespace

double Floor::activation_seconds() const {
  double sum = 0;
  for (const auto& [stage, seconds] : activations) sum += seconds;
  return sum;
}

Floor measure_floor(const Problem& problem, const Buffer& output, const std::string& target) {
  Floor floor;
  const int threads = problem.device.threads;
  floor.write = seconds_to_write(output, threads);
  const auto elements =
      static_cast<double>(element_count(problem.block.conv_output_shape(problem.input.sizes)));
  for (const Stage& stage : problem.block.stages()) {
    const auto* pointwise = std::get_if<Pointwise>(&stage);
    if (pointwise == nullptr) continue;
    floor.activations.emplace_back(
        Block::text(stage),
        elements * seconds_per_element(*pointwise, problem.output.dtype, threads, target));
  }
  return floor;
}

Floor gpu_floor(const Problem& problem) {
  const double rate = cuda::device_rates(problem.device.index).bytes_per_second;
  Floor floor;
  floor.read = static_cast<double>(input_bytes(problem)) / rate;
  floor.write = static_cast<double>(problem.output.byte_span()) / rate;
  return floor;
}

std::string Floor::text() const {
  if (read > 0) {
    return milliseconds(seconds()) + " = read " + significant(read * 1e3) + " + write " +
           significant(write * 1e3);
  }
  std::string list;
  for (const auto& [stage, each] : activations) {
    list += (list.empty() ? " (" : ", ") + stage + ' ' + significant(each * 1e3);
  }
  if (!list.empty()) list += ')';
  return milliseconds(seconds()) + " = write " + significant(write * 1e3) + " + activations " +
         significant(activation_seconds() * 1e3) + list;
}

Json Floor::json() const {
  Json stages = Json::array();
  for (const auto& [stage, each] : activations) stages.push_back({{"stage", stage}, {"seconds", each}});
  return {{"seconds", seconds()}, {"read_seconds", read}, {"write_seconds", write}, {"activations", stages}};
}

}  // namespace onepass::tool

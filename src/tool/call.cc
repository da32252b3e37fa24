// A plan with its tensors: in place on the CPU, as copies on a GPU.
#include "tool/call.h"

#include <optional>
#include <vector>

#include "onepass/cuda.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

// More than the L2 cache of any GPU: 126 MiB on a B200.
constexpr size_t flush_bytes = size_t{256} << 20;

cuda::Memory copy_of(int device, const Buffer& buffer) {
  cuda::Memory memory(device, buffer.bytes());
  memory.upload(buffer.data(), buffer.bytes());
  return memory;
}

}  // namespace

struct Call::OnGpu {
  int device;
  cuda::Memory input;
  cuda::Memory output;
  cuda::Memory workspace;
  std::vector<cuda::Memory> parameters;
  Arguments arguments;
  std::optional<cuda::Memory> flushed;  // for timing alone, as the timer
  std::optional<cuda::Timer> timer;

  OnGpu(const Plan& plan, const Tensors& tensors)
      : device(plan.problem().device.index),
        input(copy_of(device, tensors.input)),
        output(copy_of(device, tensors.output)),
        workspace(device, plan.workspace_bytes()) {
    workspace.fill(0xff);
    arguments.input = input.data();
    arguments.output = output.data();
    for (const Buffer& parameter : tensors.parameters) {
      parameters.push_back(copy_of(device, parameter));
      arguments.parameters.push_back(parameters.back().data());
    }
  }
};

Call::Call(const Plan& plan, uint64_t seed, Executor& executor, Pages pages)
    : plan_(plan), executor_(executor), tensors_(plan, seed, executor, pages) {
  if (plan.problem().device.kind == Device::Kind::cuda) gpu_ = std::make_unique<OnGpu>(plan, tensors_);
}

Call::~Call() = default;

void Call::run() {
  if (gpu_) {
    plan_.run(gpu_->arguments, gpu_->workspace.data(), Stream{});
  } else {
    plan_.run(tensors_.arguments(), tensors_.workspace.data(), executor_);
  }
}

void Call::run_and_wait() {
  run();
  if (gpu_) cuda::synchronize(gpu_->device);
}

double Call::timed_run() {
  if (!gpu_) {
    const double begin = seconds_now();
    run();
    return seconds_now() - begin;
  }
  if (!gpu_->timer) {
    gpu_->flushed.emplace(gpu_->device, flush_bytes);
    gpu_->timer.emplace(gpu_->device);
  }
  gpu_->flushed->fill(0);
  gpu_->timer->start();
  run();
  return gpu_->timer->stop();
}

void Call::fetch_output() {
  if (gpu_) gpu_->output.download(tensors_.output.data(), tensors_.output.bytes());
}

std::string place_text(const Device& device) {
  return device.kind == Device::Kind::cpu ? thread_text(device.threads) : device.text();
}

}  // namespace onepass::tool

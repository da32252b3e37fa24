// Where the plans of a test run: on an executor in the process's memory, or on a stream of a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "onepass/cuda.h"
#include "onepass/executor.h"
#include "support/gpu.h"
#include "support/guarded_memory.h"

namespace onepass::testing {

// How the tensors of a call lie.
enum class Placement : uint8_t {
  elements,  // aligned to their elements and to nothing more
  vectors,   // aligned to 64 bytes: 16-byte loads and stores are possible
  mixed,     // aligned to their elements, each at another distance from 64 bytes
  inputs,    // aligned to 64 bytes but for the output, which is to its elements
};
inline constexpr Placement placements[] = {Placement::elements, Placement::vectors, Placement::mixed,
                                           Placement::inputs};
std::string_view name(Placement placement);

class Place {
 public:
  Place(Executor& executor, Placement placement = Placement::elements)  // NOLINT: an executor is a place
      : executor_(&executor), placement_(placement) {}
  Place(const GpuStream& stream, Placement placement = Placement::elements)  // NOLINT: so is a stream
      : stream_(&stream), placement_(placement) {}

  const GpuStream* stream() const { return stream_; }  // null on the CPU
  Executor& executor() const { return *executor_; }

  // Elements between a multiple of 64 bytes and the tensor that is the index-th of its call.
  int64_t elements_beyond(size_t index) const {
    constexpr size_t vector = 8;  // the most elements in 16 bytes
    constexpr size_t output = 1;
    if (placement_ == Placement::mixed) return static_cast<int64_t>((1 + 5 * index) % vector);
    return placement_ == Placement::elements || (placement_ == Placement::inputs && index == output) ? 1 : 0;
  }

  // Puts the plan's work where it belongs; finish() waits for it.
  template <class PlanType, class ArgumentsType>
  void run(const PlanType& plan, const ArgumentsType& arguments, void* workspace) const {
    if (stream_ == nullptr) {
      plan.run(arguments, workspace, *executor_);
    } else {
      plan.run(arguments, workspace, stream_->stream());
    }
  }
  // Throws Error where some of the work failed. `what` was run, for whoever finds it hanging.
  void finish(const std::string& what) const {
    if (stream_ != nullptr) stream_->wait(what);
  }

 private:
  Executor* executor_ = nullptr;
  const GpuStream* stream_ = nullptr;
  Placement placement_;
};

// Guarded memory where the plans of a place find it: itself, or a mirror of it on the GPU with the same
// guards at the same distance from a multiple of 64 bytes.
class Buffer {
 public:
  Buffer(const Place& place, GuardedMemory memory);

  // For the plan.
  void* data() {
    return mirror_ ? static_cast<std::byte*>(mirror_->data()) + host_.data_offset() : host_.data();
  }
  // What was there when the buffer was made, or at the last fetch().
  GuardedMemory& host() { return host_; }
  // After finish() of the place.
  void fetch();
  // Other memory of the same size and phase, behind the work of the place so far.
  void replace(GuardedMemory memory);

 private:
  void send();

  GuardedMemory host_;
  const GpuStream* stream_;
  std::optional<cuda::Memory> mirror_;
};

}  // namespace onepass::testing

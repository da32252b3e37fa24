// Records launches instead of running them.
#include "cuda/runtime/recording.h"

#include <algorithm>
#include <utility>

#include "onepass/error.h"

namespace onepass::cuda {
namespace {

thread_local Recording* recording_of_thread = nullptr;

}  // namespace

Recording::Recording() {
  if (recording_of_thread) throw Error("launches of this thread are being recorded already");
  recording_of_thread = this;
}

Recording::~Recording() { stop(); }

void Recording::stop() {
  if (recording_of_thread == this) recording_of_thread = nullptr;
}

Recording* Recording::current() { return recording_of_thread; }

void Recording::name(const void* address, std::string text) {
  names_.insert_or_assign(
      address, Number::named(static_cast<int64_t>(reinterpret_cast<intptr_t>(address)), std::move(text)));
}

Number Recording::address(const void* pointer) const {
  const auto known = names_.find(pointer);
  return known != names_.end() ? known->second : Number(reinterpret_cast<intptr_t>(pointer));
}

void Recording::note(const void* base, const void* address, const Number& offset, const Number& bytes) {
  const auto outer = memory_.find(base);
  const void* first = outer == memory_.end() ? base : outer->second.base;
  const Number from_first = outer == memory_.end() ? offset : add(outer->second.offset, offset);
  names_.insert_or_assign(address, add(names_.contains(first) ? names_.at(first) : Number(), from_first));
  // An empty region begins where the next one does.
  const auto known = memory_.find(address);
  const Number end = add(from_first, bytes);
  if (known == memory_.end() || known->second.end.value() < end.value())
    memory_.insert_or_assign(address, Memory{from_first, first, end});
}

void Recording::launch(const Function& function, const Number& blocks, std::vector<Number> words,
                       std::vector<std::string> names) {
  const Launch& numbers = function.numbers();
  const Kernel kernel{function.source(),   numbers.threads, numbers.cluster,         numbers.shared_bytes,
                      numbers.cooperative, numbers.waits,   function.resident_name()};
  auto known = std::find(kernels_.begin(), kernels_.end(), kernel);
  if (known == kernels_.end()) known = kernels_.insert(known, kernel);
  steps_.push_back({static_cast<int>(known - kernels_.begin()), blocks.value() == 0 ? numbers.blocks : blocks,
                    std::move(words), std::move(names), 0, 0});
}

void Recording::clear(const void* memory, const Number& bytes) {
  steps_.push_back({-1, 0, {}, {}, address(memory), bytes});
}

Number Recording::end_of(const void* base) const {
  Number end;
  for (const auto& [address, memory] : memory_) {
    if (memory.base == base && memory.end.value() >= end.value()) end = memory.end;
  }
  return end;
}

}  // namespace onepass::cuda

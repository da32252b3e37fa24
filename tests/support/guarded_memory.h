// Memory for the tensors of tests, between bytes that read as NaN and must stay as they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "onepass/tensor.h"
#include "reference/tensor_access.h"

namespace onepass::testing {

// Memory between guards: `phase` bytes beyond a multiple of 64.
class GuardedMemory {
 public:
  GuardedMemory(size_t bytes, size_t phase)
      : storage_(bytes + 2 * guard_bytes + 2 * cache_line, guard_byte), bytes_(bytes), phase_(phase) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data() + guard_bytes);
    offset_ = guard_bytes + (cache_line - address % cache_line) + phase;
    remember();
  }

  void* data() { return storage_.data() + offset_; }
  const void* data() const { return storage_.data() + offset_; }

  // Data and guards, from an address that is a multiple of 64 on: what a copy elsewhere has to hold.
  std::span<std::byte> guarded() {
    return std::span(storage_).subspan(offset_ - data_offset(), data_offset() + bytes_ + guard_bytes);
  }
  // Where the data begins in it.
  size_t data_offset() const { return guard_bytes + phase_; }

  // What is in memory now is what should stay there.
  void remember() { before_ = storage_; }
  // The bytes [offset, offset + count) of the data may change.
  void allow(int64_t offset, int64_t count) {
    const size_t first = offset_ + static_cast<size_t>(offset);
    std::copy_n(storage_.begin() + static_cast<ptrdiff_t>(first), count,
                before_.begin() + static_cast<ptrdiff_t>(first));
  }
  // The elements of the tensor may change.
  void allow(const TensorSpec& spec) {
    if (spec.byte_span() == element_count(spec.sizes) * byte_size(spec.dtype))  // nothing lies between them
      return allow(0, spec.byte_span());
    for_each_element(spec, [&](int64_t offset) { allow(offset, byte_size(spec.dtype)); });
  }
  bool is_intact() const { return storage_ == before_; }

 private:
  static constexpr size_t guard_bytes = 256;
  static constexpr std::byte guard_byte{0xff};  // NaN in every element type
  static constexpr size_t cache_line = 64;

  std::vector<std::byte> storage_;
  std::vector<std::byte> before_;
  size_t bytes_;
  size_t phase_;
  size_t offset_ = 0;
};

// For a tensor, `elements` of it beyond a multiple of 64 bytes, all NaN. One: aligned to the elements and to
// nothing more.
inline GuardedMemory allocate(const TensorSpec& spec, int64_t elements = 1) {
  return {static_cast<size_t>(spec.byte_span()), static_cast<size_t>(elements * byte_size(spec.dtype))};
}

// The same with values, which must stay.
inline GuardedMemory place(const TensorSpec& spec, const std::vector<double>& values, int64_t elements = 1) {
  GuardedMemory memory = allocate(spec, elements);
  store_tensor(spec, values, memory.data());
  memory.remember();
  return memory;
}

}  // namespace onepass::testing

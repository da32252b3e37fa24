// Where the plans of a test run.
#include "support/place.h"

#include <utility>

namespace onepass::testing {

std::string_view name(Placement placement) {
  constexpr std::string_view names[] = {"aligned to elements", "aligned to vectors", "aligned differently",
                                        "all but the output aligned to vectors"};
  return names[static_cast<size_t>(placement)];
}

Buffer::Buffer(const Place& place, GuardedMemory memory) : host_(std::move(memory)), stream_(place.stream()) {
  if (stream_ == nullptr) return;
  mirror_.emplace(stream_->device(), host_.guarded().size());
  send();
}

void Buffer::fetch() {
  if (mirror_) stream_->download(host_.guarded().data(), mirror_->data(), host_.guarded().size());
}

void Buffer::replace(GuardedMemory memory) {
  host_ = std::move(memory);
  send();
}

void Buffer::send() {
  if (mirror_) stream_->upload(mirror_->data(), host_.guarded().data(), host_.guarded().size());
}

}  // namespace onepass::testing

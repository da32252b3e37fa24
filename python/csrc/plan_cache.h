// Plans of the problems seen so far: planning costs far more than a lookup, and equal layers share one plan.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "torch_tensor.h"

namespace onepass::torch_binding {

// What tells two problems apart, as bytes: the block's text, then numbers.
class PlanKey {
 public:
  PlanKey(std::string_view block, int threads);
  void add(int64_t number);
  void add(const Tensor& tensor);
  void add(const std::string& text);
  std::string_view bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// A map that forgets the entries used longest ago. Safe to use from many threads; entries live while someone
// holds them.
template <class Value>
class PlanCache {
 public:
  // `make` gives the value of a new key.
  template <class Make>
  std::shared_ptr<const Value> get(const PlanKey& key, const Make& make) {
    if (auto found = find(key.bytes())) return found;
    auto made = std::make_shared<const Value>(make());
    const std::unique_lock lock(mutex_);
    if (entries_.size() >= capacity) forget_older_half();
    return entries_.try_emplace(std::string(key.bytes()), made, ++clock_).first->second.value;
  }

 private:
  static constexpr size_t capacity = 1024;

  struct Entry {
    Entry(std::shared_ptr<const Value> held, uint64_t now) : value(std::move(held)), last_use(now) {}
    std::shared_ptr<const Value> value;
    std::atomic<uint64_t> last_use;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>{}(bytes); }
  };

  std::shared_ptr<const Value> find(std::string_view bytes) {
    const std::shared_lock lock(mutex_);
    const auto entry = entries_.find(bytes);
    if (entry == entries_.end()) return nullptr;
    entry->second.last_use = ++clock_;
    return entry->second.value;
  }

  // Uses have distinct times, so exactly the older half is forgotten.
  void forget_older_half() {
    std::vector<uint64_t> uses;
    for (const auto& [bytes, entry] : entries_) uses.push_back(entry.last_use);
    const auto middle = uses.begin() + static_cast<std::ptrdiff_t>(uses.size() / 2);
    std::nth_element(uses.begin(), middle, uses.end());
    std::erase_if(entries_, [oldest = *middle](const auto& item) { return item.second.last_use < oldest; });
  }

  std::shared_mutex mutex_;
  std::atomic<uint64_t> clock_{0};
  std::unordered_map<std::string, Entry, Hash, std::equal_to<>> entries_;
};

}  // namespace onepass::torch_binding

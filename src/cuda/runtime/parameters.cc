// A kernel's parameter struct on the host: members that are set by name and launched together.
#include "cuda/runtime/parameters.h"

#include <utility>

#include "onepass/error.h"

namespace onepass::cuda {

void ParameterMember::clear() {
  count_ = 0;
  others_.clear();
  formulas_.clear();
}

void ParameterMember::push_back(int64_t word) {
  if (count_++ == 0) {
    first_ = word;
  } else {
    others_.push_back(word);
  }
}

void ParameterMember::add(const void* address) {
  push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(address)));
  if (recording_) formulas_.push_back(recording_->address(address));
}

void ParameterMember::add(const Number& number) {
  push_back(number.value());
  if (recording_) formulas_.push_back(number);
}

void Parameters::launch(const Function& function, Stream stream, const Number& blocks) const {
  std::vector<int64_t> words;
  std::vector<Number> formulas;
  words.reserve(members_.size() + 8);
  for (const ParameterMember* member : members_) {
    if (member->count_ == 0)
      throw Error("kernel " + function.source().name + " is launched without its parameter '" +
                  member->name_ + "'");
    words.push_back(member->first_);
    words.insert(words.end(), member->others_.begin(), member->others_.end());
    formulas.insert(formulas.end(), member->formulas_.begin(), member->formulas_.end());
  }
  if (Recording* const recording = Recording::current()) {
    recording->launch(function, blocks, std::move(formulas), names());
  } else {
    function.launch(words.data(), words.size() * sizeof(int64_t), stream, blocks);
  }
}

std::vector<std::string> Parameters::names() const {
  std::vector<std::string> names;
  for (const ParameterMember* member : members_) {
    if (member->is_list_) {
      for (size_t i = 0; i < member->count_; ++i)
        names.push_back(std::string(member->name_) + '[' + std::to_string(i) + ']');
    } else {
      names.emplace_back(member->name_);
    }
  }
  return names;
}

}  // namespace onepass::cuda

// A kernel's parameter struct on the host: members that are set by name and launched together.
//
// Structs are declared by the macros of cuda/device/parameters.cuh, beside the kernel that reads them.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/function.h"
#include "cuda/runtime/number.h"
#include "cuda/runtime/recording.h"
#include "cuda/runtime/scoped.h"
#include "onepass/executor.h"

namespace onepass::cuda {

// Eight bytes of a kernel's parameters, or an array of them. In a Recording it has formulas too.
class ParameterMember : public Scoped {
 public:
 protected:
  ParameterMember(const char* name, bool is_list) : name_(name), is_list_(is_list) {}
  ~ParameterMember() = default;

  void clear();
  void add(const void* address);
  void add(const Number& number);

 private:
  friend class Parameters;

  void push_back(int64_t word);

  const char* name_;
  bool is_list_;
  Recording* recording_ = Recording::current();
  size_t count_ = 0;
  int64_t first_ = 0;
  std::vector<int64_t> others_;   // after the first
  std::vector<Number> formulas_;  // of all, where they are recorded
};

// The members of one struct, in the order of their declaration.
class Parameters : public Scoped {
 public:
  // Throws Error with the member's name where one was not set. `blocks` replaces the plan's count where it is
  // not 0.
  void launch(const Function& function, Stream stream, const Number& blocks = 0) const;
  // What each word is called: "input", "parameter[1]".
  std::vector<std::string> names() const;

 protected:
  Parameters() { members_.reserve(24); }
  ~Parameters() = default;

 private:
  friend class Word;
  friend class WordList;

  std::vector<const ParameterMember*> members_;
};

class Word : public ParameterMember {
 public:
  Word(Parameters& owner, const char* name) : ParameterMember(name, false) { owner.members_.push_back(this); }

  template <class Value>
  Word& operator=(const Value& value) {
    clear();
    if constexpr (std::convertible_to<Value, const void*>) {
      add(static_cast<const void*>(value));
    } else if constexpr (std::floating_point<Value>) {
      add(Number(std::bit_cast<int64_t>(static_cast<double>(value))));  // a double in the kernel
    } else {
      add(Number(value));
    }
    return *this;
  }
};

// An array; one of no elements still takes a word.
class WordList : public ParameterMember {
 public:
  WordList(Parameters& owner, const char* name) : ParameterMember(name, true) {
    owner.members_.push_back(this);
  }

  template <class Pointer>
  WordList& operator=(const std::vector<Pointer>& pointers) {
    clear();
    for (const Pointer pointer : pointers) add(static_cast<const void*>(pointer));
    if (pointers.empty()) add(static_cast<const void*>(nullptr));
    return *this;
  }
};

}  // namespace onepass::cuda

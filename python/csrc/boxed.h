// A function as the boxed kernel of an operator: values off PyTorch's stack, its result onto it.
#pragma once

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "onepass/error.h"

namespace onepass::torch_binding {

// From the values of a boxed call to those of a function and back. TORCH_BOX would do, but its strings leak
// (to<std::string> of PyTorch 2.10 and 2.11 never deletes its copy).
template <class T>
struct Taken {
  static T from(StableIValue value) { return torch::stable::detail::to<T>(value); }
};

template <>
struct Taken<std::string> {
  static std::string from(StableIValue value) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

template <class T>
void put(StableIValue* stack, const T& result) {
  stack[0] = torch::stable::detail::from(result);
}

template <class... T>
void put(StableIValue* stack, const std::tuple<T...>& results) {
  std::apply([&](const auto&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); },
             results);
}

// The last Error of this thread that an operator threw.
std::string& last_refusal();

// Error becomes std::invalid_argument, which arrives in Python as ValueError; in PyTorch 2.15 as
// RuntimeError, which the package tells from others by last_refusal.
template <auto function, class Result, class... Parameters, size_t... index>
void call(StableIValue* stack, Result (*)(Parameters...), std::index_sequence<index...>) {
  std::tuple<std::decay_t<Parameters>...> arguments{Taken<std::decay_t<Parameters>>::from(stack[index])...};
  try {
    put(stack, std::apply(function, std::move(arguments)));
  } catch (const Error& error) {
    last_refusal() = error.what();
    throw std::invalid_argument(error.what());
  }
}

template <class Result, class... Parameters>
constexpr size_t arity(Result (*)(Parameters...)) {
  return sizeof...(Parameters);
}

template <auto function>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  call<function>(stack, function, std::make_index_sequence<arity(function)>());
}

}  // namespace onepass::torch_binding

// A number of a launch that may depend on the batch, with the formula it comes from.
//
// A plan is made for one batch and needs values. A plan that is exported as source runs any batch and needs
// formulas. Rows compute with Numbers and so write each formula once: the value is there at once, and text()
// is the same formula in C++.
#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace onepass::cuda {

class Number {
 public:
  template <std::integral T>
  Number(T constant) : value_(static_cast<int64_t>(constant)) {}
  Number() = default;
  // The batch of the problem, whose value this is.
  static Number batch(int64_t value);
  // What is known when a launch is made, as C++ text: an address, the blocks a GPU runs at a time.
  static Number named(int64_t value, std::string text);

  // The same with what it is called where its formula is written more than once.
  Number called(std::string name) const;

  operator int64_t() const { return value_; }
  int64_t value() const { return value_; }
  // The same formula for another batch.
  int64_t value_at(int64_t batch) const;
  // The same formula for another batch, with another value of one of the names.
  int64_t value_at(int64_t batch, const std::string& name, int64_t named) const;
  // C++ over `batch`, the names, std::min, std::max, clamp(value, low, high) and divide_up.
  std::string text() const;

  friend Number add(const Number& a, const Number& b);
  friend Number subtract(const Number& a, const Number& b);
  friend Number multiply(const Number& a, const Number& b);
  friend Number divide(const Number& a, const Number& b);
  friend Number quotient_up(const Number& a, const Number& b);
  friend Number minimum(const Number& a, const Number& b);
  friend Number maximum(const Number& a, const Number& b);

 private:
  friend class FormulaTexts;
  struct Formula;

  static Number combine(char operation, int64_t value, const Number& a, const Number& b);

  int64_t value_ = 0;
  std::shared_ptr<const Formula> formula_;  // null for a constant
};

Number add(const Number& a, const Number& b);
Number subtract(const Number& a, const Number& b);
Number multiply(const Number& a, const Number& b);
Number divide(const Number& a, const Number& b);  // rounds down, of what is not negative
Number quotient_up(const Number& a, const Number& b);
Number minimum(const Number& a, const Number& b);
Number maximum(const Number& a, const Number& b);

inline Number clamp(const Number& value, const Number& low, const Number& high) {
  return minimum(maximum(value, low), high);
}
inline Number round_up(const Number& a, int64_t multiple) {
  return multiply(quotient_up(a, multiple), multiple);
}
// `value` where the condition holds, else 0.
inline Number when(bool so, const Number& value) { return so ? value : Number(); }

// Formulas as text, those that several of them share written once, as constants with a name.
class FormulaTexts {
 public:
  // Counts a formula that text() will be asked for.
  void expect(const Number& number);
  std::string text(const Number& number) { return text(number, 0); }
  // The constants that the texts so far use, in order: name and formula.
  const std::vector<std::pair<std::string, std::string>>& constants() const { return constants_; }

 private:
  std::string text(const Number& number, int level);
  std::string written(const Number& number, int level);
  std::string unused_name(const std::string& wanted) const;

  std::map<const Number::Formula*, int> uses_;
  std::map<const Number::Formula*, std::string> names_;
  std::vector<std::pair<std::string, std::string>> constants_;
};

// Operators of a Number with integers and Numbers. They are templates, because the built-in operators would
// match a Number's value equally well.
template <class A, class B>
concept NumberPair = (std::same_as<A, Number> && (std::same_as<B, Number> || std::integral<B>)) ||
                     (std::integral<A> && std::same_as<B, Number>);

template <class A, class B>
requires NumberPair<A, B> Number operator+(const A& a, const B& b) { return add(a, b); }
template <class A, class B>
requires NumberPair<A, B> Number operator-(const A& a, const B& b) { return subtract(a, b); }
template <class A, class B>
requires NumberPair<A, B> Number operator*(const A& a, const B& b) { return multiply(a, b); }
template <class A, class B>
requires NumberPair<A, B> Number divide_up(const A& a, const B& b) { return quotient_up(a, b); }
template <class A, class B>
requires NumberPair<A, B> Number operator/(const A& a, const B& b) { return divide(a, b); }

}  // namespace onepass::cuda

// Numbers with their formulas.
#include "cuda/runtime/number.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace onepass::cuda {
namespace {

// How tightly an operation binds: a text in parentheses binds tightest.
constexpr int sum_level = 1, product_level = 2, name_level = 3;

int level_of(char operation) {
  if (operation == '+' || operation == '-') return sum_level;
  if (operation == '*' || operation == '/') return product_level;
  return name_level;
}

int64_t apply(char operation, int64_t a, int64_t b) {
  switch (operation) {
    case '+':
      return a + b;
    case '-':
      return a - b;
    case '*':
      return a * b;
    case '/':
      return a / b;
    case 'u':
      return (a + b - 1) / b;
    case '<':
      return std::min(a, b);
    default:
      return std::max(a, b);
  }
}

}  // namespace

struct Number::Formula {
  char operation;    // 'b': the batch; 'n': a name; else of a and b
  std::string name;  // of a name; else what it is called, if anything
  Number a, b;
};

Number Number::batch(int64_t value) {
  Number number(value);
  number.formula_ = std::make_shared<const Formula>(Formula{'b', "batch", {}, {}});
  return number;
}

Number Number::named(int64_t value, std::string text) {
  Number number(value);
  number.formula_ = std::make_shared<const Formula>(Formula{'n', std::move(text), {}, {}});
  return number;
}

Number Number::combine(char operation, int64_t value, const Number& a, const Number& b) {
  Number number(value);
  if (a.formula_ || b.formula_)
    number.formula_ = std::make_shared<const Formula>(Formula{operation, {}, a, b});
  return number;
}

Number add(const Number& a, const Number& b) {
  if (!a.formula_ && a.value_ == 0) return b;
  if (!b.formula_ && b.value_ == 0) return a;
  return Number::combine('+', a.value_ + b.value_, a, b);
}

Number subtract(const Number& a, const Number& b) {
  if (!b.formula_ && b.value_ == 0) return a;
  return Number::combine('-', a.value_ - b.value_, a, b);
}

Number multiply(const Number& a, const Number& b) {
  if (!a.formula_ && b.formula_) return multiply(b, a);  // the constant comes last
  if (!b.formula_ && b.value_ == 1) return a;
  if (!b.formula_ && b.value_ == 0) return 0;
  // (x * 3) * 4 is x * 12.
  const bool again = a.formula_ && !b.formula_ && a.formula_->operation == '*' && !a.formula_->b.formula_;
  if (again) return multiply(a.formula_->a, a.formula_->b.value_ * b.value_);
  return Number::combine('*', a.value_ * b.value_, a, b);
}

Number divide(const Number& a, const Number& b) {
  if (!b.formula_ && b.value_ == 1) return a;
  return Number::combine('/', a.value_ / b.value_, a, b);
}

Number quotient_up(const Number& a, const Number& b) {
  if (!b.formula_ && b.value_ == 1) return a;
  return Number::combine('u', apply('u', a.value_, b.value_), a, b);
}

Number minimum(const Number& a, const Number& b) {
  return Number::combine('<', std::min(a.value_, b.value_), a, b);
}

Number maximum(const Number& a, const Number& b) {
  return Number::combine('>', std::max(a.value_, b.value_), a, b);
}

int64_t Number::value_at(int64_t batch) const { return value_at(batch, {}, 0); }

int64_t Number::value_at(int64_t batch, const std::string& name, int64_t named) const {
  if (!formula_) return value_;
  if (formula_->operation == 'n') return formula_->name == name ? named : value_;
  if (formula_->operation == 'b') return batch;
  return apply(formula_->operation, formula_->a.value_at(batch, name, named),
               formula_->b.value_at(batch, name, named));
}

std::string Number::text() const {
  FormulaTexts texts;
  return texts.text(*this);
}

Number Number::called(std::string name) const {
  Number number = *this;
  if (!formula_ || formula_->operation == 'b' || formula_->operation == 'n') return number;
  Formula formula = *formula_;
  formula.name = std::move(name);
  number.formula_ = std::make_shared<const Formula>(std::move(formula));
  return number;
}

void FormulaTexts::expect(const Number& number) {
  const Number::Formula* formula = number.formula_.get();
  if (!formula || formula->operation == 'b' || formula->operation == 'n') return;
  const Number::Formula* first = formula->a.formula_.get();
  const bool is_address = formula->operation == '+' && first && first->operation == 'n';
  if (!is_address && ++uses_[formula] > 1) return;
  expect(formula->a);
  expect(formula->b);
}

std::string FormulaTexts::unused_name(const std::string& wanted) const {
  std::string name = wanted;
  const auto is_taken = [&] {
    return std::any_of(constants_.begin(), constants_.end(),
                       [&](const auto& known) { return known.first == name; });
  };
  for (int i = 2; is_taken(); ++i) name = wanted + '_' + std::to_string(i);
  return name;
}

std::string FormulaTexts::text(const Number& number, int level) {
  const Number::Formula* formula = number.formula_.get();
  const auto uses = uses_.find(formula);
  if (uses == uses_.end() || uses->second < 2) return written(number, level);
  if (const auto known = names_.find(formula); known != names_.end()) return known->second;
  const std::string text = written(number, 0);
  constexpr size_t short_text = 12;
  if (text.size() <= short_text) return written(number, level);
  std::string name = unused_name(formula->name.empty() ? "number" : formula->name);
  constants_.emplace_back(name, text);
  names_.emplace(formula, name);
  return name;
}

std::string FormulaTexts::written(const Number& number, int level) {
  if (!number.formula_) return std::to_string(number.value_);
  const auto& [operation, name, a, b] = *number.formula_;
  if (operation == 'b' || operation == 'n') return name;
  const Number::Formula* inner = a.formula_.get();
  if (operation == '<' && inner && inner->operation == '>' && uses_[inner] < 2) {
    const std::string value = text(inner->a, 0);
    const std::string low = text(inner->b, 0);
    return "clamp(" + value + ", " + low + ", " + text(b, 0) + ")";
  }
  const bool is_call = level_of(operation) == name_level;
  const int own = is_call ? 0 : level_of(operation);
  const std::string left = text(a, own);  // first, for the order of constants
  const std::string right = text(b, is_call ? 0 : own + 1);
  if (operation == 'u') return "divide_up(" + left + ", " + right + ")";
  if (is_call) {
    return std::string(operation == '<' ? "std::min" : "std::max") + "<int64_t>(" + left + ", " + right + ")";
  }
  const std::string both = left + ' ' + operation + ' ' + right;
  return own < level ? "(" + both + ")" : both;
}

}  // namespace onepass::cuda

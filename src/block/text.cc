// Small text tools that parsing, printing and error sentences share.
#include "block/text.h"

#include <array>
#include <charconv>
#include <cmath>

#include "block/checked.h"

namespace onepass {
namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The sign and digits of a whole number, however many.
bool looks_whole(std::string_view text) {
  if (!text.empty() && text.front() == '-') text.remove_prefix(1);
  if (text.empty()) return false;
  for (const char c : text) {
    if (!is_digit(c)) return false;
  }
  return true;
}

}  // namespace

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t end = text.find(separator); end != std::string_view::npos; end = text.find(separator)) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> found;
  for (text = trim(text); !text.empty(); text = trim(text)) {
    size_t end = 0;
    while (end < text.size() && !is_space(text[end])) ++end;
    found.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return found;
}

std::string excerpt(std::string_view text) {
  constexpr size_t longest = 80;
  text = trim(text);
  std::string shown(text.substr(0, longest));
  for (char& c : shown) {
    if (is_space(c)) c = ' ';
    if (c < ' ' || c > '~') c = '?';
  }
  return text.size() > longest ? shown + "..." : shown;
}

std::string enumerate(const std::vector<std::string_view>& items) {
  std::string list;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) list += i + 1 == items.size() ? " and " : ", ";
    list += items[i];
  }
  return list;
}

std::string number_text(double value) {
  std::array<char, 32> digits{};
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  return {digits.data(), result.ptr};
}

std::optional<int64_t> parse_whole(std::string_view text) {
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  if (value < -max_number || value > max_number) return std::nullopt;
  return value;
}

std::string_view whole_number_rule(std::string_view text) {
  if (!looks_whole(text)) return "must be a whole number";
  return text.front() == '-' ? "must not be negative" : "must be at most 2147483647";
}

std::optional<double> parse_limit(std::string_view text) {
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc{} || end != text.data() + text.size() || std::isnan(value)) return std::nullopt;
  return value;
}

std::optional<double> parse_real(std::string_view text) {
  const auto value = parse_limit(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

}  // namespace onepass

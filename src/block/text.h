// Small text tools that parsing, printing and error sentences share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace onepass {

inline constexpr size_t max_text_bytes = size_t{64} * 1024;

std::string_view trim(std::string_view text);
std::vector<std::string_view> split(std::string_view text, char separator);
// The words of a text, separated by whitespace.
std::vector<std::string_view> words(std::string_view text);

// The text as an error sentence shows it: on one line, printable, at most 80 characters.
std::string excerpt(std::string_view text);
// "a, b and c"
std::string enumerate(const std::vector<std::string_view>& items);
// The shortest decimal that reads back as the same double.
std::string number_text(double value);

// A whole number within +-max_number that is all of the text.
std::optional<int64_t> parse_whole(std::string_view text);
// Why parse_whole refused a text: "must be a whole number" or "must be at most 2147483647".
std::string_view whole_number_rule(std::string_view text);
// A finite double that is all of the text.
std::optional<double> parse_real(std::string_view text);
// The same, or an infinity.
std::optional<double> parse_limit(std::string_view text);

}  // namespace onepass

// The hash of what a plan does on a GPU: its row, its kernels and its launches.
#include "cuda/export/plan_hash.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda/export/record_plan.h"
#include "cuda/runtime/device_code.h"
#include "cuda/runtime/recording.h"
#include "cuda/runtime/sha256.h"

namespace onepass::cuda {
namespace {

// The end of the literal that begins at `from`, behind its closing quote.
size_t end_of_literal(std::string_view text, size_t from) {
  if (from > 0 && text[from] == '"' && text[from - 1] == 'R') {
    const size_t open = text.find('(', from);
    if (open == text.npos) return text.size();
    std::string close(text.substr(from, open - from));  // the quote and the delimiter
    close.front() = ')';
    close += '"';
    const size_t end = text.find(close, open);
    return end == text.npos ? text.size() : end + close.size();
  }
  for (size_t i = from + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == text[from]) {
      return i + 1;
    }
  }
  return text.size();
}

// A quote between digits separates them: 1'000.
bool begins_literal(std::string_view text, size_t i) {
  if (text[i] == '"') return true;
  const auto is_word = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  return text[i] == '\'' && (i == 0 || !is_word(text[i - 1]));
}

// Each comment is a space; those of several lines keep no line.
std::string with_spaces_for_comments(std::string_view text) {
  std::string code;
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (begins_literal(text, i)) {
      end = end_of_literal(text, i);
    } else if (text.substr(i, 2) == "//") {
      i = std::min(text.find('\n', i), text.size());
      continue;
    } else if (text.substr(i, 2) == "/*") {
      i = std::min(text.find("*/", i + 2), text.size() - 2) + 2;
      code += ' ';
      continue;
    }
    code += text.substr(i, end - i);
    i = end;
  }
  return code;
}

// Where a header lies is not what a kernel does.
std::string without_includes(std::string_view code) {
  std::string lines;
  for (size_t begin = 0; begin < code.size();) {
    const size_t end = std::min(code.find('\n', begin), code.size());
    const std::string_view line = code.substr(begin, end - begin);
    if (!line.starts_with("#include")) lines.append(line).append("\n");
    begin = end + 1;
  }
  return lines;
}

// Of a file of the library, computed once.
std::string code_hash(const DeviceFile& file) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<const DeviceFile*, std::string>;
  const std::lock_guard lock(mutex);
  std::string& hash = known[&file];
  if (hash.empty()) hash = Sha256().add_field(without_includes(without_comments(file.text))).hex();
  return hash;
}

std::string text_of(const Source& source) {
  std::string text = source.name + '\n' + without_includes(without_comments(source.text));
  std::set<std::string> hashes;
  for (const DeviceFile* file : included_files(source.text)) hashes.insert(code_hash(*file));
  for (const std::string& hash : hashes) text += hash + '\n';
  return text;
}

std::vector<const Number*> numbers_of(const Recording::Step& step) {
  std::vector<const Number*> numbers{&step.blocks, &step.memory, &step.bytes};
  for (const Number& word : step.words) numbers.push_back(&word);
  return numbers;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != text.npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

std::string text_of(const Recording& recording, const Number& workspace_bytes) {
  std::string text;
  for (const Recording::Kernel& kernel : recording.kernels()) {
    text += text_of(kernel.source);
    for (const uint32_t number : {kernel.threads, kernel.cluster, kernel.shared_bytes,
                                  uint32_t{kernel.cooperative}, uint32_t{kernel.waits}})
      text += std::to_string(number) + '\n';
  }
  FormulaTexts texts;
  texts.expect(workspace_bytes);
  for (const Recording::Step& step : recording.steps()) {
    for (const Number* number : numbers_of(step)) texts.expect(*number);
  }
  text += texts.text(workspace_bytes) + '\n';
  for (const Recording::Step& step : recording.steps()) {
    text += "step " + std::to_string(step.kernel) + '\n';
    for (const Number* number : numbers_of(step)) text += texts.text(*number) + '\n';
  }
  for (const auto& [name, formula] : texts.constants())
    text.append(name).append(" = ").append(formula).append("\n");
  // What formulas call the clusters of a kernel that a GPU runs at a time holds a hash of its text.
  for (size_t i = 0; i < recording.kernels().size(); ++i)
    text = replaced(std::move(text), recording.kernels()[i].resident, "resident_" + std::to_string(i));
  return text;
}

template <class AnyPlan, class Record>
void add_recorded(const AnyPlan& plan, const Record& record_plan, Sha256& hash) {
  Recording recording;
  void* workspace = nullptr;
  record_plan(plan, recording, workspace);
  const Number bytes = recording.end_of(workspace);
  recording.stop();
  hash.add_field(text_of(recording, bytes));
}

}  // namespace

std::string without_comments(std::string_view text) {
  const std::string code = with_spaces_for_comments(text);
  std::string lines;
  for (size_t begin = 0; begin < code.size();) {
    const size_t end = std::min(code.find('\n', begin), code.size());
    const std::string_view line = std::string_view(code).substr(begin, end - begin);
    const size_t last = line.find_last_not_of(" \t\r");
    if (last != line.npos) lines += std::string(line.substr(0, last + 1)) + '\n';
    begin = end + 1;
  }
  return lines;
}

std::string plan_hash(const Plan& plan) {
  Sha256 hash;
  hash.add_field(plan.strategy());
  for (const bool with_statistics : {false, true}) {
    if (with_statistics && plan.problem().block.norm() == nullptr) continue;
    add_recorded(
        plan,
        [&](const Plan& own, Recording& recording, void*& workspace) {
          record(own, with_statistics, recording, workspace);
        },
        hash);
  }
  return hash.hex();
}

std::string plan_hash(const BackwardPlan& plan) {
  Sha256 hash;
  hash.add_field(plan.strategy());
  add_recorded(
      plan,
      [](const BackwardPlan& own, Recording& recording, void*& workspace) {
        record(own, recording, workspace);
      },
      hash);
  return hash.hex();
}

}  // namespace onepass::cuda

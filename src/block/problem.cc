// Problems: construction, problem strings, checks and the count of multiply-adds.
#include "onepass/problem.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "block/checked.h"
#include "block/spec_checks.h"
#include "block/text.h"
#include "onepass/error.h"

namespace onepass {
namespace {

constexpr int max_threads = 1024;

// Reads one word of a mode; false where it is unknown or repeats an earlier one.
struct ModeReader {
  Mode mode;
  bool has_dtype = false;
  bool has_numerics = false;

  bool take(std::string_view word) { return take_dtype(word) || take_numerics(word); }

 private:
  bool take_dtype(std::string_view word) {
    const bool is_tf32 = word == "tf32";
    const bool is_tf32_away = word == "tf32_away";
    const bool is_near_f32 = word == "near_f32";
    const bool is_type = word == "f32" || word == "f16" || word == "bf16" || word == "f64";
    if (has_dtype || !(is_tf32 || is_tf32_away || is_near_f32 || is_type)) return false;
    has_dtype = true;
    if (is_type) mode.dtype = parse_dtype(word);
    if (is_tf32) mode.precision = Precision::tf32;
    if (is_tf32_away) mode.precision = Precision::tf32_away;
    if (is_near_f32) mode.precision = Precision::near_f32;
    return true;
  }

  bool take_numerics(std::string_view word) {
    if (has_numerics || !(word == "pytorch" || word == "strict" || word == "fast")) return false;
    has_numerics = true;
    if (word == "strict") mode.numerics = Numerics::strict;
    if (word == "fast") mode.numerics = Numerics::fast;
    return true;
  }
};

std::string_view dtype_word(const Mode& mode) {
  if (mode.precision == Precision::tf32) return "tf32";
  if (mode.precision == Precision::tf32_away) return "tf32_away";
  return mode.precision == Precision::near_f32 ? "near_f32" : name(mode.dtype);
}

std::string_view numerics_word(const Mode& mode) {
  if (mode.numerics == Numerics::strict) return "strict";
  return mode.numerics == Numerics::fast ? "fast" : "";
}

Mode mode_of(const Problem& problem) { return {problem.input.dtype, problem.precision, problem.numerics}; }

// Which modes a device and a block have.
void check_mode(const Problem& problem) {
  const Mode mode = mode_of(problem);
  const std::string subject = problem.block.text() + ": ";
  const bool is_cuda = problem.device.kind == Device::Kind::cuda;
  if (mode.precision != Precision::f32 &&
      (!is_cuda || problem.block.conv() == nullptr || mode.dtype != DType::f32)) {
    throw Error(subject + std::string(dtype_word(mode)) + " is a precision of f32 convolutions on a GPU, " +
                problem.device.text() + ' ' + std::string(name(mode.dtype)) + " has none");
  }
  if (mode.numerics == Numerics::strict && mode.precision != Precision::f32) {
    throw Error(subject + "strict computes in f32 throughout, write f32 instead of " +
                std::string(dtype_word(mode)));
  }
  const bool is_16_bits = mode.dtype == DType::f16 || mode.dtype == DType::bf16;
  if (mode.numerics == Numerics::fast && mode.precision != Precision::tf32 && !is_16_bits) {
    throw Error(subject + "fast is coarser than tf32, write tf32 instead of " +
                std::string(dtype_word(mode)));
  }
}

// The block's own sentence comes first where it cannot take the input.
TensorSpec dense_input(const Block& block, Shape sizes, DType dtype, Layout layout) {
  block.output_shape(sizes);
  return TensorSpec::dense(dtype, std::move(sizes), layout);
}

std::vector<TensorSpec> dense_parameters(const Block& block, const Shape& input, DType dtype, Layout layout) {
  std::vector<TensorSpec> specs;
  for (const Parameter& parameter : block.parameters(input)) {
    const Layout own = is_tensor_operand(block, parameter) ? layout : Layout::nchw;
    specs.push_back(TensorSpec::dense(dtype, parameter.sizes, own));
  }
  return specs;
}

// How a spec differs from the expected one: "output bf16 strides 400x100x10x1".
std::string difference(std::string_view tensor, const TensorSpec& spec, const TensorSpec& expected) {
  std::string text(tensor);
  if (spec.dtype != expected.dtype) text += ' ' + std::string(name(spec.dtype));
  if (spec.strides != expected.strides) text += " strides " + to_string(spec.strides);
  return text;
}

// How each tensor differs from the dense problem of this layout; nothing for those that do not.
std::vector<std::string> differences(const Problem& problem, Layout layout) {
  const Problem dense(problem.block, problem.input.sizes, problem.input.dtype, Device::cpu(), layout);
  std::vector<std::string> list;
  const auto compare = [&](std::string_view tensor, const TensorSpec& spec, const TensorSpec& expected) {
    if (spec != expected) list.push_back(difference(tensor, spec, expected));
  };
  compare("input", problem.input, dense.input);
  compare("output", problem.output, dense.output);
  const auto named = problem.block.parameters(problem.input.sizes);
  for (size_t i = 0; i < named.size() && i < problem.parameters.size(); ++i) {
    compare(named[i].name, problem.parameters[i], dense.parameters[i]);
  }
  return list;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The index behind "cuda:"; -1 where it is no number of up to three digits.
int device_index(std::string_view digits) {
  if (digits.empty() || digits.size() > 3) return -1;
  int index = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return -1;
    index = index * 10 + (c - '0');
  }
  return index;
}

// Sum over i < count of floor((slope * i + offset) / divisor), as Euclid's algorithm: logarithmic time.
// No operand is negative; every partial sum is at most the result.
int64_t floor_sum(int64_t count, int64_t divisor, int64_t slope, int64_t offset) {
  int64_t sum = 0;
  while (true) {
    sum += count * (count - 1) / 2 * (slope / divisor) + count * (offset / divisor);
    slope %= divisor;
    offset %= divisor;
    const int64_t top = slope * count + offset;
    if (top < divisor) return sum;
    count = top / divisor;
    offset = top % divisor;
    std::swap(divisor, slope);
  }
}

// Positions and taps of one dimension: position i and tap t meet at i * stride + t * dilation.
struct Lattice {
  int64_t positions;
  int64_t stride;
  int64_t taps;
  int64_t dilation;

  // Pairs (i, t) that meet below `bound`.
  int64_t pairs_below(int64_t bound) const {
    if (bound <= 0) return 0;
    // Taps below `full` meet every position, those from `some` on meet none.
    const int64_t some = std::min(taps, divide_up(bound, dilation));
    const int64_t room = bound - (positions - 1) * stride;
    const int64_t full = room <= 0 ? 0 : std::min(taps, divide_up(room, dilation));
    if (some == full) return full * positions;
    const int64_t last = bound - (some - 1) * dilation;
    return full * positions + floor_sum(some - full, stride, dilation, last + stride - 1);
  }
};

// Pairs of output position and tap that meet an input element in one dimension.
int64_t real_taps(const Conv& conv, size_t d, int64_t input, int64_t output) {
  const int64_t positions = conv.transposed ? input : output;
  const int64_t inside = conv.transposed ? output : input;
  const Lattice lattice{positions, conv.stride[d], conv.kernel[d], conv.dilation[d]};
  const int64_t begin = conv.padding_before[d];
  return lattice.pairs_below(begin + inside) - lattice.pairs_below(begin);
}

}  // namespace

Device Device::parse(std::string_view text, int threads) {
  constexpr std::string_view prefix = "cuda:";
  if (text == "cpu") return cpu(threads);
  if (text == "cuda") return cuda();
  if (text.starts_with("cuda:sm_")) return cuda_architecture(std::string(text.substr(prefix.size())));
  const int index = text.starts_with(prefix) ? device_index(text.substr(prefix.size())) : -1;
  if (index >= 0) return cuda(index);
  throw Error("device \"" + std::string(text) + "\" is unknown, must be cpu, cuda, cuda:1 or cuda:sm_90a");
}

std::string Device::text() const {
  if (kind == Kind::cpu) return "cpu";
  return "cuda:" + (architecture.empty() ? std::to_string(index) : architecture);
}

Problem::Problem(Block stages, Shape input_sizes, DType dtype, Device where, Layout layout)
    : block(std::move(stages)),
      input(dense_input(block, std::move(input_sizes), dtype, layout)),
      output(TensorSpec::dense(dtype, block.output_shape(input.sizes), layout)),
      parameters(dense_parameters(block, input.sizes, dtype, layout)),
      device(std::move(where)) {
  validate();
}

Problem Problem::parse(std::string_view text, Device device) {
  const size_t at = text.find('@');
  const auto specification = words(at == std::string_view::npos ? "" : text.substr(at + 1));
  if (specification.empty()) {
    throw Error("problem '" + excerpt(text) +
                "': the sizes are missing, write BLOCK @ SIZES as in \"relu @ 2x3x9x9\"");
  }
  ModeReader reader;
  std::optional<Layout> layout;
  for (size_t i = 1; i < specification.size(); ++i) {
    const std::string_view word = specification[i];
    if (!layout && (word == "nchw" || word == "nhwc")) {
      layout = parse_layout(word);
    } else if (!reader.take(word)) {
      throw Error(
          "problem '" + excerpt(text) + "': '" + excerpt(word) +
          "' is not accepted after the sizes, only one of f32, tf32, tf32_away, near_f32, f16, bf16 and f64, "
          "one of nchw and nhwc and one of pytorch, strict and fast");
    }
  }
  Problem problem(Block::parse(text.substr(0, at)), parse_shape(specification[0]), reader.mode.dtype,
                  std::move(device), layout.value_or(Layout::nchw));
  problem.precision = reader.mode.precision;
  problem.numerics = reader.mode.numerics;
  problem.validate();
  return problem;
}

Mode Mode::parse(std::string_view text) {
  ModeReader reader;
  for (const std::string_view word : words(text)) {
    if (reader.take(word)) continue;
    throw Error("mode '" + excerpt(text) + "': '" + excerpt(word) +
                "' is not accepted, only one of f32, tf32, tf32_away, near_f32, f16, bf16 and f64 and one of "
                "pytorch, strict and fast");
  }
  return reader.mode;
}

std::string Mode::text() const {
  const std::string_view word = numerics_word(*this);
  return std::string(dtype_word(*this)) + (word.empty() ? "" : ' ' + std::string(word));
}

void Problem::validate() const {
  const Shape output_sizes = block.output_shape(input.sizes);
  check_spec("input", input, input.sizes);
  check_spec("output", output, output_sizes);
  check_no_overlap("output", output);
  const auto expected = block.parameters(input.sizes);
  if (parameters.size() != expected.size()) {
    throw Error(block.text() + ": " + std::to_string(parameters.size()) + " parameters, must be " +
                std::to_string(expected.size()));
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    check_spec(expected[i].name, parameters[i], expected[i].sizes);
    if (is_tensor_operand(block, expected[i])) continue;
    const bool weights = expected[i].role == Parameter::Role::conv_weight;
    if (weights && device.kind == Device::Kind::cpu && lies_channels_last(parameters[i])) continue;
    check_contiguous(expected[i].name, parameters[i]);
  }
  check_mode(*this);
  if (device.threads < 1 || device.threads > max_threads) {
    throw Error("device: threads is " + std::to_string(device.threads) + ", must be 1 to " +
                std::to_string(max_threads));
  }
}

std::string Problem::text() const {
  // An input of one channel and one position is dense in both layouts: the other tensors decide.
  const auto from_nchw = differences(*this, Layout::nchw);
  const auto from_nhwc = differences(*this, Layout::nhwc);
  const bool nhwc = from_nhwc.size() < from_nchw.size();
  const Mode mode = mode_of(*this);
  std::string text = block.text() + " @ " + to_string(input.sizes) + ' ' + std::string(dtype_word(mode));
  if (nhwc) text += " nhwc";
  if (mode.numerics != Numerics::pytorch) text += ' ' + std::string(numerics_word(mode));
  std::string listed;
  for (const std::string& item : nhwc ? from_nhwc : from_nchw) listed += (listed.empty() ? "" : ", ") + item;
  return listed.empty() ? text : text + " (" + listed + ')';
}

int64_t Problem::conv_multiply_adds() const {
  const Conv* conv = block.conv();
  if (!conv) return 0;
  const Shape convolved = block.conv_output_shape(input.sizes);
  Shape factors{convolved[0], convolved[1], conv->in_channels / conv->groups};
  for (size_t d = 0; d < static_cast<size_t>(conv->rank); ++d) {
    factors.push_back(real_taps(*conv, d, input.sizes[d + 2], convolved[d + 2]));
  }
  std::optional<int64_t> count = 1;
  for (const int64_t factor : factors) count = count ? checked_multiply(*count, factor) : std::nullopt;
  if (!count) throw Error(text() + ": the convolution has more than 2^63-1 multiply-adds");
  return *count;
}

}  // namespace onepass

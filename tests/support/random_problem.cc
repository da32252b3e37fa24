// Random valid problems that span the block language, the element types, the layouts and odd strides.
#include "support/random_problem.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <random>

namespace onepass::testing {
namespace {

constexpr int64_t max_multiply_adds = 300'000;
constexpr int64_t max_elements = 20'000;

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  // A whole number in [least, most].
  int64_t number(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine_);
  }
  double real(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(engine_);
  }
  bool chance(double probability) { return real(0, 1) < probability; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[number(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  int64_t divisor_of(int64_t value) {
    int64_t divisor = number(1, value);
    while (value % divisor != 0) --divisor;
    return divisor;
  }

 private:
  std::mt19937_64 engine_;
};

int64_t random_channels(Dice& dice) { return dice.chance(0.1) ? dice.number(17, 70) : dice.number(1, 17); }

int64_t span(const Conv& conv, size_t d) { return conv.dilation[d] * (conv.kernel[d] - 1) + 1; }

void choose_same_padding(Conv& conv) {
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    conv.stride[d] = 1;
    conv.padding_before[d] = (span(conv, d) - 1) / 2;
    conv.padding_after[d] = span(conv, d) - 1 - conv.padding_before[d];
  }
}

void choose_extents(Dice& dice, Conv& conv) {
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    conv.kernel[d] = dice.chance(0.05) ? dice.number(6, 11) : dice.number(1, 5);
    conv.stride[d] = dice.chance(0.5) ? 1 : dice.number(2, 4);
    conv.dilation[d] = dice.chance(0.75) ? 1 : dice.number(2, 3);
    conv.padding_before[d] = conv.padding_after[d] = dice.chance(0.4) ? 0 : dice.number(0, span(conv, d));
    if (conv.transposed) {
      conv.output_padding[d] =
          dice.chance(0.6) ? 0 : dice.number(0, std::max(conv.stride[d], conv.dilation[d]) - 1);
    }
  }
  if (!conv.transposed && dice.chance(0.15)) choose_same_padding(conv);
}

Conv random_conv(Dice& dice, int rank) {
  Conv conv;
  conv.rank = rank;
  conv.transposed = dice.chance(0.4);
  conv.groups = dice.chance(0.7) ? 1 : dice.number(2, 8);
  conv.in_channels = conv.groups * (conv.groups > 1 ? dice.number(1, 4) : random_channels(dice));
  conv.out_channels = conv.groups * (conv.groups > 1 ? dice.number(1, 4) : random_channels(dice));
  conv.bias = dice.chance(0.7);
  choose_extents(dice, conv);
  return conv;
}

Per random_per(Dice& dice, Op op) {
  switch (argument_kind(op)) {
    case ArgumentKind::slope:
      return dice.one_of({Per::tensor, Per::channel});
    case ArgumentKind::channel:
      return dice.one_of({Per::channel, Per::sample});
    case ArgumentKind::none:
    case ArgumentKind::tensor:
      break;
  }
  return Per::tensor;
}

Pointwise random_pointwise(Dice& dice) {
  Pointwise pointwise;
  pointwise.op = static_cast<Op>(dice.number(0, op_count - 1));
  pointwise.per = random_per(dice, pointwise.op);
  if (constant_count(pointwise.op) >= 1) pointwise.a = dice.real(-2, 2);
  if (constant_count(pointwise.op) >= 2) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    pointwise.b = dice.chance(0.2) ? infinity : pointwise.a + dice.real(0, 3);
    if (dice.chance(0.2)) pointwise.a = -infinity;
  }
  return pointwise;
}

void append_pointwise(Dice& dice, std::vector<Stage>& stages) {
  const int64_t count = dice.chance(0.05) ? dice.number(5, 12) : dice.number(0, 2);
  for (int64_t i = 0; i < count; ++i) stages.push_back(random_pointwise(dice));
}

Norm random_norm(Dice& dice, int64_t channels) {
  Norm norm;
  norm.kind = dice.chance(0.8) ? Norm::Kind::group : Norm::Kind::instance;
  if (norm.kind == Norm::Kind::group) norm.groups = dice.divisor_of(channels);
  norm.eps = dice.one_of({1e-5, 1e-5, 1e-5, 1e-6, 1e-3, 0.0, 1e-12});
  norm.affine = dice.chance(0.7);
  return norm;
}

std::vector<Stage> random_stages(Dice& dice, std::optional<Conv> conv, int64_t channels) {
  std::vector<Stage> stages;
  if (conv) stages.push_back(*conv);
  append_pointwise(dice, stages);
  if (dice.chance(0.7)) {
    stages.push_back(random_norm(dice, channels));
    append_pointwise(dice, stages);
  }
  if (stages.empty() || dice.chance(0.2)) stages.push_back(Mean{});
  return stages;
}

// The least input size that leaves an output element.
int64_t least_input(const Conv& conv, size_t d) {
  const int64_t padding = conv.padding_before[d] + conv.padding_after[d];
  if (!conv.transposed) return std::max<int64_t>(1, span(conv, d) - padding);
  const int64_t missing = padding - span(conv, d) - conv.output_padding[d] + 1;
  return 1 + std::max<int64_t>(0, (missing + conv.stride[d] - 1) / conv.stride[d]);
}

Shape random_input_sizes(Dice& dice, const std::optional<Conv>& conv, int rank, int64_t channels) {
  Shape sizes{dice.chance(0.03) ? 0 : dice.number(1, 3), conv ? conv->in_channels : channels};
  const int64_t most = rank == 1 ? 60 : rank == 2 ? 14 : 7;
  for (int d = 0; d < rank; ++d) {
    const int64_t least = conv ? least_input(*conv, static_cast<size_t>(d)) : 1;
    sizes.push_back(least + (dice.chance(0.2) ? 0 : dice.number(0, most)));
  }
  return sizes;
}

bool is_small(const Problem& problem) {
  const auto fits = [](const TensorSpec& spec) { return element_count(spec.sizes) <= max_elements; };
  return fits(problem.input) &&
         element_count(problem.block.conv_output_shape(problem.input.sizes)) <= max_elements &&
         std::all_of(problem.parameters.begin(), problem.parameters.end(), fits) &&
         problem.conv_multiply_adds() <= max_multiply_adds;
}

Problem random_dense_problem(Dice& dice, Device device, double conv_chance = 0.75) {
  for (;;) {
    const int rank = static_cast<int>(dice.number(1, max_spatial_rank));
    std::optional<Conv> conv;
    if (dice.chance(conv_chance)) conv = random_conv(dice, rank);
    const int64_t channels = conv ? conv->out_channels : random_channels(dice);
    const DType dtype = dice.one_of({DType::f32, DType::f32, DType::f32, DType::f16, DType::bf16});
    const Layout layout = dice.chance(0.75) ? Layout::nchw : Layout::nhwc;
    const Block block(random_stages(dice, conv, channels));
    Problem problem(block, random_input_sizes(dice, conv, rank, channels), dtype, device, layout);
    if (is_small(problem)) return problem;
  }
}

// The tensor as a slice of a dense one that is larger by up to 3 in one dimension: padded rows, sliced
// channels.
void make_slice(Dice& dice, TensorSpec& spec) {
  if (spec.sizes.empty()) return;
  Shape larger = spec.sizes;
  larger[static_cast<size_t>(dice.number(0, static_cast<int64_t>(larger.size()) - 1))] += dice.number(1, 3);
  const Layout layout = dice.chance(0.8) ? Layout::nchw : Layout::nhwc;
  spec.strides = TensorSpec::dense(spec.dtype, larger, layout).strides;
}

// The tensor as if expanded: one dimension repeats the same memory.
void make_expanded(Dice& dice, TensorSpec& spec) {
  if (spec.sizes.empty()) return;
  spec.strides[static_cast<size_t>(dice.number(0, static_cast<int64_t>(spec.sizes.size()) - 1))] = 0;
}

void make_strided(Dice& dice, Problem& problem) {
  const auto disturb_operand = [&](TensorSpec& spec) {
    if (dice.chance(0.6)) make_slice(dice, spec);
    if (dice.chance(0.3)) make_expanded(dice, spec);
  };
  disturb_operand(problem.input);
  // Weights and vectors must be contiguous; a residual tensor may lie anyhow.
  const std::vector<Parameter> parameters = problem.block.parameters(problem.input.sizes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* pointwise = std::get_if<Pointwise>(&problem.block.stages()[parameters[i].stage]);
    if (pointwise != nullptr && argument_kind(pointwise->op) == ArgumentKind::tensor)
      disturb_operand(problem.parameters[i]);
  }
  if (dice.chance(0.6)) make_slice(dice, problem.output);
}

void make_strided(Dice& dice, BackwardProblem& problem) {
  if (dice.chance(0.5)) make_slice(dice, problem.output_gradient);
  if (dice.chance(0.3)) make_expanded(dice, problem.output_gradient);
  if (dice.chance(0.5)) make_slice(dice, problem.input_gradient);
  if (problem.forward.block.conv() != nullptr) return;  // gradients of weights are contiguous
  for (TensorSpec& spec : problem.parameter_gradients) {
    if (spec.sizes.size() > 2 && dice.chance(0.5)) make_slice(dice, spec);
  }
}

// Layers in half precision often keep parameters, and what reduces over them, in f32.
void mix_types(Dice& dice, BackwardProblem& problem) {
  const auto type = [&dice] { return dice.one_of({DType::f32, DType::f16, DType::bf16}); };
  problem.output_gradient.dtype = type();
  problem.input_gradient.dtype = type();
  for (size_t i = 0; i < problem.parameter_gradients.size(); ++i) {
    problem.forward.parameters[i].dtype = type();
    problem.parameter_gradients[i].dtype = type();
  }
}

// A precision of f32, and numerics that it has.
void choose_numerics(Dice& dice, Problem& problem) {
  if (problem.input.dtype == DType::f32) {
    problem.precision = dice.chance(0.6)   ? Precision::tf32
                        : dice.chance(0.5) ? Precision::near_f32
                                           : Precision::f32;
  }
  if (!dice.chance(0.2)) return;
  if (problem.precision == Precision::tf32) problem.numerics = Numerics::fast;
  if (problem.precision == Precision::f32) problem.numerics = Numerics::strict;
}

}  // namespace

Problem random_problem(uint64_t seed, Device device) {
  Dice dice(seed);
  Problem problem = random_dense_problem(dice, device);
  if (dice.chance(0.4)) make_strided(dice, problem);
  problem.validate();
  return problem;
}

Problem random_thin_problem(uint64_t seed, Device device) {
  Dice dice(seed);
  for (;;) {
    Problem problem = random_dense_problem(dice, device, 1);
    const Conv& conv = *problem.block.conv();
    int64_t terms = conv.in_channels;
    for (const int64_t size : conv.kernel) terms *= size;
    if (conv.groups != 1 || terms > 512 || conv.out_channels > 64) continue;
    choose_numerics(dice, problem);
    return problem;
  }
}

namespace {

// The channels of a matrix product, in a group.
struct ProductSizes {
  int64_t least_in, most_in;
  int64_t least_out;
  bool with_classes;  // transposed ones may have a stride
};

Problem random_product(uint64_t seed, Device device, const ProductSizes& wanted) {
  constexpr int64_t most_products = 10'000'000;
  Dice dice(seed);
  for (;;) {
    const Problem small = random_dense_problem(dice, device, 1);
    std::vector<Stage> stages = small.block.stages();
    Conv& conv = std::get<Conv>(stages.front());
    const bool has_stride =
        std::any_of(conv.stride.begin(), conv.stride.end(), [](int64_t stride) { return stride != 1; });
    if (conv.groups != 1 || (conv.transposed && has_stride && !wanted.with_classes)) continue;
    conv.in_channels = dice.number(wanted.least_in, wanted.most_in);
    conv.out_channels *= (wanted.least_out + conv.out_channels - 1) / conv.out_channels + dice.number(0, 4);
    // Some in groups, of which each has groups of the norm.
    if (dice.chance(0.2)) {
      conv.groups = dice.number(2, 4);
      conv.in_channels *= conv.groups;
      conv.out_channels *= conv.groups;
      for (Stage& stage : stages) {
        if (auto* norm = std::get_if<Norm>(&stage); norm != nullptr && norm->kind == Norm::Kind::group)
          norm->groups *= conv.groups;
      }
    }
    Shape sizes = small.input.sizes;
    sizes[1] = conv.in_channels;
    const Layout layout = small.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
    Problem problem(Block(stages), sizes, small.input.dtype, device, layout);
    int64_t products = conv.in_channels / conv.groups;
    for (const int64_t size : conv.kernel) products *= size;
    if (element_count(problem.block.conv_output_shape(sizes)) > most_products / products) continue;
    choose_numerics(dice, problem);
    problem.validate();
    return problem;
  }
}

}  // namespace

Problem random_wide_problem(uint64_t seed, Device device) {
  return random_product(seed, device,
                        {.least_in = 16, .most_in = 80, .least_out = 16, .with_classes = false});
}

Problem random_few_problem(uint64_t seed, Device device) {
  return random_product(seed, device, {.least_in = 3, .most_in = 26, .least_out = 2, .with_classes = true});
}

namespace {

BackwardProblem random_backward(Dice& dice, Problem forward) {
  if (dice.chance(0.4)) make_strided(dice, forward);
  BackwardProblem problem(forward);
  if (dice.chance(0.4)) make_strided(dice, problem);
  if (dice.chance(0.3)) mix_types(dice, problem);
  if (dice.chance(0.5)) {
    for (size_t i = 0; i < problem.wanted.size(); ++i) problem.wanted[i] = dice.chance(0.6);
  }
  problem.validate();
  return problem;
}

}  // namespace

BackwardProblem random_tail_backward(uint64_t seed, Device device) {
  Dice dice(seed);
  return random_backward(dice, random_dense_problem(dice, device, 0));
}

BackwardProblem random_conv_backward(uint64_t seed, Device device) {
  Dice dice(seed);
  const Problem whole = random_dense_problem(dice, device, 1);
  const Layout layout = dice.chance(0.75) ? Layout::nchw : Layout::nhwc;
  return random_backward(
      dice, Problem(Block({*whole.block.conv()}), whole.input.sizes, whole.input.dtype, device, layout));
}

Problem random_large_tail(uint64_t seed, Device device) {
  Dice dice(seed);
  const Problem small = random_dense_problem(dice, device, 0);
  const Layout layout = small.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
  Shape sizes = small.input.sizes;
  sizes[0] = std::max<int64_t>(1, sizes[0]);
  if (dice.chance(0.3)) sizes[1] *= dice.number(2, 40);
  const int64_t wanted = dice.number(50'000, 1'000'000);
  while (element_count(sizes) < wanted) {
    const auto d = static_cast<size_t>(dice.chance(0.2) ? 0 : dice.number(2, std::ssize(sizes) - 1));
    sizes[d] = 2 * sizes[d] + dice.number(0, 3);
  }
  return {small.block, sizes, small.input.dtype, device, layout};
}

}  // namespace onepass::testing

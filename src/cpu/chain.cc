// From a block's stages to steps, and from parameters of any type to f32 vectors.
#include "cpu/chain.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "block/convert.h"

namespace onepass::cpu {
namespace {

// What no result of the step lies below, rounding included.
float least_value(const Step& step) {
  constexpr float unknown = -std::numeric_limits<float>::infinity();
  if (step.function == identity_step) return unknown;
  switch (static_cast<Op>(step.function)) {
    case Op::relu:
    case Op::relu6:
    case Op::sigmoid:
    case Op::hardsigmoid:
    case Op::softplus:
      return 0;
    case Op::tanh:
      return -1;
    case Op::swish:  // at -1.28
      return -0.279f;
    case Op::hardswish:  // at -1.5
      return -0.376f;
    case Op::gelu:  // at -0.75
    case Op::gelu_tanh:
      return -0.171f;
    case Op::mish:  // at -1.19
      return -0.309f;
    case Op::clamp:
    case Op::hardtanh:
      return std::min(step.a, step.b);
    default:
      return unknown;
  }
}

// Builds the two lists of steps while walking over the stages and their parameters, in order.
class Builder {
 public:
  Builder(Chain& chain, const Problem& problem)
      : chain_(chain), problem_(problem), parameters_(problem.block.parameters(problem.input.sizes)) {}

  void add(const Stage& stage) {
    std::visit([this](const auto& s) { add_stage(s); }, stage);
  }

  // A norm that no pointwise stage took along.
  void finish() {
    if (pending_ != Affine::none) push(Step{});
  }

 private:
  void add_stage(const Conv& conv) {
    ++next_;  // the weights
    if (conv.bias) chain_.conv_bias = add_vector();
  }
  void add_stage(const Norm& norm) {
    if (!chain_.before.empty()) chain_.least_before_norm = least_value(chain_.before.back());
    steps_ = &chain_.after;
    if (norm.affine) {
      chain_.norm_weight = add_vector();
      chain_.norm_bias = add_vector();
    }
    pending_ = Affine::norm;
  }
  void add_stage(const Pointwise& pointwise) {
    Step step;
    step.function = static_cast<int>(pointwise.op);
    step.a = static_cast<float>(pointwise.a);
    step.b = static_cast<float>(pointwise.b);
    const ArgumentKind kind = argument_kind(pointwise.op);
    if (kind == ArgumentKind::tensor) {
      step.tensor = static_cast<int>(chain_.tensors.size());
      chain_.tensors.push_back({next_, TensorMap(problem_.parameters[next_])});
      ++next_;
    } else if (kind != ArgumentKind::none) {
      step.vector = add_vector();
    }
    push(step);
  }
  void add_stage(const Mean&) {}

  void push(Step step) {
    step.affine = std::exchange(pending_, Affine::none);
    steps_->push_back(step);
  }

  int add_vector() {
    ParameterVector vector;
    vector.parameter = next_;
    vector.per_sample = parameters_[next_].sizes.size() == 2;
    vector.offset = chain_.workspace_floats;
    const int64_t count = chain_.columns() * (vector.per_sample ? chain_.batch : 1);
    chain_.workspace_floats += count + Chain::slack();
    chain_.vectors.push_back(vector);
    ++next_;
    return static_cast<int>(chain_.vectors.size()) - 1;
  }

  Chain& chain_;
  const Problem& problem_;
  std::vector<Parameter> parameters_;
  std::vector<Step>* steps_ = &chain_.before;
  Affine pending_ = Affine::none;
  size_t next_ = 0;  // parameter
};

}  // namespace

Chain::Chain(const Problem& problem, int64_t columns_of_channel) : repeat(columns_of_channel) {
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  batch = shape[0];
  channels = shape[1];
  least_before_norm = -std::numeric_limits<float>::infinity();
  Builder builder(*this, problem);
  for (const Stage& stage : problem.block.stages()) builder.add(stage);
  builder.finish();
}

int64_t Chain::slack() { return 16; }

void Chain::load_parameters(const Problem& problem, const std::vector<const void*>& parameters,
                            float* floats) const {
  for (const ParameterVector& vector : vectors) {
    const TensorSpec& spec = problem.parameters[vector.parameter];
    const char* from = static_cast<const char*>(parameters[vector.parameter]);
    float* to = floats + vector.offset;
    const int64_t step = element_count(spec.sizes) == 1 ? 0 : byte_size(spec.dtype);
    const int64_t wanted = channels * (vector.per_sample ? batch : 1);
    if (spec.dtype == DType::f32 && step != 0 && repeat == 1) {
      to = std::copy_n(reinterpret_cast<const float*>(from), wanted, to);
    } else {
      for (int64_t i = 0; i < wanted; ++i, from += step) {
        to = std::fill_n(to, repeat, static_cast<float>(load_element(spec.dtype, from)));
      }
    }
    std::fill_n(to, slack(), 0.0f);
  }
}

StepArguments Chain::column_arguments(const Step& step, const StepContext& context, int64_t sample,
                                      int64_t first_column) const {
  StepArguments s;
  s.a = step.a;
  s.b = step.b;
  if (step.affine == Affine::norm) {
    const int64_t at = first_column - context.norm.first_column;
    s.centre = context.norm.centre + at;
    s.scale = context.norm.scale + at;
    s.shift = context.norm.shift + at;
  }
  if (step.vector >= 0) s.operand = values(step.vector, sample, context.floats) + first_column;
  return s;
}

StepArguments Chain::step_arguments(const Isa& isa, const Step& step, const StepContext& context,
                                    const Region& region, Orientation orientation, PanelView source) const {
  StepArguments s = column_arguments(step, context, region.sample, region.channels.begin);
  s.src = source.data;
  s.src_stride = source.stride;
  s.rows = region.rows(orientation);
  s.cols = region.cols(orientation);
  if (step.tensor >= 0) {
    const TensorOperand& operand = tensors[static_cast<size_t>(step.tensor)];
    const PanelView view = panel_view(isa, operand.map, (*context.parameters)[operand.parameter], region,
                                      orientation, context.operand_scratch);
    s.operand = view.data;
    s.operand_stride = view.stride;
  }
  return s;
}

const float* Chain::values(int vector, int64_t sample, const float* floats) const {
  const ParameterVector& v = vectors[static_cast<size_t>(vector)];
  return floats + v.offset + (v.per_sample ? sample * columns() : 0);
}

}  // namespace onepass::cpu

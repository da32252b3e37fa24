// Generates the device code of a problem's tail.
#include "cuda/source.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

namespace onepass::cuda {
namespace {

// A float literal that reads back as the same number; infinities by their bits.
std::string literal(double value) {
  const auto number = static_cast<float>(value);
  std::ostringstream out;
  if (std::isinf(number)) {
    out << "__int_as_float(" << (number > 0 ? "0x7f800000" : "0xff800000") << ')';
    return out.str();
  }
  out << std::showpoint << std::setprecision(9) << number << 'f';
  return out.str();
}

std::string type(const TensorSpec& spec) { return std::string(name(spec.dtype)); }

// The index of a channel's value in a stage's argument: one for all, one per channel, or per sample and
// channel.
std::string channel_index(const TensorSpec& spec, Per per) {
  if (per == Per::tensor) return "0";
  if (per == Per::channel) return "c * " + std::to_string(spec.strides[0]);
  return "n * " + std::to_string(spec.strides[0]) + " + c * " + std::to_string(spec.strides[1]);
}

bool is_tensor(const TailParts::Stage& stage) {
  return argument_kind(stage.pointwise.op) == ArgumentKind::tensor;
}

// The stages that read a value per channel.
std::vector<const TailParts::Stage*> channel_stages(const std::vector<TailParts::Stage>& stages) {
  std::vector<const TailParts::Stage*> list;
  for (const TailParts::Stage& stage : stages) {
    if (stage.parameter >= 0 && !is_tensor(stage)) list.push_back(&stage);
  }
  return list;
}

// One chain as a struct.
class ChainWriter {
 public:
  // `groups`: of the convolution, where the chain belongs to one of them.
  ChainWriter(const char* name, const std::vector<TailParts::Stage>& stages, int bits, const Problem& problem,
              const BackwardProblem* backward, int64_t groups = 1)
      : name_(name), stages_(stages), bits_(bits), problem_(problem), backward_(backward), groups_(groups) {
    for (const TailParts::Stage& stage : stages_) {
      if (stage.parameter < 0) continue;
      (is_tensor(stage) ? tensors_ : channels_).push_back(&stage);
    }
  }

  std::string text() {
    out_ << "struct " << name_ << " {\n"
         << "  static constexpr int channel_operands = " << channels_.size() << ";\n"
         << "  using Only = "  // its stage where it is one without an operand
         << (stages_.size() == 1 && stages_[0].parameter < 0 ? type_of(stages_[0]) : "void") << ";\n";
    write_load_channel();
    write_tensors();
    write_value();
    if (backward_ != nullptr) {
      write_tensor_gradients();
      write_gradient();
    }
    out_ << "};\n\n";
    return out_.str();
  }

 private:
  void write_load_channel() {
    out_ << "  template <class P>\n"
         << "  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* "
            "value) {\n";
    if (groups_ > 1 && !channels_.empty()) {
      const int64_t channels = problem_.block.conv()->out_channels / groups_;
      out_ << "    c += n % " << groups_ << " * " << channels << ";\n    n /= " << groups_ << ";\n";
    }
    for (size_t i = 0; i < channels_.size(); ++i) {
      const int index = channels_[i]->parameter;
      const TensorSpec& spec = problem_.parameters[static_cast<size_t>(index)];
      out_ << "    value[" << i << "] = load_one<" << type(spec) << ">(p.parameter[" << index << "], "
           << channel_index(spec, channels_[i]->pointwise.per) << ");\n";
    }
    out_ << "  }\n";
  }

  void write_tensors() {
    out_ << "  template <int Width>\n  struct Tensors {\n";
    for (size_t i = 0; i < tensors_.size(); ++i) {
      out_ << "    Packed<" << type(problem_.parameters[static_cast<size_t>(tensors_[i]->parameter)])
           << ", Width> t" << i << ";\n";
    }
    out_ << "    template <class P>\n    __device__ __forceinline__ void load(const P& p, int64 index) {\n";
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const int index = tensors_[i]->parameter;
      out_ << "      t" << i << ".load(p.parameter[" << index
           << "], index, is_aligned(p, aligned_parameter + " << index << "));\n";
    }
    out_ << "    }\n  };\n";
  }

  // What stage `i` reads besides x.
  std::string operand(const TailParts::Stage& stage) const {
    if (stage.parameter < 0) return "0.0f";
    const auto& list = is_tensor(stage) ? tensors_ : channels_;
    size_t place = 0;
    while (list[place] != &stage) ++place;
    return is_tensor(stage) ? "t.t" + std::to_string(place) + ".at(k)"
                            : "channel[" + std::to_string(place) + "]";
  }

  std::string type_of(const TailParts::Stage& stage) const {
    return "pointwise::" + std::string(onepass::name(stage.pointwise.op)) + "_stage<" +
           std::to_string(bits_) + '>';
  }

  // Whether the stage is a convolution of one tap whose operands are rounded: a tail has a precision where
  // its first stage is one (block/scaled.h).
  bool is_rounded(const TailParts::Stage& stage) const {
    return problem_.block.conv() == nullptr && problem_.rounds_to_tf32() && stage.parameter == 0 &&
           stage.pointwise.op == Op::channel_mul;
  }

  std::string call(size_t i, const char* function, bool with_gradient) const {
    const TailParts::Stage& stage = stages_[i];
    const auto as_operand = [&](const std::string& value) {
      if (!is_rounded(stage)) return value;
      const bool ties_away = problem_.precision == Precision::tf32_away;
      return (ties_away ? "round_to_tf32_away(" : "round_to_tf32(") + value + ')';
    };
    std::string text = type_of(stage) + "::" + function + '(' + as_operand('x' + std::to_string(i)) + ", " +
                       as_operand(operand(stage)) + ", " + literal(stage.pointwise.a) + ", " +
                       literal(stage.pointwise.b);
    if (with_gradient) text.append(", ").append(as_operand("g"));
    return text + ')';
  }

  // x0 is the argument; x1 ... the values after each of the first `count` stages.
  void write_values(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      out_ << "    const float x" << i + 1 << " = " << call(i, "value", false) << ";\n";
    }
  }

  void write_value() {
    out_ << "  template <int Width>\n"
         << "  static __device__ __forceinline__ float value(float x0, const float* channel, const "
            "Tensors<Width>& t, "
            "int k) {\n";
    write_values(stages_.size());
    out_ << "    return x" << stages_.size() << ";\n  }\n";
  }

  bool wants(const TailParts::Stage& stage) const {
    return backward_->wants_parameter(static_cast<size_t>(stage.parameter));
  }

  void write_tensor_gradients() {
    out_ << "  template <int Width>\n  struct TensorGradients {\n";
    for (size_t i = 0; i < tensors_.size(); ++i) out_ << "    float g" << i << "[Width];\n";
    out_ << "    template <class P>\n    __device__ __forceinline__ void store(const P& p, int64 index) "
            "const {\n";
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!wants(*tensors_[i])) continue;
      const int index = tensors_[i]->parameter;
      out_ << "      Packed<" << type(backward_->parameter_gradients[static_cast<size_t>(index)])
           << ", Width> packed" << i << ";\n      packed" << i << ".pack(g" << i << ");\n      packed" << i
           << ".store(p.gradient[" << index << "], index, is_aligned(p, aligned_gradient + " << index
           << "));\n";
    }
    out_ << "    }\n  };\n";
  }

  void write_gradient() {
    out_ << "  template <int Width>\n"
         << "  static __device__ __forceinline__ float gradient(float x0, const float* channel, const "
            "Tensors<Width>& t, "
            "int k,\n      float g, float* channel_gradient, TensorGradients<Width>& tensor_gradient) {\n";
    write_values(stages_.empty() ? 0 : stages_.size() - 1);
    size_t channel = channels_.size();
    size_t tensor = tensors_.size();
    for (size_t i = stages_.size(); i-- > 0;) {
      if (stages_[i].parameter >= 0) {
        if (is_tensor(stages_[i])) {
          out_ << "    tensor_gradient.g" << --tensor << "[k] = ";
        } else {
          out_ << "    channel_gradient[" << --channel << "] = ";
        }
        out_ << call(i, "argument_gradient", true) << ";\n";
      }
      out_ << "    g = " << call(i, "gradient", true) << ";\n";
    }
    out_ << "    return g;\n  }\n";
  }

  const char* name_;
  const std::vector<TailParts::Stage>& stages_;
  int bits_;
  const Problem& problem_;
  const BackwardProblem* backward_;
  int64_t groups_;
  std::vector<const TailParts::Stage*> channels_;
  std::vector<const TailParts::Stage*> tensors_;
  std::ostringstream out_;
};

class TailWriter {
 public:
  // `groups`: of the convolution, where it is the tail of one of them.
  TailWriter(const Problem& problem, int bits, const BackwardProblem* backward, int64_t groups = 1)
      : problem_(problem),
        bits_(bits),
        backward_(backward),
        groups_(groups),
        shape_(problem.block.conv_output_shape(problem.input.sizes)),
        parts_(problem.block, problem.input.sizes) {}

  std::string text() {
    out_ << "namespace onepass {\n\n"
         << ChainWriter("Before", parts_.before, bits_, problem_, backward_, groups_).text()
         << ChainWriter("After", parts_.after, bits_, problem_, backward_, groups_).text() << "// "
         << problem_.block.text() << '\n'
         << "struct Tail {\n"
         << "  using Before = onepass::Before;\n  using After = onepass::After;\n"
         << "  using Input = " << type(problem_.input) << ";\n  using Output = " << type(problem_.output)
         << ";\n";
    const int64_t channels = shape_[1] / groups_;
    const int64_t groups = parts_.norm ? parts_.norm->group_count(shape_[1]) / groups_ : 1;
    constant("int", "parameters", std::to_string(problem_.parameters.size()));
    constant("int", "channels", std::to_string(channels));
    constant("int", "group_channels", std::to_string(channels / groups));
    constant("int64", "spatial", std::to_string(spatial_elements(shape_)));
    constant("bool", "has_norm", parts_.norm ? "true" : "false");
    constant("bool", "has_affine", parts_.norm_weight >= 0 ? "true" : "false");
    constant("bool", "has_mean", parts_.mean ? "true" : "false");
    constant("bool", "mean_follows_norm", parts_.mean_follows_norm() ? "true" : "false");
    constant("float", "eps", literal(parts_.norm ? parts_.norm->eps : 0));
    write_channel(channels);
    write_norm_parameter("weight", parts_.norm_weight, "1.0f");
    write_norm_parameter("bias", parts_.norm_bias, "0.0f");
    if (backward_ != nullptr) write_backward();
    out_ << "};\n\n}  // namespace onepass\n\n";
    return out_.str();
  }

 private:
  void constant(const char* kind, const char* name, const std::string& value) {
    out_ << "  static constexpr " << kind << ' ' << name << " = " << value << ";\n";
  }

  // Which of the block's channels one of sample n is.
  void write_channel(int64_t channels) {
    out_ << "  static __device__ __forceinline__ int channel(int64 n, int c) { return c";
    if (groups_ > 1) out_ << " + static_cast<int>(n % " << groups_ << ") * " << channels;
    out_ << "; }\n";
  }

  void write_norm_parameter(const char* name, int index, const char* otherwise) {
    out_ << "  template <class P>\n  static __device__ __forceinline__ float " << name
         << "(const P& p, int64 c) {\n";
    if (index < 0) {
      out_ << "    return " << otherwise << ";\n  }\n";
      return;
    }
    const TensorSpec& spec = problem_.parameters[static_cast<size_t>(index)];
    out_ << "    return load_one<" << type(spec) << ">(p.parameter[" << index << "], c * " << spec.strides[0]
         << ");\n  }\n";
  }

  void write_backward() {
    const TensorSpec& gradient = backward_->output_gradient;
    out_ << "  using OutputGradient = " << type(gradient) << ";\n"
         << "  using InputGradient = " << type(backward_->input_gradient) << ";\n";
    constant("int64", "gradient_sample_stride", std::to_string(gradient.strides[0]));
    constant("int64", "gradient_channel_stride", std::to_string(gradient.strides[1]));
    constant("bool", "wants_input", backward_->wants_input() ? "true" : "false");
    const BackwardWork work(*backward_, parts_);
    constant("bool", "wants_sums", work.third ? "true" : "false");
    constant("bool", "wants_second", work.second ? "true" : "false");
    constant("int", "after_sums", std::to_string(work.after_sums));
    constant("int", "before_sums", std::to_string(work.before_sums));
    write_channel_gradients();
  }

  // The places of the rows' sums: dz and dz xhat, the after-chain's, then the before-chain's.
  void write_channel_gradients() {
    std::ostringstream singles;
    out_ << "  template <class P, class ChannelSum, class Total>\n"
         << "  static __device__ __forceinline__ void store_channel_gradients(const P& p, int64 c, "
            "ChannelSum&& "
            "channel_sum, Total&& total) {\n";
    if (parts_.norm_weight >= 0) write_channel_gradient(parts_.norm_weight, Per::channel, 1, singles);
    if (parts_.norm_bias >= 0) write_channel_gradient(parts_.norm_bias, Per::channel, 0, singles);
    int place = parts_.norm ? 2 : 0;
    for (const TailParts::Stage* stage : channel_stages(parts_.after)) {
      write_channel_gradient(stage->parameter, stage->pointwise.per, place++, singles);
    }
    place = (parts_.norm ? 2 : 0) + BackwardWork(*backward_, parts_).after_sums;
    for (const TailParts::Stage* stage : channel_stages(parts_.before)) {
      write_channel_gradient(stage->parameter, stage->pointwise.per, place++, singles);
    }
    out_ << "  }\n"
         << "  template <class Reduce>\n"
         << "  static __device__ __forceinline__ void for_each_single(Reduce&& reduce) {\n"
         << singles.str() << "  }\n";
  }

  void write_channel_gradient(int index, Per per, int place, std::ostringstream& singles) {
    if (!backward_->wants_parameter(static_cast<size_t>(index))) return;
    const TensorSpec& spec = backward_->parameter_gradients[static_cast<size_t>(index)];
    const std::string store = "store_one<" + type(spec) + ">(p.gradient[" + std::to_string(index) + "], ";
    if (per == Per::tensor) {
      singles << "    reduce(" << place << ", [](float value, const auto& p) { " << store
              << "0, value); });\n";
    } else if (per == Per::channel) {
      out_ << "    " << store << channel_index(spec, per) << ", channel_sum(" << place << "));\n";
    } else {
      out_ << "    for (int64 n = 0; n < p.batch; ++n) " << store << channel_index(spec, per) << ", total(n, "
           << place << "));\n";
    }
  }

  const Problem& problem_;
  int bits_;
  const BackwardProblem* backward_;
  int64_t groups_;
  Shape shape_;  // of what the tail works on: the convolution's output, where there is one
  TailParts parts_;
  std::ostringstream out_;
};

}  // namespace

TailParts::TailParts(const Block& block, const Shape& input) {
  const std::vector<Parameter> named = block.parameters(input);
  for (size_t i = 0; i < block.stages().size(); ++i) {
    const onepass::Stage& stage = block.stages()[i];
    int first = -1;
    int second = -1;
    for (size_t k = 0; k < named.size(); ++k) {
      if (named[k].stage == i) (first < 0 ? first : second) = static_cast<int>(k);
    }
    if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      after.push_back({*pointwise, first});
    } else if (const auto* found = std::get_if<Norm>(&stage)) {
      norm = found;
      norm_weight = first;
      norm_bias = second;
      before = std::move(after);
      after.clear();
    } else if (std::holds_alternative<Mean>(stage)) {
      mean = true;
    }
  }
}

bool TailParts::has_operands() const {
  const auto reads = [](const Stage& stage) { return stage.parameter >= 0; };
  return std::any_of(before.begin(), before.end(), reads) || std::any_of(after.begin(), after.end(), reads);
}

std::vector<int> TailParts::tensor_parameters() const {
  std::vector<int> list;
  for (const auto* stages : {&before, &after}) {
    for (const Stage& stage : *stages) {
      if (stage.parameter >= 0 && is_tensor(stage)) list.push_back(stage.parameter);
    }
  }
  return list;
}

double steepness(const TailParts& parts) {
  double product = 1;
  for (const auto* stages : {&parts.before, &parts.after}) {
    for (const TailParts::Stage& stage : *stages) {
      switch (stage.pointwise.op) {
        case Op::leaky_relu:
        case Op::elu:
          product *= std::max(1.0, std::abs(stage.pointwise.a));
          break;
        case Op::mul:
          product *= std::abs(stage.pointwise.a);
          break;
        case Op::gelu:
        case Op::gelu_tanh:
        case Op::swish:
        case Op::mish:
          product *= 1.13;
          break;
        case Op::hardswish:
          product *= 1.5;
          break;
        case Op::sigmoid:
          product *= 0.25;
          break;
        case Op::hardsigmoid:
          product /= 6;
          break;
        default:
          break;  // at most 1, or a parameter
      }
    }
  }
  return product;
}

BackwardWork::BackwardWork(const BackwardProblem& problem, const TailParts& parts) {
  const auto wants = [&](int index) {
    return index >= 0 && problem.wants_parameter(static_cast<size_t>(index));
  };
  const auto sums_of = [&](const std::vector<TailParts::Stage>& stages) {
    const auto list = channel_stages(stages);
    for (const TailParts::Stage* stage : list) {
      if (wants(stage->parameter)) return static_cast<int>(list.size());
    }
    return 0;
  };
  const bool has_norm = parts.norm != nullptr;
  after_sums = sums_of(parts.after);
  before_sums = sums_of(parts.before);
  third = after_sums + before_sums > 0 || wants(parts.norm_weight) || wants(parts.norm_bias);
  second = problem.wants_input() || before_sums > 0 || (!has_norm && after_sums > 0);
  for (const int index : parts.tensor_parameters()) second |= wants(index);
  first = has_norm && (second || third);
  first_sums = has_norm ? 2 + after_sums : 0;
  second_sums = has_norm ? before_sums : after_sums;
}

Constants& Constants::add(const char* name, int64_t value) {
  text_ += "  static constexpr " + type_ + ' ' + name + " = " + std::to_string(value) + ";\n";
  return *this;
}

Constants& Constants::flag(const char* name, bool value) {
  text_ += std::string("  static constexpr bool ") + name + (value ? " = true;\n" : " = false;\n");
  return *this;
}

Source agent_kernel(const std::string& name, const std::string& text, const std::string& agent,
                    const std::string& bounds, SharedAs shared) {
  const auto memory = [](const char* alignment) {
    return std::string("  extern __shared__ __align__(") + alignment + ") unsigned char shared[];\n";
  };
  std::string run = "  Agent{p}.run();\n";
  if (shared == SharedAs::bytes) run = memory("16") + "  Agent{p, shared}.run();\n";
  if (shared == SharedAs::structure) {
    run = memory("alignof(Agent::Shared)") + "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n";
  }
  return {name, text + "using Agent = onepass::" + agent +
                    ";\nextern \"C\" __global__ void __launch_bounds__(" + bounds + ") " + name +
                    "(const __grid_constant__ Agent::Parameters p) {\n" + run + "}\n"};
}

int64_t spatial_elements(const Shape& shape) {
  int64_t count = 1;
  for (size_t d = 2; d < shape.size(); ++d) count *= shape[d];
  return count;
}

std::string chain_source(const char* name, const std::vector<TailParts::Stage>& stages,
                         const Problem& problem) {
  return "namespace onepass {\n\n" + ChainWriter(name, stages, 32, problem, nullptr).text() +
         "}  // namespace onepass\n\n";
}

bool has_short_form(const Block& block) {
  return std::any_of(block.stages().begin(), block.stages().end(), [](const Stage& stage) {
    const auto* pointwise = std::get_if<Pointwise>(&stage);
    return pointwise != nullptr && (pointwise->op == Op::sigmoid || pointwise->op == Op::swish ||
                                    pointwise->op == Op::gelu || pointwise->op == Op::gelu_tanh);
  });
}

std::string tail_source(const Problem& problem, int bits) {
  const Conv* conv = problem.block.conv();
  return TailWriter(problem, bits, nullptr, conv ? conv->groups : 1).text();
}

std::string whole_tail_source(const Problem& problem, int bits) {
  return TailWriter(problem, bits, nullptr).text();
}

std::string tail_source(const BackwardProblem& problem, int bits) {
  return TailWriter(problem.forward, bits, &problem).text();
}

}  // namespace onepass::cuda

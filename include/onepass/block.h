// A block: the list of stages that onepass runs as one, its text form, its shapes and its parameters.
//
//   order  := [conv] pointwise* [norm pointwise*] [mean]
//
// A Block is a value: built complete and valid, never changed, compared and hashed by its stages.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "onepass/export.h"
#include "onepass/tensor.h"

namespace onepass {

inline constexpr int max_spatial_rank = 3;

// One number per spatial dimension, outermost first; entries beyond the rank hold the neutral value.
using Extents = std::array<int64_t, max_spatial_rank>;

struct Conv {
  int rank = 2;
  bool transposed = false;
  int64_t in_channels = 1;
  int64_t out_channels = 1;
  Extents kernel{1, 1, 1};
  Extents stride{1, 1, 1};
  // Zeros around the input. They differ only for p=same with an even span. Transposed: output cut off.
  Extents padding_before{0, 0, 0};
  Extents padding_after{0, 0, 0};
  Extents dilation{1, 1, 1};
  Extents output_padding{0, 0, 0};
  int64_t groups = 1;
  bool bias = true;

  bool operator==(const Conv&) const = default;
};

struct Norm {
  enum class Kind : uint8_t { group, instance };
  Kind kind = Kind::group;
  int64_t groups = 1;  // of Kind::group; an instance norm has as many groups as channels
  double eps = 1e-5;
  bool affine = true;

  int64_t group_count(int64_t channels) const { return kind == Kind::instance ? channels : groups; }
  bool operator==(const Norm&) const = default;
};

// Pointwise operations, one enumerator per row of pointwise.def.
enum class Op : uint8_t {
#define ONEPASS_POINTWISE(name, constants, a, b, argument, value, ...) name,
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
};
#define ONEPASS_POINTWISE(name, constants, a, b, argument, value, ...) +1
inline constexpr int op_count = 0
#include "onepass/pointwise.def"
    ;
#undef ONEPASS_POINTWISE

// What a pointwise operation reads besides x. A slope is one value, or one per channel. A channel argument
// has one value per channel, or per sample and channel. A tensor has the shape of x.
enum class ArgumentKind : uint8_t { none, slope, channel, tensor };

// How many values a slope or channel argument holds.
enum class Per : uint8_t { tensor, channel, sample };

ONEPASS_API std::string_view name(Op op);
ONEPASS_API ArgumentKind argument_kind(Op op);
ONEPASS_API int constant_count(Op op);

struct Pointwise {
  Op op = Op::relu;
  double a = 0;
  double b = 0;
  // prelu: Per::tensor (one slope) or Per::channel; channel_mul and channel_add: Per::channel or Per::sample.
  // Per::tensor for all others.
  Per per = Per::tensor;

  bool operator==(const Pointwise&) const = default;
};

struct Mean {
  bool operator==(const Mean&) const = default;
};

using Stage = std::variant<Conv, Pointwise, Norm, Mean>;

// One tensor a block takes besides its input, in the order that Arguments::parameters has.
struct Parameter {
  enum class Role : uint8_t { conv_weight, conv_bias, norm_weight, norm_bias, operand };
  std::string name;  // "conv_weight", "norm_bias", "prelu", "residual_add", "residual_add_2", ...
  Role role = Role::operand;
  size_t stage = 0;  // index into Block::stages()
  Shape sizes;

  bool operator==(const Parameter&) const = default;
};

class ONEPASS_API Block {
 public:
  // Throws Error naming the stage, the value and what is accepted.
  static Block parse(std::string_view text);
  explicit Block(std::vector<Stage> stages);

  const std::vector<Stage>& stages() const { return stages_; }
  // The canonical text: parse(text()) == *this, defaults left out.
  std::string text() const;
  static std::string text(const Stage& stage);

  const Conv* conv() const;  // null where the block has none
  const Norm* norm() const;
  bool has_mean() const;

  // The shape after all stages, and after the convolution alone (the input's, where there is none).
  // Throws Error for an input the block cannot take.
  Shape output_shape(const Shape& input) const;
  Shape conv_output_shape(const Shape& input) const;
  std::vector<Parameter> parameters(const Shape& input) const;

  size_t hash() const;
  bool operator==(const Block&) const = default;

 private:
  std::vector<Stage> stages_;
};

}  // namespace onepass

template <>
struct std::hash<onepass::Block> {
  size_t operator()(const onepass::Block& block) const { return block.hash(); }
};

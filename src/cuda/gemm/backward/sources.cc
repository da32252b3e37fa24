// The kernels of the row "gemm_backward" as source text: their numbers as constants, the agent and the
// kernel.
#include "cuda/gemm/backward/sources.h"

#include <algorithm>
#include <sstream>

namespace onepass::cuda {
namespace {

const char* name_of(DType type) { return type == DType::f32 ? "f32" : type == DType::f16 ? "f16" : "bf16"; }

// A warpgroup's product of 64 x `columns` x 16 as `struct Product`. Either the left operand is in registers
// and the right one has contiguous columns, or both are in shared memory with contiguous terms.
std::string product_source(int64_t columns, const char* type, bool in_registers) {
  const int64_t sums = columns / 2;
  const int64_t left = in_registers ? 4 : 1;
  std::ostringstream out;
  out << "struct Product {\n  static __device__ __forceinline__ void run(float (&d)[" << sums << "], "
      << (in_registers ? "const onepass::uint32 (&a)[4]" : "onepass::uint64 a")
      << ", onepass::uint64 b, int add) {\n"
      << "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %" << sums + left + 1
      << ", 0; wgmma.mma_async.sync.aligned.m64n" << columns << "k16.f32." << type << '.' << type << " {";
  for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << '%' << i;
  out << "}, ";
  if (in_registers) {
    out << "{%" << sums << ", %" << sums + 1 << ", %" << sums + 2 << ", %" << sums + 3 << '}';
  } else {
    out << '%' << sums;
  }
  out << ", %" << sums + left << (in_registers ? ", p, 1, 1, 1;}\"\n" : ", p, 1, 1, 0, 0;}\"\n")
      << "        : ";
  for (int64_t i = 0; i < sums; ++i) out << (i > 0 ? ", " : "") << "\"+f\"(d[" << i << "])";
  out << "\n        : " << (in_registers ? "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3])" : "\"l\"(a)")
      << ", \"l\"(b), \"r\"(add));\n  }\n};\n";
  return out.str();
}

// `agent` is a template of Numbers.
Source kernel(const char* name, const std::string& structs, const std::string& agent, int64_t threads,
              bool has_shared) {
  return agent_kernel(name, "#include \"gemm/backward/gradients.cuh\"\n" + structs, agent + "<Numbers>",
                      std::to_string(threads) + (has_shared ? ", 1" : ""),
                      has_shared ? SharedAs::structure : SharedAs::none);
}

}  // namespace

PackNumbers::PackNumbers(const TensorSpec& spec, const GradientNumbers& numbers)
    : octets(numbers.octets(spec.sizes[1] / numbers.conv_groups)),
      lanes(spec.strides[1] != 1 ? 1
            : octets % 4 == 0    ? 4
                                 : 2) {
  constexpr int64_t rounds = 8;  // positions of a thread
  part_positions = rounds * threads / lanes;
}

Source GradientSources::pack_gradient() const {
  return pack("onepass_gemm_pack_gradient", problem_.output_gradient, wants_bias());
}

Source GradientSources::pack_input() const {
  return pack("onepass_gemm_pack_input", problem_.forward.input, false);
}

Source GradientSources::pack(const char* name, const TensorSpec& spec, bool has_sums) const {
  const TensorGeometry geometry(spec);
  const PackNumbers own(spec, numbers_);
  Constants constants;
  geometry.add_to(constants, numbers_.conv_groups);
  numbers_.add_pitches(constants);
  constants.add("elements", geometry.elements(), "conv_groups", numbers_.conv_groups)
      .add("octets", own.octets, "lanes", own.lanes, "part_positions", own.part_positions)
      .add("probes", PackNumbers::probes)
      .flag("has_sums", has_sums);
  return kernel(name,
                std::string("struct Numbers {\n  using Type = onepass::") + name_of(spec.dtype) +
                    ";\n  using Operand = onepass::" + operand() + ";\n" + constants.text() + "};\n",
                "GemmPackTensor", PackNumbers::threads, false);
}

int64_t GradientSources::weight_sum_blocks() const {
  const int64_t few = int64_t{16} * gpu_of(problem_.forward.device).multiprocessors;
  return problem_.wants_parameter(0) ? std::min(few, numbers_.weight_tiles() * numbers_.tile_sums() / 32) : 0;
}

std::string GradientSources::weight_numbers() const {
  const GradientNumbers& n = numbers_;
  Constants constants = n.geometry();
  constants.add("warpgroups", n.warpgroups, "warpgroup_taps", n.warpgroup_taps, "columns", n.columns)
      .add("chunk", n.chunk, "stages", n.stages, "lag", n.lag)
      .add("u_channels", n.u_channels, "v_channels", n.v_channels, "out_channels", n.out_channels)
      .add("conv_groups", n.conv_groups, "merged_groups", n.merged_groups)
      .add("shared_bytes", n.weight_shared_bytes(n.stages), "weight_blocks", weight_sum_blocks())
      .flag("scales", scales());
  return std::string("struct Numbers {\n  using Product = ::Product;\n  using Weight = onepass::") +
         name_of(problem_.forward.parameters[0].dtype) + ";\n" + constants.text() + "};\n";
}

Source GradientSources::weight_gradient() const {
  return kernel("onepass_gemm_weight_gradient",
                product_source(numbers_.columns, operand(), true) + weight_numbers(), "GemmWeightGradient",
                numbers_.weight_threads, true);
}

Source GradientSources::weight_sum() const {
  return kernel("onepass_gemm_weight_sum", "struct Product;\n" + weight_numbers(), "GemmWeightSum",
                sum_threads, false);
}

std::string GradientSources::input_numbers() const {
  const GradientNumbers& n = numbers_;
  const TensorSpec& spec = problem_.input_gradient;
  const TensorGeometry geometry(spec);
  // So many neighbours of a row can be stored as a vector.
  const auto fit = [&](int64_t count) {
    return geometry.strides[2] == 1 && n.pitch % count == 0 && geometry.sizes[2] % count == 0 &&
           geometry.sample_stride % count == 0 && geometry.channel_stride % count == 0 &&
           geometry.strides[0] % count == 0 && geometry.strides[1] % count == 0;
  };
  Constants constants = n.geometry();
  geometry.add_to(constants, n.conv_groups);
  constants.add("columns", n.input_columns, "conv_groups", n.conv_groups, "in_channels", n.out_channels)
      .add("window", n.window, "chunks", n.chunks(), "stages", n.input_stages, "lag", n.input_lag())
      .add("group_taps", n.group_taps, "tap_groups", n.tap_groups(), "sign", n.transposed ? 1 : -1)
      .add("shared_bytes", n.input_shared_bytes(n.input_stages))
      .flag("weights_resident", n.weights_resident, "weights_by_input", !n.transposed, "scales", scales())
      .flag("pairs_fit", fit(2), "quads_fit", byte_size(spec.dtype) == 2 && fit(4));
  return std::string("struct Numbers {\n  using Product = ::Product;\n  using Operand = onepass::") +
         operand() + ";\n  using Weight = onepass::" + name_of(problem_.forward.parameters[0].dtype) +
         ";\n  using Output = onepass::" + name_of(spec.dtype) + ";\n" + constants.text() + "};\n";
}

Source GradientSources::input_gradient() const {
  return kernel("onepass_gemm_input_gradient",
                product_source(numbers_.input_columns, operand(), false) + input_numbers(),
                "GemmInputGradient", numbers_.input_threads, true);
}

Source GradientSources::pack_adjoint() const {
  return kernel("onepass_gemm_pack_adjoint", "struct Product;\n" + input_numbers(), "GemmPackAdjoint",
                sum_threads, false);
}

}  // namespace onepass::cuda

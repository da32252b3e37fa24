// What rows of wide convolutions share around their kernel.
#include "cuda/gemm/workspace.h"

#include "cuda/runtime/sha256.h"

namespace onepass::cuda {

WeightPack::WeightPack(const Problem& problem, const ThinShape& shape, int64_t padded_channels, int64_t taps,
                       int64_t joint_taps, int64_t row_taps, int64_t span)
    : padded_channels_(padded_channels),
      channel_bytes_(shape.in_channels * taps * byte_size(problem.parameters[0].dtype)),
      joint_taps_(joint_taps),
      row_taps_(row_taps),
      span_(span) {
  constexpr int64_t least_blocks = 256;
  const int64_t shared_bytes = gpu_of(problem.device).shared_bytes_per_block;
  const int64_t two_blocks_fit = shared_bytes * 31 / 64;
  for (const int64_t channels : {2, 4}) {
    if (padded_channels / channels >= least_blocks && channels * channel_bytes_ <= two_blocks_fit)
      channels_ = channels;
  }
  staged_ = bytes() <= shared_bytes * 7 / 8;
}

std::string WeightPack::constants() const {
  return Constants()
      .add("pack_channels", channels_, "joint_taps", joint_taps_, "row_taps", row_taps_, "span", span_)
      .flag("pack_staged", staged_)
      .text();
}

Launch WeightPack::launch() const {
  return {padded_channels_ / channels_, threads, 1, static_cast<uint32_t>(staged_ ? bytes() : 0)};
}

Source WeightPack::source(const std::string& structs) {
  return agent_kernel("onepass_gemm_pack", "#include \"gemm/source/pack.cuh\"\n" + structs,
                      "GemmPack<onepass::Convolution, Numbers>", std::to_string(threads), SharedAs::bytes);
}

uint64_t packing_of(const Function& pack, const Number& blocks, int64_t bytes) {
  Sha256 hash;
  hash.add_field({reinterpret_cast<const char*>(pack.cubin().image.data()), pack.cubin().image.size()});
  hash.add_field(std::to_string(blocks.value())).add_field(std::to_string(bytes));
  return std::stoull(hash.hex().substr(0, 15), nullptr, 16) + 1;  // 0 is none
}

WideWorkspace::WideWorkspace(const Problem& problem, const ThinShape& shape, const Sizes& sizes)
    : device_(problem.device), batch_(shape.batch), own_values_(sizes.own_values), redo_(problem) {
  if (sizes.finishes) finish_.emplace(problem, shape, sizes.planar);
  control_ = regions_.add(sizes.control_words * 4);
  marks_ = regions_.add((shape.batch + 1) * 4);
  guard_ = regions_.add(shape.batch * 4);
  cleared_bytes_ = regions_.total();
  packed_ = PackedWeights(regions_, sizes.padded_channels, sizes.weight_bytes);
  parts_ = regions_.add(when(shape.parts.norm, shape.slabs() * (sizes.slab_parts * 16)));
  sums_ = regions_.add(when(shape.parts.mean, shape.rows() * (sizes.row_sums * 4)));
  statistics_ = regions_.add(when(shape.parts.norm, shape.slabs() * 2 * 4));
  values_ = regions_.add(when(own_values_, shape.rows() * shape.spatial * 4));
}

size_t WideWorkspace::bytes() const {
  return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
}

void WideWorkspace::clear(const Arguments& arguments, void* workspace, Stream stream) const {
  const bool packs = arguments.packed == nullptr;
  cuda::clear(at(workspace, control_), packs ? cleared_bytes_ + packed_.scales().bytes : cleared_bytes_,
              stream, device_);
}

void WideWorkspace::launch_rest(const Arguments& arguments, void* workspace, Stream stream) const {
  if (finish_)
    finish_->launch(arguments, values(arguments, workspace), statistics_of(arguments, workspace), stream);
  redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), stream);
}

}  // namespace onepass::cuda

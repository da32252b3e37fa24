// What rows of wide convolutions share around their kernel.
#include "cuda/gemm/workspace.h"

namespace onepass::cuda {

WeightPack::WeightPack(const Problem& problem, const ThinShape& shape, int64_t padded_channels, int64_t taps,
                       int64_t joint_taps)
    : padded_channels_(padded_channels),
      channel_bytes_(shape.in_channels * taps * byte_size(problem.parameters[0].dtype)),
      joint_taps_(joint_taps) {
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
      .add("pack_channels", channels_, "joint_taps", joint_taps_)
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

WideWorkspace::WideWorkspace(const Problem& problem, const ThinShape& shape, const Sizes& sizes)
    : device_(problem.device), batch_(shape.batch), own_values_(sizes.own_values), redo_(problem) {
  if (sizes.finishes) finish_.emplace(problem, shape, sizes.planar);
  control_ = regions_.add(sizes.control_words * 4);
  shared_.marks = regions_.add((shape.batch + 1) * 4);
  shared_.guard = regions_.add(shape.batch * 4);
  shared_.scales = regions_.add((sizes.padded_channels + 1) * 4);
  cleared_bytes_ = regions_.total();
  shared_.packed = regions_.add(sizes.weight_bytes);
  parts_ = regions_.add(when(shape.parts.norm, shape.slabs() * (sizes.slab_parts * 16)));
  sums_ = regions_.add(when(shape.parts.mean, shape.rows() * (sizes.row_sums * 4)));
  shared_.statistics = regions_.add(when(shape.parts.norm, shape.slabs() * 2 * 4));
  values_ = regions_.add(when(own_values_, shape.rows() * shape.spatial * 4));
}

size_t WideWorkspace::bytes() const {
  return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
}

void WideWorkspace::clear(void* workspace, Stream stream) const {
  cuda::clear(at(workspace, control_), cleared_bytes_, stream, device_);
}

void WideWorkspace::fill(GemmPackParameters& pack, const Arguments& arguments, void* workspace) const {
  shared_.fill_pack(pack, arguments, workspace, batch_);
  pack.scales = at(workspace, shared_.scales);
}

void WideWorkspace::fill(GemmMmaPackParameters& pack, const Arguments& arguments, void* workspace) const {
  shared_.fill_pack(pack, arguments, workspace, batch_);
}

void WideWorkspace::launch_rest(const Arguments& arguments, void* workspace, Stream stream) const {
  if (finish_)
    finish_->launch(arguments, values(arguments, workspace), shared_.statistics_of(arguments, workspace),
                    stream);
  redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, shared_.marks),
                      stream);
}

}  // namespace onepass::cuda

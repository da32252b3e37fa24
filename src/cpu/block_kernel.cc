// The numbers of a block on the CPU: its passes, its waves, where values wait and the parts of the workspace.
#include "cpu/block_kernel.h"

#include <algorithm>
#include <sstream>

#include "block/spec_checks.h"
#include "cpu/convolution_stage.h"
#include "cpu/gathered_convolution.h"
#include "cpu/group_convolution.h"
#include "cpu/indirect_convolution.h"
#include "cpu/plane_convolution.h"
#include "cpu/run_convolution.h"

namespace onepass::cpu {
namespace {

// Small slabs share a wave up to this much workspace; a larger slab is a wave of its own.
constexpr int64_t wave_slab_floats = 256 * 1024;
constexpr int64_t wave_statistics_floats = 1024 * 1024;
// A unit has as many slabs as fit: a convolution computes their channels together. Units of one slab, of 64
// Ki and of 512 Ki floats take, in ms on one core (Neoverse-V1, 2026-11-18):
//   conv2d(64,64,k=3,p=1) | group_norm(32) | relu | mean @ 8x64x14x14               6.3  1.8  1.8
//   conv2d(64,128,k=3,p=1) | group_norm(32) | swish @ 4x64x56x56 bf16              43.4 30.4 28.7
//   conv3d(16,32,k=3,p=1) | instance_norm | leaky_relu(0.01) @ 1x16x24x24x24 bf16  23.5  7.8  5.6
constexpr int64_t unit_slab_floats = 512 * 1024;

constexpr int64_t few_pixels = 48;

// Into how many units a sample is cut: whole slabs each, as few as the limit allows.
int64_t units_of_sample(int64_t slabs, int64_t sample_floats) {
  int64_t units = 1;
  while (units < slabs && (slabs % units != 0 || sample_floats / units > unit_slab_floats)) ++units;
  return units;
}

// Whether the first step has a shorter form for arguments of bounded magnitude.
bool wants_bound(const Isa& isa, const Chain& chain) {
  if (chain.before.empty() || chain.before[0].affine != Affine::none) return false;
  const auto& forms = isa.steps[chain.before[0].function];
  return forms[static_cast<int>(Affine::narrow)][0] != forms[static_cast<int>(Affine::none)][0];
}

std::unique_ptr<const Convolver> make_convolver(const Problem& problem, const Isa& isa, Lanes lanes,
                                                int64_t cut, bool bound) {
  if (lanes == Lanes::terms) return std::make_unique<GatheredConvolution>(problem, isa, cut);
  if (lanes == Lanes::groups) return std::make_unique<GroupConvolution>(problem, isa, cut);
  if (lanes == Lanes::planes) return std::make_unique<PlaneConvolution>(problem, isa, cut);
  if (lanes == Lanes::positions) return std::make_unique<IndirectConvolution>(problem, isa, cut);
  if (lanes == Lanes::runs) return std::make_unique<RunConvolution>(problem, isa, cut);
  return std::make_unique<ConvolutionStage>(problem, isa, lanes, cut, bound);
}

}  // namespace

BlockKernel::BlockKernel(const Problem& problem, const Isa& isa, std::optional<Lanes> lanes)
    : problem_(problem),
      isa_(isa),
      lanes_(lanes),
      chain_(problem),
      input_(problem.input),
      output_(problem.output) {
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  batch_ = shape[0];
  channels_ = shape[1];
  pixels_ = 1;
  for (size_t i = 2; i < shape.size(); ++i) pixels_ *= shape[i];
  mean_ = problem.block.has_mean();
  const Norm* norm = problem.block.norm();
  if (norm != nullptr) {
    group_count_ = norm->group_count(channels_);
    eps_ = norm->eps;
  }
  statistics_ = norm != nullptr || mean_;
  mean_of_norm_ =
      mean_ && norm != nullptr && chain_.after.size() == 1 && chain_.after[0].function == identity_step;
  choose_middle();
  units_.per_sample = middle_ == Middle::slab ? units_of_sample(group_count_, channels_ * pixels_) : 1;
  units_.channels = channels_ / units_.per_sample;
  if (lanes) {
    // Weights in channels last are read by pointers to positions and by runs; for others they are copied.
    Problem convolved = problem;
    const bool reads_last = *lanes == Lanes::positions || *lanes == Lanes::runs;
    if (!reads_last && lies_channels_last(problem.parameters[0])) {
      convolved.parameters[0] = TensorSpec::dense(DType::f32, problem.parameters[0].sizes);
      copied_weights_ = element_count(problem.parameters[0].sizes);
    }
    convolution_ = make_convolver(convolved, isa, *lanes, units_.channels, wants_bound(isa, chain_));
  }
  choose_passes();
  choose_joins(first_);
  choose_joins(second_);
  choose_wave();
  lay_out_workspace();
}

void BlockKernel::choose_middle() {
  const bool convolution = problem_.block.conv() != nullptr;
  const bool second = problem_.block.norm() != nullptr && !mean_of_norm_;
  const bool keeps_f32 = !mean_ && output_.dtype == DType::f32;
  if (!second) {
    middle_ = Middle::none;
  } else if (!convolution && (chain_.before.empty() || !keeps_f32)) {
    middle_ = Middle::input;
  } else {
    middle_ = keeps_f32 && !stores_turned() ? Middle::output : Middle::slab;
  }
}

void BlockKernel::choose_passes() {
  first_.orientation = first_orientation();
  first_.cut = convolution_ ? first_.orientation : cut_orientation(input_, first_.orientation);
  first_.grid = make_grid(units_.channels, pixels_, first_.cut);
  first_.steps = chain_.before;
  first_.statistics_blocks = convolution_ ? convolution_->block_count() : first_.grid.pixel_parts;
  const bool keeps_orientation = mean_ || middle_ == Middle::input || stores_turned();
  second_.orientation =
      keeps_orientation ? first_.orientation : step_orientation(output_, channels_, isa_.lanes);
  second_.cut = convolution_ ? second_.orientation : cut_orientation(input_, second_.orientation);
  second_.grid = make_grid(units_.channels, pixels_, second_.cut);
  if (middle_ == Middle::input) second_.steps = chain_.before;
  second_.steps.insert(second_.steps.end(), chain_.after.begin(), chain_.after.end());
  second_.statistics_blocks = second_.grid.pixel_parts;
  if (middle_ == Middle::slab) {
    const bool planar = second_.orientation == Orientation::planar;
    slab_.channel_stride = planar ? pixels_ : 1;
    slab_.pixel_stride = planar ? 1 : units_.channels;
    slab_.sizes = {1, 1, pixels_};
    slab_.strides = {0, 0, slab_.pixel_stride};
    slab_.uniform = true;
  }
  if (!convolution_) return;
  const std::vector<Segment>& segments = convolution_->segments();
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].channels.begin % units_.channels == 0) unit_segments_.push_back(i);
  }
  unit_segments_.push_back(segments.size());
}

void BlockKernel::choose_joins(Pass& pass) const {
  double count = 0;
  for (int64_t block = 0; block < pass.statistics_blocks; ++block) {
    const auto pixels = static_cast<double>(block_pixels(pass, block));
    pass.joins.push_back({pixels / (count + pixels), count * pixels / (count + pixels)});
    count += pixels;
  }
}

// Panels of a convolution are transposed in L1 where the output has the other orientation. The last step then
// writes whole rows, which costs nothing beside an activation. Storing a transposed panel would cost 0.35 ns
// an element (s60 on Neoverse-V1: 32 instead of 37 ms).
Orientation BlockKernel::first_orientation() const {
  if (!convolution_) return step_orientation(input_, channels_, isa_.lanes);
  const bool to_output = middle_ == Middle::output || !statistics_;
  const bool other =
      output_.is_panel(Orientation::planar) && convolution_->orientation() == Orientation::interleaved;
  return to_output && other && !stores_turned() ? Orientation::planar : convolution_->orientation();
}

// Rows of few pixels take more time to begin than to compute: then lanes stay channels up to the store.
bool BlockKernel::stores_turned() const {
  return lanes_ && !has_pixel_lanes(*lanes_) && pixels_ <= few_pixels;
}

void BlockKernel::choose_wave() {
  const int64_t unit_floats = units_.channels * pixels_;
  int64_t units = unit_count();
  const int64_t blocks = std::max(first_.statistics_blocks, second_.statistics_blocks);
  const int64_t statistics_floats = 2 * units_.channels * blocks;
  if (statistics_) units = std::min(units, wave_statistics_floats / statistics_floats);
  if (middle_ == Middle::slab) units = std::min(units, wave_slab_floats / unit_floats);
  if (middle_ != Middle::none) units = std::min(units, wave_cache_floats / unit_floats);
  wave_units_ = std::max<int64_t>(1, units);
}

void BlockKernel::lay_out_workspace() {
  WorkspaceLayout layout(chain_.workspace_floats);
  const int64_t slack = Chain::slack();
  if (convolution_) packed_at_ = layout.take(convolution_->packed_floats());
  if (copied_weights_ > 0) weights_at_ = layout.take(copied_weights_);
  const int64_t blocks = std::max(first_.statistics_blocks, second_.statistics_blocks);
  if (statistics_) statistics_at_ = layout.take(wave_units_ * blocks * 2 * units_.channels);
  if (problem_.block.norm() != nullptr)
    coefficients_at_ = layout.take(wave_units_ * 3 * (units_.channels + slack));
  if (middle_ == Middle::slab) slab_at_ = layout.take(wave_units_ * units_.channels * pixels_);
  // A panel of each pass, one for a tensor operand, and running statistics.
  panel_floats_ = std::max(stream_panel_floats, units_.channels + slack);
  if (convolution_) {
    const int64_t padded = convolution_->padded_channels(convolution_->max_segment_channels());
    panel_floats_ = std::max(panel_floats_, padded * convolution_->max_panel_pixels());
  }
  panel_floats_ = round_up(panel_floats_, alignment_floats);
  worker_floats_ = 2 * panel_floats_ + 2 * (units_.channels + slack);
  if (convolution_) worker_floats_ += convolution_->worker_floats();
  worker_floats_ = round_up(worker_floats_, alignment_floats);
  workers_at_ = layout.take(worker_floats_ * problem_.device.threads);
  workspace_floats_ = layout.floats();
}

int64_t BlockKernel::kept_weights_at() const {
  return round_up(convolution_->packed_floats(), alignment_floats);
}

// Nothing where the weights are read as they lie: then little more than the bias is packed.
size_t BlockKernel::packed_bytes() const {
  if (!convolution_) return 0;
  const int64_t floats = kept_weights_at() + copied_weights_;
  if (floats < element_count(problem_.parameters[0].sizes)) return 0;
  return static_cast<size_t>(floats) * sizeof(float);
}

// Tiles and segments follow from the whole problem: plans of other sizes pack otherwise.
uint64_t BlockKernel::packing() const {
  if (packed_bytes() == 0) return 0;
  const std::string text = problem_.text() + ' ' + std::to_string(problem_.device.threads) + ' ' + isa_.name +
                           ' ' + std::to_string(static_cast<int>(*lanes_));
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return std::max<uint64_t>(1, hash);
}

std::string BlockKernel::describe() const {
  static constexpr const char* middles[] = {
      "nowhere: there is no second pass", "in the output, normalised there while in cache",
      "in a f32 slab of the workspace", "nowhere: the second pass reads the input again"};
  std::ostringstream out;
  if (convolution_) {
    out << convolution_->describe();
  } else {
    out << "lanes: " << (first_.orientation == Orientation::planar ? "pixels" : "channels") << " ("
        << isa_.name << ", " << isa_.lanes << ")\n";
  }
  if (problem_.block.norm() != nullptr) {
    out << "before the norm: values wait " << middles[static_cast<int>(middle_)] << '\n';
    out << "units in a wave: " << wave_units_
        << (units_.per_sample == 1              ? " samples\n"
            : units_.per_sample == group_count_ ? " slabs\n"
                                                : " groups of slabs\n");
  }
  if (mean_) {
    out << "mean: "
        << (middle_ == Middle::none ? "from the statistics, the activation is not stored\n"
                                    : "summed in the second pass, the activation is not stored\n");
  }
  const bool in_place = convolution_ ? convolution_->in_place() : input_.is_panel(first_.orientation);
  out << "copies: "
      << (in_place       ? "none, the input is read in place"
          : convolution_ ? "input rows are staged in f32 per task"
                         : "input panels are gathered per task")
      << '\n';
  out << "workspace: " << workspace_bytes() << " bytes, of which " << worker_floats_ * 4 << " per thread";
  if (middle_ == Middle::slab) out << " and " << wave_units_ * units_.channels * pixels_ * 4 << " for slabs";
  out << '\n';
  return out.str();
}

}  // namespace onepass::cpu

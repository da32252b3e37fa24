// Memory of a call: tensors filled with random values, every page written before anything is timed.
#include "tool/buffers.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "block/convert.h"
#include "onepass/error.h"
#include "tool/judged_error.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

// MemAvailable of /proc/meminfo; all of the memory where the system has no such file.
double available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  for (double kib = 0; meminfo >> name >> kib; meminfo.ignore(64, '\n')) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// What the control group of a container leaves besides file caches; infinite where there is none.
double container_bytes() {
  double limit = 0;
  double used = 0;
  std::string name;
  std::ifstream limit_file("/sys/fs/cgroup/memory.max");
  std::ifstream usage("/sys/fs/cgroup/memory.stat");  // opens with "anon BYTES"
  if (!(limit_file >> limit && usage >> name >> used)) return std::numeric_limits<double>::infinity();
  return limit - used;
}

constexpr size_t huge_page = size_t{2} << 20;

uint64_t mix(uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Bell-shaped with mean 0 and standard deviation 1, within 3.5: the sum of four uniform numbers.
double random_normal(uint64_t seed, uint64_t index) {
  const uint64_t bits = mix(seed + index * 0x9e3779b97f4a7c15u);
  const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  constexpr double deviation = 65536 * 0.57735026918962576;  // of the sum: sqrt(4 / 12)
  return (static_cast<double>(sum) - 2.0 * 65535) / deviation;
}

struct Distribution {
  double mean = 0;
  double deviation = 1;
};

// Keeps values around 1 through the block, so that an error of a given size means the same everywhere.
Distribution distribution(const Block& block, const Parameter& parameter) {
  switch (parameter.role) {
    case Parameter::Role::conv_weight: {
      const Conv& conv = *block.conv();
      const int64_t taps = conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
      const int64_t terms = conv.in_channels / conv.groups * taps;
      return {0, 1 / std::sqrt(static_cast<double>(terms))};
    }
    case Parameter::Role::conv_bias:
    case Parameter::Role::norm_bias:
      return {0, 0.3};
    case Parameter::Role::norm_weight:
      return {1, 0.25};
    case Parameter::Role::operand:
      break;
  }
  const Op op = std::get<Pointwise>(block.stages()[parameter.stage]).op;
  if (op == Op::prelu) return {0.2, 0.1};
  return op == Op::channel_mul ? Distribution{1, 0.25} : Distribution{};
}

template <class Visit>
void for_each_offset(const TensorSpec& spec, size_t dimension, int64_t offset, Visit&& visit) {
  if (dimension == spec.sizes.size()) return visit(offset);
  for (int64_t i = 0; i < spec.sizes[dimension]; ++i) {
    for_each_offset(spec, dimension + 1, offset + i * spec.strides[dimension], visit);
  }
}

// Fills memory in pieces, whatever the strides: a value belongs to its place.
void fill_random(const TensorSpec& spec, Distribution values, uint64_t seed, void* memory,
                 Executor& executor) {
  constexpr int64_t piece = 1 << 16;
  const int64_t element_bytes = byte_size(spec.dtype);
  const int64_t count = spec.byte_span() / element_bytes;
  executor.for_each((count + piece - 1) / piece, [&](int64_t task, int) {
    for (int64_t i = task * piece; i < std::min(count, (task + 1) * piece); ++i) {
      const double value = values.mean + values.deviation * random_normal(seed, static_cast<uint64_t>(i));
      store_element(spec.dtype, value, static_cast<char*>(memory) + i * element_bytes);
    }
  });
}

Buffer sized_for(const TensorSpec& spec, Pages pages) {
  return Buffer(static_cast<size_t>(spec.byte_span()), pages);
}

size_t host_workspace_bytes(const Plan& plan) {
  return plan.problem().device.kind == Device::Kind::cpu ? plan.workspace_bytes() : 0;
}

double call_bytes(const Plan& plan) {
  return static_cast<double>(tensor_bytes(plan.problem())) + static_cast<double>(host_workspace_bytes(plan));
}

// Asked before the first buffer is made: in the initialiser of the first member.
const TensorSpec& after_memory_check(const Plan& plan) {
  require_memory(call_bytes(plan));
  return plan.problem().input;
}

}  // namespace

Pages given_pages(Pages asked) {
  std::string modes;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), modes);
  return modes.empty() || modes.find("[never]") != std::string::npos ? Pages::small : asked;
}

Buffer::Buffer(size_t bytes, Pages pages) : bytes_(bytes), memory_(nullptr, Free{std::align_val_t{64}}) {
  const bool large = bytes >= least_huge_bytes;
  const std::align_val_t alignment{large ? huge_page : 64};
  memory_ = {::operator new(std::max<size_t>(bytes, 64), alignment), Free{alignment}};
#if defined(__linux__)
  // Advice that is not taken leaves a buffer as good as any.
  if (large) madvise(memory_.get(), bytes, pages == Pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  poison();
}

void Buffer::poison() { std::memset(memory_.get(), 0xff, bytes_); }

void require_memory(double bytes) {
  const double free_bytes = std::min(available_bytes(), container_bytes());
  if (bytes < 0.95 * free_bytes) return;
  throw Error("the problem needs " + byte_text(bytes) + ", this machine has " + byte_text(free_bytes) +
              " free");
}

void refuse_memory(double bytes) {
  throw Error("the problem needs " + byte_text(bytes) + ", which the system does not give");
}

int64_t input_bytes(const Problem& problem) {
  int64_t bytes = problem.input.byte_span();
  for (const TensorSpec& spec : problem.parameters) bytes += spec.byte_span();
  return bytes;
}

int64_t tensor_bytes(const Problem& problem) { return input_bytes(problem) + problem.output.byte_span(); }

Tensors::Tensors(const Plan& plan, uint64_t seed, Executor& executor, Pages pages) try
    : input(sized_for(after_memory_check(plan), pages)),
      output(sized_for(plan.problem().output, pages)),
      workspace(host_workspace_bytes(plan), pages) {
  const Problem& problem = plan.problem();
  const std::vector<Parameter> named = problem.block.parameters(problem.input.sizes);
  fill_random(problem.input, {}, mix(seed), input.data(), executor);
  for (size_t i = 0; i < named.size(); ++i) {
    parameters.push_back(sized_for(problem.parameters[i], pages));
    fill_random(problem.parameters[i], distribution(problem.block, named[i]), mix(seed + (i + 1) * 0x10001),
                parameters.back().data(), executor);
  }
} catch (const std::bad_alloc&) {
  refuse_memory(call_bytes(plan));
}

Arguments Tensors::arguments() const {
  Arguments arguments{input.data(), output.data(), {}};
  for (const Buffer& parameter : parameters) arguments.parameters.push_back(parameter.data());
  return arguments;
}

uint64_t Tensors::output_hash() const {
  uint64_t hash = 0;
  const auto* bytes = static_cast<const char*>(output.data());
  size_t done = 0;
  for (uint64_t word = 0; done + sizeof word <= output.bytes(); done += sizeof word) {
    std::memcpy(&word, bytes + done, sizeof word);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  for (; done < output.bytes(); ++done)
    hash = (hash ^ static_cast<unsigned char>(bytes[done])) * 0x100000001b3u;
  return hash;
}

std::vector<double> sample_values(const TensorSpec& spec, const void* memory, int64_t n) {
  std::vector<double> values;
  if (spec.sizes[0] > 0) values.reserve(static_cast<size_t>(element_count(spec.sizes) / spec.sizes[0]));
  for_each_offset(spec, 1, n * spec.strides[0], [&](int64_t offset) {
    values.push_back(
        load_element(spec.dtype, static_cast<const char*>(memory) + offset * byte_size(spec.dtype)));
  });
  return values;
}

std::vector<double> all_values(const TensorSpec& spec, const void* memory) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(element_count(spec.sizes)));
  for_each_offset(spec, 0, 0, [&](int64_t offset) {
    values.push_back(
        load_element(spec.dtype, static_cast<const char*>(memory) + offset * byte_size(spec.dtype)));
  });
  return values;
}

}  // namespace onepass::tool

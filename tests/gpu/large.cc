// Tensors of more than 2^31 elements, compared where they are cut into samples: at the beginning, where
// 32-bit numbers of elements and bytes end, and at the end.
#include <cmath>
#include <list>
#include <set>

#include "block/convert.h"
#include "gpu/pool.h"
#include "onepass/error.h"
#include "onepass/onepass.h"

namespace onepass::testing {
namespace {

using Large = GpuTest;

const Device gpu = Device::cuda();

// Values of a bf16 tensor that is nowhere whole: random ones of a prime number, repeated, so that what lies a
// power of two further on is something else.
class Pattern {
 public:
  explicit Pattern(uint64_t seed) {
    values_ = random_tensor(TensorSpec::dense(DType::bf16, {1, 1, period}), Distribution::normal, 1, seed);
    for (const double value : values_) bits_.push_back(bf16_bits(value));
  }

  void fill(const cuda::Memory& memory, const GpuStream& stream) const {
    const size_t chunk = bits_.size() * sizeof(uint16_t);
    for (size_t offset = 0; offset < memory.bytes(); offset += chunk)
      stream.upload(static_cast<char*>(memory.data()) + offset, bits_.data(),
                    std::min(chunk, memory.bytes() - offset));
  }
  double operator[](int64_t index) const { return values_[static_cast<size_t>(index % period)]; }
  // The sum of f(value) over the first `count` elements.
  template <class F>
  double sum(int64_t count, F&& f) const {
    double whole = 0;
    double rest = 0;
    for (int64_t i = 0; i < period; ++i) {
      const double term = f((*this)[i]);
      whole += term;
      if (i < count % period) rest += term;
    }
    return whole * static_cast<double>(count / period) + rest;
  }
  std::vector<double> part(int64_t first, int64_t count) const {
    std::vector<double> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = (*this)[first + i];
    return values;
  }

 private:
  static constexpr int64_t period = 4'999'999;
  std::vector<double> values_;
  std::vector<uint16_t> bits_;
};

std::vector<double> download(const cuda::Memory& memory, int64_t first, int64_t count,
                             const GpuStream& stream) {
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  stream.download(bits.data(), static_cast<const char*>(memory.data()) + 2 * first, 2 * bits.size());
  std::vector<double> values;
  for (const uint16_t pattern : bits) values.push_back(bf16_value(pattern));
  return values;
}

Problem one_sample(const Problem& problem) {
  Shape sizes = problem.input.sizes;
  sizes[0] = 1;
  const Layout layout = problem.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
  return {problem.block, sizes, problem.input.dtype, problem.device, layout};
}

// The first, the last, and those that hold the 2^30th, 2^31st and 2^32nd element or byte.
std::vector<int64_t> telling_samples(const Problem& problem) {
  const int64_t batch = problem.input.sizes[0];
  const int64_t size = element_count(problem.input.sizes) / batch;
  std::set<int64_t> samples{0, 1, batch - 2, batch - 1};
  for (const int64_t element : {int64_t{1} << 29, int64_t{1} << 30, int64_t{1} << 31}) {
    for (const int64_t sample : {element / size, element / size + 1})
      if (sample < batch) samples.insert(sample);
  }
  return {samples.begin(), samples.end()};
}

// Parameters of the problem in the GPU's memory.
struct Parameters {
  std::vector<std::vector<double>> values;
  std::vector<cuda::Memory> memory;

  Parameters(const Problem& problem, const GpuStream& stream) {
    for (size_t i = 0; i < problem.parameters.size(); ++i) {
      const TensorSpec& spec = problem.parameters[i];
      values.push_back(random_tensor(spec, Distribution::normal, 1, 77 + i));
      std::vector<std::byte> bytes(static_cast<size_t>(spec.byte_span()));
      store_tensor(spec, values.back(), bytes.data());
      memory.emplace_back(0, bytes.size());
      stream.upload(memory.back().data(), bytes.data(), bytes.size());
      stream.wait("an upload");
    }
  }
  std::vector<const void*> pointers() const {
    std::vector<const void*> list;
    for (const cuda::Memory& item : memory) list.push_back(item.data());
    return list;
  }
};

// Of each sample what `make` gives, by the threads of the pool: a reference of millions of elements takes
// seconds.
template <class Value, class Make>
std::vector<Value> for_samples(const std::vector<int64_t>& samples, const Make& make) {
  std::vector<Value> values(samples.size());
  try_all(std::ssize(samples), [&](int64_t index, const GpuStream&) {
    values[static_cast<size_t>(index)] = make(samples[static_cast<size_t>(index)]);
    return std::string();
  });
  return values;
}

size_t bytes_of(const TensorSpec& spec) { return static_cast<size_t>(spec.byte_span()); }

// The dense NCHW values of a sample from those in the order of its memory.
std::vector<double> in_order(const TensorSpec& spec, const std::vector<double>& values) {
  std::vector<std::byte> memory(bytes_of(spec));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = bf16_bits(values[i]);
    std::memcpy(memory.data() + 2 * i, &bits, 2);
  }
  return load_tensor(spec, memory.data());
}

TEST_F(Large, ForwardIsRightBeyondTwoToThe31Elements) {
  const GpuStream stream;
  const Pattern pattern(5);
  std::vector<Problem> problems;
  std::vector<ProblemAndRow> list;
  for (const char* const text :
       {"swish | group_norm(4) | hardswish @ 1100x16x31x63x63 bf16",
        "gelu | group_norm(8) @ 520x64x258x258 bf16", "group_norm(8) | relu @ 600x64x240x240 bf16 nhwc",
        "gelu | channel_add @ 66000x32769x1 bf16"}) {
    problems.push_back(Problem::parse(text, gpu));
    for (const std::string& row : accepting_rows(problems.back())) list.push_back({problems.back(), row});
  }
  compile_all(list);
  for (const Problem& problem : problems) {
    ASSERT_GT(element_count(problem.input.sizes), int64_t{1} << 31);
    const Problem one = one_sample(problem);
    const int64_t size = element_count(one.input.sizes);
    const cuda::Memory input(0, bytes_of(problem.input));
    pattern.fill(input, stream);
    const Parameters parameters(problem, stream);
    const std::vector<int64_t> samples = telling_samples(problem);
    // Once for all rows that are as accurate: the reference of millions of elements takes seconds.
    std::list<std::pair<Accuracy, std::vector<Expected>>> known;
    const auto expected_of = [&](const Accuracy& accuracy) -> const std::vector<Expected>& {
      for (const auto& [own, expected] : known) {
        if (own == accuracy) return expected;
      }
      known.emplace_back(accuracy, for_samples<Expected>(samples, [&](int64_t sample) {
                           return expected_output(one, in_order(one.input, pattern.part(sample * size, size)),
                                                  parameters.values, accuracy);
                         }));
      return known.back().second;
    };
    for (const std::string& row : accepting_rows(problem)) {
      const std::string what = row + ": " + problem.text();
      SCOPED_TRACE(what);
      const Plan p = plan(problem, {row, ""});
      const std::vector<Expected>& expected = expected_of(p.accuracy());
      cuda::Memory output(0, bytes_of(problem.output));
      output.fill(0xff);
      const cuda::Memory workspace(0, p.workspace_bytes());
      cuda::synchronize(0);
      p.run({input.data(), output.data(), parameters.pointers()}, workspace.data(), stream.stream());
      stream.wait(what);
      try_all(std::ssize(samples), [&](int64_t index, const GpuStream& own) {
        const int64_t sample = samples[static_cast<size_t>(index)];
        const std::vector<double> actual = in_order(one.output, download(output, sample * size, size, own));
        const Comparison comparison = compare(one, expected[static_cast<size_t>(index)], actual);
        if (comparison.failures == 0) return std::string();
        return what + ", sample " + std::to_string(sample) + ": " + comparison.text();
      });
    }
  }
}

// One slab, one row of it, larger than 2^31: all of its pieces enter the statistics.
TEST_F(Large, StatisticsOfASlabBeyondTwoToThe31ElementsAreRight) {
  const GpuStream stream;
  const Pattern pattern(6);
  constexpr int64_t size = 2'200'000'000;
  const double mean = pattern.sum(size, [](double x) { return x; }) / static_cast<double>(size);
  const double squares = pattern.sum(size, [mean](double x) { return (x - mean) * (x - mean); });
  const double rstd = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-5);

  const Problem problem(Block::parse("group_norm(1,affine=false) | relu"), {1, 1, 1100, 2000, 1000},
                        DType::bf16, gpu);
  const cuda::Memory input(0, bytes_of(problem.input));
  pattern.fill(input, stream);
  std::vector<ProblemAndRow> list;
  for (const std::string& row : accepting_rows(problem)) list.push_back({problem, row});
  compile_all(list);
  for (const std::string& row : accepting_rows(problem)) {
    SCOPED_TRACE(row + ": " + problem.text());
    const Plan p = plan(problem, {row, ""});
    cuda::Memory output(0, bytes_of(problem.output));
    output.fill(0xff);
    const cuda::Memory workspace(0, p.workspace_bytes());
    const cuda::Memory statistics(0, 2 * sizeof(float));
    cuda::synchronize(0);
    p.run({input.data(), output.data(), {}, static_cast<float*>(statistics.data())}, workspace.data(),
          stream.stream());
    stream.wait(p.strategy() + ": " + problem.text());
    float actual[2] = {};
    statistics.download(actual, sizeof actual);
    EXPECT_NEAR(actual[0], mean, 4e-6);
    EXPECT_NEAR(actual[1] / rstd, 1, 4e-6);
    constexpr int64_t count = 100'000;
    for (const int64_t first : {int64_t{0}, (int64_t{1} << 30) - 50, (int64_t{1} << 31) - 50, size - count}) {
      const std::vector<double> values = download(output, first, count, stream);
      int64_t failures = 0;
      for (int64_t i = 0; i < count; ++i) {
        const double expected = std::max(0.0, (pattern[first + i] - mean) * rstd);
        if (!is_acceptable(DType::bf16, values[static_cast<size_t>(i)], expected, 1e-5)) ++failures;
      }
      EXPECT_EQ(failures, 0) << "from element " << first;
    }
  }
}

TEST_F(Large, InputGradientIsRightBeyondTwoToThe31Elements) {
  const GpuStream stream;
  const Pattern x(7);
  const Pattern dy(8);
  for (const char* const text : {"swish | group_norm(4) | hardswish @ 1100x16x31x63x63 bf16",
                                 "group_norm(8) | relu @ 600x64x240x240 bf16 nhwc"}) {
    BackwardProblem problem(Problem::parse(text, gpu));
    problem.wanted.assign(problem.wanted.size(), false);
    problem.wanted[0] = true;
    SCOPED_TRACE(problem.text());
    BackwardProblem one(one_sample(problem.forward));
    one.wanted = problem.wanted;
    const int64_t size = element_count(one.forward.input.sizes);

    const cuda::Memory input(0, bytes_of(problem.forward.input));
    const cuda::Memory output_gradient(0, bytes_of(problem.output_gradient));
    x.fill(input, stream);
    dy.fill(output_gradient, stream);
    const Parameters parameters(problem.forward, stream);
    // The output of the forward is not looked at: the gradient is written over it.
    const cuda::Memory result(0, bytes_of(problem.input_gradient));
    const cuda::Memory statistics(0, static_cast<size_t>(slab_count(problem.forward)) * 8);
    const Plan forward = plan(problem.forward);
    const BackwardPlan backward = plan_backward(problem);
    const cuda::Memory workspace(0, std::max(forward.workspace_bytes(), backward.workspace_bytes()));
    cuda::synchronize(0);
    forward.run({input.data(), result.data(), parameters.pointers(), static_cast<float*>(statistics.data())},
                workspace.data(), stream.stream());
    stream.wait(forward.strategy() + ": " + problem.text());
    BackwardArguments arguments{input.data(),           parameters.pointers(),
                                output_gradient.data(), static_cast<const float*>(statistics.data()),
                                result.data(),          {}};
    arguments.parameter_gradients.resize(parameters.memory.size());
    backward.run(arguments, workspace.data(), stream.stream());
    stream.wait(backward.strategy() + ": " + problem.text());

    const std::vector<int64_t> samples = telling_samples(problem.forward);
    try_all(std::ssize(samples), [&](int64_t index, const GpuStream& own) {
      const int64_t sample = samples[static_cast<size_t>(index)];
      const TensorSpec& spec = one.forward.input;
      const BackwardOperands operands{{in_order(spec, x.part(sample * size, size)), parameters.values},
                                      in_order(spec, dy.part(sample * size, size))};
      const BackwardOutcome outcome{{in_order(spec, download(result, sample * size, size, own))}, ""};
      const std::string errors = compare(one, operands, outcome).errors;
      return errors.empty() ? errors : "sample " + std::to_string(sample) + ": " + errors;
    });
  }
}

}  // namespace
}  // namespace onepass::testing

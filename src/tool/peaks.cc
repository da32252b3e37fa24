// The measured peaks of this machine: multiply-adds per second and bytes per second.
//
// The multiply-add loop mixes loads in. Several shapes run and the best one counts. On Neoverse-V1, 24
// accumulators without a load run at half the rate of the same loop with 3 loads from L1 (41.6 and 83.2
// GFLOP/s a core).
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tool/peaks.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/supported_targets.h"
#include "onepass/cuda.h"
#include "tool/buffers.h"
#include "tool/executor.h"
#include "tool/peaks.h"
#include "tool/timing.h"

// What the loops of each target show to the rest of the file.
#if !defined(ONEPASS_TOOL_PEAK_LOOPS)
#define ONEPASS_TOOL_PEAK_LOOPS
namespace onepass::tool {

inline constexpr int64_t l1_floats = 2048;

struct PeakLoops {
  using MultiplyAdds = float (*)(const float* data, int64_t rounds);
  struct Shape {
    MultiplyAdds run = nullptr;
    int64_t flops_per_round = 0;
  };
  std::vector<Shape> shapes;
  void (*write)(float* to, int64_t count) = nullptr;
  float (*read)(const float* from, int64_t count) = nullptr;
};

}  // namespace onepass::tool
#endif

HWY_BEFORE_NAMESPACE();
namespace onepass::tool {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int64_t lanes = static_cast<int64_t>(hn::MaxLanes(D()));

#define ONEPASS_UNROLLED _Pragma("GCC unroll 32") for

// One pass over the L1 buffer a round: each step loads kLoads vectors for kAccumulators multiply-adds.
template <int kAccumulators, int kLoads>
struct Loop {
  static constexpr int64_t steps = l1_floats / (kLoads * lanes);
  static constexpr int64_t flops_per_round = steps * kAccumulators * lanes * 2;

  static HWY_NOINLINE float run(const float* data, int64_t rounds) {
    const D d;
    V sums[kAccumulators];
    // All different: a compiler may see that equal accumulators stay equal and keep one of them.
    ONEPASS_UNROLLED(int i = 0; i < kAccumulators; ++i) sums[i] = hn::Set(d, static_cast<float>(i));
    const V even = hn::Load(d, data);
    const V odd = hn::Load(d, data + lanes);
    for (int64_t round = 0; round < rounds; ++round) {
      const float* at = data;
      for (int64_t step = 0; step < steps; ++step, at += kLoads * lanes) {
        V x[kLoads];
        ONEPASS_UNROLLED(int j = 0; j < kLoads; ++j) x[j] = hn::Load(d, at + j * lanes);
        ONEPASS_UNROLLED(int i = 0; i < kAccumulators; ++i) {
          sums[i] = hn::MulAdd(x[i % kLoads], i % 2 == 0 ? even : odd, sums[i]);
        }
      }
    }
    ONEPASS_UNROLLED(int i = 1; i < kAccumulators; ++i) sums[0] = hn::Add(sums[0], sums[i]);
    return hn::GetLane(sums[0]);
  }
};

HWY_NOINLINE void write(float* to, int64_t count) {
  const D d;
  const V value = hn::Set(d, 1.5f);
  for (int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    ONEPASS_UNROLLED(int j = 0; j < 4; ++j) hn::Store(value, d, to + i + j * lanes);
  }
}

HWY_NOINLINE float read(const float* from, int64_t count) {
  const D d;
  V sums[8];
  ONEPASS_UNROLLED(int j = 0; j < 8; ++j) sums[j] = hn::Zero(d);
  for (int64_t i = 0; i + 8 * lanes <= count; i += 8 * lanes) {
    ONEPASS_UNROLLED(int j = 0; j < 8; ++j) sums[j] = hn::Add(sums[j], hn::Load(d, from + i + j * lanes));
  }
  ONEPASS_UNROLLED(int j = 1; j < 8; ++j) sums[0] = hn::Add(sums[0], sums[j]);
  return hn::GetLane(sums[0]);
}

template <class... Loops>
void add_shapes(PeakLoops& loops) {
  (loops.shapes.push_back({&Loops::run, Loops::flops_per_round}), ...);
}

// 24 accumulators for 32 registers, 12 for the 16 of AVX2, with few and many loads.
void fill_peak_loops(PeakLoops& loops) {
  add_shapes<Loop<24, 3>, Loop<24, 6>, Loop<16, 2>, Loop<12, 2>, Loop<12, 3>, Loop<10, 2>>(loops);
  loops.write = &write;
  loops.read = &read;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::tool
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace onepass::tool {
namespace {

constexpr int64_t large_bytes = int64_t{128} << 20;
constexpr double seconds_per_shape = 0.06;
constexpr double seconds_per_direction = 0.25;
constexpr int least_repeats = 5;

std::atomic<float> sink;  // keeps results that nothing else reads

const PeakLoops& peak_loops() {
  static const PeakLoops loops = [] {
    PeakLoops filled;
    for (const int64_t target : cpu::supported_targets()) {
      ONEPASS_FOR_TARGET(target, fill_peak_loops(filled));
      if (filled.write != nullptr) break;
    }
    return filled;
  }();
  return loops;
}

void fill(Buffer& buffer) {
  auto* values = static_cast<float*>(buffer.data());
  for (size_t i = 0; i < buffer.bytes() / sizeof(float); ++i)
    values[i] = 1e-3f * static_cast<float>(i % 61) - 0.03f;
}

double measure_flops(int threads) {
  std::vector<Buffer> data;
  for (int worker = 0; worker < threads; ++worker) fill(data.emplace_back(l1_floats * sizeof(float)));
  constexpr double flops_per_sample = 1e8;  // a millisecond or two
  double best = 0;
  for (const PeakLoops::Shape& shape : peak_loops().shapes) {
    const auto rounds =
        static_cast<int64_t>(flops_per_sample / static_cast<double>(shape.flops_per_round)) + 1;
    const Samples samples = collect(seconds_per_shape, least_repeats, [&] {
      return seconds_on_all(threads, [&](int worker) {
        sink = shape.run(static_cast<const float*>(data[static_cast<size_t>(worker)].data()), rounds);
      });
    });
    best = std::max(best, static_cast<double>(rounds * shape.flops_per_round) * threads / samples.best());
  }
  return best;
}

// Calls move(first byte, bytes) on each thread with its part of `bytes`: the best time of several.
template <class Move>
double seconds_to_move(int64_t bytes, int threads, Move&& move) {
  constexpr int64_t line = 256;
  const int64_t part = (bytes / threads + line - 1) / line * line;
  return collect(seconds_per_direction, least_repeats,
                 [&] {
                   return seconds_on_all(threads, [&](int worker) {
                     const int64_t first = std::min(bytes, worker * part);
                     move(first, std::min(bytes - first, part));
                   });
                 })
      .best();
}

float* floats(const Buffer& buffer, int64_t first_byte) {
  return reinterpret_cast<float*>(static_cast<char*>(buffer.data()) + first_byte);
}

int64_t float_count(int64_t bytes) { return bytes / static_cast<int64_t>(sizeof(float)); }

}  // namespace

double seconds_to_write(const Buffer& buffer, int threads) {
  return seconds_to_move(static_cast<int64_t>(buffer.bytes()), threads, [&](int64_t first, int64_t part) {
    peak_loops().write(floats(buffer, first), float_count(part));
  });
}

Peaks measure_peaks(int threads) {
  Peaks peaks;
  peaks.threads = threads;
  peaks.flops_one_thread = measure_flops(1);
  peaks.flops = threads == 1 ? peaks.flops_one_thread : measure_flops(threads);
  Buffer from(static_cast<size_t>(large_bytes));
  Buffer to(static_cast<size_t>(large_bytes));
  fill(from);
  const auto bytes = static_cast<double>(large_bytes);
  peaks.write = bytes / seconds_to_write(to, threads);
  peaks.read = bytes / seconds_to_move(large_bytes, threads, [&](int64_t first, int64_t part) {
                 sink = peak_loops().read(floats(from, first), float_count(part));
               });
  peaks.copy = 2 * bytes / seconds_to_move(large_bytes, threads, [&](int64_t first, int64_t part) {
                 std::memcpy(floats(to, first), floats(from, first), static_cast<size_t>(part));
               });
  return peaks;
}

Peaks gpu_peaks(int index) {
  const cuda::Rates rates = cuda::device_rates(index);
  Peaks peaks;
  peaks.gpu = cuda::describe_device(index);
  peaks.flops = rates.flops;
  peaks.write = peaks.read = peaks.copy = rates.bytes_per_second;
  return peaks;
}

std::string Peaks::memory_text() const {
  if (!gpu.empty()) return "copy " + significant(copy * 1e-9);
  return "read " + significant(read * 1e-9) + " and write " + significant(write * 1e-9);
}

std::string Peaks::text() const {
  if (!gpu.empty()) {
    return gpu + "\n  multiply-adds  " + significant(flops * 1e-9) + " GFLOP/s f32, not on tensor cores\n" +
           "  memory         copy " + significant(copy * 1e-9) + " GB/s (read + written)\n";
  }
  std::string text = "peaks of this machine, measured, " + thread_text(threads) + '\n';
  text += "  multiply-adds  " + significant(flops * 1e-9) + " GFLOP/s f32 (one thread " +
          significant(flops_one_thread * 1e-9) + ")\n";
  text += "  memory         write " + significant(write * 1e-9) + " GB/s, read " + significant(read * 1e-9) +
          " GB/s, copy " + significant(copy * 1e-9) + " GB/s (read + written), buffers of 128 MiB\n";
  return text;
}

Json Peaks::json() const {
  if (!gpu.empty()) return {{"gpu", gpu}, {"gflops", flops * 1e-9}, {"copy_gb_per_s", copy * 1e-9}};
  return {{"threads", threads},
          {"gflops", flops * 1e-9},
          {"gflops_one_thread", flops_one_thread * 1e-9},
          {"write_gb_per_s", write * 1e-9},
          {"read_gb_per_s", read * 1e-9},
          {"copy_gb_per_s", copy * 1e-9}};
}

}  // namespace onepass::tool
#endif

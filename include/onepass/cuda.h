// GPUs: which are present, their memory for callers without a framework, the compile cache, exported plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "onepass/backward.h"
#include "onepass/executor.h"
#include "onepass/export.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::cuda {

// Why no GPU can be used, as one sentence that says what is missing; empty where one can.
ONEPASS_API std::string unavailable_reason();
// 0 where unavailable_reason() is not empty.
ONEPASS_API int device_count();
// "NVIDIA H200, sm_90a, 132 multiprocessors, 139.8 GiB; driver 13.0, NVRTC 13.0 from /path/libnvrtc.so.13"
ONEPASS_API std::string describe_device(int index);

// The peak rates of a GPU that plans assume. Bytes are those that a large copy reads and writes in a second.
// Operations are multiply-adds, counted as two each: in fp32 on CUDA cores, in tf32 on tensor cores (what a
// large matrix product reaches).
struct Rates {
  double bytes_per_second = 0;
  double flops = 0;
  double tensor_flops = 0;
};
ONEPASS_API Rates device_rates(int index);
// The same of a GPU or of an architecture's typical GPU.
ONEPASS_API Rates device_rates(const Device& device);

// Memory of a GPU. Throws Error where it cannot be allocated, naming the bytes asked for and those free.
class ONEPASS_API Memory {
 public:
  Memory(int device, size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void upload(const void* from, size_t bytes);
  void download(void* to, size_t bytes) const;
  void fill(unsigned char value);

 private:
  int device_ = 0;
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

// Waits for all work of the device. Throws Error where some of it failed.
ONEPASS_API void synchronize(int device);

// A counter for Arguments::redone, zero at first. It lies in host memory that kernels reach, so the host
// reads it without waiting. It is never freed: a captured launch may add to it at any later time. It belongs
// to one GPU: additions by several are not atomic.
ONEPASS_API int64_t* new_counter(int device);
// Includes all launches that have ended, and perhaps some that still run.
ONEPASS_API int64_t value_of(const int64_t* counter);

// Seconds of GPU time between two points of a stream, the default one unless given.
class ONEPASS_API Timer {
 public:
  explicit Timer(int device);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(Stream stream = {});
  double stop(Stream stream = {});  // waits

 private:
  struct Events;
  Events* events_;
};

// The compiled kernels kept on disk, under $ONEPASS_CACHE_DIR, else $XDG_CACHE_HOME/onepass, else
// ~/.cache/onepass.
struct CacheEntry {
  std::string kernel;
  std::string architecture;
  std::string file;
  int64_t bytes = 0;
};
ONEPASS_API std::string cache_directory();
ONEPASS_API std::vector<CacheEntry> cache_entries();
// Removes them; returns how many.
ONEPASS_API int clear_cache();
// The hash of the library's device code: results measured on a GPU belong to one.
ONEPASS_API std::string device_code_hash();

// Whether work put on this stream now is recorded into a graph instead of run.
ONEPASS_API bool is_captured(int device, Stream stream);

// Choices that a caller has measured on a GPU, kept on disk with the kernels: an answer by its question. The
// answer is empty where none is stored. Other device code, another GPU or another driver invalidates it.
ONEPASS_API std::string remembered_choice(int device, const std::string& question);
ONEPASS_API void remember_choice(int device, const std::string& question, const std::string& answer);

// A batch norm in evaluation as channel_mul and channel_add, by one small kernel, in f32:
// scale = weight / sqrt(variance + eps), shift = bias - mean * scale.
class ONEPASS_API ScaleAndShift {
 public:
  // One value per channel, contiguous. A null weight is 1, a null bias 0.
  struct Arguments {
    const void* mean;
    const void* variance;
    const void* weight;
    const void* bias;
    float* scale;
    float* shift;
    int64_t channels;
    double eps;
  };

  // Of tensors of one type: f32, f16 or bf16. Compiled now.
  ScaleAndShift(DType dtype, const Device& device);
  void run(const Arguments& arguments, Stream stream) const;

 private:
  struct Loaded;
  std::shared_ptr<const Loaded> loaded_;
};

// Whether a caller should run the whole block here instead of PyTorch's convolution and then the tail. That
// is so where a row takes the whole block and is predicted to be faster.
ONEPASS_API bool is_worth_fusing(const Problem& problem);
// The predicted ratio of the two times; 0 where no row takes the convolution.
ONEPASS_API double predicted_gain(const Problem& problem);
// The same for a training step: forward and the wanted gradients.
ONEPASS_API bool is_worth_training(const BackwardProblem& problem);
// Predicted seconds of PyTorch's own convolution of the block, and of the wanted ones of its gradients; 0
// where the block has none.
ONEPASS_API double framework_seconds(const Problem& problem);
ONEPASS_API double framework_seconds(const BackwardProblem& problem);

// What the prediction of PyTorch's convolution is made from (src/cuda/costs/convolution.h); the seconds that
// it is a factor on come last.
ONEPASS_API std::vector<double> convolution_features(const Problem& problem);

// Median seconds of GPU time of a row of the table, cold caches, on zeros in memory of its own. Throws Error
// where the row does not exist, does not compile or memory does not suffice. The row must take the problem.
ONEPASS_API double measured_seconds(const Problem& problem, const std::string& row);
ONEPASS_API double measured_seconds(const BackwardProblem& problem, const std::string& row);

// Whether a forward pass in "tf32 fast" dithers the weights of this block. Gradients in the same numerics
// then treat the weights as exact on average.
ONEPASS_API bool dithers_weights(const Problem& problem);

// A plan as source text and C++ formulas: enough to run it without the library, for every batch. Formulas use
// `batch`, `workspace`, the names in ExportedKernel::resident, and the tensors. Tensors are `input`,
// `output`, `statistics`, `parameters[0]`, ... Those of a backward plan also are `output_gradient`,
// `input_gradient`, `parameter_gradients[0]`, ... The functions are std::min, std::max, divide_up, clamp,
// phase_of and aligned_bits.
struct ExportedKernel {
  std::string name;    // of the __global__ function
  std::string source;  // includes files of device_code()
  uint32_t threads = 0;
  uint32_t cluster = 1;       // blocks
  uint32_t shared_bytes = 0;  // dynamic
  bool cooperative = false;   // blocks wait for each other: they must run at the same time
  std::string resident;       // the clusters (blocks, where the cluster is 1) that a GPU runs at a time
};
struct ExportedStep {
  int kernel = -1;  // negative: bytes of memory are set to zero instead
  std::string blocks;
  std::vector<std::string> words;  // of eight bytes: the parameter struct
  std::vector<std::string> names;  // of its members, one for each word
  std::string memory;
  std::string bytes;
};
struct ExportedConstant {
  std::string name;
  std::string formula;
};
struct ExportedPlan {
  std::vector<ExportedConstant> constants;  // that formulas use, the later ones those before
  std::vector<ExportedKernel> kernels;
  std::vector<ExportedStep> steps;
  std::string workspace_bytes;
};
// Throws Error where a number depends on the batch and no formula gives it.
ONEPASS_API ExportedPlan export_plan(const Plan& plan, bool with_statistics);
ONEPASS_API ExportedPlan export_plan(const BackwardPlan& plan);

struct DeviceText {
  std::string name;  // as kernels include it
  std::string text;
};
ONEPASS_API std::vector<DeviceText> device_code();

}  // namespace onepass::cuda

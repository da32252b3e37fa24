"""The host code of every exported file: it launches kernels on plain pointers."""

CUDA_HEAD = """\
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
"""

HOST_CODE = """\
// Host code that all launches share. Plain pointers: nothing here knows of PyTorch.
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t clamp(int64_t value, int64_t low, int64_t high) { return std::min(std::max(value, low), high); }

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

// A kernel with the numbers of its launches. Attributes are set when a GPU first meets it.
class Kernel {
 public:
  // A cooperative kernel's blocks wait for each other: a launch fails where they cannot all run at once.
  Kernel(const char* name, const void* function, int threads, int cluster, int shared_bytes, bool cooperative)
      : name_(name),
        function_(function),
        threads_(threads),
        cluster_(cluster),
        shared_bytes_(shared_bytes),
        cooperative_(cooperative) {}

  // How many clusters (blocks, where the cluster is 1) the GPU runs at a time.
  int64_t resident(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& count = resident_[device];
    if (count == 0) count = prepare(device);
    return count;
  }

  // `parameters` are the bytes of the kernel's one parameter.
  void launch(const void* parameters, int64_t blocks, int device, cudaStream_t stream) {
    resident(device);
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = configuration(blocks, stream, attribute);
    void* arguments[] = {const_cast<void*>(parameters)};
    check(cudaLaunchKernelExC(&config, function_, arguments), name_);
    check(cudaPeekAtLastError(), name_);
  }

 private:
  cudaLaunchConfig_t configuration(int64_t blocks, cudaStream_t stream,
                                   cudaLaunchAttribute& attribute) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads_);
    config.dynamicSmemBytes = shared_bytes_;
    config.stream = stream;
    if (cooperative_) {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster_;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    config.attrs = &attribute;
    config.numAttrs = cluster_ > 1 || cooperative_ ? 1 : 0;
    return config;
  }

  int prepare(int device) {
    constexpr int portable_cluster = 8;
    check(cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_), name_);
    int count = 0;
    if (cluster_ > 1) {
      if (cluster_ > portable_cluster)
        check(cudaFuncSetAttribute(function_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name_);
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = configuration(cluster_, nullptr, attribute);
      check(cudaOccupancyMaxActiveClusters(&count, function_, &config), name_);
    } else {
      int multiprocessors = 0;
      check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), name_);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, function_, threads_, shared_bytes_), name_);
      count *= multiprocessors;
    }
    if (count == 0) throw std::runtime_error(std::string(name_) + ": a block does not fit this GPU");
    return count;
  }

  const char* name_;
  const void* function_;
  int threads_;
  int cluster_;
  int shared_bytes_;
  bool cooperative_;
  std::mutex mutex_;
  std::map<int, int> resident_;  // by GPU
};

// Kernels take one struct of eight-byte members.
template <class T>
uint64_t word(T* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
inline uint64_t word(int64_t number) { return static_cast<uint64_t>(number); }
template <class Parameters>
constexpr size_t parameter_bytes(void (*)(Parameters)) {
  return sizeof(Parameters);
}

// Elements from the last boundary of a vector to the tensor's first.
int64_t phase_of(const void* tensor, int64_t element_bytes, int64_t vector_elements) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor) / element_bytes % vector_elements);
}

struct Vectors {
  int bit;  // of the result
  const void* tensor;
  int64_t element_bytes;
  int64_t elements;
};

// A bit for each tensor whose vectors lie on their boundaries where the input's do; bit 63: all of them.
int64_t aligned_bits(std::initializer_list<Vectors> tensors, int64_t phase, bool all = true) {
  uint64_t bits = 0;
  for (const Vectors& tensor : tensors) {
    const int64_t own = phase_of(tensor.tensor, tensor.element_bytes, tensor.elements);
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.tensor) % tensor.element_bytes == 0 &&
                         own == phase % tensor.elements;
    if (aligned) bits |= uint64_t{1} << tensor.bit;
    all = all && aligned;
  }
  return static_cast<int64_t>(bits | uint64_t{all} << 63);
}

}  // namespace
"""

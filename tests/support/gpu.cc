// Streams, captures and copies of a GPU for tests.
#include "support/gpu.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/runtime/context.h"
#include "cuda/runtime/library.h"
#include "onepass/error.h"

namespace onepass::testing {
namespace {

using cuda::check;
using cuda::CudaResult;
using cuda::CurrentContext;
using cuda::DevicePointer;
using cuda::primary_context;
using cuda::StreamHandle;

struct StreamFunctions {
  CudaResult (*cuStreamCreate)(StreamHandle* stream, unsigned flags);
  CudaResult (*cuStreamDestroy)(StreamHandle stream);
  CudaResult (*cuStreamSynchronize)(StreamHandle stream);
  CudaResult (*cuStreamBeginCapture)(StreamHandle stream, int mode);
  CudaResult (*cuStreamEndCapture)(StreamHandle stream, void** graph);
  CudaResult (*cuMemcpyHtoDAsync)(DevicePointer to, const void* from, size_t bytes, StreamHandle stream);
  CudaResult (*cuMemcpyDtoHAsync)(void* to, DevicePointer from, size_t bytes, StreamHandle stream);
  CudaResult (*cuGraphInstantiateWithFlags)(void** executable, void* graph, unsigned long long flags);
  CudaResult (*cuGraphLaunch)(void* executable, StreamHandle stream);
  CudaResult (*cuGraphExecDestroy)(void* executable);
  CudaResult (*cuGraphDestroy)(void* graph);

  StreamFunctions() {
    const std::string& path = cuda::driver().path;
    const cuda::Library library("the CUDA driver", path, dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
    library.find("cuStreamCreate", cuStreamCreate);
    library.find("cuStreamDestroy_v2", cuStreamDestroy);
    library.find("cuStreamSynchronize", cuStreamSynchronize);
    library.find("cuStreamBeginCapture_v2", cuStreamBeginCapture);
    library.find("cuStreamEndCapture", cuStreamEndCapture);
    library.find("cuMemcpyHtoDAsync_v2", cuMemcpyHtoDAsync);
    library.find("cuMemcpyDtoHAsync_v2", cuMemcpyDtoHAsync);
    library.find("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags);
    library.find("cuGraphLaunch", cuGraphLaunch);
    library.find("cuGraphExecDestroy", cuGraphExecDestroy);
    library.find("cuGraphDestroy", cuGraphDestroy);
  }
};

const StreamFunctions& functions() {
  static const StreamFunctions found;
  return found;
}

// ---- The watch

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds longest_wait{120};

class WaitList {
 public:
  size_t add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    waits_.emplace(next_, Wait{what, Clock::now()});
    return next_++;
  }

  void remove(size_t ticket) {
    const std::lock_guard lock(mutex_);
    waits_.erase(ticket);
  }

  // Never returns. Tickets are in the order of time: the first is the oldest, and most likely to blame.
  [[noreturn]] void guard() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      const std::lock_guard lock(mutex_);
      if (waits_.empty() || Clock::now() - waits_.begin()->second.since < longest_wait) continue;
      std::fprintf(stderr, "the GPU hangs; waited for, the oldest first:\n");
      for (const auto& [ticket, wait] : waits_) std::fprintf(stderr, "  %s\n", wait.what.c_str());
      std::fflush(stderr);
      std::_Exit(3);
    }
  }

 private:
  struct Wait {
    std::string what;
    Clock::time_point since;
  };
  std::mutex mutex_;
  std::map<size_t, Wait> waits_;
  size_t next_ = 0;
};

// Never destroyed: the guard outlives everything.
WaitList& waits() {
  static WaitList& list = *[] {
    auto* made = new WaitList;
    std::thread([made] { made->guard(); }).detach();
    return made;
  }();
  return list;
}

DevicePointer address(const void* memory) {
  return reinterpret_cast<DevicePointer>(const_cast<void*>(memory));
}

}  // namespace

Watch::Watch(const std::string& what) : ticket_(waits().add(what)) {}
Watch::~Watch() { waits().remove(ticket_); }

Graph::~Graph() {
  if (executable_ != nullptr) functions().cuGraphExecDestroy(executable_);
}

Graph::Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

void Graph::launch(Stream stream) const {
  check(functions().cuGraphLaunch(executable_, static_cast<StreamHandle>(stream.handle)),
        "a graph cannot be launched");
}

GpuStream::GpuStream(int device) : device_(device) {
  constexpr unsigned non_blocking = 1;
  const CurrentContext current(primary_context(device_));
  check(functions().cuStreamCreate(&handle_, non_blocking), "a stream cannot be made");
}

GpuStream::~GpuStream() {
  if (handle_ == nullptr) return;
  const CurrentContext current(primary_context(device_));
  functions().cuStreamDestroy(handle_);
}

GpuStream::GpuStream(GpuStream&& other) noexcept
    : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}

void GpuStream::upload(void* to, const void* from, size_t bytes) const {
  if (bytes == 0) return;
  const CurrentContext current(primary_context(device_));
  check(functions().cuMemcpyHtoDAsync(address(to), from, bytes, handle_),
        "memory cannot be copied to the GPU");
}

void GpuStream::download(void* to, const void* from, size_t bytes) const {
  if (bytes == 0) return;
  const CurrentContext current(primary_context(device_));
  check(functions().cuMemcpyDtoHAsync(to, address(from), bytes, handle_),
        "memory cannot be copied from the GPU");
  check(functions().cuStreamSynchronize(handle_), "work on the GPU failed");
}

void GpuStream::wait(const std::string& what) const {
  const Watch watch(what);
  const CurrentContext current(primary_context(device_));
  check(functions().cuStreamSynchronize(handle_), "work on the GPU failed");
}

void GpuStream::begin_capture(Capture forbids) const {
  const int mode =
      forbids == Capture::of_all_threads ? 0 : 1;  // CU_STREAM_CAPTURE_MODE_GLOBAL, _THREAD_LOCAL
  const CurrentContext current(primary_context(device_));
  check(functions().cuStreamBeginCapture(handle_, mode), "a capture cannot begin");
}

Graph GpuStream::end_capture() const {
  const CurrentContext current(primary_context(device_));
  void* graph = nullptr;
  check(functions().cuStreamEndCapture(handle_, &graph), "a capture cannot end");
  void* executable = nullptr;
  const CudaResult result = functions().cuGraphInstantiateWithFlags(&executable, graph, 0);
  functions().cuGraphDestroy(graph);
  check(result, "a graph cannot be made");
  return Graph(executable);
}

bool is_alive(int device) {
  try {
    cuda::synchronize(device);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace onepass::testing

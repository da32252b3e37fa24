// Streams, captures and copies of a GPU for tests, by functions of the driver that the library itself does
// not use.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/runtime/driver.h"
#include "onepass/cuda.h"
#include "onepass/executor.h"

namespace onepass::testing {

// Ends the process with a list of what is waited for when one wait lasts longer than any kernel of the tests
// does: a kernel that hangs cannot be stopped, and nobody else would say which it was.
class Watch {
 public:
  explicit Watch(const std::string& what);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  size_t ticket_;
};

// What a stream recorded in place of running it.
class Graph {
 public:
  explicit Graph(void* executable) : executable_(executable) {}
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&&) = delete;

  void launch(Stream stream) const;

 private:
  void* executable_;
};

// A stream that waits for no other, the default one included.
class GpuStream {
 public:
  explicit GpuStream(int device = 0);
  ~GpuStream();
  GpuStream(GpuStream&& other) noexcept;
  GpuStream& operator=(GpuStream&&) = delete;

  int device() const { return device_; }
  Stream stream() const { return {handle_}; }

  // In the order of the stream's other work.
  void upload(void* to, const void* from, size_t bytes) const;
  void download(void* to, const void* from, size_t bytes) const;  // waits
  // Until the stream's work is done. Throws Error where some of it failed. `what` is for the watch.
  void wait(const std::string& what) const;

  // What it makes an error meanwhile: calls that could be part of the capture by mistake, such as
  // allocations.
  enum class Capture { of_all_threads, of_this_thread };
  void begin_capture(Capture forbids = Capture::of_all_threads) const;
  Graph end_capture() const;

 private:
  int device_;
  cuda::StreamHandle handle_ = nullptr;
};

// Whether the GPU still works: after an error of a kernel nothing does, for the rest of the process.
bool is_alive(int device);

}  // namespace onepass::testing

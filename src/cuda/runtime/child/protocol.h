// The request and the answer between the library and the program that compiles for it (compile_child.cc).
//
// The request has the limit in milliseconds, NVRTC's path, the path of its builtins, the file and the text.
// Then come the number of options and each, the number of headers, and the name and text of each. Numbers
// have eight bytes; a text comes after its length and before a null character. The reply: a Reply, then the
// words, the log, the image.
#pragma once

#include <cstdint>

namespace onepass::cuda {

enum class ChildState : int32_t {
  none,      // the program did not start
  watching,  // it did, and came to no end: it was killed
  answered,
  failed,  // something that the program needs is missing: the words say what
  signalled,
  exited,
  hung,
};

struct Reply {
  ChildState state = ChildState::none;
  int32_t number = 0;  // the signal, the exit status
  int32_t result = 0;  // of NVRTC
  int32_t padding = 0;
  uint64_t words_bytes = 0;
  uint64_t log_bytes = 0;
  uint64_t image_bytes = 0;
};

}  // namespace onepass::cuda

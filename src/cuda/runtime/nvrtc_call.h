// One compilation by NVRTC, for this process (compiler.h) and for the child (child/compile_child.cc). The
// child has no C++ library, so this header uses none.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace onepass::cuda {

using ProgramHandle = struct _nvrtcProgram*;

// What the functions return: 0 for success.
using CudaResult = int;
inline constexpr CudaResult cuda_success = 0;
inline constexpr CudaResult nvrtc_out_of_memory = 1;

struct NvrtcFunctions {
  CudaResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(CudaResult error);
  CudaResult (*nvrtcCreateProgram)(ProgramHandle* program, const char* text, const char* name, int headers,
                                   const char* const* header_texts, const char* const* header_names);
  CudaResult (*nvrtcDestroyProgram)(ProgramHandle* program);
  CudaResult (*nvrtcCompileProgram)(ProgramHandle program, int count, const char* const* options);
  CudaResult (*nvrtcGetProgramLogSize)(ProgramHandle program, size_t* bytes);
  CudaResult (*nvrtcGetProgramLog)(ProgramHandle program, char* log);
  CudaResult (*nvrtcGetCUBINSize)(ProgramHandle program, size_t* bytes);
  CudaResult (*nvrtcGetCUBIN)(ProgramHandle program, char* image);
};

struct NvrtcCall {
  const char* file;  // names the text in the log
  const char* text;
  int option_count;
  const char* const* options;
  int header_count;
  const char* const* header_names;
  const char* const* header_texts;
};

// The log and the image are malloc's, without null characters.
struct NvrtcAnswer {
  CudaResult result;
  const char* words;  // for the result
  char* log;
  size_t log_bytes;
  char* image;
  size_t image_bytes;
};

namespace nvrtc_steps {

// Null where there is none, or no memory for it.
template <class Size, class Fill>
char* take(ProgramHandle program, const Size& size, const Fill& fill, size_t& bytes) {
  if (size(program, &bytes) != cuda_success || bytes == 0) return nullptr;
  char* text = static_cast<char*>(std::malloc(bytes));
  if (text == nullptr || fill(program, text) == cuda_success) return text;
  std::free(text);
  return nullptr;
}

}  // namespace nvrtc_steps

inline NvrtcAnswer run_nvrtc(const NvrtcFunctions& nvrtc, const NvrtcCall& call) {
  NvrtcAnswer answer{};
  ProgramHandle program = nullptr;
  answer.result = nvrtc.nvrtcCreateProgram(&program, call.text, call.file, call.header_count,
                                           call.header_texts, call.header_names);
  if (answer.result == cuda_success) {
    answer.result = nvrtc.nvrtcCompileProgram(program, call.option_count, call.options);
    answer.log =
        nvrtc_steps::take(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, answer.log_bytes);
    if (answer.log != nullptr) --answer.log_bytes;  // the null character
  }
  if (answer.result == cuda_success) {
    answer.image =
        nvrtc_steps::take(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, answer.image_bytes);
    if (answer.image == nullptr) answer.result = nvrtc_out_of_memory;
  }
  if (answer.log == nullptr) answer.log_bytes = 0;
  if (answer.image == nullptr) answer.image_bytes = 0;
  answer.words = nvrtc.nvrtcGetErrorString(answer.result);
  if (program != nullptr) nvrtc.nvrtcDestroyProgram(&program);
  return answer;
}

}  // namespace onepass::cuda

// NVRTC in this process.
#include "cuda/runtime/compiler.h"

#include "cuda/runtime/driver.h"

namespace onepass::cuda {
namespace {

std::string taken(char* text, size_t bytes) {
  std::string copy(text, bytes);
  std::free(text);
  return copy;
}

}  // namespace

CompilerOutput run_compiler(const CompilerInput& input) {
  std::vector<const char*> options;
  std::vector<const char*> names;
  std::vector<const char*> texts;
  for (const std::string& option : input.options) options.push_back(option.c_str());
  for (const DeviceFile* header : input.headers) {
    names.push_back(header->name.data());
    texts.push_back(header->text.data());
  }
  const NvrtcCall call{input.file.c_str(),
                       input.text.c_str(),
                       static_cast<int>(options.size()),
                       options.data(),
                       static_cast<int>(names.size()),
                       names.data(),
                       texts.data()};
  const NvrtcAnswer answer = run_nvrtc(nvrtc(), call);
  return {answer.result, answer.words, taken(answer.log, answer.log_bytes),
          taken(answer.image, answer.image_bytes)};
}

}  // namespace onepass::cuda

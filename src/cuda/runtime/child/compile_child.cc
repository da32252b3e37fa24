// The program that compiles one kernel in a process of its own, where the compiler may crash. What it reads
// from stdin and writes to stdout is in protocol.h.
//
// It needs the C library alone. A C++ library may lie where only the program that has it loaded looks.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>

#include "cuda/runtime/child/protocol.h"
#include "cuda/runtime/nvrtc_call.h"

namespace onepass::cuda {
namespace {

// Reads the request in place.
class Request {
 public:
  explicit Request(const char* at) : at_(at) {}

  uint64_t number() {
    uint64_t value = 0;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  const char* text() {
    const uint64_t bytes = number();
    const char* begin = at_;
    at_ += bytes + 1;
    return begin;
  }

 private:
  const char* at_;
};

const char** take_array(uint64_t count) {
  return static_cast<const char**>(std::malloc((count + 1) * sizeof(const char*)));
}

bool write_bytes(int file, const char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t written = write(file, bytes, count);
    if (written < 0 && errno != EINTR) return false;
    if (written <= 0) continue;
    bytes += written;
    count -= static_cast<size_t>(written);
  }
  return true;
}

// Ends this process with the words in the reply.
[[noreturn]] void fail(int file, Reply* reply, const char* words) {
  reply->words_bytes = std::strlen(words);
  write_bytes(file, words, reply->words_bytes);
  reply->state = ChildState::failed;
  _exit(0);
}

template <class F>
void find(void* library, const char* name, F*& function, int file, Reply* reply) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (function == nullptr) fail(file, reply, dlerror());
}

NvrtcFunctions open_nvrtc(const char* path, const char* builtins, int file, Reply* reply) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(file, reply, dlerror());
  if (*builtins != '\0') static_cast<void>(dlopen(builtins, RTLD_NOW | RTLD_LOCAL));
  NvrtcFunctions nvrtc{};
  find(library, "nvrtcGetErrorString", nvrtc.nvrtcGetErrorString, file, reply);
  find(library, "nvrtcCreateProgram", nvrtc.nvrtcCreateProgram, file, reply);
  find(library, "nvrtcDestroyProgram", nvrtc.nvrtcDestroyProgram, file, reply);
  find(library, "nvrtcCompileProgram", nvrtc.nvrtcCompileProgram, file, reply);
  find(library, "nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize, file, reply);
  find(library, "nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog, file, reply);
  find(library, "nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize, file, reply);
  find(library, "nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN, file, reply);
  return nvrtc;
}

NvrtcCall read_call(Request& request, int file, Reply* reply) {
  NvrtcCall call{};
  call.file = request.text();
  call.text = request.text();
  const uint64_t options = request.number();
  const char** option_texts = take_array(options);
  if (option_texts == nullptr) fail(file, reply, std::strerror(ENOMEM));
  for (uint64_t i = 0; i < options; ++i) option_texts[i] = request.text();
  const uint64_t headers = request.number();
  const char** names = take_array(headers);
  const char** texts = take_array(headers);
  if (names == nullptr || texts == nullptr) fail(file, reply, std::strerror(ENOMEM));
  for (uint64_t i = 0; i < headers; ++i) {
    names[i] = request.text();
    texts[i] = request.text();
  }
  call.option_count = static_cast<int>(options);
  call.options = option_texts;
  call.header_count = static_cast<int>(headers);
  call.header_names = names;
  call.header_texts = texts;
  return call;
}

// In the process that the compiler may end.
[[noreturn]] void compile(Request request, int file, Reply* reply) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* path = request.text();
  const char* builtins = request.text();
  const NvrtcFunctions nvrtc = open_nvrtc(path, builtins, file, reply);
  const NvrtcAnswer answer = run_nvrtc(nvrtc, read_call(request, file, reply));
  reply->result = answer.result;
  reply->words_bytes = std::strlen(answer.words);
  reply->log_bytes = answer.log_bytes;
  reply->image_bytes = answer.image_bytes;
  const bool is_written = write_bytes(file, answer.words, reply->words_bytes) &&
                          write_bytes(file, answer.log, answer.log_bytes) &&
                          write_bytes(file, answer.image, answer.image_bytes);
  reply->state = is_written ? ChildState::answered : ChildState::failed;
  _exit(0);
}

// Waits for the process in steps and counts them instead of reading a clock. Time in which this one is
// stopped (Ctrl-Z, a sleeping machine) so does not count. False at the limit.
bool wait_for(pid_t process, uint64_t milliseconds, int& status) {
  constexpr uint64_t step = 5;
  for (uint64_t waited = 0; waitpid(process, &status, WNOHANG) != process; waited += step) {
    if (waited >= milliseconds) return false;
    const timespec pause{0, step * 1000000};
    nanosleep(&pause, nullptr);
  }
  return true;
}

void watch(pid_t process, uint64_t milliseconds, Reply* reply) {
  int status = 0;
  if (!wait_for(process, milliseconds, status)) {
    kill(process, SIGKILL);
    waitpid(process, &status, 0);
    reply->state = ChildState::hung;
  } else if (WIFSIGNALED(status)) {
    reply->number = WTERMSIG(status);
    reply->state = ChildState::signalled;
  } else if (reply->state == ChildState::watching) {  // the compiler called exit
    reply->number = WEXITSTATUS(status);
    reply->state = ChildState::exited;
  }
}

int run() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::signal(SIGCHLD, SIG_DFL);
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
#if defined(SYS_close_range)
  syscall(SYS_close_range, 3, ~0u, 0);  // sockets and locks of a program that did not think of processes
#endif
  const int file = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
  dup2(STDERR_FILENO, STDOUT_FILENO);  // what a compiler prints is no reply
  struct stat status {};
  if (file < 0 || fstat(STDIN_FILENO, &status) != 0) return 1;
  void* request = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, STDIN_FILENO, 0);
  void* head = mmap(nullptr, sizeof(Reply), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (request == MAP_FAILED || head == MAP_FAILED || lseek(file, sizeof(Reply), SEEK_SET) < 0) return 1;
  Reply* reply = static_cast<Reply*>(head);
  Request texts(static_cast<const char*>(request));
  const uint64_t milliseconds = texts.number();
  reply->state = ChildState::watching;
  const pid_t process = fork();
  if (process < 0) fail(file, reply, std::strerror(errno));
  if (process == 0) compile(texts, file, reply);
  watch(process, milliseconds, reply);
  return 0;
}

}  // namespace
}  // namespace onepass::cuda

int main() { return onepass::cuda::run(); }

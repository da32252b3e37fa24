// NVRTC in a process of its own: a small program (child/compile_child.cc) that the library carries.
//
// The program is run from memory by posix_spawn: a C++ program, Python and a wheel without executables all
// have it. A fork that calls NVRTC at once would not do. In a forked copy, locks that other threads held,
// those of NVRTC among them, are never released. A compiler that waits for one would count as one that hangs.
// A process with a GPU has many page tables, and posix_spawn copies none.
//
// The program watches a process of its own and writes how it ended into the reply. The status of a child
// would not do: a program that ignores SIGCHLD, or waits for all children, has it.
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "cuda/runtime/cache_folder.h"
#include "cuda/runtime/child/protocol.h"
#include "cuda/runtime/compiler.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/scoped.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): not every <unistd.h> declares it

namespace onepass::cuda {
namespace {

void add_number(std::string& request, uint64_t value) {
  request.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void add_text(std::string& request, std::string_view text) {
  add_number(request, text.size());
  request.append(text);
  request += '\0';
}

std::string request_of(const CompilerInput& input, std::chrono::milliseconds limit) {
  std::string request;
  add_number(request, static_cast<uint64_t>(limit.count()));
  for (const std::string& text : {nvrtc().path, nvrtc().builtins, input.file, input.text}) {
    add_text(request, text);
  }
  add_number(request, input.options.size());
  for (const std::string& option : input.options) add_text(request, option);
  add_number(request, input.headers.size());
  for (const DeviceFile* header : input.headers) {
    add_text(request, header->name);
    add_text(request, header->text);
  }
  return request;
}

// A file in memory, with a number that no standard stream has.
Descriptor memory_file(const char* name, unsigned flags, std::string_view bytes) {
#if defined(__linux__)
  Descriptor made(memfd_create(name, MFD_CLOEXEC | flags));
  // Kernels before 6.3 know no flags of execution and need none.
  if (!made && errno == EINVAL && flags != 0) made = Descriptor(memfd_create(name, MFD_CLOEXEC));
  if (!made) raise_system("a file in memory");
  Descriptor file(fcntl(made.get(), F_DUPFD_CLOEXEC, 3));
  if (!file) raise_system("a file in memory");
  write_all(file.get(), bytes, "a file in memory");
  if (lseek(file.get(), 0, SEEK_SET) != 0) raise_system("a file in memory");
  return file;
#else
  static_cast<void>(flags);
  static_cast<void>(bytes);
  raise(std::string(name) + " runs on Linux alone");
#endif
}

// How the process starts: the two files in place of stdin and stdout, no signals blocked.
class SpawnSettings : public Scoped {
 public:
  SpawnSettings(int request, int reply) {
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, request, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, reply, STDOUT_FILENO);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }

  posix_spawn_file_actions_t actions{};
  posix_spawnattr_t attributes{};
};

void run_program(int request, int reply) {
  constexpr unsigned executable = 0x10;  // MFD_EXEC
  const Descriptor program = memory_file("onepass_compile_child", executable, child_program());
  const std::string path = "/proc/self/fd/" + std::to_string(program.get());
  const SpawnSettings settings(request, reply);
  std::string name = "onepass_compile_child";
  char* arguments[] = {name.data(), nullptr};
  pid_t process = 0;
  errno = posix_spawn(&process, path.c_str(), &settings.actions, &settings.attributes, arguments, environ);
  if (errno != 0) raise_system("a program in memory");
  // Where the status is another's, this still waits for the end.
  while (waitpid(process, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// Whether a compiler that ended by this signal did it by itself.
bool is_fault(int number) {
  constexpr int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS};
  return std::find(std::begin(faults), std::end(faults), number) != std::end(faults);
}

std::string signal_text(int number) {
  return "ended by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
}

ChildOutcome outcome_of(const std::string& bytes, std::chrono::milliseconds limit) {
  using Kind = ChildOutcome::Kind;
  Reply reply;
  if (bytes.size() < sizeof reply) raise("a reply of " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(&reply, bytes.data(), sizeof reply);
  const std::string body = bytes.substr(sizeof reply);
  switch (reply.state) {
    case ChildState::none:
      return {Kind::not_run, {}, "the program does not start"};
    case ChildState::watching:
      return {Kind::interrupted, {}, "ended by a signal"};
    case ChildState::failed:
      return {Kind::not_run, {}, body.substr(0, reply.words_bytes)};
    case ChildState::hung:
      return {Kind::crashed, {}, "stopped after " + std::to_string(limit.count()) + " ms"};
    case ChildState::exited:
      return {Kind::crashed, {}, "ended by exit(" + std::to_string(reply.number) + ")"};
    case ChildState::signalled:
      return {is_fault(reply.number) ? Kind::crashed : Kind::interrupted, {}, signal_text(reply.number)};
    case ChildState::answered:
      break;
  }
  const size_t log = reply.words_bytes;
  const size_t image = log + reply.log_bytes;
  return {Kind::ended,
          {reply.result, body.substr(0, log), body.substr(log, reply.log_bytes),
           body.substr(image, reply.image_bytes)},
          ""};
}

}  // namespace

ChildOutcome run_compiler_in_child(const CompilerInput& input, std::chrono::milliseconds limit) {
  try {
    const Descriptor request = memory_file("onepass_request", 0, request_of(input, limit));
    const Descriptor reply = memory_file("onepass_reply", 0, std::string(sizeof(Reply), '\0'));
    run_program(request.get(), reply.get());
    if (lseek(reply.get(), 0, SEEK_SET) != 0) raise_system("a file in memory");
    return outcome_of(read_all(reply.get(), "a file in memory"), limit);
  } catch (const Fault& fault) {
    return {ChildOutcome::Kind::not_run, {}, fault.text};
  }
}

}  // namespace onepass::cuda

// Markers and records of attempts to compile a kernel.
#include "cuda/runtime/attempt.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <sstream>
#include <utility>

#include "onepass/cuda.h"

namespace onepass::cuda {
namespace {

constexpr std::string_view record_format = "onepass condemned kernel 1";

// False with errno where somebody else holds the file, or the file system has no locks.
bool lock(int file, int operation) {
  int result = 0;
  do {
    result = flock(file, operation | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

std::string marker_stem(const CacheKey& kernel) {
  return std::string(marker_prefix) + file_name(kernel) + '-';
}

// Whether a marker exists and is not locked. The test takes a shared lock, so two tests at once both see it.
bool is_left(int folder, const std::string& name) {
  const Descriptor file = open_file(folder, name);
  if (!file || !lock(file.get(), LOCK_SH)) return false;
  struct stat status {};
  return fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0;
}

std::string text_of(const Condemnation& record) {
  return std::string(record_format) + '\n' + record.compiler + '\n' + record.when + '\n' + record.how + '\n';
}

// Empty where it is damaged, or of another version of this format.
std::optional<Condemnation> parse(const std::string& text) {
  std::istringstream lines(text);
  std::string format;
  Condemnation record;
  std::getline(lines, format);
  std::getline(lines, record.compiler);
  std::getline(lines, record.when);
  std::getline(lines, record.how);
  if (!lines || format != record_format || text_of(record) != text) return {};
  return record;
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

}  // namespace

Attempts::Attempts(CacheKey kernel, std::string compiler)
    : kernel_(std::move(kernel)), compiler_(std::move(compiler)) {
  try {
    if (!folder_exists()) return;
    const Descriptor folder = open_folder();
    look_for_record(folder.get());
    look_for_markers(folder.get());
  } catch (const Fault& fault) {
    warn_once(fault);
  }
}

void Attempts::look_for_record(int folder) {
  const Descriptor file = open_file(folder, record_name());
  if (!file) return;
  std::optional<Condemnation> record = parse(read_all(file.get(), record_name()));
  if (record && record->compiler == compiler_) {
    condemnation_ = std::move(record);
    condemnation_->file = cache_directory() + '/' + record_name();
  } else {
    left_.push_back(record_name());
  }
}

void Attempts::look_for_markers(int folder) {
  const std::string stem = marker_stem(kernel_);
  for (const std::string& name : names_in(folder)) {
    if (name.starts_with(stem) && is_left(folder, name)) left_.push_back(name);
  }
}

std::string Attempts::record_name() const {
  return std::string(condemned_prefix) + file_name(kernel_) + ".txt";
}

void Attempts::forget() const {
  if (left_.empty()) return;
  try {
    remove_left(open_folder().get());
  } catch (const Fault& fault) {
    warn_once(fault);
  }
}

void Attempts::remove_left(int folder) const {
  for (const std::string& name : left_) unlinkat(folder, name.c_str(), 0);
}

Condemnation Attempts::condemn(const std::string& how) {
  Condemnation record{compiler_, now(), how, cache_directory() + '/' + record_name()};
  try {
    const Descriptor folder = open_or_make_folder();
    write_file(folder.get(), record_name(), text_of(record));
    std::erase(left_, record_name());  // of another compiler: it is replaced
    remove_left(folder.get());
  } catch (const Fault& fault) {
    warn_once(fault);
  }
  return record;
}

CompileMarker::CompileMarker(const CacheKey& kernel) {
  try {
    make(kernel);
  } catch (const Fault& fault) {
    warn_once(fault);
  }
}

// Locked under a temporary name, then renamed: a marker is never visible without its lock.
void CompileMarker::make(const CacheKey& kernel) {
  folder_ = open_or_make_folder();
  const std::string temporary = temporary_name();
  const std::string name = marker_stem(kernel) + temporary.substr(temporary_prefix.size());
  file_ = Descriptor(openat(folder_.get(), temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file_) raise_system(cache_directory() + " cannot be written to");
  if (lock(file_.get(), LOCK_EX) &&
      renameat(folder_.get(), temporary.c_str(), folder_.get(), name.c_str()) == 0) {
    name_ = name;
  } else {
    unlinkat(folder_.get(), temporary.c_str(), 0);
  }
}

CompileMarker::~CompileMarker() {
  if (!name_.empty()) unlinkat(folder_.get(), name_.c_str(), 0);
}

}  // namespace onepass::cuda

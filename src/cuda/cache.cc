// Compiled kernels on disk.
//
// A file is a text head and the image. It is written under a temporary name and renamed, so that readers in
// other processes see all of it or nothing; its checksum tells a file that a full disk or a crash cut short.
#include "cuda/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string_view>
#include <utility>

#include "cuda/library.h"
#include "cuda/sha256.h"
#include "onepass/cuda.h"
#include "onepass/error.h"

namespace onepass::cuda {
namespace {

constexpr std::string_view format = "onepass cubin 1";
constexpr std::string_view suffix = ".cubin";
constexpr std::string_view temporary_prefix = ".writing-";
constexpr std::string_view attempt_prefix = ".compiling-";

// An open file or folder.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  explicit operator bool() const { return value_ >= 0; }
  int get() const { return value_; }

 private:
  int value_;
};

// Why the cache is not used, for the warning.
struct Fault {
  std::string text;
};

[[noreturn]] void raise(const std::string& what) { throw Fault{what}; }
[[noreturn]] void raise_system(const std::string& what) { throw Fault{what + ": " + std::strerror(errno)}; }

void warn_once(const Fault& fault) {
  static std::atomic_flag warned;
  if (warned.test_and_set()) return;
  std::fprintf(stderr, "onepass: warning: cache of compiled kernels: %s; compiled in memory\n",
               fault.text.c_str());
}

std::string home_directory() {
  if (std::string home = environment("HOME"); !home.empty()) return home;
  const passwd* user = getpwuid(geteuid());
  return user == nullptr || user->pw_dir == nullptr ? "" : user->pw_dir;
}

// Anyone who can write a file here decides what code the GPU runs.
void require_private(const struct stat& status, const std::string& path) {
  if (status.st_uid != geteuid()) raise(path + " belongs to another user");
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) raise(path + " can be written by other users");
}

// Makes the folder and those above it that are missing, for this user alone.
void make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    mkdir(path.substr(0, end).c_str(), 0700);
  }
  mkdir(path.c_str(), 0700);  // what went wrong shows when it is opened
}

Descriptor open_folder() {
  const std::string path = cache_directory();
  if (path.empty()) raise("there is no home directory, set ONEPASS_CACHE_DIR to a folder");
  Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) raise_system(path);
  struct stat status {};
  if (fstat(folder.get(), &status) != 0) raise_system(path);
  require_private(status, path);
  return folder;
}

bool folder_exists() {
  struct stat status {};
  const std::string path = cache_directory();
  return !path.empty() && stat(path.c_str(), &status) == 0;
}

std::string file_name(const CacheKey& key) {
  return key.kernel.substr(0, 100) + '-' + key.architecture + '-' + key.hash.substr(0, 40) +
         std::string(suffix);
}

std::string read_all(int file, const std::string& name) {
  std::string bytes;
  std::array<char, 1 << 16> piece{};
  for (;;) {
    const ssize_t got = read(file, piece.data(), piece.size());
    if (got == 0) return bytes;
    if (got > 0) bytes.append(piece.data(), static_cast<size_t>(got));
    if (got < 0 && errno != EINTR) raise_system(name);
  }
}

void write_all(int file, std::string_view bytes, const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
    if (written < 0 && errno != EINTR) raise_system(name);
  }
}

// What a file says of itself.
struct Entry {
  CacheKey key;
  Cubin cubin;
};

std::string serialise(const Entry& entry) {
  std::ostringstream body;
  body << entry.key.kernel << ' ' << entry.key.architecture << ' ' << entry.key.hash << ' '
       << entry.cubin.registers << ' ' << entry.cubin.spilled_bytes << ' ' << entry.cubin.shared_bytes << '\n'
       << entry.cubin.image;
  return std::string(format) + ' ' + Sha256().add(body.str()).hex() + '\n' + body.str();
}

// Empty where the file is damaged, or of another version of this format.
std::optional<Entry> parse(const std::string& bytes) {
  const size_t head = format.size() + 1 + 64 + 1;
  if (bytes.size() < head || !bytes.starts_with(format)) return {};
  const std::string body = bytes.substr(head);
  if (bytes.substr(format.size() + 1, 64) != Sha256().add(body).hex()) return {};
  const size_t line = body.find('\n');
  if (line == std::string::npos) return {};
  std::istringstream words(body.substr(0, line));
  Entry entry;
  words >> entry.key.kernel >> entry.key.architecture >> entry.key.hash >> entry.cubin.registers >>
      entry.cubin.spilled_bytes >> entry.cubin.shared_bytes;
  if (!words) return {};
  entry.cubin.image = body.substr(line + 1);
  return entry;
}

Descriptor open_file(int folder, const std::string& name) {
  Descriptor file(openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file && errno == ENOENT) return file;
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0) raise_system(name);
  if (!S_ISREG(status.st_mode)) raise(name + " is not a file");
  require_private(status, name);
  return file;
}

// Whether there is a process of this number.
bool is_alive(const std::string& number) {
  const long process = std::strtol(number.c_str(), nullptr, 10);
  return process > 0 && (kill(static_cast<pid_t>(process), 0) == 0 || errno == EPERM);
}

// Random, since processes of two containers may have the same number.
std::string temporary_name() {
  static const std::string process =
      std::to_string((uint64_t{std::random_device{}()} << 32) + std::random_device{}());
  static std::atomic<uint64_t> number{0};
  return std::string(temporary_prefix) + process + '-' + std::to_string(number++);
}

void write_file(int folder, const std::string& name, std::string_view bytes) {
  const std::string temporary = temporary_name();
  const Descriptor file(openat(folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) raise_system(cache_directory() + " cannot be written to");
  try {
    write_all(file.get(), bytes, cache_directory() + " cannot be written to");
    if (renameat(folder, temporary.c_str(), folder, name.c_str()) != 0) raise_system(name);
  } catch (const Fault&) {
    unlinkat(folder, temporary.c_str(), 0);
    throw;
  }
}

// The cached files and what killed processes left, in the order of their names.
std::vector<std::string> names_in(int folder) {
  std::vector<std::string> names;
  DIR* listing = fdopendir(dup(folder));
  if (listing == nullptr) raise_system(cache_directory());
  while (const dirent* item = readdir(listing)) {
    const std::string_view name = item->d_name;
    if (name.ends_with(suffix) || name.starts_with(temporary_prefix) || name.starts_with(attempt_prefix))
      names.emplace_back(name);
  }
  closedir(listing);
  std::sort(names.begin(), names.end());
  return names;
}

CacheEntry listed(int folder, const std::string& name) {
  CacheEntry entry{"damaged", "", cache_directory() + '/' + name, 0};
  try {
    const Descriptor file = open_file(folder, name);
    const std::string bytes = file ? read_all(file.get(), name) : "";
    entry.bytes = static_cast<int64_t>(bytes.size());
    if (const std::optional<Entry> parsed = parse(bytes)) {
      entry.kernel = parsed->key.kernel;
      entry.architecture = parsed->key.architecture;
    }
  } catch (const Fault&) {  // stays "damaged"
  }
  return entry;
}

}  // namespace

CompileAttempt::CompileAttempt(const CacheKey& key) {
  try {
    if (!folder_exists()) make_folders(cache_directory());
    const Descriptor folder = open_folder();
    const std::string stem = std::string(attempt_prefix) + file_name(key) + '-';
    for (const std::string& name : names_in(folder.get())) {
      if (name.starts_with(stem) && !is_alive(name.substr(stem.size()))) left_.push_back(name);
    }
    if (is_fatal()) return;
    const std::string name = stem + std::to_string(getpid());
    const Descriptor file(openat(folder.get(), name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    if (!file) raise_system(cache_directory() + " cannot be written to");
    own_ = name;
  } catch (const Fault& fault) {
    warn_once(fault);
  }
}

CompileAttempt::~CompileAttempt() {
  if (own_.empty()) return;
  const Descriptor folder(open(cache_directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return;
  unlinkat(folder.get(), own_.c_str(), 0);
  for (const std::string& name : left_) unlinkat(folder.get(), name.c_str(), 0);
}

std::optional<Cubin> read_cached(const CacheKey& key) {
  try {
    if (!folder_exists()) return {};
    const Descriptor folder = open_folder();
    const std::string name = file_name(key);
    const Descriptor file = open_file(folder.get(), name);
    if (!file) return {};
    std::optional<Entry> entry = parse(read_all(file.get(), name));
    if (!entry || entry->key.hash != key.hash) raise(name + " is damaged");
    return std::move(entry->cubin);
  } catch (const Fault& fault) {
    warn_once(fault);
    return {};
  }
}

void write_cached(const CacheKey& key, const Cubin& cubin) {
  try {
    if (!folder_exists()) make_folders(cache_directory());
    const Descriptor folder = open_folder();
    write_file(folder.get(), file_name(key), serialise({key, cubin}));
  } catch (const Fault& fault) {
    warn_once(fault);
  }
}

std::string cache_directory() {
  if (std::string folder = environment("ONEPASS_CACHE_DIR"); !folder.empty()) return folder;
  if (const std::string folder = environment("XDG_CACHE_HOME"); folder.starts_with('/')) {
    return folder + "/onepass";
  }
  const std::string home = home_directory();
  return home.empty() ? "" : home + "/.cache/onepass";
}

std::vector<CacheEntry> cache_entries() {
  std::vector<CacheEntry> entries;
  if (!folder_exists()) return entries;
  try {
    const Descriptor folder = open_folder();
    for (const std::string& name : names_in(folder.get())) {
      if (name.ends_with(suffix)) entries.push_back(listed(folder.get(), name));
    }
  } catch (const Fault& fault) {
    throw Error("the cache of compiled kernels cannot be listed: " + fault.text);
  }
  return entries;
}

int clear_cache() {
  if (!folder_exists()) return 0;
  int removed = 0;
  try {
    const Descriptor folder = open_folder();
    for (const std::string& name : names_in(folder.get())) {
      if (unlinkat(folder.get(), name.c_str(), 0) == 0 && name.ends_with(suffix)) ++removed;
    }
  } catch (const Fault& fault) {
    throw Error("the cache of compiled kernels cannot be cleared: " + fault.text);
  }
  return removed;
}

}  // namespace onepass::cuda

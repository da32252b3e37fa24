// The folder of the cache.
#include "cuda/runtime/cache_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

#include "onepass/cuda.h"

namespace onepass::cuda {
namespace {

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

}  // namespace

void raise(const std::string& what) { throw Fault{what}; }
void raise_system(const std::string& what) { throw Fault{what + ": " + std::strerror(errno)}; }

void warn_once(const Fault& fault) {
  static std::atomic_flag warned;
  if (warned.test_and_set()) return;
  std::fprintf(stderr, "onepass: warning: cache of compiled kernels: %s; compiled in memory\n",
               fault.text.c_str());
}

bool folder_exists() {
  struct stat status {};
  const std::string path = cache_directory();
  return !path.empty() && stat(path.c_str(), &status) == 0;
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

Descriptor open_or_make_folder() {
  if (!folder_exists()) make_folders(cache_directory());
  return open_folder();
}

std::vector<std::string> names_in(int folder) {
  std::vector<std::string> names;
  DIR* listing = fdopendir(dup(folder));
  if (listing == nullptr) raise_system(cache_directory());
  while (const dirent* item = readdir(listing)) {
    const std::string_view name = item->d_name;
    if (name.ends_with(cubin_suffix) || name.starts_with(temporary_prefix) ||
        name.starts_with(marker_prefix) || name.starts_with(condemned_prefix)) {
      names.emplace_back(name);
    }
  }
  closedir(listing);
  std::sort(names.begin(), names.end());
  return names;
}

std::string file_name(const CacheKey& key) {
  return key.kernel.substr(0, 100) + '-' + key.architecture + '-' + key.hash.substr(0, 40) +
         std::string(cubin_suffix);
}

std::string temporary_name() {
  // Random, since processes of two containers may have the same number; a forked process has its own.
  static const std::string process =
      std::to_string((uint64_t{std::random_device{}()} << 32) + std::random_device{}());
  static std::atomic<uint64_t> number{0};
  return std::string(temporary_prefix) + process + '-' + std::to_string(getpid()) + '-' +
         std::to_string(number++);
}

void require_own_file(int file, const std::string& name) {
  struct stat status {};
  if (fstat(file, &status) != 0) raise_system(name);
  if (!S_ISREG(status.st_mode)) raise(name + " is not a file");
  require_private(status, name);
}

Descriptor open_file(int folder, const std::string& name) {
  Descriptor file(openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file && errno == ENOENT) return file;
  if (!file) raise_system(name);
  require_own_file(file.get(), name);
  return file;
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

}  // namespace onepass::cuda

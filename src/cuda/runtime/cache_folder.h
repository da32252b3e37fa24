// The folder of the cache: its owner and permissions, and how files are read and written. All of it throws
// Fault.
#pragma once

#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/runtime/cache.h"

namespace onepass::cuda {

// A cached kernel ends with the suffix; what begins with these words is no kernel.
inline constexpr std::string_view cubin_suffix = ".cubin";
inline constexpr std::string_view temporary_prefix = ".writing-";
inline constexpr std::string_view marker_prefix = ".compiling-";
inline constexpr std::string_view condemned_prefix = ".condemned-";

// An open file or folder.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
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

[[noreturn]] void raise(const std::string& what);
[[noreturn]] void raise_system(const std::string& what);  // with the words for errno
// Once in the life of a process.
void warn_once(const Fault& fault);

bool folder_exists();
// Opens the folder, which has to be this user's alone.
Descriptor open_folder();
// The same; makes it first, and those above it that are missing.
Descriptor open_or_make_folder();
// The cached kernels and what is kept beside them, in the order of their names.
std::vector<std::string> names_in(int folder);

std::string file_name(const CacheKey& key);
// A name that no other process or thread makes.
std::string temporary_name();
// For reading; none where there is no such file.
Descriptor open_file(int folder, const std::string& name);
// Throws unless the file is one that this user alone can write to.
void require_own_file(int file, const std::string& name);
std::string read_all(int file, const std::string& name);
void write_all(int file, std::string_view bytes, const std::string& name);
// Under a temporary name, then renamed: others see all of it or nothing.
void write_file(int folder, const std::string& name, std::string_view bytes);

}  // namespace onepass::cuda

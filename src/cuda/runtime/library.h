// Shared libraries opened at run time, and where they are looked for.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace onepass::cuda {

class Library {
 public:
  // `what` names the library in errors.
  Library(std::string what, std::string path, void* handle)
      : what_(std::move(what)), path_(std::move(path)), handle_(handle) {}

  // Where the loader found it.
  const std::string& path() const { return path_; }
  // Throws Error where the library is too old to have the function.
  template <class F>
  void find(const char* name, F*& function) const {
    function = reinterpret_cast<F*>(symbol(name));
  }

 private:
  void* symbol(const char* name) const;

  std::string what_;
  std::string path_;
  void* handle_;  // never closed: the library may still be in use when the process ends
};

struct Search {
  std::string what;                 // "NVRTC"
  const char* variable;             // of the environment: a path that replaces the search
  std::vector<std::string> names;   // asked of the loader, best first; one already in the process comes first
  std::vector<std::string> files;   // full paths, tried in this order where they exist
  std::vector<std::string> places;  // the folders of `files`, for the error
  std::string advice;               // what a user can do
};

// Throws Error that says what was looked for.
Library open_library(const Search& search);

// The value of an environment variable; empty where there is none.
std::string environment(const char* variable);
// The full paths of all libraries of this process.
std::vector<std::string> loaded_libraries();
// The files of this name (a glob pattern) in the folders, in the order of the folders.
std::vector<std::string> files_in(const std::vector<std::string>& folders, const std::string& pattern);

}  // namespace onepass::cuda

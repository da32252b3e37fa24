// Opens shared libraries at run time by dlopen, trying each place in turn.
#include "cuda/runtime/library.h"

#include <dlfcn.h>
#include <glob.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <cstdlib>

#include "onepass/error.h"

namespace onepass::cuda {
namespace {

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// Which file a handle is: the loader may have searched for it.
std::string path_of(void* handle, const std::string& asked) {
#if defined(__linux__)
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != nullptr && *map->l_name != '\0') {
    return map->l_name;
  }
#else
  static_cast<void>(handle);
#endif
  return asked;
}

std::string last_loader_error() {
  const char* words = dlerror();
  return words == nullptr ? "unknown error" : words;
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return paths;
}

}  // namespace

void* Library::symbol(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr) throw Error(what_ + " at " + path_ + " is too old: it has no function " + name);
  return found;
}

Library open_library(const Search& search) {
  constexpr int now = RTLD_NOW | RTLD_LOCAL;
  if (const std::string path = environment(search.variable); !path.empty()) {
    if (void* handle = dlopen(path.c_str(), now)) return {search.what, path_of(handle, path), handle};
    throw Error(search.what + " cannot be opened where " + search.variable + " says: " + last_loader_error());
  }
  for (const int flags : {now | RTLD_NOLOAD, now}) {
    for (const std::string& name : search.names) {
      if (void* handle = dlopen(name.c_str(), flags)) return {search.what, path_of(handle, name), handle};
    }
  }
  std::string fault;
  for (const std::string& file : search.files) {
    if (void* handle = dlopen(file.c_str(), now)) return {search.what, path_of(handle, file), handle};
    if (fault.empty()) fault = " (" + last_loader_error() + ")";
  }
  throw Error(search.what + " was not found" + fault + ": looked for " + join(search.names) +
              " in the loader's path" + (search.places.empty() ? "" : " and in " + join(search.places)) +
              "; " + search.advice);
}

std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
#if defined(__linux__)
  const auto collect = [](dl_phdr_info* info, size_t, void* context) {
    if (info->dlpi_name != nullptr && *info->dlpi_name == '/') {
      static_cast<std::vector<std::string>*>(context)->emplace_back(info->dlpi_name);
    }
    return 0;
  };
  dl_iterate_phdr(collect, &paths);
#endif
  return paths;
}

std::vector<std::string> files_in(const std::vector<std::string>& folders, const std::string& pattern) {
  std::vector<std::string> files;
  for (const std::string& folder : folders) {
    const std::vector<std::string> found = matches(std::string(folder).append("/").append(pattern));
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

}  // namespace onepass::cuda

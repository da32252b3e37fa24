// The CUDA driver and NVRTC: where they are looked for, and the functions taken from them.
#include "cuda/runtime/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>

#include "cuda/runtime/library.h"
#include "onepass/error.h"

namespace onepass::cuda {
namespace {

Search driver_search() {
  const std::vector<std::string> wsl{"/usr/lib/wsl/lib"};
  return {.what = "the CUDA driver",
          .variable = "ONEPASS_CUDA_DRIVER",
          .names = {"libcuda.so.1"},
          .files = files_in(wsl, "libcuda.so.1"),
          .places = wsl,
          .advice = "install NVIDIA's driver"};
}

// libnvrtc.so.13 before .12; the builtins library beside it has another name, and so has PyTorch's own copy.
std::vector<std::string> nvrtc_files(const std::vector<std::string>& folders) {
  std::vector<std::string> files;
  for (const char* pattern : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc-*.so.1[23]"}) {
    for (std::string& file : files_in(folders, pattern)) {
      if (file.find("builtins") == std::string::npos) files.push_back(std::move(file));
    }
  }
  return files;
}

Search nvrtc_search() {
  const std::vector<std::string> folders = nvrtc_folders(loaded_libraries());
  return {.what = "NVRTC",
          .variable = "ONEPASS_NVRTC",
          .names = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"},
          .files = nvrtc_files(folders),
          .places = folders,
          .advice =
              "install the CUDA toolkit or the package nvidia-cuda-nvrtc of PyPI, or set ONEPASS_NVRTC "
              "to the library"};
}

std::string version_text(int major, int minor) { return std::to_string(major) + '.' + std::to_string(minor); }

// A driver that has no GPU to drive does not start.
void start(const Driver& driver) {
  const CudaResult result = driver.cuInit(0);
  if (result != cuda_success) {
    throw Error("the CUDA driver at " + driver.path + " does not start: " + driver.words(result));
  }
}

const Driver* open_driver() {
  const Library library = open_library(driver_search());
  auto driver = std::make_unique<Driver>();
  driver->path = library.path();
  library.find("cuInit", driver->cuInit);
  library.find("cuDriverGetVersion", driver->cuDriverGetVersion);
  library.find("cuGetErrorName", driver->cuGetErrorName);
  library.find("cuGetErrorString", driver->cuGetErrorString);
  library.find("cuDeviceGetCount", driver->cuDeviceGetCount);
  library.find("cuDeviceGet", driver->cuDeviceGet);
  library.find("cuDeviceGetName", driver->cuDeviceGetName);
  library.find("cuDeviceGetAttribute", driver->cuDeviceGetAttribute);
  library.find("cuDeviceTotalMem_v2", driver->cuDeviceTotalMem);
  library.find("cuDevicePrimaryCtxRetain", driver->cuDevicePrimaryCtxRetain);
  library.find("cuCtxGetCurrent", driver->cuCtxGetCurrent);
  library.find("cuCtxPushCurrent_v2", driver->cuCtxPushCurrent);
  library.find("cuCtxPopCurrent_v2", driver->cuCtxPopCurrent);
  library.find("cuCtxSynchronize", driver->cuCtxSynchronize);
  library.find("cuThreadExchangeStreamCaptureMode", driver->cuThreadExchangeStreamCaptureMode);
  library.find("cuModuleLoadData", driver->cuModuleLoadData);
  library.find("cuModuleGetFunction", driver->cuModuleGetFunction);
  library.find("cuFuncSetAttribute", driver->cuFuncSetAttribute);
  library.find("cuLaunchKernelEx", driver->cuLaunchKernelEx);
  library.find("cuOccupancyMaxActiveBlocksPerMultiprocessor",
               driver->cuOccupancyMaxActiveBlocksPerMultiprocessor);
  library.find("cuOccupancyMaxActiveClusters", driver->cuOccupancyMaxActiveClusters);
  library.find("cuMemGetInfo_v2", driver->cuMemGetInfo);
  library.find("cuMemAlloc_v2", driver->cuMemAlloc);
  library.find("cuMemHostAlloc", driver->cuMemHostAlloc);
  library.find("cuMemFree_v2", driver->cuMemFree);
  library.find("cuMemcpyHtoD_v2", driver->cuMemcpyHtoD);
  library.find("cuMemcpyDtoH_v2", driver->cuMemcpyDtoH);
  library.find("cuMemsetD8_v2", driver->cuMemsetD8);
  library.find("cuMemsetD8Async", driver->cuMemsetD8Async);
  library.find("cuEventCreate", driver->cuEventCreate);
  library.find("cuEventRecord", driver->cuEventRecord);
  library.find("cuEventSynchronize", driver->cuEventSynchronize);
  library.find("cuStreamIsCapturing", driver->cuStreamIsCapturing);
  library.find("cuEventElapsedTime", driver->cuEventElapsedTime);
  library.find("cuEventDestroy_v2", driver->cuEventDestroy);
  start(*driver);
  return driver.release();
}

// NVRTC asks the loader for its builtins by name, and a toolkit's folder need not be on the loader's path.
// Loading them from NVRTC's folder first makes that succeed.
std::string builtins_of(const Nvrtc& nvrtc) {
  const std::string folder = nvrtc.path.substr(0, nvrtc.path.rfind('/') + 1);
  return folder.empty() ? "" : folder + "libnvrtc-builtins.so." + nvrtc.version;
}

const Nvrtc* open_nvrtc() {
  const Library library = open_library(nvrtc_search());
  auto nvrtc = std::make_unique<Nvrtc>();
  nvrtc->path = library.path();
  library.find("nvrtcVersion", nvrtc->nvrtcVersion);
  library.find("nvrtcGetErrorString", nvrtc->nvrtcGetErrorString);
  library.find("nvrtcCreateProgram", nvrtc->nvrtcCreateProgram);
  library.find("nvrtcDestroyProgram", nvrtc->nvrtcDestroyProgram);
  library.find("nvrtcCompileProgram", nvrtc->nvrtcCompileProgram);
  library.find("nvrtcGetProgramLogSize", nvrtc->nvrtcGetProgramLogSize);
  library.find("nvrtcGetProgramLog", nvrtc->nvrtcGetProgramLog);
  library.find("nvrtcGetCUBINSize", nvrtc->nvrtcGetCUBINSize);
  library.find("nvrtcGetCUBIN", nvrtc->nvrtcGetCUBIN);
  int major = 0;
  int minor = 0;
  nvrtc->nvrtcVersion(&major, &minor);
  nvrtc->version = version_text(major, minor);
  nvrtc->builtins = builtins_of(*nvrtc);
  if (!nvrtc->builtins.empty()) static_cast<void>(dlopen(nvrtc->builtins.c_str(), RTLD_NOW | RTLD_LOCAL));
  return nvrtc.release();
}

// The folder with the package `nvidia` for a library of a Python environment: beside its own package.
std::string packages_folder(const std::string& library) {
  for (const std::string part : {"/site-packages/", "/dist-packages/"}) {
    if (const size_t at = library.rfind(part); at != std::string::npos) {
      return library.substr(0, at + part.size() - 1);
    }
  }
  const size_t at = library.rfind("/torch/lib/libtorch");
  return at == std::string::npos ? "" : library.substr(0, at);
}

}  // namespace

std::string Driver::words(CudaResult error) const {
  const char* name = nullptr;
  const char* sentence = nullptr;
  if (cuGetErrorName(error, &name) != cuda_success || name == nullptr) {
    return "CUDA error " + std::to_string(error);
  }
  const bool explained = cuGetErrorString(error, &sentence) == cuda_success && sentence != nullptr;
  return explained ? std::string(name) + ", " + sentence : name;
}

std::string Driver::version() const {
  int number = 0;  // 1000 * major + 10 * minor
  cuDriverGetVersion(&number);
  return version_text(number / 1000, number % 1000 / 10);
}

const Driver& driver() {
  static const Driver* opened = open_driver();
  return *opened;
}

const Nvrtc& nvrtc() {
  static const Nvrtc* opened = open_nvrtc();
  return *opened;
}

std::vector<std::string> nvrtc_folders(const std::vector<std::string>& loaded) {
  std::vector<std::string> folders;
  const auto add = [&](const std::string& folder) {
    if (std::find(folders.begin(), folders.end(), folder) == folders.end()) folders.push_back(folder);
  };
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string home = environment(variable); !home.empty()) add(home + "/lib64");
  }
  add("/usr/local/cuda/lib64");
  add("/usr/local/cuda/targets/*/lib");
  for (const std::string& library : loaded) {
    const std::string packages = packages_folder(library);
    if (packages.empty()) continue;
    add(packages + "/nvidia/cu13/lib");
    add(packages + "/nvidia/cuda_nvrtc/lib");
    add(packages + "/torch/lib");
  }
  return folders;
}

void check(CudaResult result, const char* what) {
  if (result != cuda_success) fail(result, what);
}

void fail(CudaResult result, const std::string& what) { throw Error(what + ": " + driver().words(result)); }

}  // namespace onepass::cuda

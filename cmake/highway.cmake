# hwy::hwy from the system (Debian 12 has 1.0.3, Ubuntu 24.04 1.0.7), otherwise the upstream release.
find_package(hwy 1.0.3 CONFIG QUIET)
if(TARGET hwy::hwy)
  message(STATUS "Highway ${hwy_VERSION} from ${hwy_DIR}")
  return()
endif()

find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(libhwy QUIET IMPORTED_TARGET GLOBAL libhwy>=1.0.3)
  if(libhwy_FOUND)
    message(STATUS "Highway ${libhwy_VERSION} from pkg-config")
    add_library(hwy::hwy ALIAS PkgConfig::libhwy)
    return()
  endif()
endif()

message(STATUS "Highway 1.2.0 is downloaded: none is installed")
include(FetchContent)
FetchContent_Declare(highway SYSTEM
  URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
  URL_HASH SHA256=7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343
  DOWNLOAD_EXTRACT_TIMESTAMP OFF)
block()
  set(HWY_ENABLE_CONTRIB OFF)
  set(HWY_ENABLE_EXAMPLES OFF)
  set(HWY_ENABLE_INSTALL OFF)
  set(HWY_ENABLE_TESTS OFF)
  set(HWY_FORCE_STATIC_LIBS ON)
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  # Highway asks for a CMake older than the policies that let it see the variables above.
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
  set(CMAKE_POLICY_DEFAULT_CMP0126 NEW)
  FetchContent_MakeAvailable(highway)
  set_property(DIRECTORY ${highway_SOURCE_DIR} PROPERTY EXCLUDE_FROM_ALL TRUE)
endblock()
add_library(hwy::hwy ALIAS hwy)

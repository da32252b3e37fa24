// Marks the symbols that the shared library exports. All others have hidden visibility.
#pragma once

#if defined(ONEPASS_STATIC)
#define ONEPASS_API
#elif defined(_WIN32)
#error "onepass builds with GCC or Clang on Linux and macOS"
#else
#define ONEPASS_API __attribute__((visibility("default")))
#endif

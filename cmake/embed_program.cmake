# Writes the bytes of a program into a C++ source: cmake -D OUTPUT=FILE [-D PROGRAM=PATH] -P embed_program.cmake
set(bytes "")
if(PROGRAM)
  file(READ "${PROGRAM}" bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
endif()

file(WRITE "${OUTPUT}" "// Written by cmake/embed_program.cmake.
#include \"cuda/runtime/compiler.h\"

namespace onepass::cuda {
namespace {

constexpr unsigned char bytes[] = {${bytes}0};  // one more than there are

}  // namespace

std::string_view child_program() { return {reinterpret_cast<const char*>(bytes), sizeof bytes - 1}; }

}  // namespace onepass::cuda
")

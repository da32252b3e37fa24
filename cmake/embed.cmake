# Writes the texts of device code into a C++ source:
#   cmake -D OUTPUT=FILE -D FOLDER=PATH -D FILES=PATH,... -P embed.cmake
#
# A file below FOLDER is named by its path there, any other by its name: so kernels include it.
# Each text is a row of raw string literals: compilers limit the length of one. The suffix says how long it is:
# else the compiler counts a million characters one by one, and gives up.
set(piece_bytes 8000)
set(delimiter onepass)

string(REPLACE "," ";" paths "${FILES}")
set(rows "")
foreach(path IN LISTS paths)
  cmake_path(IS_PREFIX FOLDER "${path}" is_below)
  if(is_below)
    cmake_path(RELATIVE_PATH path BASE_DIRECTORY "${FOLDER}" OUTPUT_VARIABLE name)
  else()
    cmake_path(GET path FILENAME name)
  endif()
  file(READ "${path}" text)
  string(FIND "${text}" ")${delimiter}\"" clash)
  if(NOT clash EQUAL -1)
    message(FATAL_ERROR "${path} has the text )${delimiter}\" that ends an embedded literal")
  endif()
  string(LENGTH "${text}" bytes)
  string(APPEND rows "    {\"${name}\",\n")
  foreach(begin RANGE 0 ${bytes} ${piece_bytes})
    string(SUBSTRING "${text}" ${begin} ${piece_bytes} piece)
    string(APPEND rows "R\"${delimiter}(${piece})${delimiter}\"\n")
  endforeach()
  string(APPEND rows "\"\"sv},\n")
endforeach()

file(WRITE "${OUTPUT}" "// Written by cmake/embed.cmake.
#include \"cuda/runtime/device_code.h\"

#include <array>

namespace onepass::cuda {
namespace {

using namespace std::string_view_literals;

constexpr DeviceFile files[] = {
${rows}};

}  // namespace

std::span<const DeviceFile> device_files() { return files; }

}  // namespace onepass::cuda
")

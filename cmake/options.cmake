# onepass_target_defaults(target): the language, visibility, warnings and sanitizers of every target here.
function(onepass_target_defaults target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion)
  if(ONEPASS_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(ONEPASS_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${ONEPASS_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${ONEPASS_SANITIZE})
  endif()
endfunction()

# What most files include, for the builds that precompile it.
set(onepass_precompiled_headers
  <algorithm> <array> <cmath> <cstdint> <map> <memory> <optional> <span> <sstream> <string> <utility> <variant>
  <vector>)

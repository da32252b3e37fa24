#!/usr/bin/env bash
# Checks the C++ sources: scripts/lint.sh [fix|format|tidy]...  (fix formats in place)
#
# tidy reads build/release/compile_commands.json and skips the files that Highway compiles once per target:
# clang-tidy 14 takes minutes for one and its findings are about Highway's macros. The static analyzer stops at a
# third of its usual steps in a function, as in its shallow mode, but still follows calls: half of the time.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly clang_version=14

clang_tool() { command -v "$1-$clang_version" || echo ".venv/bin/$1"; }

sources() {
  local folder folders=()
  for folder in include src tests bench examples python/csrc; do [[ ! -d $folder ]] || folders+=("$folder"); done
  find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cc' -o -name '*.cuh' \) -print0 | sort -z
}

run_format() { sources | xargs -0 "$(clang_tool clang-format)" "$@"; }

run_tidy() {
  {
    find src/block src/plan src/reference src/cuda -name '*.cc'
    grep -L 'hwy/' src/cpu/*.cc || true
  } | sort |
    xargs -P "${JOBS:-$(nproc)}" -n 1 "$(clang_tool clang-tidy)" -p build/release --quiet \
      --extra-arg=-Wno-ignored-optimization-argument --extra-arg=-Wno-unknown-warning-option \
      --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=max-nodes=75000 \
      2> >(grep -v 'warnings\? generated' >&2)
}

for step in "$@"; do
  case $step in
    fix) run_format -i ;;
    format) run_format --dry-run --Werror ;;
    tidy) run_tidy ;;
    *)
      echo "scripts/lint.sh: unknown step '$step': fix, format or tidy" >&2
      exit 2
      ;;
  esac
done

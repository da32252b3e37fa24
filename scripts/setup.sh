#!/usr/bin/env bash
# Installs what this machine lacks; says nothing and takes milliseconds when nothing is missing.
#
#   scripts/setup.sh [build|lint|fuzz|python|models|site]...      build is the default
#
# Packages come from apt, as root or by sudo without a password; otherwise the line to run is printed. What a
# distribution has too old or not at all (cmake on Ubuntu 22.04, clang-format 14) comes from PyPI into .venv.
# python makes a .venv that runs the PyTorch package: with the PyTorch python3 has, else with PyPI's; NVRTC comes
# into it where the machine has none, since the tests compile every GPU kernel, with or without a GPU.
# models are the packages of the guides and of tests of real models, site what builds docs/ and checks types.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly cmake_version=3.25 clang_version=14 clang_wheel=14.0.6
readonly python_packages=("torch>=2.10" numpy rich pytest pytest-xdist expecttest hypothesis
  "scikit-build-core>=0.11")
apt_missing=()
pip_missing=()

has_command() { [[ -x .venv/bin/$1 ]] || command -v "$1" >/dev/null; }

# A machine without dpkg has its libraries from elsewhere: CMake says which one it does not find.
has_package() {
  ! command -v dpkg-query >/dev/null ||
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

apt_offers() {
  command -v apt-cache >/dev/null && { refresh_apt; apt-cache show "$1" >/dev/null 2>&1; }
}

need_command() { has_command "$1" || apt_missing+=("$2"); }
need_package() { has_package "$1" || apt_missing+=("$1"); }

need_clang_tool() {
  if has_command "$1-$clang_version" || .venv/bin/"$1" --version 2>/dev/null | grep -q "$clang_wheel"; then
    return
  elif apt_offers "$1-$clang_version"; then
    apt_missing+=("$1-$clang_version")
  else
    pip_missing+=("$1==$clang_wheel")
  fi
}

newest_cmake() {
  local cmake=cmake
  [[ ! -x .venv/bin/cmake ]] || cmake=.venv/bin/cmake
  command -v $cmake >/dev/null || return 0
  $cmake --version | sed -n 's/^cmake version //p'
}

at_least() { [[ -n $1 && $(printf '%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

need_cmake() {
  at_least "$(newest_cmake)" $cmake_version && return
  if apt_offers cmake &&
    at_least "$(apt-cache policy cmake | sed -n 's/^  Candidate: \([0-9.]*\).*/\1/p')" $cmake_version; then
    apt_missing+=(cmake)
  else
    pip_missing+=("cmake>=$cmake_version,<4")
  fi
}

need_venv() {
  need_command python3 python3
  python3 -c 'import ensurepip, venv' 2>/dev/null || apt_missing+=(python3-venv)
}

# torch.compile builds against Python's headers.
need_python_headers() {
  python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    apt_missing+=(python3-dev)
}

# Prints those of the packages that the interpreter lacks, or has older than NAME>=VERSION says.
python_lacks() {
  "$1" - "${@:2}" <<'END'
import re, sys
from importlib.metadata import PackageNotFoundError, version
numbers = lambda text: [int(n) for n in re.findall(r"\d+", text)[:2]]
for wanted in sys.argv[1:]:
    name, _, least = wanted.partition(">=")
    try:
        missing = numbers(version(name)) < numbers(least)
    except PackageNotFoundError:
        missing = True
    if missing:
        print(wanted)
END
}

has_nvrtc() {
  local folder
  if ldconfig -p 2>/dev/null | grep -q 'libnvrtc\.so'; then return; fi
  for folder in "${CUDA_HOME:-/usr/local/cuda}/lib64" .venv/lib/python3*/site-packages/nvidia/*/lib; do
    if compgen -G "$folder/libnvrtc.so.1[23]" >/dev/null; then return; fi
  done
  return 1
}

privilege() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  else
    sudo -n "$@"
  fi
}

can_install() {
  command -v apt-get >/dev/null && { [[ $(id -u) == 0 ]] || sudo -n true 2>/dev/null; }
}

refresh_apt() {
  [[ -z ${apt_refreshed:-} ]] || return 0
  apt_refreshed=1
  ! can_install || privilege apt-get update -qq || true
}

install_apt() {
  ((${#apt_missing[@]})) || return 0
  if ! can_install; then
    echo "onepass needs packages that only root can install. Run this line, then the same command again:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y ${apt_missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${apt_missing[*]}"
  refresh_apt
  privilege env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${apt_missing[@]}" >/dev/null
}

install_pip() {
  ((${#pip_missing[@]})) || return 0
  echo "setup: installing ${pip_missing[*]} into .venv"
  create_venv
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check "${pip_missing[@]}")
  if [[ " ${pip_missing[*]}" == *" torch"* ]]; then
    echo "setup: PyTorch comes with CUDA's libraries: about 2.5 GB to download, 4.5 GB on disk"
    with_progress "${pip[@]}"
  else
    "${pip[@]}"
  fi
}

megabytes() { du -sm "$@" 2>/dev/null | awk '{sum += $1} END {print sum + 0}'; }

# with_progress COMMAND...: runs pip, and says how much has arrived: every two seconds in one line of a terminal, else
# every 30 seconds. Downloads wait in a folder of .venv, where they can be counted.
with_progress() {
  local folder=.venv/downloads start=$SECONDS every=30 next=0 begin='' end=$'\n' before process
  if [[ -t 1 ]]; then every=2 begin=$'\r' end=$'\033[K'; fi
  mkdir -p $folder
  before=$(megabytes .venv/lib)
  TMPDIR=$PWD/$folder "$@" &
  process=$!
  # Bash lets what runs in the background ignore Ctrl-C.
  trap 'kill $process 2>/dev/null; rm -rf .venv/downloads; exit 130' INT TERM
  while sleep 1 && kill -0 $process 2>/dev/null; do
    ((SECONDS >= next)) || continue
    next=$((SECONDS + every))
    printf '%ssetup: %d MB downloaded, %d MB installed, %d s%s' "$begin" "$(megabytes $folder)" \
      $(($(megabytes .venv/lib) - before)) $((SECONDS - start)) "$end"
  done
  wait $process || { rm -rf $folder; return 1; }
  rm -rf $folder
  trap - INT TERM
  printf '%ssetup: PyTorch is there after %d s%s\n' "$begin" $((SECONDS - start)) "${end%$'\n'}"
}

create_venv() { [[ -x .venv/bin/python ]] || python3 -m venv .venv; }

create_python_venv() {
  create_venv
  local base missing
  if [[ -n $(python_lacks .venv/bin/python "${python_packages[0]}") ]]; then
    base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
    # Of an existing .venv this changes the setting alone.
    [[ -n $(python_lacks "$base" "${python_packages[0]}") ]] || "$base" -m venv --system-site-packages .venv
  fi
  mapfile -t missing < <(python_lacks .venv/bin/python "${python_packages[@]}")
  # Any PyTorch from 2.10 on will do; what is installed here is the one the tests were last run with.
  pip_missing+=("${missing[@]/#torch>=*/torch==2.11.0}")
  has_nvrtc || pip_missing+=("nvidia-cuda-nvrtc==13.0.*")
}

# install_listed FILE OPTION...: the packages of a list, where one of those with a version is missing.
install_listed() {
  local names
  mapfile -t names < <(sed -n 's/^\([a-z_-]*\)\(\[[a-z]*\]\)\?==.*/\1/p' "$1")
  [[ -z $(python_lacks .venv/bin/python "${names[@]}") ]] ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$@"
}

for mode in "${@:-build}"; do
  case $mode in
    build)
      need_command make make
      need_command g++ g++
      need_command ninja ninja-build
      need_cmake
      for package in ca-certificates libhwy-dev libgtest-dev libcli11-dev nlohmann-json3-dev; do
        need_package $package
      done
      ;;
    lint)
      need_clang_tool clang-format
      need_clang_tool clang-tidy
      ;;
    fuzz)
      need_command clang++ clang
      # The runtime is a package of its own since Clang 14 of Debian 12; before, it came with the compiler.
      if ! has_package libclang-rt-dev && apt_offers libclang-rt-dev; then apt_missing+=(libclang-rt-dev); fi
      ;;
    python)
      need_venv
      need_python_headers
      ;;
    models) ;; # with python
    site) need_venv ;;
    *)
      echo "scripts/setup.sh: unknown mode '$mode': build, lint, fuzz, python, models or site" >&2
      exit 2
      ;;
  esac
done

if ((${#pip_missing[@]})) && [[ ! -x .venv/bin/python ]]; then need_venv; fi
install_apt
[[ " $* " != *" python "* ]] || create_python_venv
install_pip
# Models without what they depend on for other uses.
[[ " $* " != *" models "* ]] || install_listed python/tests/requirements-models.txt --no-deps
if [[ " $* " == *" site "* ]]; then
  create_venv
  install_listed docs/requirements.txt
fi

#!/usr/bin/env bash
# Builds what runs on a GPU into build/gpu: the C++ suite and the PyTorch operators.
#
# It installs and downloads nothing: CMake, Ninja, GoogleTest, Highway (CMAKE_PREFIX_PATH says where, if not in the
# system) and a python3 with PyTorch are the machine's own.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${PYTHON:-python3}")
cmake -S . -B build/gpu -G Ninja --log-level=WARNING \
  -D CMAKE_BUILD_TYPE=Release -D ONEPASS_BUILD_TOOL=OFF \
  -D ONEPASS_BUILD_PYTHON=ON -D Python_EXECUTABLE="$python" \
  -D FETCHCONTENT_FULLY_DISCONNECTED=ON
cmake --build build/gpu --target gpu_test onepass_torch

#!/usr/bin/env bash
# Times each problem of bench/workloads.txt with the tool that `make demo` has built.
set -euo pipefail
cd "$(dirname "$0")/.."

while IFS= read -r problem; do
  [[ -z $problem || $problem == \#* ]] || build/release/onepass bench "$problem"
done <bench/workloads.txt

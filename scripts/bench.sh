#!/usr/bin/env bash
# Runs the test suite and the benchmark on this machine, keeps the outcome in results/ and rewrites the pages that show it.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --build --preset release
scripts/record.py run
scripts/record.py pages

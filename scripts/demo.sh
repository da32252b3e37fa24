#!/usr/bin/env bash
# Optimises the four workloads of examples/: verifies, measures, prints a table and writes out/report.html.
#
#   scripts/demo.sh [options of python -m onepass optimize]
#
# A CPU takes small batches and seconds for each; a GPU takes the workloads whole.
set -euo pipefail
cd "$(dirname "$0")/.."

batches=(--batch "8,2,1,32")
if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then batches=(); fi

mkdir -p out
PYTHONPATH=python .venv/bin/python -m onepass optimize examples/{s60,s19,s61,s27}.py \
  "${batches[@]}" --report out/report.html "$@"
echo "open out/report.html for plans, errors and plots"

# Every task of a developer: each target installs what it lacks (scripts/setup.sh), builds and runs.
JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Without it the BLAS in PyTorch's wheels for AArch64 (NVPL) runs SVE on a Neoverse V1 whose virtual machine hides SVE,
# and products never end. The package sets it too (_before_torch.py); this is for programs without the package.
export NVPL_BLAS_DEBUG_CPU_TYPE ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu bench bench-gpu bench-models sweep sweep-gpu examples site format lint clean setup tool python

help:
	@echo "make demo     optimise four PyTorch models: verify, measure, write out/report.html"
	@echo "make test     build everything and run every test that needs no GPU"
	@echo "make test-gpu, make bench-gpu   on a machine with a GPU, offline: test, measure, write results/<GPU>.json and its pages"
	@echo "make bench-models   on a machine with a GPU, offline: whole networks by torch.compile and its rivals"
	@echo "make sweep, make sweep-gpu   draw problems at random, check and time them: the map in docs/results.md"
	@echo "make examples write examples/exported anew, after kernels or plans changed"
	@echo "make site     build the documentation, build/site/index.html"
	@echo "make python   build the PyTorch operators into python/onepass"
	@echo "make tool     build the command-line tool, build/release/onepass"
	@echo "make bench    measure (scripts/bench.sh)"
	@echo "make format   format the sources in place"
	@echo "make lint     check the format and run clang-tidy"
	@echo "make clean    remove what was built"
	@echo "JOBS=n        use n cores instead of all"

demo: python
	@scripts/demo.sh

# Two processes of one thread each: those of more would wait for one another.
test: python
	@cmake --build --preset release
	@ctest --preset release
	@scripts/setup.sh python models
	@ONEPASS_CACHE_DIR=$(CURDIR)/build/kernel_cache PYTHONPATH=python OMP_NUM_THREADS=1 \
	  .venv/bin/python -m pytest -q --numprocesses=2 --dist=loadfile

# In the same build folder as everything else: the core is compiled once.
python:
	@scripts/setup.sh build python
	@cmake --preset release -D ONEPASS_BUILD_PYTHON=ON -D Python_EXECUTABLE=$(CURDIR)/.venv/bin/python
	@cmake --build --preset release --target onepass_torch

bench: tool
	@scripts/bench.sh

examples: python
	@for name in s60 s19 s61 s27; do \
	  PYTHONPATH=python .venv/bin/python -m onepass export examples/$$name.py -o examples/exported/$$name.py \
	    --arch sm_90a --no-verify || exit 1; \
	done

site:
	@scripts/setup.sh site
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

# With what the machine has: nothing is installed.
test-gpu:
	@scripts/gpu_build.sh
	@python3 scripts/gpu_test.py; status=$$?; python3 scripts/record.py pages; exit $$status

# Whole networks, resumable; diffusers, monai and timm lie unpacked in .carry/models.
bench-models:
	@scripts/gpu_build.sh
	@python3 scripts/bench_models.py

# The map, resumable. SWEEP="--seed 7 --count 300" gives other problems.
sweep: python
	@.venv/bin/python bench/sweep --device cpu $(SWEEP); status=$$?; .venv/bin/python scripts/record.py pages; exit $$status

sweep-gpu:
	@scripts/gpu_build.sh
	@python3 bench/sweep $(SWEEP); status=$$?; python3 scripts/record.py pages; exit $$status

bench-gpu:
	@scripts/gpu_build.sh
	@python3 scripts/gpu_bench.py; status=$$?; python3 scripts/record.py pages; exit $$status

format:
	@scripts/setup.sh lint
	@scripts/lint.sh fix

lint: setup
	@scripts/setup.sh lint
	@cmake --preset release
	@scripts/lint.sh format tidy

clean:
	rm -rf build out

setup:
	@scripts/setup.sh

tool: setup
	@cmake --preset release
	@cmake --build --preset release --target onepass_tool

# Every task of a developer: each target installs what it lacks (scripts/setup.sh), builds and runs.
JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo test bench format lint clean setup tool

help:
	@echo "make demo     build the tool and run it on the four workloads"
	@echo "make test     build everything and run every test"
	@echo "make bench    measure (scripts/bench.sh)"
	@echo "make format   format the sources in place"
	@echo "make lint     check the format and run clang-tidy"
	@echo "make clean    remove what was built"
	@echo "JOBS=n        use n cores instead of all"

demo: tool
	@scripts/demo.sh

test: setup
	@cmake --preset release
	@cmake --build --preset release
	@ctest --preset release

bench: tool
	@scripts/bench.sh

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

# SPDX-License-Identifier: Apache-2.0
# From a fresh Debian 12 with git and make: `make demo` and `make test` install packages, configure and build what they need.
BUILD := build/release
JOBS ?= $(shell nproc)
WERROR ?= OFF

.PHONY: build demo setup cuda test test-build test-frameworks test-engines test-all coverage fuzz wheel bench bench-ucx format tidy clean
.DEFAULT_GOAL := build

# A new build tree has the commands and the library. A tree that `make cuda` or `make test` configured keeps its options, so that
# alternating targets do not rebuild everything.
configure = mkdir -p build; \
  if [ -f $(BUILD)/CMakeCache.txt ]; then cmake $(BUILD) $(1); else cmake -S . -B $(BUILD) -G Ninja -DRESHARD_UNITY=ON $(1); fi \
  >build/configure.log || { cat build/configure.log; exit 1; }

build:
	@scripts/bootstrap.sh
	@$(call configure)
	cmake --build $(BUILD) -j $(JOBS)

# Builds and runs three commands; the one that draws the page is built when the bytes have been checked.
demo:
	@scripts/bootstrap.sh
	@$(call configure)
	cmake --build $(BUILD) -j $(JOBS) --target reshard-compile reshard-exec
	@scripts/demo.sh $(BUILD) $(JOBS)

# Packages for everything except CUDA: afterwards `make` builds transport `mpi`, and `pip install .` works.
setup:
	@scripts/bootstrap.sh --full

# The build with device `cuda` and, where NCCL is found, transport `nccl`. Needs nvcc.
cuda:
	@scripts/bootstrap.sh
	@$(call configure,-DRESHARD_CUDA=ON)
	cmake --build $(BUILD) -j $(JOBS)

test-build:
	@scripts/bootstrap.sh --tests
	@cmake --preset release -DRESHARD_WERROR=$(WERROR) >build/configure.log || { cat build/configure.log; exit 1; }
	cmake --build $(BUILD) -j $(JOBS)

test: test-build
	scripts/test.sh $(BUILD)

# Full counts, and every suite under the sanitizers; the summary goes to build/test-all/summary.md.
test-all:
	@scripts/bootstrap.sh --all
	$(MAKE) --no-print-directory test-build
	scripts/test_all.sh

# PyTorch, transformers, Megatron-Core, vLLM, Ray and another UCX, in full. The first call installs them in build/frameworks (2.8 GB).
test-frameworks: test-build
	scripts/test_frameworks.sh $(BUILD) tests/frameworks

# Refits of real engines and trainers. The first call installs them in build/frameworks (2.8 GB) and build/trainers (0.4 GB).
test-engines: test-build
	scripts/test_frameworks.sh $(BUILD) tests/engines

# The lines that the suites run, by folder. scripts/coverage.sh says what is not measured.
coverage:
	@scripts/bootstrap.sh --all
	scripts/coverage.sh

# Each fuzzer of tests/fuzz for SECONDS. FUZZERS="yaml plan" selects some.
SECONDS := 3600
FUZZERS :=
fuzz:
	@scripts/bootstrap.sh --all
	scripts/fuzz.sh $(SECONDS) $(FUZZERS)

# The wheel for other machines, in build/dist. scripts/wheel.sh says which libraries it contains.
wheel:
	@scripts/bootstrap.sh --tests
	scripts/wheel.sh

bench: test-build
	cmake --build $(BUILD) -j $(JOBS) --target benches
	scripts/bench.sh $(BUILD)

# Transport ucx beside its peers, on one host and on two simulated ones. CASES=REGEX selects cases.
CASES :=
bench-ucx: test-build
	cmake --build $(BUILD) -j $(JOBS) --target bench-mpi
	. $(BUILD)/tests/env.sh && python3 tests/bench/ucx.py $(BUILD)/bench-mpi '$(CASES)'

# ruff over Python, clang-format over the C, C++ and CUDA files that git has.
format:
	@scripts/bootstrap.sh --format
	build/tools/bin/ruff format -q
	git ls-files -z -- '*.c' '*.cpp' '*.cu' '*.h' '*.hpp' | xargs -0 clang-format-19 -i --style=file --fallback-style=none

# ruff and mypy over Python, clang-tidy over all C++ files except tests: about 10 minutes. FILES=compiler/schedule/rounds.cpp selects files: a regular
# expression of their paths.
FILES := (?!tests/|build/).*\.cpp
tidy:
	@scripts/bootstrap.sh --tidy
	build/tools/bin/ruff check -q
	build/tools/bin/mypy
	@cmake --preset clang >build/configure.log || { cat build/configure.log; exit 1; }
	cmake --build build/clang --target reshard_generated
	run-clang-tidy-19 -p build/clang -quiet -j $(JOBS) '^$(CURDIR)/$(FILES)$$'

clean:
	rm -rf build

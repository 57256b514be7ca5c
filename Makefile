# make demo, make test: everything from a fresh Debian 12 with git and make. No other target needs to be known.
BUILD := build/release
JOBS ?= $(shell nproc)

.PHONY: demo test test-all bench build setup clean format
.DEFAULT_GOAL := build

setup:
	scripts/bootstrap.sh

build: setup
	@cmake --preset release >build/configure.log || { cat build/configure.log; exit 1; }
	cmake --build --preset release -j $(JOBS)

demo: build
	scripts/demo.sh $(BUILD)

test:
	scripts/bootstrap.sh --tests
	$(MAKE) --no-print-directory build
	scripts/test.sh $(BUILD)

# Full counts, and every suite under the sanitizers; the summary goes to docs/testing.md.
test-all:
	scripts/bootstrap.sh --all
	$(MAKE) --no-print-directory build
	scripts/test_all.sh

bench: build
	cmake --build --preset release -j $(JOBS) --target benches
	scripts/bench.sh $(BUILD)

clean:
	rm -rf build

# The only list of commands: people and CI type the same names.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# rustup puts cargo here, and a fresh non-login shell does not know it yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

# Arguments for `make bench`, for instance ARGS='--op write --size 1M'.
ARGS ?=
# NO_INSTALL=1 forbids installing packages: what is missing is then only named.
NO_INSTALL ?=
# REQUIRE=tshark,wasm,... turns those waivers into failures.
REQUIRE ?=
# Random cases for each property test in `make long`; seconds for each target in `make fuzz`.
LONG_CASES ?= 20000
FUZZ_SECONDS ?= 60
export NO_INSTALL REQUIRE

# The crates tested are the crates written down: a stale Cargo.lock is an error, not something to update in passing.
LOCKED := --locked
RELEASE = $(or $(CARGO_TARGET_DIR),target)/release
BIN = $(RELEASE)/nobounce
# The command, and the libraries that `nobounce run` gives to other people's programs.
PACKAGES := $(addprefix -p nobounce-,cli ibverbs rdmacm gdrapi cufile paths vmm world stub-mlx5 stub-efa)
# Where `make install` puts them: PREFIX/bin and PREFIX/lib/nobounce, below DESTDIR if that is set.
PREFIX ?= /usr/local
DESTDIR ?=

# What `make test` runs, in this order: the cheap answers first.
STEPS := check-format check-tree check-lints test-code test-shm test-engines test-hardware test-docs check-docs check-dependencies check-pure test-scripts
# What `make test-all` runs after them.
SLOW_STEPS := test-cargo-install test-image test-aarch64 test-clients test-reproducible long $(if $(PYVERBS_SRC),test-pyverbs) interop test-matrix

.PHONY: docs help demo test quick long test-matrix test-pyverbs test-clients test-image test-aarch64 test-cargo-install test-all fuzz miri interop vm-shell bench build image install package test-reproducible fmt setup clean $(STEPS)

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  ARGS='...' goes to the bench; NO_INSTALL=1 installs nothing; REQUIRE=tshark,wasm fails instead of waiving."

demo: ## Build the software NIC and show what it does on this machine
	@tools/setup build
	@$(MAKE) --no-print-directory build
	$(BIN) demo

test: ## Everything CI checks; ends with how many passed, failed and were waived
	@tools/setup test
	@tools/steps $(STEPS)

quick: ## The protocol's own tests: an answer in seconds
	cargo test $(LOCKED) --quiet -p nobounce-protocol --lib

long: ## The code tests with many more random cases (LONG_CASES)
	@tools/setup build
	@PROPTEST_CASES=$(LONG_CASES) NEXTEST_PROFILE=long tools/steps test-code

test-matrix: ## All of it on both links and with 1, 2 and 4 engines, about an hour (ARGS, for instance '--quick --links shm')
	@tools/setup test
	@tools/matrix $(ARGS)

test-clients: build ## Programs from pip on nb0, with speeds beside their own TCP (ARGS, for instance '--only nixl')
	@tests/clients/run --bin $(dir $(BIN)) $(ARGS)

test-pyverbs: ## rdma-core's own tests on nb0 (PYVERBS_SRC: a checkout of rdma-core v44.0)
	@tools/setup test
	@tests/pyverbs/run $(ARGS)

test-image: image build ## The image: size, programs, installation, start of containers with the device: three release builds (root and podman)
	@bash tests/image.sh $(IMAGE)/nobounce.tar $(BIN)

test-aarch64: ## Build for aarch64, and run it in an emulated machine against nb0 of this one
	@tools/setup aarch64
	@bash tests/aarch64.sh

test-cargo-install: ## `cargo install` gives a command that runs
	@root=$$(mktemp -d); trap 'rm -rf "$$root"' EXIT; \
	cargo install --quiet --locked --debug --path crates/cli --root "$$root"; "$$root/bin/nobounce" --version

# With CI set, STEP_SECONDS has to be more than the hour that test-matrix takes.
test-all: ## `make test`, and then what takes longer: some hours
	@tools/setup test
	@tools/steps $(STEPS) $(SLOW_STEPS)

test-reproducible: ## Packages of two clones in two folders are equal: two release builds, about 20 minutes on 2 cores
	@bash tests/reproducible.sh

fuzz: ## Fuzz every target for FUZZ_SECONDS each (nightly and cargo-fuzz)
	@tools/fuzz $(FUZZ_SECONDS)

miri: ## Miri on what it can run: parsers and tables (nightly with miri and rust-src)
	@tools/miri $(ARGS)

interop: ## All cases against the kernels' own RoCE in an emulated machine (ARGS: names of cases)
	@tools/setup test
	tests/interop.sh run $(ARGS)

vm-shell: ## A shell in that machine, with nb0 at the other end of its cable (ARGS='--kernel oldest')
	@tools/setup test
	tests/interop.sh shell $(ARGS)

bench: build ## Measure every operation and size on this machine (ARGS)
	$(BIN) bench $(ARGS)

build: ## Build the nobounce command and the drop-in libraries, optimised
	cargo build $(LOCKED) --release $(PACKAGES)
	@tools/dropin $(RELEASE) $(RELEASE)/dropin

install: build ## Install the command, the drop-in libraries, man pages and completions below PREFIX
	@tools/install $(RELEASE) $(DESTDIR)$(PREFIX)

# The command is static, since the image has no C library, and small: the data path is in the libraries.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
IMAGE = $(or $(CARGO_TARGET_DIR),target)/image
image: ## Write an OCI image of the libraries, the command and the device plugin (target/image/nobounce.tar)
	CARGO_PROFILE_RELEASE_OPT_LEVEL=z CARGO_PROFILE_RELEASE_PANIC=abort RUSTFLAGS='-C target-feature=+crt-static' cargo build $(LOCKED) --release --target $(HOST) \
		--target-dir $(IMAGE)/build -p nobounce-device-plugin -p nobounce-cli --no-default-features
	tools/image-libraries $(IMAGE)/libraries
	@tools/image $(IMAGE)/build/$(HOST)/release $(IMAGE)/libraries $(IMAGE)/nobounce.tar

# Paths of this machine are in panic messages and in debug information: without them, and with the date of the commit, two checkouts give equal
# files. Flags of their own need a folder of their own, or `make build` would compile everything again.
PACKAGE_BUILD = $(abspath $(or $(CARGO_TARGET_DIR),target))/package-build
package: ## Build packages in target/package: .deb, relocatable archive, Python wheel, SBOM, checksums
	@tools/setup build
	@export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct || true)}; \
	[ -n "$$SOURCE_DATE_EPOCH" ] || { echo "package: no commit to take the date from: set SOURCE_DATE_EPOCH"; exit 2; }; \
	out=$$(realpath -m $(or $(CARGO_TARGET_DIR),target)/package); \
	export RUSTFLAGS="$${RUSTFLAGS:-} --remap-path-prefix=$(CURDIR)=/nobounce --remap-path-prefix=$(PACKAGE_BUILD)=/nobounce/target --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=/cargo"; \
	export CARGO_TARGET_DIR=$(PACKAGE_BUILD); \
	$(MAKE) --no-print-directory build; \
	if [ -n "$(filter-out 0,$(NO_INSTALL))" ]; then \
		echo "package: NO_INSTALL is set: no wheel, whose tools come from PyPI"; \
		tools/package $(PACKAGE_BUILD)/release "$$out"; \
	else \
		tools/package --wheel $(PACKAGE_BUILD)/release "$$out"; \
	fi

docs: ## Build the site: these pages with search, and the rustdoc beside them (target/book)
	@tools/docs

fmt: ## Format the code
	cargo fmt --all

setup: ## Install, or name, what the tests need
	@tools/setup test

clean: ## Remove what was built
	cargo clean

# The steps of `make test`. Each can be run alone; a step that cannot run says so through tools/waive.

check-format: ## Formatting, changing nothing
	@if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; \
	else tools/waive rustfmt "rustfmt is not installed (rustup component add rustfmt)"; fi

check-tree: ## The rules of CONTRIBUTING.md that a script can see
	@tools/check-tree

check-lints: ## clippy with warnings denied; of the image's programs as well, which have fewer features
	@if cargo clippy --version >/dev/null 2>&1; then \
		cargo clippy $(LOCKED) --workspace --all-targets -- -D warnings && \
		cargo clippy $(LOCKED) -p nobounce-cli -p nobounce-device-plugin --no-default-features -- -D warnings; \
	else tools/waive clippy "clippy is not installed (rustup component add clippy)"; fi

# The stand-in's knobs are one set for a process: nextest gives each test a process, cargo test at least its turn.
test-code: ## Unit and integration tests, and the replay of the fuzz corpora, over UDP
	@if cargo nextest --version >/dev/null 2>&1; then \
		NOBOUNCE_LINK=udp cargo nextest run $(LOCKED) --workspace --lib --bins --tests --no-fail-fast --no-tests=pass; \
	else NOBOUNCE_LINK=udp cargo test $(LOCKED) --workspace --lib --bins --tests --no-fail-fast -- --test-threads=1; fi

test-shm: ## The device's and the library's tests once more, with shared memory between their ends
	@if cargo nextest --version >/dev/null 2>&1; then \
		NOBOUNCE_LINK=shm cargo nextest run $(LOCKED) --workspace --lib --bins --tests --no-fail-fast -E 'binary_id(nobounce-nic::nic) + binary_id(nobounce::library)'; \
	else NOBOUNCE_LINK=shm cargo test $(LOCKED) -p nobounce-nic -p nobounce --test nic --test library --no-fail-fast -- --test-threads=1; fi

# What can go wrong between engines, on both links; `NOBOUNCE_ENGINES=4 make test-code` tries everything.
ENGINE_TESTS := operations posting faulty many fork forged lifetimes reregister srq windows threads report engines
test-engines: ## The essential ones of the device's tests once more, with two engines that their threads drive
	@if cargo nextest --version >/dev/null 2>&1; then \
		for link in udp shm; do \
			NOBOUNCE_PROGRESS=thread NOBOUNCE_ENGINES=2 NOBOUNCE_LINK=$$link cargo nextest run $(LOCKED) --workspace --lib --bins --tests --no-fail-fast \
				-E 'binary_id(nobounce-nic::nic) and test(/^($(subst $(eval ) ,|,$(ENGINE_TESTS)))::/)'; \
		done; \
	else NOBOUNCE_PROGRESS=thread NOBOUNCE_ENGINES=2 cargo test $(LOCKED) -p nobounce-nic --test nic --no-fail-fast -- --test-threads=1 $(ENGINE_TESTS); fi

# One address for IPv4 and one for IPv6, which no other test has.
DEBUG = $(or $(CARGO_TARGET_DIR),target)/debug
ON_DROPIN = NOBOUNCE_DEVICE=nb0 NOBOUNCE_TEST_DEVICE6=nb1 NOBOUNCE_ADDR=127.9.252.1,::1 NOBOUNCE_VERBS=$(abspath $(DEBUG))/dropin/libibverbs.so.1
test-hardware: ## The library's tests once more, on our own libibverbs as if it were a hardware NIC's
	@cargo build $(LOCKED) --quiet --workspace --lib --bins --test names
	@tools/dropin $(DEBUG) $(DEBUG)/dropin
	@if cargo nextest --version >/dev/null 2>&1; then \
		$(ON_DROPIN) cargo nextest run $(LOCKED) --workspace --lib --bins --tests --no-fail-fast -E 'binary_id(nobounce::library)'; \
	else $(ON_DROPIN) cargo test $(LOCKED) -p nobounce --test library --no-fail-fast -- --test-threads=1; fi

test-docs: ## The examples in the documentation
	@cargo test $(LOCKED) --workspace --doc --no-fail-fast

# Libraries only: the command and the library are both called nobounce, and rustdoc would write one over the other.
check-docs: ## Pages: length, links, words, variables; rustdoc with warnings denied
	@tools/check-docs --self-test && tools/check-docs
	@RUSTDOCFLAGS="-D warnings" cargo doc $(LOCKED) --workspace --lib --no-deps

check-dependencies: ## Licences, banned and yanked crates, advisories
	@tools/check-dependencies

check-pure: ## The protocol compiles where there is no operating system
	@if rustc --print target-libdir --target wasm32-unknown-unknown 2>/dev/null | xargs -r test -d; then \
		cargo check $(LOCKED) -p nobounce-protocol --lib --no-default-features --target wasm32-unknown-unknown; \
	else tools/waive wasm "target wasm32-unknown-unknown is not installed (rustup target add wasm32-unknown-unknown)"; fi

test-scripts: ## The scripts in tests/, in the order of their names
	@tools/test-scripts

# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own virtual environment first.
#
#   make demo     train a small transformer on plain JAX, the drop-ins, fuse and cutjax.flax, on whatever device is there
#   make test     the CPU tests and, on a machine with an NVIDIA GPU, the GPU tests
#   make lint     ruff, pyright, clang-format        make format   let ruff and clang-format rewrite
#   make docs     the documentation, into build/site       make docs-browser  the same, and a look at every page in Chromium
#   make upstream the tests of products in JAX and Flax with cutjax's drop-ins (clones both)
#   make compile-all  every kernel for every architecture through NVRTC; ARCH="sm_80 sm_90a" takes some of them
#   make bench    a short benchmark (needs a GPU)
#   make clean    remove the virtual environment and everything built
#
# Variables: PYTHON=python3.13 (3.11 or newer), VENV=folder, JAX="jax==0.10.0" (what pip is asked for), JOBS=2 (pytest
# workers), SHARE=1 (all parameter sets of each test; by default an eighth, others in another tree), PYTEST_ARGS="-k name",
# DEMO_ARGS="--steps 50", BENCH_ARGS, SITE.

PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
JOBS ?= 2
SHARE ?= 8
PYTEST_ARGS ?=
DEMO_ARGS ?=
SITE ?= build/site
BENCH_ARGS ?= --op gemm --tag layouts --plot --out build/bench.json

# What is imported is compiled when it is: pip would compile 9,000 files, most of which nobody reads.
export PIP_COMPILE ?= 0
# Also where the user's shell says that Python is not to keep what it compiles: fifty processes of the tests import JAX, for
# 0.8 s each, or 2.3 s where each compiles it.
export PYTHONDONTWRITEBYTECODE :=

# The C++ is compiled in two pieces, which read the headers twice and not 16 times: 18 of 40 processor seconds.
TOGETHER := --config-settings cmake.define.CMAKE_UNITY_BUILD=ON --config-settings cmake.define.CMAKE_UNITY_BUILD_BATCH_SIZE=0

BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard ffi/launcher/*.cc ffi/launcher/*.h)
FORMATTED := $(wildcard ffi/launcher/*.cc ffi/launcher/*.h ffi/device/*/*.cuh)
COMMA := ,
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
CUDA := $(if $(GPU),$(COMMA)cuda13)

.DELETE_ON_ERROR:
.PHONY: demo test test-cpu test-gpu upstream lint format docs docs-browser bench compile-all clean

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/transformer.py --with all --steps 200 $(DEMO_ARGS)

test: test-cpu $(if $(GPU),test-gpu)

test-cpu: $(VENV)/.installed-test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --share $(SHARE) -m "not gpu and not browser" $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

upstream: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet flax absl-py
	PYTHON=$(abspath $(BIN))/python tests/upstream/run.sh $(UPSTREAM)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict --site-dir $(abspath $(SITE))

docs-browser: docs $(VENV)/.installed-test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m "browser and not gpu" -rs tests/project/test_site.py --site $(abspath $(SITE))

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks run $(BENCH_ARGS)

compile-all: $(VENV)/.installed-test
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.compile_all $(if $(ARCH),--arch $(ARCH))

clean:
	rm -rf $(VENV) build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cutjax needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The installation is editable: a change in Python or device text takes effect at once, one in the C++ or in pyproject.toml
# installs again. One stamp per set of extras makes a second run start at once; another set builds nothing again.
$(VENV)/.installed: $(BIN)/python pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet $(TOGETHER) "$(JAX)" --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet "$(JAX)" "cutjax[$(EXTRAS_$*)$(CUDA)]"
	@touch $@

EXTRAS_demo := demo
EXTRAS_test := test
EXTRAS_bench := test,demo
EXTRAS_docs := docs
EXTRAS_dev := dev,test,demo,docs

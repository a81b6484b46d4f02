# `make demo` and `make test` work on a fresh machine; the other targets are parts of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
NAME ?= embedding
OUT ?= benchmarks/results/$(NAME).json
# Options of tools/test_versions.py, such as VERSIONS='--only 3.10 -- tests/kernels'.
VERSIONS ?=
# Options of tools/release_check.py, such as RELEASE='--python python3.12 --python python3.13'.
RELEASE ?=

# Python must write byte code: pip installs packages without it, so each process would compile torch and the rest again.
export PYTHONDONTWRITEBYTECODE :=

# Files that determine the compiled kernels. If one of them changes, kernels are compiled again before tests.
KERNELS := tools/compile_kernels.py $(shell find src/stratarec/kernels -name '*.py')

.PHONY: venv demo docs test test-rest test-all test-wheel test-versions release-check lint bench clean

venv: $(VENV)/.installed $(VENV)/.compiled

# Without byte code, because compiling all of torch and the rest took most of the time of the installation. Python
# compiles a module when it is first imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps -e . # refuses a wrong version of Python before anything large is downloaded
	$(PIP) "$(TORCH)" -e ".[dev]" # together, because pip would print an error about packages that are still missing
	touch $@

$(VENV)/.compiled: $(VENV)/.installed $(KERNELS)
	find src -name '*.nb[ic]' -delete # a compiled kernel does not notice changes of the kernels that it calls
	$(BIN)/python tools/compile_kernels.py
	touch $@

demo: venv
	test -f demo.yaml || $(BIN)/stratarec init --recipe demo
	$(BIN)/stratarec prepare demo.yaml
	$(BIN)/stratarec train demo.yaml

# Writes build/docs/index.html; every warning is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Types are checked on one core while the other compiles kernels.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory -j 2 lint $(VENV)/.compiled
	$(BIN)/pytest -m "not slow"

# The slow tests: clusters, killed processes, and full sizes.
test-rest: venv
	$(BIN)/pytest -m slow

test-all: test test-rest

test-wheel: venv
	$(BIN)/python tools/test_wheel.py

test-versions: venv
	$(BIN)/python tools/test_versions.py $(VERSIONS)

# All checks before a release.
release-check: venv
	$(BIN)/python tools/release_check.py $(RELEASE)

$(VENV)/.peers: venv benchmarks/requirements-peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-peers.txt
	touch $@

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks run $(NAME) --out $(OUT)

clean:
	rm -rf $(VENV) build data runs

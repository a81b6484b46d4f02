# `make demo` and `make test` do everything on a fresh machine; the other targets are their parts.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
NAME ?= embedding
OUT ?= benchmarks/results/$(NAME).json
# What `make test-versions` hands on, such as VERSIONS='--only 3.10 -- tests/kernels'.
VERSIONS ?=
RELEASE ?=

# Packages are installed without byte code: each process would compile torch and all else again if none were kept.
export PYTHONDONTWRITEBYTECODE :=

# Of kernels and of whom they are compiled for: another version of one is compiled before tests, too.
KERNELS := tools/compile_kernels.py $(shell find src/stratarec/kernels -name '*.py')

.PHONY: venv demo docs test test-rest test-all test-wheel test-versions release-check lint bench clean

venv: $(VENV)/.installed $(VENV)/.compiled

# Python compiles a module when it is first imported: to compile all of torch and the rest took most of the installation.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[dev]"
	touch $@

$(VENV)/.compiled: $(VENV)/.installed $(KERNELS)
	find src -name '*.nb[ic]' -delete # a compiled kernel does not notice changes of the kernels that it calls
	$(BIN)/python tools/compile_kernels.py
	touch $@

demo: venv
	test -f demo.yaml || $(BIN)/stratarec init --recipe demo
	$(BIN)/stratarec prepare demo.yaml
	$(BIN)/stratarec train demo.yaml

# Into build/docs/index.html; every warning is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# One core checks types while the other compiles.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory -j 2 lint $(VENV)/.compiled
	$(BIN)/pytest -m "not slow"

# What `test` leaves out: clusters, processes that are killed, sizes that take long.
test-rest: venv
	$(BIN)/pytest -m slow

test-all: test test-rest

test-wheel: venv
	$(BIN)/python tools/test_wheel.py

test-versions: venv
	$(BIN)/python tools/test_versions.py $(VERSIONS)

# What must hold before a release, such as RELEASE='--python python3.12 --python python3.13'.
release-check: venv
	$(BIN)/python tools/release_check.py $(RELEASE)

$(VENV)/.peers: venv benchmarks/requirements-peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-peers.txt
	touch $@

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks run $(NAME) --out $(OUT)

clean:
	rm -rf $(VENV) build data runs

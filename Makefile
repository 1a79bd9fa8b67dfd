# Each target makes what it needs, from Python 3.11 or newer alone. To choose another one: make PYTHON=python3.12 test
PYTHON ?= python3
VENV ?= .venv
DEMO ?= .demo
WORKERS ?= 2
ARGS ?=
TEXT ?=

plugins := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
projects := core/pyproject.toml $(plugins:%=%/pyproject.toml)
torch := $(shell grep '^torch==' constraints.txt)
# needs a C++ compiler; without one everything works, on slower kernels
native := plugins/cpu
without_native = || echo "octavo-cpu was not built (it needs a C++20 compiler); octavo runs on slower kernels. See plugins/cpu/README.md"
tools := pytest-xdist pytest-timeout ruff mypy gguf accelerate compressed-tensors matplotlib httpx openai langchain-openai schemathesis
sources := $(wildcard core/src $(plugins:%=%/src) examples/*/src)
empty :=
mypy := MYPYPATH=$(subst $(empty) ,:,$(sources)) $(VENV)/bin/mypy

.PHONY: help demo test lint bench aot
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

demo: $(DEMO)/model/config.json ## Install octavo with AWQ as a user would, fetch a small model, generate text, quantise it, compare
	$(DEMO)/venv/bin/python examples/demo/run.py $(DEMO)/model

test: $(VENV)/.installed ## Run all tests; ARGS="-m 'not slow'" leaves out those that need minutes
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --timeout 900 $(ARGS)

lint: $(VENV)/.installed ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(mypy)
	$(mypy) examples/third_party_plugin/src

bench: $(VENV)/.installed $(DEMO)/model/config.json ## Measure the scheduler; with TEXT=FILE also the demo model's perplexity
	$(VENV)/bin/python benchmarks/scheduler.py
	$(if $(TEXT),$(VENV)/bin/python benchmarks/perplexity.py $(DEMO)/model $(TEXT))

aot: $(VENV)/.installed ## Compile the GPU kernels for sm_80 and sm_90, without a GPU, and show registers and memory
	$(VENV)/bin/python -m octavo.testing.aot $(ARGS) $(wildcard plugins/*/tests/aot_cases.py)

# --- virtual environments. torch goes first: a version range of it would fetch gigabytes of CUDA.

define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "octavo needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c constraints.txt $(torch)
endef

$(VENV)/.installed: constraints.txt pyproject.toml $(projects)
	$(new_venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		-e "./core[testing]" $(patsubst %,-e ./%,$(filter-out $(native),$(plugins))) $(tools)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ./$(native) $(without_native)
	touch $@

$(DEMO)/venv/.installed: constraints.txt $(projects) $(shell find core/src plugins/awq/src plugins/cpu -name '*.py' -o -name '*.h' -o -name '*.cpp')
	$(new_venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		./core ./plugins/awq gguf accelerate
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt ./$(native) $(without_native)
	touch $@

$(DEMO)/model/config.json: $(DEMO)/venv/.installed
	$(DEMO)/venv/bin/python examples/demo/get_model.py $(DEMO)/model
	touch $@

# make demo       what the project does (half a minute after its installs; on a GPU, against torch)
# make test       lint, types and the CPU tests (no GPU needed; some 10 minutes on two cores)
# make test-slow  the CPU tests that build most: the other default kernels, exports, printed commands, notebooks
# make test-doors the CPU tests that need transformers, Hugging Face's kernels or basedpyright, after installing them
# make test-all   these three in one run, which loads torch and collects the tests once
# make test-gpu   the kernels against the reference, on a GPU
# make bench      the forward kernels against their peers, on a GPU; writes bench/results
# make bench-backward   the same for the backward
# make bench-decode     attention with a cache against its peers and against reading alone; ARGS="'b1-*'"
# make bench-shapes     random shapes, forward and backward, in search of cliffs; ARGS="--seed 1" for others
# make bench-models     the attention of real models, forward and backward; ARGS="'*llama*'" for some
# make bench-masks      block masks and functions, forward and backward; ARGS="'d64-*'" for some
# make tour       docs/tour.md and examples/tour again, from the levels under tour/ and their newest measurement
# make docs       a static site of the documents, build/site
#
# BASE_PYTHON=python3.12 chooses what .venv is made from. On a GPU machine whose python3 has torch with CUDA, the DSL and
# pytest, the demo, test-gpu and the benchmarks use it as it is; PYTHON=... overrides that. ARGS=... goes to pytest
# or the script. JOBS=... processes run the CPU tests, 2 by default; each takes about 2 GB.

BASE_PYTHON ?= python3
JOBS ?= 2
VENV := .venv
export PYTHONUNBUFFERED := 1
# Tests and builds start many interpreters, which would each compile torch's and the DSL's modules, for seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

ready = import torch, cutlass, tvm_ffi, pytest, rich, typer, filelock; assert torch.cuda.is_available()
ifneq (,$(filter demo test-gpu bench bench-backward bench-decode bench-shapes bench-models bench-masks,$(MAKECMDGOALS)))
  ifeq (,$(PYTHON))
    PYTHON := $(shell $(BASE_PYTHON) -c "$(ready)" 2>/dev/null && command -v $(BASE_PYTHON))
  endif
endif
ifeq (,$(PYTHON))
  PYTHON := $(VENV)/bin/python
  installed := $(VENV)/installed
  installed_dev := $(VENV)/installed-dev
endif
run := PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)

.PHONY: help docs tour demo test test-slow test-doors test-all cpu-tests all-cpu-tests test-gpu bench bench-backward bench-decode bench-shapes bench-models bench-masks lint format types clean
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(installed)
	@$(run) -m cute_attn.cli.demo

test: lint
	@$(MAKE) --no-print-directory -j 2 types cpu-tests

cpu-tests: $(installed_dev)
	$(run) -m pytest tests/cpu -n $(JOBS) --dist worksteal -q -m "not slow" $(ARGS)

# The rest: default kernels beyond one of each kind, dtype and feature, and whole programs.
test-slow: $(installed_dev)
	$(run) -m pytest tests/cpu -n $(JOBS) --dist worksteal -q -m slow $(ARGS)

# Their libraries take 215 MB, and over a minute where the package index is slow, so `make test` does without them.
test-doors: $(VENV)/installed-doors
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(VENV)/bin/python -m pytest -m doors -q $(ARGS)

test-all: $(VENV)/installed-doors
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j 2 types all-cpu-tests

all-cpu-tests: $(VENV)/installed-doors
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(VENV)/bin/python -m pytest tests/cpu -n $(JOBS) --dist worksteal -q $(ARGS)

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/installed-dev
	$(VENV)/bin/mypy

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-gpu: $(installed_dev)
	@$(run) -c "import sys, torch; torch.cuda.is_available() or sys.exit('error: there is no GPU, which these tests need')"
	$(run) -m pytest tests/gpu -q $(ARGS)

bench: $(installed_dev)
	$(run) -m bench.forward $(ARGS)

bench-backward: $(installed_dev)
	$(run) -m bench.backward $(ARGS)

bench-decode: $(installed_dev)
	$(run) -m bench.decode $(ARGS)

bench-shapes: $(installed_dev)
	$(run) -m bench.shapes $(ARGS)

bench-models: $(installed_dev)
	$(run) -m bench.models $(ARGS)

bench-masks: $(installed_dev)
	$(run) -m bench.masks $(ARGS)

# No byte code: most of what is installed is never loaded, and compiling it doubles the time.
pip := $(VENV)/bin/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e
# One line, and all that pip prints where it fails.
define install
	@echo "installing .[$(extras)] into $(VENV), a minute or two"
	@$(pip) ".[$(extras)]" >$(VENV)/pip.log 2>&1 || { cat $(VENV)/pip.log; exit 1; }
endef
$(VENV)/installed: extras := lab
$(VENV)/installed-dev: extras := dev
$(VENV)/installed-docs: extras := docs
$(VENV)/installed-doors: extras := dev,dev-doors

$(VENV)/bin/python:
	@$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(install)
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(install)
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(install)
	@touch $@

$(VENV)/installed-doors: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(install)
	@touch $@ $(VENV)/installed-dev $(VENV)/installed

tour: $(installed_dev)
	$(run) -m tour --page
	for file in examples/tour/*.ipynb; do $(run) -m tests.notebook $$file --write || exit 1; done

docs: $(VENV)/installed-docs
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m docs.site

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

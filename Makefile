PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: setup setup-dev quickstart test test-ray test-vllm soak lint docs bench

setup: $(VENV)/installed  ## make the virtual environment, everything pinned
setup-dev: $(VENV)/installed-dev  ## the same with all extras and the tools of development

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: setup  ## a real model learns two-digit addition on this machine
	$(BIN)/polyrhythm train configs/quickstart.toml

test: setup-dev  ## the whole suite
	$(BIN)/polyrhythm fetch smollm2-135m
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-ray: setup-dev  ## runs on two Ray nodes of this machine, one of which is killed
	$(BIN)/python -m pytest tests/ray

test-vllm: setup-dev  ## vLLM as an engine: makes its environment (3.5 GB), then real servers and runs
	$(BIN)/polyrhythm fetch smollm2-135m
	$(BIN)/polyrhythm setup vllm
	$(BIN)/python -m pytest tests/vllm

soak: setup-dev  ## random faults for SOAK_MINUTES (15): nothing lost, nothing twice, memory flat
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak.py --ranks 3

lint: setup-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: setup-dev  ## rewrite what is generated, and make the site in site/
	$(BIN)/python -m docs.write_tree
	$(BIN)/python -m docs.write_models
	$(BIN)/python -m docs.write_configuration
	$(BIN)/python -m docs.write_names
	$(BIN)/python -m docs.draw_timeline
	$(BIN)/python -m polyrhythm.observe.metrics > docs/metrics.md
	$(BIN)/python -m docs.site.build

bench: setup-dev  ## short forms of the benchmarks, written to benchmarks/results and RESULTS.md
	$(BIN)/polyrhythm fetch smollm2-135m
	$(BIN)/python benchmarks/run_all.py

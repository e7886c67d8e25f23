# make demo   train digits large, small and compressed, with a report     make test   the tests
# make lint   ruff and mypy     make bench   measure on this machine     make docs   run the documentation, redraw its pictures
# make site   the documentation as a site, in out/site/html             make dist   wheel and sdist, checked, in dist
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out

.PHONY: demo test slow lint format bench docs site dist clean

demo: $(VENV)/demo-ready
	$(BIN)/compressm demo --out $(OUT)/demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "(slow or hypothesis) and not gpu" --hypothesis-profile thorough

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/demo-ready
	$(BIN)/compressm bench reduction --out $(OUT)/bench

docs: $(VENV)/ready
	$(BIN)/python -m pytest tests/docs
	$(BIN)/python examples/reduce_a_layer.py --out $(OUT)/reduction --picture docs/images/reduction.png
	$(BIN)/python benchmarks/draw_demo.py
	$(BIN)/python benchmarks/draw_automatic.py
	$(BIN)/compressm bench draw benchmarks/results/reduction-cpu.json --picture docs/images/reduction-cost.png
	$(BIN)/compressm bench draw benchmarks/results/growth-cuda.json --picture docs/images/growth-cuda.png
	$(BIN)/compressm bench draw benchmarks/results/growth-cpu.json --picture docs/images/growth-cpu.png
	$(BIN)/compressm bench draw benchmarks/results/speedup-digits-cpu.json --picture docs/images/speedup-digits-cpu.png
	$(BIN)/compressm bench draw benchmarks/results/loss_continuity.json --picture docs/images/loss_continuity.png
	for name in smnist smnist-falling smnist-choices smnist-selection scifar; do \
		$(BIN)/compressm bench draw benchmarks/results/results-$$name.json --picture docs/images/results-$$name.png || exit 1; \
	done
	$(BIN)/python benchmarks/fill_tables.py

site: $(VENV)/ready
	$(BIN)/python docs/site.py
	$(BIN)/zensical build --strict

dist: $(VENV)/ready
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Installed again whenever what to install has changed: the laboratory, and what tests and lint need beside it.
# Python compiles what the demo imports when it does: to compile all of every package takes most of an installation.
$(VENV)/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[lab]"
	touch $@

$(VENV)/ready: $(VENV)/demo-ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OUT) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

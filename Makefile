# `make demo` runs the main job, `make test` passes the tests. Each sets itself up, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled

.PHONY: demo test test-all matrix structure lint format setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (once; takes a few minutes) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

# pip would compile the 13,000 files one after the other. A few of them are not for this Python.
$(COMPILED): $(STAMP)
	@$(BIN)/python -m compileall -qq -j 0 $(abspath $(VENV))/lib || true
	@touch $@

demo: $(COMPILED)
	@$(BIN)/python examples/demo/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three at a time keep two cores busy: tests of several ranks often wait for one of them. The long files come first.
# The tests start hundreds of processes, which load what the first one compiled.
TESTS := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	tests/multi tests/golden tests/unit/tune tests/unit/cli tests/unit tests/architecture

test test-all: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint $(COMPILED)
	$(TESTS)

# Draws all random inputs anew and runs the long versions: every kill, every mutated file.
test-all: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint $(COMPILED)
	$(TESTS) --fresh

# Part of the tests with every release of torch, transformers and Python that is promised; the table: docs/versions.md.
matrix: $(STAMP)
	$(BIN)/python tests/matrix.py

# How the source is cut: files, lines, and files that only one neighbour imports.
structure: $(STAMP)
	@$(BIN)/python tests/structure.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs .matrix .mypy_cache .ruff_cache .pytest_cache

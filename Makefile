# Two commands: `make test` and `make demo`. Each sets up what it needs in .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: test demo test-gpu install clean

test: install  ## lint, types, tests: what CI runs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

demo: install  ## a small Whisper on synthesised digits, AdamW beside it, and a report
	$(BIN)/maxfactor compare --optimizers quality,adamw --same-time --out out/demo --cache out/speech

test-gpu:  ## the tests that need a GPU, with the Python that has torch for it
	PYTHONPATH=src $(PYTHON) -m pytest tests -m gpu -p no:cacheprovider -p no:benchmark

install: .venv/installed

# Anew whenever the requirements change; an interrupted installation is not taken for a whole one.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "maxfactor needs Python 3.10 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

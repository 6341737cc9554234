# `make test`, `make demo` and `make docs` set up what they need in .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

# What `make check` runs of the tests: the rule, settings, checkpoints and the shape of the source.
CORE := $(addprefix tests/test_,adafactor.py bad_input.py checkpoint.py defects.py description.py \
	groups.py rounding.py rule.py schedule.py settings.py structure.py torch_contract.py)

# A test that hangs is named and ends its worker; the others go on.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --timeout 300 --timeout-method thread

MINUTES ?= 0

.PHONY: check test fuzz soak demo docs test-gpu lint install clean

check: lint  ## for daily work, 90 seconds: lint, types, contracts, a fast core of the tests
	$(PYTEST) $(CORE)

test: lint  ## everything: what CI runs
	$(PYTEST)

fuzz: install  ## the property tests with random seeds, for MINUTES=10 or until Ctrl-C
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

soak: install  ## for a night: thousands of faults, and 20 000 steps on each backend
	MAXFACTOR_SOAK=1 $(PYTEST) --timeout 7200 tests/test_faults.py tests/test_long_runs.py tests/test_speech_faults.py

lint: install  ## style, types, and contracts between packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

demo: install  ## a small Whisper on synthesised digits, AdamW beside it, and a report
	$(BIN)/maxfactor compare --optimizers quality,adamw --same-time --out out/demo --cache out/speech

docs: install  ## the pages of docs/ as a site, in site/
	$(BIN)/mkdocs build

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
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site

# `make test`, `make demo` and `make docs` set up what they need in .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

# What `make check` runs of the tests: the rule, settings, checkpoints and the shape of the source.
CORE := $(addprefix tests/test_,adafactor.py bad_input.py checkpoint.py defects.py description.py \
	groups.py rounding.py rule.py schedule.py settings.py structure.py torch_contract.py)

# What `make matrix` runs: the core, the equations, the torch form of the step, the rest of the library.
MATRIX := $(CORE) $(addprefix tests/test_,oracle.py backends.py momentum.py momentum_backends.py \
	momentum_state.py memory.py release.py unfreezing.py)

# The oldest and the newest that are supported. Torch comes from TORCH_INDEX if it is given, such as
# https://download.pytorch.org/whl/cpu, whose builds have no CUDA and are small.
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.13
TORCH_INDEX ?=
OLDEST_TORCH := $(shell sed -n 's/^dependencies = \["torch>=\(.*\)"\]/\1/p' pyproject.toml)

# Plugins that other packages bring, such as hydra's, take seconds to import in each process. That
# of logging looks at every logger of every package three times in each test.
PLUGINS := --disable-plugin-autoload -p no:logging -p xdist -p timeout -p hypothesispytest
# A test that hangs is named and ends its worker; the others go on.
PYTEST_OPTIONS := $(PLUGINS) -n $(JOBS) --timeout 300 --timeout-method thread
PYTEST := $(BIN)/python -m pytest $(PYTEST_OPTIONS)

# Of `make fuzz`; 0 is until Ctrl-C.
MINUTES ?= 0
# Of `make mutants`, for each module; 0 is all.
SAMPLE ?= 0

.PHONY: check test coverage fuzz mutants soak matrix oldest newest demo docs test-gpu lint install clean

check: lint  ## for daily work, 90 seconds: lint, types, contracts, a fast core of the tests
	$(PYTEST) $(CORE)

test: lint  ## everything: what CI runs
	$(PYTEST)

coverage: install  ## lines and branches of src/ that the tests reach, in all their processes; at least 95 %
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_OPTIONS) --timeout 1200
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

fuzz: install  ## properties of the optimizer, audio, tables and folders with random seeds, for MINUTES=10 or until Ctrl-C
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

mutants: install  ## changes the maths line by line, SAMPLE=40 or all of a module, and counts what no test notices
	$(BIN)/python tests/mutate.py --sample $(SAMPLE)

soak: install  ## for a night: thousands of faults, and 20 000 steps on each backend
	MAXFACTOR_SOAK=1 $(PYTEST) --timeout 7200 tests/test_compiled_kernels.py tests/test_faults.py tests/test_long_runs.py tests/test_speech_faults.py

matrix: oldest newest  ## the core of the tests with the oldest and the newest Python and torch

oldest newest: %: .venv-%/installed
	.venv-$*/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
	.venv-$*/bin/python -m pytest $(PYTEST_OPTIONS) $(MATRIX)

lint: install  ## style, types, and contracts between packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy --num-workers $(JOBS)

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

.venv-oldest/installed: VERSION = $(OLDEST_PYTHON)
.venv-oldest/installed: CHOICE = oldest OLDEST_PYTHON
.venv-oldest/installed: TORCH = torch==$(OLDEST_TORCH).*
.venv-newest/installed: VERSION = $(NEWEST_PYTHON)
.venv-newest/installed: CHOICE = newest NEWEST_PYTHON
.venv-newest/installed: TORCH = torch
.venv-oldest/installed .venv-newest/installed: pyproject.toml
	@command -v '$(VERSION)' >/dev/null || { echo "$(VERSION) is not installed; name one that is: make $(CHOICE)=python3.x"; exit 1; }
	'$(VERSION)' -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check hypothesis numpy pytest pytest-timeout pytest-xdist -e .
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* build dist site

# Everything a person runs. On a fresh Debian or Ubuntu: apt install python3-venv make
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch is a tenth of the size of the default one:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Tests at a time. Many start whole systems: about one for each core and for 4 GiB of memory.
JOBS ?= 2
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTOC = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto
# Messages of all files, stubs of those with a service; $(1) is the folder they go to.
generate = $(PROTOC) --python_out=$(1) --mypy_out=$(1) proto/moot/v1/*.proto && \
  $(PROTOC) --grpc_python_out=$(1) --mypy_grpc_out=$(1) proto/moot/v1/*_service.proto

.DEFAULT_GOAL := help
.PHONY: help venv install install-dev demo serve test test-long paths check format proto docs drafters check-proto clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

venv: $(BIN)/python

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; choose one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "the venv module is needed: apt install python3-venv"; exit 1; }

# The stamps are as old as the last installation: a second call does nothing unless pyproject.toml has changed.
install: $(VENV)/.installed  ## .venv with everything the demo needs

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV); torch is the large part (see README)."
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) install -e ".[model,router,demo]"
	@touch $@

install-dev: $(VENV)/.installed-dev

$(VENV)/.installed-dev: pyproject.toml contrib/pyproject.toml | $(VENV)/.installed
	$(PIP) install -e ".[model,router,demo,tracing,lab,dev]"
	$(PIP) install --no-deps -e contrib
	@touch $@

demo: install  ## the whole system, with drafting on and off; PROMPT="..." asks your own question
	@MOOT_PROMPT="$$PROMPT" $(BIN)/python -m moot demo $(FLAGS)

serve: install  ## the same system, left running on port 8000
	@$(BIN)/python -m moot serve --demo $(FLAGS)

test: install-dev  ## all tests
	@$(BIN)/python tests/deploy/setup_tools.py || true  # said by itself, and by the last line of the tests
	$(BIN)/python -m pytest -m "not long" -n $(JOBS) --dist worksteal $(FLAGS)

test-long: install-dev  ## many more cases of the same properties
	$(BIN)/python -m pytest -m long --timeout 3600 $(FLAGS)

paths: install-dev  ## 10,000 drawn requests against plain decoding, over all drafters, votes and shapes; CASES=500
	$(BIN)/python -m tests.paths --cases $(or $(CASES),10000) --first 1000 $(FLAGS)

check: install-dev check-proto  ## style, types, layers, stubs up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py --check
	$(BIN)/python tools/results_age.py --check
	$(BIN)/python tools/metrics_reference.py --check
	$(BIN)/python tools/dashboards --check
	$(BIN)/python tools/chart_values.py --check

format: install-dev  ## what `check` would complain about, where a program can mend it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: install-dev  ## regenerate moot/v1 from proto/
	$(call generate,.)

drafters: install  ## rebuild the drafters that come with the package; PROMPTS=Spec-Bench's question.jsonl
	$(BIN)/python tools/build_drafters.py --prompts "$(PROMPTS)" $(FLAGS)

docs: install-dev  ## regenerate what the documents take from the code
	$(BIN)/python tools/house.py --write
	$(BIN)/python tools/results_age.py
	$(BIN)/python tools/metrics_reference.py
	$(BIN)/python tools/dashboards
	$(BIN)/python tools/chart_values.py

check-proto: install-dev
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && \
	{ { $(call generate,"$$made"); } 2>"$$made/log" || { cat "$$made/log"; false; }; } && \
	touch "$$made/moot/v1/__init__.py" && \
	diff -r -x __pycache__ "$$made/moot/v1" moot/v1 || { echo "moot/v1 is not what proto/ gives: make proto"; exit 1; }

clean:  ## remove .venv and caches (prepared models stay under MOOT_CACHE)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info build

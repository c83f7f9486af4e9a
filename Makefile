# make serve      create .venv, install, start the server with the bundled pair on 127.0.0.1:8000
# make test       the whole test suite        make quick   without the slow tests
# make check      formatting, lint and types  make format  let ruff rewrite the files
# make bench      measure this machine        ARGS="..."   is handed to the command
#
# PYTHON names the interpreter that .venv is made from (3.11 or newer). The tests run in WORKERS processes of one thread
# each: two threads that must wait for each other on busy cores are slower than one. Files that take long come first
# (tests/conftest.py), an order that pytest-xdist is to keep.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
WORKERS ?= 2

BIN := $(VENV)/bin
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: serve bench test quick check format clean
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	@exec $(BIN)/foresay serve $(ARGS)

bench: $(VENV)/.installed
	@exec $(BIN)/foresay bench $(ARGS)

test: $(VENV)/.installed-dev $(VENV)/.installed-guidellm
	$(TEST) $(ARGS)

quick: $(VENV)/.installed-dev
	$(TEST) -m "not slow" $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@echo "==> creating $(VENV) from $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Foresay needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { echo "$(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# GuideLLM, a load client that the tests run against the server, wants other versions of some packages: it gets an
# environment of its own that looks into ours for the large ones.
GUIDELLM := $(VENV)/guidellm

$(VENV)/.installed-guidellm: $(VENV)/.installed-dev
	@echo "==> installing GuideLLM"
	@$(BIN)/python -m venv $(GUIDELLM)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(GUIDELLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/foresay.pth"
	@$(GUIDELLM)/bin/python -m pip --disable-pip-version-check install -q guidellm==0.8.1
	@touch $@

# The stamps make an install run again only when the files that decide it have changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing Foresay and its dependencies (the first time takes a minute or more: PyTorch is large)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "==> installing what the tests need"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

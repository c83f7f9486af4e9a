# make serve      create .venv, install, fetch SmolLM2-135M-Instruct and serve it on 127.0.0.1:8000; TARGET=... serves another
# make setup      create .venv, install what development needs
# make test       the test suite              make quick   its spine, before each commit
# make outside    clients of others': coding agents, load generators, packages from npm, which it installs
# make soak       what it tries in short, with more seeds, requests and time
# make check      formatting, lint and types  make format  let ruff rewrite the files
# make bench      measure this machine        ARGS="..."   is handed to the command
# make openapi    build/openapi.json, which a server shows at /openapi.json
#
# PYTHON names the interpreter that .venv is made from (3.11 or newer). The tests run in WORKERS processes of one thread
# each: two threads that must wait for each other on busy cores are slower than one. Files that take long come first
# (tests/conftest.py), an order that pytest-xdist is to keep. In CI what failed is tried once more with nothing beside it,
# as CPython's runner does: machines there are slow and shared, and one of 13,000 tests may have waited too long; what
# fails twice fails, and the first failure stays in the log. Bytecode is written even where the environment says not to,
# as images of containers do: else every process, of which the tests start hundreds, compiles us once more.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
TARGET ?= smollm2
WORKERS ?= 3
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# What make outside runs against the server: clients that are no Python packages, or do not go together with ours.
CLIENTS := $(addprefix $(VENV)/.installed-,guidellm litellm aider llm npm)
# The spine of the suite: the same tokens from everybody who drafts, what they stand on, the floors, formats and grammars,
# every API over a scripted engine; and the tests of what was changed since the last commit.
SAME := $(patsubst %,tests/same_tokens/test_%.py,families customs bundled_engines) tests/drafters/test_contract.py
SERVED := tests/parsers tests/grammar tests/server/test_validation.py tests/routes/test_every_api.py
QUICK := $(SAME) $(SERVED) tests/spec tests/kvpaging tests/test_floors.py tests/test_sizes.py
CHANGED = $$($(BIN)/python -m tests.changed)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip says 170 lines about what went well; they are shown if anything did not.
SAID := $(VENV)/install.log
define install
	@$(PIP) install $(1) > $(SAID) 2>&1 || { status=$$?; cat $(SAID) >&2; \
		echo "==> pip failed; the lines above are in $(SAID) too" >&2; exit $$status; }
endef

.PHONY: serve setup bench test outside quick soak check openapi format clean
.DELETE_ON_ERROR:

# What cannot be fetched is no reason to serve nothing, unless it was asked for.
serve: $(VENV)/.installed
	@target=$(TARGET); if [ "$$target" = smollm2 ] && ! $(BIN)/foresay pull smollm2 > /dev/null; then \
		echo "==> serving the bundled toy instead, which writes half-sense" >&2; target=; fi; \
	exec $(BIN)/foresay serve $$target $(ARGS)

setup: $(VENV)/.installed-dev

bench: $(VENV)/.installed
	@exec $(BIN)/foresay bench $(ARGS)

define tests
	$(PYTEST) $(1) || { [ $$? = 1 ] && [ "$$CI" = true ] && \
		echo "==> once more, nothing beside them: the tests that failed" >&2 && \
		$(PYTEST) $(1) -n 0 --last-failed --last-failed-no-failures none; }
endef

test: $(VENV)/.installed-dev
	$(call tests,$(ARGS))

outside: $(VENV)/.installed-dev $(CLIENTS)
	$(call tests,-m outside tests/clients $(ARGS))

quick: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not soak and not outside" $(or $(ARGS),$(QUICK) $(CHANGED))

soak: $(VENV)/.installed-dev
	$(PYTEST) -m soak $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

openapi: $(VENV)/.installed
	@mkdir -p build
	$(BIN)/python -m foresay.server.http.app > build/openapi.json

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

# Clients that want other versions of some packages: each gets an environment of its own that looks into ours for the
# large ones.
guidellm := guidellm==0.8.1
litellm := litellm[mcp]==1.106.2
aider := aider-chat==0.86.2
llm := llm==0.30

$(filter-out %-npm,$(CLIENTS)): $(VENV)/.installed-%: $(VENV)/.installed-dev
	@echo "==> installing $($*)"
	@$(BIN)/python -m venv $(VENV)/$*
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/foresay.pth"
	@if $(VENV)/$*/bin/python -m pip --disable-pip-version-check install -q '$($*)'; then touch $@; \
		else echo "$($*) is not there; its tests will be skipped" >&2; fi

# Clients from npm, coding agents among them. Where they cannot be had, their tests are skipped (in CI they fail). Nothing
# that a package would run at its installation is run.
$(VENV)/.installed-npm: tests/clients/node/package.json tests/clients/node/package-lock.json | $(BIN)/python
	@echo "==> installing clients from npm"
	@mkdir -p $(VENV)/clients
	@cp $^ $(VENV)/clients
	@if npm ci --prefix $(VENV)/clients --ignore-scripts --no-audit --no-fund --loglevel=error; then touch $@; \
		else echo "clients from npm are not there; their tests will be skipped" >&2; fi

# The stamps make an install run again only when the files that decide it have changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing Foresay, PyTorch, transformers and what they need (the first time takes 1 to 5 minutes; $(VENV)/install.log says how far it is)"
	$(call install,-c constraints.txt -e .)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "==> installing what the tests need"
	$(call install,-c constraints.txt -e ".[dev]")
	@touch $@

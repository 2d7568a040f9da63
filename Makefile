# The two that matter: `make reproduce` runs the default recipe here, `make test` proves the kit.
# Everything goes into .venv; nothing outside this folder is changed but the caches of pip, uv and llmrepro.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv, told of the package indexes that this machine's pip uses.
UV := $(BIN)/python -P src/llmrepro/package_index.py $(BIN)/uv
# `make lock UPGRADE=--upgrade` moves every pin to its newest release; plain `make lock` moves only what must.
UPGRADE ?=
COMPILE := UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip compile --quiet --generate-hashes --no-header \
	--emit-build-options $(UPGRADE)
OURS := --universal --python-version 3.11
# Where a publication's environment was made, for locks as of its day: Ubuntu 24.04 on x86-64.
THERE := x86_64-manylinux_2_39
PYTEST := $(BIN)/python -m pytest

.PHONY: setup reproduce compare matrix test test-engines bench bench-peers lock schema notebooks clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

reproduce: setup
	$(BIN)/llmrepro run

# About 3 GB of disk for vLLM's environment, once, and some ten minutes on two slow cores.
compare: setup
	$(BIN)/llmrepro compare

# Every recipe: what runs here is measured, of the rest there is what was published. Some 25 minutes on two cores the
# first time, most of it llama.cpp's build. That recipes lack hardware (10) is no error of make's.
matrix: setup
	$(BIN)/llmrepro matrix || [ $$? -eq 10 ]

test: $(VENV)/.ready-to-test
	$(PYTEST)

test-engines: $(VENV)/.ready-to-test
	$(PYTEST) -m "native or long"

# The second builds llama.cpp from source first where it is not cached: about a quarter of an hour on two cores.
bench: $(VENV)/.ready-to-test
	$(BIN)/python tests/bench_client.py
	$(BIN)/python tests/bench_engine.py
	$(BIN)/python tests/bench_environment.py
	$(BIN)/python tests/bench_telemetry.py
	$(BIN)/python tests/bench_matrix.py

# Other clients beside this kit's: about 1 GB of packages while it runs, vLLM's environment (3 GB) where it is not
# cached, and half an hour on two cores.
bench-peers: $(VENV)/.ready-to-test
	$(BIN)/python tests/bench_peers.py

schema: setup
	$(BIN)/llmrepro schema

# One per recipe, from notebooks/reproduce.ipynb: after a change of it or of a recipe.
notebooks: setup
	$(BIN)/llmrepro notebooks

# uv comes first and alone, through pip, checked against its own hashes in the lock; it installs the rest.
$(VENV)/.ready: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found: install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "$(PYTHON) is Python %d.%d and llmrepro needs 3.11 or newer: name one with make PYTHON=python3.12 setup." \
	  % sys.version_info[:2])'
	@echo "Setting up $(VENV): the locked packages, about 550 MB, half a minute where the network is good."
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) -m venv failed: on Debian and Ubuntu install python3-venv, then run make again." >&2; \
	  exit 1; }
	@awk '/^[^ #]/ { wanted = /^uv==/ } wanted' requirements.lock > $(VENV)/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	  -r $(VENV)/uv.lock
	$(UV) pip sync --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install --python $(BIN)/python --no-deps -e .
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.ready tests/requirements.lock
	$(UV) pip install --python $(BIN)/python --require-hashes -r tests/requirements.lock
	@touch $@

# Locks are made against one index, PyPI, whatever this machine's pip is told: hashes differ by index.
# Which of an engine's packages must be wheels is said in its engine.in, which it must not have in engine.exclude,
# and which index beside PyPI it needs in its recipe.json.
lock: setup
	$(COMPILE) $(OURS) --only-binary :all: pyproject.toml -o requirements.lock
	sed -i -e '1i # The notebook side of llmrepro, every package pinned and hashed. Made by `make lock`.' \
	  -e '1i # vllm is not here: each recipe pins its engine in recipes/**/engine.lock, and the kit installs' \
	  -e '1i # that into an environment of its own.' requirements.lock
	$(COMPILE) $(OURS) --only-binary :all: -c requirements.lock tests/requirements.in -o tests/requirements.lock
	sed -i '1i # What the tests need beside requirements.lock. Made by `make lock`.' tests/requirements.lock
	@set -e; for wanted in $$(find recipes -name '*.in' | sort); do \
	  echo "Locking $$wanted"; \
	  recipe=$${wanted%/*}/recipe.json; \
	  said() { $(BIN)/python -c 'import json, sys; \
	    print(*json.load(open(sys.argv[1]))["engine"]["install"].get(sys.argv[2]) or "", sep=sys.argv[3])' $$recipe "$$@"; }; \
	  index=$$(said indexes " "); day=$$(said resolved_as_of ""); for_="--universal --python-version 3.11"; \
	  [ -z "$$day" ] || for_="--exclude-newer $$day --python-version $$(said python "") --python-platform $(THERE)"; \
	  exclude=$${wanted%.in}.exclude; \
	  [ $${wanted##*/} = engine.in ] || for_="$$for_ --no-deps"; \
	  UV_INDEX="$$index" UV_INDEX_STRATEGY=unsafe-best-match UV_EXCLUDE=$$(ls $$exclude 2>/dev/null) \
	    $(COMPILE) $$for_ $$wanted -o $${wanted%.in}.lock; \
	  sed -i "1i # The engine of one recipe, pinned and hashed. Made by \`make lock\` from $${wanted##*/}." \
	    $${wanted%.in}.lock; \
	done

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

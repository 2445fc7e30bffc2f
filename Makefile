# Every target sets up first if needed. Variables, all optional:
#   PROFILE      smoke | full | study | replay     (chosen from the machine when left out)
#   ONLY         chapters to run, and what they need, as ONLY=2.4, ONLY=04_memory_optimization or ONLY=1.1,2.4
#   TIME_BUDGET  stop cleanly rather than take longer (360 for seconds, 6m, 1h30m); a later call goes on
#   CELL_TIMEOUT, NOTEBOOK_TIMEOUT  a cell or notebook that takes longer fails (15m and 30m in smoke, 30m and 60m in full)
#   RUN          the run folder to continue or to report on
#   DATA_SOURCE  auto | mirror | cache | download | synthetic
#   PYTHON       use this environment (a container's, a cluster module's) instead of .venv: PYTHON=/path/to/python
#   TORCH        build to install instead of the detected one: cpu | cuda | rocm
#   FRAMEWORKS   environments of frameworks that `make fetch` installs for chapters 2.10 and 2.11, as all or "fabric deepspeed"
#   DRY_RUN      with setup: print every action and do nothing (DRY_RUN=1); DRY_RUN=0 is no dry run
#   WORKERS      number of processes that run tests (3)
export PROFILE ONLY TIME_BUDGET CELL_TIMEOUT NOTEBOOK_TIMEOUT RUN DATA_SOURCE SEED REPLAY_OF PYTHON TORCH

enter = sh hyperion/install/enter.sh
pytest = $(enter) --extra test run pytest
# Three workers by default, because many tests wait for processes that they start. The fast tests start none.
WORKERS ?= 3
test-fast: WORKERS = 2
parallel = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help reproduce test test-fast test-long test-book setup fetch lab report lint clean

help: ## this list
	@echo "make reproduce    sets up if needed, then runs the notebooks;   make test    sets up if needed, then tests"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@sed -n 's/^#   /  /p' Makefile

reproduce: ## run every notebook, keep rows and reports in results/, go on where the last call stopped
	@$(enter) run hyperion reproduce $${PROFILE:+--profile "$$PROFILE"} $${ONLY:+--only "$$ONLY"} \
		$${TIME_BUDGET:+--time-budget "$$TIME_BUDGET"} $${RUN:+--run "$$RUN"} \
		$${CELL_TIMEOUT:+--cell-timeout "$$CELL_TIMEOUT"} $${NOTEBOOK_TIMEOUT:+--notebook-timeout "$$NOTEBOOK_TIMEOUT"} \
		$${DATA_SOURCE:+--data-source "$$DATA_SOURCE"}

test: ## run the tests of the library
	@$(pytest) $(parallel) -m "not book and not long"

test-long: ## run the tests that take too long for every change
	@$(pytest) $(parallel) -m long

test-fast: ## run the tests that take about a second at most and start no processes
	@$(pytest) $(parallel) -m "not slow and not process and not book"

test-book: ## run the tests of the book: the commands of the README, all notebooks in the smoke profile, and the driver
	@$(pytest) $(parallel) -m "book and not long"

setup: ## make or repair the environment, nothing else; with PYTHON=, what reproduce needs (lab, test, lint add theirs)
	@$(enter) $(if $(filter-out 0,$(DRY_RUN)),--dry-run) setup

fetch: ## stage all data and tokenizers while there is a network (on a login node); FRAMEWORKS=all also frameworks
	@$(enter) run hyperion fetch
	@for name in $(FRAMEWORKS:all=--all); do $(enter) run hyperion frameworks install $$name || exit 1; done

lab: ## JupyterLab on loopback with its token
	@$(enter) --extra lab run hyperion lab

report: ## tables and pictures of a run (RUN=, else the latest)
	@$(enter) run hyperion report $${RUN:+"$$RUN"}

lint: ## style and formatting of library, tests and notebooks; types of the library
	@$(enter) --extra lint run ruff check .
	@$(enter) --extra lint run ruff format --check .
	@$(enter) --extra lint run pyright

clean: ## remove the environments and caches; data/ and results/ stay
	@grep -qs '^name = "hyperion"' pyproject.toml || { echo "make clean: this folder is no checkout of Hyperion" >&2; exit 2; }
	@if [ -f .venv/hyperion-setup.json ] && [ ! -L .venv ]; then echo "rm -rf .venv"; rm -rf .venv; \
		elif [ -e .venv ] || [ -L .venv ]; then echo ".venv is left as it is: make setup did not make it"; fi
	rm -rf .overlay .setup.lock build dist hyperion.egg-info .pytest_cache .ruff_cache .hypothesis
	find hyperion tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "data/ and results/ are left as they are: they are yours."

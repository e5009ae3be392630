# `make quickstart` shows megarl at work, `make test` runs everything CI runs; both make .venv first.

BIN := .venv/bin

.PHONY: help setup quickstart test test-unit test-newest test-faults check clean

help:
	@echo "make setup        .venv with exactly requirements/cpu.lock (PYTHON=... chooses the interpreter)"
	@echo "make quickstart   watch a small language model learn arithmetic by PPO"
	@echo "make test         what CI runs: check, then the unit, distributed and end-to-end tests"
	@echo "make test-unit    the unit tests"
	@echo "make test-newest  the tests of what touches Megatron-Core, with the newest one, and of optional packages"
	@echo "make test-faults  the tests in which ranks die, stop or hang, N=1 times over, and a count of what passed"
	@echo "make check        ruff, mypy, import contracts"
	@echo "make clean        remove environments, caches and runs/"

setup:
	@scripts/setup.sh

quickstart: setup
	$(BIN)/python scripts/quickstart.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-unit: setup
	$(BIN)/python -m pytest tests/unit

# One pytest at a time, also under make -j: the tests start processes that need the cores.
test: check
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/ranks
	$(BIN)/python -m pytest tests/e2e

# What differs between losses alone is Megatron's business no more.
LOSSES := tests/ranks/test_learner_losses.py tests/ranks/test_learner_preferences.py
test-newest:
	@scripts/setup.sh newest
	.venv-newest/bin/python -m pytest tests/unit/test_models_grid.py $(wildcard tests/unit/test_learner_*.py) \
		$(filter-out $(LOSSES),$(wildcard tests/ranks/test_learner_*.py)) tests/ranks/test_planning_memory.py tests/ranks/test_sync_transfer.py \
		tests/unit/test_rewards_reasoning_gym.py

N := 1
FAULTS = $(shell grep -rl --include 'test_*.py' mark.faults tests)
test-faults: setup
	@passed=0; for run in $$(seq $(N)); do \
		$(BIN)/python -m pytest -q -m faults $(FAULTS) && passed=$$((passed + 1)); \
		echo "fault tests: $$passed of $$run runs passed"; \
	done; [ $$passed -eq $(N) ]

clean:
	rm -rf .venv .venv-newest .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info runs

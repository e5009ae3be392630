# `make quickstart` shows megarl at work, `make test` runs all that a change needs; both make .venv first.

BIN := .venv/bin

# Tests start many processes, which compile what they import if no bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup setup-peers docs quickstart fix check test test-unit test-ranks test-e2e test-long test-newest test-oldest test-faults hollow hollow-newest test-hollow-core test-hollow test-cuda test-cuda-newest test-te clean

help:
	@echo "make setup        .venv with exactly requirements/cpu.lock (PYTHON=... chooses the interpreter)"
	@echo "make setup-peers  .venv-peers: .venv with the libraries that --peer of 'python -m benchmarks' measures"
	@echo "make docs         build/site: these pages and a reference of each package as a site, without a network"
	@echo "make quickstart   watch a small language model learn arithmetic by PPO"
	@echo "make fix          mend what ruff can mend, and format"
	@echo "make check        ruff, mypy, import contracts"
	@echo "make test         all that a change needs: check, and the tests of the next three"
	@echo "make test-unit    tests within one process"
	@echo "make test-ranks   tests of ranks that work together"
	@echo "make test-e2e     tests of whole commands"
	@echo "make test-long    what takes minutes: demonstrations, benchmarks, many lives of a job, and test-newest"
	@echo "make test-newest  tests of what touches Megatron-Core, with its newest release, and of optional packages"
	@echo "make test-oldest  tests of what touches vLLM, with the oldest vLLM and torch (3 GB of packages)"
	@echo "make test-hollow  a part of the next, which runs nightly: it takes minutes, after the packages (6 GB)"
	@echo "make test-cuda    tests of what touches CUDA, on a hollow device: no kernel runs, and no GPU is needed"
	@echo "make test-cuda-newest  tests of what touches vLLM, with its newest release, which has no build for the CPU (6 GB)"
	@echo "make test-te      the same of Transformer Engine, which is compiled first for a quarter of an hour"
	@echo "make test-faults  tests in which ranks die, stop or hang, N=1 times, and a count of the runs that passed"
	@echo "make clean        remove environments and caches; keep what users made"

setup:
	@scripts/setup.sh

setup-peers:
	@scripts/setup.sh peers

docs:
	@scripts/setup.sh docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet

quickstart: setup
	$(BIN)/python scripts/quickstart.py

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# While some of three pytest processes start ranks or wait for them, the others compute. The tests of a file stay
# together, because they share what they start.
BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest -n 3 $(BY_FILE)

test-unit: setup
	$(PYTEST) tests/unit

test-ranks: setup
	$(PYTEST) tests/ranks

test-e2e: setup
	$(PYTEST) -m "not long" tests/e2e

# In one session, whose ranks are forked from one process. Short tests come last, so both processes end together.
# Where `make hollow` has built the hollow device, a few tests run on it too.
test: check
	$(PYTEST) -m "not long" tests/e2e tests/ranks tests/unit
	@[ ! -e build/hollow/built ] || $(MAKE) --no-print-directory test-hollow-core

test-long: setup
	$(PYTEST) -m long tests/e2e tests/ranks tests/cluster
	@$(MAKE) --no-print-directory test-newest

# What calls Megatron-Core. Losses, heads and packing differ above it, and need no second version of it.
OF_MEGATRON := tests/unit/test_models_grid.py tests/unit/test_learner_patches.py tests/unit/test_learner_rotary.py \
	$(patsubst %,tests/ranks/test_learner_%.py,checkpoint cuda gradient layout moe overlap parallel replay split) \
	tests/ranks/test_planning_memory.py \
	"tests/ranks/test_weight_sync_transfer.py::test_engine_has_the_trainers_weights_after_every_update[llama-2]"
test-newest:
	@scripts/setup.sh newest
	.venv-newest/bin/python -m pytest -n 3 $(BY_FILE) $(OF_MEGATRON) tests/unit/test_rewards_reasoning_gym.py \
		tests/unit/test_environments_reasoning_gym.py

# What calls vLLM. The CPU build of 0.26 does not compute some families (megarl/rollout/release.py), packs no tied head,
# which a planted fault (faults1) needs, and cannot reload whole experts. Not a part of test-long: the packages are large.
OF_ENGINE := $(patsubst %,tests/unit/test_rollout_%.py,arguments draws kv_cache sampling session) \
	$(patsubst %,tests/ranks/test_rollout_%.py,draws engine layout) tests/ranks/test_weight_sync_selfcheck.py \
	"tests/ranks/test_weight_sync_transfer.py::test_engine_has_the_trainers_weights_after_every_update[llama-2]"
LATER := deepseek or lite or ernie4_5_moe or gpt_neox or gpt_oss or hunyuan or minimax or ministral3 or qwen3_next \
	or seed_oss or smollm3
test-oldest:
	@scripts/setup.sh oldest
	.venv-oldest/bin/python -m pytest -n 3 $(BY_FILE) -k "not ($(LATER) or faults1 or whole_experts)" $(OF_ENGINE)

# CUDA builds on a device that computes nothing (docs/hollow.md). The packages are large: 6 GB.
hollow:
	@scripts/setup.sh cuda
	@$(MAKE) --no-print-directory build/hollow/built
hollow-newest:
	@scripts/setup.sh cuda-newest
	@$(MAKE) --no-print-directory build/hollow-newest/built
build/hollow/built: .venv-cuda/.project
build/hollow-newest/built: .venv-cuda-newest/.project
build/hollow/built build/hollow-newest/built: tests/hollow/build.py $(wildcard tests/hollow/device/*)
	$(@D:build/hollow%=.venv-cuda%)/bin/python tests/hollow/build.py $(@D) $(wildcard build/transformer_engine)
	@touch $@

# Transformer Engine is compiled once, for a quarter of an hour.
build/transformer_engine/built: tests/hollow/install_te.py requirements/gpu.lock requirements/gpu-source.txt
	@$(MAKE) --no-print-directory hollow
	tests/hollow/run .venv-cuda/bin/python tests/hollow/install_te.py $(@D)
	.venv-cuda/bin/python tests/hollow/build.py build/hollow $(@D)
	@touch $@

test-te: setup build/transformer_engine/built hollow
	PYTHONPATH="$(CURDIR)/build/transformer_engine" tests/hollow/run \
		.venv-cuda/bin/python -m pytest tests/hollow/test_transformer_engine.py

# The sanitizer and an interpreted update take minutes on a busy machine.
PYTEST_ON_HOLLOW := -m pytest --timeout 900 -n 2 $(BY_FILE)
ON_HOLLOW := tests/hollow/run .venv-cuda/bin/python $(PYTEST_ON_HOLLOW)
OF_LEARNER := tests/hollow/test_learner.py
CASE := $(OF_LEARNER)::test_learner_on_cuda_matches_learner_on_cpu
test-hollow-core: hollow
	$(ON_HOLLOW) tests/hollow/test_device_memory.py "$(CASE)[alone-policy]"
test-hollow: hollow
	$(ON_HOLLOW) $(patsubst %,tests/hollow/test_%.py,device_memory nccl graphs solid counters engine_counters) \
		"$(CASE)[alone-policy]" "$(CASE)[tensor-data-offloaded-policy]" tests/hollow/test_engine.py \
		"$(OF_LEARNER)::test_replay_on_cuda_matches_replay_on_cpu[context]" \
		"$(OF_LEARNER)::test_choices_on_cuda_are_those_of_cpu[context]"

# At the end it prints the functions with lines for CUDA and whether the lines ran, and fails if too few did.
LINES := $(CURDIR)/build/hollow/lines
test-cuda: setup hollow
	$(BIN)/python -m pytest tests/hollow/test_engine.py
	@rm -rf "$(LINES)" build/hollow/check
	HOLLOW_LINES="$(LINES)" $(ON_HOLLOW) tests/gpu tests/hollow
	$(BIN)/python scripts/gpu_check.py --list --stages train-0.5b-grpo,resume,verify- > build/hollow/stages
	HOLLOW_LINES="$(LINES)" xargs -P 2 -I{} -a build/hollow/stages \
		$(BIN)/python scripts/gpu_check.py --hollow --out build/hollow/check --stages {}
	$(BIN)/python -m tests.hollow.branches "$(LINES)"

# Arguments, patches, an engine, training, and a family with each kind of layer that vLLM computes in a way of its own.
KERNELS := varlen_attention_matches_attention_of_each_sequence vllm_attention_respects_sliding_window \
	vllm_fused_experts_equal_sum_over_experts
ON_NEWEST := HOLLOW_BUILD=build/hollow-newest tests/hollow/run .venv-cuda-newest/bin/python
test-cuda-newest: hollow-newest
	$(ON_NEWEST) $(PYTEST_ON_HOLLOW) tests/gpu/test_rollout_cuda.py \
		$(patsubst %,tests/hollow/test_%.py,device_memory engine_counters engine) \
		$(patsubst %,tests/hollow/test_solid.py::test_%,$(KERNELS)) \
		$(patsubst %,tests/unit/test_%.py,learner_patches rollout_arguments rollout_draws rollout_meanings) \
		tests/ranks/test_distributed_exchange.py::test_all_groups_share_one_waiting_thread
	@rm -rf build/hollow-newest/check
	HOLLOW_DEVICES=1 $(ON_NEWEST) scripts/gpu_check.py --hollow --out build/hollow-newest/check \
		--stages train-0.5b-grpo,verify-qwen3_moe,verify-deepseek_v3,verify-qwen3_next,verify-gpt_oss

N := 1
FAULTS = $(shell grep -rl --include 'test_*.py' mark.faults tests)
test-faults: setup
	@passed=0; for run in $$(seq $(N)); do \
		$(PYTEST) -q -m faults $(FAULTS) && passed=$$((passed + 1)); \
		echo "fault tests: $$passed of $$run runs passed"; \
	done; [ $$passed -eq $(N) ]

clean:
	rm -rf build .venv .venv-cuda .venv-cuda-newest .venv-docs .venv-newest .venv-oldest .venv-peers .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info

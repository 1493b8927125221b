# Everything a developer runs; each target first sets up the virtual environment if that has not been done.

PYTHON ?= python3.11
VENV ?= .venv
# What `setup` installs as the project: the checkout itself, or (.ci/run) a built wheel.
INSTALL ?= -e .
MODEL :=
HOST := 127.0.0.1
PORT := 8000
# Where tests put what their processes write, engine logs above all.
TEST_DIR ?= .lockstep/test
ARGS :=
ENGINE := docker
REGISTRY := localhost
TAG := 0.1.0
PIP_ARGS :=

BIN := $(VENV)/bin
STAMP := $(VENV)/.lockstep-setup
LOCKS := requirements/cpu.lock.txt requirements/dev.lock.txt

.DEFAULT_GOAL := help
.PHONY: help setup up images test test-full fuzz bench bench-peers proto clean \
    check check-lint check-format check-types check-imports check-proto

help:  ## This list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP)  ## Make the virtual environment from the lock files (once, and again when one changes)

$(STAMP): $(LOCKS) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --no-deps $(foreach lock,$(LOCKS),-r $(lock))
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --force-reinstall $(INSTALL)
	@touch $@

up: $(STAMP)  ## One prefill node, a decode node with two ranks and the proxy, on this machine (MODEL=smollm2, PORT=8000)
	@$(BIN)/lockstep up $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(STAMP)  ## Unit, component and system tests, without those that take minutes each
	@$(call pytest,-m "not full")

test-full: $(STAMP)  ## All tests
	@$(call pytest,)

fuzz: $(STAMP)  ## Simulated decode ranks with random cases, 500,000 steps (ARGS="--steps N --seed N")
	PYTHONPATH=tests $(BIN)/python -P -m simulator.fuzz $(ARGS)

check: check-lint check-format check-types check-imports check-proto  ## Lint, format, types, import rules, generated code

check-lint: $(STAMP)
	$(BIN)/ruff check .

check-format: $(STAMP)
	$(BIN)/ruff format --check .

check-types: $(STAMP)
	$(BIN)/mypy

check-imports: $(STAMP)
	$(BIN)/lint-imports

check-proto: $(STAMP)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(BIN)/python -m lockstep.rpc.generate "$$fresh" \
	    && diff -r -x __init__.py -x __pycache__ "$$fresh" lockstep/rpc/generated \
	    && echo "lockstep/rpc/generated is up to date" \
	    || { echo "lockstep/rpc/generated does not match lockstep.proto: run 'make proto'"; exit 1; }

images:  ## The CPU container images, lockstep-node-cpu and lockstep-proxy (ENGINE=docker, TAG=0.1.0, REGISTRY=localhost)
	$(foreach target,node-cpu proxy,$(ENGINE) build -f deploy/images/Dockerfile --target $(target) \
	    --build-arg PIP_ARGS="$(PIP_ARGS)" -t $(REGISTRY)/lockstep-$(target):$(TAG) . &&) true

bench: $(STAMP)  ## Lockstep beside plain vLLM: TTFT, ITL, throughput (ARGS=--quick for one run of each)
	$(BIN)/python -m bench.serve $(ARGS)

bench-peers: $(STAMP)  ## Lockstep beside vllm-router, smg, Dynamo and plain vLLM, one at a time (ARGS=--quick; hours without)
	$(BIN)/python -m bench.peers --json .lockstep/peers.json $(ARGS)

proto: $(STAMP)  ## Regenerate lockstep/rpc/generated from lockstep.proto
	$(BIN)/python -m lockstep.rpc.generate

clean:  ## Remove the virtual environment, caches, build outputs and logs
	rm -rf $(VENV) .venv-ci .lockstep build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
	    .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define pytest
echo "Engine logs: $(TEST_DIR) (find them with: find -L $(TEST_DIR) -name '*.log')"; \
mkdir -p $(TEST_DIR); \
$(BIN)/python -P -m pytest --basetemp=$(TEST_DIR)/run $(1) $(ARGS); code=$$?; \
echo "Engine logs: $(TEST_DIR)"; exit $$code
endef

# Commands, from a fresh clone, with Python >= 3.10, g++ and make on the machine:
#
#   make demo       install into .venv and run the main job
#   make test       install into .venv and run the tests, but for the slow ones
#   make test-slow  the slow ones: .ci/run runs them too
#   make test-all   both; build/durations.txt and build/durations-slow.txt have the seconds of each file and of each test
#   make sanitize   the tests that compute on the CPU, with address and undefined behaviour sanitizers; half an hour
#   make docs       the documents as one folder that opens from disk: build/docs/index.html; warnings are errors
#   make figures    draws benchmarks/results/*.json into docs/figures/, and writes the tables of README.md and docs/measured.md
#   make hub        build/hub: a repository of kernels for the Hugging Face Hub; it takes nvcc
#   make engines    downloads serving engines and runs their attention backends on the CPU; no part of .ci/run
#   make upstream   clones FlashInfer and runs its own tests of attention on Quire; it takes a GPU; no part of .ci/run
#   make upstream-flex  the same with torch's tests of flex_attention, of the installed release; DEVICE=cpu runs without a GPU
#   make upstream-flash   the same with FlashAttention's tests of forwards, of versions 2 and 3
#
# All may be repeated: the installation is redone only after pyproject.toml or constraints-dev.txt changed, and what was
# compiled stays in build/ until `make clean`.
#   PYTHON=python3.12   the interpreter to start from. If it already has a torch that sees a GPU, that torch is used.
#   VENV=.venv          where the environment lies
#   WORKERS=2           processes that share the tests; each compiles and computes with threads of its own

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# No example or test fetches anything: the only model weights come in a package.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# Hundreds of processes import torch, which nothing has compiled yet: without bytecode files each would do it anew.
export PYTHONDONTWRITEBYTECODE :=
# Threads of OpenMP sleep while they wait. With its default they spin, and torch's small operations then take ten times as
# long wherever another process uses the same cores.
export OMP_WAIT_POLICY ?= passive

PYTEST := $(OFFLINE) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-all sanitize docs figures engines upstream upstream-flex upstream-flash venv ci lint format clean

demo: export QUIRE_CACHE_DIR = $(CURDIR)/build/demo
demo: $(STAMP)
	@echo "== 1 of 4: sentence embeddings without padding (examples/embed.py)"
	@$(OFFLINE) $(BIN)/python examples/embed.py
	@echo "== 2 of 4: a language model that serves requests as they come (examples/generate.py)"
	@$(OFFLINE) $(BIN)/python examples/generate.py
	@echo "== 3 of 4: paged prefill of a whole model, and under a custom mask (examples/paged_prefill.py)"
	@$(OFFLINE) $(BIN)/python examples/paged_prefill.py
	@echo "== 4 of 4: a batch that decodes through all layers (examples/batch_inference.py)"
	@$(OFFLINE) $(BIN)/python examples/batch_inference.py
	@echo "== done; compiled kernels are in build/demo, where the next run finds them"

test: $(STAMP)
	$(PYTEST) -m "not slow" --durations-file build/durations.txt

test-slow: $(STAMP)
	$(PYTEST) -m slow --durations-file build/durations-slow.txt

test-all: test test-slow

sanitize: $(STAMP)
	$(OFFLINE) $(BIN)/python tests/sanitize.py --numprocesses $(WORKERS) --dist worksteal -m "not slow"

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/docs/index.html"

figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py

hub: $(STAMP)
	$(BIN)/python jit_cache/prebuild.py
	$(BIN)/python jit_cache/hub.py build/hub

engines: export QUIRE_CACHE_DIR = $(CURDIR)/build/engines/cache
engines: export QUIRE_LOG = error
engines: ENGINES := $(CURDIR)/build/engines
engines: $(STAMP)
	$(BIN)/python engines/fetch.py $(ENGINES)
	mkdir -p -m 700 $(QUIRE_CACHE_DIR)
	$(BIN)/python engines/run_sglang.py $(ENGINES)/sglang
	$(BIN)/python engines/run_sglang_flash.py $(ENGINES)/sglang
	$(BIN)/python engines/run_vllm.py $(ENGINES)/vllm
	$(BIN)/python engines/run_vllm_flash.py $(ENGINES)/vllm
	$(BIN)/python engines/run_small.py $(ENGINES)

# SAMPLE: how many cases of each test function, 0 for all 260,000; SEED: which.
SAMPLE ?= 10
SEED ?= 0
upstream: CLONE := $(CURDIR)/build/engines/flashinfer
upstream: $(STAMP)
	mkdir -p $(dir $(CLONE))
	test -d $(CLONE) || git clone --quiet --depth 1 https://github.com/flashinfer-ai/flashinfer $(CLONE)
	$(BIN)/python -m pip install --quiet --target $(CLONE)/site einops scipy
	PYTHONPATH=$(CLONE)/site $(BIN)/python engines/run_upstream.py --tests $(CLONE)/tests --sample $(SAMPLE) --seed $(SEED) -n $(WORKERS)

# COMPILE: the backend of torch.compile for what tests compile; no: it is called.
DEVICE ?= cuda
COMPILE ?= no
TORCH = $(shell $(BIN)/python -c 'import torch; print("v" + torch.__version__.partition("+")[0])')
upstream-flex: CLONE := $(CURDIR)/build/engines/pytorch
upstream-flex: $(STAMP)
	mkdir -p $(dir $(CLONE))
	test -d $(CLONE) || git clone --quiet --depth 1 --branch $(TORCH) --filter blob:none --sparse https://github.com/pytorch/pytorch $(CLONE)
	test -d $(CLONE)/test/inductor || git -C $(CLONE) sparse-checkout set test/inductor
	test -d $(CLONE)/site || $(BIN)/python -m pip install --quiet --target $(CLONE)/site --no-deps expecttest
	PYTHONPATH=$(CLONE)/site $(BIN)/python engines/run_upstream.py --suite flex --tests $(CLONE)/test --sample $(SAMPLE) --seed $(SEED) \
	  --device $(DEVICE) --compile $(COMPILE) -n $(WORKERS)

upstream-flash: CLONE := $(CURDIR)/build/engines/flash-attention
upstream-flash: $(STAMP)
	mkdir -p $(dir $(CLONE))
	test -d $(CLONE) || git clone --quiet --depth 1 https://github.com/Dao-AILab/flash-attention $(CLONE)
	$(BIN)/python -m pip install --quiet --target $(CLONE)/site --no-deps einops
	PYTHONPATH=$(CLONE)/site $(BIN)/python engines/run_upstream.py --suite flash_attn --tests $(CLONE) --sample $(SAMPLE) --seed $(SEED) \
	  --device $(DEVICE) -n $(WORKERS)

venv: $(STAMP)

$(STAMP): pyproject.toml constraints-dev.txt .ci/venv
	.ci/venv "$(PYTHON)" "$(VENV)"
	@touch $@

ci:
	PYTHON="$(PYTHON)" VENV="$(VENV)" .ci/run

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find templates/include -name '*.h' -o -name '*.cuh' | xargs -P $(WORKERS) -n 8 $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	find templates/include -name '*.h' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build dist jit_cache/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

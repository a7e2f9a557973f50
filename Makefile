# Everything a contributor runs. Each target makes the environment it needs; nothing is installed outside this folder.
#   make demo          train a small model with token rounding, on any machine, in a few minutes
#   make test          the tests, here and (core tests) on the oldest Transformers we support
#   make lint          ruff, check and format; mypy
#   make test-gpu      the GPU tests, on a GPU
#   make bench         GPU benchmarks
# A machine without CUDA saves a large download with PyTorch's CPU build:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3 || command -v python)
PIP_FLAGS ?=
WORKERS ?= 2
GPU_WORKERS ?= 6
ARGS ?=

VENV := .venv
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
# not on the oldest Transformers: kernels and functions on tensors, which call nothing of it; packaging; benchmarks; and,
# by the marker `newest`, what shows torch, DeepSpeed or an example at work where another test has shown Transformers
ONLY_NEWEST := tests/kernels tests/quantization/test_packed_layer.py tests/quantization/test_packed_weight.py \
	tests/test_bad_input.py tests/test_balance_benchmark.py tests/test_dispatch.py tests/test_functional.py tests/test_low_rank.py \
	tests/test_packaging.py tests/test_quality_benchmark.py tests/test_routing.py tests/test_training_benchmark.py
OLDEST_TESTS ?= tests $(ONLY_NEWEST:%=--ignore=%)
RUN := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-newest test-oldest test-gpu lint format bench wheel clean

demo: $(VENV)/.installed
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m sonicmoe_hf demo $(ARGS)

test: test-newest test-oldest

test-newest: $(VENV)/.installed
	$(RUN) $(VENV)/bin/python $(PYTEST) $(ARGS)

test-oldest: $(OLDEST)/.installed
	$(RUN) $(OLDEST)/bin/python $(PYTEST) -m "not gpu and not newest" $(OLDEST_TESTS) $(ARGS)

# Most of it is compiling, on the CPU, so more processes help; LOCAL_RANK=1 keeps each from beginning further ones.
TEST_GPU := LOCAL_RANK=1 $(VENV)/bin/python -m pytest -q -rs tests/kernels $(ARGS)
test-gpu: $(VENV)/.installed
	$(TEST_GPU) -m "gpu and not large" -n $(GPU_WORKERS) --dist worksteal
	$(TEST_GPU) -m "gpu and large"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m mypy

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/moe_layer.py $(ARGS)

wheel: $(VENV)/.installed
	$(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OLDEST) build dist outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An environment is up to date when its stamp is newer than what it was made from.
%/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: none found; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit(f"Python 3.10 or newer is needed: this is {v}; set PYTHON=/path/to/python3")'
	test -x $*/bin/python || $(PYTHON) -m venv $*
	if [ $* = $(OLDEST) ]; then sed 's/^transformers==.*/transformers==$(OLDEST_TRANSFORMERS)/; /^huggingface-hub==/d' constraints.txt; \
	  else cat constraints.txt; fi > $*/constraints.txt
	$*/bin/python -m pip install --quiet $(PIP_FLAGS) -c $*/constraints.txt -e '.[test]'
	touch $@

# Everything a contributor runs. Each target makes the environment it needs; nothing is installed outside this folder.
#   make demo          train a small model with token rounding, on any machine, in a few minutes
#   make test          the tests, with the versions of constraints.txt
#   make test-slow     the rest of them: what compiles for long, and the benchmarks' own
#   make test-oldest   those of make test that other packages' versions can change (tests/helpers/stacks.py), with the oldest
#                      versions we support, on Python 3.10
#   make test-newest   the same with the newest
#   make test-serving  what vLLM computes, on a CPU, of what we write for it; downloads 1 GB into an environment of its own
#   make mutants       whether the tests see small wrong changes of the source: tests/mutants
#   make facts      which of our tables of facts about other packages were read in older versions of them
#   make lint          ruff, check and format; mypy; import-linter; zizmor
#   make test-gpu      the GPU tests, on a GPU
#   make bench         GPU benchmarks of one layer; names what has become slower than the CSV says of the same card
#   make wheel         the wheel, in ./dist; make check-wheel tries it in an empty environment; make dist: the sdist too
#   make docs          the documents and the reference of the public API as a site, in ./site; every link is checked
# A machine without CUDA saves a large download with PyTorch's CPU build:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3 || command -v python)
# Python 3.10, of the system or of pyenv, or else PYTHON
OLDEST_PYTHON ?= $(shell for python in python3.10 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.10.*/bin/python3.10 "$(PYTHON)"; \
	do "$$python" -c pass 2>/dev/null && { command -v "$$python"; break; }; done)
PIP_FLAGS ?=
WORKERS ?= 2
GPU_WORKERS ?= 6
ARGS ?=

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
SERVING := .venv-serving
RUN := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-oldest test-newest test-serving mutants facts test-gpu lint format bench docs wheel dist check-wheel owner clean

demo: $(VENV)/.installed
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m sonicmoe_hf demo $(ARGS)

test: $(VENV)/.installed
	$(RUN) $(VENV)/bin/python $(PYTEST) -m "not gpu and not serving and not slow" $(ARGS)

test-slow: $(VENV)/.installed
	$(RUN) $(VENV)/bin/python $(PYTEST) -m "not gpu and not serving and slow" $(ARGS)

test-oldest: $(OLDEST)/.installed
	$(RUN) $(OLDEST)/bin/python $(PYTEST) -m "not gpu and not serving and not pinned and not slow" $(or $(ARGS),--versions oldest)

test-newest: $(NEWEST)/.installed
	$(RUN) $(NEWEST)/bin/python $(PYTEST) -m "not gpu and not serving and not pinned and not slow" $(or $(ARGS),--versions newest)

test-serving: $(SERVING)/.installed
	$(RUN) $(SERVING)/bin/python -m pytest -q -rs -m serving tests/serving $(ARGS)

facts: $(VENV)/.installed
	PYTHONPATH=.:tests $(VENV)/bin/python -m helpers.facts

mutants: $(VENV)/.installed
	$(RUN) PYTHONPATH=tests $(VENV)/bin/python -m mutants $(ARGS)

# Most of it is compiling, on the CPU, so more processes help; SLURM_LOCALID=1 keeps each from beginning further ones, as any
# launcher's rank but the first does. LOCAL_RANK would have accelerate look for the other ranks.
GPU_TESTS := tests/kernels tests/attention tests/streaming tests/compiling/test_cuda_graphs.py tests/patching/test_context_parallel.py
TEST_GPU := SLURM_LOCALID=1 $(VENV)/bin/python -m pytest -q -rs $(GPU_TESTS) $(ARGS)
test-gpu: $(VENV)/.installed
	$(TEST_GPU) -m "gpu and not large" -n $(GPU_WORKERS) --dist worksteal
	$(TEST_GPU) -m "gpu and large"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/zizmor --quiet --offline .github

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.layer.moe_layer $(ARGS)

docs: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build $(ARGS)

wheel: $(VENV)/.installed
	$(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist .

dist: $(VENV)/.installed
	rm -rf dist
	$(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist .
	$(VENV)/bin/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"

check-wheel:
	PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/check_wheel.sh

# the files with the repository's address
OWNED := README.md CITATION.cff mkdocs.yml pyproject.toml examples/quickstart.ipynb examples/qwen3_30b_24gb.ipynb

owner:
	@test -n "$(NAME)" || { echo "name the owner: make owner NAME=acme"; exit 1; }
	sed -i.bak -E -e 's#(github(\.com)?)/[^/ ]+/sonicmoe-hf#\1/$(NAME)/sonicmoe-hf#g' -e 's#, with its account in the place of `OWNER`##' $(OWNED)
	rm $(addsuffix .bak,$(OWNED))

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(SERVING) build dist site outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# An environment is up to date when its stamp is newer than what it was made from. Of its 20,000 modules those that are
# imported are compiled, then: pip would spend most of a minute on the others.
$(VENV)/.installed: CONSTRAINTS := constraints.txt
$(OLDEST)/.installed: CONSTRAINTS := .ci/oldest.txt
$(OLDEST)/.installed: PYTHON := $(OLDEST_PYTHON)
$(NEWEST)/.installed: CONSTRAINTS := .ci/newest.txt
%/.installed: pyproject.toml setup.py constraints.txt .ci/oldest.txt .ci/newest.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: none found; set PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit(f"Python 3.10 or newer is needed: this is {v}; set PYTHON=/path/to/python3")'
	test -x $*/bin/python || "$(PYTHON)" -m venv $*
	$*/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[test]'
	touch $@

# vLLM's wheel for CPUs wants builds of torchvision, torchaudio and torchcodec that may not fit its torch, and fails on them.
# tests/serving/vllm_on_cpu is installed from a copy, since pip builds beside its sources.
$(SERVING)/.installed: pyproject.toml setup.py .ci/serving.txt $(wildcard tests/serving/vllm_on_cpu/*)
	test -x $(SERVING)/bin/python || "$(PYTHON)" -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) -r .ci/serving.txt
	$(SERVING)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cp -r tests/serving/vllm_on_cpu $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --no-deps --no-build-isolation $(SERVING)/vllm_on_cpu -e .
	touch $@

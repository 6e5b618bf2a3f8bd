# `make demo` and `make test` make their own environment, from nothing. Everything else assumes no more than they do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRITON_VENV := .venv-triton
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
CACHE ?= $(HOME)/.cache/firstlight

.PHONY: demo test test-fast test-slow test-kernels test-hosts accuracy lint docs format clean help

help:  ## What there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

demo: $(VENV)/run.stamp  ## Serve SmolLM2-135M-Instruct and ask it two questions
	$(BIN)/python examples/demo.py "$$($(BIN)/python examples/fetch_smollm2.py --cache $(CACHE))"

test: lint test-fast  ## Linter, type checker and all tests but the slow ones

test-fast: $(VENV)/dev.stamp  ## The tests alone, without the slow ones
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: $(VENV)/dev.stamp  ## Checks that take minutes: fault injection, soak, real weights
	$(BIN)/python -m pytest -m slow
	$(BIN)/python benchmarks/mutations.py

# The interpreter needs an older numpy than everything else, so triton gets an environment of its own over the first one.
$(TRITON_VENV)/stamp: $(VENV)/dev.stamp
	$(PYTHON) -m venv $(TRITON_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(TRITON_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	$(TRITON_VENV)/bin/python -m pip install --quiet --no-deps triton==3.6.0 'numpy==2.3.*'
	touch $@

test-kernels: $(TRITON_VENV)/stamp  ## Triton kernels under the interpreter, and compiled for NVIDIA and AMD
	PYTHONPATH=src:tests $(TRITON_VENV)/bin/python -m pytest tests/interpreted -n 2 --dist worksteal

# A host wants versions of its own: it is installed once, beside $(CACHE), and each checkout has a small environment over it.
$(VLLM_VENV)/stamp: pyproject.toml benchmarks/install_vllm.sh scripts/over_host.sh
	bash benchmarks/install_vllm.sh $(CACHE)-vllm
	bash scripts/over_host.sh $(CACHE)-vllm $(VLLM_VENV)
	touch $@

$(SGLANG_VENV)/stamp: pyproject.toml scripts/install_sglang.sh scripts/over_host.sh
	bash scripts/install_sglang.sh $(CACHE)-sglang
	bash scripts/over_host.sh $(CACHE)-sglang $(SGLANG_VENV) tests/hosts/sglang_cpu_platform
	touch $@

test-hosts: $(VLLM_VENV)/stamp $(SGLANG_VENV)/stamp  ## Our models inside real vLLM and SGLang, on the CPU
	$(VLLM_VENV)/bin/python -m pytest tests/hosts
	$(SGLANG_VENV)/bin/python -m pytest tests/hosts

accuracy: $(VENV)/dev.stamp  ## Predictions against published measurements: every error, and the means that must not get worse
	$(BIN)/python -m benchmarks.accuracy

lint: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp  ## Regenerate the generated parts of docs/
	$(BIN)/python scripts/generate_docs.py

clean:  ## Remove the environment and caches in this directory
	rm -rf $(VENV) $(TRITON_VENV) $(VLLM_VENV) $(SGLANG_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

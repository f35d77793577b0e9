# `make demo` and `make test` are all one needs: both first build .venv, from nothing but a Python.

PYTHONS := python3.11 python3.12 python3.13 python3
PY := .venv/bin/python
STAMP := .venv/.installed
# Megatron needs Python 3.12 and some 5 GB; its environment outlives a clone.
PYTHONS_312 := python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12)
MEGATRON_ENV ?= $(HOME)/.cache/megatron_lw/megatron-core-0.19.2
MEGATRON_PY := $(MEGATRON_ENV)/bin/python
# Its Python alone, for tests of the adapter (tests/te_stub.py). It has a folder of its own, off the
# path: without its kernels `import transformer_engine` fails, and would where it is only tried.
TRANSFORMER_ENGINE := transformer-engine==2.20.2

.PHONY: setup demo test test-megatron megatron-page fuzz mutants lint bench gpu-check clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# A candidate may exist and not run (version managers leave such), or lack venv: each is tried.
# A .venv that runs is kept, so that after a changed requirement only the difference is installed.
$(STAMP): requirements-dev.txt pyproject.toml setup.py
	@if $(PY) -c '' >/dev/null 2>&1; then exit 0; fi; \
	for python in $(PYTHONS); do \
		if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then \
			echo "building .venv with $$python"; exec $$python -m venv --clear .venv; \
		fi; \
	done; \
	echo "none of $(PYTHONS) is a Python >= 3.11 with venv; install one" >&2; exit 1
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv/te $(TRANSFORMER_ENGINE)
	@touch $@

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
		--nproc-per-node 2 examples/pretrain_gpt.py

test: $(STAMP)
	$(PY) -m pytest

# The real megatron-core as client, and emerging-optimizers as oracle. Without a Python 3.12 it
# fails, and says so.
test-megatron:
	@if ! cmp -s requirements-megatron.txt $(MEGATRON_ENV)/installed.txt; then \
		found=; for python in $(PYTHONS_312); do \
			if $$python -c 'import ensurepip, venv' >/dev/null 2>&1; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "NO PYTHON 3.12 WITH venv: TESTS WITH MEGATRON AND EMERGING-OPTIMIZERS DID NOT RUN" >&2; \
			exit 1; \
		fi; \
		echo "building $(MEGATRON_ENV) with $$found"; \
		$$found -m venv --clear $(MEGATRON_ENV) && \
		$(MEGATRON_PY) -m pip install --quiet --disable-pip-version-check \
			-r requirements-megatron.txt && \
		cp requirements-megatron.txt $(MEGATRON_ENV)/installed.txt; \
	fi
	TRANSFORMER_ENGINE_FOLDER=$(CURDIR)/.venv/te $(MEGATRON_PY) -m pytest tests/megatron tests/emerging

# After a change of requirements-megatron.txt and `make test-megatron`: the page's tables, anew.
megatron-page:
	$(MEGATRON_PY) -m tests.megatron.settings_page

# 200 process groups killed while they save, then 2,000 random parallel runs: an hour. A
# printed seed repeats them: make fuzz SEED=...
fuzz: SEED ?= $(shell date +%s)
fuzz: $(STAMP)
	rm -rf out/fuzz && mkdir -p out/fuzz
	$(PY) -m tests.killed_saves out/fuzz --rounds 200 --seed $(SEED)
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest tests/properties/test_parallel_properties.py \
		tests/properties/test_checkpoint_properties.py \
		--hypothesis-seed=$(SEED)

# Faults put in on purpose, one at a time, each of which a test must find; about ten minutes.
mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m tests.mutants

lint: $(STAMP)
	@failed=0; \
	for check in "ruff check ." "ruff format --check ." mypy codespell_lib; do \
		echo "$(PY) -m $$check"; $(PY) -m $$check || failed=1; \
	done; \
	exit $$failed

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) benchmarks/step.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/parallel.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/muon.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/checkpoint.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/fp8.py

# For a machine with a GPU, whose own Python has torch; nothing is installed there. docs/gpu.md
gpu-check:
	$(if $(wildcard $(PY)),$(PY),python3) benchmarks/gpu_check.py

clean:
	rm -rf .venv build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

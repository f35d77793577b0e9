# `make demo` and `make test` are all one needs: both first build .venv, from nothing but a Python.

PYTHONS := python3.11 python3.12 python3.13 python3
PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: setup demo test lint bench clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# A candidate may exist and not run (version managers leave such), or lack venv: each is tried.
$(STAMP): requirements-dev.txt pyproject.toml setup.py
	@set -e; found=; \
	for python in $(PYTHONS); do \
		if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "no Python >= 3.11 with venv among: $(PYTHONS); install one" >&2; exit 1; \
	fi; \
	echo "building .venv with $$found"; \
	$$found -m venv --clear .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
		--nproc-per-node 2 examples/pretrain_gpt.py

test: $(STAMP)
	$(PY) -m pytest

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) benchmarks/step.py

clean:
	rm -rf .venv build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

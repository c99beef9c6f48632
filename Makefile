# setup: .venv with the `commhooks` command in it; quick when it is there.  demo, test, lint and bench call it themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: setup tools horovod demo test lint bench clean

setup: tools $(READY)

# A stamp newer than what it was made from: a change of the dependencies installs again, nothing else does.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,demo,lint]'
	touch $@

# The lab needs `ip` and `tc` (Debian's iproute2).  Without root nothing is installed: the lab says what is missing.
tools:
	@if command -v ip >/dev/null && command -v tc >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; \
	else echo "note: ip and tc not found; the lab needs the package iproute2"; fi

# Horovod's last release doesn't build against current PyTorch; patches/ mends that.  Only the tests need it.
horovod: setup
	@if [ -x patches/build-horovod ]; then $(BIN)/python patches/build-horovod; fi

demo: setup
	$(BIN)/python examples/demo.py

test: setup horovod
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: setup
	$(BIN)/commhooks bench all --quick

clean:
	rm -rf .venv build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

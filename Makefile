# SPDX-License-Identifier: Apache-2.0
# For GNU Make 3.81, POSIX sh and BSD tools.
#
# PYTHON chooses the interpreter (the newest of python3.14 ... python3.11 without it), CC the compiler,
# VENV another virtual environment: make test VENV=/tmp/venv-3.12 PYTHON=python3.12
# ORDER=random shuffles the tests; the run names the seed, and SEED=n repeats it: make test ORDER=random SEED=3
# JOBS: processes that share the tests, file by file; by default one for each core, 4 at most.
PYTHON ?=
VENV ?= .venv
PROMPT ?= Once upon a time
ORDER ?=
SEED ?=
JOBS ?= auto

PY := $(VENV)/bin/python
BASE := $(VENV)/.lily-base$(subst /,-,$(PYTHON))
DEV := $(VENV)/.lily-dev$(subst /,-,$(PYTHON))
# The order alone: what tests draw is seeded by the tests.
SHUFFLED = $(if $(filter random,$(ORDER)),-p randomly --randomly-dont-reset-seed $(if $(SEED),--randomly-seed=$(SEED)))
SHARED = -n $(JOBS) --maxprocesses=4 --dist loadfile
C_FILES = $(shell find $(wildcard lily objc_shim shaders tests bench) \( -name '*.[chm]' -o -name '*.metal' \) \
	! -path 'lily/data/*' ! -name kernel_params.h | LC_ALL=C sort)

.NOTPARALLEL:
.PHONY: help setup build compile run test test-full mutants lint format bench sdist wheel wheel-macos metallib clean

help:
	@echo 'make run        build Lily and write a story with the embedded model'
	@echo 'make test       run the tests'
	@echo 'make test-full  run the tests, the slow and large ones included'
	@echo 'make mutants    plant faults in a copy, one at a time: do the tests notice? (tools/mutants/README.md)'
	@echo 'make lint       ruff, mypy, clang-format, layers of imports, docstrings'
	@echo 'make format     let ruff and clang-format rewrite the sources'
	@echo 'make bench      run the benchmarks (bench/README.md)'
	@echo 'make build      compile the device libraries and the Cython modules in place'
	@echo 'make setup      create $(VENV) with all development tools'
	@echo 'make wheel      build the sdist and from it the wheel, into dist/'
	@echo 'make wheel-macos  build the wheel for macOS on Apple silicon, on any machine'
	@echo 'make metallib   compile the shaders ahead of time, on a Mac with Xcode; not needed'
	@echo 'make clean      remove what was built; $(VENV) stays'

setup: $(DEV) build

$(BASE): requirements/base.txt tools/setup.sh
	@sh tools/setup.sh '$(VENV)' requirements/base.txt '$(PYTHON)'
	@touch $@

$(DEV): requirements/dev.txt tools/setup.sh
	@sh tools/setup.sh '$(VENV)' requirements/dev.txt '$(PYTHON)'
	@touch $@

build: compile $(VENV)/bin/lily

compile: $(BASE)
	@$(PY) setup.py --quiet build_ext --inplace

# The package's metadata and the `lily` command; the package itself stays where it is. Installed in this mode it is a
# folder on the path, which type checkers and editors find too; otherwise a hook of the import system, which only Python
# runs.
$(VENV)/bin/lily: pyproject.toml | compile
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat --editable .
	@touch $@

run: build
	@$(PY) -m lily generate --ignore-chat-template --echo -p '$(PROMPT)' --seed 1 --max-tokens 120

test: $(DEV) build
	@$(PY) -m pytest --durations=15 $(SHARED) $(SHUFFLED)

test-full: $(DEV) build
	@$(PY) -m pytest --durations=15 -m '' $(SHARED) $(SHUFFLED)

# MUTANTS: its options, for instance make mutants MUTANTS='--only text --list'
mutants: $(DEV) build
	@$(PY) -m tools.mutants $(MUTANTS)

# Every tool has its say, even after another has failed.
lint: $(DEV)
	@status=0; \
	$(PY) -m ruff check . || status=1; \
	$(PY) -m ruff format --check . || status=1; \
	$(PY) -m mypy || status=1; \
	$(PY) tools/layers.py || status=1; \
	$(PY) tools/docstrings.py || status=1; \
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES) || status=1; \
	test $$status = 0 || echo 'make lint: failed; `make format` fixes what is only layout' >&2; \
	exit $$status

format: $(DEV)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(C_FILES)

bench: $(DEV) build
	@$(PY) -m pytest bench --benchmark-enable -m ''

sdist: $(DEV)
	@$(PY) -m build --no-isolation --sdist

wheel: $(DEV)
	@$(PY) -m build --no-isolation

wheel-macos: $(DEV)
	@$(PY) tools/wheel_macos.py

metallib: $(BASE)
	@$(PY) tools/metallib.py

clean:
	rm -rf build dist lily_engine.egg-info lily/data
	rm -f lily/metal/*.metallib lily/metal/metallib.stamp
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find lily -name '_*.c' -exec rm -f {} +
	find lily tests bench \( -name '*.so' -o -name '*.dylib' -o -name '*.pyc' \) -exec rm -f {} +

# `make demo` and `make test` need git, make and a Python 3; everything else is installed here.
PYTHON ?= python3
UV := .tools/bin/uv
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=

.PHONY: help install demo test lint lock clean

help:
	@echo "make demo [ARGS='--steps 2']   install, then run the GRPO demo (report in runs/)"
	@echo "make test                      install, then run all tests that need no GPU"
	@echo "make lint                      ruff check and format check"
	@echo "make lock                      resolve the pinned versions again"

$(UV):
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet uv==0.13.9

# --no-deps: the lock already holds the whole closure, with the overrides of pyproject.toml applied.
$(STAMP): $(UV) locks/cpu.txt pyproject.toml
	$(UV) venv --quiet --allow-existing --python 3.12 .venv
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r locks/cpu.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/vllm-consistent demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lock: $(UV)
	$(UV) pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate \
	  --python-version 3.12 --extra cpu --extra dev --extra verl-core --extra megatron --custom-compile-command "make lock" \
	  pyproject.toml --output-file locks/cpu.txt

clean:
	rm -rf .venv .tools build *.egg-info

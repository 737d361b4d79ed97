# make demo    set up, fetch SmolLM2-135M, run a real agent conversation at five settings
# make test    set up, fetch the two small test models, run the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a plain `torch` may pull gigabytes of GPU libraries: make setup TORCH=torch where they are wanted
TORCH ?= torch==2.13.0
MODELS := $(or $(KVSTRATA_MODELS),models)

.PHONY: setup demo test lint format bench clean
setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,eval]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps bfcl-eval
	touch $@

# quick when the model is there and whole
model-%: setup
	$(BIN)/python -m kvstrata.eval.models $* $(MODELS)/$*

demo: setup model-smollm2
	$(BIN)/kvstrata demo --model $(MODELS)/smollm2

test: setup model-smollm2 model-qwen05
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist report.html

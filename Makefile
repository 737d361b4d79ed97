# make demo    set up, fetch SmolLM2-135M, run a real agent conversation at six settings
# make test    set up, fetch the two small test models, run the tests
# make test-vllm    the vLLM plugin's tests, in an environment of their own (5.6 GB)
PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
# a plain `torch` may pull gigabytes of GPU libraries: make setup TORCH=torch where they are wanted
TORCH ?= torch==2.13.0
MODELS := $(or $(KVSTRATA_MODELS),models)

.PHONY: setup demo test setup-vllm test-vllm lint format bench clean
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

setup-vllm: $(VENV_VLLM)/.stamp

$(VENV_VLLM)/.stamp: tests/adapters/vllm/requirements.txt pyproject.toml
	@ldconfig -p | grep -q libnuma.so || { echo "libnuma is missing: apt-get install libnuma1" >&2; exit 1; }
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV_VLLM)/bin/uv pip install --quiet --python $(VENV_VLLM)/bin/python --no-deps -r $< -e .
	touch $@

test-vllm: setup-vllm model-smollm2
	$(VENV_VLLM)/bin/python -m pytest --durations=15 tests/adapters/vllm $(ARGS)

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
	rm -rf $(VENV) $(VENV_VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist report.html

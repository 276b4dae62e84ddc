# Every target sets up what it needs in $(VENV); nothing has to be installed by hand but Python 3.11 or later, make and git.
PYTHON ?= python3
VENV ?= .venv
OUT ?= paper_figs
BIN := $(VENV)/bin

.PHONY: figure figures intervals timeline published published-blind safety joint train fidelity gpu-check test check wide lint benchmark benchmark-runtime docs clean

figure: $(VENV)/simulator
	$(BIN)/python experiments/fig_throughput.py --out $(OUT)

figures: $(VENV)/simulator
	for script in experiments/fig_*.py; do $(BIN)/python $$script --out $(OUT) || exit 1; done

intervals: $(VENV)/simulator
	$(BIN)/python experiments/intervals.py --out $(OUT)

timeline: $(VENV)/simulator
	$(BIN)/autohete simulate --workload gpt-4b --policy autohete --gantt $(OUT)/timeline.png

published: $(VENV)/simulator
	$(BIN)/python experiments/published.py --out $(OUT)

published-blind: $(VENV)/simulator
	$(BIN)/python experiments/published_blind.py $(if $(NUMBERS),--numbers $(NUMBERS))

safety: $(VENV)/simulator
	$(BIN)/python experiments/safety.py --out $(OUT)

joint: $(VENV)/simulator
	$(BIN)/python experiments/joint.py --out $(OUT)

train: $(VENV)/dev
	$(BIN)/autohete train

gpu-check: $(VENV)/dev
	$(BIN)/python experiments/gpu_check.py

fidelity: $(VENV)/dev
	$(BIN)/python experiments/fidelity.py --out $(OUT)

test: $(VENV)/dev
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=15

check: lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

wide: $(VENV)/dev
	AUTOHETE_HYPOTHESIS=wide $(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/dev
	$(BIN)/python benchmarks/simulator.py

benchmark-runtime: $(VENV)/dev
	$(BIN)/python benchmarks/runtime.py

docs: $(VENV)/docs
	$(BIN)/python -m sphinx -c docs --fresh-env --fail-on-warning --quiet . build/docs
	@echo "built build/docs/index.html"

clean:
	rm -rf $(VENV) build

$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/simulator: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/dev: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/simulator

$(VENV)/docs: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@ $(VENV)/simulator

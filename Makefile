# Everything below needs Python >= 3.11 and make; each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup quickstart test test-all test-ray test-room test-gpu gpu-suite check fix messages reference bench clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "batchinfer needs Python 3.11 or newer; name one with: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(READY)
	$(BIN)/batchinfer doctor --measure || echo "The report will lack MFU and MBU: no peaks were measured."
	$(BIN)/batchinfer run jobs/quickstart/job.yaml
	$(BIN)/python jobs/quickstart/score.py

# Each of two processes takes half of the tests and, once done, of what is left to the other: what the tests of a file
# share is made once, as a rule, and not in both.
ON_TWO := -n 2 --dist worksteal

test: $(READY)
	BATCHINFER_TEST_DURATIONS=build/test-durations.json $(BIN)/python -m pytest $(ON_TWO) -m "not slow and not ray"
	$(BIN)/python -m pytest $(RAY_TESTS) -m "ray and not slow"

# Jobs on a Ray cluster, which these tests start on this machine. No other test runs meanwhile: Ray takes a busy node for a lost one.
RAY_TESTS := tests/batchinfer/test_ray_job.py

test-ray: $(READY)
	$(BIN)/python -m pytest $(RAY_TESTS)

# The operators also run as on Arm CPUs where Debian's gcc-aarch64-linux-gnu and qemu-user are installed. PART=2/8: the
# second of eight parts of about the same length.
PART ?=

test-all: $(READY)
	BATCHINFER_TEST_EVERYTHING=1 BATCHINFER_TEST_PART=$(PART) $(BIN)/python -m pytest $(ON_TWO) -m "not ray"

# The tests of a room, and of the whole jobs that import it: make test-room ROOM=engine
OF_ROOM = $(wildcard tests/batchinfer/$(ROOM)/ tests/$(ROOM)/)

test-room: $(READY)
	@test -n "$(and $(ROOM),$(OF_ROOM))" || { echo "There is no room '$(ROOM)'; write ROOM=engine"; exit 2; }
	$(BIN)/python -m pytest $(ON_TWO) -m "not slow" $(OF_ROOM) \
		$(shell grep -lE "batchinfer[._]$(ROOM)\b" tests/batchinfer/test_*.py)

# On a GPU: with the Python whose torch finds one, so that a machine that has torch needs no virtual environment, else
# with ours. .typing has the folder kernels/ under its import name, as an installation would.
FINDS_GPU := import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no GPU here")
ON_GPU = python=$(PYTHON); if ! $(PYTHON) -c '$(FINDS_GPU)' 2>/dev/null; \
	then $(MAKE) --no-print-directory setup && python=$(BIN)/python; fi && export PYTHONPATH=$(CURDIR):$(CURDIR)/.typing &&
GPU_TESTS := tests/kernels/gpu tests/batchinfer/models/ops/test_triton_ops.py tests/batchinfer/models/ops/test_experts.py tests/batchinfer/engine/test_triton_engine.py tests/batchinfer/engine/test_stored_fp8.py tests/batchinfer/engine/test_stored_integers.py tests/batchinfer/engine/test_stored_mxfp4.py tests/batchinfer/engine/test_adapters.py tests/batchinfer/engine/test_calibrating_gpu.py tests/batchinfer/engine/test_trees_on_gpu.py
# What make gpu-suite is told more, e.g. SUITE='--out /tmp/records --minutes 5'
SUITE ?=

test-gpu:
	@$(ON_GPU) $$python -c '$(FINDS_GPU)' && $$python -m pytest $(GPU_TESTS)

gpu-suite:
	@$(ON_GPU) $$python -m tests.gpu_suite $(SUITE)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py tests/test_house_rules.py tests/test_docs.py tests/test_packaging.py tests/test_prose.py

# All messages of errors, log lines and progress, with their places
messages: $(READY)
	@$(BIN)/python -m tests.messages

# Tables of docs/job-file.md, docs/report.md and docs/cli.md from the code
reference: $(READY)
	$(BIN)/python -m tests.reference

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/batchinfer bench
	$(BIN)/python -m pytest -m slow -s tests/batchinfer/test_speed.py

clean:
	rm -rf $(VENV) build results .batchinfer-* .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

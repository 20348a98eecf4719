# `make demo` and `make test` set up what they use. OMP_NUM_THREADS=1 makes runs side by side faster.
PYTHON ?= python3
BIN := .venv/bin
CPU := $(BIN)/accelerate launch --quiet --config_file configs/accelerate/cpu.yaml
GRID := $(CPU) -m finetune.grid
export PIP_CONSTRAINT := $(CURDIR)/configs/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
.PHONY: help setup demo test test-slow test-oldest test-hf docs pair pair-smoke encodings performer comparisons-smoke bench bench-gpu clean

setup: .venv/installed ## make .venv with everything that the other targets use
.venv/installed: pyproject.toml configs/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: PYTHON must be 3.11 or later, got %d.%d; make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "setting up .venv (about 2 minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
demo: setup ## pretrain a small RoFormer and a BERT of equal size, fine-tune both, compare them
	@echo '5 minutes on 2 CPU cores after set-up, up to 12 without bfloat16 instructions: pretrains a RoFormer and a BERT on documentation of installed packages (1 to 4 minutes each),' \
	  'then fine-tunes them, with and without pretraining, to tell a sentence from its words backwards (8 runs of 5 to 13 seconds)'
	$(CPU) train/pretrain.py
	$(CPU) train/pretrain.py --model.type bert --run.name demo-bert
	$(BIN)/python -m finetune.demo_tasks --output runs/demo-tasks
	$(GRID) --config configs/glue/demo.yaml --glue_dir runs/demo-tasks --tasks '[demo-order]' \
	  --models '[runs/demo-roformer/model,runs/demo-bert/model]' --controls true --workers 2 --output runs/demo/results.jsonl
	$(BIN)/python -m train.analysis.loss_curves --runs '[runs/demo-roformer, runs/demo-bert]' --output runs/demo/curves.png --title 'Demo: documentation of installed packages'
	$(BIN)/python -m finetune.report runs/demo/results.jsonl
	@echo 'Loss curves: runs/demo/curves.png. Models: runs/demo-roformer/model, runs/demo-bert/model. Next: your own text, docs/guides/pretrain.md'
test: setup ## lint, types and the fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' --numprocesses 2 --dist loadfile
test-slow: setup ## tests that take minutes or need the data in ROFORMER_DATA
	$(BIN)/python -m pytest -m 'slow and not gpu'
test-oldest: .venv-oldest/installed ## tests of model and loops with the oldest supported transformers
	.venv-oldest/bin/python -m pytest -m 'not slow and not gpu' tests/roformer tests/train/loop tests/train/test_pretrain.py tests/finetune/test_glue.py
.venv-oldest/installed: pyproject.toml configs/constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(transformers|huggingface_hub)==' configs/constraints.txt > .venv-oldest/constraints.txt
	PIP_CONSTRAINT=.venv-oldest/constraints.txt .venv-oldest/bin/pip install --quiet 'transformers==5.17.0' 'huggingface_hub<2' --editable '.[dev]'
	@touch $@
HF := $(shell sed -n 's/^transformers==//p' configs/constraints.txt)
test-hf: .hf-tests/$(HF) ## transformers' own model tests (of its source distribution) on the classes of this package
	PYTHONPATH=$< $(BIN)/python tests/project/hf_model_tests.py
.hf-tests/$(HF): | setup
	rm -rf $@.part && mkdir -p $@.part/transformers_tests
	$(BIN)/pip download --quiet --no-deps --no-build-isolation --no-binary transformers --dest $@.part transformers==$(HF)
	tar -xzf $@.part/transformers-$(HF).tar.gz -C $@.part/transformers_tests --strip-components=2 transformers-$(HF)/tests
	rm $@.part/*.tar.gz && mv $@.part $@
docs: setup ## the documentation in site/; a broken link is an error
	$(BIN)/mkdocs build --quiet --strict
	$(BIN)/python -m pytest tests/project/test_docs.py
pair: setup ## RoFormer and BERT over pretraining seeds, on GLUE: TEXT='FOLDER ...' GLUE=FOLDER (hours)
	PATH=$(BIN):$$PATH configs/sweeps/pair.sh small $(GLUE) $(TEXT)
pair-smoke: setup ## every step of `make pair` in 2 to 4 minutes: tiny models, installed documentation, the demo's task
	$(BIN)/python -m finetune.demo_tasks --output runs/pair-tiny/tasks --train_rows 300 --validation_rows 100
	PATH=$(BIN):$$PATH TASKS=demo-order configs/sweeps/pair.sh tiny runs/pair-tiny/tasks
encodings performer: setup ## position encodings; linear attention with and without RoPE: TEXT='FOLDER ...' (an hour)
	PATH=$(BIN):$$PATH configs/sweeps/$@.sh $(or $(SCALE),small) $(TEXT)
comparisons-smoke: setup ## every step of both in a minute: tiny models, installed documentation
	$(MAKE) encodings performer SCALE=tiny TEXT=
bench: setup ## speed of training and inference against transformers' models on this CPU (ARGS='--parts [defaults]' for one table)
	$(BIN)/python -m train.bench $(ARGS)
GPU_PYTHON ?= $(PYTHON)
bench-gpu: ## the same on an NVIDIA GPU; GPU_PYTHON needs torch for CUDA, transformers and accelerate
	$(GPU_PYTHON) -m train.bench --device cuda --output runs/bench-gpu.json $(ARGS)
help: ## what each target does
	@awk -F ':.*## ' '/^[a-z-]+( [a-z-]+)?:.*## / {printf "%-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
clean: ## remove environments and caches; runs/ and results/ stay
	rm -rf .venv .venv-oldest .hf-tests .pytest_cache .ruff_cache .mypy_cache build dist site *.egg-info
	find roformer train finetune tests -name __pycache__ -prune -exec rm -rf {} +

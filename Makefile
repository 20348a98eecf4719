# Everything a newcomer needs: `make demo` and `make test` set up what they use.
PYTHON ?= python3
BIN := .venv/bin
CPU := $(BIN)/accelerate launch --quiet --config_file configs/accelerate/cpu.yaml
DEMO_MODELS := [runs/demo-roformer/model,runs/demo-bert/model]
DEMO_TASKS := [demo-order,demo-next,demo-overlap]
export PIP_CONSTRAINT := $(CURDIR)/configs/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help setup demo test test-slow test-oldest test-hf lint type check smoke pretrain glue report pair pair-glue \
  pair-smoke encodings performer comparisons-smoke bench bench-gpu clean

setup: .venv/installed ## make .venv with everything that the other targets use
.venv/installed: pyproject.toml configs/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: PYTHON must be 3.11 or later, got %d.%d; make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "setting up .venv (about 2 minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup ## pretrain a small RoFormer and a BERT of equal size, fine-tune both, compare them
	@mkdir -p runs
	$(CPU) train/pretrain.py
	$(CPU) train/pretrain.py --model.type bert --run.name demo-bert
	$(BIN)/python -m finetune.demo_tasks --output runs/demo-tasks
	$(CPU) -m finetune.grid --config configs/glue/demo.yaml --glue_dir runs/demo-tasks \
	  --models '$(DEMO_MODELS)' --tasks '$(DEMO_TASKS)' --random_control true \
	  --output runs/demo/results.jsonl
	$(BIN)/python -m train.analysis.loss_curves --runs '[runs/demo-roformer, runs/demo-bert]' \
	  --output runs/demo/curves.png --title 'Demo: documentation of installed packages'
	$(BIN)/python -m finetune.report runs/demo/results.jsonl
	@echo 'report: runs/demo/report.html (also .md .tex .json .csv); pictures: runs/demo/report-demo-*.png,' \
	  'runs/demo/curves.png; models: runs/demo-roformer/model, runs/demo-bert/model. Next: your own text, see "Pretrain" in README.md'

test: setup ## lint, types and the fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' --numprocesses 2 --dist loadfile

test-slow: setup ## tests that take minutes or need the data named by ROFORMER_DATA
	$(BIN)/python -m pytest -m 'slow and not gpu'

test-oldest: .venv-oldest/installed ## model and loop tests with the oldest supported transformers
	.venv-oldest/bin/python -m pytest -m 'not slow and not gpu' \
	  tests/roformer tests/train/loop/test_objective.py tests/train/test_pretrain.py tests/finetune/test_glue.py
.venv-oldest/installed: pyproject.toml configs/constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(transformers|huggingface_hub)==' configs/constraints.txt > .venv-oldest/constraints.txt
	PIP_CONSTRAINT=.venv-oldest/constraints.txt .venv-oldest/bin/pip install --quiet \
	  'transformers==5.17.0' 'huggingface_hub<2' --editable '.[dev]'
	@touch $@

# the common tests of transformers' source distribution, importable as a package
HF_VERSION := $(shell sed -n 's/^transformers==//p' configs/constraints.txt)
HF_TESTS := .hf-tests/$(HF_VERSION)
test-hf: setup $(HF_TESTS) ## transformers' own tests of a model, over our classes
	PYTHONPATH=$(HF_TESTS) $(BIN)/python tests/project/hf_model_tests.py
$(HF_TESTS): | setup
	rm -rf $@.part && mkdir -p $@.part/transformers_tests
	$(BIN)/pip download --quiet --no-deps --no-build-isolation --no-binary transformers \
	  --dest $@.part transformers==$(HF_VERSION)
	tar -xzf $@.part/transformers-$(HF_VERSION).tar.gz -C $@.part/transformers_tests \
	  --strip-components=2 transformers-$(HF_VERSION)/tests
	rm $@.part/*.tar.gz && mv $@.part $@

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## mypy
	$(BIN)/mypy

check: lint type test ## lint, types and tests, one after the other

SMOKE := --optim.tokens 100000 --optim.warmup_steps 5
smoke: setup ## every step of the demo in a minute: two tiny models, one task
	$(CPU) train/pretrain.py --run.name smoke-roformer --run.folder runs/smoke $(SMOKE)
	$(CPU) train/pretrain.py --run.name smoke-bert --run.folder runs/smoke $(SMOKE) --model.type bert
	$(BIN)/python -m finetune.demo_tasks --output runs/smoke/tasks --train_rows 200 --validation_rows 100
	$(CPU) -m finetune.grid --config configs/glue/demo.yaml --glue_dir runs/smoke/tasks --tasks '[demo-order]' \
	  --models '[runs/smoke/smoke-roformer/model, runs/smoke/smoke-bert/model]' --output runs/smoke/results.jsonl
	$(BIN)/python -m finetune.report runs/smoke/results.jsonl

# make pretrain ARGS='--config configs/pretrain/small.yaml --config configs/model/roformer-small.yaml ...'
pretrain: setup ## pretrain a model with ARGS='--config ...'
	$(CPU) train/pretrain.py $(ARGS)

# make glue ARGS='--model runs/NAME/model --task rte --glue_dir FOLDER'
glue: setup ## fine-tune a model on one task with ARGS='--model ... --task ...'
	$(CPU) finetune/glue.py $(ARGS)

# make report RESULTS=runs/demo/results.jsonl
RESULTS ?= results.jsonl
report: setup ## tables and figures of RESULTS=FILE
	$(BIN)/python -m finetune.report $(RESULTS)

# Text for the runs below. TEXT: folders of train* files; held out: validation* of the first.
comma := ,
list = [$(subst $() ,$(comma),$(strip $(1)))]
TRAIN = $(if $(TEXT),$(call list,$(foreach folder,$(TEXT),$(wildcard $(folder)/train*))),embedded)
HELD_OUT = $(if $(TEXT),$(call list,$(wildcard $(firstword $(TEXT))/validation*)),embedded)
NO_TEXT = $(error TEXT must name folders of train* and validation* files, got none; add TEXT=FOLDER)
# of a configuration, a folder and a name ending in the seed
LENGTH = $(shell sed -n 's/^  length: *//p' configs/pretrain/$(1).yaml)
AS_NAMED = --config configs/pretrain/$(1).yaml --run.folder runs/$(1) --run.name $(2) \
	  --run.seed $(lastword $(subst -, ,$(2))) --corpus.train '$(TRAIN)' --corpus.validation '$(HELD_OUT)'
FINISH = @test -e $(@D)/model/tokenizer_config.json || { echo 'not finished: the same command continues'; exit 1; }; touch $@

# The controlled pair: RoFormer and BERT with the same text, order, masks and seeds. Run again, it continues; -j2 makes
# two runs at once. GLUE: folders of tasks.
#   make -j2 pair TEXT=wikipedia GLUE='glue glue_reduced' OMP_NUM_THREADS=1
PAIR ?= small# the scale: configs/pretrain/pair-$(PAIR).yaml and configs/model/*-$(PAIR).yaml
PAIR_SEEDS ?= 0 1
PAIR_LAUNCH ?= $(CPU)
PAIR_READY ?= setup
PAIR_DIR := runs/pair-$(PAIR)
PAIR_RUNS := $(foreach seed,$(PAIR_SEEDS),roformer-$(seed) bert-$(seed))
PAIR_WORKERS ?= 2
PAIR_TASKS = $(notdir $(patsubst %/,%,$(wildcard $(1)/*/)))
PAIR_ONCE ?=# tasks that get one seed of three epochs, where time is short: sst2 has 67,349 rows
PAIR_LONG := rte stsb# get ten epochs, the others three, as in ELECTRA's code (Clark et al. 2020)
PAIR_ALL := --models '$(call list,$(PAIR_RUNS:%=$(PAIR_DIR)/%/model))'
# random weights do not depend on pretraining, so those of the first seed serve for all
PAIR_CONTROL := --models '$(call list,$(wordlist 1,2,$(PAIR_RUNS:%=$(PAIR_DIR)/%/model)))' --random_control true
# of a folder, tasks and options, if there are tasks
tune = $(if $(strip $(2)),$(PAIR_LAUNCH) -m finetune.grid --config configs/glue/pair-$(PAIR).yaml --glue_dir $(1) \
	  --workers $(PAIR_WORKERS) --output $(PAIR_DIR)/results.jsonl --tasks '$(call list,$(2))' $(3) &&)
both = $(call tune,$(1),$(2),$(3) $(PAIR_ALL)) $(call tune,$(1),$(2),$(3) $(PAIR_CONTROL))
pair: pair-glue $(PAIR_DIR)/lengths.json ## RoFormer and BERT over pretraining seeds: TEXT=FOLDER GLUE=FOLDER
	$(BIN)/python -m train.analysis.loss_curves --runs '$(call list,$(PAIR_RUNS:%=$(PAIR_DIR)/%))' --output $(PAIR_DIR)/curves.png
	$(BIN)/python -m finetune.report $(PAIR_DIR)/results.jsonl
$(PAIR_DIR)/%/finished: | $(PAIR_READY)
	$(if $(TEXT)$(filter tiny,$(PAIR)),,$(NO_TEXT))
	$(PAIR_LAUNCH) train/pretrain.py --config configs/model/$(firstword $(subst -, ,$*))-$(PAIR).yaml \
	  $(call AS_NAMED,pair-$(PAIR),$*)
	$(FINISH)
pair-glue: $(PAIR_RUNS:%=$(PAIR_DIR)/%/finished)
	$(if $(GLUE),,$(error GLUE must name folders of tasks; make pair GLUE=FOLDER))
	$(foreach folder,$(GLUE), \
	  $(call both,$(folder),$(filter-out ax $(PAIR_ONCE) $(PAIR_LONG),$(call PAIR_TASKS,$(folder))),) \
	  $(call both,$(folder),$(filter $(filter-out $(PAIR_ONCE),$(PAIR_LONG)),$(call PAIR_TASKS,$(folder))),--epochs 10) \
	  $(call both,$(folder),$(filter $(PAIR_ONCE),$(call PAIR_TASKS,$(folder))),--seeds '$(call list,0)')) true
$(PAIR_DIR)/lengths.json: $(PAIR_RUNS:%=$(PAIR_DIR)/%/finished)
	$(PAIR_LAUNCH) -m train.analysis.length_extrapolation --models '$(call list,$(PAIR_RUNS:%=$(PAIR_DIR)/%/model))' \
	  --corpus.validation '$(HELD_OUT)' --trained $(call LENGTH,pair-$(PAIR)) --output $(PAIR_DIR)/lengths.png

pair-smoke: setup ## every step of `make pair` in 2 to 4 minutes: tiny models, installed documentation, demo tasks
	$(BIN)/python -m finetune.demo_tasks --output runs/pair-tiny/tasks --train_rows 300 --validation_rows 100
	$(MAKE) pair PAIR=tiny TEXT= GLUE=runs/pair-tiny/tasks

# What RoPE is compared with, on one small model each, seed by seed: the encodings of position; and Performer's linear
# attention with and without RoPE, and softmax. -j2 and running again work as for the pair.
#   make -j2 encodings performer TEXT=wikipedia OMP_NUM_THREADS=1
SCALE ?= small# configs/pretrain/encodings-$(SCALE).yaml and performer-$(SCALE).yaml
ENCODINGS ?= rope learned sinusoidal transformer_xl t5 alibi none
ENCODING_SEEDS ?= 0 1 2
ENCODING_LENGTHS = $(foreach factor,1 2 4 8,$(shell expr $(factor) '*' $(call LENGTH,encodings-$(SCALE))))
PERFORMERS ?= favor_rope favor_none softmax_rope# attention, encoding
PERFORMER_SEEDS ?= 0 1
ENCODING_DIR := runs/encodings-$(SCALE)
PERFORMER_DIR := runs/performer-$(SCALE)
ENCODING_RUNS := $(foreach seed,$(ENCODING_SEEDS),$(ENCODINGS:%=$(ENCODING_DIR)/%-$(seed)))
PERFORMER_RUNS := $(foreach seed,$(PERFORMER_SEEDS),$(PERFORMERS:%=$(PERFORMER_DIR)/%-$(seed)))
encodings: $(ENCODING_RUNS:%=%/finished) ## seven encodings of position on one small model: TEXT=FOLDER
	$(CPU) -m train.analysis.length_extrapolation --models '$(call list,$(ENCODING_RUNS:%=%/model))' --corpus.validation '$(HELD_OUT)' \
	  --lengths '$(call list,$(ENCODING_LENGTHS))' --trained $(firstword $(ENCODING_LENGTHS)) \
	  --output $(ENCODING_DIR)/lengths.png
	$(BIN)/python -m train.analysis.compare_runs --runs '$(call list,$(ENCODING_RUNS))' --lengths $(ENCODING_DIR)/lengths.json \
	  --output $(ENCODING_DIR)/contest.png
$(ENCODING_DIR)/%/finished: | setup
	$(if $(TEXT)$(filter tiny,$(SCALE)),,$(NO_TEXT))
	$(CPU) train/pretrain.py $(call AS_NAMED,encodings-$(SCALE),$*) \
	  --model.config.position_encoding $(firstword $(subst -, ,$*))
	$(FINISH)
performer: $(PERFORMER_RUNS:%=%/finished) ## linear attention with and without RoPE: TEXT=FOLDER
	$(BIN)/python -m train.analysis.compare_runs --runs '$(call list,$(PERFORMER_RUNS))' --output $(PERFORMER_DIR)/contest.png \
	  --title 'Next byte: linear attention with and without RoPE, and softmax'
$(PERFORMER_DIR)/%/finished: | setup
	$(if $(TEXT)$(filter tiny,$(SCALE)),,$(NO_TEXT))
	$(CPU) train/pretrain.py $(call AS_NAMED,performer-$(SCALE),$*) \
	  --model.config.position_encoding $(word 2,$(subst -, ,$(subst _, ,$*))) \
	  --model.config.linear_attention $(patsubst softmax,null,$(firstword $(subst _, ,$*)))
	$(FINISH)

comparisons-smoke: setup ## every step of both in a minute: tiny models, installed documentation
	$(MAKE) encodings performer SCALE=tiny TEXT= ENCODINGS='rope learned' ENCODING_SEEDS='0 1' PERFORMER_SEEDS=0

bench: setup ## training and inference against transformers' models on this CPU: 8 to 15 minutes
	$(BIN)/python -m train.bench

# GPU_PYTHON must have torch for CUDA, transformers and accelerate; datasets and evaluate are not needed
GPU_PYTHON ?= $(PYTHON)
bench-gpu: ## the same on an NVIDIA GPU, with texts of its own
	$(GPU_PYTHON) -m train.bench --device cuda --output results/bench-gpu.json

help: ## what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

clean: ## remove environments and caches; runs/ and results/ stay
	rm -rf .venv .venv-oldest .hf-tests .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find roformer train finetune tests -name __pycache__ -prune -exec rm -rf {} +

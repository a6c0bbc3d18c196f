# The front door. `make help` shows the targets. Variables such as ITERS=50 reach a target's tool through the
# environment; tools/spec/settings.py is the table of them, and one that a target does not use is refused.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# In the kit's image KIT_PYTHON is the image's own Python, and there is nothing to set up.
VENV_PYTHON := $(or $(KIT_PYTHON),.venv/bin/python)
export PYTHONPATH := $(CURDIR)

no_variables = $(if $(strip $(MAKEOVERRIDES)),$(error 'make $@' takes no variables; leave $(MAKEOVERRIDES) out))

help: ## the targets that matter, with the variables that they take most often
	@awk -F ' ##! ' '/^[a-z].*##! / {sub(/:.*/, "", $$1); printf "  %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  help-all    every target and every variable"
	@echo "Such as: make train-tp2-gpt2-tiny-2cpu ITERS=50"
help-all: ## every target and every variable
	@awk 'BEGIN {FS = ":.*##!? "} /^[a-z][a-zA-Z0-9%<>_-]*:.*##!? / {printf "  %-27s %s\n", $$1, $$2} \
		/^## / {print substr($$0, 4)}' $(firstword $(MAKEFILE_LIST)) tools/spec/settings.mk

## First steps
setup: ## .venv from requirements.txt, with hashes; other targets do it too
	@tools/setup.sh
demo: ##! six strategies of gpt2-tiny on CPU ranks, and a report
parity: ##! every strategy's losses agree: MEGATRON_LM= VERIFY=
doctor: ##! what this machine can do, and fixes: LAUNCHER=slurm
	@tools/doctor.sh
list: ##! models, strategies, and what this machine can run

## Data
prepare-ds-sample: ## owt-ds/sample, from text that comes with Python
prepare-ds-openwebtext-10k: ## the published data set, from the hub
prepare-ds: ##! owt-ds/NAME from your own text: INPUT=file.jsonl NAME=name
install-dependencies: setup ## the published name of setup
setup-deepspeed: setup ## the package that BACKEND=deepspeed needs, into .venv
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-deepspeed.txt
setup-hf: setup ## transformers, the reference of verify-hf, into .venv
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-hf.txt
setup-bridge: setup ## .venv-bridge, which checks and reads recipes of Megatron-Bridge
	@$(no_variables)tools/bridge.sh

## Training, on one machine or several
train-%: setup ##! <strategy>-<model>-<N>cpu or gpu: ITERS= DATA= EXTRA= …
	@$(VENV_PYTHON) -m tools.launch make $@
trace-%: setup ## one iteration of such a run as a picture, and for Perfetto
	@$(VENV_PYTHON) -m tools.launch make $@
verify-%: setup ##! its first wrong tensor, if any: DTYPE= REFERENCE= EXTRA_B=
	@$(VENV_PYTHON) -m tools.launch make $@
verify-matrix: ## features × layouts, each pair verified; resumable: FEATURES= LAYOUTS= MINUTES=
verify-bf16: ## what bf16 costs: 200 losses of each layout in fp32 and bf16: LAYOUTS=
verify-fuzz: ## configurations drawn by SEED=, verified, and shrunk if wrong: MINUTES=30
status: ##! all runs: queued, running, ended; loss, time left
stop: ## end a run that is on, from any terminal: RUN=runs/…
resume: ##! a run from its newest checkpoint: RUN=runs/… STRATEGY=pp2
soak: ## HOURS= of a STRATEGY=: what grows or slows, and losses after random kills
image: ## build the container for RUNTIME=docker
reproduce: ## the six published runs on two GPUs, and a report; resumable

## Weights from and to Hugging Face, without a GPU
import-hf: ##! a folder of GPT-2 or Llama as a model of this kit: HF= NAME=
export-hf: ## the weights of a run as such a folder: RUN=runs/… TO=folder
verify-hf: ## seven layouts and 20 steps against transformers: HF= or random models; make setup-hf

## Recipes of Megatron-Bridge and nemo-run
export-recipe: ## a run, or a target, as their Python files: RUN=runs/… TO=bridge or nemo
import-recipe: ## such a recipe, or Bridge's YAML, as a model and a target: FILE= NAME= GPUS=

## Comparisons from the same weights, batches and schedule
compare-zero: ## data parallel, pipeline and ZeRO-1/2/3, as in the DeepSpeed report; GPU= predicts them
compare-backends: ## Megatron, plain PyTorch, DeepSpeed, bare forward and backward
compare-moe: ## Megatron and plain PyTorch on experts, as in the Blueberry experiment
compare-pipelines: ## Megatron's, GPipe, 1F1B, interleaved, PipeDream with and without flushes
sweep: ## MODELS × STRATEGIES × BACKENDS × DEVICES; resumable

## Planning, without devices
advise: ## what to use, second, avoid, why, what would change it: MODEL= GPUS= GPU=
plan: ##! layouts, ranked, with reasons: MODEL= GPUS= GPU= …
dryrun: ## Megatron's own iteration without devices: MODEL= TP= PP= DP= …
calibrate: ## the planner's constants measured on this machine, kept: DEVICES=2cpu
validate: ## every public reading predicted, and by how much it is missed; READINGS= for your own
audit: ## what a table of performance figures contradicts in itself: TABLE=
schedules: ## GPipe, 1F1B, interleaved and PipeDream: PP=4 MICROBATCHES=8 VPP=2

## Results
report: ##! all runs, or anybody's logs: LOGS="a.log b.log"
explain: ##! why runs differ, in sentences from their ledgers: RUN=

## Working on the kit
test: setup ## the default suite
	@$(no_variables)$(VENV_PYTHON) -m pytest -q
test-slow: setup ## the long tests
	@$(VENV_PYTHON) -m pytest -q -m slow
bench: bench-scrape bench-plan bench-preprocess bench-ledger ## all benchmarks below
bench-scrape: ## lines a second that the report reads from a log
bench-plan: ## the search and a report of 100 runs, beside a plain loop
bench-preprocess: ## text a second, against Hugging Face tokenizers and Megatron's script
bench-ledger: ## what the ledger costs, switched on every other iteration
bench-verify: setup ## planted bugs that verify must find, and healthy layouts that it must not call wrong
	@$(no_variables)$(MAKE) --no-print-directory prepare-ds-sample && $(VENV_PYTHON) -m tests.verify.bench
bench-auto: ## the planner's times and choice here, against what is measured: MODELS= DEVICES=
bench-gpu: ## Megatron on one GPU without Transformer Engine, in under 9 minutes
loss-curve: ## 200 losses with FUSED=, compared with those of another seed
docs: setup ## site/: the documentation, and the planner in the browser
	@$(no_variables)tools/docs.sh
lint: setup ## ruff, mypy, shellcheck, hadolint, import-linter
	@$(no_variables)tools/lint.sh
clean: ## remove runs, reports and caches; keeps .venv and owt-ds
	@$(no_variables)[ ! -d runs ] || ! $(VENV_PYTHON) -c 'import msgspec, psutil, rich' 2>/dev/null || \
		RUNS= $(VENV_PYTHON) -m tools.launch idle
	@rm -rf runs reports .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

CALLS := export-recipe import-recipe demo parity list prepare-ds-sample prepare-ds-openwebtext-10k prepare-ds status stop resume image reproduce \
	import-hf export-hf verify-hf compare-zero compare-backends compare-moe compare-pipelines sweep soak plan advise calibrate dryrun schedules validate audit report explain \
	bench-scrape bench-plan bench-preprocess bench-ledger bench-gpu bench-auto loss-curve \
	verify-matrix verify-fuzz verify-bf16
$(CALLS): setup
	@$(VENV_PYTHON) -m tools.launch make $@

.PHONY: help help-all setup docs doctor install-dependencies setup-deepspeed setup-hf setup-bridge test test-slow bench bench-verify lint clean $(CALLS)

# Anything else: a target's name that is nearly right gets the near ones.
.DEFAULT:
	@tools/setup.sh && $(VENV_PYTHON) -m tools.launch make $@

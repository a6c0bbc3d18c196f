# The front door. `make help` shows the targets. Variables such as ITERS=50 reach a target's tool through the
# environment; tools/spec/settings.py is the table of them, and one that a target does not use is refused.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# In the kit's image KIT_PYTHON is the image's own Python, and there is nothing to set up.
VENV_PYTHON := $(or $(KIT_PYTHON),.venv/bin/python)
export PYTHONPATH := $(CURDIR)

no_variables = $(if $(strip $(MAKEOVERRIDES)),$(error 'make $@' takes no variables; leave $(MAKEOVERRIDES) out))

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-zA-Z0-9%<>_-]*:.*## / {printf "  %-36s %s\n", $$1, $$2} \
		/^## / {print substr($$0, 4)}' $(firstword $(MAKEFILE_LIST)) tools/spec/settings.mk

## First steps
setup: ## .venv with everything in requirements.txt, each file by its hash (other targets do it by themselves)
	@tools/setup.sh
demo: ## six strategies of gpt2-tiny on CPU ranks, and a report that compares them
parity: ## the demo as a check: fails unless every strategy's losses agree with baseline's
doctor: ## what this machine can do, and how to fix what is missing; LAUNCHER=slurm NODES=2 compares nodes
	@tools/doctor.sh
list: ## models with their true sizes, strategies, what this machine can run

## Data
prepare-ds-sample: ## owt-ds/sample: text that every Python ships, as GPT-2 tokens
prepare-ds-openwebtext-10k: ## the published data set, from the hub; HF_ENDPOINT= names a mirror
prepare-ds: ## owt-ds/NAME from your own text: INPUT=file.jsonl NAME=name
install-dependencies: setup ## the published name of setup
setup-deepspeed: setup ## the package that BACKEND=deepspeed needs, into .venv
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-deepspeed.txt

## Training, on one machine or several
train-%: setup ## train-<strategy>-<model>-<N>cpu or -<N>gpu; train-auto-<model>-<N>… plans, says why, trains
	@$(VENV_PYTHON) -m tools.launch make $@
trace-%: setup ## one iteration of such a run as a picture, and for Perfetto (6 iterations are trained)
	@$(VENV_PYTHON) -m tools.launch make $@
status: ## all runs: queued, running or ended, iteration, loss, time left; asks Slurm where it is
resume: ## continue from the newest whole checkpoint: RUN=runs/…, in another layout with STRATEGY=pp2
image: ## docker/Dockerfile for RUNTIME=docker: NVIDIA's PyTorch with the paired Megatron-LM
reproduce: ## the six published runs on two GPUs, then the report; repeating continues

## On equal terms: the same weights, batches and schedule (MODEL=gpt2-tiny unless you name one)
compare-zero: ## data parallel, pipeline and ZeRO-1/2/3, as the tables of write-up 002
compare-backends: ## Megatron, plain PyTorch and DeepSpeed, against bare forward and backward
compare-moe: ## Megatron and plain PyTorch on a mixture of experts, with write-up 000's table (MODEL=moe-tiny)
sweep: ## sizes against devices, continues when repeated: MODELS= STRATEGIES= BACKENDS= DEVICES="1cpu 2cpu" REPEATS= NAME=

## Before buying anything
plan: ## every legal way to split MODEL on GPUS, ranked, with reasons; VERIFY=3 SVG=file JSON=1 CALIBRATION=file
dryrun: ## Megatron's own iteration without devices: MODEL= TP= PP= DP= CP= EP= VPP= SP=1 ZERO1=1 RANKS=first,middle,last
schedules: ## GPipe, 1F1B, interleaved and PipeDream beside one another: PP=4 MICROBATCHES=8 VPP=2 SVG=file JSON=1

## Looking at results
report: ## all runs, or LOGS="a.log b.log"; BASELINE=reports/old compares, STRICT=1 fails on a finding
explain: ## which cost, why uneven, why less, what if: sentences from all runs' ledgers, or RUNS="a b"

## Working on the kit
test: setup ## the default suite
	@$(no_variables)$(VENV_PYTHON) -m pytest -q
test-slow: setup ## the long tests
	@$(VENV_PYTHON) -m pytest -q -m slow
bench: bench-scrape bench-preprocess bench-ledger ## all benchmarks below
bench-scrape: ## lines a second that the report reads from a log
bench-preprocess: ## text a second, beside Hugging Face tokenizers and MEGATRON_LM's own script
bench-ledger: ## what the ledger costs: every other iteration on (TARGET= ITERS=)
bench-gpu: ## Megatron on one GPU without Transformer Engine, in under 9 minutes: ONLY= BUDGET= DRY_RUN=1
loss-curve: ## 200 losses with FUSED= beside those of another seed: TARGET= (gpt2-tiny on a CPU) EXTRA=--bf16 ITERS=
lint: setup ## ruff, mypy, shellcheck, hadolint, import-linter
	@$(no_variables)tools/lint.sh
clean: ## remove runs, reports and caches; keeps .venv and owt-ds
	@$(no_variables)rm -rf runs reports .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

CALLS := demo parity list prepare-ds-sample prepare-ds-openwebtext-10k prepare-ds status resume image reproduce \
	compare-zero compare-backends compare-moe sweep plan dryrun schedules report explain \
	bench-scrape bench-preprocess bench-ledger bench-gpu loss-curve
$(CALLS): setup
	@$(VENV_PYTHON) -m tools.launch make $@

.PHONY: help setup doctor install-dependencies setup-deepspeed test test-slow bench lint clean $(CALLS)

# Anything else: a target's name that is nearly right gets the near ones.
.DEFAULT:
	@tools/setup.sh && $(VENV_PYTHON) -m tools.launch make $@

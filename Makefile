# The front door. `make help` shows the targets; every recipe is one call.
# Variables such as ITERS=50 reach the tools through the environment (see `make help`).
SHELL := /bin/bash
.DEFAULT_GOAL := help
# In the kit's image KIT_PYTHON is the image's own Python, and there is nothing to set up.
VENV_PYTHON := $(or $(KIT_PYTHON),.venv/bin/python)
export PYTHONPATH := $(CURDIR)

# What CALIBRATE=1 measured on this machine's own devices, if it did.
MEASURED = $(wildcard runs/calibration-$(shell uname -n)-$(or $(GPU),h200).json)

.PHONY: help setup list demo parity plan dryrun schedules report explain bench bench-scrape bench-preprocess \
	bench-ledger bench-gpu loss-curve prepare-ds prepare-ds-sample prepare-ds-openwebtext-10k install-dependencies \
	doctor image status reproduce resume setup-deepspeed compare-zero compare-backends compare-moe sweep test test-slow lint clean

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-zA-Z0-9%<>_-]*:.*## / {printf "  %-36s %s\n", $$1, $$2} \
		/^## / {print substr($$0, 4)}' $(firstword $(MAKEFILE_LIST))

## First steps
setup: ## .venv with everything in requirements.txt, each file by its hash (other targets do it by themselves)
	@tools/setup.sh

demo: setup ## six strategies of gpt2-tiny on CPU ranks, and a report that compares them
	@$(VENV_PYTHON) -m tools.launch demo

parity: setup ## the demo as a check: fails unless every strategy's losses agree with baseline's
	@$(VENV_PYTHON) -m tools.launch parity

doctor: ## what this machine can do, and how to mend what is missing; LAUNCHER=slurm NODES=2 compares nodes
	@tools/doctor.sh

list: setup ## models with their true sizes, strategies, what this machine can run
	@$(VENV_PYTHON) -m tools.launch list

## Data
prepare-ds-sample: setup ## owt-ds/sample: text that every Python ships, as GPT-2 tokens
	@$(VENV_PYTHON) -m tools.launch module tools.preprocess sample --output-prefix owt-ds/sample

prepare-ds-openwebtext-10k: setup ## the published data set, from the hub; HF_ENDPOINT= names a mirror
	@$(VENV_PYTHON) -m tools.launch module tools.launch.openwebtext

prepare-ds: setup ## owt-ds/NAME from your own text: INPUT=file.jsonl NAME=name
	@$(VENV_PYTHON) -m tools.launch module tools.preprocess --input $(or $(INPUT),$(error Say which text: make prepare-ds INPUT=file.jsonl NAME=name)) \
		--output-prefix owt-ds/$(or $(NAME),$(error Say its name: make prepare-ds INPUT=file.jsonl NAME=name)) \
		--tokenizer $(or $(TOKENIZER),gpt2) --append-eod

install-dependencies: setup ## the published name of setup

setup-deepspeed: setup ## the package that BACKEND=deepspeed needs, into .venv
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-deepspeed.txt

## Training: ITERS= MICRO_BATCH= GLOBAL_BATCH= SEED= DROPOUT= OPTIMIZER=adamw|muon DATA= EXTRA="--flags" REPEATS= DRY_RUN=1 WANDB=1
## On GPUs also RUNTIME=docker or host (docker where it can be had), IMAGE=<NGC tag>
## Without Transformer Engine FUSED=norm,adamw,… (see examples/gpt3/bare_gpu.md); SHARE_GPU=1 puts all ranks on one GPU
## BACKEND=native (plain PyTorch) or deepspeed trains the same model on the same batches without Megatron
## NET=1gbps (any rate up to 10gbps) joins the two halves of CPU ranks by a shaped link; needs root
## Several machines: NNODES=2 NODE_RANK=0 MASTER_ADDR=<of node 0> on each host, or LAUNCHER=slurm NODES=2 with
## SLURM_PARTITION= SLURM_ACCOUNT= SLURM_QOS= SLURM_TIME= SLURM_LINES="--sbatch-options" SLURM_IMAGE= SLURM_SITE=site.slurm
status: setup ## all runs: queued, running or ended, iteration, loss, time left; asks Slurm where it is
	@$(VENV_PYTHON) -m tools.launch status
## SAVE_EVERY=10 saves every 10 iterations; KEEP=2 stay, ASYNC_SAVE=1 saves beside training on GPUs; HANG_TIMEOUT=900 seconds
resume: setup ## go on from the newest whole checkpoint: RUN=runs/…, in another layout with STRATEGY=pp2
	@$(VENV_PYTHON) -m tools.launch resume $(or $(RUN),$(error Say which run: make resume RUN=runs/…)) \
		$(if $(STRATEGY),--strategy $(STRATEGY))

image: setup ## docker/Dockerfile for RUNTIME=docker: NVIDIA's PyTorch with the paired Megatron-LM
	@$(VENV_PYTHON) -m tools.launch image

reproduce: setup ## the six published runs on two GPUs, then the report; repeating goes on
	@$(VENV_PYTHON) -m tools.launch reproduce

train-%: setup ## train-<strategy>-<model>-<N>cpu or -<N>gpu
	@$(VENV_PYTHON) -m tools.launch target $@

trace-%: setup ## one iteration of such a run as a picture, and for Perfetto (6 iterations are trained)
	@ITERS=$(or $(ITERS),6) $(VENV_PYTHON) -m tools.launch target train-$* \
		$(if $(DRY_RUN),,&& $(VENV_PYTHON) -m tools.report trace $* $(if $(RUNS),--runs $(RUNS)))

## On equal terms: the same weights, batches and schedule (MODEL=gpt2-tiny unless you name one)
compare-zero: setup ## data parallel, pipeline and ZeRO-1/2/3, as the tables of write-up 002
	@$(VENV_PYTHON) -m tools.launch compare zero --model $(or $(MODEL),gpt2-tiny)

compare-backends: setup ## Megatron, plain PyTorch and DeepSpeed, against bare forward and backward
	@$(VENV_PYTHON) -m tools.launch compare backends --model $(or $(MODEL),gpt2-tiny)

compare-moe: setup ## Megatron and plain PyTorch on a mixture of experts, with write-up 000's table (MODEL=moe-tiny)
	@$(VENV_PYTHON) -m tools.launch compare moe --model $(or $(MODEL),moe-tiny)

sweep: setup ## sizes against devices, goes on when repeated: MODELS= STRATEGIES= BACKENDS= DEVICES="1cpu 2cpu" REPEATS= NAME=
	@$(VENV_PYTHON) -m tools.launch sweep

train-auto-%: setup ## train-auto-<model>-<N>cpu or gpu: plans, says why, trains; CALIBRATE=1 measures first
	@$(VENV_PYTHON) -m tools.launch target $@

## Before buying anything: MODEL= GPUS= GPU= GLOBAL_BATCH= NODES= GPUS_PER_NODE= INTRA= INTER= SEQ= DTYPE= TOKENS=
plan: setup ## every legal way to split MODEL on GPUS, ranked, with reasons; VERIFY=3 SVG=file JSON=1 CALIBRATION=file
	@$(VENV_PYTHON) -m tools.plan --model $(or $(MODEL),$(error Say what: make plan MODEL=gpt2-large GPUS=2 GPU=h200)) \
		$(if $(GPUS),--gpus $(GPUS)) $(if $(GPU),--gpu $(GPU)) $(if $(GLOBAL_BATCH),--global-batch $(GLOBAL_BATCH)) \
		$(if $(NODES),--nodes $(NODES)) $(if $(GPUS_PER_NODE),--gpus-per-node $(GPUS_PER_NODE)) \
		$(if $(INTRA),--intra $(INTRA)) $(if $(INTER),--inter $(INTER)) $(if $(SEQ),--seq $(SEQ)) \
		$(if $(DTYPE),--dtype $(DTYPE)) $(if $(TOKENS),--tokens $(TOKENS)) $(if $(VERIFY),--verify $(VERIFY)) \
		$(if $(SVG),--svg $(SVG)) $(if $(filter 1,$(JSON)),--json) $(addprefix --calibration ,$(or $(CALIBRATION),$(MEASURED)))

dryrun: setup ## Megatron's own iteration without devices: MODEL= TP= PP= DP= CP= EP= VPP= SP=1 ZERO1=1 RANKS=first,middle,last
	@$(VENV_PYTHON) -m tools.plan dryrun --model $(or $(MODEL),$(error Say what: make dryrun MODEL=gpt3-175b TP=8 PP=16 DP=8)) \
		$(if $(TP),--tensor $(TP)) $(if $(PP),--pipeline $(PP)) $(if $(DP),--data $(DP)) $(if $(CP),--context $(CP)) \
		$(if $(EP),--expert $(EP)) $(if $(VPP),--virtual $(VPP)) $(if $(filter 1,$(SP)),--sequence-parallel) \
		$(if $(filter 1,$(ZERO1)),--distributed-optimizer) $(if $(RECOMPUTE),--recompute $(RECOMPUTE)) \
		$(if $(MICRO_BATCH),--micro-batch $(MICRO_BATCH)) $(if $(GLOBAL_BATCH),--global-batch $(GLOBAL_BATCH)) \
		$(if $(SEQ),--seq $(SEQ)) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(RANKS),--ranks $(RANKS)) $(if $(filter 1,$(JSON)),--json)

schedules: setup ## GPipe, 1F1B, interleaved and PipeDream beside one another: PP=4 MICROBATCHES=8 VPP=2 SVG=file JSON=1
	@$(VENV_PYTHON) -m tools.plan schedules $(if $(PP),--pipeline $(PP)) $(if $(MICROBATCHES),--microbatches $(MICROBATCHES)) \
		$(if $(VPP),--virtual $(VPP)) $(if $(SVG),--svg $(SVG)) $(if $(filter 1,$(JSON)),--json)

## Looking at results
report: setup ## all runs, or LOGS="a.log b.log"; BASELINE=reports/old compares, STRICT=1 fails on a finding
	@$(if $(wildcard $(or $(RUNS),runs)/*/job.json),$(VENV_PYTHON) -m tools.launch status --quiet)
	@$(VENV_PYTHON) -m tools.report build $(LOGS) $(if $(NAME),--name $(NAME)) \
		$(if $(BASELINE),--baseline $(BASELINE)) $(if $(filter 1,$(STRICT)),--strict)

explain: setup ## which cost, why uneven, why less, what if: sentences from all runs' ledgers, or RUNS="a b"
	@$(VENV_PYTHON) -m tools.report explain $(RUNS)

## Working on the kit
test: setup ## the default suite
	@$(VENV_PYTHON) -m pytest -q

test-slow: setup ## the long tests
	@$(VENV_PYTHON) -m pytest -q -m slow

bench: bench-scrape bench-preprocess bench-ledger ## all benchmarks below

bench-scrape: setup ## lines a second that the report reads from a log
	@$(VENV_PYTHON) -m tools.report bench

bench-preprocess: setup ## text a second, beside Hugging Face tokenizers and MEGATRON_LM's own script
	@$(VENV_PYTHON) -m tools.preprocess bench

bench-ledger: setup ## what the ledger costs: every other iteration on (TARGET= ITERS=)
	@$(VENV_PYTHON) -m tools.launch.bench_ledger

bench-gpu: setup ## Megatron on one GPU without Transformer Engine, in under 9 minutes: ONLY= BUDGET= DRY_RUN=1
	@$(VENV_PYTHON) -m tools.launch bench-gpu

loss-curve: setup ## 200 losses with FUSED= beside those of another seed: TARGET= (gpt2-tiny on a CPU) EXTRA=--bf16 ITERS=
	@$(VENV_PYTHON) -m tools.launch loss-curve

lint: setup ## ruff, mypy, shellcheck, hadolint, import-linter
	@tools/lint.sh

clean: ## remove runs, reports and caches; keeps .venv and owt-ds
	@rm -rf runs reports .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Anything else: a target's name that is nearly right gets the near ones.
.DEFAULT:
	@tools/setup.sh && $(VENV_PYTHON) -m tools.launch target $@

# The front door. `make help` shows the targets. Every target that is not below is a command of the table in
# src/parakit/cli/commands.py; variables such as ITERS=50 reach it through the environment, and one that it does not
# use is refused.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# In the kit's image KIT_PYTHON is the image's own Python, and there is nothing to set up.
VENV_PYTHON := $(or $(KIT_PYTHON),.venv/bin/python)
# .venv finds src/ by itself (tools/setup.sh); the image's Python is told.
$(if $(KIT_IMAGE),$(eval export PYTHONPATH := $(CURDIR)/src:$(CURDIR)))

no_variables = $(if $(strip $(MAKEOVERRIDES)),$(error 'make $@' takes no variables; leave $(MAKEOVERRIDES) out))
# TIER= of 'make test' is a variable of this file alone; tests/tiers.py says what the tiers are.
TIERS := unit ranks engine
one_tier = $(if $(filter-out TIER=%,$(MAKEOVERRIDES)),$(error 'make test' takes TIER= alone; leave $(filter-out TIER=%,$(MAKEOVERRIDES)) out))$(if \
	$(filter-out $(TIERS),$(TIER))$(word 2,$(TIER)),$(error TIER=$(TIER) is no tier of the tests; choose one of $(TIERS)))
for_host = $(if $(KIT_IMAGE),$(error 'make $@' is for the host; the kit's image has what training and reports need alone))

# The environment carries the target's name to the command: in the recipe's text the shell would run a name
# such as 'list;ls'. Make takes 'list(x)' for a member of an archive, which $% names.
%: export KIT_TARGET = $@$(if $%,($%))
%: FORCE
	@tools/setup.sh && $(VENV_PYTHON) -m parakit "$$KIT_TARGET"
FORCE Makefile: ;
# The runs of the tutorial by their published names: the shell completes 'make 446' to the whole name. They have no
# recipe of their own, so that of % is theirs.
$(shell sed -n 's/^\([0-9]*\),\([^,]*\),.*/\1-\2/p' examples/experiments/tutorial/rows.csv 2>/dev/null): FORCE

help:
	@tools/any_python.sh -m parakit.cli.help
help-all:
	@tools/any_python.sh -m parakit.cli.help all
setup install-dependencies:
	@tools/setup.sh
doctor:
	@tools/doctor.sh
setup-deepspeed setup-hf: setup-%: setup
	@$(for_host)$(VENV_PYTHON) tools/install.py requirements-$*.txt
setup-bridge: setup
	@$(for_host)$(no_variables)tools/bridge.sh
test: setup
	@$(for_host)$(one_tier)$(VENV_PYTHON) -m pytest -q $(addprefix --tier ,$(or $(TIER),unit ranks))
test-slow: setup
	@$(for_host)$(VENV_PYTHON) -m pytest -q -m slow
docs: setup
	@$(for_host)$(no_variables)tools/docs.sh
lint: setup
	@$(for_host)$(no_variables)tools/lint.sh
clean:
	@$(no_variables)[ ! -d runs ] || ! $(VENV_PYTHON) -c 'import msgspec, psutil, rich' 2>/dev/null || \
		RUNS= $(VENV_PYTHON) -m parakit idle
	@rm -rf runs reports .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: help help-all setup install-dependencies doctor setup-deepspeed setup-hf setup-bridge test test-slow docs lint clean

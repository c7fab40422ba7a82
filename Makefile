# make demo   set up .venv, train CCQ-GDN on text for some minutes, evaluate it, let it write
# make test   set up .venv, run the tests
# make lint   set up .venv, ruff and mypy
# make bench  set up .venv, time the operators on this machine, and check their accuracy
#
# PYTHON=python3.12 picks the interpreter (3.11 or later), WORKDIR where the demo's run goes.
# EXTRAS="requirements-eval.txt requirements-tpu.txt" installs lm-evaluation-harness (420 MB) and the TPU's compiler
# (690 MB, Python 3.12 or later) as well: without them their tests are skipped.
PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/ccq_gdn
JOBS ?= 2
EXTRAS ?=
BIN := $(VENV)/bin
CONFIG := configs/ccq_gdn.py

.PHONY: demo test lint bench setup clean

demo: setup
	$(BIN)/python train.py --config=$(CONFIG) --workdir=$(WORKDIR)
	$(BIN)/python eval.py --config=$(CONFIG) --workdir=$(WORKDIR)
	$(BIN)/python -m ccq_jax.generate --workdir=$(WORKDIR) --prompt='def ' --max_tokens=400
	@echo "Results: $(WORKDIR)/metrics.jsonl, $(WORKDIR)/plots, $(WORKDIR)/eval"

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist=worksteal $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m kernels.check
	$(BIN)/python -m kernels.bench

setup: $(VENV)/installed

$(VENV)/installed: requirements.txt $(EXTRAS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ccq_jax needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) cannot make virtual environments (on Debian: apt install python3-venv)."; exit 1; }
	@echo "Setting up $(VENV) (once, about a minute)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(addprefix -r ,requirements.txt $(EXTRAS))
	@touch $@

clean:
	rm -rf $(VENV) runs

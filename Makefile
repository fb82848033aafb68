# The front door. `make help` lists what there is.
#   VERSION=0.23.0   the vllm-ascend release        BASE=a3|a2|cpu|<reference>|<archive>   what to build on
#   WITHOUT=<ids>    patches left out, by comma     OFFLINE=1   no network     PLAN=1   show, don't build
#   SAMPLE=<n>       test-mutants: this many of them, the same ones for the same patches
VERSION ?= 0.23.0
BASE ?=
WITHOUT ?=
OFFLINE ?=
PLAN ?=
FORCE ?=
SAMPLE ?=
PROFILE ?= c1

SHELL := /bin/bash
.DEFAULT_GOAL := help
STRATA := .venv/bin/strata
PYTEST := .venv/bin/python -m pytest
IMAGE = strata:$(VERSION)-cpu
TREES = $(CURDIR)/.strata/trees/$(VERSION)
IMAGE_ARGUMENTS = --version '$(VERSION)' $(if $(BASE),--base '$(BASE)') $(if $(WITHOUT),--without '$(WITHOUT)') \
	$(if $(OFFLINE),--offline) $(if $(PLAN),--plan) $(if $(FORCE),--force)

.PHONY: help venv bootstrap image up down test test-fast check diff lint bench sources wheelhouse export clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv:
	@scripts/bootstrap.sh venv

bootstrap: ## the venv and a Docker engine; image and test do this by themselves
	@scripts/bootstrap.sh

image: $(if $(PLAN),venv,bootstrap) ## build the tuned image (VERSION, BASE, WITHOUT, OFFLINE=1, PLAN=1)
	@$(STRATA) image build $(IMAGE_ARGUMENTS)

up: ## serve from it (PROFILE=c1|mtp|throughput)
	docker compose --profile '$(PROFILE)' up --wait

down: ## stop serving
	docker compose --profile '*' down

check: sources ## the verdict of every patch on VERSION
	@$(STRATA) check --base '$(VERSION)' --trees '$(TREES)'

diff: sources ## what the series changes, as a unified diff
	@$(STRATA) diff --base '$(VERSION)' --trees '$(TREES)'

lint: venv ## ruff, mypy, hadolint
	.venv/bin/ruff check scripts tests
	.venv/bin/mypy
	.venv/bin/hadolint images/*/*Dockerfile

sources: venv ## the release's source trees, below .strata/trees
	@$(STRATA) base trees --version '$(VERSION)' >/dev/null

test-fast: venv ## unit tests without trees, engine or network
	$(PYTEST) -m 'not sources and not engine and not slow'

test: bootstrap sources ## everything: unit tests, patches in the image, upstream's unit tests, image, compose
	@$(STRATA) image build --version '$(VERSION)' --base cpu --keep-env $(if $(OFFLINE),--offline)
	@status=0; \
	$(MAKE) --no-print-directory --keep-going -j2 test-unit test-patches || status=1; \
	$(MAKE) --no-print-directory --keep-going test-upstream test-image test-compose || status=1; \
	exit $$status

.PHONY: test-unit test-patches test-upstream test-image test-compose
test-unit: sources ## unit tests, those on the release's real sources included
	STRATA_TREES='$(TREES)' $(PYTEST) tests/unit

test-patches: venv ## the patches against upstream's functions, inside the tuned image
	docker run --rm --init --network none --entrypoint python -e PYTHONPATH=/opt/base/stubs \
		-e HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis -v '$(CURDIR)/tests/patches:/tests/patches:ro' \
		'$(IMAGE)' -m pytest -q -p no:cacheprovider /tests/patches

test-upstream: venv ## vllm-ascend's own CPU unit tests in the base and in the tuned image, compared test by test
	STRATA_VERSION='$(VERSION)' $(PYTEST) -s tests/upstream

test-image: venv ## the finished image: layout, labels, arguments, make image's own promises
	STRATA_VERSION='$(VERSION)' STRATA_IMAGE='$(IMAGE)' $(PYTEST) tests/image

test-compose: venv ## each profile comes up, answers, and goes down
	STRATA_IMAGE='$(IMAGE)' $(PYTEST) tests/compose

.PHONY: test-mutants
test-mutants: venv ## one changed line of a patch at a time: its tests must notice (SAMPLE=n: some)
	.venv/bin/python tests/mutants/run.py --image '$(IMAGE)' --jobs "$$(nproc)" $(if $(SAMPLE),--sample '$(SAMPLE)')

bench: bootstrap sources ## times of the engine on the real sources; ratios of the patches' host side, in the image
	@$(STRATA) image build --version '$(VERSION)' --base cpu --keep-env $(if $(OFFLINE),--offline)
	@.venv/bin/python tests/bench/engine.py --trees '$(TREES)'
	@docker run --rm --init --network none --entrypoint python -e PYTHONPATH=/opt/base/stubs \
		-v '$(CURDIR)/tests:/tests:ro' '$(IMAGE)' -W ignore /tests/bench/host_effects.py

wheelhouse: bootstrap ## everything that `make image OFFLINE=1` needs, below .strata
	@$(STRATA) image wheelhouse --version '$(VERSION)' $(if $(BASE),--base '$(BASE)')

export: bootstrap ## image and compose files for another host, below dist/
	@$(STRATA) image export --version '$(VERSION)' $(if $(BASE),--base '$(BASE)')

clean: ## remove what builds leave here (.strata, dist); images stay
	rm -rf .strata dist

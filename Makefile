# Every target installs what it needs into .venv; nothing outside the checkout is changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROTOS := $(wildcard proto/sojourn/v1/*.proto)

.PHONY: demo test rules-test faults lint proto crds metrics families dashboards prometheus screenshots images bench e2e \
         format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[inference,residencyd,operator,tracing,dev]'
	touch $@

demo: $(STAMP)  ## Serve the shipped model, generate a clip through gRPC, write out/demo.mp4
	$(BIN)/python -m tools.demo

test: $(STAMP)  ## All tests, with coverage
	$(BIN)/pytest --ignore tests/faults

rules-test: $(STAMP) prometheus  ## Dashboards, rules and runbook, with Prometheus' own checks
	$(BIN)/pytest --no-cov tests/observability

faults: $(STAMP) prometheus  ## Faults made for real, each seen by its alert (root; two minutes)
	$(BIN)/pytest --no-cov tests/faults

prometheus: $(STAMP)  ## Debian's prometheus and promtool, unpacked into .cache
	$(BIN)/python -m tools.prometheus

lint: $(STAMP)  ## Format, style, types, layers, protobuf rules, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	$(BIN)/python -m tools.stubs --check
	$(BIN)/python -m tools.crds --check
	$(BIN)/python -m tools.metrics_table --check
	$(BIN)/python -m tools.families_table --check
	$(BIN)/python -m tools.dashboards --check

format: $(STAMP)  ## Format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)  ## Generate the stubs beside the .proto files
	$(BIN)/python -m tools.stubs

crds: $(STAMP)  ## Generate the CRDs of the chart and docs/custom-resources.md from the models
	$(BIN)/python -m tools.crds

IMAGE_TAG ?= dev
# Arguments of the build, such as --build-arg BASE=…; without Docker: BUILDER='buildah bud --isolation chroot'.
BUILDER ?= docker build
IMAGE_ARGS ?=
IMAGES := residencyd operator inference
images: $(IMAGES:%=image-%)  ## One image per process: localhost/sojourn-{inference,residencyd,operator}

image-%: images/%/Containerfile
	$(BUILDER) $(IMAGE_ARGS) -f $< -t localhost/sojourn-$*:$(IMAGE_TAG) .

# Arguments of pytest, such as -k oom; KEEP=1 leaves the cluster to look at.
E2E_ARGS ?=
e2e: $(STAMP)  ## kubectl apply to a served video, on one node of Kubernetes: images, charts, tests
	$(BIN)/python -m tools.e2e $(if $(KEEP),--keep) -- $(E2E_ARGS)

metrics: $(STAMP)  ## Generate docs/metrics.md
	$(BIN)/python -m tools.metrics_table

families: $(STAMP)  ## Generate docs/families.md
	$(BIN)/python -m tools.families_table

dashboards: $(STAMP)  ## Build the dashboards of charts/sojourn
	$(BIN)/python -m tools.dashboards

screenshots: $(STAMP) prometheus  ## The README's pictures, from the running demo model (node, npm, chromium)
	$(BIN)/python -m tools.screenshots

bench: $(STAMP)  ## Every benchmark: a table of figures beside their goals
	for file in bench/[a-z]*.py; do $(BIN)/python $$file || failed=1; done; test -z "$$failed"

clean:
	rm -rf $(VENV) out

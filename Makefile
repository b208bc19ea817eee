# Every target installs what it needs into .venv; nothing outside the checkout is changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROTOS := $(wildcard proto/sojourn/v1/*.proto)

.PHONY: demo test lint proto crds metrics families images bench format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[inference,residencyd,operator,dev]'
	touch $@

demo: $(STAMP)  ## Serve the shipped model, generate a clip through gRPC, write out/demo.mp4
	$(BIN)/python -m tools.demo

test: $(STAMP)  ## All tests, with coverage
	$(BIN)/pytest

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
images:  ## One image per process: localhost/sojourn-{inference,residencyd,operator}
	for image in residencyd operator inference; do \
	  $(BUILDER) $(IMAGE_ARGS) -f images/$$image/Containerfile -t localhost/sojourn-$$image:$(IMAGE_TAG) . || exit 1; \
	done

metrics: $(STAMP)  ## Generate docs/metrics.md
	$(BIN)/python -m tools.metrics_table

families: $(STAMP)  ## Generate docs/families.md
	$(BIN)/python -m tools.families_table

bench: $(STAMP)  ## Every benchmark: a table of figures beside their goals
	for file in bench/[a-z]*.py; do $(BIN)/python $$file || failed=1; done; test -z "$$failed"

clean:
	rm -rf $(VENV) out

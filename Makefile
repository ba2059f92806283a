# SPDX-License-Identifier: Apache-2.0

BIN     := .cache/bin
CLUSTER := $(BIN)/cohdi-cluster
IMAGE   := .cache/image/cohdi-agent.tar
LIBDIR  := .cache/nvml
CHASSIS ?= test/chassis/demo.yaml
FABRIC  ?= fm
RUN     ?= .
VERSION ?= $(shell git describe --always --dirty --tags 2>/dev/null || echo dev)
PARTS   ?= a,b,c,d
SIZES   ?= 2,100,1000
SEEDS   ?= 2000
FROM    ?= 1

# What needs a cluster of its own and takes minutes is not part of the unit tests.
UNITS = $(shell go list ./... | grep -v -e /test/e2e -e /test/fences)

# The faces of fabric managers are those that let the agent's driver do what a driver does.
FACES = $(patsubst %/conformance_test.go,./%,$(wildcard cmd/cohdi-sim/internal/*/conformance_test.go))

.DEFAULT_GOAL := help
.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##### The main job

.PHONY: demo
demo: tools programs image ## Show the main job on a real cluster: KEEP=1 leaves it up, FABRIC=fm|cm|cdim|redfish|sunfish
	go build -o $(BIN)/cohdi-demo ./test/demo
	@$(BIN)/cohdi-demo -manager $(FABRIC)

.PHONY: bench
bench: tools programs image ## Measure it on a real cluster: PARTS=a,c and SIZES=2,100 choose; docs/performance.md explains
	go test -c -o $(BIN)/cohdi-agents.test ./cmd/cohdi-agent
	go run ./test/bench -parts $(PARTS) -sizes $(SIZES)

.PHONY: test
test: tools static unit-race cluster-test e2e ## Every test that takes less than half an hour
	$(CLUSTER) down

.PHONY: test-long
test-long: test programs ## All of that, and the end-to-end tests five times over on one cluster
	$(CLUSTER) up --chassis $(CHASSIS)
	go test -count=1 -timeout=1h -v -run "^TestModel$$" ./internal/pool -args -full
	go test -count=5 -timeout=3h ./test/e2e/...
	$(CLUSTER) down

##### The inner loop

.PHONY: check
check: static unit ## Format, lint (once make lint has built the linter), vet and unit tests

.PHONY: static
static: format
	@if [ -x $(BIN)/golangci-lint ]; then echo $(BIN)/golangci-lint run; $(BIN)/golangci-lint run; fi
	go vet ./...

.PHONY: format
format: ## Fail if a Go file is not formatted
	@files="$$(git ls-files --cached --others --exclude-standard '*.go' | xargs -r gofmt -l)"; \
	if [ -n "$$files" ]; then echo "not formatted, run gofmt -w on:"; echo "$$files"; exit 1; fi

.PHONY: lint
lint: ## Build the linter if needed, and run it
	go run ./test/tools golangci-lint
	$(BIN)/golangci-lint run

.PHONY: unit
unit: ## Unit tests
	go test $(UNITS)

.PHONY: unit-race
unit-race: ## Unit tests with the race detector
	go test -race $(UNITS)

.PHONY: sim
sim: ## Play whole clusters on one thread: SEEDS=2000 of them, FROM=1
	go test -count=1 -timeout=2h -v -run '^Test(Scenarios|Seeds|SameSeedSameTrace)$$' ./internal/sim -args -seeds=$(SEEDS) -from=$(FROM)

.PHONY: sim-mutants
sim-mutants: ## Show that the simulation catches what it is for, on broken variants of the agent
	go run ./test/mutants

.PHONY: fabric-conformance
fabric-conformance: ## Play every fault on every fabric manager's face, in every kind of installation: UPDATE=1 keeps the table
	go test -count=1 -timeout=1h ./internal/fabric/...
	go test -count=1 -timeout=2h $(FACES) -args -full
	go test -c -o $(BIN)/matrix.test ./cmd/cohdi-sim/internal/matrix
	cd cmd/cohdi-sim/internal/matrix && $(CURDIR)/$(BIN)/matrix.test -test.timeout=2h -test.run '^Test(Rows|Matrix|Capabilities)$$' -full $(if $(UPDATE),-update)

.PHONY: e2e
e2e: tools programs image ## End-to-end tests on a real cluster, which stays up: RUN=regex chooses
	$(CLUSTER) up --chassis $(CHASSIS)
	go test -count=1 -timeout=5m -run '$(RUN)' ./test/fences -require-cluster -kubeconfig $(CURDIR)/.cache/cluster/admin.conf
	go test -count=1 -timeout=25m -v -run '$(RUN)' ./test/e2e/...

.PHONY: cluster-test
cluster-test: tools $(CLUSTER) ## Test the cluster itself: takes down the one that is up
	$(CLUSTER) down
	go test -count=1 -timeout=10m ./test/cluster/localkube -real

.PHONY: cluster
cluster: tools programs ## Start a cluster that stays, with the chassis of FABRIC=fm|cm|cdim|redfish|sunfish
	$(CLUSTER) up --manager $(FABRIC)

.PHONY: deploy
deploy: image $(CLUSTER) ## Install the agent in the cluster as a user does, for the simulated chassis
	$(CLUSTER) deploy --manager $(FABRIC)

.PHONY: status
status: $(CLUSTER) ## Show the cluster
	@$(CLUSTER) status

.PHONY: cluster-down
cluster-down: $(CLUSTER) ## Take the cluster down
	$(CLUSTER) down

##### What it is made of

.PHONY: tools
tools: ## Build etcd, Kubernetes and containerd; install the Debian packages that tests need
	go run ./test/tools

.PHONY: programs
programs: $(CLUSTER) ## Build the simulator, its driver library and the cluster program
	go build -o $(BIN)/cohdi-sim ./cmd/cohdi-sim
	$(MAKE) --no-print-directory -s -C test/nvml OUT=$(CURDIR)/$(LIBDIR)

# The Go tool knows best whether this is up to date.
.PHONY: $(CLUSTER)
$(CLUSTER):
	go build -o $(CLUSTER) ./test/cluster

.PHONY: image
image: ## Build the agent's image, without a container engine
	go run ./test/image -archive $(IMAGE) -version $(VERSION)

.PHONY: clean
clean: $(CLUSTER) ## Take the cluster down and remove everything that was built
	$(CLUSTER) down
	rm -rf .cache

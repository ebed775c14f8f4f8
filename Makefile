# make run     what agentshim does, on a small local image
# make test    everything CI runs: set-up (root), build, lint, verify, all tests

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

GO ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)

# The same sources give the same bytes in every folder; git's state comes in by VERSION.
GOBUILD := $(GO) build -trimpath -buildvcs=false
STRIP := -s -w
EMBEDDED := shim/embedded
LINTER := .cache/golangci-lint

# Succeeds where libseccomp can be linked statically; libseccomp-golang asks pkg-config for it.
HAVE_LIBSECCOMP := pkg-config --exists libseccomp 2>/dev/null && \
	printf '\043include <seccomp.h>\nint main(void) { return seccomp_api_get() == 0; }\n' | \
	gcc -x c - -static -o /dev/null $$(pkg-config --libs libseccomp) 2>/dev/null

.PHONY: run build test lint generate verify bench soak clean

run:
	integration/setup.sh hello
	$(MAKE) --no-print-directory build
	bin/agentshim exec --spec examples/hello/harness.json

# An embedded helper is replaced only when its bytes differ, so that what embeds it stays cached.
build:
	@mkdir -p bin .cache $(EMBEDDED)
	CGO_ENABLED=0 $(GOBUILD) -ldflags '$(STRIP)' -o .cache/ ./cmd/agentshim-init ./cmd/agentshim-netns
	@for helper in agentshim-init agentshim-netns; do \
		cmp -s .cache/$$helper $(EMBEDDED)/$$helper || cp .cache/$$helper $(EMBEDDED)/$$helper; \
	done
	@if $(HAVE_LIBSECCOMP); then \
		echo 'build: bin/agentshim $(VERSION) with libseccomp'; \
		CGO_ENABLED=1 $(GOBUILD) -tags libseccomp,osusergo,netgo \
			-ldflags '$(STRIP) -X main.version=$(VERSION) -linkmode external -extldflags -static' \
			-o bin/agentshim ./cmd/agentshim; \
	else \
		echo 'build: bin/agentshim $(VERSION) without libseccomp (gcc, pkg-config and libseccomp-dev add its checks)'; \
		CGO_ENABLED=0 $(GOBUILD) -ldflags '$(STRIP) -X main.version=$(VERSION)' -o bin/agentshim ./cmd/agentshim; \
	fi

test:
	integration/setup.sh all
	$(MAKE) --no-print-directory build
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory verify
	AGENTSHIM_REQUIRE_ALL=1 CGO_ENABLED=1 $(GO) test -count=1 -timeout 10m -tags libseccomp ./seccomp/...
	AGENTSHIM_REQUIRE_ALL=1 AGENTSHIM_TEST_ENGINES=1 $(GO) test -count=1 -timeout 60m -p 2 -parallel 3 ./...

lint: $(LINTER)
	$(LINTER) run ./...
	$(LINTER) run --build-tags soak ./integration/...
	@if $(HAVE_LIBSECCOMP); then $(LINTER) run --build-tags libseccomp ./seccomp/...; fi

# golangci-lint is a tool of the module in tools/, built once per version of it.
$(LINTER): tools/go.mod tools/go.sum
	@echo 'building golangci-lint (some minutes, once) …' >&2
	@mkdir -p $(@D)
	$(GO) build -C tools -o ../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	touch $@

# Generated code and schemas, then the goldens of every package that has an -update flag.
generate:
	$(GO) generate ./...
	for dir in $$(git grep -lE --untracked 'flag\.Bool(Var)?\(.*"update"' -- '*_test.go' | xargs -r -n1 dirname | sort -u); do \
		$(GO) test -count=1 "./$$dir" -update; \
	done

# What generate makes must be what is there already; then what git has, in a clean checkout.
verify:
	$(GO) vet ./...
	@if $(HAVE_LIBSECCOMP); then $(GO) vet -tags libseccomp ./seccomp/...; fi
	@unformatted=$$(git ls-files -co --exclude-standard -- '*.go' | xargs -r gofmt -l); \
	if [ -n "$$unformatted" ]; then printf 'verify: not formatted: %s\n' $$unformatted >&2; exit 1; fi
	$(GO) mod tidy -diff
	@mkdir -p .cache
	@$(call list_files) >.cache/before
	$(MAKE) --no-print-directory generate
	@$(call list_files) >.cache/after
	@if ! diff .cache/before .cache/after >&2; then \
		echo 'verify: generated files or goldens are stale; run make generate, read the diff and commit it' >&2; exit 1; \
	fi

# Digests of all files that git has or would take; a deleted one is listed by git still.
list_files = git ls-files -co --exclude-standard -z | sort -z | \
	while IFS= read -r -d '' file; do [ ! -f "$$file" ] || printf '%s\0' "$$file"; done | \
	xargs -0 -r sha256sum

bench: build
	integration/setup.sh bench
	AGENTSHIM_TEST_ENGINES=1 $(GO) run ./integration/bench

soak: build
	integration/setup.sh soak
	AGENTSHIM_REQUIRE_ALL=1 AGENTSHIM_TEST_ENGINES=1 AGENTSHIM_SOAK=1 $(GO) test -count=1 -timeout 80m -parallel 3 -tags soak -v ./integration

clean:
	rm -rf bin .cache $(EMBEDDED)/agentshim-*

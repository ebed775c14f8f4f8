package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/agentshim/agentshim/spec"
)

// clientKind tells whether the program named docker is Docker's client or Podman
// (podman-docker, a wrapper, a link), by the fields of what it answers. The answer is
// kept as long as the file is the same; a wrapper script that runs something else
// today than yesterday is the caller's own doing, and the daemon's answer decides then.
func clientKind(ctx context.Context, o ProbeOptions, client string) (string, error) {
	store, key := openCache(o.CacheDir), cacheKey([]string{"docker-client 1", identity(o.path(client))})
	var kind string
	if store.get("docker-client", key, &kind) && (kind == spec.Docker || kind == spec.Podman) {
		return kind, nil
	}
	// An endpoint that can't exist keeps the client from asking the daemon: it prints
	// its own half and ends with status 1. Podman knows none of the global flags that
	// would say the same, hence the variables.
	out, err := runQuestion(ctx, o.Runner, Command{
		Path: client,
		Args: []string{"version", "--format", "{{json .Client}}"},
		Env: append([]string{"LC_ALL=C", "PATH=" + systemPath, "DOCKER_HOST=unix:///dev/null/none", "DOCKER_CONFIG=/dev/null/none"},
			podmanFolders(o)...),
	})
	kind = kindOf(out.Stdout)
	if kind == "" {
		return "", unknownClient(ctx, client, err)
	}
	store.put("docker-client", key, kind)
	return kind, nil
}

// kindOf looks at the exact names: Docker writes ApiVersion, Podman APIVersion.
func kindOf(answer []byte) string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(answer, &fields) != nil {
		return ""
	}
	has := func(name string) bool { _, ok := fields[name]; return ok }
	switch {
	case has("DefaultAPIVersion"), has("ApiVersion"):
		return spec.Docker
	case has("APIVersion") && has("Built"):
		return spec.Podman
	}
	return ""
}

func unknownClient(ctx context.Context, client string, err error) error {
	if ctx.Err() != nil {
		return &Error{Reason: ReasonInterrupted, Msg: fmt.Sprintf("docker client %q", client), Err: context.Cause(ctx)}
	}
	if err == nil {
		err = errors.New("its answer to `version` is neither Docker's nor Podman's")
	}
	return &Error{
		Reason: ReasonEngineMissing, Msg: fmt.Sprintf("%q is not a working docker client", client),
		Hint: hintDockerInstall, Err: err,
	}
}

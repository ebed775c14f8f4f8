package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// blastBytes are what one measurement moves between two containers.
const blastBytes = 8 << 30

const blastPort = "9000"

// networkPart compares what two containers of an engine's network move between them, bare
// and with one of them in a sandbox of mode network: the packet rules are all that differs.
func networkPart() error { return eachSetup((*bench).network) }

func (b *bench) network() error {
	if err := b.buildRoles(); err != nil {
		return err
	}
	const name = "agentshim-bench"
	engine := func(args ...string) (string, error) {
		out, err := b.command(append([]string{b.engine}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	if _, err := engine("network", "create", name); err != nil {
		return fmt.Errorf("network %s: %w", name, err)
	}
	defer func() { _, _ = engine("network", "rm", name) }()
	run := []string{"run", "--rm", "--network=" + name, "--volume=" + b.rolesDir() + ":/bench:ro", "--entrypoint=/bench/roles", "agentshim/hello:test", roleArg}
	id, err := engine(slices.Concat(run[:1], []string{"--detach"}, run[1:], []string{"swallow"})...)
	if err != nil {
		return err
	}
	defer func() { _, _ = engine("rm", "--force", id) }()
	addr, err := engine("inspect", "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", id)
	if err != nil {
		return err
	}
	if err := b.writeNetworkSpec(name); err != nil {
		return err
	}
	ways := [][]string{
		append(append([]string{b.engine}, run...), "blast", addr),
		b.exec(networkSpec, "/bench/roles", roleArg, "blast", addr),
	}
	rates := make([][]float64, len(ways))
	for range *rounds {
		for i, argv := range ways {
			cmd := b.command(argv...)
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				return fmt.Errorf("%q: %w", argv, err)
			}
			seconds, err := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
			if err != nil {
				return err
			}
			rates[i] = append(rates[i], blastBytes/seconds/1e6)
		}
	}
	fmt.Printf("%s, between two containers of a network (%d interleaved rounds of %d MiB, medians in MB/s)\n", b.name, *rounds, blastBytes>>20)
	fmt.Printf("  bare %.0f, mode network %.0f, paired ratio %s\n", mid(rates[0]), mid(rates[1]), ratios(rates[1], rates[0]))
	return nil
}

const networkSpec = "network.json"

func (b *bench) writeNetworkSpec(name string) error {
	text, err := json.Marshal(map[string]any{
		"version": 1, "image": "agentshim/hello:test", "pull": "never", "engine": b.engine, "user": "24199:24199",
		"harness": map[string]any{"binary": "true"}, "accept": []string{"rootless-cgroup-limits"},
		"mounts": []any{map[string]any{"source": b.rolesDir(), "target": "/bench"}},
		"egress": map[string]any{"mode": "network", "network": name},
	})
	return errors.Join(err, os.WriteFile(filepath.Join(b.dir, networkSpec), text, 0o644))
}

// rolesDir has this program alone: agentshim's own folders can't be mounted.
func (b *bench) rolesDir() string { return filepath.Join(b.dir, "roles") }

// buildRoles puts this program where containers can run it.
func (b *bench) buildRoles() error {
	path := filepath.Join(b.rolesDir(), "roles")
	cmd := exec.Command("go", "build", "-o", path, "./integration/bench")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w: %s", err, out)
	}
	return os.Chmod(path, 0o755)
}

// swallowRole reads what comes to the port, and says so when all has come.
func swallowRole([]string) error {
	l, err := net.Listen("tcp", ":"+blastPort)
	if err != nil {
		return err
	}
	serveAll(l, func(c net.Conn) {
		defer c.Close()
		if _, err := io.Copy(io.Discard, c); err == nil {
			_, _ = c.Write([]byte{1})
		}
	})
	return nil
}

// blastRole sends to an address and prints how many seconds it took until all had come.
func blastRole(args []string) error {
	c, err := net.Dial("tcp", net.JoinHostPort(args[0], blastPort))
	if err != nil {
		return err
	}
	defer c.Close()
	start := time.Now()
	if err := write(c, blastBytes); err != nil {
		return err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return err
	}
	fmt.Println(time.Since(start).Seconds())
	return nil
}

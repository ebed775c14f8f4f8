package integration

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// smallState is a state folder on a file system of its own.
func smallState(t *testing.T, s setup, size string) string {
	t.Helper()
	dir := s.private(t)
	uid, gid := s.ids(t)
	opts := fmt.Sprintf("size=%s,mode=0700,uid=%d,gid=%d", size, uid, gid)
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestEgressLogFull: what can't be logged ends the run. The control has the room.
func TestEgressLogFull(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		file := s.write(t, spec{"egress": map[string]any{"mode": "allow-list", "allow": []string{"api.allowed.example"}}})
		const script = `i=0; while [ $i -lt 700 ]; do nslookup x$i.unlisted.example >/dev/null 2>&1; i=$((i+1)); done; echo through`
		start := time.Now()
		r := s.call(t, call{State: smallState(t, s, "160k")}, "exec", "--spec", file, "--", script)
		if r.Code != shim.ExitRefused || !strings.Contains(r.Stderr, "agentshim: egress-lost: ") || strings.Contains(r.Stdout, "through") {
			t.Errorf("exit %d after %v\n%s\n%s", r.Code, time.Since(start), r.Stdout, r.Stderr)
		}
		if left := s.containers(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		if r := s.call(t, call{State: smallState(t, s, "16m")}, "exec", "--spec", file, "--", script).ok(t); r.Stdout != "through\n" {
			t.Errorf("with room: %q", r.Stdout)
		}
	})
}

// TestNetworkConnected: A51: somebody who attaches a network to a running sandbox is
// refused by the engine; a bridge of its own is the control.
func TestNetworkConnected(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		b := s.begin(t, spec{"egress": map[string]any{"mode": "allow-list", "allow": []string{"api.allowed.example"}}}, `trap go=1 USR1; echo ready; while [ -z "$go" ]; do sleep 0.05; done; ip -o link | wc -l; ip -o addr | grep -c 'inet '`)
		id := s.containers(t)
		if len(id) != 1 {
			t.Fatalf("containers %q", id)
		}
		network := map[string]string{"docker": "bridge", "podman": "podman"}[s.engine]
		if r := s.bare(t, "network", "connect", network, id[0]); r.Code == 0 {
			t.Errorf("the engine attached %s: %s", network, r.Stdout)
		}
		b.signal(t, unix.SIGUSR1)
		links, lerr := b.out.ReadString('\n')
		addrs, aerr := b.out.ReadString('\n')
		if err := errors.Join(lerr, aerr); err != nil || links != "1\n" || addrs != "2\n" {
			t.Errorf("%q links, %q addresses, %v", links, addrs, err)
		}
		b.ended(t, 0)
	})
}

// TestNoWayOut: A45: where the sandbox's network can't be entered, nothing of the agent
// runs and nothing is left. The control is the same file with the way in.
func TestNoWayOut(t *testing.T) {
	Need(t)
	fields := spec{"egress": map[string]any{"mode": "allow-list", "allow": []string{"api.allowed.example"}}}
	for _, s := range []setup{setups[1], setups[3]} {
		t.Run(s.name, func(t *testing.T) {
			file := s.write(t, fields)
			noWayOut(t, s, s.call(t, call{Env: []string{withoutWay(t, s)}}, "exec", "--spec", file, "--", "echo ran"), "not this")
			s.exec(t, file, "echo ran").ok(t)
		})
	}
	t.Run("docker-root", func(t *testing.T) {
		s := setups[0]
		cmd, cancel := s.command(t, call{}, "/usr/bin/setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", agentshim, "exec", "--spec", s.write(t, fields), "--", "echo ran")
		defer cancel()
		noWayOut(t, s, finish(t, cmd), "CAP_NET_ADMIN")
	})
}

func noWayOut(t *testing.T, s setup, r result, text string) {
	t.Helper()
	r.refused(t, shim.ReasonEgressSetup)
	if !strings.Contains(r.Stderr, text) || !strings.Contains(r.Stderr, "agentshim: hint: ") {
		t.Errorf("%s", r.Stderr)
	}
	if left := s.containers(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

package main

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

const (
	unlimited  = -1
	unreadable = -2
	// noLimitV1 is above every real limit: v1 shows the largest page-aligned value.
	noLimitV1 = 1 << 60
)

func cgroupLimits() wire.Cgroup {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return cgroupV2()
	}
	return wire.Cgroup{
		Version:    1,
		Memory:     cgroupNumber("memory/memory.limit_in_bytes", 0),
		MemorySwap: cgroupNumber("memory/memory.memsw.limit_in_bytes", 0),
		CPUQuota:   cgroupNumber("cpu/cpu.cfs_quota_us", 0),
		CPUPeriod:  cgroupNumber("cpu/cpu.cfs_period_us", 0),
		PIDs:       cgroupNumber("pids/pids.max", 0),
	}
}

func cgroupV2() wire.Cgroup {
	c := wire.Cgroup{
		Version:    2,
		Memory:     cgroupNumber("memory.max", 0),
		MemorySwap: cgroupNumber("memory.swap.max", 0),
		CPUQuota:   cgroupNumber("cpu.max", 0),
		CPUPeriod:  cgroupNumber("cpu.max", 1),
		PIDs:       cgroupNumber("pids.max", 0),
	}
	// v2 counts swap by itself; report memory and swap together, as v1 does.
	if c.Memory >= 0 && c.MemorySwap >= 0 {
		c.MemorySwap += c.Memory
	}
	return c
}

// cgroupNumber reads one field of a cgroup file.
func cgroupNumber(file string, field int) int64 {
	b, err := os.ReadFile("/sys/fs/cgroup/" + file)
	if err != nil {
		return unreadable
	}
	f := strings.Fields(string(b))
	if field >= len(f) {
		return unreadable
	}
	if f[field] == "max" {
		return unlimited
	}
	n, err := strconv.ParseInt(f[field], 10, 64)
	switch {
	case err != nil:
		return unreadable
	case n < 0 || n >= noLimitV1:
		return unlimited
	}
	return n
}

// openOOMCounter opens the file whose oom_kill line counts kills, -1 without one.
func openOOMCounter() int {
	for _, f := range []string{"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"} {
		if fd, err := unix.Open(f, unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
			return fd
		}
	}
	return -1
}

// oomKills reads the counter, -1 when it can't be known.
func oomKills(fd int) int64 {
	var buf [512]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return -1
	}
	for line := range strings.Lines(string(buf[:n])) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "oom_kill" {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}

// openOwnOOMScore opens init's own oom_score_adj for writing. The file belongs to
// root while init is non-dumpable, so it is dumpable for this one open; nothing
// else runs in the container yet.
func openOwnOOMScore() int {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		fatal("prctl PR_SET_DUMPABLE", err)
	}
	fd, err := unix.Open("/proc/self/oom_score_adj", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err2 := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err2 != nil {
		fatal("prctl PR_SET_DUMPABLE", err2)
	}
	if err != nil {
		fatal("oom_score_adj", err)
	}
	return fd
}

// oomRaise is added to the harness's oom_score_adj: the kernel takes it first.
const oomRaise = 500

// raised runs fork while this process's oom_score_adj is raised: children
// inherit it. Lowering back to the start value needs no capability
// (Linux 2.6.36, oom_score_adj_min). Without a descriptor, -1, it stays.
func raised(fd int, fork func() error) error {
	if fd < 0 {
		return fork()
	}
	var buf [16]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return err
	}
	own := strings.TrimSpace(string(buf[:n]))
	score, err := strconv.Atoi(own)
	if err != nil {
		return err
	}
	if _, err := unix.Pwrite(fd, []byte(strconv.Itoa(min(score+oomRaise, 1000))), 0); err != nil {
		return err
	}
	ferr := fork()
	if _, err := unix.Pwrite(fd, []byte(own), 0); err != nil {
		fatal("oom_score_adj", err)
	}
	return ferr
}

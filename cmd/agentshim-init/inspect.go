package main

import (
	"bytes"
	endian "encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// sysctls are the ones the plan sets or that open something when they differ.
var sysctls = []string{
	"net.ipv4.ping_group_range",
	"net.ipv4.ip_unprivileged_port_start",
	"net.ipv4.ip_forward",
	"net.ipv6.conf.all.disable_ipv6",
	"kernel.yama.ptrace_scope",
}

// look collects the hello. A fact that can't be read is named in Errors; the
// shim refuses it.
type look struct{ wire.Hello }

func (l *look) fail(what string, err error) {
	if err != nil {
		l.Errors[what] = err.Error()
	}
}

// inspect reads the posture of this process and container, and changes nothing of a
// container that is not agentshim's own.
func inspect(own bool) wire.Hello {
	l := &look{wire.Hello{
		Version: wire.Version, PID: os.Getpid(), FDs: openFDs(), Environ: os.Environ(),
		Errors: map[string]string{},
	}}
	l.dumpable()
	l.status()
	l.secureBits()
	l.namespaces()
	l.idMaps()
	l.mounts(own)
	l.rlimits()
	l.Cgroup = cgroupLimits()
	l.devNodes()
	l.network()
	l.addresses()
	l.netCookie()
	l.processes()
	l.identity()
	l.kernelPaths()
	l.Syscalls = trySyscalls()
	return l.Hello
}

func (l *look) dumpable() {
	n, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	l.Dumpable = n
	l.fail("dumpable", err)
}

func (l *look) secureBits() {
	n, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	l.SecureBits = n
	l.fail("securebits", err)
}

// status reads /proc/self/status: proc_pid_status(5).
func (l *look) status() {
	b, err := os.ReadFile("/proc/self/status")
	l.fail("status", err)
	l.Capabilities = map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		value = strings.TrimSpace(value)
		switch name {
		case "Uid":
			copy(l.UIDs[:], numbers(value))
		case "Gid":
			copy(l.GIDs[:], numbers(value))
		case "Groups":
			l.Groups = numbers(value)
		case "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb":
			l.Capabilities[name] = value
		case "NoNewPrivs":
			l.NoNewPrivs = value == "1"
		case "Seccomp":
			l.SeccompMode, _ = strconv.Atoi(value)
		case "Seccomp_filters":
			l.SeccompFilters, _ = strconv.Atoi(value)
		}
	}
}

func numbers(s string) []uint32 {
	var out []uint32
	for _, f := range strings.Fields(s) {
		n, err := strconv.ParseUint(f, 10, 32)
		if err == nil {
			out = append(out, uint32(n))
		}
	}
	return out
}

func (l *look) namespaces() {
	l.Namespaces = map[string]string{}
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		link, err := os.Readlink("/proc/self/ns/" + ns)
		l.fail("namespace "+ns, err)
		l.Namespaces[ns] = link
	}
}

func (l *look) idMaps() {
	var err error
	l.UIDMap, err = idMap("/proc/self/uid_map")
	l.fail("uid_map", err)
	l.GIDMap, err = idMap("/proc/self/gid_map")
	l.fail("gid_map", err)
}

func idMap(path string) ([][3]uint32, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out [][3]uint32
	for line := range strings.Lines(string(b)) {
		n := numbers(line)
		if len(n) != 3 {
			return nil, fmt.Errorf("line %q of %s", line, path)
		}
		out = append(out, [3]uint32(n))
	}
	return out, nil
}

// mounts reads /proc/self/mountinfo: proc_pid_mountinfo(5).
func (l *look) mounts(own bool) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	l.fail("mountinfo", err)
	for line := range strings.Lines(string(b)) {
		m, err := parseMount(strings.TrimSuffix(line, "\n"))
		l.fail("mountinfo", err)
		if own {
			setMode(m)
		}
		statMount(&m)
		l.Mounts = append(l.Mounts, m)
	}
}

func parseMount(line string) (wire.Mount, error) {
	before, after, ok := strings.Cut(line, " - ")
	f, g := strings.Split(before, " "), strings.Split(after, " ")
	if !ok || len(f) < 6 || len(g) != 3 {
		return wire.Mount{}, fmt.Errorf("mountinfo line %q", line)
	}
	return wire.Mount{
		Root: unescape(f[3]), Target: unescape(f[4]), Options: strings.Split(f[5], ","),
		Propagation: f[6:], Type: g[0], Super: strings.Split(g[2], ","),
	}, nil
}

// unescape undoes the kernel's octal escapes (space, tab, newline, backslash).
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// modes are those of the tmpfs that stand in every container.
var modes = map[string]uint32{wire.HomeDir: 0o700, "/tmp": unix.S_ISVTX | 0o777, "/run": 0o755}

// setMode corrects the mode of one of them: a runtime gives a tmpfs that of the
// image's folder it covers (runc 1.1). Any other mount may show a folder of the
// host's. What can't be changed shows in the hello.
func setMode(m wire.Mount) {
	mode, known := modes[m.Target]
	var st unix.Stat_t
	if !known || m.Type != "tmpfs" || m.Root != "/" || unix.Lstat(m.Target, &st) != nil {
		return
	}
	if int(st.Uid) == os.Geteuid() && mode != st.Mode&0o7777 {
		_ = unix.Chmod(m.Target, mode)
	}
}

func statMount(m *wire.Mount) {
	var st unix.Stat_t
	if err := unix.Lstat(m.Target, &st); err != nil {
		m.Stat = err.Error()
		return
	}
	m.Dev, m.Ino, m.Mode, m.UID, m.GID = st.Dev, st.Ino, st.Mode, st.Uid, st.Gid
	if m.Type == "tmpfs" && (strings.HasPrefix(m.Target, "/proc/") || strings.HasPrefix(m.Target, "/sys/")) {
		entries, err := os.ReadDir(m.Target)
		m.Empty = err == nil && len(entries) == 0
	}
}

func (l *look) rlimits() {
	l.Rlimits = map[string][2]uint64{}
	for name, which := range map[string]int{
		"nofile": unix.RLIMIT_NOFILE, "nproc": unix.RLIMIT_NPROC, "core": unix.RLIMIT_CORE,
		"memlock": unix.RLIMIT_MEMLOCK, "fsize": unix.RLIMIT_FSIZE, "stack": unix.RLIMIT_STACK,
		"nice": unix.RLIMIT_NICE, "rtprio": unix.RLIMIT_RTPRIO,
	} {
		var r unix.Rlimit
		err := unix.Getrlimit(which, &r)
		l.fail("rlimit "+name, err)
		l.Rlimits[name] = [2]uint64{r.Cur, r.Max}
	}
}

// devNodes lists /dev with its folders. Nothing runs yet, so all of it comes from
// the engine.
func (l *look) devNodes() {
	l.devFolder("")
	slices.Sort(l.DevNodes)
}

// devFolder lists one folder; dir is below /dev, empty or with a final slash.
func (l *look) devFolder(dir string) {
	entries, err := os.ReadDir("/dev/" + dir)
	l.fail("/dev/"+dir, err)
	for _, e := range entries {
		name := dir + e.Name()
		var st unix.Stat_t
		if err := unix.Lstat("/dev/"+name, &st); err != nil {
			l.fail("/dev/"+name, err)
			continue
		}
		if len(l.DevNodes) >= wire.MaxDevNodes {
			return
		}
		if name != "pts" && name != "shm" && name != "mqueue" {
			l.DevNodes = append(l.DevNodes, devNode(name, st))
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			l.devFolder(name + "/")
		}
	}
}

func devNode(name string, st unix.Stat_t) string {
	number := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "d " + name
	case unix.S_IFCHR:
		return "c " + number + " " + name
	case unix.S_IFBLK:
		return "b " + number + " " + name
	case unix.S_IFLNK:
		link, err := os.Readlink("/dev/" + name)
		if err != nil {
			link = err.Error()
		}
		return "l " + name + " " + link
	default:
		return "f " + name
	}
}

// addresses asks the kernel for the addresses of all interfaces: rtnetlink(7). What it can't
// say is not there.
func (l *look) addresses() {
	names := map[uint32]string{}
	for _, m := range dump(syscall.RTM_GETLINK) {
		if m.Header.Type == syscall.RTM_NEWLINK && len(m.Data) >= syscall.SizeofIfInfomsg {
			names[endian.NativeEndian.Uint32(m.Data[4:])] = strings.TrimRight(string(attribute(m, syscall.IFLA_IFNAME)), "\x00")
		}
	}
	for _, m := range dump(syscall.RTM_GETADDR) {
		if m.Header.Type != syscall.RTM_NEWADDR || len(m.Data) < syscall.SizeofIfAddrmsg {
			continue
		}
		raw := attribute(m, syscall.IFA_LOCAL) // the own end of a link that has two
		if raw == nil {
			raw = attribute(m, syscall.IFA_ADDRESS)
		}
		addr, _ := netip.AddrFromSlice(raw)
		l.Addresses = append(l.Addresses, names[endian.NativeEndian.Uint32(m.Data[4:])]+" "+addr.String())
	}
	slices.Sort(l.Addresses)
}

// dump is everything of a kind.
func dump(kind int) []syscall.NetlinkMessage {
	b, err := syscall.NetlinkRIB(kind, syscall.AF_UNSPEC)
	if err != nil {
		return nil
	}
	messages, _ := syscall.ParseNetlinkMessage(b)
	return messages
}

func attribute(m syscall.NetlinkMessage, kind uint16) []byte {
	attrs, _ := syscall.ParseNetlinkRouteAttr(&m)
	for _, a := range attrs {
		if a.Attr.Type == kind {
			return a.Value
		}
	}
	return nil
}

// network counts interfaces and routes. A route of loopback reaches nothing.
func (l *look) network() {
	b, err := os.ReadFile("/proc/self/net/dev")
	l.fail("interfaces", err)
	for line := range strings.Lines(string(b)) {
		if name, _, ok := strings.Cut(line, ":"); ok {
			l.Interfaces = append(l.Interfaces, strings.TrimSpace(name))
		}
	}
	slices.Sort(l.Interfaces)
	b, err = os.ReadFile("/proc/self/net/route")
	l.fail("routes", err)
	for i, line := range slices.Collect(strings.Lines(string(b))) {
		if f := strings.Fields(line); i > 0 && len(f) > 0 && f[0] != "lo" {
			l.Routes++
		}
	}
	// Absent when the kernel or the namespace has no IPv6.
	b, _ = os.ReadFile("/proc/self/net/ipv6_route")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] != "lo" {
			l.Routes++
		}
	}
}

// netCookie asks a socket for its network namespace: every socket has one.
func (l *look) netCookie() {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		l.NetCookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	}
	if !errors.Is(err, unix.ENOPROTOOPT) {
		l.fail("network cookie", err)
	}
}

func (l *look) processes() {
	entries, err := os.ReadDir("/proc")
	l.fail("processes", err)
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			l.Processes = append(l.Processes, pid)
		}
	}
}

func (l *look) identity() {
	// EINVAL where no security module is active.
	if b, err := os.ReadFile("/proc/self/attr/current"); err == nil {
		l.LSM = strings.TrimRight(string(b), "\x00\n")
	}
	l.Sysctls = map[string]string{}
	for _, name := range sysctls {
		b, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		if err == nil {
			l.Sysctls[name] = strings.Join(strings.Fields(string(b)), " ")
		}
	}
	var u unix.Utsname
	l.fail("uname", unix.Uname(&u))
	l.Hostname = string(bytes.TrimRight(u.Nodename[:], "\x00"))
	l.Umask = unix.Umask(0o022)
	unix.Umask(l.Umask)
}

// openFDs lists the open descriptors, without the one that lists them.
func openFDs() map[int]string {
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		fatal("descriptors", err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		fatal("descriptors", err)
	}
	fds := map[int]string{}
	for _, name := range names {
		n, err := strconv.Atoi(name)
		if err != nil || n == int(d.Fd()) {
			continue
		}
		link, err := os.Readlink(filepath.Join("/proc/self/fd", name))
		if err != nil {
			link = err.Error()
		}
		fds[n] = link
	}
	return fds
}

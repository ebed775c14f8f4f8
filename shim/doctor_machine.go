package shim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// system says whether the doctor can look any further.
func (d *doctor) system() bool {
	v := systemVerdict(d.opts.goos)
	d.add("machine", "system", v)
	return v.status == Passed
}

// systemVerdict: containers need a Linux kernel, and agentshim the same one.
func systemVerdict(goos string) verdict {
	refused := func(remedy string) verdict {
		return verdict{Failed, fmt.Sprintf("%s: agentshim and the engine need one Linux kernel", goos), remedy}
	}
	switch goos {
	case "linux":
		return pass("linux")
	case "darwin":
		return refused("`podman machine start`, then run agentshim inside: `podman machine ssh`")
	case "windows":
		return refused("run agentshim inside WSL 2, with the engine installed there")
	}
	return refused("run agentshim in a Linux virtual machine")
}

// machine looks at what all engines share.
func (d *doctor) machine() {
	kernel, err := kernelRelease()
	if err != nil {
		d.add("machine", "kernel", failed(err))
	} else {
		d.add("machine", "kernel", kernelVerdict(kernel))
	}
	d.add("machine", "seccomp", seccompVerdict(d.probe))
	d.add("machine", "netfilter", netfilterVerdict(d.probe, askNFTables()))
	d.folderChecks()
}

// kernelVerdict: openat2(2) is from Linux 5.6, and agentshim reads no path without it.
func kernelVerdict(release string) verdict {
	switch lower := strings.ToLower(release); {
	case strings.Contains(release, "Microsoft"):
		return verdict{Failed, "Linux " + release + " is WSL 1, which has no Linux kernel", "`wsl --set-version DISTRIBUTION 2` in Windows"}
	case !atLeast(release, 5, 6):
		return verdict{Failed, "Linux " + release + " is older than 5.6", "boot a newer kernel"}
	case strings.Contains(lower, "microsoft"):
		return warned("keep workspaces out of /mnt, and set `kernelCommandLine = cgroup_no_v1=all` in .wslconfig so that rootless limits hold", "Linux %s is WSL 2: files below /mnt are Windows', without owners", release)
	}
	return pass("Linux %s", release)
}

// seccompVerdict wants the kernel actions that the policy uses: seccomp(2).
func seccompVerdict(o ProbeOptions) verdict {
	data, err := os.ReadFile(o.path("/proc/sys/kernel/seccomp/actions_avail"))
	remedy := "use a kernel with CONFIG_SECCOMP_FILTER"
	if err != nil {
		return verdict{Failed, "the kernel has no system call filter", remedy}
	}
	have := strings.Fields(string(data))
	for _, need := range []string{"allow", "errno", "kill_thread"} {
		if !slices.Contains(have, need) {
			return verdict{Failed, "the kernel's system call filter lacks the action " + need, remedy}
		}
	}
	return pass("the kernel filters system calls")
}

// folderChecks looks at agentshim's own folders, and makes them.
func (d *doctor) folderChecks() {
	f, err := openFolders(d.job.getenv, homeFolder(d.job.getenv))
	if err == nil {
		d.folders = f
		_, err = f.probeOptions()
	}
	if err != nil {
		d.add("machine", "folders", failed(err))
		return
	}
	d.ready = true
	d.add("machine", "folders", pass("state %s, runtime %s", f.state, f.runtime))
	d.add("machine", "disk", worst(
		diskVerdict(f.state, 1*mib, 50*mib, "`agentshim prune`, or set XDG_STATE_HOME to a larger file system"),
		diskVerdict(f.runtime, 8*mib, 64*mib, "set XDG_RUNTIME_DIR to a larger file system"),
	))
}

const mib = 1 << 20

// worst is the first of the worst verdicts; passes are told together.
func worst(verdicts ...verdict) verdict {
	var passes []string
	for _, status := range []Status{Failed, Warned, Skipped} {
		for _, v := range verdicts {
			if v.status == status {
				return v
			}
		}
	}
	for _, v := range verdicts {
		passes = append(passes, v.finding)
	}
	return pass("%s", strings.Join(passes, "; "))
}

// diskVerdict compares what the caller may still write where dir is, or will be.
func diskVerdict(dir string, least, wanted uint64, remedy string) verdict {
	var st unix.Statfs_t
	at := dir
	err := unix.Statfs(at, &st)
	for errors.Is(err, syscall.ENOENT) && at != "/" {
		at = filepath.Dir(at)
		err = unix.Statfs(at, &st)
	}
	if err != nil {
		return skipped("look with df as root", "free space for %s can't be read: %v", dir, err)
	}
	return spaceVerdict(dir, space{free: st.Bavail * uint64(st.Bsize), files: st.Files, freeFiles: st.Ffree}, least, wanted, remedy)
}

// space is what is left on a file system; files is 0 where it does not count them.
type space struct{ free, files, freeFiles uint64 }

func spaceVerdict(dir string, s space, least, wanted uint64, remedy string) verdict {
	text := fmt.Sprintf("%s free for %s", bytesText(s.free), dir)
	switch {
	case s.free < least:
		return verdict{Failed, text, remedy}
	case s.files > 0 && s.freeFiles < 64:
		return verdict{Failed, fmt.Sprintf("%d inodes free for %s", s.freeFiles, dir), remedy}
	case s.free < wanted:
		return warned(remedy, "%s", text)
	}
	return pass("%s", text)
}

func bytesText(n uint64) string {
	if n >= 10<<30 {
		return strconv.FormatUint(n>>30, 10) + " GiB"
	}
	return strconv.FormatUint(n>>20, 10) + " MiB"
}

package shim

import (
	"encoding/binary"
	"errors"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// nfgenmsgLen is the size of struct nfgenmsg, all zero here: family, version, resource.
const nfgenmsgLen = 4

// askNFTables asks the kernel for its nf_tables generation, over netlink and without
// changing anything: nil where nf_tables answers, EPERM where the caller may not ask,
// what netpolicy.NoNftables knows where there is none.
func askNFTables() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// The kernel answers within sendto(2); the limit is for a kernel that doesn't.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return err
	}
	request := make([]byte, unix.NLMSG_HDRLEN+nfgenmsgLen)
	binary.NativeEndian.PutUint32(request[0:], uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	return netlinkError(answer[:n])
}

// netlinkError takes the errno out of an answer: netlink(7).
func netlinkError(answer []byte) error {
	if len(answer) < unix.NLMSG_HDRLEN {
		return syscall.EBADMSG
	}
	if binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return nil
	}
	if len(answer) < unix.NLMSG_HDRLEN+4 {
		return syscall.EBADMSG
	}
	if code := int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:])); code != 0 {
		return syscall.Errno(-code)
	}
	return nil
}

// netfilterVerdict tells what an allow-list could be enforced with. No rule is made:
// that a table is there does not prove that every rule can be.
func netfilterVerdict(o ProbeOptions, nft error) verdict {
	var have []string
	if nft == nil {
		have = append(have, "nf_tables answers")
	}
	// The file comes with the legacy iptables core, in the kernel or loaded.
	_, program := findProgram(o, filepath.SplitList(systemPath), "iptables-restore")
	if program && pathExists(o.path("/proc/net/ip_tables_names")) {
		have = append(have, "iptables is installed and has its tables")
	}
	switch {
	case have != nil:
		return pass("%s", strings.Join(have, ", "))
	case errors.Is(nft, syscall.EPERM):
		return skipped("run the doctor as root once to see", "netfilter is there, but only root may ask what it can do")
	}
	return warned("load or build nf_tables (`modprobe nf_tables` as root); egress deny-all needs none",
		"no netfilter back end: nf_tables: %v, and no legacy iptables", nft)
}

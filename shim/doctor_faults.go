package shim

import (
	"fmt"
	"strings"
)

// knownFaults are faults that let a container or an image reach the host, oldest
// first for each program. Each lists the first fixed release of every branch, by the
// projects' own advisories, as of faultsAsOf.
var knownFaults = []struct {
	program, cve string
	fixed        [][3]int
}{
	{"runc", "CVE-2024-21626", [][3]int{{1, 1, 12}}},
	{"runc", "CVE-2024-45310", [][3]int{{1, 1, 14}}},
	{"runc", "CVE-2025-31133, CVE-2025-52565, CVE-2025-52881", [][3]int{{1, 2, 8}, {1, 3, 3}}},
	{"runc", "CVE-2026-41579", [][3]int{{1, 3, 6}, {1, 4, 3}, {1, 5, 0}}},
	{"crun", "CVE-2022-27650", [][3]int{{1, 4, 4}}},
	{"docker", "CVE-2024-29018", [][3]int{{23, 0, 11}, {25, 0, 5}}},
	{"podman", "CVE-2023-0778", [][3]int{{4, 4, 2}}},
}

// faultsAsOf is when the table was last compared with the advisories.
const faultsAsOf = "2026-11"

// openFaults are the faults whose fix came in a later release than version.
// Distributions patch older numbers, which nothing on the machine tells: it is a
// remark and no refusal. A version that is no number has none.
func openFaults(program, version string) []string {
	number, ok := threeNumbers(version)
	if !ok {
		return nil
	}
	var open []string
	for _, fault := range knownFaults {
		if fault.program == program && !hasFix(number, fault.fixed) {
			open = append(open, fault.cve)
		}
	}
	return open
}

func faultText(program, version string, open []string) string {
	return fmt.Sprintf("%s %s is older than the release that fixes %s; a distribution's package may have the fix under this number",
		program, version, strings.Join(open, ", "))
}

package shim

import (
	"os"
	"strings"
)

// readContainerID is the engine's id of the container, empty when it wrote none.
func readContainerID(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// compareBundle compares the engine's own OCI config with the plan.
func (c *container) compareBundle(id string) (string, []Difference) {
	return "not readable", nil
}

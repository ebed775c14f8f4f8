package integration

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// readRecord reads what --result wrote; only the caller may read it.
func readRecord(t *testing.T, path string) shim.Record {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("%s has mode %v", path, info.Mode())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var rec shim.Record
	if err := json.Unmarshal(b, &rec); err != nil {
		t.Fatalf("%s: %v\n%s", path, err, b)
	}
	return rec
}

package harness_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func TestParsePublish(t *testing.T) {
	for text, want := range map[string]string{
		"3000":                        "127.0.0.1:3000:3000",
		"8080:3000":                   "127.0.0.1:8080:3000",
		"0:3000":                      "127.0.0.1:0:3000",
		"127.0.0.1:3000:3000":         "127.0.0.1:3000:3000",
		"0.0.0.0:80:65535":            "0.0.0.0:80:65535",
		"[::1]:8080:3000":             "[::1]:8080:3000",
		"[0:0:0:0:0:0:0:1]:8080:3000": "[::1]:8080:3000",
		"[::]:0:1":                    "[::]:0:1",
		"[::1]:3000":                  "[::1]:3000:3000",
		"192.0.2.7:1:2":               "192.0.2.7:1:2",
	} {
		p, err := harness.ParsePublish(text)
		if err != nil || p.String() != want {
			t.Errorf("%q: %v %v, want %s", text, p, err, want)
		}
		if again, err := harness.ParsePublish(p.String()); err != nil || again != p {
			t.Errorf("%q: %v %v", p, again, err)
		}
	}
	for _, text := range []string{
		"", "0", "65536", "-1", "+80", "080", "0x50", "8 0", " 80", "80 ", "80/tcp", "http", "1:0", "0:0", ":80", "80:", ":80:80", "1:2:3",
		"localhost:80:80", "127.0.0.1:80", "127.1:80:80", "127.0.0.1:80:80:80", "::1:80:80", "[::1]", "[::1]:", "[::1]80:80", "[127.0.0.1]:80:80",
		"[fe80::1%lo]:80:80", "[::ffff:127.0.0.1]:80:80", "224.0.0.1:80:80", "[ff02::1]:80:80", "[[::1]]:80:80", "*:80:80", "80:80\n", "٣:80",
	} {
		if p, err := harness.ParsePublish(text); err == nil {
			t.Errorf("%q is %v", text, p)
		}
	}
}

func TestPublishProblems(t *testing.T) {
	h, err := parse(with(`"egress":{"publish":["3000","[::1]:3000:3000","0:1","0:2","4000:3000"]}`))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range h.Egress.Published() {
		got = append(got, p.String())
	}
	want := []string{"127.0.0.1:3000:3000", "[::1]:3000:3000", "127.0.0.1:0:1", "127.0.0.1:0:2", "127.0.0.1:4000:3000"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	_, err = parse(with(`"egress":{"publish":["127.0.0.1:3000:1","x","3000:2"]}`))
	if !errors.Is(err, harness.ErrInvalid) {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"$.egress.publish[1]", "$.egress.publish[2]"}, paths(t, err)); diff != "" {
		t.Error(diff)
	}
}

// FuzzParsePublish: what is taken is one address and two ports that are written plainly,
// and reads the same again.
func FuzzParsePublish(f *testing.F) {
	for _, text := range []string{"3000", "0:1", "127.0.0.1:1:2", "[::1]:1:2", "[::1%a]:1:2", "::1:1:2", "1:2:3:4"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := harness.ParsePublish(text)
		if err != nil {
			return
		}
		if p.Port == 0 || p.Address == (netip.Addr{}) || strings.ContainsAny(text, " \t\n+-%") {
			t.Fatalf("%q is %+v", text, p)
		}
		if again, err := harness.ParsePublish(p.String()); err != nil || again != p {
			t.Fatalf("%q: %v %v", text, again, err)
		}
	})
}

package harness_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func TestParseEnvFile(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []harness.EnvVar
	}{
		{"empty", "", nil},
		{"comments and blanks", "# a=b\n\n \t\n#\n", nil},
		{"order", "B=2\nA=1\n", []harness.EnvVar{{"B", "2"}, {"A", "1"}}},
		{"no line end", "A=1", []harness.EnvVar{{"A", "1"}}},
		{"set but empty", "A=\n", []harness.EnvVar{{"A", ""}}},
		{"E08 second equals", "A=x=y z=$H\n", []harness.EnvVar{{"A", "x=y z=$H"}}},
		{"E08 equals at the end", "A==\n", []harness.EnvVar{{"A", "="}}},
		{"E08 trailing blanks", "A= 1 \t\n", []harness.EnvVar{{"A", " 1 \t"}}},
		{"E01 quotes stay", `A="l1\nl2"` + "\n" + `B='x`, []harness.EnvVar{{"A", `"l1\nl2"`}, {"B", "'x"}}},
		{"E08 backslash at the end", "A=x\\\nB=y\n", []harness.EnvVar{{"A", `x\`}, {"B", "y"}}},
		{"E08 unicode", "A=é…🙂\n", []harness.EnvVar{{"A", "é…🙂"}}},
		{"hash in value", "A=1 # no comment\n", []harness.EnvVar{{"A", "1 # no comment"}}},
		{"E10 preload is a plain variable", "LD_PRELOAD=/workspace/x.so\n", []harness.EnvVar{{"LD_PRELOAD", "/workspace/x.so"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := harness.ParseEnvFile([]byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseEnvFileRefuses(t *testing.T) {
	for _, tt := range []struct{ name, text, path string }{
		{"E01 second line of a value", "A=l1\ns3cr3t\n", "line 2"},
		{"E05 no equals", "# c\nA=1\ns3cr3t", "line 3"},
		{"carriage return", "A=s3cr3t\r\n", "line 1"},
		{"carriage return inside", "A=s3\rcr3t\n", "line 1"},
		{"NUL", "A=s3cr3t\x00\n", "line 1"},
		{"not UTF-8", "A=s3cr3t\xff\n", "line 1"},
		{"byte order mark", "\ufeffA=s3cr3t\n", "line 1"},
		{"export", "export A=s3cr3t\n", "line 1"},
		{"blank before name", " A=s3cr3t\n", "line 1"},
		{"blank after name", "A =s3cr3t\n", "line 1"},
		{"no name", "=s3cr3t\n", "line 1"},
		{"digit", "1A=s3cr3t\n", "line 1"},
		{"name given twice", "A=s3cr3t\nB=x\nA=s3cr3t\n", "line 3"},
		{"home", "HOME=s3cr3t\n", "line 1"},
		{"runtime dir", "XDG_RUNTIME_DIR=s3cr3t\n", "line 1"},
		{"long", "A=s3cr3t" + strings.Repeat("x", 1<<17), "line 1"},
		{"too large", "A=s3cr3t\n" + strings.Repeat("#\n", harness.MaxFile/2), "line 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			vars, err := harness.ParseEnvFile([]byte(tt.text))
			if !errors.Is(err, harness.ErrInvalid) || vars != nil {
				t.Fatalf("want ErrInvalid and nothing else, got %v, %v", vars, err)
			}
			if diff := cmp.Diff([]string{tt.path}, paths(t, err)); diff != "" {
				t.Error(diff)
			}
			if strings.Contains(err.Error(), "s3cr3t") {
				t.Errorf("a value stands in the error: %v", err)
			}
		})
	}
}

func TestParseEnvFileReportsAll(t *testing.T) {
	_, err := harness.ParseEnvFile([]byte("x\nA=1\n" + strings.Repeat("#\n", 8) + "A=2\n1=2"))
	if diff := cmp.Diff([]string{"line 1", "line 11", "line 12"}, paths(t, err)); diff != "" {
		t.Error(diff)
	}
}

func FuzzParseEnvFile(f *testing.F) {
	for _, seed := range []string{"", "A=1\n", "# c\n\nA=x=y \nB=", "A=\"q\"\\\n", "A=1\r\n", "export A=1", "HOME=/x", "A=1\nA=2"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		vars, err := harness.ParseEnvFile(data)
		if err != nil {
			list(t, err)
			return
		}
		var text strings.Builder
		for _, v := range vars {
			line := v.Name + "=" + v.Value
			if !strings.Contains("\n"+string(data)+"\n", "\n"+line+"\n") {
				t.Errorf("%q is no line of the file", line)
			}
			text.WriteString(line + "\n")
		}
		again, err := harness.ParseEnvFile([]byte(text.String()))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(vars, again); diff != "" {
			t.Error(diff)
		}
	})
}

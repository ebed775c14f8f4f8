package shim

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"
)

func certificate(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Unix(1<<32, 0), IsCA: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// Certificates go in, and nothing else that stands in a file of them.
func TestWriteCertificates(t *testing.T) {
	one, two := certificate(t), certificate(t)
	const key = "-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\n"
	for name, tt := range map[string]struct{ text, want string }{
		"one":             {one, one},
		"two, and words":  {"# corp\n" + one + "password: s3cret\n" + two, one + two},
		"none":            {"password: s3cret\n", ""},
		"empty":           {"", ""},
		"a key":           {one + key, ""},
		"no certificate":  {"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", ""},
		"another's words": {strings.ReplaceAll(one, "CERTIFICATE", "X509 CRL"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := writeCertificates(&out, []byte(tt.text))
			if tt.want == "" {
				if err == nil || strings.Contains(err.Error(), "s3cret") {
					t.Errorf("is taken: %q, %v", out.String(), err)
				}
				return
			}
			if err != nil || out.String() != tt.want {
				t.Errorf("%q, %v", out.String(), err)
			}
		})
	}
}

func TestImageBundles(t *testing.T) {
	if got := imageBundles([]string{"A=b", "SSL_CERT_FILE=/own.pem", "SSL_CERT_FILE=relative"}); got[0] != "/own.pem" || len(got) != 7 {
		t.Errorf("%q", got)
	}
	if got := imageBundles(nil); len(got) != 6 {
		t.Errorf("%q", got)
	}
}

func FuzzWriteCertificates(f *testing.F) {
	f.Add([]byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var out bytes.Buffer
		if writeCertificates(&out, text) == nil && !strings.HasPrefix(out.String(), "-----BEGIN CERTIFICATE-----") {
			t.Errorf("%q", out.String())
		}
	})
}

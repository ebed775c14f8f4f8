package shim

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/spec"
)

// maxCertificates bounds one file of certificates, in bytes.
const maxCertificates = 1 << 20

// readCertificates puts the files of caCertificates into the home, and behind the image's own.
func (p *prepared) readCertificates() error {
	const hint = "caCertificates are PEM files of certificates, at most 1 MiB each, without keys"
	var all bytes.Buffer
	for _, name := range p.job.Harness.CACertificates {
		b, err := p.readHostFile(name, maxCertificates)
		if err != nil {
			return &Error{Reason: ReasonEnvMissing, Msg: fmt.Sprintf("certificates %q", name), Err: err, Hint: hint}
		}
		if err := writeCertificates(&all, b); err != nil {
			return &Error{Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("certificates %q", name), Err: err, Hint: hint}
		}
	}
	if all.Len() == 0 {
		return nil
	}
	p.files = append(p.files,
		homeFile{target: spec.CAExtra, content: all.Bytes()},
		homeFile{target: spec.CABundle, content: all.Bytes(), after: imageBundles(p.host.Image.Env)})
	return nil
}

// imageBundles are the places of the image's own certificates.
func imageBundles(env []string) []string {
	bundles := slices.Clone(spec.ImageBundles)
	for _, kv := range env {
		if file, ok := strings.CutPrefix(kv, "SSL_CERT_FILE="); ok && path.IsAbs(file) {
			bundles = slices.Insert(bundles, 0, file)
		}
	}
	return bundles
}

// writeCertificates writes the certificates of a PEM text anew, so that nothing else of
// the file goes in. A text with anything but certificates is refused: a key was put there by mistake.
func writeCertificates(w *bytes.Buffer, text []byte) error {
	found := 0
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		text = rest
		if block.Type != "CERTIFICATE" {
			return fmt.Errorf("it holds a block %q", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return err
		}
		found++
		if err := pem.Encode(w, &pem.Block{Type: block.Type, Bytes: block.Bytes}); err != nil {
			return err
		}
	}
	if found == 0 {
		return errors.New("it holds no certificate")
	}
	return nil
}

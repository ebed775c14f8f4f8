package spec

// Places of the certificates that programs trust besides the image's: CAExtra holds those
// alone, CABundle the image's own in front of them.
const (
	CAExtra  = Home + "/.agentshim-ca/extra.pem"
	CABundle = Home + "/.agentshim-ca/bundle.pem"
)

// caEnv are the variables by which programs find them. Node.js adds to what it has; the others
// replace it: OpenSSL with Python's ssl and Go (SSL_CERT_FILE), Python's requests, curl, git.
var caEnv = map[string]string{
	"NODE_EXTRA_CA_CERTS": CAExtra,
	"SSL_CERT_FILE":       CABundle,
	"REQUESTS_CA_BUNDLE":  CABundle,
	"CURL_CA_BUNDLE":      CABundle,
	"GIT_SSL_CAINFO":      CABundle,
}

// ImageBundles are where images have their certificates, the likeliest first (crypto/x509,
// root_linux.go). What the image's own SSL_CERT_FILE names goes before them.
var ImageBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/ssl/ca-bundle.pem",
	"/etc/pki/tls/cacert.pem",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/cert.pem",
}

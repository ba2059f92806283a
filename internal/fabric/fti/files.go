// SPDX-License-Identifier: Apache-2.0

package fti

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Files of the credentials directory, the keys of the Secret.
const (
	fileUsername     = "username"
	filePassword     = "password"
	fileClientID     = "client_id"
	fileClientSecret = "client_secret"
	fileRealm        = "realm"
	fileCA           = "ca.crt"
)

// credentials are what a login needs.
type credentials struct {
	username, password, clientID, clientSecret, realm string
}

// readCredentials reads the files anew. Only the client secret may be missing (a public client).
func readCredentials(dir string) (credentials, error) {
	var c credentials
	for _, f := range []struct {
		name     string
		into     *string
		optional bool
	}{
		{fileUsername, &c.username, false},
		{filePassword, &c.password, false},
		{fileClientID, &c.clientID, false},
		{fileClientSecret, &c.clientSecret, true},
		{fileRealm, &c.realm, false},
	} {
		b, err := os.ReadFile(filepath.Join(dir, f.name))
		if err != nil && (!f.optional || !errors.Is(err, fs.ErrNotExist)) {
			return credentials{}, fmt.Errorf("read credentials: %w", err)
		}
		// An editor's newline at the end is not part of the secret.
		*f.into = strings.TrimRight(string(b), "\r\n")
		if *f.into == "" && !f.optional {
			return credentials{}, fmt.Errorf("read credentials: %s is empty", filepath.Join(dir, f.name))
		}
	}
	return c, nil
}

// readCA reads the CA bundle; without one the system's roots count. The text is returned too, to notice
// a change.
func readCA(dir string) (pool *x509.CertPool, bundle string, err error) {
	path := filepath.Join(dir, fileCA)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("read CA bundle: %w", err)
	}
	pool = x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, "", fmt.Errorf("read CA bundle: %s holds no PEM certificate", path)
	}
	return pool, string(b), nil
}

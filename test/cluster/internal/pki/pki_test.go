// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestIssue(t *testing.T) {
	tests := map[string]struct {
		id        Identity
		host      string
		usage     x509.ExtKeyUsage
		wantValid bool
	}{
		"serves the address it was issued for": {
			id:   Identity{CommonName: "kube-apiserver", Hosts: []string{"10.96.0.1", "kubernetes.default.svc"}},
			host: "10.96.0.1", usage: x509.ExtKeyUsageServerAuth, wantValid: true,
		},
		"serves no other address": {
			id:   Identity{CommonName: "kube-apiserver", Hosts: []string{"10.96.0.1"}},
			host: "10.96.0.2", usage: x509.ExtKeyUsageServerAuth,
		},
		"a client certificate serves nothing": {
			id: Identity{CommonName: "admin"}, usage: x509.ExtKeyUsageServerAuth,
		},
		"a client certificate identifies a client": {
			id:    Identity{CommonName: "system:node:n1", Organization: []string{"system:nodes"}},
			usage: x509.ExtKeyUsageClientAuth, wantValid: true,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ca, err := New(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err = ca.Issue("x", tc.id); err != nil {
				t.Fatal(err)
			}
			pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "x.crt"), filepath.Join(dir, "x.key"))
			if err != nil {
				t.Fatalf("certificate and key do not belong together: %v", err)
			}
			pem, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
			if err != nil {
				t.Fatal(err)
			}
			roots := x509.NewCertPool()
			if !roots.AppendCertsFromPEM(pem) {
				t.Fatal("ca.crt holds no certificate")
			}
			_, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: tc.host, KeyUsages: []x509.ExtKeyUsage{tc.usage}})
			if (err == nil) != tc.wantValid {
				t.Errorf("verify: got %v, want valid %v", err, tc.wantValid)
			}
			if diff := cmp.Diff(tc.id.Organization, pair.Leaf.Subject.Organization); diff != "" {
				t.Errorf("groups (-want +got):\n%s", diff)
			}
		})
	}
}

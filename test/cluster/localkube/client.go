// SPDX-License-Identifier: Apache-2.0

package localkube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// client is the little that the cluster itself needs of the API; client-go would make each start of
// this program seconds slower.
type client struct{ http *http.Client }

func (c *Cluster) newClient() (*client, error) {
	pair, err := tls.LoadX509KeyPair(c.pkiFile("admin.crt"), c.pkiFile("admin.key"))
	if err != nil {
		return nil, fmt.Errorf("load the administrator's certificate: %w", err)
	}
	ca, err := os.ReadFile(c.pkiFile("ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("read certificate authority: no certificate in %s", c.pkiFile("ca.crt"))
	}
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: true,
	}
	return &client{http: &http.Client{Transport: transport, Timeout: 5 * time.Second}}, nil
}

// get reads path into out, unless out is nil.
func (c *client) get(ctx context.Context, path string, out any) error {
	body, err := c.do(ctx, http.MethodGet, path, "", http.StatusOK)
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(body, out); err != nil {
		return fmt.Errorf("decode answer to GET %s: %w", path, err)
	}
	return nil
}

func (c *client) create(ctx context.Context, path, object string) error {
	_, err := c.do(ctx, http.MethodPost, path, object, http.StatusCreated)
	return err
}

func (c *client) do(ctx context.Context, method, path, body string, want int) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, APIServerURL+path, strings.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("build request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return nil, fmt.Errorf("read answer to %s %s: %w", method, path, err)
	}
	if resp.StatusCode != want {
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, strings.TrimSpace(string(answer)))
	}
	return answer, nil
}

// nodeReady says why a node does not take Pods yet.
func (c *client) nodeReady(ctx context.Context, name string) error {
	var node struct {
		Spec struct {
			Taints []struct{ Key string }
		}
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := c.get(ctx, "/api/v1/nodes/"+name, &node); err != nil {
		return err
	}
	for _, cond := range node.Status.Conditions {
		if cond.Type != "Ready" {
			continue
		}
		if cond.Status != "True" {
			return fmt.Errorf("node %s is not ready: %s", name, cond.Message)
		}
		for _, taint := range node.Spec.Taints {
			if strings.HasPrefix(taint.Key, "node.kubernetes.io/") {
				return fmt.Errorf("node %s still has the taint %s", name, taint.Key)
			}
		}
		return nil
	}
	return errors.New("node " + name + " has reported no Ready condition")
}

// probe asks a component's own health endpoint, which anybody may read.
func probe(ctx context.Context, url string) error {
	transport := &http.Transport{
		// The certificate is made by the component itself at each start; nothing secret is sent.
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("build request: %w", err)
	}
	resp, err := (&http.Client{Transport: transport, Timeout: 2 * time.Second}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return nil
}

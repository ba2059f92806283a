// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// TestUsage: what a person got wrong is said in a line that names it, and is exit code 2.
func TestUsage(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(bad, []byte("apiVersion: agent.gpu.cohdi.io/v1alpha1\nkind: Config\nfabrix: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"unknown command":       {[]string{"frobnicate"}, `"frobnicate"`},
		"unknown flag":          {[]string{"run", "--bogus"}, "--bogus"},
		"stray argument":        {[]string{"run", "now"}, `"now"`},
		"no node":               {[]string{"run", "--pod-uid=u"}, "--node-name"},
		"no Pod":                {[]string{"run", "--node-name=n"}, "--pod-uid"},
		"faulty configuration":  {[]string{"run", "--node-name=n", "--pod-uid=u", "--config=" + bad}, "config.yaml:3: fabrix"},
		"missing configuration": {[]string{"run", "--node-name=n", "--pod-uid=u", "--config=/nowhere/config.yaml"}, "/nowhere/config.yaml"},
		"check of a faulty one": {[]string{"config", "check", bad}, "config.yaml:3: fabrix"},
		"check of nothing":      {[]string{"config", "check"}, "FILE"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := root()
			cmd.SetArgs(tc.args)
			cmd.SetOut(&bytes.Buffer{})
			err := cmd.ExecuteContext(t.Context())
			if _, usage := errors.AsType[usageError](err); !usage {
				t.Fatalf("error %v is no usage error", err)
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not name %s", err, tc.want)
			}
		})
	}
}

func TestMachineOf(t *testing.T) {
	const (
		first  = "11111111-1111-4111-8111-000000000001"
		second = "22222222-2222-4222-8222-000000000002"
		third  = "33333333-3333-4333-8333-000000000003"
	)
	configured := map[string]device.Machine{"n1": third}
	for name, tc := range map[string]struct {
		provider, annotation, node string
		want                       device.Machine
		fails                      string
	}{
		"provider id wins":                    {provider: "fsas-cdi://" + first, annotation: second, node: "n1", want: first},
		"a cloud's provider id is no machine": {provider: "aws:///eu/i-0123", annotation: second, node: "n1", want: second},
		"the configuration is last":           {node: "n1", want: third},
		"a faulty annotation is not skipped":  {annotation: "rack 7", node: "n1", fails: "rack 7"},
		"nothing says it":                     {provider: "aws:///eu/i-0123", node: "n2", fails: device.AnnotationMachine},
	} {
		t.Run(name, func(t *testing.T) {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: tc.node}, Spec: corev1.NodeSpec{ProviderID: tc.provider}}
			if tc.annotation != "" {
				n.Annotations = map[string]string{device.AnnotationMachine: tc.annotation}
			}
			got, err := machineOf(n, configured)
			if tc.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tc.fails) {
					t.Fatalf("error = %v, want one that names %q", err, tc.fails)
				}
				return
			}
			if err != nil || got != tc.want {
				t.Errorf("machine = %s, %v; want %s", got, err, tc.want)
			}
		})
	}
}

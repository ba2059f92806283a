// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

// TestConfigCheck: what is said of a configuration that is in order, wherever it comes from.
func TestConfigCheck(t *testing.T) {
	const text = "apiVersion: agent.gpu.cohdi.io/v1alpha1\nkind: Config\n"
	fabric := "- {id: %s, manager: fm, endpoint: https://fm, tenant: 3b5d7a52-0000-4000-8000-000000000001, models: [{name: a100, fabricModel: A}]}\n"
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ arg, input, want string }{
		"a file":         {file, "", file + ": ok, 0 fabrics\n"},
		"standard input": {"-", text + "fabrics:\n" + fmt.Sprintf(fabric, "a"), "standard input: ok, 1 fabric\n"},
		"two fabrics":    {"-", text + "fabrics:\n" + fmt.Sprintf(fabric, "a") + fmt.Sprintf(fabric, "b"), "standard input: ok, 2 fabrics\n"},
		"a faulty one":   {"-", text + "fabrix: []\n", "standard input:3: fabrix"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := root()
			cmd.SetArgs([]string{"config", "check", tc.arg})
			cmd.SetIn(strings.NewReader(tc.input))
			var out bytes.Buffer
			cmd.SetOut(&out)
			if err := cmd.ExecuteContext(t.Context()); err != nil {
				out.WriteString(err.Error())
			}
			if !strings.HasPrefix(out.String(), tc.want) {
				t.Errorf("got %q, want %q", out.String(), tc.want)
			}
		})
	}
}

// TestNoCluster: whoever named a kubeconfig that is not there hears which.
func TestNoCluster(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "admin.conf")
	for name, args := range map[string][]string{
		"in the environment": {"uninstall"},
		"by the flag":        {"status", "--all", "--kubeconfig", missing},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KUBECONFIG", missing)
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			cmd := root()
			cmd.SetArgs(args)
			if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), missing) {
				t.Errorf("got %v, want an error that names %s", err, missing)
			}
		})
	}
}

// TestHelp: what only has subcommands does not claim to take flags of its own.
func TestHelp(t *testing.T) {
	for _, args := range [][]string{{}, {"config"}} {
		cmd := root()
		cmd.SetArgs(args)
		var out bytes.Buffer
		cmd.SetOut(&out)
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		path := strings.Join(append([]string{"cohdi-agent"}, args...), " ")
		if got := out.String(); strings.Contains(got, path+" [flags]") || !strings.Contains(got, path+" [command]") {
			t.Errorf("help of %s:\n%s", path, got)
		}
	}
}

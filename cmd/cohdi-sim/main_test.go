// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const demo = "../../test/chassis/demo.yaml"

func TestConfigure(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("tenant: [\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		args []string
		want string // part of the error; empty is success
	}{
		{"demo", []string{"--config", demo, "--dir", "x"}, ""},
		{"no config", []string{"--dir", "x"}, "--config"},
		{"no dir", []string{"--config", demo}, "dir"},
		{"unknown flag", []string{"--config", demo, "--dri", "x"}, "dri"},
		{"argument", []string{"--config", demo, "--dir", "x", "run"}, "no arguments"},
		{"no file", []string{"--config", "absent.yaml", "--dir", "x"}, "absent.yaml"},
		{"no YAML", []string{"--config", bad, "--dir", "x"}, "bad.yaml"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			_, err := configure(tc.args)
			if tc.want == "" && err != nil {
				t.Error(err)
			}
			if tc.want != "" && (!errors.Is(err, errUsage) || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error %v, want a usage error about %q", err, tc.want)
			}
		})
	}
}

func TestConfigure_flagsWin(t *testing.T) {
	cfg, err := configure([]string{"--config", demo, "--dir", "x", "--listen-fm", "1.2.3.4:5", "--nvml-library", "lib"})
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Listen.FM != "1.2.3.4:5" || cfg.Listen.Control != "127.0.0.1:8444" || cfg.Driver.NVMLLibrary != "lib" || !filepath.IsAbs(cfg.Dir) {
		t.Errorf("configuration %+v %+v, dir %s", cfg.Listen, cfg.Driver, cfg.Dir)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
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

func TestCtl(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := new(bytes.Buffer)
		if _, err := body.ReadFrom(r.Body); err != nil {
			t.Error(err)
		}
		switch got := r.Method + " " + r.URL.RequestURI() + " " + body.String(); got {
		case "GET /state ":
			w.Write([]byte(`{"devices":[{"id":"g","phase":"attached","machine":"n1","bound":true,"minor":3}],"violations":2}`))
		case "POST /timing {}", "DELETE /fault?name=x ":
			w.Write([]byte("{}"))
		default:
			w.WriteHeader(http.StatusNotFound)
			w.Write([]byte(`{"error":"no such thing"}`))
		}
	}))
	defer s.Close()
	tests := []struct {
		args          []string
		out, errorHas string
	}{
		{[]string{"status"}, "nvidia3", ""},
		{[]string{"get", "state"}, `"violations": 2`, ""},
		{[]string{"post", "/timing", "{}"}, "{}", ""},
		{[]string{"delete", "fault?name=x"}, "{}", ""},
		{[]string{"get", "nothing"}, "", "no such thing"},
		{[]string{"dance"}, "", "no command"},
		{nil, "", "no command"},
	}
	for _, tc := range tests {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			var out bytes.Buffer
			err := ctl(t.Context(), append([]string{"--control", s.URL}, tc.args...), &out)
			if (err != nil) != (tc.errorHas != "") || err != nil && !strings.Contains(err.Error(), tc.errorHas) {
				t.Errorf("error %v, want %q", err, tc.errorHas)
			}
			if !strings.Contains(out.String(), tc.out) {
				t.Errorf("output %q, want %q", out.String(), tc.out)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// debianPackage is something that the tests need from the machine.
type debianPackage struct {
	name string
	// files are places where what it brings may be; one of them is enough, whoever put it there.
	files []string
	// static: the file has to be a program that runs without a loader.
	static bool
}

func debianPackages() []debianPackage {
	return []debianPackage{
		{name: "buildah", files: []string{"/usr/bin/buildah", "/usr/local/bin/buildah"}},
		{name: "busybox-static", files: []string{"/bin/busybox"}, static: true},
		{name: "ca-certificates", files: []string{"/etc/ssl/certs/ca-certificates.crt"}},
		{name: "containernetworking-plugins", files: []string{"/usr/lib/cni/bridge"}},
		{name: "gcc", files: []string{"/usr/bin/gcc"}},
		{name: "iproute2", files: []string{"/sbin/ip", "/bin/ip"}},
		{name: "iptables", files: []string{"/usr/sbin/iptables", "/sbin/iptables"}},
		{name: "libc6-dev", files: []string{"/usr/include/stdio.h"}},
		{name: "procps", files: []string{"/sbin/sysctl", "/usr/bin/sysctl"}},
		{name: "runc", files: []string{"/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc"}},
		{name: "util-linux", files: []string{"/usr/bin/nsenter"}},
	}
}

func (p debianPackage) present() bool {
	for _, file := range p.files {
		if _, err := os.Stat(file); err == nil && (!p.static || isStatic(file)) {
			return true
		}
	}
	return false
}

// isStatic reports whether a program needs no loader.
func isStatic(path string) bool {
	program, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer program.Close()
	return program.Section(".interp") == nil
}

// ensurePackages installs what is missing.
func ensurePackages(ctx context.Context, out io.Writer) error {
	var missing []string
	for _, pkg := range debianPackages() {
		if !pkg.present() {
			missing = append(missing, pkg.name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this machine lacks what Debian calls %s: install it", strings.Join(missing, ", "))
	}
	fmt.Fprintf(out, "installing Debian packages: %s\n", strings.Join(missing, " "))
	for _, args := range [][]string{
		{"update", "-qq"},
		append([]string{"install", "-qq", "-y", "--no-install-recommends"}, missing...),
	} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		var output bytes.Buffer
		cmd.Stdout, cmd.Stderr = &output, &output
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("run apt-get %s: %w\n%s", strings.Join(args, " "), err, output.String())
		}
	}
	return nil
}

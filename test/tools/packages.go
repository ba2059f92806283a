// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// debianPackages maps each Debian package that the tests need to a file that it brings. The file
// decides, so that another distribution can bring it in another way.
func debianPackages() [][2]string {
	return [][2]string{
		{"buildah", "/usr/bin/buildah"},
		{"busybox-static", "/bin/busybox"},
		{"ca-certificates", "/etc/ssl/certs/ca-certificates.crt"},
		{"containernetworking-plugins", "/usr/lib/cni/bridge"},
		{"gcc", "/usr/bin/gcc"},
		{"iproute2", "/sbin/ip"},
		{"iptables", "/usr/sbin/iptables"},
		{"libc6-dev", "/usr/include/stdio.h"},
		{"procps", "/sbin/sysctl"},
		{"runc", "/usr/sbin/runc"},
		{"util-linux", "/usr/bin/nsenter"},
	}
}

// ensurePackages installs what is missing.
func ensurePackages(ctx context.Context, out io.Writer) error {
	var missing []string
	for _, pkg := range debianPackages() {
		if _, err := os.Stat(pkg[1]); err != nil {
			missing = append(missing, pkg[0])
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this machine lacks what Debian calls %s; install it", strings.Join(missing, ", "))
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

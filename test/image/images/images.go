// SPDX-License-Identifier: Apache-2.0

package images

import (
	"fmt"
	"os"

	"github.com/cohdi/cohdi-agent/test/image/oci"
)

// Names of the images, as manifests refer to them.
const (
	AgentName = "ghcr.io/cohdi/cohdi-agent:dev"
	TestName  = "docker.io/cohdi/test:dev"
	PauseName = "docker.io/cohdi/pause:dev"
)

// busybox is where Debian's busybox-static puts its program.
const busybox = "/bin/busybox"

// Pause is the image of a Pod's sandbox: something that holds namespaces and does nothing.
func Pause() (oci.Image, error) {
	img, err := fromBusybox(PauseName)
	img.Entrypoint = []string{"/bin/sleep", "infinity"}
	return img, err
}

// Test is the image of the Pods in tests and examples: a shell and small tools.
func Test() (oci.Image, error) {
	img, err := fromBusybox(TestName)
	img.Cmd = []string{"/bin/sh"}
	return img, err
}

func fromBusybox(name string) (oci.Image, error) {
	if _, err := os.Stat(busybox); err != nil {
		return oci.Image{}, fmt.Errorf("build image %s: %w (Debian package busybox-static)", name, err)
	}
	files := []oci.File{{Path: "/bin/busybox", Source: busybox, Mode: 0o755}}
	for _, applet := range []string{
		"awk", "cat", "cp", "date", "dd", "df", "echo", "env", "expr", "false", "find", "grep", "head", "hostname", "id", "ip", "kill",
		"ln", "ls", "mkdir", "mknod", "mount", "mv", "nc", "nslookup", "od", "ping", "printf", "ps", "pwd", "readlink", "rm", "rmdir",
		"sed", "seq", "sh", "sleep", "sort", "stat", "tail", "tee", "test", "timeout", "touch", "tr", "true", "umount", "uname", "uniq",
		"usleep", "vi", "wc", "wget", "which", "xargs",
	} {
		files = append(files, oci.File{Path: "/bin/" + applet, Link: "busybox"})
	}
	return oci.Image{Name: name, Files: files, Env: []string{"PATH=/bin"}}, nil
}

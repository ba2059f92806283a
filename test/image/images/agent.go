// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/cohdi/cohdi-agent/test/image/oci"
)

// Programs are what the image is for, by the path of each on this machine.
type Programs struct {
	// Agent is linked against the C library, because it loads the GPU driver's library at run time.
	Agent string
	// Hook is NVIDIA's nvidia-cdi-hook, which the agent hands to the host's container runtime.
	Hook string
}

// Agent is the agent's image around its programs.
func Agent(p Programs) (oci.Image, error) {
	files, err := cLibrary()
	if err != nil {
		return oci.Image{}, fmt.Errorf("build image %s: %w", AgentName, err)
	}
	files = append(files,
		oci.File{Path: "/usr/bin/cohdi-agent", Source: p.Agent, Mode: 0o755},
		oci.File{Path: "/usr/bin/nvidia-cdi-hook", Source: p.Hook, Mode: 0o755},
		oci.File{Path: "/etc/ssl/certs/ca-certificates.crt", Source: "/etc/ssl/certs/ca-certificates.crt"},
		oci.File{Path: "/etc/nsswitch.conf", Content: []byte("hosts: files dns\n")},
		oci.File{Path: "/etc/passwd", Content: []byte("root:x:0:0:root:/:/sbin/nologin\n")},
		oci.File{Path: "/etc/group", Content: []byte("root:x:0:\n")},
	)
	return oci.Image{
		Name: AgentName, Files: files, Entrypoint: []string{"/usr/bin/cohdi-agent"},
		Env: []string{"PATH=/usr/bin"},
		Labels: map[string]string{
			"org.opencontainers.image.title":    "cohdi-agent",
			"org.opencontainers.image.source":   "https://github.com/cohdi/cohdi-agent",
			"org.opencontainers.image.licenses": "Apache-2.0",
		},
	}, nil
}

// cLibrary lists the parts of Debian's libc6 that the agent or a GPU driver's libraries load.
func cLibrary() ([]oci.File, error) {
	loaders := map[string][2]string{
		"amd64": {"x86_64-linux-gnu", "/lib64/ld-linux-x86-64.so.2"},
		"arm64": {"aarch64-linux-gnu", "/lib/ld-linux-aarch64.so.1"},
	}
	loader, ok := loaders[runtime.GOARCH]
	if !ok {
		return nil, fmt.Errorf("find the C library: no known place on %s", runtime.GOARCH)
	}
	dir := "/lib/" + loader[0]
	files := []oci.File{
		{Path: loader[1], Source: loader[1], Mode: 0o755},
		// Its licence asks that the notice goes with it.
		{Path: "/usr/share/doc/libc6/copyright", Source: "/usr/share/doc/libc6/copyright"},
	}
	for _, lib := range []string{
		"libc.so.6", "libdl.so.2", "libm.so.6", "libnss_dns.so.2", "libnss_files.so.2", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1",
	} {
		files = append(files, oci.File{Path: dir + "/" + lib, Source: dir + "/" + lib})
	}
	for _, f := range files {
		if _, err := os.Stat(f.Source); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("find the C library: %w (Debian package libc6)", err)
		}
	}
	return files, nil
}

// Build compiles the image's programs into dir, the agent as of that version, and checks that the image will hold all that they load.
func Build(ctx context.Context, dir, version string) (Programs, error) {
	p := Programs{Agent: filepath.Join(dir, "cohdi-agent"), Hook: filepath.Join(dir, "nvidia-cdi-hook")}
	// go-nvml resolves the driver's symbols when they are first called, not when the program starts.
	const flags = "-ldflags=-s -w -extldflags=-Wl,-z,lazy"
	// Without grpc's trace pages and what calls methods by name, the linker drops what nobody calls: half of the agent.
	const tags = "-tags=grpcnotrace"
	for target, of := range map[string]struct{ pkg, flags string }{
		p.Agent: {"./cmd/cohdi-agent", flags + " -X main.version=" + version},
		p.Hook:  {"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook", flags},
	} {
		// Not -trimpath: it would compile every dependency once more than tests do. The Dockerfile builds in
		// a folder of a fixed name, so that its result can be made again.
		cmd := exec.CommandContext(ctx, "go", "build", tags, of.flags, "-o", target, of.pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return Programs{}, fmt.Errorf("compile %s: %w", of.pkg, err)
		}
		if err := checkLibraries(ctx, target); err != nil {
			return Programs{}, err
		}
	}
	return p, checkSize(p.Agent)
}

// checkSize refuses an agent in which something may call any method by its name: the linker then keeps all methods of all
// types, and the agent is twice as large, on disk and in the memory of each node.
func checkSize(agent string) error {
	const caller = "text/template.(*state).evalField"
	program, err := os.ReadFile(agent)
	if err != nil {
		return fmt.Errorf("look for %s in the agent: %w", caller, err)
	}
	if bytes.Contains(program, []byte(caller)) {
		return fmt.Errorf("%s links %s, for which the linker keeps every method of every type: see go build -ldflags=-dumpdep for who needs it", agent, caller)
	}
	return nil
}

// checkLibraries refuses a program that needs a library the image does not have.
func checkLibraries(ctx context.Context, binary string) error {
	out, err := exec.CommandContext(ctx, "ldd", binary).Output()
	if err != nil {
		return fmt.Errorf("list the libraries of %s: %w", binary, err)
	}
	have, err := cLibrary()
	if err != nil {
		return err
	}
	known := map[string]bool{"linux-vdso.so.1": true}
	for _, f := range have {
		known[filepath.Base(f.Path)] = true
	}
	for line := range bytes.Lines(out) {
		if fields := bytes.Fields(line); len(fields) > 0 && !known[filepath.Base(string(fields[0]))] {
			return fmt.Errorf("%s needs %s, which the image does not hold: add it to cLibrary", binary, fields[0])
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cohdi/cohdi-agent/test/image/images"
	"github.com/cohdi/cohdi-agent/test/image/oci"
)

// TestDockerfile builds the image both ways around a stand-in for the programs and compares what comes out: the two
// descriptions must not drift apart. What the programs do is of no interest here.
func TestDockerfile(t *testing.T) {
	buildah, err := exec.LookPath("buildah")
	if err != nil {
		t.Skip("buildah is not installed (make tools does that)")
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err = os.WriteFile(program, []byte("a program"), 0o755); err != nil {
		t.Fatal(err)
	}
	img, err := images.Agent(images.Programs{Agent: program, Hook: program})
	if err != nil {
		t.Fatal(err)
	}
	direct := filepath.Join(dir, "direct.tar")
	if err = oci.Write(img, direct); err != nil {
		t.Fatal(err)
	}
	// The build context: the Dockerfile and the files laid out where it looks for them.
	context := filepath.Join(dir, "context")
	if err = oci.WriteDir(img, filepath.Join(context, ".cache/image/root")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"Dockerfile", ".dockerignore"} {
		content, readErr := os.ReadFile(filepath.Join("../..", name))
		if readErr != nil {
			t.Fatal(readErr)
		}
		if err = os.WriteFile(filepath.Join(context, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	built := filepath.Join(dir, "built.tar")
	storage := []string{"--root", filepath.Join(dir, "storage"), "--runroot", filepath.Join(dir, "run"), "--storage-driver", "vfs"}
	args := append(storage, "build", "--isolation", "chroot", "--build-arg", "FILES=prepared", "-t", "oci-archive:"+built, context)
	if out, buildErr := exec.CommandContext(t.Context(), buildah, args...).CombinedOutput(); buildErr != nil {
		t.Fatalf("buildah: %v\n%s", buildErr, out)
	}
	want, got := unpack(t, direct), unpack(t, built)
	if diff := cmp.Diff(want.Files, got.Files); diff != "" {
		t.Errorf("files (-make image +Dockerfile):\n%s", diff)
	}
	delete(got.Config.Labels, "io.buildah.version")
	if diff := cmp.Diff(want.Config, got.Config); diff != "" {
		t.Errorf("configuration (-make image +Dockerfile):\n%s", diff)
	}
}

// content is what two images must have in common.
type content struct {
	Files  map[string]string
	Config struct {
		Entrypoint, Cmd, Env []string
		Labels               map[string]string
		WorkingDir           string
	}
}

func unpack(t *testing.T, archive string) content {
	t.Helper()
	blobs := map[string][]byte{}
	eachEntry(t, archive, func(h *tar.Header, data []byte) { blobs[h.Name] = data })
	blob := func(digest string) []byte { return blobs["blobs/sha256/"+strings.TrimPrefix(digest, "sha256:")] }
	type reference struct{ Digest, MediaType string }
	var index struct{ Manifests []reference }
	var manifest struct {
		Config reference
		Layers []reference
	}
	var config struct{ Config json.RawMessage }
	var c content
	for _, step := range []struct {
		data func() []byte
		into any
	}{
		{func() []byte { return blobs["index.json"] }, &index},
		{func() []byte { return blob(index.Manifests[0].Digest) }, &manifest},
		{func() []byte { return blob(manifest.Config.Digest) }, &config},
		{func() []byte { return config.Config }, &c.Config},
	} {
		if err := json.Unmarshal(step.data(), step.into); err != nil {
			t.Fatalf("decode %s: %v", archive, err)
		}
	}
	c.Files = map[string]string{}
	for _, layer := range manifest.Layers {
		name := filepath.Join(t.TempDir(), "layer")
		if err := os.WriteFile(name, blob(layer.Digest), 0o600); err != nil {
			t.Fatal(err)
		}
		eachEntry(t, name, func(h *tar.Header, data []byte) {
			if h.Typeflag != tar.TypeDir {
				c.Files[h.Name] = fmt.Sprintf("%c %o %s %x", h.Typeflag, h.Mode&0o777, h.Linkname, sha256.Sum256(data))
			}
		})
	}
	return c
}

// eachEntry reads a tar file that may be compressed.
func eachEntry(t *testing.T, name string, visit func(*tar.Header, []byte)) {
	t.Helper()
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	archive := tar.NewReader(decompress(t, file))
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("read %s: %v", name, err)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatalf("read %s: %v", name, err)
		}
		visit(h, data)
	}
}

func decompress(t *testing.T, file *os.File) io.Reader {
	t.Helper()
	start := make([]byte, 2)
	if _, err := io.ReadFull(file, start); err != nil {
		t.Fatal(err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if start[0] != 0x1f || start[1] != 0x8b {
		return file
	}
	z, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

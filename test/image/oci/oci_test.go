// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// readTar returns name -> content of a tar file, and the order of the names.
func readTar(t *testing.T, r io.Reader) (files map[string]string, order []string) {
	t.Helper()
	files = map[string]string{}
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, order
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(epoch) || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s: time %v, owner %d:%d, want %v and root", h.Name, h.ModTime, h.Uid, h.Gid, epoch)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(content) + h.Linkname
		order = append(order, h.Name)
	}
}

func sample(t *testing.T) Image {
	t.Helper()
	source := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(source, []byte("program"), 0o600); err != nil {
		t.Fatal(err)
	}
	return Image{
		Name: "example.com/a:1", Entrypoint: []string{"/usr/bin/program"}, Env: []string{"PATH=/usr/bin"},
		Files: []File{
			{Path: "/usr/bin/program", Source: source, Mode: 0o755},
			{Path: "/bin/sh", Link: "busybox"},
			{Path: "/etc/passwd", Content: []byte("root")},
		},
	}
}

func TestWrite(t *testing.T) {
	target := filepath.Join(t.TempDir(), "a.tar")
	if err := Write(sample(t), target); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(target)
	if err != nil {
		t.Fatal(err)
	}
	archive, _ := readTar(t, bytes.NewReader(data))

	var index struct{ Manifests []descriptor }
	decode(t, archive["index.json"], &index)
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	decode(t, blob(t, archive, index.Manifests[0]), &manifest)
	var config struct {
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
		Config struct{ Entrypoint []string }
	}
	decode(t, blob(t, archive, manifest.Config), &config)

	if diff := cmp.Diff("example.com/a:1", index.Manifests[0].Annotations["io.containerd.image.name"]); diff != "" {
		t.Errorf("name (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{manifest.Layers[0].Digest}, config.RootFS.DiffIDs); diff != "" {
		t.Errorf("the configuration names another layer (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"/usr/bin/program"}, config.Config.Entrypoint); diff != "" {
		t.Errorf("entry point (-want +got):\n%s", diff)
	}
	files, order := readTar(t, strings.NewReader(blob(t, archive, manifest.Layers[0])))
	if diff := cmp.Diff([]string{"bin/", "bin/sh", "etc/", "etc/passwd", "usr/", "usr/bin/", "usr/bin/program"}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff("program"+"busybox"+"root", files["usr/bin/program"]+files["bin/sh"]+files["etc/passwd"]); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
}

// blob returns a blob after comparing it with its descriptor.
func blob(t *testing.T, archive map[string]string, d descriptor) string {
	t.Helper()
	content := archive["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
	if "sha256:"+digest([]byte(content)) != d.Digest || len(content) != d.Size {
		t.Fatalf("blob %s: %d bytes with digest %s, want %d", d.Digest, len(content), digest([]byte(content)), d.Size)
	}
	return content
}

func decode(t *testing.T, data string, out any) {
	t.Helper()
	if err := json.Unmarshal([]byte(data), out); err != nil {
		t.Fatalf("decode %q: %v", data, err)
	}
}

func TestWriteIsReproducible(t *testing.T) {
	img := sample(t)
	first, second := filepath.Join(t.TempDir(), "a.tar"), filepath.Join(t.TempDir(), "b.tar")
	if err := Write(img, first); err != nil {
		t.Fatal(err)
	}
	// The same image, said in another order, from a file with another time.
	img.Files[0], img.Files[2] = img.Files[2], img.Files[0]
	if err := os.Chtimes(img.Files[2].Source, time.Unix(5, 0), time.Unix(5, 0)); err != nil {
		t.Fatal(err)
	}
	if err := Write(img, second); err != nil {
		t.Fatal(err)
	}
	a, errA := os.ReadFile(first)
	b, errB := os.ReadFile(second)
	if errA != nil || errB != nil || !bytes.Equal(a, b) {
		t.Errorf("two archives of one image differ: %d and %d bytes (%v, %v)", len(a), len(b), errA, errB)
	}
}

func TestWriteKeepsTheOldFileOnError(t *testing.T) {
	target := filepath.Join(t.TempDir(), "a.tar")
	if err := os.WriteFile(target, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	img := Image{Name: "x", Files: []File{{Path: "/a", Source: filepath.Join(t.TempDir(), "missing")}}}
	if err := Write(img, target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want a missing source", err)
	}
	if data, err := os.ReadFile(target); err != nil || string(data) != "old" {
		t.Errorf("target is %q, %v", data, err)
	}
	if entries, err := os.ReadDir(filepath.Dir(target)); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestWriteDir(t *testing.T) {
	dir := t.TempDir()
	if err := WriteDir(sample(t), dir); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "usr/bin/program"))
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("program: %v, %v", info, err)
	}
	link, err := os.Readlink(filepath.Join(dir, "bin/sh"))
	if diff := cmp.Diff("busybox", link); diff != "" || err != nil {
		t.Errorf("link (-want +got): %v\n%s", err, diff)
	}
}

// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// File is one entry of an image's only layer.
type File struct {
	// Path is absolute in the image.
	Path string
	// Source is the file on this machine whose content is taken; symbolic links are followed.
	Source string
	// Content is taken where Source is empty.
	Content []byte
	// Link makes the entry a symbolic link to it.
	Link string
	// Mode is the permission of the entry; 0 means 0644.
	Mode int64
}

// Image is what Write makes.
type Image struct {
	// Name is the full reference under which a runtime finds the imported image.
	Name       string
	Files      []File
	Entrypoint []string
	Cmd        []string
	Env        []string
	Labels     map[string]string
}

// epoch is every entry's time. Not zero: some tools take zero as "no time given".
var epoch = time.Unix(1, 0).UTC() //nolint:gochecknoglobals // a constant that the language cannot express

const (
	mediaTypeManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaTypeConfig   = "application/vnd.oci.image.config.v1+json"
	mediaTypeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Write writes the image to the file at target, which is replaced as a whole or not at all.
func Write(img Image, target string) error {
	layer, err := img.layer()
	if err != nil {
		return fmt.Errorf("build layer of image %s: %w", img.Name, err)
	}
	config, err := json.Marshal(img.config(layer))
	if err != nil {
		return fmt.Errorf("encode configuration of image %s: %w", img.Name, err)
	}
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": mediaTypeManifest,
		"config": describe(mediaTypeConfig, config), "layers": []descriptor{describe(mediaTypeLayer, layer)},
	})
	if err != nil {
		return fmt.Errorf("encode manifest of image %s: %w", img.Name, err)
	}
	entry := describe(mediaTypeManifest, manifest)
	// The first is what containerd names the image after, the second what other tools do.
	entry.Annotations = map[string]string{"io.containerd.image.name": img.Name, "org.opencontainers.image.ref.name": img.Name}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []descriptor{entry}})
	if err != nil {
		return fmt.Errorf("encode index of image %s: %w", img.Name, err)
	}
	files := []File{
		{Path: "/oci-layout", Content: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{Path: "/index.json", Content: index},
	}
	for _, blob := range [][]byte{layer, config, manifest} {
		files = append(files, File{Path: "/blobs/sha256/" + digest(blob), Content: blob})
	}
	return writeFile(target, func(w io.Writer) error { return writeTar(w, files) })
}

func (img Image) layer() ([]byte, error) {
	var layer bytes.Buffer
	if err := writeTar(&layer, img.Files); err != nil {
		return nil, err
	}
	return layer.Bytes(), nil
}

func (img Image) config(layer []byte) any {
	return map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "created": epoch.Format(time.RFC3339),
		"config": map[string]any{"Entrypoint": img.Entrypoint, "Cmd": img.Cmd, "Env": img.Env, "Labels": img.Labels},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
	}
}

func describe(mediaType string, blob []byte) descriptor {
	return descriptor{MediaType: mediaType, Digest: "sha256:" + digest(blob), Size: len(blob)}
}

func digest(blob []byte) string {
	sum := sha256.Sum256(blob)
	return hex.EncodeToString(sum[:])
}

// writeTar writes files in the order of their paths, each folder before what is in it.
func writeTar(w io.Writer, files []File) error {
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	archive := tar.NewWriter(w)
	folders := map[string]bool{"/": true}
	for _, f := range files {
		if err := writeFolders(archive, path.Dir(f.Path), folders); err != nil {
			return err
		}
		if err := writeEntry(archive, f); err != nil {
			return err
		}
	}
	return archive.Close()
}

func writeFolders(archive *tar.Writer, dir string, done map[string]bool) error {
	if done[dir] {
		return nil
	}
	if err := writeFolders(archive, path.Dir(dir), done); err != nil {
		return err
	}
	done[dir] = true
	return archive.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: strings.TrimPrefix(dir, "/") + "/", Mode: 0o755, ModTime: epoch, Format: tar.FormatPAX,
	})
}

func writeEntry(archive *tar.Writer, f File) error {
	header := &tar.Header{Name: strings.TrimPrefix(f.Path, "/"), ModTime: epoch, Format: tar.FormatPAX}
	if f.Link != "" {
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.Link, 0o777
		return archive.WriteHeader(header)
	}
	content, mode, err := f.read()
	if err != nil {
		return err
	}
	header.Typeflag, header.Mode, header.Size = tar.TypeReg, mode, int64(len(content))
	if err := archive.WriteHeader(header); err != nil {
		return fmt.Errorf("write header of %s: %w", f.Path, err)
	}
	if _, err := archive.Write(content); err != nil {
		return fmt.Errorf("write content of %s: %w", f.Path, err)
	}
	return nil
}

// writeFile lets write fill a temporary file and puts it in the place of target.
func writeFile(target string, write func(io.Writer) error) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return fmt.Errorf("create folder for image: %w", err)
	}
	temp, err := os.CreateTemp(filepath.Dir(target), "."+filepath.Base(target)+"-*")
	if err != nil {
		return fmt.Errorf("create image: %w", err)
	}
	defer os.Remove(temp.Name())
	if err := write(temp); err != nil {
		_ = temp.Close()
		return fmt.Errorf("write image: %w", err)
	}
	if err := temp.Close(); err != nil {
		return fmt.Errorf("write image: %w", err)
	}
	if err := os.Chmod(temp.Name(), 0o644); err != nil {
		return fmt.Errorf("write image: %w", err)
	}
	if err := os.Rename(temp.Name(), target); err != nil {
		return fmt.Errorf("write image: %w", err)
	}
	return nil
}

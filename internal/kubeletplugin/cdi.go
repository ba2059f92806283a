// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	cdiVendor = device.Driver
	cdiClass  = "gpu"
	cdiKind   = cdiVendor + "/" + cdiClass
	specExt   = ".json"

	// The kubelet helper names the CDI specs of device metadata
	// <driver>_metadata_<claim UID>_<request>.json and keeps what they mount in a directory
	// <namespace>_<name> of its own.
	metadataPrefix = device.Driver + "_metadata_"
	metadataDir    = "dra-device-metadata"
)

// specDir keeps one CDI spec for each claim. A name is never used twice, since it holds the claim's
// UID: a runtime that caches specs cannot take an old one for it.
type specDir struct{ dir string }

// specName is the file of a claim's spec.
func specName(claim types.UID) string {
	return cdi.GenerateTransientSpecName(cdiVendor, cdiClass, string(claim)) + specExt
}

// claimOfSpec is the claim that a file or temporary file of the directory was written for, and whether
// it is one of ours at all.
func claimOfSpec(file string) (types.UID, bool) {
	if rest, ok := strings.CutPrefix(file, metadataPrefix); ok {
		uid, _, ok := strings.Cut(rest, "_")
		return types.UID(uid), ok && strings.HasSuffix(file, specExt)
	}
	name, temporary := strings.CutPrefix(file, ".")
	rest, ok := strings.CutPrefix(name, cdi.GenerateTransientSpecName(cdiVendor, cdiClass, ""))
	uid, end, found := strings.Cut(rest, specExt)
	if temporary {
		return types.UID(uid), ok && found && strings.HasSuffix(end, ".tmp")
	}
	return types.UID(uid), ok && found && end == ""
}

// cdiName is the CDI device name of one allocation result: by claim, request and entry, never by an
// index or a minor, which move.
func cdiName(claim types.UID, d preparedDevice) string {
	return strings.Join([]string{string(claim), strings.ReplaceAll(d.Request, "/", "."), d.Entry}, "_")
}

func cdiID(claim types.UID, d preparedDevice) string {
	return parser.QualifiedName(cdiVendor, cdiClass, cdiName(claim, d))
}

// checkEdits makes sure that the edits open each GPU's own node and no other's: whoever made them looked
// at the driver at another moment, and leaves out a node that udev has not made yet.
func checkEdits(gpus []GPU, common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits) error {
	if nodes := gpuNodes(common); len(nodes) > 0 {
		return fmt.Errorf("the edits for every container open %s", nodes)
	}
	if len(own) != len(gpus) {
		return fmt.Errorf("there are edits for %d of %d GPUs", len(own), len(gpus))
	}
	for i, g := range gpus {
		want := []string{fmt.Sprintf("/dev/nvidia%d", g.Minor)}
		if nodes := gpuNodes(own[i]); !slices.Equal(nodes, want) {
			return waitFor("the device node %s of GPU %s: the host offers %s", want[0], g.UUID, nodes)
		}
	}
	return nil
}

// gpuNodes are the device nodes of GPUs among the edits' nodes.
func gpuNodes(e cdispecs.ContainerEdits) []string {
	var nodes []string
	for _, d := range e.DeviceNodes {
		number, ok := strings.CutPrefix(d.Path, "/dev/nvidia")
		if _, err := strconv.ParseUint(number, 10, 32); ok && err == nil {
			nodes = append(nodes, d.Path)
		}
	}
	return nodes
}

// write stores the claim's spec and reads it back as a runtime would before it takes the name. It
// leaves a file that says the same alone.
func (s specDir) write(claim types.UID, devices []preparedDevice, common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits) error {
	spec := &cdispecs.Spec{Kind: cdiKind, ContainerEdits: common}
	for i, d := range devices {
		name := cdiName(claim, d)
		if slices.ContainsFunc(spec.Devices, func(has cdispecs.Device) bool { return has.Name == name }) {
			continue
		}
		spec.Devices = append(spec.Devices, cdispecs.Device{Name: name, ContainerEdits: own[i]})
	}
	version, err := cdispecs.MinimumRequiredVersion(spec)
	if err != nil {
		return fmt.Errorf("find the version of the CDI spec for claim %s: %w", claim, err)
	}
	spec.Version = version
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the CDI spec for claim %s: %w", claim, err)
	}
	path := filepath.Join(s.dir, specName(claim))
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil { //nolint:gosec // the runtime, and tools of other users, read it
		return fmt.Errorf("create the CDI directory: %w", err)
	}
	return replaceFile(path, data, 0o644, func(tmp string) error {
		if _, err := cdi.ReadSpec(tmp, 0); err != nil {
			return fmt.Errorf("check the CDI spec for claim %s: %w", claim, err)
		}
		return nil
	})
}

// specDevice is one device of a spec, as its name tells.
type specDevice struct{ request, entry string }

// claims reads which devices each claim's spec is for. A file that says nothing is left out.
func (s specDir) claims() (map[types.UID][]specDevice, error) {
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, ignoreMissing(err)
	}
	all := map[types.UID][]specDevice{}
	for _, f := range files {
		uid, ours := claimOfSpec(f.Name())
		if !ours || f.Name() != specName(uid) {
			continue
		}
		spec, err := cdi.ReadSpec(filepath.Join(s.dir, f.Name()), 0)
		if err != nil || spec == nil {
			continue // it was written whole, so that somebody has damaged it
		}
		for _, d := range spec.Devices {
			if name := strings.Split(d.Name, "_"); len(name) == 3 && name[0] == string(uid) {
				all[uid] = append(all[uid], specDevice{strings.ReplaceAll(name[1], ".", "/"), name[2]})
			}
		}
	}
	return all, nil
}

// remove deletes the claim's spec and what a crash left of writing it. A directory or file that is gone
// is as good.
func (s specDir) remove(claim types.UID) error {
	path := filepath.Join(s.dir, specName(claim))
	// Looked for first: on a file system that has become read-only, removing what is not there fails too.
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return s.removeTemporary(claim)
	}
	if err := ignoreMissing(os.Remove(path)); err != nil {
		return fmt.Errorf("remove the CDI spec of claim %s: %w", claim, err)
	}
	return s.removeTemporary(claim)
}

func (s specDir) removeTemporary(claim types.UID) error {
	left, err := filepath.Glob(filepath.Join(s.dir, tempPattern(specName(claim))))
	for _, tmp := range left {
		err = errors.Join(err, ignoreMissing(os.Remove(tmp)))
	}
	if err != nil {
		return fmt.Errorf("remove temporary CDI specs of claim %s: %w", claim, err)
	}
	return nil
}

// removeStrays deletes our files whose claim is not among those to keep, and returns their names.
func (s specDir) removeStrays(keep func(types.UID) bool) (removed []string, err error) {
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, ignoreMissing(err)
	}
	for _, f := range files {
		uid, ours := claimOfSpec(f.Name())
		if !ours || keep(uid) {
			continue
		}
		if rmErr := ignoreMissing(os.Remove(filepath.Join(s.dir, f.Name()))); rmErr != nil {
			err = errors.Join(err, fmt.Errorf("remove a CDI spec without claim: %w", rmErr))
			continue
		}
		removed = append(removed, f.Name())
	}
	return removed, err
}

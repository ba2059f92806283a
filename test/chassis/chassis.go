// SPDX-License-Identifier: Apache-2.0

package chassis

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Default is the kind of manager that the files are written for.
const Default = "fm"

// Paths are two files that fit each other: the simulator's configuration and the agent's.
type Paths struct{ Chassis, Agent string }

// Managers are the kinds that there are files for.
func Managers(root string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir(root), "manager-*.yaml"))
	if err != nil {
		return nil, fmt.Errorf("look for the kinds of managers: %w", err)
	}
	all := []string{Default}
	for _, f := range files {
		all = append(all, strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "manager-"), ".yaml"))
	}
	slices.Sort(all)
	return all, nil
}

func dir(root string) string { return filepath.Join(root, "test", "chassis") }

// Files are those for a kind of manager, by the root of the repository. Those that are put together lie in its .cache.
func Files(root, manager string) (Paths, error) {
	base := Paths{filepath.Join(dir(root), "demo.yaml"), filepath.Join(dir(root), "agent.yaml")}
	if manager == Default {
		return base, nil
	}
	var differs struct {
		// Chassis replaces fields of demo.yaml, Fabric those of the fabric in agent.yaml; null takes one away.
		Chassis, Fabric map[string]any
	}
	if err := read(filepath.Join(dir(root), "manager-"+manager+".yaml"), &differs); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			all, listErr := Managers(root)
			return Paths{}, errors.Join(fmt.Errorf("there is no chassis with manager %q; there are %s", manager, strings.Join(all, ", ")), listErr)
		}
		return Paths{}, err
	}
	var chassis map[string]any
	var agent struct {
		Fabrics []map[string]any
		Rest    map[string]any `yaml:",inline"`
	}
	if err := errors.Join(read(base.Chassis, &chassis), read(base.Agent, &agent)); err != nil {
		return Paths{}, err
	}
	replace(chassis, differs.Chassis)
	replace(agent.Fabrics[0], differs.Fabric)
	if driver, ok := chassis["driver"].(map[string]any); ok { // paths start at the file
		for key, value := range driver {
			if path, ok := value.(string); ok && strings.HasPrefix(path, "../") {
				driver[key] = filepath.Join("../..", ".cache", strings.TrimPrefix(path, "../../.cache"))
			}
		}
	}
	to := filepath.Join(root, ".cache", "chassis")
	p := Paths{filepath.Join(to, manager+"-chassis.yaml"), filepath.Join(to, manager+"-agent.yaml")}
	return p, errors.Join(write(p.Chassis, chassis), write(p.Agent, agent))
}

func replace(base, by map[string]any) {
	maps.Copy(base, by)
	maps.DeleteFunc(base, func(_ string, value any) bool { return value == nil })
}

func read(name string, into any) error {
	data, err := os.ReadFile(name)
	if err != nil {
		return fmt.Errorf("read chassis: %w", err)
	}
	if err := yaml.Unmarshal(data, into); err != nil {
		return fmt.Errorf("decode %s: %w", name, err)
	}
	return nil
}

func write(name string, what any) error {
	data, err := yaml.Marshal(what)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("write chassis: %w", err)
	}
	if err := os.WriteFile(name, data, 0o644); err != nil {
		return fmt.Errorf("write chassis: %w", err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"text/tabwriter"
)

const dir = "internal/sim/mutants"

func main() {
	seeds := flag.Int("seeds", 400, "how many seeds each variant is given")
	only := flag.String("only", "", "the variants to run: a part of their name")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *seeds, *only); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, seeds int, only string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*"+only+"*.patch"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("there is no variant in %s (run this at the root of the repository)", dir)
	}
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	missed := 0
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".patch")
		row, err := try(ctx, file, seeds)
		if err != nil {
			return fmt.Errorf("variant %s: %w", name, err)
		}
		if row.by == "" {
			missed++
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", name, row)
		fmt.Fprintf(table, "%s\t%s\t%s\n", name, row.what, row)
	}
	fmt.Fprintln(os.Stderr)
	if err := table.Flush(); err != nil {
		return err
	}
	if missed > 0 {
		return fmt.Errorf("%d of %d variants were not caught in %d seeds", missed, len(files), seeds)
	}
	fmt.Printf("all %d variants were caught\n", len(files))
	args := append([]string{"test", "-count=1", "./internal/sim", "-args"}, seedTests(seeds)...)
	if out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("the unbroken agent fails with the same seeds:\n%s", out)
	}
	fmt.Printf("the unbroken agent passes seeds 1 to %d\n", seeds)
	return nil
}

// row is how a variant was caught; by is empty if it was not.
type row struct{ what, by, rule, step string }

func (r row) String() string {
	if r.by == "" {
		return "NOT CAUGHT"
	}
	return fmt.Sprintf("%s, step %s: %s", r.by, r.step, r.rule)
}

// caught is how the tests tell of an invariant that did not hold.
var caught = regexp.MustCompile(`((?:seed|scenario) [a-z0-9-]+): ([a-z-]+) after \S+ \(step (\d+)\)`)

// try runs the simulation with the patch laid over the tree: random seeds, then, if they did not catch it, the
// scenarios.
func try(ctx context.Context, file string, seeds int) (row, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return row{}, err
	}
	p, err := parsePatch(string(text))
	if err != nil {
		return row{}, err
	}
	tmp, err := os.MkdirTemp("", "mutant-")
	if err != nil {
		return row{}, err
	}
	defer os.RemoveAll(tmp)
	overlay, err := lay(tmp, p)
	if err != nil {
		return row{}, err
	}
	program := filepath.Join(tmp, "sim.test")
	if out, err := exec.CommandContext(ctx, "go", "test", "-c", "-ldflags=-s -w", "-o", program, "-overlay="+overlay, "./internal/sim").CombinedOutput(); err != nil {
		return row{}, fmt.Errorf("it does not compile:\n%s", out)
	}
	r := row{what: p.what}
	for _, tests := range [][]string{seedTests(seeds), {"-test.run=^TestScenarios$", "-no-traces"}} {
		out, err := play(ctx, program, tests...)
		if err == nil {
			continue
		}
		if m := caught.FindStringSubmatch(out); m != nil {
			r.by, r.rule, r.step = m[1], m[2], m[3]
			return r, nil
		}
		if tests[0] == seedTests(0)[0] {
			return r, fmt.Errorf("it does not run:\n%s", out)
		}
	}
	return r, nil
}

func seedTests(n int) []string {
	return []string{"-test.run=^TestSeeds$", "-test.timeout=30m", fmt.Sprintf("-seeds=%d", n), "-failures=1", "-no-shrink"}
}

// play runs the tests of a built simulation, where its files are.
func play(ctx context.Context, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = "internal/sim"
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// lay writes the patched files, and the file that tells go about them.
func lay(tmp string, p patch) (string, error) {
	replace := map[string]string{}
	for name, hunks := range p.files {
		source, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		patched, err := apply(string(source), hunks)
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		path, err := filepath.Abs(name)
		if err != nil {
			return "", err
		}
		replace[path] = filepath.Join(tmp, strings.ReplaceAll(name, "/", "_"))
		if err := os.WriteFile(replace[path], []byte(patched), 0o600); err != nil {
			return "", err
		}
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(tmp, "overlay.json")
	return overlay, os.WriteFile(overlay, data, 0o600)
}

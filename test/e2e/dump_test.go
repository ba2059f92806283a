// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// dump writes all that may explain a failure into a folder and returns its path. What cannot be had is
// written as the reason.
func (e *environment) dump(ctx context.Context, name string) string {
	dir := filepath.Join(e.dumps, strings.NewReplacer("/", "_", " ", "_").Replace(name))
	put := func(file string, content []byte, err error) {
		if err != nil {
			content = append(content, fmt.Appendf(nil, "\n%v\n", err)...)
		}
		if err = os.MkdirAll(dir, 0o755); err == nil {
			err = os.WriteFile(filepath.Join(dir, file), content, 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "e2e: write dump:", err)
		}
	}
	object := func(file string, o any, err error) {
		content, bad := yaml.Marshal(o)
		if err == nil {
			err = bad
		}
		put(file, content, err)
	}
	all := metav1.ListOptions{}
	leases, err := e.client.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, all)
	object("leases.yaml", leases, err)
	claims, err := e.client.ResourceV1().ResourceClaims("").List(ctx, all)
	object("claims.yaml", claims, err)
	slices, err := e.client.ResourceV1().ResourceSlices().List(ctx, all)
	object("slices.yaml", slices, err)
	pods, err := e.client.CoreV1().Pods("").List(ctx, all)
	object("pods.yaml", pods, err)
	nodes, err := e.client.CoreV1().Nodes().List(ctx, all)
	object("nodes.yaml", nodes, err)
	events, err := e.client.EventsV1().Events("").List(ctx, all)
	object("events.yaml", events, err)
	state, err := e.sim.State(ctx)
	object("sim-state.yaml", state, err)
	log, err := e.sim.Log(ctx)
	object("sim-log.yaml", log, err)
	violations, err := e.sim.Violations(ctx)
	object("sim-violations.yaml", violations, err)
	for _, node := range localkube.Nodes() {
		cdi, failed := e.onNode(ctx, node.Name, "sh", "-c", "tail -n +1 /var/run/cdi/* /var/lib/kubelet/plugins/"+device.Driver+"/*.json")
		put("plugin-"+node.Name+".txt", []byte(cdi), failed)
	}
	e.linkLogs()
	files, err := filepath.Glob(filepath.Join(e.logs, "*.log"))
	if err != nil {
		return dir // the pattern is good
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		put("agent_"+filepath.Base(file), content, err)
	}
	for _, process := range []string{"scheduler", "n1-kubelet", "n2-kubelet"} {
		content, err := os.ReadFile(e.cluster.Log(process))
		put(process+".log", content, err)
	}
	return dir
}

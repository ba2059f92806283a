// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const configKey = "config.yaml"

// configuration is what the ConfigMap holds, empty if there is none.
func (e *environment) configuration(ctx context.Context) (string, error) {
	cm, err := e.client.CoreV1().ConfigMaps(device.AgentNamespace).Get(ctx, device.AgentName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the agent's ConfigMap: %w", err)
	}
	return cm.Data[configKey], nil
}

// agents lists the agents' Pods, on one node or on all.
func (e *environment) agents(ctx context.Context, node string) ([]corev1.Pod, error) {
	o := metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + device.AgentName}
	if node != "" {
		o.FieldSelector = "spec.nodeName=" + node
	}
	list, err := e.client.CoreV1().Pods(device.AgentNamespace).List(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("list the agents: %w", err)
	}
	return list.Items, nil
}

// agent is the one ready agent of a node.
func (e *environment) agent(ctx context.Context, node string) (*corev1.Pod, error) {
	pods, err := e.agents(ctx, node)
	if err != nil {
		return nil, err
	}
	if len(pods) != 1 {
		return nil, fmt.Errorf("%d agents on %s", len(pods), node)
	}
	if p := &pods[0]; p.DeletionTimestamp == nil && isReady(p) {
		return p, nil
	}
	return nil, fmt.Errorf("the agent on %s is not ready", node)
}

func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// restartAgents rolls the DaemonSet and waits until only new agents are there, ready.
func (e *environment) restartAgents(ctx context.Context) error {
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"test.cohdi.io/restarted":%q}}}}}`, time.Now().Format(time.RFC3339Nano))
	daemonSets := e.client.AppsV1().DaemonSets(device.AgentNamespace)
	if _, err := daemonSets.Patch(ctx, device.AgentName, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("restart the agents: %w", err)
	}
	return poll(ctx, 2*time.Minute, e.rolledOut)
}

// rolledOut is nil when all agents are of the DaemonSet's present generation and nothing else is left.
func (e *environment) rolledOut(ctx context.Context) error {
	ds, err := e.client.AppsV1().DaemonSets(device.AgentNamespace).Get(ctx, device.AgentName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	s := ds.Status
	if s.ObservedGeneration < ds.Generation || s.UpdatedNumberScheduled < s.DesiredNumberScheduled || s.NumberReady < s.DesiredNumberScheduled {
		return fmt.Errorf("%d of %d agents are new, %d are ready", s.UpdatedNumberScheduled, s.DesiredNumberScheduled, s.NumberReady)
	}
	pods, err := e.agents(ctx, "")
	if err == nil && len(pods) != int(s.DesiredNumberScheduled) {
		err = fmt.Errorf("%d agents are there, %d are wanted", len(pods), s.DesiredNumberScheduled)
	}
	return err
}

// process is the agent's process on a node, as this machine numbers it.
func (e *environment) process(ctx context.Context, node string) (int, error) {
	pods, err := e.agents(ctx, node)
	if err != nil {
		return 0, err
	}
	for i := range pods {
		for _, c := range pods[i].Status.ContainerStatuses {
			_, id, ok := strings.Cut(c.ContainerID, "://")
			if !ok || c.State.Running == nil {
				continue
			}
			if pid := processOf(id); pid != 0 {
				return pid, nil
			}
		}
	}
	return 0, fmt.Errorf("no agent's process on %s", node)
}

// processOf returns the first process of a container, 0 if there is none.
func processOf(container string) int {
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return 0 // the pattern is good
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(data), container) {
			continue // it has ended, or is another's
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil {
			return pid
		}
	}
	return 0
}

// get asks an agent's HTTP endpoint on its node and returns status and body.
func (e *environment) get(ctx context.Context, p *corev1.Pod, path string) (int, string, error) {
	client := &http.Client{Transport: &http.Transport{DialContext: dialOn(p.Spec.NodeName), DisableKeepAlives: true}, Timeout: 5 * time.Second}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.Status.PodIP+":8080"+path, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// leader is the node whose agent leads the fabric.
func (e *environment) leader(ctx context.Context) (string, error) {
	l, err := e.client.CoordinationV1().Leases(device.LeaseNamespace).Get(ctx, fabric.ElectionLease(), metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read the election: %w", err)
	}
	if l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
		return "", errors.New("nobody leads the fabric")
	}
	node, _, _ := strings.Cut(*l.Spec.HolderIdentity, "/")
	return node, nil
}

// poll calls check until it returns nil. When time is up, the error carries check's last answer.
func poll(parent context.Context, within time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(parent, within)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err // not what the end of the time did to the last look
		}
		select {
		case <-ctx.Done():
			if parent.Err() != nil {
				return fmt.Errorf("interrupted: %w", last)
			}
			return fmt.Errorf("not within %v: %w", within, last)
		case <-tick.C:
		}
	}
}

const pollInterval = 100 * time.Millisecond

// await fails the test unless check returns nil in time.
func await(t *testing.T, what string, within time.Duration, check func(context.Context) error) {
	t.Helper()
	if err := poll(t.Context(), within, check); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

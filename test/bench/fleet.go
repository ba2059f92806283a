// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/simapi"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

const (
	growthModel       = device.Model("a100")
	growthFabricModel = "NVIDIA A100-PCIE-80GB"
	growthFM          = "127.0.0.1:18443"
	growthControl     = "127.0.0.1:18444"
	growthTenant      = "5f0c2a10-7d1e-4c55-9a40-000000000001"
	// tokenLife is longer than a run.
	tokenLife = 4 * 3600
	// startPause is between the starts of two agents: this machine has to do the work of all.
	startPause = 100 * time.Millisecond
	// makers create objects at once.
	makers = 8
)

// members are the simulated nodes and the Pods of the agents on them, as objects.
type members struct {
	b     *bench
	names []string
	pods  []types.UID
	token []string
}

func machineOf(i int) string { return fmt.Sprintf("22222222-2222-4222-8222-%012d", i) }

// make adds nodes until there are n.
func (m *members) make(ctx context.Context, n int) error {
	first := len(m.names)
	for i := first; i < n; i++ {
		m.names = append(m.names, fmt.Sprintf("g-%04d", i))
	}
	m.pods = append(m.pods, make([]types.UID, n-first)...)
	m.token = append(m.token, make([]string, n-first)...)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(makers)
	for i := first; i < n; i++ {
		group.Go(func() error { return m.makeOne(ctx, i) })
	}
	return group.Wait()
}

// makeOne makes a Node that is ready, the Pod of its agent, and a token that is bound to this Pod.
func (m *members) makeOne(ctx context.Context, i int) error {
	name, core := m.names[i], m.b.client.CoreV1()
	_, err := core.Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{device.AnnotationMachine: machineOf(i)}},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
		}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make Node %s: %w", name, err)
	}
	pods := core.Pods(device.AgentNamespace)
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "agent-" + name, Labels: map[string]string{"app.kubernetes.io/name": device.AgentName}},
		Spec: corev1.PodSpec{
			NodeName: name, ServiceAccountName: device.AgentName, Containers: []corev1.Container{{Name: "agent", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make the agent's Pod of %s: %w", name, err)
	}
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{
		Name: "agent", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}},
	}}}
	if pod, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("let the agent's Pod of %s run: %w", name, err)
	}
	request, err := core.ServiceAccounts(device.AgentNamespace).CreateToken(ctx, device.AgentName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: ptr.To[int64](tokenLife),
			BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("ask for the token of %s's agent: %w", name, err)
	}
	m.pods[i], m.token[i] = pod.UID, request.Status.Token
	return nil
}

// fabricProcess is the simulator with a machine for each node.
type fabricProcess struct {
	cmd *exec.Cmd
	dir string
	sim *simapi.Client
}

// startFabric runs a manager with as many machines as there are nodes. The machines have no node of the simulator's.
func (b *bench) startFabric(ctx context.Context, dir string, names []string, units int) (*fabricProcess, error) {
	var chassis strings.Builder
	fmt.Fprintf(&chassis, "listen: {fm: %q, control: %q}\ntenant: %s\nrealm: cohdi\n", growthFM, growthControl, growthTenant)
	fmt.Fprintf(&chassis, "credentials: {username: agent, password: secret, client_id: cdi, client_secret: secret}\n")
	fmt.Fprintf(&chassis, "tokenLifetime: 1h\nephemeral: true\nfabrics: [{id: 0, uuid: c3a4b5d6-2222-4f00-9100-00000000f001}]\nmachines:\n")
	for i, name := range names {
		fmt.Fprintf(&chassis, "- {name: %s, uuid: %s, noNode: true}\n", name, machineOf(i))
	}
	fmt.Fprintf(&chassis, "devices: [{id: gpu, count: %d, model: %s}]\n", units, growthFabricModel)
	f := &fabricProcess{dir: dir, sim: simapi.NewClient(growthControl)}
	if err := os.MkdirAll(f.credentials(), 0o755); err != nil {
		return nil, fmt.Errorf("make a folder for the simulator: %w", err)
	}
	file := filepath.Join(dir, "chassis.yaml")
	if err := os.WriteFile(file, []byte(chassis.String()), 0o644); err != nil {
		return nil, fmt.Errorf("write the chassis: %w", err)
	}
	log, err := os.Create(filepath.Join(b.cluster.Logs(), fmt.Sprintf("bench-sim-%d.log", len(names))))
	if err != nil {
		return nil, fmt.Errorf("keep the simulator's log: %w", err)
	}
	defer log.Close()
	f.cmd = exec.CommandContext(ctx, filepath.Join(b.cluster.Bin, "cohdi-sim"), "--config", file, "--dir", filepath.Join(dir, "sim"))
	f.cmd.Stdout, f.cmd.Stderr = log, log
	f.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err = f.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}
	if err = poll(ctx, time.Minute, 100*time.Millisecond, func() error { return f.sim.Ready(ctx) }); err != nil {
		return nil, errors.Join(err, f.stop())
	}
	ca, err := os.ReadFile(filepath.Join(dir, "sim", "tls", "ca.crt"))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read the simulator's certificate authority: %w", err), f.stop())
	}
	for name, content := range map[string]string{
		"realm": "cohdi", "username": "agent", "password": "secret", "client_id": "cdi", "client_secret": "secret", "ca.crt": string(ca),
	} {
		if err := os.WriteFile(filepath.Join(f.credentials(), name), []byte(content), 0o600); err != nil {
			return nil, errors.Join(fmt.Errorf("write the fabric's login: %w", err), f.stop())
		}
	}
	return f, nil
}

func (f *fabricProcess) credentials() string { return filepath.Join(f.dir, "login") }

func (f *fabricProcess) stop() error {
	if err := f.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop the simulator: %w", err)
	}
	if err := f.cmd.Wait(); err != nil {
		return fmt.Errorf("stop the simulator: %w", err)
	}
	return nil
}

// agents are the processes in which they run: the one that leads, and all others.
type agents struct{ leader, others *fleetProcess }

// fleetProcess runs agents until its standard input ends.
type fleetProcess struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   string
}

// startAgents starts the one that is to lead, and when it does the others; it returns when the scheduler could choose
// each of their nodes.
func (b *bench) startAgents(ctx context.Context, f *fabricProcess, m *members, g *grown) (a *agents, err error) {
	begin := time.Now()
	a = &agents{}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.stop())
		}
	}()
	if a.leader, err = b.startFleet(ctx, f, m, "leader", 0, 1); err != nil {
		return a, err
	}
	err = poll(ctx, time.Minute, 500*time.Millisecond, func() error {
		leads, problem := b.leader(ctx)
		if problem != nil || leads != m.names[0] {
			return errors.Join(fmt.Errorf("wait for %s to lead: %q does", m.names[0], leads), problem)
		}
		return nil
	})
	if err != nil {
		return a, err
	}
	if a.others, err = b.startFleet(ctx, f, m, "others", 1, len(m.names)); err != nil {
		return a, err
	}
	selector := metav1.ListOptions{LabelSelector: growthModel.AttachableLabel() + "=true", ResourceVersion: "0"}
	err = poll(ctx, growthLimit, time.Second, func() error {
		if problem := a.alive(); problem != nil {
			return problem
		}
		in, problem := b.client.CoreV1().Nodes().List(ctx, selector)
		if problem != nil || len(in.Items) < len(m.names) {
			return errors.Join(fmt.Errorf("wait for all nodes to be attachable: %d of %d are", len(in.Items), len(m.names)), problem)
		}
		if free := b.world.free(); len(free) < g.standing+growthRound {
			return fmt.Errorf("wait for the pool: it offers %d units of %d", len(free), g.standing+growthRound)
		}
		return nil
	})
	g.ready = time.Since(begin)
	tell("  all in after %s", seconds(g.ready))
	return a, err
}

// startFleet runs the agents from first to end in one process.
func (b *bench) startFleet(ctx context.Context, f *fabricProcess, m *members, what string, first, end int) (*fleetProcess, error) {
	type agent struct {
		Node    string `json:"node"`
		PodUID  string `json:"podUID"`
		Token   string `json:"token"`
		Machine string `json:"machine"`
	}
	config := filepath.Join(f.dir, "agent.yaml")
	err := os.WriteFile(config, fmt.Appendf(nil, `apiVersion: agent.gpu.cohdi.io/v1alpha1
kind: Config
fabrics:
- id: %q
  manager: fm
  endpoint: https://%s
  tenant: %s
  credentials: %s
  models: [{name: %s, fabricModel: %s, attributes: {productName: %s}}]
timings: {coolDown: 0s, readySettle: 1s}
`, fabric, growthFM, growthTenant, f.credentials(), growthModel, growthFabricModel, growthFabricModel), 0o644)
	if err != nil {
		return nil, fmt.Errorf("write the agents' configuration: %w", err)
	}
	var all []agent
	for i := first; i < end; i++ {
		all = append(all, agent{m.names[i], string(m.pods[i]), m.token[i], machineOf(i)})
	}
	data, err := json.Marshal(map[string]any{
		"server": localkube.APIServerURL, "ca": b.config.CAFile, "config": config, "dir": filepath.Join(f.dir, "agents"),
		"pause": startPause, "agents": all,
	})
	if err != nil {
		return nil, fmt.Errorf("describe the agents: %w", err)
	}
	file := filepath.Join(f.dir, what+".json")
	if err = os.WriteFile(file, data, 0o600); err != nil {
		return nil, fmt.Errorf("describe the agents: %w", err)
	}
	p := &fleetProcess{log: filepath.Join(b.cluster.Logs(), fmt.Sprintf("bench-%s-%d.log", what, len(m.names)))}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("keep the agents' log: %w", err)
	}
	defer log.Close()
	p.cmd = exec.CommandContext(ctx, filepath.Join(b.cluster.Bin, "cohdi-agents.test"), "-test.run=^TestFleet$", "-test.timeout=0", "-fleet="+file)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start the agents: %w", err)
	}
	if err = p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the agents: %w", err)
	}
	return p, nil
}

// stop ends the agents as a signal ends one: leadership is given up.
func (p *fleetProcess) stop() error {
	if p == nil {
		return nil
	}
	err := p.stdin.Close()
	if werr := p.cmd.Wait(); werr != nil {
		err = errors.Join(err, fmt.Errorf("the agents in one process failed, see %s: %w", p.log, werr))
	}
	return err
}

func (a *agents) stop() error { return errors.Join(a.others.stop(), a.leader.stop()) }

// alive ends a wait that a dead process would make long.
func (a *agents) alive() error {
	for _, p := range []*fleetProcess{a.leader, a.others} {
		if _, err := usageOf(p.cmd.Process.Pid); err != nil {
			return finalError{fmt.Errorf("%w, see %s", err, p.log)}
		}
	}
	return nil
}

func (a *agents) usage() (leader, others usage, err error) {
	if leader, err = usageOf(a.leader.cmd.Process.Pid); err != nil {
		return leader, others, err
	}
	others, err = usageOf(a.others.cmd.Process.Pid)
	return leader, others, err
}

// allocate makes a claim and gives it a unit on a node, as the scheduler does.
func (b *bench) allocate(ctx context.Context, name string, u device.Unit, node string) error {
	claims := b.client.ResourceV1().ResourceClaims(namespace)
	claim, err := claims.Create(ctx, &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: claimSpec()}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make claim %s: %w", name, err)
	}
	claim.Status = resourcev1.ResourceClaimStatus{
		ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: claim.UID}},
		Allocation: &resourcev1.AllocationResult{
			AllocationTimestamp: new(metav1.Now()),
			Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{{
				Request: "gpu", Driver: device.Driver, Pool: fabric.Pool(), Device: u.Entry(),
				BindingConditions: []string{device.ConditionAttached}, BindingFailureConditions: []string{device.ConditionAttachFailed},
			}}},
			NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
				Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node},
			}}}}},
		},
	}
	if _, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("allocate %s on %s to claim %s: %w", u, node, name, err)
	}
	return nil
}

// kubectl runs the built one as the cluster's administrator.
func (b *bench) kubectl(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(b.cluster.Bin, "kubectl"), append([]string{"--kubeconfig", b.cluster.AdminConfig()}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// poll asks done again and again. Its error carries what done said last.
func poll(ctx context.Context, limit, every time.Duration, done func() error) error {
	end := time.Now().Add(limit)
	for {
		err := done()
		var stop finalError
		if err == nil || errors.As(err, &stop) {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("after %v: %w", limit, err)
		}
		if err := pause(ctx, every); err != nil {
			return err
		}
	}
}

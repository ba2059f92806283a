// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/test/cluster/localkube"
)

// control is the simulator's control API, as the chassis' file says.
const control = "127.0.0.1:8444"

// guard is a process that takes the cluster down if this one cannot.
type guard struct{ stdin io.WriteCloser }

// done is what the guard reads when it is not needed any more.
const done = "done\n"

// startGuard starts one in a session of its own, where the terminal's signals do not reach it.
func startGuard(o options) (*guard, error) {
	cmd := exec.Command("/proc/self/exe", "-guard", "-state", o.state, "-bin", o.bin) //nolint:noctx // it outlives this process on purpose
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start guard: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start guard: %w", err)
	}
	return &guard{stdin}, nil
}

// dismiss ends the guard; the cluster stays as it is.
func (g *guard) dismiss() error {
	if g == nil {
		return nil
	}
	if _, err := io.WriteString(g.stdin, done); err != nil {
		return fmt.Errorf("dismiss guard: %w", err)
	}
	return g.stdin.Close()
}

// watchOver is the guard's work. It pays no heed to signals: those that end the demonstration are not for it.
func watchOver(ctx context.Context, in io.Reader, o options) error {
	word, err := bufio.NewReader(in).ReadString('\n')
	if word == done {
		return nil
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("guard the demonstration: %w", err)
	}
	c, err := localkube.New(o.state, o.bin, nil)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return c.Down(ctx)
}

// kubectl runs the built one as the cluster's administrator and returns what it printed.
func (d *demo) kubectl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(d.cluster.Bin, "kubectl"), append([]string{"--kubeconfig", d.cluster.AdminConfig()}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("run kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// typed shows a command as a user types it.
func (d *demo) typed(format string, args ...any) { d.screen.say("  $ "+format, args...) }

// connect makes a client once the cluster is up. What its library has to say goes to a file: on a terminal
// it would tear the tables.
func (d *demo) connect() error {
	log, err := d.openLog("client.log")
	if err != nil {
		return err
	}
	klog.LogToStderr(false)
	klog.SetOutput(log)
	cfg, err := clientcmd.BuildConfigFromFlags("", d.cluster.AdminConfig())
	if err != nil {
		return fmt.Errorf("read the administrator's kubeconfig: %w", err)
	}
	if d.client, err = kubernetes.NewForConfig(cfg); err != nil {
		return fmt.Errorf("make a client of the API server: %w", err)
	}
	return nil
}

// logs is where everything that this run knows of a failure is kept.
func (d *demo) logs() string { return filepath.Join(d.cluster.Logs(), "demo") }

// collect saves what a person needs to find out what went wrong.
func (d *demo) collect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := os.MkdirAll(d.logs(), 0o755); err != nil {
		d.screen.say("what went wrong cannot be kept: %v", err)
		return
	}
	for name, args := range map[string][]string{
		"objects.txt": {"get", "pods,resourceclaims,nodes,resourceslices,leases,events,daemonsets", "-A", "-o", "wide"},
		"objects.yaml": {
			"get", "pods,resourceclaims,nodes,resourceslices,leases,deviceclasses,events", "-A", "-o", "yaml",
		},
		"agents.log": {"logs", "-n", "cohdi-system", "-l", "app.kubernetes.io/name=cohdi-agent", "--prefix", "--tail=-1"},
		"pods.txt":   {"describe", "pods", "-n", namespace},
	} {
		out, err := d.kubectl(ctx, args...)
		if err != nil {
			out += "\n" + err.Error() + "\n"
		}
		d.keepFile(name, []byte(out))
	}
	for _, path := range []string{"state", "log"} {
		out, err := d.sim.Raw(ctx, "GET", "/"+path, nil)
		if err != nil {
			out = []byte(err.Error())
		}
		d.keepFile("chassis-"+path+".json", out)
	}
}

func (d *demo) keepFile(name string, data []byte) {
	if err := os.WriteFile(filepath.Join(d.logs(), name), data, 0o644); err != nil {
		d.screen.say("what went wrong cannot be kept: %v", err)
	}
}

// end takes everything down that this run has brought up, unless it is to stay.
func (d *demo) end(ctx context.Context, interrupted, ok bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if !ok && !interrupted {
		defer d.screen.say("demo: logs are in %s; what is in the cluster was saved in %s", d.cluster.Logs(), d.logs())
	}
	if d.foreign {
		// The cluster was there before; only what this run has put into it goes.
		_, err := d.kubectl(ctx, "delete", "namespace", namespace, "--ignore-not-found", "--wait=false")
		return errors.Join(err, d.guard.dismiss())
	}
	if d.o.keep && !interrupted {
		if ok {
			d.hints()
		}
		return d.guard.dismiss()
	}
	if d.world != nil {
		d.world.stop()
	}
	d.screen.say("taking everything down")
	return errors.Join(d.cluster.Down(ctx), d.guard.dismiss())
}

// stopped says how an interruption went, of which only what could not be taken down is news.
func (d *demo) stopped(err error) error {
	switch {
	case err != nil:
		return fmt.Errorf("interrupted: %w", err)
	case d.foreign:
		return errors.New("interrupted, the Pods are being deleted; the cluster stays")
	}
	return errors.New("interrupted, everything was taken down")
}

// hints say what to do with a cluster that stays.
func (d *demo) hints() {
	d.screen.say(`
The cluster stays. Try:
  export KUBECONFIG=%[1]s PATH=%[2]s:$PATH
  kubectl apply -n %[3]s -f test/demo/pods/claim.yaml
  kubectl get pods -n %[3]s -o wide -w
  kubectl get resourceclaims -n %[3]s
  kubectl get leases -n cohdi-leases -L gpu.cohdi.io/node,gpu.cohdi.io/phase
  kubectl wait -n %[3]s --for=condition=Ready pod/first --timeout=1m
  kubectl exec -n %[3]s first -- ls -l /dev
  kubectl describe node n1
  kubectl exec -n cohdi-system ds/cohdi-agent -- cohdi-agent status --all
  kubectl logs -n cohdi-system -l app.kubernetes.io/name=cohdi-agent --prefix --tail=-1
  cohdi-sim ctl status       # and cohdi-sim ctl --help
  make cluster-down          # takes it down
`, d.cluster.AdminConfig(), d.cluster.Bin, namespace)
}

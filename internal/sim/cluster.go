// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
)

// cluster is all that there is in one run.
type cluster struct {
	root    context.Context //nolint:containedctx // of all processes
	stop    context.CancelFunc
	closing bool

	api       *apiServer
	fabric    *chassis
	scheduler *kubeScheduler
	hosts     map[string]*host
	order     []*host
	kubelets  map[string]*kubelet
	procs     []*process
	orphans   []*call // of dead processes
	runs      int
	writer    *process // whose write to a lease is being stored

	minPerNode, maxPerNode, slots int
	adopt                         bool // foreign devices are taken in
	parallel                      bool // the manager takes calls for one machine side by side
	exclude                       bool // the two models must not be on one node
	manner                        manner
	turns                         *turns // nil where nodes need not wait for each other
	crude                         bool   // no driver can drain
	coolDown                      time.Duration
	// damaged are the leases that a person broke, as they were.
	damaged map[string]string
	// calm is since when nothing goes wrong any more.
	calm time.Time
}

// build makes a cluster of some nodes and a chassis.
func (s *Sim) build(ctx context.Context, nodeCount, gpuCount, others int) {
	s.root, s.stop = context.WithCancel(ctx)
	s.watch = judge{entries: map[string]string{}, shown: map[string]string{}, allocated: map[string]time.Time{}, listed: map[string]time.Time{}, touched: map[device.Unit]time.Time{}}
	s.api = newAPIServer(s)
	s.damaged = map[string]string{}
	s.fabric = newChassis(s, gpuCount, others)
	s.fabric.manner = s.manner
	if s.manner.alone {
		s.turns = &turns{s: s}
		s.turns.watchOver()
	}
	s.hosts, s.kubelets = map[string]*host{}, map[string]*kubelet{}
	s.scheduler = newScheduler(s)
	for i := range nodeCount {
		h := &host{
			s: s, node: fmt.Sprintf("n%d", i+1), machine: device.Machine(fmt.Sprintf("11111111-0000-4000-8000-%012d", i+1)),
			open: map[*gpu][]handle{}, bootID: "boot-1",
		}
		h.crude = s.crude || s.chance("crude driver "+h.node, 2)
		h.dir = filepath.Join(s.opt.Dir, h.node)
		if err := os.MkdirAll(filepath.Join(h.dir, "cdi"), 0o750); err != nil {
			panic(err)
		}
		h.skew = s.between("skew "+h.node, 0, 20*time.Second)
		s.hosts[h.node] = h
		s.order = append(s.order, h)
		s.kubelets[h.node] = newKubelet(s, h)
		s.addNode(h)
	}
	for _, h := range s.order {
		s.after(s.between("first start "+h.node, 0, 2*time.Second), nil, func() { s.start(h, s.newPodUID(h)) })
	}
}

func (s *Sim) newPodUID(h *host) string {
	h.agents++
	return fmt.Sprintf("%s-agent-%d", h.node, h.agents)
}

func (s *Sim) addNode(h *host) {
	_, err := s.api.create(nodes, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: h.node, Annotations: map[string]string{device.AnnotationMachine: string(h.machine)}, Labels: map[string]string{}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	})
	if err != nil {
		panic(err)
	}
}

func (s *Sim) hostOf(m device.Machine) *host {
	for _, h := range s.order {
		if h.machine == m {
			return h
		}
	}
	return nil
}

// close ends every goroutine of the run.
func (s *Sim) close() {
	s.closing = true
	for _, p := range s.procs {
		p.dead = true
	}
	s.stop()
	for _, c := range append(s.open, s.orphans...) {
		if !c.ended {
			c.ended = true
			close(c.done)
		}
	}
	s.bubble.Wait()
}

func isNotFound(err error) bool {
	return errors.Is(err, lease.ErrNotFound) || apierrors.IsNotFound(err)
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/cohdi/cohdi-agent/internal/claim"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nodestatus"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

// serve answers scrapes, probes and `cohdi-agent status` until ctx ends.
func (a *agent) serve(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	scrape := a.metrics.Handler()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		leases := a.leases.List()
		a.metrics.SetUnits(leases)
		a.metrics.SetPrepared(a.preparedClaims(leases))
		scrape.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := a.ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(a.nodeStatus()) //nolint:errcheck // the client went away
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics and probes on %s: %w", l.Addr(), err)
	}
	return nil
}

// preparedClaims counts the claims that have a unit of this node prepared.
func (a *agent) preparedClaims(leases []device.Lease) int {
	claims := map[types.UID]bool{}
	for i := range leases {
		by, _ := a.plugin.PreparedBy(leases[i].Fabric, leases[i].Unit)
		for _, claim := range by {
			claims[claim] = true
		}
	}
	return len(claims)
}

// nodeStatus is what this node's loop knows and waits for, and whose its GPUs are.
func (a *agent) nodeStatus() node.Status {
	m := a.present()
	m.mu.Lock()
	loop := m.loop
	m.mu.Unlock()
	found, _ := m.whose()
	s := node.Status{Node: a.o.node, GPUs: found.GPUs, Foreign: found.Foreign, Trouble: found.Trouble}
	if loop != nil {
		s.Units = loop.Status()
	}
	return s
}

// ready says why Pods with a device could not start here now. An agent that waits for another one of this node
// to end says nothing of the fabric and is ready once the kubelet knows it: in a rolling update the old one is
// stopped only then.
func (a *agent) ready() error {
	var why []error
	if ok, reason := a.plugin.Registered(); !ok {
		why = append(why, errors.New(reason))
	}
	for _, c := range a.status.Conditions() {
		if c.Type == nodestatus.FabricReady && c.Status == corev1.ConditionFalse {
			why = append(why, fmt.Errorf("%s: %s", c.Reason, c.Message))
		}
	}
	return errors.Join(why...)
}

// checkRights asks once what this agent's account may not do. A later change of the rights is seen when the
// agent restarts, as it does when the manifest is applied again with another image.
func (a *agent) checkRights(ctx context.Context) error {
	missing, err := claim.New(claim.Options{Client: a.client, Clock: a.clock}).SelfCheck(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "The agent's own rights could not be checked; a write that is refused will tell")
		return nil
	}
	a.mu.Lock()
	a.lacks = missing
	a.mu.Unlock()
	if len(missing) > 0 {
		a.present().tellFabric()
	}
	return nil
}

func (a *agent) missingRights() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lacks
}

// hotplugCondition says on the Node whether devices that come are seen and can be used.
func (a *agent) hotplugCondition(ctx context.Context) {
	c := nodestatus.Condition{Type: nodestatus.HotplugReady, Status: corev1.ConditionTrue, Reason: "Ready"}
	st := a.host.driver.Refresh(ctx)
	if st.State == nvml.StateReady {
		c.Message = "devices that come are seen, and the driver answers"
	} else {
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, string(st.State), st.Reason
	}
	if err := a.watcher.Deaf(); err != nil {
		c.Message += fmt.Sprintf("; the kernel's events are not heard (%v), so the bus is looked at every %s", err, 30*time.Second)
	}
	a.status.SetCondition(c)
	a.metrics.SetDriver(driverStates(), string(st.State))
	a.metrics.SetHotplugEvents(a.watcher.Deaf() == nil)
}

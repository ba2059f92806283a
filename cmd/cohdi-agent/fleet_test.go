// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/fm"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

var fleetFile = flag.String("fleet", "", "which agents to run together in this process, for make bench; they end with standard input")

// fleet describes agents that share a process.
type fleet struct {
	// Server and CA are the API server's.
	Server string `json:"server"`
	CA     string `json:"ca"`
	// Pause is how long after one agent the next one starts.
	Pause time.Duration `json:"pause"`
	// Config is the agents' configuration, Dir a directory for what they keep.
	Config string `json:"config"`
	Dir    string `json:"dir"`
	Agents []struct {
		Node    string         `json:"node"`
		PodUID  string         `json:"podUID"`
		Token   string         `json:"token"`
		Machine device.Machine `json:"machine"`
	} `json:"agents"`
}

// TestFleet runs many agents in one process, each with its own account's token and its own connection: all that an
// agent does with the API server and the fabric manager is there, as run joins it. What cannot be there a thousand
// times is its machine and its kubelet: devices are on the bus and in NVML as soon as the manager lists them, and
// nothing is ever prepared.
func TestFleet(t *testing.T) {
	if *fleetFile == "" {
		t.Skip("make bench runs it: it needs a cluster and a fabric manager")
	}
	data, err := os.ReadFile(*fleetFile)
	if err != nil {
		t.Fatal(err)
	}
	var f fleet
	if err = json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(f.Config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	for i := range f.Agents {
		if i > 0 { // a machine that runs a thousand agents is not a thousand machines
			time.Sleep(f.Pause)
		}
		a, err := f.agent(ctx, i, cfg)
		if err != nil {
			t.Fatal(err)
		}
		a.work(func(what string, run func(context.Context) error) {
			all.Go(func() {
				if err := run(klog.NewContext(ctx, a.obs.log)); err != nil && ctx.Err() == nil {
					t.Errorf("%s: %s: %v", a.o.node, what, err)
					cancel()
				}
			})
		})
		all.Go(func() {
			select {
			case err := <-a.fatal:
				t.Errorf("%s: %v", a.o.node, err)
				cancel()
			case <-ctx.Done():
			}
		})
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	<-ctx.Done()
}

// agent joins one of the fleet.
func (f *fleet) agent(ctx context.Context, i int, cfg config.Config) (*agent, error) {
	who := f.Agents[i]
	o := options{node: who.Node, podUID: who.PodUID, pluginDir: filepath.Join(f.Dir, who.Node)}
	if err := os.MkdirAll(o.pluginDir, 0o750); err != nil {
		return nil, err
	}
	api := &rest.Config{
		Host: f.Server, BearerToken: who.Token, TLSClientConfig: rest.TLSClientConfig{CAFile: f.CA},
		// As client sets them.
		UserAgent: "cohdi-agent/" + version, QPS: 50, Burst: 100,
		// Agents of other nodes share no connection with this one.
		Dial: (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
	}
	cs, err := kubernetes.NewForConfig(api)
	if err != nil {
		return nil, err
	}
	dyn, err := dynamic.NewForConfig(api)
	if err != nil {
		return nil, err
	}
	log := klog.FromContext(ctx).WithValues("node", who.Node)
	a, err := connect(klog.NewContext(ctx, log), o, cfg, cs, dyn)
	if err != nil {
		return nil, err
	}
	at := cfg.Fabrics[0]
	manager, err := fm.New(fm.Config{
		Endpoint: at.Endpoint, Tenant: at.Tenant, FabricID: at.ManagerFabric, Credentials: at.Credentials, Clock: clock.RealClock{},
	})
	if err != nil {
		return nil, err
	}
	m := &listedMachine{manager: manager, machine: who.Machine, at: map[device.GPUUUID]device.PCIAddress{}, off: map[device.GPUUUID]bool{}}
	a.health = a.newHealthMonitor(m, m) // for the kubelet, so it does not run
	return a, a.join(cfg, m)
}

// listedMachine is a machine that shows a device as soon as the fabric manager lists it.
type listedMachine struct {
	manager fabric.Manager
	machine device.Machine

	mu sync.Mutex // guards the following
	at map[device.GPUUUID]device.PCIAddress
	// off are those that were taken off the bus.
	off map[device.GPUUUID]bool
}

var (
	_ ownMachine = (*listedMachine)(nil)
	_ gpuErrors  = (*listedMachine)(nil)
)

// XIDs: these GPUs have no complaints.
func (*listedMachine) XIDs(context.Context) ([]nvml.XID, error) { return nil, nil }

func (m *listedMachine) Observe(ctx context.Context) (node.Sight, error) {
	lists, failed := m.manager.ListAttached(ctx, []device.Machine{m.machine})
	if err := failed[m.machine]; err != nil {
		return node.Sight{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	listed := map[device.GPUUUID]bool{}
	var sight node.Sight
	for _, d := range lists[m.machine] {
		listed[d.UUID] = true
		if m.off[d.UUID] {
			continue
		}
		at, err := m.place(d.UUID)
		if err != nil {
			return node.Sight{}, err
		}
		sight.Bus = append(sight.Bus, attach.Function{Address: at, Driver: "nvidia"})
		sight.NVML = append(sight.NVML, attach.GPU{Address: at, UUID: d.UUID})
	}
	for uuid := range m.at {
		if !listed[uuid] {
			delete(m.at, uuid)
			delete(m.off, uuid)
		}
	}
	return sight, nil
}

// place is where the GPU is, or the lowest place that is free.
func (m *listedMachine) place(uuid device.GPUUUID) (device.PCIAddress, error) {
	if at, known := m.at[uuid]; known {
		return at, nil
	}
	taken := map[device.PCIAddress]bool{}
	for _, at := range m.at {
		taken[at] = true
	}
	for bus := 1; ; bus++ {
		at, err := device.ParsePCIAddress(fmt.Sprintf("0000:%02x:00.0", bus))
		if err != nil {
			return at, err
		}
		if !taken[at] {
			m.at[uuid] = at
			return at, nil
		}
	}
}

func (m *listedMachine) Remove(_ context.Context, at device.PCIAddress) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for uuid, where := range m.at {
		if where == at {
			m.off[uuid] = true
		}
	}
	return nil
}

func (*listedMachine) Rescan(context.Context, device.PCIAddress) error  { return nil }
func (*listedMachine) RescanAll(context.Context) error                  { return nil }
func (*listedMachine) Bind(context.Context, device.PCIAddress) error    { return nil }
func (*listedMachine) Discover(context.Context) error                   { return nil }
func (*listedMachine) Drain(context.Context, device.PCIAddress) error   { return nil }
func (*listedMachine) Undrain(context.Context, device.PCIAddress) error { return nil }
func (*listedMachine) addresses(context.Context) []device.PCIAddress    { return nil }
func (*listedMachine) Prepared(device.FabricID, device.Unit) (claims []string, known bool) {
	return nil, true
}

func (*listedMachine) Holders(context.Context, device.PCIAddress) ([]string, error) {
	return nil, nil
}

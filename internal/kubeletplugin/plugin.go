// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Settings is what a Plugin needs. All fields but those that say so must be set.
type Settings struct {
	NodeName string
	// PodUID keeps the sockets of two agents apart while one replaces the other. Empty: no such update.
	PodUID types.UID
	// DataDir holds the plugin's socket, checkpoint and device metadata; RegistrarDir is where the
	// kubelet looks for plugins. Both have the same path here and on the host.
	DataDir, RegistrarDir string
	// CDIDir is where container runtimes read CDI specs, as it is reached from here.
	CDIDir string
	// BootID is the machine's, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Metadata writes the device metadata files (KEP-5304) that containers can read.
	Metadata bool

	Client kubernetes.Interface
	Clock  clock.WithTicker

	Leases Leases
	GPUs   GPUs
	Specs  SpecMaker
	Claims Claims
	// Health may be nil: then the kubelet is told that health is not reported.
	Health   Health
	Observer Observer
	// Fatal is called when the plugin cannot serve the kubelet any more. It must not block.
	Fatal func(error)
}

// Plugin serves the kubelet. New, then Run; PreparedBy and Publish at any time.
type Plugin struct {
	s          Settings
	checkpoint *checkpoint
	specs      specDir
	claims     *turns
	// released wakes Prepare calls that wait for another claim.
	released *broadcast
	// untidy wakes the background work.
	untidy chan struct{}

	registered atomic.Pointer[registerapi.RegistrationStatus]

	mu     sync.Mutex // guards the following
	helper publisher  // nil before Run and after it
	pool   *resourceslice.DriverResources
}

// publisher is what writes the node's own pool.
type publisher interface {
	PublishResources(ctx context.Context, r resourceslice.DriverResources) error
}

var _ kubeletplugin.DRAPlugin = (*Plugin)(nil)

// New returns a Plugin that is not yet known to the kubelet. PreparedBy answers already.
func New(s Settings) (*Plugin, error) {
	for name, missing := range map[string]bool{
		"node name": s.NodeName == "", "data directory": s.DataDir == "", "registrar directory": s.RegistrarDir == "",
		"CDI directory": s.CDIDir == "", "boot id": s.BootID == "", "client": s.Client == nil, "clock": s.Clock == nil,
		"leases": s.Leases == nil, "GPUs": s.GPUs == nil, "spec maker": s.Specs == nil, "claims": s.Claims == nil,
		"observer": s.Observer == nil, "fatal": s.Fatal == nil,
	} {
		if missing {
			return nil, fmt.Errorf("set up the kubelet plugin: no %s", name)
		}
	}
	if err := os.MkdirAll(s.DataDir, 0o750); err != nil {
		return nil, fmt.Errorf("create the plugin's data directory: %w", err)
	}
	p := &Plugin{
		s: s, specs: specDir{s.CDIDir}, claims: newTurns(), released: newBroadcast(),
		untidy: make(chan struct{}, 1),
	}
	p.checkpoint = newCheckpoint(s.DataDir, s.BootID, s.Clock, s.Observer, p.wakeTidy)
	return p, nil
}

// Run makes the plugin known to the kubelet and serves until ctx ends. It returns early only if it
// cannot start.
func (p *Plugin) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("kubeletplugin"))
	if err := removeStaleSockets(ctx, p.s.DataDir, p.s.RegistrarDir); err != nil {
		// They only make the kubelet's log noisy.
		klog.FromContext(ctx).Error(err, "Cannot remove sockets that former agents left")
	}
	helper, err := kubeletplugin.Start(ctx, p,
		kubeletplugin.DriverName(device.Driver),
		kubeletplugin.NodeName(p.s.NodeName),
		kubeletplugin.KubeClient(p.s.Client),
		kubeletplugin.RollingUpdate(p.s.PodUID),
		// A claim that waits for its device must not hold up the others: see turns and checkpoint.
		kubeletplugin.Serialize(false),
		kubeletplugin.PluginDataDirectoryPath(p.s.DataDir),
		kubeletplugin.RegistrarDirectoryPath(p.s.RegistrarDir),
		kubeletplugin.HealthService(p.s.Health != nil),
		kubeletplugin.EnableDeviceMetadata(p.s.Metadata, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(p.s.CDIDir),
		kubeletplugin.GRPCInterceptor(p.noteRegistration),
	)
	if err != nil {
		return fmt.Errorf("start the kubelet plugin: %w", err)
	}
	// Stop waits for the sockets to be removed: a stale one makes the kubelet dial it for ever.
	defer helper.Stop()
	if err = p.setHelper(ctx, helper); err != nil {
		return err
	}
	defer p.setHelper(ctx, nil) //nolint:errcheck // nothing is published by it
	p.tidyUntil(ctx)
	return nil
}

func (p *Plugin) setHelper(ctx context.Context, h publisher) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.helper = h
	return p.publishLocked(ctx)
}

// Publish replaces what the node's own pool offers, of which claims are prepared without a device lease. Nothing
// is written before the first call, so that of two agents of one node only one writes. It does not block; what
// cannot be written is tried again.
func (p *Plugin) Publish(ctx context.Context, r resourceslice.DriverResources) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pool = &r
	return p.publishLocked(ctx)
}

func (p *Plugin) publishLocked(ctx context.Context) error {
	if p.helper == nil || p.pool == nil {
		return nil
	}
	if err := p.helper.PublishResources(ctx, *p.pool); err != nil {
		return fmt.Errorf("publish the node's own pool: %w", err)
	}
	return nil
}

// Registered tells whether the kubelet has accepted the plugin, and why not.
func (p *Plugin) Registered() (bool, string) {
	switch status := p.registered.Load(); {
	case status == nil:
		return false, "the kubelet has not registered the plugin yet"
	case !status.PluginRegistered:
		return false, "the kubelet refused the plugin: " + status.Error
	}
	return true, ""
}

// noteRegistration keeps what the kubelet says about the registration. The helper keeps it too, but
// must not be asked while it serves.
func (p *Plugin) noteRegistration(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if status, ok := req.(*registerapi.RegistrationStatus); ok {
		p.registered.Store(status)
	}
	return handle(ctx, req)
}

// PreparedBy returns the claims that have the unit prepared, or may have. known is false while that
// cannot be told: then the unit must not be released.
func (p *Plugin) PreparedBy(fabric device.FabricID, unit device.Unit) (claims []types.UID, known bool) {
	r, err := p.checkpoint.read()
	if err != nil {
		return nil, false
	}
	if r.Rebuild {
		p.wakeTidy()
	}
	return r.owners(fabric, unit), !r.Rebuild
}

// PreparedClaims names those claims, for people.
func (p *Plugin) PreparedClaims(fabric device.FabricID, unit device.Unit) (names []string, known bool) {
	uids, known := p.PreparedBy(fabric, unit)
	r, err := p.checkpoint.read()
	if err != nil {
		return nil, false
	}
	for _, uid := range uids {
		names = append(names, r.Claims[uid].claimText(uid))
	}
	return names, known
}

// HandleError implements kubeletplugin.DRAPlugin.
func (p *Plugin) HandleError(ctx context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		klog.FromContext(ctx).Error(err, "Kubelet plugin, goes on", "what", msg)
		return
	}
	p.s.Fatal(fmt.Errorf("kubelet plugin: %s: %w", msg, err))
}

// wakeTidy asks for the background work to be done now.
func (p *Plugin) wakeTidy() {
	select {
	case p.untidy <- struct{}{}:
	default:
	}
}

// broadcast wakes everybody who waits, once.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

func newBroadcast() *broadcast { return &broadcast{ch: make(chan struct{})} }

// next returns a channel that the next send closes.
func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ch
}

func (b *broadcast) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.ch)
	b.ch = make(chan struct{})
}

// outcome sorts an error for metrics.
func outcome(err error) Outcome {
	switch {
	case err == nil:
		return Done
	case errors.Is(err, errPatience):
		return TimedOut
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, errInterrupted):
		return Cancelled
	default:
		return Refused
	}
}

// allocatedAt prints the allocation's time as the API does; empty where the API server keeps none.
func allocatedAt(claim *resourceapi.ResourceClaim) string {
	if claim.Status.Allocation == nil || claim.Status.Allocation.AllocationTimestamp == nil {
		return ""
	}
	return claim.Status.Allocation.AllocationTimestamp.UTC().Format(time.RFC3339)
}

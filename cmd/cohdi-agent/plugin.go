// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/kubeletplugin"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/node"
	"github.com/cohdi/cohdi-agent/internal/nvml"
)

// broadcast wakes everybody who waits for the next change.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

// Changed returns a channel that the next send closes.
func (b *broadcast) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *broadcast) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}

// pluginLeases are this node's device leases as the kubelet plugin needs them.
type pluginLeases struct {
	broadcast
	store  *lease.Store
	client kubernetes.Interface
	node   string
}

var _ kubeletplugin.Leases = (*pluginLeases)(nil)

func (p *pluginLeases) Get(ctx context.Context, f device.FabricID, u device.Unit) (device.Lease, bool, error) {
	l, err := p.store.Get(ctx, f, u)
	if errors.Is(err, lease.ErrNotFound) {
		return device.Lease{}, false, nil
	}
	return l, err == nil, err
}

func (p *pluginLeases) Held(ctx context.Context) ([]device.Lease, error) {
	return p.store.ListLive(ctx)
}

func (p *pluginLeases) PrepareReady(ctx context.Context, l device.Lease, claim types.UID) error {
	if !slices.Contains(l.PreparedFor, string(claim)) {
		l.PreparedFor = append(slices.Clone(l.PreparedFor), string(claim))
	}
	_, err := p.store.Update(ctx, l)
	return err
}

func (p *pluginLeases) Unprepared(ctx context.Context, l device.Lease, claim types.UID) error {
	if !slices.Contains(l.PreparedFor, string(claim)) {
		return nil
	}
	l.PreparedFor = slices.DeleteFunc(slices.Clone(l.PreparedFor), func(c string) bool { return c == string(claim) })
	_, err := p.store.Update(ctx, l)
	return err
}

// pluginGPUs are this node's GPUs as the kubelet plugin needs them.
type pluginGPUs struct {
	broadcast
	host *host
}

var _ kubeletplugin.GPUs = (*pluginGPUs)(nil)

func (p *pluginGPUs) GPU(ctx context.Context, uuid device.GPUUUID) (kubeletplugin.GPU, bool, error) {
	g, found, err := p.find(ctx, uuid)
	return kubeletplugin.GPU{UUID: g.UUID, PCI: g.PCI, Minor: g.Minor, Name: g.Name}, found, err
}

func (p *pluginGPUs) find(ctx context.Context, uuid device.GPUUUID) (nvml.GPU, bool, error) {
	gpus, err := p.host.driver.Inventory(ctx)
	if err != nil {
		return nvml.GPU{}, false, err
	}
	i := slices.IndexFunc(gpus, func(g nvml.GPU) bool { return g.UUID == uuid && g.Problem == nil })
	if i < 0 {
		return nvml.GPU{}, false, nil
	}
	return gpus[i], true, nil
}

func (p *pluginGPUs) Holders(ctx context.Context, uuid device.GPUUUID) (string, error) {
	g, found, err := p.find(ctx, uuid)
	if err != nil || !found {
		return "", err
	}
	who, err := p.host.Holders(ctx, g.PCI)
	return strings.Join(who, ", "), err
}

// specMaker makes container edits from the driver that is installed.
type specMaker struct {
	driver *nvml.Driver
	hook   string // path of nvidia-cdi-hook on the host; empty for none
}

var _ kubeletplugin.SpecMaker = (*specMaker)(nil)

func (s *specMaker) Edits(ctx context.Context, gpus []kubeletplugin.GPU) (common cdispecs.ContainerEdits, own []cdispecs.ContainerEdits, err error) {
	uuids := make([]device.GPUUUID, 0, len(gpus))
	for _, g := range gpus {
		uuids = append(uuids, g.UUID)
	}
	return s.driver.ContainerEdits(ctx, s.hook, uuids...)
}

// claims reads resource claims from the API server.
type claims struct{ client kubernetes.Interface }

var _ kubeletplugin.Claims = (*claims)(nil)

func (c *claims) Get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, bool, error) {
	claim, err := c.client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read claim %s/%s: %w", namespace, name, err)
	}
	return claim, true, nil
}

func (c *claims) List(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	list, err := c.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	return list.Items, nil
}

// prepared answers the node loop from the plugin's checkpoint.
type prepared struct{ plugin *kubeletplugin.Plugin }

var _ node.Prepared = (*prepared)(nil)

func (p *prepared) Prepared(f device.FabricID, u device.Unit) (claims []string, known bool) {
	return p.plugin.PreparedClaims(f, u)
}

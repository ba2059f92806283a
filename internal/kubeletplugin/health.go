// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cohdi/cohdi-agent/internal/device"
)

const (
	// healthTimeout is when the kubelet takes silence for "unknown"; healthResend is well before.
	healthTimeout = 30 * time.Second
	healthResend  = 10 * time.Second
	// healthStale is how old a look at a device may be before it says nothing about now: a monitor
	// that hangs must not keep a device healthy.
	healthStale = time.Minute
)

// WatchHealthStatus implements kubeletplugin.DRAPlugin.
func (p *Plugin) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	if p.s.Health == nil {
		return kubeletplugin.ErrHealthNotSupported
	}
	ticker := p.s.Clock.NewTicker(healthResend)
	defer ticker.Stop()
	for {
		changed := p.s.Health.Changed()
		select {
		case <-ctx.Done():
			return nil
		case reports <- healthReport(p.s.Health.Units(), p.s.NodeName, p.s.Clock.Now()):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-ticker.C():
		}
	}
}

// healthReport speaks of both entries of each unit: the kubelet knows the one that was allocated. A GPU that is
// built into the node has one.
func healthReport(units []UnitHealth, node string, now time.Time) kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	for _, u := range units {
		h := kubeletplugin.DeviceHealth{
			PoolName: u.Fabric.Pool(), Health: kubeletHealth(u.Health), Message: u.Message,
			LastUpdated: u.At, HealthCheckTimeout: healthTimeout,
		}
		if now.Sub(u.At) > healthStale {
			h.Health, h.Message = kubeletplugin.HealthStatusUnknown, "not looked at since "+u.At.UTC().Format(time.RFC3339)
		}
		entries := []string{u.Unit.Entry(), u.Unit.ReadyEntry()}
		if u.Fabric == "" {
			h.PoolName, entries = node, entries[:1]
		}
		for _, entry := range entries {
			h.DeviceName = entry
			report.Devices = append(report.Devices, h)
		}
	}
	return report
}

func kubeletHealth(h device.Health) kubeletplugin.HealthStatus {
	switch h {
	case device.HealthOK, device.HealthWarning:
		return kubeletplugin.HealthStatusHealthy
	case device.HealthCritical:
		return kubeletplugin.HealthStatusUnhealthy
	case device.HealthUnknown:
		return kubeletplugin.HealthStatusUnknown
	}
	return kubeletplugin.HealthStatusUnknown
}

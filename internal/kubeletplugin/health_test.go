// SPDX-License-Identifier: Apache-2.0

package kubeletplugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cohdi/cohdi-agent/internal/device"
)

type someHealth struct {
	mu     sync.Mutex
	units  []UnitHealth
	change *broadcast
}

func (s *someHealth) Units() []UnitHealth {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.units)
}

func (s *someHealth) Changed() <-chan struct{} { return s.change.next() }

func (s *someHealth) set(change func([]UnitHealth)) {
	s.mu.Lock()
	change(s.units)
	s.mu.Unlock()
	s.change.send()
}

func TestWatchHealthStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.known()
		if err := p.WatchHealthStatus(t.Context(), nil); !errors.Is(err, kubeletplugin.ErrHealthNotSupported) {
			t.Errorf("without a source of health: %v", err)
		}
		seen := time.Now()
		h := &someHealth{change: newBroadcast(), units: []UnitHealth{
			{Fabric: "0", Unit: "u1", Health: device.HealthOK, At: seen},
			{Fabric: "0", Unit: "u2", Health: device.HealthCritical, Message: "XID 79", At: seen},
			{Unit: "gpu-1", Health: device.HealthOK, At: seen},
		}}
		p.s.Health = h
		ctx, cancel := context.WithCancel(t.Context())
		reports, ended := make(chan kubeletplugin.DeviceHealthReport), make(chan error)
		go func() { ended <- p.WatchHealthStatus(ctx, reports) }()

		dev := func(name string, s kubeletplugin.HealthStatus, msg string) kubeletplugin.DeviceHealth {
			return kubeletplugin.DeviceHealth{PoolName: "fabric-0", DeviceName: name, Health: s, Message: msg, LastUpdated: seen, HealthCheckTimeout: healthTimeout}
		}
		want := kubeletplugin.DeviceHealthReport{Devices: []kubeletplugin.DeviceHealth{
			dev("u1", kubeletplugin.HealthStatusHealthy, ""), dev("u1-ready", kubeletplugin.HealthStatusHealthy, ""),
			dev("u2", kubeletplugin.HealthStatusUnhealthy, "XID 79"), dev("u2-ready", kubeletplugin.HealthStatusUnhealthy, "XID 79"),
			dev("gpu-1", kubeletplugin.HealthStatusHealthy, ""),
		}}
		want.Devices[4].PoolName = "n1"
		if diff := cmp.Diff(want, <-reports); diff != "" {
			t.Errorf("first report (-want +got):\n%s", diff)
		}
		<-reports
		if waited := time.Since(seen); waited != healthResend {
			t.Errorf("sent again after %v", waited)
		}
		synctest.Wait()
		h.change.send()
		<-reports
		if waited := time.Since(seen); waited != healthResend {
			t.Errorf("a change was sent after %v", waited)
		}
		// The monitor hangs: what it said last is not true for ever.
		var last kubeletplugin.DeviceHealthReport
		for time.Since(seen) <= healthStale {
			last = <-reports
		}
		for _, d := range last.Devices {
			if d.Health != kubeletplugin.HealthStatusUnknown {
				t.Errorf("%s is %s after %v without a look", d.DeviceName, d.Health, time.Since(seen))
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// S09: sockets of a killed agent.
func TestStaleSockets(t *testing.T) {
	data, registry := t.TempDir(), t.TempDir()
	listen := func(path string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	for path, alive := range map[string]bool{
		filepath.Join(data, "dra-old.sock"):                   false,
		filepath.Join(registry, "gpu.cohdi.io-old-reg.sock"):  false,
		filepath.Join(registry, "other.example-old-reg.sock"): false,
		filepath.Join(data, "dra-now.sock"):                   true,
		filepath.Join(registry, "gpu.cohdi.io-now-reg.sock"):  true,
	} {
		l := listen(path)
		if !alive {
			l.SetUnlinkOnClose(false)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		defer l.Close()
	}
	if err := removeStaleSockets(t.Context(), data, registry); err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, dir := range []string{data, registry} {
		found, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			left = append(left, f.Name())
		}
	}
	want := []string{"dra-now.sock", "gpu.cohdi.io-now-reg.sock", "other.example-old-reg.sock"}
	if diff := cmp.Diff(want, left); diff != "" {
		t.Errorf("sockets (-want +got):\n%s", diff)
	}
}

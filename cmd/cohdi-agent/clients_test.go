// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// TestNewClient: every kind of manager that the configuration takes has a client that does what its fields say.
func TestNewClient(t *testing.T) {
	given := config.Fabric{
		Endpoint: "https://m", Tenant: "3b5d7a52-0000-4000-8000-000000000001", Cluster: "3b5d7a52-0000-4000-8000-0000000000c1",
		Credentials: "/x", Exclusion: config.ExclusionMachine,
	}
	for manager, want := range map[string]fabric.Capabilities{
		config.ManagerFM: {AddressableDetach: true, Free: fabric.FreeCount, Exclusion: fabric.ExclusionMachine, Identity: true},
		config.ManagerCM: {AddressableDetach: true, Free: fabric.FreeCount, Exclusion: fabric.ExclusionMachine, Identity: true, Asynchronous: true, Limits: true},
		config.ManagerCDIM: {
			AddressableAttach: true, AddressableDetach: true, Free: fabric.FreeList, Exclusion: fabric.ExclusionGlobal, Asynchronous: true, Batch: 8,
		},
		config.ManagerRedfish: {
			AddressableAttach: true, AddressableDetach: true, Free: fabric.FreeList, Exclusion: fabric.ExclusionMachine, Asynchronous: true, Identity: true, Events: true,
		},
		config.ManagerSunfish: {
			AddressableAttach: true, AddressableDetach: true, Free: fabric.FreeList, Exclusion: fabric.ExclusionNone, Asynchronous: true, Identity: true,
		},
	} {
		f := given
		f.Manager = manager
		switch manager {
		case config.ManagerCDIM:
			f.CDIM = &config.CDIM{Dialect: "oss", Gateway: "https://m", Login: "https://m"}
		case config.ManagerSunfish:
			f.Sunfish = &config.Sunfish{Endpoint: "https://m"}
		}
		m, err := newClient(&f, clock.RealClock{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		got := m.Capabilities()
		got.MaxCall, got.Settle = 0, 0
		if got != want {
			t.Errorf("%s: capabilities %+v, want %+v", manager, got, want)
		}
		if _, ok := m.(fabric.Limiter); ok != got.Limits {
			t.Errorf("%s: it is a Limiter: %v, and says %v", manager, ok, got.Limits)
		}
		if _, ok := m.(fabric.Batcher); ok != (got.Batch > 1) {
			t.Errorf("%s: it is a Batcher: %v, and says %d", manager, ok, got.Batch)
		}
		f.Tenant, f.Endpoint, f.CDIM, f.Sunfish = "", "", &config.CDIM{}, &config.Sunfish{}
		if m, err := newClient(&f, clock.RealClock{}, nil); err == nil {
			t.Errorf("%s: a client %v without what it needs", manager, m)
		}
	}
	if n := len(clients()); n != 5 {
		t.Errorf("%d kinds of managers, and 5 of them have a row here", n)
	}
	if _, err := newClient(&config.Fabric{Manager: "xx"}, clock.RealClock{}, nil); err == nil {
		t.Error("a client for an unknown manager")
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-agent/internal/config"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/cdim"
	"github.com/cohdi/cohdi-agent/internal/fabric/cm"
	"github.com/cohdi/cohdi-agent/internal/fabric/fm"
	"github.com/cohdi/cohdi-agent/internal/fabric/redfish"
	"github.com/cohdi/cohdi-agent/internal/fabric/sunfish"
)

// observe is told of each request to a manager: the client's word for it, the HTTP status, and how long it took.
type observe = func(operation string, status int, took time.Duration)

// newManager makes the client of one kind of manager.
type newManager = func(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error)

// clients make the client of each kind of manager.
func clients() map[string]newManager {
	return map[string]newManager{
		config.ManagerFM:      newFM,
		config.ManagerCM:      newCM,
		config.ManagerCDIM:    newCDIM,
		config.ManagerRedfish: newRedfish,
		config.ManagerSunfish: newSunfish,
	}
}

// newClient makes the client of a fabric's manager; nothing is asked of it yet.
func newClient(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error) {
	newFor, known := clients()[f.Manager]
	if !known {
		return nil, fmt.Errorf("there is no client for manager %q", f.Manager)
	}
	return newFor(f, clk, seen)
}

func newFM(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error) {
	// One call for a machine at a time is also what is kept to where nothing is known.
	exclusion := map[string]fabric.Exclusion{config.ExclusionMachine: fabric.ExclusionMachine, config.ExclusionNone: fabric.ExclusionNone}[f.Exclusion]
	return fm.New(fm.Config{
		Endpoint: f.Endpoint, Tenant: f.Tenant, FabricID: f.ManagerFabric, Credentials: f.Credentials,
		Exclusion: exclusion, UpdateTimeout: f.CallTimeout, Clock: clk, Observe: seen,
	})
}

func newCM(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error) {
	return cm.New(cm.Config{
		Endpoint: f.Endpoint, Tenant: f.Tenant, Cluster: f.Cluster, Credentials: f.Credentials,
		FabricManager: true, FabricID: f.ManagerFabric, WorkTimeout: f.CallTimeout, Clock: clk, Observe: seen,
	})
}

func newCDIM(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error) {
	c := f.CDIM.Client()
	c.Credentials, c.JobTimeout, c.Settle, c.Clock, c.Observe = f.Credentials, f.CallTimeout, f.Settle, clk, seen
	return cdim.New(c)
}

func newRedfish(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error) {
	special := config.Redfish{}
	if f.Redfish != nil {
		special = *f.Redfish
	}
	return redfish.New(redfish.Config{
		Endpoint: f.Endpoint, Credentials: f.Credentials, Basic: special.Basic, NoIdentity: special.NoIdentities,
		TaskTimeout: f.CallTimeout, Settle: f.Settle, Clock: clk, Observe: seen,
	})
}

func newSunfish(f *config.Fabric, clk clock.WithTicker, seen observe) (fabric.Manager, error) {
	c := f.Sunfish.Client()
	c.Credentials, c.CallTimeout, c.Settle, c.Clock, c.Observe = f.Credentials, f.CallTimeout, f.Settle, clk, seen
	return sunfish.New(c)
}

// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// What a configuration says it is.
const (
	APIVersion = "agent.gpu.cohdi.io/v1alpha1"
	Kind       = "Config"
)

// The kinds of managers that a fabric may have.
const (
	// ManagerFM speaks the API of FTI's Fabric Manager.
	ManagerFM = "fm"
	// ManagerCM speaks the API of FTI's Cluster Manager, with a Fabric Manager beside it that counts what is free.
	ManagerCM = "cm"
	// ManagerCDIM speaks the API of project-cdim and of the product that grew from it.
	ManagerCDIM = "cdim"
	// ManagerRedfish speaks Redfish to a service that composes, ManagerSunfish to a Sunfish service.
	ManagerRedfish = "redfish"
	ManagerSunfish = "sunfish"
)

// How many changing calls a manager takes for one machine at a time: one, or several.
const (
	ExclusionMachine = "machine"
	ExclusionNone    = "none"
)

// fabricsDir is where deploy/daemonset.yaml mounts the fabrics' Secrets.
const fabricsDir = "/etc/cohdi-agent/fabrics/"

// Config is the agent's configuration with defaults filled in.
type Config struct {
	Fabrics []Fabric
	// Machines names the machines of Nodes that do not say it themselves.
	Machines map[string]device.Machine
	// BuiltIn lists, by Node, the addresses of GPUs that are part of it and of no pool, for where the fabric
	// manager's list cannot tell.
	BuiltIn map[string][]device.PCIAddress
	Timings Timings
	Logging Logging
	// DriverRoots are directories on the host where the NVIDIA driver's files may lie, in the order in
	// which they are looked at.
	DriverRoots []string
	// ForeignDevices says what becomes of a device that is attached to our machine without a lease.
	ForeignDevices ForeignDevices
	// IfAdvertisedElsewhere says what is published on a node whose GPUs somebody else advertises, too.
	IfAdvertisedElsewhere IfAdvertisedElsewhere
}

// Fabric is one switch domain and how its manager is reached.
type Fabric struct {
	ID      device.FabricID
	Manager string
	// Endpoint is the https URL without a path of an FM, CM or Redfish service.
	Endpoint string
	// Tenant is a UUID; FM and CM have one.
	Tenant string
	// CDIM and Sunfish say how such a manager is reached, Redfish what is special of one; nil with any other.
	CDIM    *CDIM
	Redfish *Redfish
	Sunfish *Sunfish
	// Cluster is the UUID that a Cluster Manager has for the cluster; empty with any other manager.
	Cluster string
	// ManagerFabric is the manager's own number of the fabric.
	ManagerFabric int
	// Credentials is the directory where the fabric's Secret is mounted.
	Credentials string
	// CallTimeout is how long this manager may work on an attach or detach.
	CallTimeout time.Duration
	// Exclusion is ExclusionMachine or ExclusionNone: whether this manager takes one changing call for a machine at a
	// time, or several.
	Exclusion string
	// Settle is how long a call may still take effect at this manager after it has ended it.
	Settle time.Duration
	// NodeSelector narrows the nodes that belong to the fabric, by their labels; empty takes every node
	// whose machine the manager lists.
	NodeSelector map[string]string
	// SlotsPerNode is how many devices of the pool a node's machine has room for; 0 is no limit. Slots are
	// the Nodes that differ.
	SlotsPerNode int
	Slots        map[string]int
	Models       []Model
}

// CDIM says how a CDIM is reached: by its gateway, with the URL of the login there, or by its two services' own ports.
type CDIM struct {
	Dialect                           string
	Gateway, Login                    string
	ConfigurationManager, LayoutApply string
	// PlainHTTP accepts http URLs.
	PlainHTTP bool
	// ResourceGroups and Switch narrow the devices that may be attached, by the manager's names; all if empty.
	ResourceGroups []string
	Switch         string
}

// Redfish says what is special of a Redfish service.
type Redfish struct {
	// Basic sends user and password with each request, without a session.
	Basic bool
	// NoIdentities: its processors have no UUIDs, or others than the driver.
	NoIdentities bool
}

// Sunfish says how a Sunfish service is reached.
type Sunfish struct {
	Endpoint string
	// PlainHTTP accepts an http URL.
	PlainHTTP bool
	// Fabric is the Id of the one of its fabrics that counts, empty where there is one.
	Fabric string
}

// Model is a kind of device in the pool.
type Model struct {
	Name device.Model
	// FabricModel is the manager's word for it.
	FabricModel string
	// MinPerNode is how many each node of the fabric has attached in advance, whether a Pod wants them or not.
	MinPerNode int
	// MaxPerNode is the most that one node may hold; 0 is no limit.
	MaxPerNode int
	// Excludes are the other models of which a node must have none beside this one.
	Excludes []device.Model
	// Attributes are published with each of its units.
	Attributes map[string]string
}

// Timings are the times that the policies go by.
type Timings struct {
	// AttachDeadline is how long an attach may take. The scheduler gives up after 10 minutes.
	AttachDeadline time.Duration
	// CoolDown is how long a unit stays attached with nobody using it.
	CoolDown time.Duration
	// ReadySettle is how long a unit has been withdrawn before it is taken from its node.
	ReadySettle time.Duration
	// LeaderList and NodeList are how often the leader and the nodes read the manager's list unasked.
	LeaderList, NodeList time.Duration
	// AgentAway is how long a node's agent may be gone, as in a rolling update.
	AgentAway time.Duration
	// RetryAfter is how long a unit that failed is left alone.
	RetryAfter time.Duration
	// ForgetUnit is how long a unit that the manager has no more stays listed after any claim or lease named it.
	ForgetUnit time.Duration
	// AdoptAfter is how long a foreign device has been attached before it is taken in.
	AdoptAfter time.Duration
}

// Logging is how the agent's log is written.
type Logging struct {
	// Format is LogText or LogJSON.
	Format string
}

// Formats of the log.
const (
	LogText = "text"
	LogJSON = "json"
)

// ForeignDevices is what becomes of a device that nobody of ours has attached.
type ForeignDevices string

// What becomes of them.
const (
	// ForeignReport leaves foreign devices alone and says that they are there.
	ForeignReport ForeignDevices = "report"
	// ForeignAdopt takes them in as idle after a while.
	ForeignAdopt ForeignDevices = "adopt"
)

// IfAdvertisedElsewhere is what to do where another driver or device plugin advertises the GPUs.
type IfAdvertisedElsewhere string

// What to do about it.
const (
	// Withhold publishes nothing on that node.
	Withhold IfAdvertisedElsewhere = "withhold"
	// Ignore publishes all the same: one GPU may be given to two Pods.
	Ignore IfAdvertisedElsewhere = "ignore"
)

// Fabric returns the fabric of that id.
func (c Config) Fabric(id device.FabricID) (Fabric, bool) {
	for _, f := range c.Fabrics {
		if f.ID == id {
			return f, true
		}
	}
	return Fabric{}, false
}

// FabricModels returns the manager's words for the fabric's models.
func (f Fabric) FabricModels() map[device.Model]string {
	words := make(map[device.Model]string, len(f.Models))
	for _, m := range f.Models {
		words[m.Name] = m.FabricModel
	}
	return words
}

// Selects tells whether a node with these labels may belong to the fabric.
func (f Fabric) Selects(labels map[string]string) bool {
	for key, want := range f.NodeSelector {
		if got, ok := labels[key]; !ok || got != want {
			return false
		}
	}
	return true
}

// defaults is the configuration of an empty file.
func defaults() Config {
	return Config{
		Timings: Timings{
			AttachDeadline: 4 * time.Minute,
			CoolDown:       10 * time.Minute,
			ReadySettle:    10 * time.Second,
			LeaderList:     30 * time.Second,
			NodeList:       10 * time.Minute,
			AgentAway:      time.Minute,
			RetryAfter:     time.Minute,
			ForgetUnit:     24 * time.Hour,
			AdoptAfter:     10 * time.Minute,
		},
		Logging:               Logging{Format: LogText},
		DriverRoots:           []string{"/", "/run/nvidia/driver"},
		ForeignDevices:        ForeignReport,
		IfAdvertisedElsewhere: Withhold,
	}
}

// Address is where the manager is, which fabrics that share it have in common.
func (f *Fabric) Address() string {
	switch {
	case f.CDIM != nil:
		return cmp.Or(f.CDIM.Gateway, f.CDIM.LayoutApply)
	case f.Sunfish != nil:
		return f.Sunfish.Endpoint
	}
	return f.Endpoint
}

// usual is how long a kind of manager may work on one call, and how long that may take effect after it has ended. Most
// answer when the hardware is done, or soon after. The inventory of a CDIM follows a job by an event, or, if that is
// lost, by its look every 10 minutes.
func usual(manager string) (call, settle time.Duration) {
	switch manager {
	case ManagerCDIM:
		return 5 * time.Minute, 11 * time.Minute
	case ManagerRedfish:
		return 5 * time.Minute, time.Minute
	}
	return 3 * time.Minute, time.Minute
}

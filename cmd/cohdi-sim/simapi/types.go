// SPDX-License-Identifier: Apache-2.0

package simapi

import (
	"encoding/json"
	"fmt"
	"time"
)

// Phases of a device on the fabric.
const (
	PhaseFree      = "free"
	PhaseAttaching = "attaching"
	PhaseAttached  = "attached"
	PhaseDetaching = "detaching"
)

// Kinds of violation.
const (
	// OpenAtDetach: a process had the device open when the fabric took it away.
	OpenAtDetach = "openAtDetach"
	// OpenAtRemove: a process had the device open when the node's PCI tree was told to drop it.
	OpenAtRemove = "openAtRemove"
	// PresentAtDetach: the device was still on the node's PCI tree when the fabric took it away.
	PresentAtDetach = "presentAtDetach"
	// Invariant: the simulator's own state broke a rule.
	Invariant = "invariant"
)

// Hot-plug modes of a machine.
const (
	// HotplugEvent: a device shows up on the node by itself, with a uevent.
	HotplugEvent = "event"
	// HotplugRescan: a device shows up only after a write to a rescan file.
	HotplugRescan = "rescan"
)

// Duration is a time.Duration written as "2s" in JSON and YAML.
type Duration time.Duration

// MarshalJSON writes the form of time.Duration.String.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads what time.ParseDuration accepts, never a bare number.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("read duration %s: want a string such as \"2s\": %w", b, err)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("read duration: %w", err)
	}
	if v < 0 {
		return fmt.Errorf("read duration %q: must not be negative", s)
	}
	*d = Duration(v)
	return nil
}

// State is everything the chassis knows, as GET /state shows it.
type State struct {
	Time       time.Time   `json:"time"`
	Timing     Timing      `json:"timing"`
	Policies   Policies    `json:"policies"`
	Machines   []Machine   `json:"machines"`
	Devices    []Device    `json:"devices"`
	Operations []Operation `json:"operations"`
	Logins     int         `json:"logins"`
	Violations int         `json:"violations"`
}

// Device finds a device by id, fabric identity or GPU UUID.
func (s *State) Device(id string) (Device, bool) {
	for _, d := range s.Devices {
		if d.ID == id || d.ResUUID == id || d.UUID == id {
			return d, true
		}
	}
	return Device{}, false
}

// Attached lists the devices that the fabric has given to a machine.
func (s *State) Attached(machine string) []Device {
	var out []Device
	for _, d := range s.Devices {
		if d.Machine == machine && d.Phase == PhaseAttached {
			out = append(out, d)
		}
	}
	return out
}

// Machine is one host port of the chassis and the node behind it.
type Machine struct {
	Name         string `json:"name"`
	UUID         string `json:"uuid"`
	Fabric       int    `json:"fabric"`
	Slots        int    `json:"slots"`
	Power        bool   `json:"power"`
	Hotplug      string `json:"hotplug"`
	DriverLoaded bool   `json:"driverLoaded"`
	HostRoot     string `json:"hostRoot,omitempty"`
}

// Device is one pooled GPU: what the fabric holds of it, and how the node sees it.
type Device struct {
	ID           string `json:"id"`
	ResUUID      string `json:"resUUID"`
	Model        string `json:"model"`
	UUID         string `json:"uuid"`
	Serial       string `json:"serial"`
	FabricSerial string `json:"fabricSerial"`
	Fabric       int    `json:"fabric"`
	OpStatus     string `json:"opStatus"`
	Tenant       string `json:"tenant,omitempty"`
	Vanished     bool   `json:"vanished,omitempty"`
	BuiltIn      bool   `json:"builtIn,omitempty"`
	// Failure is why its last attach (phase attaching) or detach (phase attached) failed.
	Failure string `json:"failure,omitempty"`
	Phase   string `json:"phase"`
	Machine string `json:"machine,omitempty"`
	Slot    int    `json:"slot,omitempty"`
	// PhaseSince is when the device entered its phase.
	PhaseSince time.Time `json:"phaseSince"`

	PCIAddress  string     `json:"pciAddress,omitempty"`
	OnBus       bool       `json:"onBus"`
	OnBusSince  *time.Time `json:"onBusSince,omitempty"`
	Bound       bool       `json:"bound"`
	Minor       int        `json:"minor"`
	Drain       bool       `json:"drain"`
	Persistence bool       `json:"persistence"`
	// DeviceNumber is major:minor of its character device.
	DeviceNumber string `json:"deviceNumber"`
}

// Operation is one attach or detach that the fabric took on.
type Operation struct {
	ID      int        `json:"id"`
	Kind    string     `json:"kind"`
	Machine string     `json:"machine"`
	Devices []string   `json:"devices"`
	Caller  string     `json:"caller"`
	Forced  bool       `json:"forced,omitempty"`
	Start   time.Time  `json:"start"`
	Due     time.Time  `json:"due"`
	End     *time.Time `json:"end,omitempty"`
	Outcome string     `json:"outcome,omitempty"`
}

// Violation is a rule that the agent (or the simulator itself) broke.
type Violation struct {
	Time    time.Time `json:"time"`
	Kind    string    `json:"kind"`
	Machine string    `json:"machine,omitempty"`
	Device  string    `json:"device,omitempty"`
	Detail  string    `json:"detail"`
	Holders []Holder  `json:"holders,omitempty"`
}

// Holder is a process that has a GPU's device node open.
type Holder struct {
	PID     int    `json:"pid"`
	Command string `json:"command"`
}

// Timing says how long things take; a nil field is left as it is.
type Timing struct {
	AttachDelay *Duration `json:"attachDelay,omitempty"`
	DetachDelay *Duration `json:"detachDelay,omitempty"`
	// NodeDelay passes between the end of the attach and the moment the node can see the device.
	NodeDelay *Duration `json:"nodeDelay,omitempty"`
	// StaleDelay is how long the inventory of a CDIM lags behind the end of a change.
	StaleDelay *Duration `json:"staleDelay,omitempty"`
}

// Request is one entry of the request log.
type Request struct {
	ID       int       `json:"id"`
	Time     time.Time `json:"time"`
	Face     string    `json:"face"`
	Method   string    `json:"method"`
	Path     string    `json:"path"`
	Query    string    `json:"query,omitempty"`
	Body     string    `json:"body,omitempty"`
	Status   int       `json:"status"`
	Millis   int64     `json:"millis"`
	Fault    string    `json:"fault,omitempty"`
	Answered bool      `json:"answered"`
}

// Fault is a rule: which requests it hits and what happens to them.
type Fault struct {
	// Name shows in the request log; one is made up where it is empty.
	Name string `json:"name,omitempty"`
	// Match
	Face   string `json:"face,omitempty"`   // one of Faces; empty is all
	Method string `json:"method,omitempty"` // empty is all
	Path   string `json:"path,omitempty"`   // a regular expression, searched in the path
	Body   string `json:"body,omitempty"`   // a substring of the body
	Nth    int    `json:"nth,omitempty"`    // let the first nth-1 matches pass
	Count  int    `json:"count,omitempty"`  // hits until the rule is spent; 0 never ends
	// Action
	Action      string            `json:"action"`
	Status      int               `json:"status,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	Content     string            `json:"content,omitempty"`     // body of the answer for status and statusAfterEffect
	ContentType string            `json:"contentType,omitempty"` // default application/json
	Delay       Duration          `json:"delay,omitempty"`       // slow: before the first byte, then again spread over the body
	Effect      bool              `json:"effect,omitempty"`      // hang: do the work, then never answer
	Items       int               `json:"items,omitempty"`       // partial: how many devices are really attached
}

// Faces are those whose requests are in the log and can be hit by faults: the managers, the id_manager and Keycloak (idm), and
// what is below a CDIM and a Redfish service (hw) and below a Sunfish service (agent).
func Faces() []string {
	return []string{"fm", "cm", "cdim", "redfish", "sunfish", "idm", "hw", "agent"}
}

// FaultActions are all of those below.
func FaultActions() []string {
	return []string{
		ActionStatus, ActionStatusAfterEffect, ActionDropBefore, ActionDropAfter, ActionHang, ActionSlow, ActionReset, ActionDup, ActionPartial,
	}
}

// Actions of a fault rule.
const (
	ActionStatus            = "status"
	ActionStatusAfterEffect = "statusAfterEffect"
	ActionDropBefore        = "dropBefore"
	ActionDropAfter         = "dropAfter"
	ActionHang              = "hang"
	ActionSlow              = "slow"
	ActionReset             = "reset"
	ActionDup               = "dup"
	ActionPartial           = "partial"
)

// FaultState is a rule with its counters.
type FaultState struct {
	Fault
	Seen int `json:"seen"`
	Hits int `json:"hits"`
}

// DeviceChange is the body of POST /device/{id}; nil fields and an empty action change nothing.
type DeviceChange struct {
	// Health is OK, Warning, Critical or Unknown; OpStatus is the raw value of res_op_status and wins.
	Health   *string `json:"health,omitempty"`
	OpStatus *string `json:"opStatus,omitempty"`
	// FabricSerial is what the fabric manager says in res_serial_num.
	FabricSerial *string `json:"fabricSerial,omitempty"`
	// FailAttach and FailDetach make the next one of this device fail for that reason, at a manager that shows
	// failures (CM); empty takes it back.
	FailAttach *string `json:"failAttach,omitempty"`
	FailDetach *string `json:"failDetach,omitempty"`
	// XID raises an NVML event with that code on the machine that has the device.
	XID *uint64 `json:"xid,omitempty"`
	// Action is one of the Device* constants.
	Action string `json:"action,omitempty"`
	// Machine is the one that it is built into.
	Machine string `json:"machine,omitempty"`
	// Tenant is who steals it.
	Tenant string `json:"tenant,omitempty"`
}

// DeviceActions are all of those below.
func DeviceActions() []string {
	return []string{DeviceVanish, DeviceReturn, DeviceSteal, DeviceFree, DeviceBuildIn, DeviceLinkDown, DeviceLinkUp}
}

// Actions on a device.
const (
	// DeviceVanish: the device is gone from node and inventory at once, as if pulled out.
	DeviceVanish = "vanish"
	// DeviceReturn: a vanished device is back in the pool.
	DeviceReturn = "return"
	// DeviceSteal: another tenant has taken the free device.
	DeviceSteal = "steal"
	// DeviceFree: it is back in the pool at once, whoever had it, without delay and without a judgement.
	DeviceFree = "free"
	// DeviceBuildIn: the free device becomes part of a machine: its node sees it, and the fabric neither lists nor
	// counts it, until DeviceFree.
	DeviceBuildIn = "buildIn"
	// DeviceLinkDown: the node loses it while the fabric still lists it as attached.
	DeviceLinkDown = "linkDown"
	// DeviceLinkUp: the link is back; the node sees it as its hot-plug mode says.
	DeviceLinkUp = "linkUp"
)

// MachineChange is the body of POST /machine/{name}.
type MachineChange struct {
	Power        *bool   `json:"power,omitempty"`
	Hotplug      *string `json:"hotplug,omitempty"`
	DriverLoaded *bool   `json:"driverLoaded,omitempty"`
}

// TokenChange is the body of POST /token.
type TokenChange struct {
	// RevokeAll ends the sessions of a Redfish service too.
	RevokeAll bool      `json:"revokeAll,omitempty"`
	Lifetime  *Duration `json:"lifetime,omitempty"`
}

// Job is one of a CDIM's.
type Job struct {
	ID             string `json:"id"`
	Status         string `json:"status"`
	RollbackStatus string `json:"rollbackStatus,omitempty"`
	StartedAt      string `json:"startedAt"`
	// Lost: nobody works on it any more.
	Lost bool `json:"lost,omitempty"`
}

// JobChange is the body of POST /job/{id}: what an operator does to a job.
type JobChange struct {
	// Action is resume or cancel.
	Action string `json:"action"`
	// Rollback undoes what a cancelled job has done.
	Rollback bool `json:"rollback,omitempty"`
}

// Actions on a job.
const (
	JobResume = "resume"
	JobCancel = "cancel"
)

// AttachRequest is the body of POST /attach: a person attaches behind the agent's back.
type AttachRequest struct {
	Machine string `json:"machine"`
	Device  string `json:"device"`
}

// DetachRequest is the body of POST /detach. Such a detach is not judged.
type DetachRequest struct {
	Device string `json:"device"`
}

// ErrorBody is what the control API answers with a status that is not 2xx.
type ErrorBody struct {
	Error string `json:"error"`
}

// Policies choose between the behaviours that a real fabric manager may have; an empty field is left as it is.
type Policies struct {
	// AttachAnswer: newOnly, allResources, reordered, withoutSerial or empty.
	AttachAnswer string `json:"attachAnswer,omitempty"`
	// Serialization of updates: none, perMachine, perFabric (the second call waits) or busy409.
	Serialization string `json:"serialization,omitempty"`
	// Pick of a free device: first, random or worst (the least healthy one).
	Pick string `json:"pick,omitempty"`
	// NoCapacity: 404mock, 409, 400 or empty200.
	NoCapacity string `json:"noCapacity,omitempty"`
	// Shortage, when fewer than asked for are free: allOrNothing or partial.
	Shortage string `json:"shortage,omitempty"`
	// UnknownModel in a question for free devices: zero or 404.
	UnknownModel string `json:"unknownModel,omitempty"`
	// DetachAnswer: 200 or 204.
	DetachAnswer string `json:"detachAnswer,omitempty"`
	// UnknownDetach, of a device that is not on the machine: 404 or 200.
	UnknownDetach string `json:"unknownDetach,omitempty"`
	// DetachInUse, while a process has the device open: success or 409.
	DetachInUse string `json:"detachInUse,omitempty"`
	// CM are those of the cluster manager alone.
	CM CMPolicies `json:"cm,omitzero"`
	// CDIM are those of a CDIM alone.
	CDIM CDIMPolicies `json:"cdim,omitzero"`
	// Redfish are those of a Redfish service alone.
	Redfish RedfishPolicies `json:"redfish,omitzero"`
	// Sunfish are those of a Sunfish service alone.
	Sunfish SunfishPolicies `json:"sunfish,omitzero"`
}

// CMPolicies choose between the behaviours that a real cluster manager may have.
type CMPolicies struct {
	// Count is when device_count moves: atAccept or atComplete.
	Count string `json:"count,omitempty"`
	// Progress is the row of a device that is coming: noID, withID or absent.
	Progress string `json:"progress,omitempty"`
	// Detail of a row: full or partial.
	Detail string `json:"detail,omitempty"`
	// Above is the answer to a total above the maximum: 400, 409 or clamp.
	Above string `json:"above,omitempty"`
	// Below is what a lower total in an increase does to devices that are still coming: noop, or lastWins, which
	// calls them off.
	Below string `json:"below,omitempty"`
	// Shortage, when none is free: addFailed (accepted, and a failed row) or 409.
	Shortage string `json:"shortage,omitempty"`
	// Unknown is the answer to the removal of a device that is not there: 404 or ignore.
	Unknown string `json:"unknown,omitempty"`
	// Remaining is what a removal's total must be: checked or trusted.
	Remaining string `json:"remaining,omitempty"`
	// Failed rows of devices that did not come up: stay until they are removed, or vanish.
	Failed string `json:"failed,omitempty"`
	// Answer to an accepted change: json, empty or text.
	Answer string `json:"answer,omitempty"`
	// Refusal is the body of an error: json, html or empty.
	Refusal string `json:"refusal,omitempty"`
}

// CDIMPolicies choose between the behaviours that a real CDIM may have.
type CDIMPolicies struct {
	// JobCheck, of a job: asReal (what can never run is taken, and never ends) or strict.
	JobCheck string `json:"jobCheck,omitempty"`
	// JobError, when the hardware refuses a part of a job: failed or suspended.
	JobError string `json:"jobError,omitempty"`
	// AdapterLink, between an attached device and the adapter of the product: both, typed (by its type only), eeio
	// (by its status only) or nodeOnly (no link, only the node's id).
	AdapterLink string `json:"adapterLink,omitempty"`
	// Serial number of a GPU in the inventory: own (the chassis'), board (that which the GPU's driver tells) or none.
	Serial string `json:"serial,omitempty"`
}

// RedfishPolicies choose between the behaviours that a real Redfish service may have.
type RedfishPolicies struct {
	// Variant: composition (resource blocks), or zones (a fabric whose zones are host ports).
	Variant string `json:"variant,omitempty"`
	// Forms of a change that are offered: all (actions and list), actions, list or manifest.
	Forms string `json:"forms,omitempty"`
	// Work that was accepted: task202 (a task), task200 (its monitor says 200 all the while), bare202 (without a word),
	// sync200 or sync204 (the answer comes when it is done), or early200 (it says that it is done, and is not).
	Work string `json:"work,omitempty"`
	// AfterTask is what a monitor says at the end: replay (the answer to the change), task, or gone.
	AfterTask string `json:"afterTask,omitempty"`
	// RetryAfter of a task: zero, seconds, date or none.
	RetryAfter string `json:"retryAfter,omitempty"`
	// Composing blocks are listed with their system, or unlisted until they are composed.
	Composing string `json:"composing,omitempty"`
	// ETag: optional, required, none, or gzip (with what a compressing server adds, and in the header only).
	ETag string `json:"etag,omitempty"`
	// PageSize of collections: 3, 1 or 50.
	PageSize string `json:"pageSize,omitempty"`
	// Expand of collections: no or yes.
	Expand string `json:"expand,omitempty"`
	// Identity of a GPU: full, prefixed (GPU- and upper case), inSerial, serialOnly, none, duplicate (all the same) or
	// nullStatus (full, and without a status).
	Identity string `json:"identity,omitempty"`
	// HostBlock is the answer to the removal of the host's own block: 400, 409 or 406.
	HostBlock string `json:"hostBlock,omitempty"`
	// Errors are extended, plain (without extended information) or message (no more than that).
	Errors string `json:"errors,omitempty"`
	// Root without its slash: redirect or same.
	Root string `json:"root,omitempty"`
	// Events: sse or none.
	Events string `json:"events,omitempty"`
}

// SunfishPolicies choose between the behaviours that a real Sunfish service may have.
type SunfishPolicies struct {
	// SameTarget, of a second Connection of a target: accept (it is taken, and does nothing) or reject.
	SameTarget string `json:"sameTarget,omitempty"`
	// SystemAnswer to a count that is written to the composition system: 200 or 204.
	SystemAnswer string `json:"systemAnswer,omitempty"`
	// Extension: the machines show their GPUs (on), or nothing (off).
	Extension string `json:"extension,omitempty"`
	// Offers: all, or systems alone, so that only the composition system is left.
	Offers string `json:"offers,omitempty"`
}

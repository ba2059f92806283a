// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strconv"
	"strings"
)

// Health is a fabric manager's word on a device.
type Health string

// A device's health. Unknown is not bad: managers leave the field empty for devices that work.
const (
	HealthOK       Health = "OK"
	HealthWarning  Health = "Warning"
	HealthCritical Health = "Critical"
	HealthUnknown  Health = "Unknown"
)

// OnFabric is one device as the fabric manager lists it on a machine.
type OnFabric struct {
	// ID is the fabric's identity of the device, unique on the fabric. It detaches.
	ID      string
	Machine Machine
	// Model is the manager's own word for the model.
	Model string
	// UUID is the identity that the node can match; empty where the manager gives none.
	UUID GPUUUID
	// Serial is the board's serial number, for want of a UUID; empty where the manager gives none.
	Serial string
	Health Health
	// HealthText is what the manager said, for people.
	HealthText string
}

// FaultClass says what a failed fabric call means for the next step.
type FaultClass string

// Classes of faults. All but Unknown are definite: nothing happened on the fabric.
const (
	FaultUnauthorized FaultClass = "Unauthorized" // login or token refused
	FaultNotFound     FaultClass = "NotFound"     // machine or device is unknown to the manager
	FaultBusy         FaultClass = "Busy"         // the same call later may do
	FaultNoCapacity   FaultClass = "NoCapacity"   // none of this model is free
	FaultRejected     FaultClass = "Rejected"     // refused for good
	FaultUnsupported  FaultClass = "Unsupported"  // this manager cannot do that
	FaultConflict     FaultClass = "Conflict"     // decided on what was no longer so: look again
	FaultSuspended    FaultClass = "Suspended"    // the manager waits for a person
	FaultUnreachable  FaultClass = "Unreachable"  // the call never left: no connection, TLS refused
	FaultUnknown      FaultClass = "Unknown"      // it may have happened: look before anything else
)

// FaultClasses returns every class, for metrics that exist from the start.
func FaultClasses() []FaultClass {
	return []FaultClass{
		FaultUnauthorized, FaultNotFound, FaultBusy, FaultNoCapacity, FaultRejected,
		FaultUnsupported, FaultConflict, FaultSuspended, FaultUnreachable, FaultUnknown,
	}
}

// Fault is how a call to a fabric manager failed.
type Fault struct {
	Class FaultClass
	// Op is what was tried, on what: "attach one NVIDIA-A100 to machine 1111…".
	Op string
	// Status is the HTTP status, 0 where there was no answer.
	Status int
	// Code is the manager's own error code.
	Code string
	// Message is the manager's own words, cut to a length fit for a condition.
	Message string
	// Err is the cause below, if any.
	Err error
}

// Error prints what was tried, what came back.
func (f *Fault) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", f.Op, strings.ToLower(string(f.Class)))
	if f.Status != 0 {
		b.WriteString(", HTTP " + strconv.Itoa(f.Status))
	}
	if f.Code != "" {
		b.WriteString(", code " + f.Code)
	}
	if f.Message != "" {
		b.WriteString(": " + f.Message)
	}
	if f.Err != nil {
		b.WriteString(": " + f.Err.Error())
	}
	return b.String()
}

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }

// Definite tells that nothing happened on the fabric.
func (f *Fault) Definite() bool { return f.Class != FaultUnknown }

// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"

	"github.com/cohdi/cohdi-agent/internal/device"
)

// Signs are all that tells how a GPU of this node is.
type Signs struct {
	// Failure is the lease's, empty while the unit has not failed.
	Failure device.Failure
	// Releasing: it goes back to the pool. Shown: NVML shows the GPU. Draining: it does, on its way out.
	// NVMLState is empty when NVML answers, else why it does not.
	Releasing, Shown, Draining bool
	NVMLState                  string
	// XID is the last critical error that the driver reported of the GPU, 0 if none.
	XID uint64
	// Fabric is the manager's word, empty where it has none; FabricText is what it said.
	Fabric     device.Health
	FabricText string
}

// Healthy tells how the GPU is, and why, for people.
func Healthy(s Signs) (device.Health, string) {
	switch {
	case s.Failure.Reason != "":
		return device.HealthCritical, s.Failure.Reason + ": " + s.Failure.Message
	case s.XID != 0:
		return device.HealthCritical, fmt.Sprintf("the driver reported XID %d", s.XID)
	case s.Fabric == device.HealthCritical:
		return device.HealthCritical, "the fabric manager says " + s.FabricText
	case s.NVMLState != "":
		return device.HealthUnknown, "NVML does not answer: " + s.NVMLState
	case s.Draining, s.Releasing:
		return device.HealthUnknown, "it is being released"
	case !s.Shown:
		return device.HealthCritical, "the driver does not show it any more"
	case s.Fabric == device.HealthWarning:
		return device.HealthWarning, "the fabric manager says " + s.FabricText
	}
	return device.HealthOK, ""
}

// CriticalXID tells an error of the GPU from one of the program that used it, as NVIDIA's device plugin does:
// after these the GPU works on.
func CriticalXID(code uint64) bool {
	switch code {
	case 13, // graphics engine exception
		31,  // memory page fault
		43,  // GPU stopped processing
		45,  // preemptive cleanup, due to previous errors
		68,  // video processor exception
		109: // context switch timeout
		return false
	}
	return true
}

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
	// Releasing: it goes back to the pool. Shown: NVML shows the GPU. Seen: it has done so to this process, now or
	// before. Draining: it does, on its way out. NVMLState is empty when NVML answers, else why it does not.
	Releasing, Shown, Seen, Draining bool
	NVMLState                        string
	// XID is the last critical error that the driver reported of the GPU, 0 if none.
	XID uint64
	// Fabric is the manager's word, empty where it has none; FabricText is what it said.
	Fabric     device.Health
	FabricText string
}

// healthRule is one row: the first that applies decides. Why is the reason for the row, in docs/policy.md.
type healthRule struct {
	name   string
	when   func(*Signs) bool
	health device.Health
	// says is for the person who asks how the GPU is.
	says func(*Signs) string
	why  string
}

// healthRules are in the order of how much each sign can be trusted to be of this GPU and of now.
func healthRules() []healthRule {
	by := func(text string) func(*Signs) string { return func(*Signs) string { return text } }
	manager := func(s *Signs) string { return "the fabric manager says " + s.FabricText }
	return []healthRule{
		{"its unit failed", func(s *Signs) bool { return s.Failure.Reason != "" }, device.HealthCritical, func(s *Signs) string {
			return s.Failure.Reason + ": " + s.Failure.Message
		}, "The holder took it out of use and has stored why."},
		{"critical error", func(s *Signs) bool { return s.XID != 0 }, device.HealthCritical, func(s *Signs) string {
			return fmt.Sprintf("the driver reported XID %d", s.XID)
		}, "Such an error is of the device and not of the program that used it; a driver that hangs mostly does so because of it."},
		{"the manager calls it critical", func(s *Signs) bool { return s.Fabric == device.HealthCritical }, device.HealthCritical, manager, "The manager sees what the driver cannot, such as the link."},
		{"NVML does not answer", func(s *Signs) bool { return s.NVMLState != "" }, device.HealthUnknown, func(s *Signs) string {
			return "NVML does not answer: " + s.NVMLState
		}, "Who does not answer says nothing against one GPU."},
		{"on its way out", func(s *Signs) bool { return s.Draining || s.Releasing }, device.HealthUnknown, by("it is being released"), "That the driver ceases to show it is what is wanted."},
		{"not shown any more", func(s *Signs) bool { return !s.Shown && s.Seen }, device.HealthCritical, by("the driver does not show it any more"), "Nobody took it away, and no Pod can use it."},
		{"not shown yet", func(s *Signs) bool { return !s.Shown }, device.HealthUnknown, by("the driver has not shown it to this agent yet"), "An agent that came after the GPU, as in a rolling update, may look at a list of before it; one that is gone is found by the holder."},
		{"the manager warns", func(s *Signs) bool { return s.Fabric == device.HealthWarning }, device.HealthWarning, manager, "It works; a person should know."},
		{"well", func(*Signs) bool { return true }, device.HealthOK, by(""), "Nothing speaks against it."},
	}
}

// Healthy tells how the GPU is, and why, for people.
func Healthy(s Signs) (device.Health, string) {
	for _, r := range healthRules() {
		if r.when(&s) {
			return r.health, r.says(&s)
		}
	}
	return device.HealthUnknown, "no rule applies"
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

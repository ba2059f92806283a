// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
)

// goal is what Poll has to know beside the intent. It travels in the operation's handle.
type goal struct {
	// spec is the manager's name of the specification.
	spec string
	// total is how many the machine is to have when an attach is done.
	total int
	// blank is how many failed rows without any name the specification had before.
	blank int
	// since is when it was asked for, in seconds of 1970; 0 is not known.
	since int64
	// uuid is the res_uuid of the device that a detach takes away, "" where the manager does not say.
	uuid string
}

func (g goal) handle() string {
	v := url.Values{"spec": {g.spec}, "total": {strconv.Itoa(g.total)}}
	if g.blank > 0 {
		v.Set("blank", strconv.Itoa(g.blank))
	}
	if g.since > 0 {
		v.Set("since", strconv.FormatInt(g.since, 10))
	}
	if g.uuid != "" {
		v.Set("uuid", g.uuid)
	}
	return v.Encode()
}

func parseGoal(handle string) (goal, error) {
	v, err := url.ParseQuery(handle)
	if err != nil {
		return goal{}, fmt.Errorf("read operation: %w", err)
	}
	g := goal{spec: v.Get("spec"), uuid: v.Get("uuid")}
	g.total, err = strconv.Atoi(v.Get("total"))
	if err == nil && v.Has("blank") {
		g.blank, err = strconv.Atoi(v.Get("blank"))
	}
	if err == nil && v.Has("since") {
		g.since, err = strconv.ParseInt(v.Get("since"), 10, 64)
	}
	if err != nil || g.spec == "" || g.total < 0 || g.blank < 0 || g.since < 0 {
		return goal{}, fmt.Errorf("read operation: %q names no specification and total", handle)
	}
	return g, nil
}

// tally is how a specification's devices stand against those that the machine had before.
type tally struct {
	// fresh are complete and were not there before; failed were not there before and did not come up.
	fresh, failed []named
	// present are on the machine: complete, or refusing to leave.
	present int
	// rows are all that are listed, blank those among them that failed and have no name.
	rows, blank int
	// adding and removing are under way.
	adding, removing bool
	// blankReason is what was said of the last of the blank ones.
	blankReason string
}

func (s *spec) tally(all []named, before []string) tally {
	var t tally
	for _, d := range all {
		if d.spec != s {
			continue
		}
		t.rows++
		known := slices.Contains(before, d.name) || slices.Contains(before, string(d.ID)) && d.ID != ""
		isNew := d.name != "" && !known
		switch {
		case d.Status == addComplete || d.Status == removeFailed:
			t.present++
			if isNew && d.Status == addComplete {
				t.fresh = append(t.fresh, d)
			}
		case d.Status == addFailed && d.name == "":
			t.blank++
			t.blankReason = d.said()
		case d.Status == addFailed && isNew:
			t.failed = append(t.failed, d)
		case d.Status == addFailed:
		case d.removing() || known && !d.adding():
			t.removing = true
		default:
			t.adding = true
		}
	}
	return t
}

// more is how many the machine is to have in all for one more to come. The manager's own count says it, unless
// it counts less than what is there. joined: it is under way already, so that asking again could bring two.
func (t *tally) more(count int) (total int, joined bool) {
	if t.adding || count > t.rows {
		return t.present + 1, true
	}
	return max(count, t.present) + 1, false
}

// fewer is how many the machine is to have in all when d is gone. A device that failed to come up counts only
// with some managers: then the count is more than what is there.
func (t *tally) fewer(count int, d *row) int {
	if d.Status == addFailed && count <= t.present {
		return count
	}
	return max(count, t.present, 1) - 1
}

// overdue ends an operation of which nothing shows and whose time is over: the manager may have forgotten it, as one that
// was started anew may, or shows such work to nobody.
func (g goal) overdue(op fabric.Operation, shows bool, now time.Time, most time.Duration) fabric.Operation {
	if op.State != fabric.Pending || shows || g.since == 0 || now.Sub(time.Unix(g.since, 0)) < most {
		return op
	}
	op.State = fabric.Failed
	op.Fault = &device.Fault{Class: device.FaultUnknown, Message: fmt.Sprintf("nothing of it shows, and the %s that it may take are over", most)}
	return op
}

// attached says how far an attach is.
func (t *tally) attached(op fabric.Operation, g goal) fabric.Operation {
	op.State = fabric.Pending
	switch {
	case len(t.fresh) > 0:
		op.State = fabric.Done
		for i := range t.fresh {
			op.Devices = append(op.Devices, t.fresh[i].onFabric(op.Intent.Machine))
		}
	case len(t.failed) > 0:
		// It is on the machine, for the caller to take on and to give back.
		op.State = fabric.Failed
		for i := range t.failed {
			op.Devices = append(op.Devices, t.failed[i].onFabric(op.Intent.Machine))
		}
		op.Fault = &device.Fault{Class: device.FaultUnknown, Code: string(addFailed), Message: t.failed[0].said()}
	case t.blank > g.blank:
		op.State = fabric.Failed
		op.Fault = &device.Fault{Class: device.FaultUnknown, Code: string(addFailed), Message: t.blankReason}
	case t.present >= g.total:
		op.State = fabric.Done // the list will say which, if the manager can name it
	}
	return op
}

// detached says how far a detach is.
func detached(op fabric.Operation, g goal, all []named) fabric.Operation {
	op.State = fabric.Done
	for _, d := range all {
		if !d.is(op.Intent.Device) && (g.uuid == "" || string(d.Detail.UUID) != g.uuid) {
			continue
		}
		if d.Status == removeFailed {
			// It is where it was, and the same call later may do.
			op.State = fabric.Failed
			op.Fault = &device.Fault{Class: device.FaultBusy, Code: string(removeFailed), Message: d.said()}
			return op
		}
		op.State = fabric.Pending
	}
	return op
}

// is tells whether the device goes by that name, or by its other one.
func (d *named) is(name string) bool {
	return name != "" && (d.name == name || string(d.ID) == name || string(d.Detail.UUID) == name)
}

// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/cohdi/cohdi-agent/internal/attach"
	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/lease"
	"github.com/cohdi/cohdi-agent/internal/node"
)

// longestAnswer bounds what is read of an agent's answer: a node holds some tens of units.
const longestAnswer = 16 << 20

// Ask asks the agent at url, its /status, for the units and GPUs of its node.
func Ask(ctx context.Context, client *http.Client, url string) (node.Status, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return node.Status{}, fmt.Errorf("ask the agent for its units: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return node.Status{}, fmt.Errorf("ask the agent for its units (run this in its Pod: kubectl exec -n %s <pod> -- cohdi-agent status): %w", device.AgentNamespace, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return node.Status{}, fmt.Errorf("ask the agent at %s for its units: it answered %s", url, resp.Status)
	}
	var s node.Status
	if err := json.NewDecoder(io.LimitReader(resp.Body, longestAnswer)).Decode(&s); err != nil {
		return node.Status{}, fmt.Errorf("read the answer of the agent at %s: %w", url, err)
	}
	return s, nil
}

// WriteNode prints a table of one node's units, and one of its other GPUs.
func WriteNode(w io.Writer, s node.Status, now time.Time) error {
	if s.Node != "" {
		if _, err := fmt.Fprintf(w, "Node %s\n\n", s.Node); err != nil {
			return err
		}
	}
	if err := writeUnits(w, s.Units, now); err != nil {
		return err
	}
	t := newTable(w, "GPU", "PCI ADDRESS", "UUID", "IS", "BECAUSE")
	rows, onBus := 0, map[device.GPUUUID]bool{}
	for _, g := range s.GPUs {
		onBus[g.UUID] = g.UUID != ""
		if g.Owner == attach.Leased {
			continue
		}
		rows++
		t.row(g.Name, g.Address.String(), string(g.UUID), string(g.Owner), g.Why)
	}
	for _, d := range s.Foreign {
		if onBus[d.UUID] {
			continue
		}
		rows++
		t.row(d.Model, "", string(d.UUID), string(attach.Foreign), fmt.Sprintf("the fabric manager lists it as %s, and the bus does not show it", d.ID))
	}
	if rows > 0 {
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
		if err := t.end(); err != nil {
			return err
		}
	}
	if s.Trouble == "" {
		return nil
	}
	_, err := fmt.Fprintf(w, "\nThe fabric manager's list could not be read: %s\n", s.Trouble)
	return err
}

func writeUnits(w io.Writer, units []node.UnitStatus, now time.Time) error {
	if len(units) == 0 {
		_, err := fmt.Fprintln(w, "The node holds no unit of a fabric.")
		return err
	}
	t := newTable(w, "UNIT", "PHASE", "SINCE", "CLAIM", "PCI ADDRESS", "UUID", "NOW")
	for _, u := range units {
		l := u.Lease
		t.row(string(l.Unit), phase(l), since(began(l), now), user(l), address(l), string(l.UUID), doing(u, now))
	}
	return t.end()
}

// words say what an action does, after "the agent"; there are none for waiting.
func words(k attach.Kind) string {
	switch k {
	case attach.ListFabric:
		return "asks the fabric manager what is attached"
	case attach.SendAttach:
		return "asks the fabric manager to attach it"
	case attach.SendDetach:
		return "asks the fabric manager to detach it"
	case attach.Poll:
		return "asks the fabric manager what became of it"
	case attach.Store, attach.StoreIntent:
		return "writes its lease"
	case attach.Delete:
		return "deletes its lease"
	case attach.Rescan:
		return "has the kernel look for it on the PCI bus"
	case attach.RescanAll:
		return "has the kernel look for it on the whole PCI bus"
	case attach.Bind:
		return "has the driver bound to it"
	case attach.Discover:
		return "has the driver look for it"
	case attach.FindHolders:
		return "looks for processes that have it open"
	case attach.Drain:
		return "has the driver let go of it"
	case attach.Undrain:
		return "has the driver take it back"
	case attach.Remove:
		return "takes it off the PCI bus"
	case attach.Tell:
		return "tells its claim that it can be used"
	case attach.Wait:
	}
	return ""
}

// doing is what the agent does with the unit now, or what it waits for, and why.
func doing(u node.UnitStatus, now time.Time) string {
	if what := words(u.Doing); what != "" {
		return what + ": " + u.Why
	}
	if d := u.Wake.Sub(now); !u.Wake.IsZero() && d >= time.Second {
		return fmt.Sprintf("%s (looks again in %s)", u.Why, age(d))
	}
	return u.Why
}

// Fleet is what the cluster says of all fabrics.
type Fleet struct {
	// Leaders holds each fabric's leader, empty where there is none now.
	Leaders map[device.FabricID]string
	Leases  []device.Lease
	// Unreadable are leases that nothing but their names can be shown of.
	Unreadable []*lease.DecodeError
}

// Gather reads the fleet from the API server.
func Gather(ctx context.Context, client kubernetes.Interface, clk clock.PassiveClock) (Fleet, error) {
	list, err := client.CoordinationV1().Leases(device.LeaseNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return Fleet{}, fmt.Errorf("list the leases in namespace %s: %w", device.LeaseNamespace, err)
	}
	fleet := Fleet{Leaders: map[device.FabricID]string{}}
	for _, l := range list.Items {
		if id, election := l.Labels[device.LabelElection]; election {
			fleet.Leaders[device.FabricID(id)] = ptr.Deref(l.Spec.HolderIdentity, "")
		} else if id := device.FabricID(l.Labels[device.LabelFabric]); id != "" && fleet.Leaders[id] == "" {
			fleet.Leaders[id] = ""
		}
	}
	for _, id := range fleet.fabrics() {
		if err := fleet.add(ctx, client, clk, id); err != nil {
			return Fleet{}, err
		}
	}
	return fleet, nil
}

// fabrics returns the ids in order.
func (f Fleet) fabrics() []device.FabricID {
	ids := make([]device.FabricID, 0, len(f.Leaders))
	for id := range f.Leaders {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// add reads the leases of one fabric.
func (f *Fleet) add(ctx context.Context, client kubernetes.Interface, clk clock.PassiveClock, id device.FabricID) error {
	ctx, cancel := context.WithCancel(ctx)
	store, err := lease.NewFabricStore(id, lease.Options{Client: client, Clock: clk, Changed: func(string) {}})
	if err != nil {
		cancel()
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		store.Run(ctx)
	}()
	defer func() { cancel(); <-ended }()
	if !cache.WaitForCacheSync(ctx.Done(), store.HasSynced) {
		return fmt.Errorf("list the device leases of fabric %s: %w", id, context.Cause(ctx))
	}
	f.Leases = append(f.Leases, store.List()...)
	f.Unreadable = append(f.Unreadable, store.Unreadable()...)
	return nil
}

// WriteFleet prints the leaders and a table of all units that are out of the pool.
func WriteFleet(w io.Writer, f Fleet, now time.Time) error {
	for _, id := range f.fabrics() {
		leader := f.Leaders[id]
		if leader == "" {
			leader = "nobody"
		}
		if _, err := fmt.Fprintf(w, "Fabric %s is led by %s.\n", id, leader); err != nil {
			return err
		}
	}
	if len(f.Leases)+len(f.Unreadable) == 0 {
		_, err := fmt.Fprintln(w, "No unit is out of the pool.")
		return err
	}
	leases := slices.SortedFunc(slices.Values(f.Leases), func(a, b device.Lease) int {
		if c := strings.Compare(a.Node, b.Node); c != 0 {
			return c
		}
		return strings.Compare(string(a.Unit), string(b.Unit))
	})
	t := newTable(w, "NODE", "FABRIC", "UNIT", "PHASE", "SINCE", "CLAIM", "PCI ADDRESS", "UUID", "NOTE")
	for _, l := range leases {
		t.row(l.Node, string(l.Fabric), string(l.Unit), phase(l), since(began(l), now), user(l), address(l), string(l.UUID), note(l))
	}
	for _, bad := range f.Unreadable {
		t.row(bad.Node, string(bad.Fabric), string(bad.Unit), "?", "", "", "", "", bad.Error())
	}
	return t.end()
}

// phase also tells an idle unit from one in use.
func phase(l device.Lease) string {
	p := string(l.Phase)
	if l.Idle() {
		p += ", idle"
	}
	if l.Deleting {
		p += ", to be released"
	}
	return p
}

// began is since when the unit is what phase says.
func began(l device.Lease) time.Time {
	if l.Idle() {
		return l.IdleSince
	}
	return l.ChangedAt
}

// user is the claim that a unit was given to.
func user(l device.Lease) string {
	switch {
	case !l.Attempt.IsZero():
		return l.Attempt.Claim()
	case len(l.PreparedFor) > 0:
		return "uid " + strings.Join(l.PreparedFor, ", ")
	}
	return ""
}

// note is what the lease itself says about why it is as it is.
func note(l device.Lease) string {
	switch {
	case l.Failure.Message != "":
		return l.Failure.Reason + ": " + l.Failure.Message
	case l.HeldBy != "":
		return "held open by " + l.HeldBy
	}
	return ""
}

func address(l device.Lease) string {
	if l.PCI.IsZero() {
		return ""
	}
	return l.PCI.String()
}

func since(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return age(now.Sub(t))
}

// age prints a duration as kubectl does: the largest unit, or two if the first is small.
func age(d time.Duration) string {
	d = max(d, 0)
	const day = 24 * time.Hour
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 10*time.Minute:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 3*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 2*day:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/day)
}

// table aligns columns.
type table struct {
	w *tabwriter.Writer
}

func newTable(w io.Writer, head ...string) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.row(head...)
	return t
}

// row adds a line. What others wrote, a fabric manager for one, may hold tabs and line breaks.
func (t table) row(cells ...string) {
	for i, c := range cells {
		if cells[i] = strings.Join(strings.Fields(c), " "); cells[i] == "" {
			cells[i] = "-"
		}
	}
	_, _ = fmt.Fprintln(t.w, strings.Join(cells, "\t")) // Flush reports the error
}

func (t table) end() error { return t.w.Flush() }

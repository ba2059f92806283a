// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/cohdi/cohdi-agent/internal/device"
	"github.com/cohdi/cohdi-agent/internal/fabric"
	"github.com/cohdi/cohdi-agent/internal/fabric/rest"
)

// Names of actions.
const (
	actionAddBlock       = "#ComputerSystem.AddResourceBlock"
	actionRemoveBlock    = "#ComputerSystem.RemoveResourceBlock"
	actionAddEndpoint    = "#Zone.AddEndpoint"
	actionRemoveEndpoint = "#Zone.RemoveEndpoint"
	actionCompose        = "#CompositionService.Compose"
)

// root is where the service begins, as it tells everybody.
type root struct {
	systems, composition, fabrics, tasks, events string
	sessions, sessionService                     string
	// expand is the query that has a list show its members in full, "" where the service cannot.
	expand string
}

func decodeRoot(body []byte) (root, error) {
	var r struct {
		Systems, CompositionService, Fabrics, Tasks, EventService, SessionService link
		Links                                                                     struct{ Sessions link }
		ProtocolFeaturesSupported                                                 struct {
			ExpandQuery struct {
				NoLinks, Levels bool
				MaxLevels       *number
			}
		}
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return root{}, fmt.Errorf("decode service root: %w", err)
	}
	if r.Systems.to == "" {
		return root{}, errors.New("decode service root: no link to Systems in it")
	}
	out := root{
		systems: r.Systems.to, composition: r.CompositionService.to, fabrics: r.Fabrics.to, tasks: r.Tasks.to,
		events: r.EventService.to, sessions: r.Links.Sessions.to, sessionService: r.SessionService.to,
	}
	if e := r.ProtocolFeaturesSupported.ExpandQuery; e.NoLinks {
		out.expand = "$expand=."
		if e.Levels && (e.MaxLevels == nil || *e.MaxLevels > 1) {
			out.expand = "$expand=.($levels=2)"
		}
	}
	return out, nil
}

// service is the composition service.
type service struct {
	blocks, zones string
	// compose is the target of the action that takes manifests, "" where there is none.
	compose string
}

func decodeService(body []byte) (service, error) {
	var s struct {
		ServiceEnabled *bool
		ResourceBlocks link
		ResourceZones  link
		Actions        actions
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return service{}, fmt.Errorf("decode composition service: %w", err)
	}
	if s.ServiceEnabled != nil && !*s.ServiceEnabled {
		return service{}, errors.New("the composition service is switched off")
	}
	if s.ResourceBlocks.to == "" {
		return service{}, errors.New("decode composition service: no link to ResourceBlocks in it")
	}
	return service{blocks: s.ResourceBlocks.to, zones: s.ResourceZones.to, compose: s.Actions[actionCompose]}, nil
}

// number may come as text.
type number int

// UnmarshalJSON takes a number, in quotes or not.
func (n *number) UnmarshalJSON(b []byte) error {
	v, err := strconv.Atoi(strings.Trim(string(b), `"`))
	if err != nil {
		return fmt.Errorf("decode number: %w", err)
	}
	*n = number(v)
	return nil
}

// actions are the targets by name. Only paths count.
type actions map[string]string

// UnmarshalJSON never fails: an action that cannot be read is not offered.
func (a *actions) UnmarshalJSON(b []byte) error {
	*a = make(actions)
	var all map[string]json.RawMessage
	if json.Unmarshal(b, &all) == nil {
		a.add(all)
	}
	return nil
}

func (a *actions) add(all map[string]json.RawMessage) {
	for name, raw := range all {
		var one struct {
			Target string `json:"target"`
		}
		if json.Unmarshal(raw, &one) != nil {
			continue
		}
		if target := pathOrNone(one.Target); target != "" {
			(*a)[name] = target
		}
	}
}

// page is one of a collection.
type page struct {
	members []link
	// count is that of the whole collection, -1 where it is not said.
	count int
	next  string
}

func decodePage(body []byte) (page, error) {
	var p struct {
		Members *[]link
		Count   *number `json:"Members@odata.count"`
		Next    string  `json:"Members@odata.nextLink"`
		Older   string  `json:"@odata.nextLink"`
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return page{}, fmt.Errorf("decode collection: %w", err)
	}
	if p.Members == nil {
		return page{}, errors.New("decode collection: no Members in it")
	}
	out := page{count: -1}
	for _, m := range *p.Members {
		if m.to != "" {
			out.members = append(out.members, m)
		}
	}
	if p.Count != nil {
		out.count = int(*p.Count)
	}
	for _, next := range []string{p.Next, p.Older} {
		if next == "" || out.next != "" {
			continue
		}
		var err error
		if out.next, err = parseLocation(next); err != nil {
			return page{}, fmt.Errorf("decode collection: next page: %w", err)
		}
	}
	return out, nil
}

// system is a computer system.
type system struct {
	id, name string
	// machine is "" where the system has no UUID.
	machine device.Machine
	power   fabric.Power
	// composable: it has a list of resource blocks.
	composable bool
	blocks     []string
	actions    actions
}

func decodeSystem(body []byte) (system, error) {
	var s struct {
		ID                     rest.Text `json:"Id"`
		Name, UUID, PowerState rest.Text
		Links                  struct{ ResourceBlocks *[]link }
		Actions                actions
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return system{}, fmt.Errorf("decode system: %w", err)
	}
	out := system{id: rest.Tidy(string(s.ID)), name: rest.Tidy(string(s.Name)), power: powerOf(string(s.PowerState)), actions: s.Actions}
	if out.id == "" {
		return system{}, errors.New("decode system: no Id in it")
	}
	if m, err := device.ParseMachine(string(s.UUID)); err == nil {
		out.machine = m
	}
	if s.Links.ResourceBlocks != nil {
		out.composable, out.blocks = true, paths(*s.Links.ResourceBlocks)
	}
	return out, nil
}

func powerOf(s string) fabric.Power {
	switch {
	case strings.EqualFold(s, "On"):
		return fabric.PowerOn
	case strings.EqualFold(s, "Off"):
		return fabric.PowerOff
	}
	return fabric.PowerUnknown
}

// block is a resource block.
type block struct {
	types       []string
	pool, state string
	reserved    bool
	// compositions is how many systems have it.
	compositions int
	systems      []string
	zones        []string
	processors   []link
	status       status
}

func decodeBlock(body []byte) (block, error) {
	var b struct {
		Types  []rest.Text `json:"ResourceBlockType"`
		Pool   rest.Text
		Status *status
		Comp   *struct {
			State        rest.Text `json:"CompositionState"`
			Reserved     *bool
			Compositions *number `json:"NumberOfCompositions"`
		} `json:"CompositionStatus"`
		Processors []link
		Links      struct{ ComputerSystems, Zones []link }
	}
	if err := json.Unmarshal(body, &b); err != nil {
		return block{}, fmt.Errorf("decode resource block: %w", err)
	}
	if b.Comp == nil && len(b.Types) == 0 {
		return block{}, errors.New("decode resource block: neither ResourceBlockType nor CompositionStatus in it")
	}
	out := block{pool: string(b.Pool), systems: paths(b.Links.ComputerSystems), zones: paths(b.Links.Zones)}
	for _, t := range b.Types {
		out.types = append(out.types, string(t))
	}
	if b.Comp != nil {
		out.state = string(b.Comp.State)
		out.reserved = b.Comp.Reserved != nil && *b.Comp.Reserved
		if b.Comp.Compositions != nil {
			out.compositions = int(*b.Comp.Compositions)
		}
	}
	if b.Status != nil {
		out.status = *b.Status
	}
	for _, p := range b.Processors {
		if p.to != "" {
			out.processors = append(out.processors, p)
		}
	}
	return out, nil
}

// is tells whether the block is of one of the types.
func (b *block) is(types ...string) bool {
	return slices.ContainsFunc(b.types, func(t string) bool {
		return slices.ContainsFunc(types, func(u string) bool { return strings.EqualFold(t, u) })
	})
}

// status is of any resource; it may be null, and so may each part.
type status struct {
	State, Health rest.Text
}

// processor is a component of a block.
type processor struct {
	kind, model string
	uuid        device.GPUUUID
	serial      string
	status      status
}

func decodeProcessor(body []byte) (processor, error) {
	var p struct {
		ID                                     rest.Text `json:"Id"`
		ProcessorType, Model, UUID, PartNumber rest.Text
		SerialNumber                           rest.Text
		Status                                 *status
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return processor{}, fmt.Errorf("decode processor: %w", err)
	}
	if p.ID == "" {
		return processor{}, errors.New("decode processor: no Id in it")
	}
	out := processor{kind: string(p.ProcessorType), model: string(p.Model)}
	out.uuid, out.serial = identity(string(p.UUID), string(p.SerialNumber))
	if p.Status != nil {
		out.status = *p.Status
	}
	return out, nil
}

// nobody is the UUID of zeros, which some services give to all.
const nobody device.GPUUUID = "GPU-00000000-0000-0000-0000-000000000000"

// identity is the UUID by which the driver knows the GPU, where the schema has it or where some put it with its prefix, else
// the board's serial number.
func identity(uuid, serial string) (device.GPUUUID, string) {
	if id, err := device.ParseGPUUUID(uuid); err == nil && id != "" && id != nobody {
		return id, serialOf(serial)
	}
	if strings.HasPrefix(strings.ToLower(serial), "gpu-") {
		if id, err := device.ParseGPUUUID(serial); err == nil && id != nobody {
			return id, ""
		}
	}
	return "", serialOf(serial)
}

// serialOf is the board's serial number, if what stands there is one.
func serialOf(text string) string {
	_, serial := device.ParseIdentity(text)
	return serial
}

// attachable: it is what is pooled, and not what a host computes with.
func (p processor) attachable() bool {
	return !slices.ContainsFunc([]string{"CPU", "Core", "Thread", "OEM"}, func(k string) bool { return strings.EqualFold(p.kind, k) })
}

// health joins what is said of a device's parts: the worst counts, and only what is said to be critical is.
func health(parts ...status) (device.Health, string) {
	worst, text := device.HealthUnknown, "the service gives no status"
	rank := map[device.Health]int{device.HealthOK: 1, device.HealthWarning: 2, device.HealthCritical: 3}
	for _, s := range parts {
		h, said := s.health()
		if rank[h] > rank[worst] || h == worst && h == device.HealthUnknown && said != "" {
			worst, text = h, said
		}
	}
	return worst, text
}

func (s status) health() (device.Health, string) {
	state, word := string(s.State), string(s.Health)
	if state == "" && word == "" {
		return device.HealthUnknown, ""
	}
	said := fmt.Sprintf("the service's status is %s, %s", orNothing(state), orNothing(word))
	switch {
	case strings.EqualFold(word, "Critical"):
		return device.HealthCritical, said
	case strings.EqualFold(word, "Warning"), strings.EqualFold(word, "OK") && !s.ready():
		return device.HealthWarning, said
	case strings.EqualFold(word, "OK"):
		return device.HealthOK, ""
	}
	return device.HealthUnknown, said
}

// ready: a device in this state can be had. One that stands by is switched on when it is composed.
func (s status) ready() bool {
	return slices.ContainsFunc([]string{"", "Enabled", "StandbyOffline", "StandbySpare", "Qualified"}, func(w string) bool {
		return strings.EqualFold(string(s.State), w)
	})
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return rest.Tidy(s)
}

// etagOf is the resource's ETag: its own word, else the header's, without what a compressing server adds to it.
func etagOf(body []byte, header http.Header) string {
	var r struct {
		ETag string `json:"@odata.etag"`
	}
	if json.Unmarshal(body, &r) != nil || r.ETag == "" {
		r.ETag = header.Get("ETag")
		if cut, ok := strings.CutSuffix(r.ETag, `-gzip"`); ok {
			r.ETag = cut + `"`
		}
	}
	if len(r.ETag) > longestPath || strings.ContainsFunc(r.ETag, func(c rune) bool { return c < ' ' || c >= 0x7f }) {
		return ""
	}
	return r.ETag
}

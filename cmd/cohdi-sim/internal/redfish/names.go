// SPDX-License-Identifier: Apache-2.0

package redfish

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

const (
	root = "/redfish/v1"

	hostBlock = "Host-" // before a machine's name
	hostPort  = "port-"
)

// names are the paths of one service.
type names struct {
	// salt makes them up; "" leaves them as everybody expects them.
	salt string
}

func (n names) segment(s string) string {
	if n.salt == "" {
		return s
	}
	sum := sha256.Sum256([]byte(n.salt + "\x00" + s))
	return "x" + hex.EncodeToString(sum[:4])
}

// path joins segments; all but those after a "=" are made up.
func (n names) path(parts ...string) string {
	var b strings.Builder
	b.WriteString(root)
	for _, p := range parts {
		b.WriteByte('/')
		if id, ok := strings.CutPrefix(p, "="); ok {
			b.WriteString(id)
		} else {
			b.WriteString(n.segment(p))
		}
	}
	return b.String()
}

func (n names) systems() string        { return n.path("Systems") }
func (n names) system(m string) string { return n.path("Systems", "="+m) }
func (n names) composition() string    { return n.path("CompositionService") }
func (n names) blocks() string         { return n.path("CompositionService", "ResourceBlocks") }

func (n names) block(id string) string      { return n.path("CompositionService", "ResourceBlocks", "="+id) }
func (n names) resourceZones() string       { return n.path("CompositionService", "ResourceZones") }
func (n names) capabilities() string        { return n.path("Capabilities") }
func (n names) compose() string             { return n.path("CompositionService", "Actions", "Compose") }
func (n names) sessionService() string      { return n.path("SessionService") }
func (n names) sessions() string            { return n.path("SessionService", "Sessions") }
func (n names) session(id string) string    { return n.path("SessionService", "Sessions", "="+id) }
func (n names) taskService() string         { return n.path("TaskService") }
func (n names) tasks() string               { return n.path("TaskService", "Tasks") }
func (n names) task(id string) string       { return n.path("TaskService", "Tasks", "="+id) }
func (n names) monitor(id string) string    { return n.path("TaskService", "TaskMonitors", "="+id) }
func (n names) eventService() string        { return n.path("EventService") }
func (n names) stream() string              { return n.path("EventService", "SSE") }
func (n names) fabrics() string             { return n.path("Fabrics") }
func (n names) fabric(id int) string        { return n.path("Fabrics", "="+strconv.Itoa(id)) }
func (n names) ports(fabric int) string     { return n.fabric(fabric) + "/" + n.segment("Zones") }
func (n names) endpoints(fabric int) string { return n.fabric(fabric) + "/" + n.segment("Endpoints") }

func (n names) resourceZone(id int) string {
	return n.path("CompositionService", "ResourceZones", "="+strconv.Itoa(id))
}

func (n names) port(fabric int, machine string) string { return n.ports(fabric) + "/" + machine }

func (n names) endpoint(fabric int, id string) string { return n.endpoints(fabric) + "/" + id }

// processor of a device, below its block or, where there are none, below the box that it is in.
func (n names) processor(block string) string {
	return n.path("CompositionService", "ResourceBlocks", "="+block, "Processors", "=0")
}

func (n names) boxed(id string) string { return n.path("Chassis", "=Box1", "Processors", "="+id) }

func (n names) action(of, name string) string {
	return of + "/" + n.segment("Actions") + "/" + n.segment(name)
}

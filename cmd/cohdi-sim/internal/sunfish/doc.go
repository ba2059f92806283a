// SPDX-License-Identifier: Apache-2.0

// Package sunfish is the face of a Sunfish service: a tree of Redfish resources that takes nearly everything, and the agent
// below it that works the fabric. Endpoints are joined by Connections; a composition system takes a count of a model, as the
// peer's client writes it. GPUs in the pool and on the machines are an extension: the real service has none.
//
// The truth about devices is the core. What the agent has connected, and the copies of that which the service shows, are
// kept in a file of their own, and may differ: a copy is made or dropped only when the agent has answered. What comes and
// goes without the agent, by another face or by hand, it notices at the next look, and the copies follow.
//
// The handlers may be used concurrently. Errors are plain text, as the real one's; an agent that fails is a 500 without a
// word. Fault rules for the face "agent" hit what the service asks of the agent.
package sunfish

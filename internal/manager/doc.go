// SPDX-License-Identifier: Apache-2.0

// Package manager joins the client of a fabric's manager to the loops that need one: it says the loops' words to the
// client, turns what the manager can do into the policy's settings, and remembers how the last call went. There is one
// for all kinds of manager; that they differ is in fabric.Capabilities alone.
//
// What it remembers is for people and for the question whether the manager can be worked with; no decision about a
// device goes by it. Everything may be called from anywhere.
package manager

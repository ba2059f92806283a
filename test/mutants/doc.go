// SPDX-License-Identifier: Apache-2.0

// Command mutants shows that the simulation (internal/sim) finds what it is for: it builds broken variants of
// the agent and runs the simulation on each. `make sim-mutants` runs it.
//
// The truth about a variant is its patch under internal/sim/mutants; the first line says what is broken. The
// tree is not touched: the patched files are laid over it (go test -overlay).
//
// One variant is built and played after the other. Whatever ends the program, nothing but temporary files is
// left.
//
// A patch that does not apply any more is an error, and so is a variant that nothing catches, or a seed that
// fails without any patch.
package main

// SPDX-License-Identifier: Apache-2.0

//go:build race

package sim

// fewSeeds are played with the unit tests; the race detector makes each several times as long.
const fewSeeds = 20

// SPDX-License-Identifier: Apache-2.0

// Package facetest is what the tests of the faces have in common: a chassis with faults and tokens in front of it, served
// over TLS, and most of what fabrictest.Control wants to know of it. It is for tests only.
//
// Its connections are those of this host, or, for tests in a bubble of virtual time, in memory: a goroutine that waits for a
// socket would keep the time from passing.
//
// Failures are reported to the test; nothing is returned. Everything ends with the test.
package facetest

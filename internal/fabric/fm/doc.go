// SPDX-License-Identifier: Apache-2.0

// Package fm talks to an FTI Fabric Manager (FM) over its REST interface. An FM is anonymous: it counts what is free of a model in a switch domain and
// chooses the device itself; devices on machines have an identity and are detached by it. Its calls are
// synchronous and may take minutes.
//
// The truth is the FM's answer to "what is attached to this machine". Nothing is kept but which machine
// was asked last for what is free; logins and connections are those of package fti.
//
// All methods may be called at once. A call gives up after 180 s (or what Config says) for a change and 60 s otherwise.
//
// Errors are *device.Fault. A call that got no connection is definite (FaultUnreachable); one that got
// no answer, a 5xx, or an answer that is not the manager's is FaultUnknown. An attach that was refused
// while nothing of the model is free is FaultNoCapacity, whatever the code: the FM's codes are not public.
package fm

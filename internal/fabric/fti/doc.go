// SPDX-License-Identifier: Apache-2.0

// Package fti is what the managers of FTI's composable infrastructure have in common: the id_manager that
// gives out tokens, HTTPS with the operator's CA, the form of refusals, and the words for models and
// health. It knows no manager's API; the drivers for the Fabric Manager and the Cluster Manager are built
// on it, and it on package rest.
//
// Credentials and the CA bundle are files in a directory, as a Secret is mounted: they are read again at
// each login and each connection, so that a rotation needs no restart. The token is kept in memory only.
//
// All methods may be called at once; one login serves all callers that need a token, of every driver that
// shares the Client. A call blocks until it is answered, the context ends or its own limit has passed.
//
// Errors are *device.Fault. A call that got no connection is definite (FaultUnreachable); one that got no
// answer, a 5xx, or an answer that is not the manager's is FaultUnknown. No secret is in any of them.
package fti

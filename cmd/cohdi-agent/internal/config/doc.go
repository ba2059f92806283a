// SPDX-License-Identifier: Apache-2.0

// Package config reads the agent's configuration: which fabrics there are, which machine a node is, and
// the times that the policies go by. It knows nothing of what is done with them.
//
// The truth is the file, a ConfigMap's key mounted into the Pod. Reading is strict: what is not known is
// an error, so that a misspelt field does not silently mean its default. All faults of a file are
// reported together.
//
// Config is a value, and not changed after Parse. Watch blocks until its context ends and calls back
// from its own goroutine only.
//
// Each error is one line "file:line: field: what is wrong, what is allowed"; Parse joins them.
package config

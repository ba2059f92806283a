// SPDX-License-Identifier: Apache-2.0

// Package machine decides which machine of a fabric manager a Kubernetes Node is. Clusters say it in many ways, some
// of them by mistake, so that whatever is said counts only if a manager lists a machine of that name; and where nothing
// can be decided, the reason names what each source says.
//
// Decide goes through the table of sources in order: provider id, annotation, configuration, the chain to a
// BareMetalHost, system UUID. It is pure: the caller asks the managers and follows the chain, when Decide wants that.
//
// There are no errors but a Decision without a machine. Everything may be called from anywhere.
package machine

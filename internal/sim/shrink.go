// SPDX-License-Identifier: Apache-2.0

package sim

import "slices"

// Shrink leaves out what is not needed for fails to be true: ever smaller parts of the script, as long as
// something can be left out. The cluster and what lets time pass stay until they alone are left to try.
func Shrink(script Script, fails func(Script) bool) Script {
	for size := max(1, len(script)/2); ; size = max(1, size/2) {
		smaller := false
		for from := len(script) - size; from >= 1; from -= size {
			try := slices.Concat(script[:from], script[from+size:])
			if fails(try) {
				script, smaller = try, true
			}
		}
		if size == 1 && !smaller {
			return script
		}
	}
}

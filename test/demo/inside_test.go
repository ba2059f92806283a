// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestJudgeLook(t *testing.T) {
	for name, tc := range map[string]struct {
		out   string
		right bool
	}{
		"as it should be": {"crw-rw-rw- 1 0 0 195, 0 /dev/nvidia0\nopens /dev/nvidia0\nrefused other 4:21: dd: can't open '/other-4:21': Operation not permitted\n", true},
		"nothing":         {"", false},
		"another's opens": {"opens /dev/nvidia0\nopens other 4:21\n", false},
		"own is refused":  {"refused /dev/nvidia0\nrefused other 4:21: Operation not permitted\n", false},
		"refused because there is no such device": {"opens /dev/nvidia0\nrefused other 4:21: No such device or address\n", false},
		"one too many":          {"opens /dev/nvidia0\nopens /dev/nvidia1\nrefused other 4:21: Operation not permitted\n", false},
		"another was not tried": {"opens /dev/nvidia0\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			err := judgeLook(tc.out, 1, []string{"4:21"})
			if (err == nil) != tc.right {
				t.Errorf("judgeLook = %v, want right: %v", err, tc.right)
			}
		})
	}
}

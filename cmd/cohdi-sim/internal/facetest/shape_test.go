// SPDX-License-Identifier: Apache-2.0

package facetest

import (
	"strings"
	"testing"
)

func TestDifferences(t *testing.T) {
	const sample = `{"a":{"b":1,"c":null},"l":[{"x":"t"},{"y":true}]}`
	for _, tt := range []struct {
		name, message string
		known         map[string]string
		want          []string
	}{
		{"the same", `{"a":{"b":7,"c":null},"l":[{"y":false,"x":""}]}`, nil, nil},
		{"a field is missing", `{"l":[{"x":"t","y":true}]}`, nil, []string{"/a is in the sample"}},
		{"a field too many", `{"a":{"b":1,"c":null,"d":{"e":1}},"l":[{"x":"t","y":true}]}`, nil, []string{"/a/d is in the message"}},
		{"another type", `{"a":{"b":"1","c":null},"l":[{"x":"t","y":true}]}`, nil, []string{"/a/b is text, and in the sample [a number]"}},
		{"in a list", `{"a":{"b":1,"c":null},"l":[{"x":"t","y":0}]}`, nil, []string{"/l[]/y is a number"}},
		{"an empty list", `{"a":{"b":1,"c":null},"l":[]}`, nil, []string{"/l[] is in the sample"}},
		{"known", `{"l":[{"x":1,"y":true}]}`, map[string]string{"/a": "", "/l[]/x": ""}, nil},
		{"known, and a field that begins alike", `{"a":{"b":1,"c":null},"l":[{"x":"t","y":true}],"all":1}`, map[string]string{"/a": "so it is"}, []string{"/all is in the message", "/a is no difference any more (so it is)"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := differences(t, []byte(sample), []byte(tt.message), tt.known)
			if len(got) != len(tt.want) {
				t.Fatalf("differences %q, want %q", got, tt.want)
			}
			for i := range got {
				if !strings.HasPrefix(got[i], tt.want[i]) {
					t.Errorf("difference %q, want %q", got[i], tt.want[i])
				}
			}
		})
	}
}

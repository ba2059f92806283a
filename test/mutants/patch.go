// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
)

// hunk is a piece of text and what takes its place.
type hunk struct{ before, after string }

// patch is a unified diff of several files.
type patch struct {
	what  string
	files map[string][]hunk
}

// parsePatch reads a line that says what the patch breaks, then a unified diff. Line numbers in it count for
// nothing: the text of a hunk has to be found as it stands, once.
func parsePatch(text string) (patch, error) {
	p := patch{files: map[string][]hunk{}}
	var file string
	for n, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		switch {
		case n == 0:
			p.what = line
		case strings.HasPrefix(line, "--- "):
		case strings.HasPrefix(line, "+++ "):
			file = strings.TrimPrefix(strings.TrimPrefix(line, "+++ "), "b/")
		case strings.HasPrefix(line, "@@"):
			p.files[file] = append(p.files[file], hunk{})
		default:
			if len(p.files[file]) == 0 {
				return p, fmt.Errorf("line %d: %q stands before any hunk", n+1, line)
			}
			p.files[file][len(p.files[file])-1].add(line)
		}
	}
	if len(p.files) == 0 {
		return p, errors.New("it changes no file")
	}
	return p, nil
}

func (h *hunk) add(line string) {
	switch {
	case strings.HasPrefix(line, "-"):
		h.before += line[1:] + "\n"
	case strings.HasPrefix(line, "+"):
		h.after += line[1:] + "\n"
	default:
		line = strings.TrimPrefix(line, " ")
		h.before += line + "\n"
		h.after += line + "\n"
	}
}

// apply returns the file with the hunks in place.
func apply(source string, hunks []hunk) (string, error) {
	for _, h := range hunks {
		if n := strings.Count(source, h.before); n != 1 {
			return "", fmt.Errorf("the patch does not apply: its text is there %d times:\n%s", n, h.before)
		}
		source = strings.Replace(source, h.before, h.after, 1)
	}
	return source, nil
}

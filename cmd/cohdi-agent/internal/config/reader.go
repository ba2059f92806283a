// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// field is one value of the file: where it stands and what it is called.
type field struct {
	node *yaml.Node
	// path is "fabrics[0].models[1].name"; empty for the file as a whole.
	path string
}

// reader walks the file and gathers what is wrong with it.
type reader struct {
	file  string
	fault []fault
}

type fault struct {
	line int
	err  error
}

// say adds one fault.
func (r *reader) say(f field, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if f.path != "" {
		text = f.path + ": " + text
	}
	r.fault = append(r.fault, fault{f.node.Line, fmt.Errorf("%s:%d: %s", r.file, f.node.Line, text)})
}

// kind reports a value of another kind than wanted.
func (r *reader) kind(f field, want string) {
	switch f.node.Kind {
	case yaml.AliasNode:
		r.say(f, "is the alias *%s; write the value out", f.node.Value)
	case yaml.MappingNode:
		r.say(f, "is a map, must be %s", want)
	case yaml.SequenceNode:
		r.say(f, "is a list, must be %s", want)
	default:
		if isNull(f.node) {
			r.say(f, "is empty, must be %s; leave the field out for its default", want)
		} else {
			r.say(f, "is %q, must be %s", f.node.Value, want)
		}
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// object reads a map with fixed keys. It returns which keys are there.
func (r *reader) object(f field, keys map[string]func(field)) map[string]bool {
	present := map[string]bool{}
	r.entries(f, func(key *yaml.Node, value field) {
		read, known := keys[key.Value]
		if !known {
			allowed := make([]string, 0, len(keys))
			for k := range keys {
				allowed = append(allowed, k)
			}
			slices.Sort(allowed)
			r.say(field{key, value.path}, "is not a field; fields here are %s", strings.Join(allowed, ", "))
			return
		}
		present[key.Value] = true
		read(value)
	})
	return present
}

// entries reads a map with any keys, each once.
func (r *reader) entries(f field, each func(key *yaml.Node, value field)) {
	if f.node.Kind != yaml.MappingNode {
		r.kind(f, "a map")
		return
	}
	first := map[string]int{}
	for i := 0; i+1 < len(f.node.Content); i += 2 {
		key := f.node.Content[i]
		path := key.Value
		if f.path != "" {
			path = f.path + "." + key.Value
		}
		if key.Kind != yaml.ScalarNode {
			r.kind(field{key, f.path}, "a word in front of the colon")
			continue
		}
		if line, twice := first[key.Value]; twice {
			r.say(field{key, path}, "stands here again, first on line %d", line)
			continue
		}
		first[key.Value] = key.Line
		each(key, field{f.node.Content[i+1], path})
	}
}

// list reads a list.
func (r *reader) list(f field, each func(field)) {
	if f.node.Kind != yaml.SequenceNode {
		r.kind(f, "a list")
		return
	}
	for i, item := range f.node.Content {
		each(field{item, fmt.Sprintf("%s[%d]", f.path, i)})
	}
}

// text reads a string as written; a number or a word like "true" is its text.
func (r *reader) text(f field, what string) (string, bool) {
	if f.node.Kind != yaml.ScalarNode || isNull(f.node) {
		r.kind(f, what)
		return "", false
	}
	return f.node.Value, true
}

// word reads a string that must be one of a few.
func word[T ~string](r *reader, f field, into *T, allowed ...T) {
	names := make([]string, len(allowed))
	for i, a := range allowed {
		names[i] = strconv.Quote(string(a))
	}
	want := strings.Join(names, " or ")
	if text, ok := r.text(f, want); !ok {
		return
	} else if !slices.Contains(allowed, T(text)) {
		r.kind(f, want)
	} else {
		*into = T(text)
	}
}

// yes reads true or false.
func (r *reader) yes(f field, into *bool) {
	const want = "true or false"
	text, ok := r.text(f, want)
	if !ok {
		return
	}
	yes, err := strconv.ParseBool(text)
	if err != nil || text != "true" && text != "false" {
		r.kind(f, want)
		return
	}
	*into = yes
}

// number reads a whole number in a range.
func (r *reader) number(f field, into *int, least, most int) {
	want := fmt.Sprintf("a whole number from %d to %d", least, most)
	text, ok := r.text(f, want)
	if !ok {
		return
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		r.kind(f, want)
		return
	}
	*into = n
}

// duration reads a duration in a range.
func (r *reader) duration(f field, into *time.Duration, least, most time.Duration) {
	want := fmt.Sprintf("a duration from %s to %s, like 90s or 4m", brief(least), brief(most))
	text, ok := r.text(f, want)
	if !ok {
		return
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < least || d > most {
		r.kind(f, want)
		return
	}
	*into = d
}

// brief prints a duration as people write it: 4m, not 4m0s.
func brief(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

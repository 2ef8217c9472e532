package ratelimit_test

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/pgratelimit/ratelimit"
)

func TestKey(t *testing.T) {
	tests := []struct {
		parts []string
		want  string
	}{
		{[]string{""}, ""},
		{[]string{"alice"}, "alice"},
		{[]string{"org 7", "alice"}, "org 7:alice"},
		{[]string{"a", "b", "c"}, "a:b:c"},
		{[]string{"", ""}, ":"},
		{[]string{"", "", ""}, "::"},
		{[]string{"a:b"}, `a\:b`},
		{[]string{"a", ":b"}, `a:\:b`},
		{[]string{`a\`, "b"}, `a\\:b`},
		{[]string{`a\:b`}, `a\\\:b`},
		{[]string{"2001:db8::1", "日本"}, `2001\:db8\:\:1:日本`},
		{[]string{"\xff", "\x00"}, "\xff:\x00"}, // for Validate to refuse
	}
	for _, tt := range tests {
		if got := Key(tt.parts[0], tt.parts[1:]...); got != tt.want {
			t.Errorf("Key(%q) = %q, want %q", tt.parts, got, tt.want)
		}
	}
}

// Of all lists of up to three parts of up to three letters, no two have one key.
func TestKeysDiffer(t *testing.T) {
	var parts []string
	for _, letters := range []int{0, 1, 2, 3} {
		for i := range 1 << (2 * letters) {
			var b strings.Builder
			for l := range letters {
				b.WriteByte(`a:\ `[i>>(2*l)&3])
			}
			parts = append(parts, b.String())
		}
	}
	seen := map[string]string{}
	note := func(list ...string) {
		key, told := Key(list[0], list[1:]...), fmt.Sprintf("%q", list)
		if other, ok := seen[key]; ok && other != told {
			t.Fatalf("Key(%s) = Key(%s) = %q", told, other, key)
		}
		seen[key] = told
	}
	for _, a := range parts {
		note(a)
		for _, b := range parts {
			note(a, b)
			for _, c := range parts[:21] {
				note(a, b, c)
			}
		}
	}
}

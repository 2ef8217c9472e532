package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/scenario"
)

// bucket is a definition for scenarios in tests.
const bucket = `{"limit": {"name": "l", "kind": "token bucket", "rate": 10, "period": "60s"}}` + "\n"

// allStores are the arguments for each of the stores.
var allStores = map[string][]string{
	"memory":            {"--store", "memory"},
	"postgres":          {"--store", "postgres"},
	"postgres portable": {"--store", "postgres", "--portable"},
}

// conformance lists the files that say what every store must answer.
func conformance(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../../testdata/conformance/*.jsonl")
	must(t, err)
	if len(files) == 0 {
		t.Fatal("no scenarios found")
	}
	return files
}

// Every store gives the answers that are wanted, and those of memory in every field, also where
// no want looks.
func TestConformance(t *testing.T) {
	pgtest.Long(t)
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	args := append([]string{"replay", "--verify"}, conformance(t)...)
	want := execute(t, "", args...)
	for name, store := range allStores {
		t.Run(name, func(t *testing.T) {
			got := execute(t, "", append(args, store...)...)
			got.wantStatus(t, exitOK, fmt.Sprintf("calls in %d files agreed", len(conformance(t))))
			if got.stdout != want.stdout {
				t.Errorf("got:\n%s\nwant:\n%s", got.stdout, want.stdout)
			}
		})
	}
}

// What replay prints of a call. (That the answers are right, TestConformance shows.)
func TestAnswers(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		calls string
		want  string
	}{
		{
			"allow", `{"at": "0s", "do": "allow", "limit": "l", "count": 7.5}`,
			`{"ok":true,"retryAfter":"0s","value":2.5,"remaining":2,"resetAfter":"45s","at":"0s","retryAt":"0s"}`,
		},
		{
			"key and count by default", `{"at": "-1h", "do": "allow", "limit": "l"}`,
			`{"ok":true,"retryAfter":"0s","value":9,"remaining":9,"resetAfter":"6s","at":"-1h0m0s","retryAt":"-1h0m0s"}`,
		},
		{
			"check a reservation", `{"at": "0s", "do": "check", "limit": "l", "count": 11, "reserve": true}`,
			`{"ok":true,"retryAfter":"6s","value":10,"remaining":10,"resetAfter":"0s","at":"0s","retryAt":"6s"}`,
		},
		{
			"several", `{"at": "0s", "do": "allow", "all": [{"limit": "l"}, {"limit": "l", "key": "k", "count": 2}]}`,
			`{"ok":true,"retryAfter":"0s","at":"0s","retryAt":"0s"}`,
		},
		{
			"several that are one", `{"at": "0s", "do": "allow", "all": [{"limit": "l"}, {"limit": "l", "count": 2}]}`,
			`{"ok":true,"retryAfter":"0s","value":7,"remaining":7,"resetAfter":"18s","at":"0s","retryAt":"0s"}`,
		},
		{"reset", `{"at": "0s", "do": "reset", "limit": "l"}`, `{}`},
		{"credit", `{"at": "0s", "do": "credit", "limit": "l", "count": 3}`, `{"value":10}`},
		{"pause", `{"at": "0s", "do": "pause", "limit": "l", "until": "1s"}`, `{}`},
		{"resume", `{"at": "0s", "do": "resume", "limit": "l"}`, `{}`},
		{
			"pause for no time", `{"at": "1s", "do": "pause", "limit": "l", "until": "1s"}`,
			`{"error":"ratelimit: limit \"l\": Duration 0s: must be positive"}`,
		},
		{
			"never", `{"at": "0s", "do": "allow", "limit": "l", "count": 11}`,
			`{"error":"ratelimit: limit \"l\": 11 tokens can never be allowed at once, at most 10 can","never":true}`,
		},
		{
			"negative", `{"at": "0s", "do": "credit", "limit": "l", "count": -1}`,
			`{"error":"ratelimit: limit \"l\": Count -1: must not be negative"}`,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := execute(t, bucket+test.calls, "replay", "-")
			o.wantStatus(t, exitOK)
			if got := strings.TrimSuffix(o.stdout, "\n"); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func TestMalformedCallsAreAnsweredAndPassedOver(t *testing.T) {
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	const calls = bucket +
		`{"at": "0s", "do": "allow", "limit": "l", "count": -1, "want": {"error": "invalid"}}
{"at": "0s", "do": "reset", "limit": "l", "key": "\u0000", "want": {"error": "invalid"}}
{"at": "0s", "do": "allow", "limit": "l", "count": 10, "want": {"ok": true, "value": 0}}
`
	for name, store := range allStores {
		t.Run(name, func(t *testing.T) {
			o := execute(t, calls, append([]string{"replay", "--verify", "-"}, store...)...)
			o.wantStatus(t, exitOK, "3 calls in 1 file agreed, on "+store[1])
		})
	}
}

// Whatever is changed in whatever want must be noticed, and nothing before it.
func TestVerifyFindsEveryTamperedWant(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, file := range conformance(t) {
		text, err := os.ReadFile(file)
		must(t, err)
		lines := strings.Split(string(text), "\n")
		for i, line := range lines {
			for field, changed := range tampered(t, line) {
				scenario := slices.Concat(lines[:i], []string{changed}, lines[i+1:])
				o := execute(t, strings.Join(scenario, "\n"), "replay", "--verify", "-")
				o.wantStatus(t, exitFailed, fmt.Sprintf("<stdin>:%d: %s differs", i+1, field))
			}
		}
	}
}

// tampered is line with each of the fields of its want changed by the least
// that counts, by field.
func tampered(t *testing.T, line string) map[string]string {
	t.Helper()
	if !strings.Contains(line, `"want"`) {
		return nil
	}
	var call struct{ Want map[string]any }
	must(t, json.Unmarshal([]byte(line), &call))
	changed := map[string]string{}
	for field, value := range call.Want {
		call.Want[field] = otherThan(value)
		changed[field] = withWant(t, line, call.Want)
		call.Want[field] = value
	}
	return changed
}

func otherThan(value any) any {
	switch v := value.(type) {
	case bool:
		return !v
	case float64:
		return v + 2e-6
	case string:
		if v == scenario.WantNever {
			return scenario.WantInvalid
		}
		return v + "1us" // durations are sums: "6000000us1us"
	}
	return nil
}

// withWant is a call's line with another want.
func withWant(t *testing.T, line string, want map[string]any) string {
	t.Helper()
	var call map[string]any
	must(t, json.Unmarshal([]byte(line), &call))
	call["want"] = want
	text, err := json.Marshal(call)
	must(t, err)
	return string(text)
}

// (What a definition may have in it, TestUnmarshalInvalid of package ratelimit goes through.)
func TestMalformedFiles(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, line, want string
	}{
		{"no JSON", `allow l 5`, "invalid character"},
		{"cut short", `{"at": "0s", "do": "allow"`, "does not end"},
		{"two values", `{"at": "0s", "do": "check", "limit": "l"} {}`, "after the JSON object"},
		{"no object", `["at", "0s"]`, "unexpected array, want a JSON object"},
		{"null", `null`, "neither a limit nor a call"},
		{"not UTF-8", "{\"at\": \"0s\", \"do\": \"check\", \"limit\": \"l\", \"key\": \"\xff\"}", "UTF-8"},
		{"empty object", `{}`, "neither a limit nor a call"},
		{"an instant only", `{"at": "0s"}`, "neither a limit nor a call"},
		{"unknown field of a call", `{"at": "0s", "do": "allow", "limit": "l", "cuont": 5}`, `unknown field "cuont"`},
		{"unknown field of a want", `{"at": "0s", "do": "allow", "limit": "l", "want": {"okay": true}}`, `unknown field "okay"`},
		{"unknown field of a limit", strings.Replace(strings.TrimSpace(bucket), "}}", `, "burst": 5}}`, 1), "burst 5: is no field of a definition"},
		{"unknown field of several", `{"at": "0s", "do": "allow", "all": [{"limit": "l", "n": 5}]}`, `unknown field "n"`},
		{"unknown call", `{"at": "0s", "do": "grant", "limit": "l"}`, `do "grant": want one of allow`},
		{"no do", `{"at": "0s", "limit": "l"}`, `do "": want one of allow`},
		{"no at", `{"do": "allow", "limit": "l"}`, `"at" is missing`},
		{"no limit", `{"at": "0s", "do": "allow"}`, `"limit" is missing`},
		{"no limit among several", `{"at": "0s", "do": "allow", "all": [{"count": 2}]}`, `"limit" is missing`},
		{"undefined", `{"at": "0s", "do": "allow", "limit": "m"}`, `limit "m" is not defined above`},
		{"undefined among several", `{"at": "0s", "do": "allow", "all": [{"limit": "l"}, {"limit": "m"}]}`, `limit "m" is not defined above`},
		{"bad at", `{"at": "5", "do": "allow", "limit": "l"}`, `missing unit in duration "5"`},
		{"at a number", `{"at": 5, "do": "allow", "limit": "l"}`, `field "at": unexpected number`},
		{"count a string", `{"at": "0s", "do": "allow", "limit": "l", "count": "5"}`, `"count": unexpected string`},
		{"count too large for a number", `{"at": "0s", "do": "allow", "limit": "l", "count": 1e999}`, `"count": unexpected number 1e999`},
		{"limit a number", `{"at": "0s", "do": "allow", "limit": 1}`, `"limit": unexpected number`},
		{"all and limit", `{"at": "0s", "do": "allow", "limit": "l", "all": [{"limit": "l"}]}`, `in place of "limit"`},
		{"all and count", `{"at": "0s", "do": "allow", "count": 1, "all": [{"limit": "l"}]}`, `in place of "limit"`},
		{"credit all", `{"at": "0s", "do": "credit", "all": [{"limit": "l"}]}`, "one limit at a time"},
		{"reserve with allow", `{"at": "0s", "do": "allow", "limit": "l", "reserve": true}`, `"reserve" is for check`},
		{"pause without until", `{"at": "0s", "do": "pause", "limit": "l"}`, `has "until"`},
		{"resume all", `{"at": "0s", "do": "resume", "all": [{"limit": "l"}]}`, "one limit at a time"},
		{"until with resume", `{"at": "0s", "do": "resume", "limit": "l", "until": "1s"}`, `has "until"`},
		{"until with allow", `{"at": "0s", "do": "allow", "limit": "l", "until": "1s"}`, `has "until"`},
		{"bad until", `{"at": "0s", "do": "pause", "limit": "l", "until": "soon"}`, `invalid duration "soon"`},
		{"bad want", `{"at": "0s", "do": "allow", "limit": "l", "want": {"retryAfter": "1"}}`, `missing unit in duration "1"`},
		{"bad error in want", `{"at": "0s", "do": "allow", "limit": "l", "want": {"error": "no"}}`, `want error "no"`},
		{"a limit and more", `{"limit": {"name": "m", "kind": "token bucket", "rate": 1, "period": "1s"}, "at": "0s"}`, `unknown field "at"`},
		{"kind", `{"limit": {"name": "m", "kind": "leaky bucket", "rate": 1, "period": "1s"}}`, `kind "leaky bucket"`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			good := writeFile(t, bucket+`{"at": "0s", "do": "allow", "limit": "l"}`)
			bad := writeFile(t, bucket+"\n# a comment\n"+test.line+"\n{\n")
			o := execute(t, "", "replay", good, bad)
			o.wantStatus(t, exitBad, bad+":4: ", test.want)
			if o.stdout != "" {
				t.Errorf("something was replayed: %s", o.stdout)
			}
		})
	}
}

func writeFile(t *testing.T, text string) (name string) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "*.jsonl")
	must(t, err)
	defer f.Close()
	must(t, errOf(f.WriteString(text)))
	return f.Name()
}

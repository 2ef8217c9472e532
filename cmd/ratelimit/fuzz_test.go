package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/scenario"
)

// Whatever a scenario file has in it, and whatever its numbers are, it is an error that names the file, or
// each of its calls has an answer.
func FuzzScenario(f *testing.F) {
	files, err := filepath.Glob("../../testdata/conformance/*.jsonl")
	if err != nil || len(files) == 0 {
		f.Fatalf("%d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(f, err)
		f.Add(text)
	}
	for _, text := range []string{
		"", "\n\n", "{}", "[]", "null", "{\"limit\":", "\xff\xfe", "{\"at\":\"9999999h\"}",
		`{"limit":{"name":"a","rate":1e999,"period":"1s"}}`, `{"limit":{"name":"a","rate":1,"period":"1s"}}` + "\n" + `{"at":"0s","allow":"a","count":-1}`,
		`{"limit":{"name":"l","kind":"token bucket","rate":0.1,"period":"1us","capacity":1e12}}` + "\n" + `{"at":"-5000000000s","do":"reserve","limit":"l","count":1e12}` + "\n" +
			`{"at":"1h","do":"reserve","limit":"l","count":7.4}` + "\n" + `{"at":"9000000000s","do":"settle","of":1,"count":5e-324}` + "\n" + `{"at":"0s","do":"pause","limit":"l","until":"-1s"}`,
		`{"limit":{"name":"l","kind":"sliding window","rate":7.5,"period":"1h","slots":7,"shards":3}}` + "\n" + `{"at":"9s","do":"allow","limit":"l","count":7.4}` + "\n" + `{"at":"8s","do":"reserve","limit":"l"}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := scenario.Parse("a file", text)
		if err != nil && !strings.Contains(err.Error(), "a file") {
			t.Errorf("got %q, which does not name the file", err)
		}
		if err != nil {
			return
		}
		if _, err := replayAll(t.Context(), inMemory, []scenario.Scenario{s}, io.Discard, false); err != nil {
			t.Errorf("%s\n%v", text, err)
		}
	})
}

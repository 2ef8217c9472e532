package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Whatever a scenario file has in it, it is replayed or is an error that names the file.
func FuzzScenario(f *testing.F) {
	files, err := filepath.Glob("../../testdata/conformance/*.jsonl")
	if err != nil || len(files) == 0 {
		f.Fatalf("%d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, text := range []string{
		"", "\n\n", "{}", "[]", "null", "{\"limit\":", "\xff\xfe", "{\"at\":\"9999999h\"}",
		`{"limit":{"name":"a","rate":1e999,"period":"1s"}}`, `{"limit":{"name":"a","rate":1,"period":"1s"}}` + "\n" + `{"at":"0s","allow":"a","count":-1}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := parseScenario("a file", text)
		if err != nil && !strings.Contains(err.Error(), "a file") {
			t.Errorf("got %q, which does not name the file", err)
		}
		if err != nil {
			return
		}
		if _, err := replayAll(t.Context(), memory{}, []scenario{s}, io.Discard, true); err != nil && !strings.Contains(err.Error(), "a file:") {
			t.Errorf("got %q, which does not name the line", err)
		}
	})
}

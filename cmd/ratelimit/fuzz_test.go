package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/scenario"
)

// Whatever a scenario file has in it, it is replayed or is an error that names the file.
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
		if _, err := replayAll(t.Context(), inMemory, []scenario.Scenario{s}, io.Discard, true); err != nil && !strings.Contains(err.Error(), "a file:") {
			t.Errorf("got %q, which does not name the line", err)
		}
	})
}

// Whatever the numbers of a scenario are that is written as it must be: it is an error that
// names the file, or each of its calls has an answer.
func FuzzCalls(f *testing.F) {
	for _, calls := range []string{"allow reserve check", "at most settle check", "pause reserve resume credit", "reserve reserve settle settle reset"} {
		f.Add(uint8(1), 10.0, int64(60e6), 20.0, -1.0, 4, 0, calls, int64(0), int64(7e6), 3.0, 2.0)
		f.Add(uint8(2), 0.1, int64(1), 1e12, 0.0, 1, 0, calls, int64(-5e15), int64(5e15), 1e12, 0.0)
		f.Add(uint8(3), 7.5, int64(3600e6), 0.0, 1e12, 3, 7, calls, int64(9e6), int64(-1e6), 7.4, 5e-324)
	}
	f.Fuzz(func(t *testing.T, kind uint8, rate float64, period int64, capacity, reserved float64, shards, slots int, calls string, at, step int64, count, used float64) {
		limit := map[string]any{
			"name": "l", "kind": ratelimit.Kind(kind % 4).String(), "rate": rate, "period": micros(period), "capacity": capacity,
			"maxReserved": reserved, "shards": shards, "slots": slots,
		}
		for name, without := range map[string]bool{"capacity": capacity == 0, "maxReserved": reserved < 0, "slots": slots == 0} {
			if without {
				delete(limit, name)
			}
		}
		var text bytes.Buffer
		lines := json.NewEncoder(&text)
		if lines.Encode(map[string]any{"limit": limit}) != nil {
			return // NaN and infinities
		}
		for i, do := range strings.Fields(strings.ReplaceAll(calls, "at most", "at_most")) {
			call := map[string]any{"at": micros(at + int64(i)*step), "do": strings.ReplaceAll(do, "_", " "), "limit": "l", "count": count}
			switch do {
			case "settle":
				call["of"], call["count"] = 0, used
				delete(call, "limit")
			case "pause":
				call["until"] = micros(at + 10*step)
			}
			if lines.Encode(call) != nil {
				return
			}
		}
		s, err := scenario.Parse("a file", text.Bytes())
		if err != nil {
			if !strings.Contains(err.Error(), "a file:") {
				t.Errorf("got %q, which does not name the line", err)
			}
			return
		}
		if _, err := replayAll(t.Context(), inMemory, []scenario.Scenario{s}, io.Discard, false); err != nil {
			t.Errorf("%s\n%v", text.Bytes(), err)
		}
	})
}

func micros(n int64) string { return strconv.FormatInt(n, 10) + "us" }

package doors

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// prediction is what a client knows, and what turns out to be true later.
type prediction struct {
	Limit     httplimit.LimitStatus `json:"limit"`
	At        float64               `json:"at"` // milliseconds, when it asks
	Count     float64               `json:"count"`
	Remaining int64                 `json:"remaining"`
	OK        bool                  `json:"ok"`
	Ready     float64               `json:"ready"`
	Never     bool                  `json:"never"`
}

// judge prints where the module's predictions are not true. Of a limit that it cannot know
// exactly, which is a sliding window or a quota by the calendar, it must not tell more than
// there is, nor too early.
const judge = `
import { readFileSync } from 'node:fs'
const { remaining, readyAt } = await import(process.argv[1])
let wrong = 0
for (const p of JSON.parse(readFileSync(0))) {
	const left = remaining(p.limit, p.at), ready = readyAt(p.limit, p.count)
	const exact = p.limit.kind !== 'sliding window' && p.limit.period > 0
	const late = Math.max(ready, p.at)
	const good = p.never ? ready === Infinity
		: (exact ? left === p.remaining : left <= p.remaining) && (exact ? Math.abs(late - p.ready) < 0.01 : late > p.ready - 0.01)
	if (!good && wrong++ < 5) console.log(JSON.stringify({ left, ready, ...p }))
}
process.exit(wrong ? 1 : 0)
`

// After each call of the scenarios, the JavaScript module tells from what a client is told then
// what memory says at later instants.
func TestPredict(t *testing.T) {
	t.Parallel()
	var predictions []prediction
	kinds := map[string]int{}
	files, err := filepath.Glob("../../testdata/conformance/*.jsonl")
	if err != nil || len(files) < 15 {
		t.Fatalf("got %d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		s := &story{}
		store := memstore.New(func() time.Time { return s.now })
		s.store = store
		s.after = func(limit ratelimit.Limit, key string) {
			for _, p := range predict(t, s, store, limit, key) {
				predictions = append(predictions, p)
				kinds[p.Limit.Kind.String()]++
			}
		}
		s.play(t, file)
	}
	for _, kind := range []string{"token bucket", "fixed window", "sliding window"} {
		if kinds[kind] < 100 {
			t.Errorf("%d predictions of a %s, want at least 100", kinds[kind], kind)
		}
	}
	text, err := json.Marshal(predictions)
	must(t, err)
	onNode(t, judge, text)
}

// set sets the machine's clock back and forth while a second passes, and prints what time it is then
// on the server's.
const set = `
const { now, receive } = await import(process.argv[1])
let passed = 5000
performance.now = () => passed
const [limit] = receive([{ at: 1000 }])
passed += 1000
for (const wrong of [0, 1e15]) {
	Date.now = () => wrong
	console.log(now(limit))
}
`

// A prediction goes by the time that has passed, and not by a clock that somebody sets.
func TestPredictHeedsNoClock(t *testing.T) {
	t.Parallel()
	if out := onNode(t, set, nil); string(out) != "2000\n2000\n" {
		t.Errorf("got %s, want 2000 twice", out)
	}
}

// onNode runs a script that imports predict.js, the first of its arguments. It fails the test if the
// script does, and skips it without Node.js.
func onNode(t *testing.T, script string, input []byte) []byte {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("no node on this machine: predict.js is not run")
	}
	module := filepath.Join(t.TempDir(), "predict.mjs")
	must(t, os.WriteFile(module, httplimit.PredictJS, 0o644))
	run := exec.CommandContext(t.Context(), node, "--input-type=module", "--eval", script, module)
	run.Stdin = bytes.NewReader(input)
	out, err := run.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return out
}

// predict returns what is to be predicted of a limit's key at the instant of a story.
func predict(t *testing.T, s *story, store *memstore.Store, limit ratelimit.Limit, key string) (predictions []prediction) {
	t.Helper()
	known, err := store.Check(t.Context(), limit.ForN(key, 0))
	if err != nil {
		return nil // a key that cannot be
	}
	d, before := limit.Definition(), s.now
	defer func() { s.now = before }()
	for _, later := range []float64{0, 0.1, 1.0 / 3, 1, 2.5} {
		s.now = before.Add(time.Duration(later * float64(d.Period))).Truncate(time.Microsecond)
		for _, count := range []float64{1, d.Capacity / 3, d.Capacity, 2*d.Capacity + 1} {
			p := prediction{Limit: httplimit.LimitsOf(known)[0], At: milliseconds(s.now), Count: count}
			result, err := store.Check(t.Context(), limit.ForN(key, count))
			if p.Never = err != nil; !p.Never {
				p.OK, p.Remaining, p.Ready = result.OK, result.Remaining, milliseconds(result.RetryAt)
				if !result.PausedUntil.IsZero() {
					p.Remaining = 0 // nothing can be had of it
				}
			} else if count <= d.Capacity {
				t.Fatal(err)
			}
			predictions = append(predictions, p)
		}
	}
	return predictions
}

func milliseconds(at time.Time) float64 { return float64(at.UnixMicro()) / 1000 }

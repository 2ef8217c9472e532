package trial_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/trial"
)

var (
	begin  = time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)
	bucket = ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Minute, Capacity: 20}
)

// The peak is the most in any stretch as long as the period, counted anew.
func TestPeak(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		var calls []trial.Call
		for at := begin; len(calls) < 300; at = at.Add(time.Duration(random.IntN(4000)) * time.Millisecond) {
			calls = append(calls, trial.Call{At: at, Key: fmt.Sprint(random.IntN(3)), Count: float64(1 + random.IntN(3))})
		}
		alone, err := trial.New(bucket, false)
		if err != nil {
			t.Fatal(err)
		}
		var granted []trial.Call
		for _, c := range calls {
			if s, err := alone.Call(c.At, c.Key, c.Count); err != nil {
				t.Fatal(err)
			} else if s.OK {
				granted = append(granted, c)
			}
		}
		want := 0.0
		for i, from := range granted {
			sum := 0.0
			for _, c := range granted[i:] {
				if c.Key == from.Key && c.At.Sub(from.At) < bucket.Period {
					sum += c.Count
				}
			}
			want = max(want, sum)
		}
		if alone.Peak != want {
			t.Errorf("got %g, want %g", alone.Peak, want)
		}
		if most := 20.0 + 10; alone.Peak > most {
			t.Errorf("%g in a period are more than %g", alone.Peak, most)
		}
	}
}

func simulate(t *testing.T, limit ratelimit.Limit, load trial.Load) *trial.Outcome {
	t.Helper()
	load.Keys, load.Count, load.Attempts, load.Seed = max(load.Keys, 1), 1, max(load.Attempts, 1), 1
	out, err := trial.Simulate(t.Context(), limit, load, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if out.Served+out.GaveUp != out.Callers || out.Served != out.Granted || out.Granted+out.Refused != out.Calls {
		t.Errorf("it does not add up: %+v, %+v", out.Tally, out)
	}
	return out
}

// A herd that calls again at the instant that it was told stays a herd; with jitter it does not.
func TestHerd(t *testing.T) {
	t.Parallel()
	load := trial.Load{For: time.Minute, Herd: 200, HerdAt: time.Second, Retry: trial.Promised, Attempts: 1000}
	herd := simulate(t, bucket, load)
	load.Retry, load.Spread = trial.Jittered, time.Minute
	spread := simulate(t, bucket, load)
	if herd.Served != 200 || spread.Served != 200 {
		t.Errorf("served: %d and %d, want 200", herd.Served, spread.Served)
	}
	if herd.Calls < 3*spread.Calls {
		t.Errorf("calls: %d and %d with jitter, want far fewer", herd.Calls, spread.Calls)
	}
	if wait := herd.Wait(1); wait != 18*time.Minute {
		t.Errorf("the last waited %v, want 18m: 180 at 10 a minute", wait)
	}
	load.Retry = trial.Never
	if out := simulate(t, bucket, load); out.Calls != 200 || out.GaveUp != 180 {
		t.Errorf("%d calls, %d gave up, want 200 and 180", out.Calls, out.GaveUp)
	}
}

// The picture has the tokens, the calls, the pause and the debt.
func TestWatch(t *testing.T) {
	t.Parallel()
	load := trial.Load{For: 10 * time.Minute, Rate: 1, Keys: 1, Count: 1, Attempts: 1, Pause: time.Minute, PauseAt: 5 * time.Minute, Seed: 1}
	watch := load.WatchOf()
	out, err := trial.Simulate(t.Context(), bucket, load, true, watch)
	if err != nil {
		t.Fatal(err)
	}
	panels := watch.Panels(&out.Tally)
	calls := 0.0
	for _, bars := range panels[1].Bars {
		for _, n := range bars.Values {
			calls += n
		}
	}
	if int(calls) != out.Calls || out.Calls == 0 {
		t.Errorf("%g calls are drawn of %d", calls, out.Calls)
	}
	if b := panels[0].Bands; len(b) != 1 || b[0].From != 300 || b[0].To != 360 {
		t.Errorf("pauses: %+v", b)
	}
	least := 0.0
	for _, p := range panels[0].Lines[0].Points {
		least = min(least, p.Y)
		if p.Y > bucket.Capacity {
			t.Errorf("%g tokens are more than the capacity", p.Y)
		}
	}
	if least > -100 { // 600 come, and 100 are refilled
		t.Errorf("the debt is drawn to %g", least)
	}
	c := chart.Chart{X: chart.Time(trial.Origin(), load.For, false), Panels: panels}
	for _, word := range []string{"capacity 20", ">paused<", ">debt<", ">granted<", ">refused<", ">tokens<"} {
		if !strings.Contains(c.SVG(), word) {
			t.Errorf("the picture lacks %q", word)
		}
	}
}

package doors

import (
	"bufio"
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// The scenarios of testdata/conformance, which say what every store must answer. The command
// reads them strictly; here they are taken to be well-formed.

// usual is the instant from which scenarios count that name none.
var usual = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// span is a duration as scenarios write it.
type span time.Duration

func (s *span) UnmarshalText(text []byte) error {
	d, err := time.ParseDuration(string(text))
	*s = span(d)
	return err
}

func (s span) after(base time.Time) time.Time { return base.Add(time.Duration(s)) }

type ask struct {
	Limit string   `json:"limit"`
	Key   string   `json:"key"`
	Count *float64 `json:"count"`
	Above float64  `json:"above"`
}

// line is a call of a scenario.
type line struct {
	ask
	At      span           `json:"at"`
	Do      string         `json:"do"`
	All     []ask          `json:"all"`
	Reserve bool           `json:"reserve"`
	Until   span           `json:"until"`
	Of      int            `json:"of"`
	To      map[string]any `json:"to"`
	Want    struct {
		OK         *bool    `json:"ok"`
		RetryAfter *span    `json:"retryAfter"`
		Taken      *float64 `json:"taken"`
		Value      *float64 `json:"value"`
		Error      string   `json:"error"`
	} `json:"want"`
}

func (a ask) request(limits map[string]ratelimit.Limit) ratelimit.Request {
	count := 1.0
	if a.Count != nil {
		count = *a.Count
	}
	return limits[a.Limit].ForN(a.Key, count).Above(a.Above)
}

// definition returns the limit of a line that defines one.
func definition(text []byte, base time.Time) (ratelimit.Limit, error) {
	var line struct {
		Limit map[string]any `json:"limit"`
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return nil, err
	}
	return limitOf(line.Limit, base)
}

func limitOf(fields map[string]any, base time.Time) (ratelimit.Limit, error) {
	if start, ok := fields["start"].(string); ok {
		var s span
		if err := s.UnmarshalText([]byte(start)); err != nil {
			return nil, err
		}
		fields["start"] = s.after(base)
	}
	text, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	var d ratelimit.Definition
	if err := d.UnmarshalJSON(text); err != nil {
		return nil, err
	}
	return d.Limit(), nil
}

// story is a scenario under way.
type story struct {
	store    ratelimit.Store
	base     time.Time // from which it counts
	now      time.Time
	limits   map[string]ratelimit.Limit
	receipts []*ratelimit.Receipt // of each call, nil where nothing was taken

	after func(limit ratelimit.Limit, key string) // is called after each call, if not nil
}

// put puts a call to the store.
func (s *story) put(t *testing.T, c line) (result ratelimit.Result, err error) {
	ctx, store := t.Context(), s.store
	asks := c.All
	if asks == nil {
		asks = []ask{c.ask}
	}
	requests := make([]ratelimit.Request, len(asks))
	for i, a := range asks {
		if c.Do != "settle" {
			requests[i] = a.request(s.limits)
		}
	}
	limit, key := requests[0].Limit, requests[0].Key
	switch c.Do {
	case "allow":
		return store.Allow(ctx, requests...)
	case "reserve":
		return store.Reserve(ctx, requests...)
	case "check":
		if c.Reserve {
			return store.CheckReserve(ctx, requests...)
		}
		return store.Check(ctx, requests...)
	case "at most":
		return store.AllowAtMost(ctx, requests[0])
	case "settle":
		used := 1.0
		if c.Count != nil {
			used = *c.Count
		}
		return store.Settle(ctx, s.receipts[c.Of], used)
	case "credit":
		result.Status, err = store.Credit(ctx, requests[0])
		return result, err
	case "pause":
		_, err = store.Pause(ctx, limit, key, c.Until.after(s.base).Sub(c.At.after(s.base)))
		return result, err
	case "resume":
		return result, store.Resume(ctx, limit, key)
	case "reset":
		return result, store.Reset(ctx, limit, key)
	case "change":
		to, err := limitOf(c.To, s.base)
		if err != nil {
			return result, err
		}
		result.Status, err = store.Change(ctx, limit, to, key)
		return result, err
	}
	return result, fmt.Errorf("no call is named %q", c.Do)
}

// wrong says in what an answer is not as the call wants it.
func (c line) wrong(got ratelimit.Result, err error) string {
	kind := ""
	switch {
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		kind = "never"
	case errors.Is(err, ratelimit.ErrInvalid), errors.Is(err, ratelimit.ErrSettled):
		kind = "invalid"
	case err != nil:
		return err.Error()
	}
	w := &c.Want
	switch {
	case kind != w.Error:
		return fmt.Sprintf("error %v, want %q", err, w.Error)
	case w.OK != nil && got.OK != *w.OK:
		return fmt.Sprintf("ok %v, want %v", got.OK, *w.OK)
	case w.RetryAfter != nil && got.RetryAfter.Microseconds() != time.Duration(*w.RetryAfter).Microseconds():
		return fmt.Sprintf("retry after %v, want %v", got.RetryAfter, time.Duration(*w.RetryAfter))
	case w.Taken != nil && got.Taken != *w.Taken:
		return fmt.Sprintf("taken %v, want %v", got.Taken, *w.Taken)
	case w.Value != nil && math.Abs(got.Value-*w.Value) > 1e-6:
		return fmt.Sprintf("value %v, want %v", got.Value, *w.Value)
	}
	return ""
}

// play plays a scenario, and returns how many calls it made of the store. A call that skip
// says is not for the store is left out.
func (s *story) play(t *testing.T, file string, skip func(line) bool) (calls int) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s.base, s.limits = usual, map[string]ratelimit.Limit{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		text := bytes.TrimSpace(lines.Bytes())
		if len(text) == 0 || text[0] == '#' {
			continue
		}
		var from struct {
			Base time.Time `json:"base"`
		}
		if err := json.Unmarshal(text, &from); err == nil && !from.Base.IsZero() {
			s.base = from.Base
			continue
		}
		if bytes.HasPrefix(text, []byte(`{"limit": {`)) {
			limit, err := definition(text, s.base)
			if err != nil {
				t.Fatalf("%s:%d: %v", file, n, err)
			}
			s.limits[ratelimit.NameOf(limit)] = limit
			continue
		}
		var c line
		if err := json.Unmarshal(text, &c); err != nil {
			t.Fatalf("%s:%d: %v", file, n, err)
		}
		if skip(c) {
			return calls // what comes after depends on it
		}
		s.now = c.At.after(s.base)
		got, err := s.put(t, c)
		if wrong := c.wrong(got, err); wrong != "" {
			t.Fatalf("%s:%d: %s", file, n, wrong)
		}
		s.receipts = append(s.receipts, got.Receipt)
		if limit := s.limits[c.Limit]; s.after != nil && limit != nil {
			s.after(limit, c.Key)
		}
		calls++
	}
	return calls
}

// scenarios plays all scenarios, each on a store of its own, and returns how many calls it made.
func scenarios(t *testing.T, open func(clock func() time.Time) ratelimit.Store, skip func(line) bool) (calls int) {
	t.Helper()
	files, err := filepath.Glob("../../testdata/conformance/*.jsonl")
	if err != nil || len(files) < 15 {
		t.Fatalf("got %d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		s := &story{}
		s.store = open(func() time.Time { return s.now })
		calls += s.play(t, file, skip)
	}
	return calls
}

func TestScenarios(t *testing.T) {
	pgtest.Long(t)
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		calls := scenarios(t, func(clock func() time.Time) ratelimit.Store {
			if _, err := db.Pool.Exec(t.Context(), "TRUNCATE "+db.Schema+".rate_limits"); err != nil {
				t.Fatal(err)
			}
			return committed{store: newStore(t, db, clock), pool: pool}
		}, func(line) bool { return false })
		if calls < 150 {
			t.Errorf("%d calls, want at least 150", calls)
		}
	})
}

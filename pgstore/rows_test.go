package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
)

// lists is what both stores have for looking at many keys.
type lists interface {
	verbs
	Rows(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page) iter.Seq2[ratelimit.Status, error]
	CheckEach(ctx context.Context, requests ...ratelimit.Request) ([]ratelimit.Status, error)
}

// everyList runs a test on both stores, and in the portable form.
func everyList(t *testing.T, do func(t *testing.T, s lists, c *clock)) {
	t.Helper()
	db := pgtest.New(t)
	for _, portable := range []bool{false, true} {
		t.Run(fmt.Sprintf("postgres, portable %v", portable), func(t *testing.T) {
			must(t, errOf(db.Pool.Exec(t.Context(), "TRUNCATE "+db.Schema+".rate_limits")))
			c := newClock()
			do(t, newStore(t, db, onClock(c), isPortable(portable)), c)
		})
	}
	t.Run("memory", func(t *testing.T) {
		c := newClock()
		do(t, memstore.New(c.now), c)
	})
}

// told is what Rows tells, a line each.
func told(t *testing.T, s lists, limit ratelimit.Limit, page ratelimit.Page) (lines []string) {
	t.Helper()
	for status, err := range s.Rows(t.Context(), limit, page) {
		must(t, err)
		paused := ""
		if !status.PausedUntil.IsZero() {
			paused = fmt.Sprintf(" paused for %v", status.PausedUntil.Sub(noon))
		}
		lines = append(lines, fmt.Sprintf("%s: %g, %g, full after %v, ok %v%s", status.Request.Key, status.Value, status.Share(), status.FullAt().Sub(noon), status.OK, paused))
	}
	return lines
}

func TestRows(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: 10 * time.Second}
	sharded := ratelimit.TokenBucket{Name: "sharded", Rate: 8, Period: 8 * time.Second, Shards: 4}
	other := ratelimit.FixedWindow{Name: "bucket2", Rate: 10, Period: time.Minute, Start: noon}
	everyList(t, func(t *testing.T, s lists, c *clock) {
		ctx := t.Context()
		for key, n := range map[string]float64{"": 1, "org 1/a": 10, "org 1/b": 14, "org 10": 2, "org 1/é": 5, "z": 3} {
			must(t, errOf(s.Reserve(ctx, bucket.ForN(key, n))))
		}
		must(t, errOf(s.Pause(ctx, bucket, "z", 20*time.Second)))
		for key, n := range map[string]float64{"a": 7, "b": 1, "c": 12} {
			must(t, errOf(s.Reserve(ctx, sharded.ForN(key, n))))
		}
		must(t, errOf(s.Allow(ctx, other.For("org 1/a"))))
		c.add(time.Second)
		all := []string{
			": 10, 1, full after 1s, ok true",
			"org 1/a: 1, 0.1, full after 10s, ok true",
			"org 1/b: -3, -0.3, full after 14s, ok false",
			"org 1/é: 6, 0.6, full after 5s, ok true",
			"org 10: 9, 0.9, full after 2s, ok true",
			"z: 0, 0, full after 30s, ok false paused for 20s",
		}
		for _, test := range []struct {
			page ratelimit.Page
			want []string
		}{
			{ratelimit.Page{}, all},
			{ratelimit.Page{Most: 2}, all[:2]},
			{ratelimit.Page{Most: 2, After: "org 1/a"}, all[2:4]},
			{ratelimit.Page{Prefix: "org 1/"}, all[1:4]},
			{ratelimit.Page{Prefix: "org 1"}, all[1:5]},
			{ratelimit.Page{Prefix: "org 1/", After: "org 1/a", Most: 1}, all[2:3]},
			{ratelimit.Page{Prefix: "org 1/", After: "a"}, all[1:4]},
			{ratelimit.Page{Prefix: "org 1/", After: "x"}, nil},
			{ratelimit.Page{Prefix: "nobody"}, nil},
		} {
			if got := told(t, s, bucket, test.page); !slices.Equal(got, test.want) {
				t.Errorf("%+v:\ngot  %q\nwant %q", test.page, got, test.want)
			}
		}
		for _, page := range []ratelimit.Page{{}, {Most: 3}, {Most: 2}, {Most: 1}} {
			got := told(t, s, sharded, page)
			if n := len(got); page.Most > 0 && n != page.Most || page.Most == 0 && n != 3 {
				t.Errorf("%+v: %q", page, got)
			}
			for i, want := range []string{"a: 2, 0.25, ", "b: 7.25, 0.90625, full after 4s", "c: -3, -0.375, "}[:len(got)] {
				if !strings.HasPrefix(got[i], want) {
					t.Errorf("%+v: %q, want %q…", page, got[i], want)
				}
			}
		}
	})
}

func TestRowsOfSlidingWindows(t *testing.T) {
	t.Parallel()
	one := ratelimit.SlidingWindow{Name: "one", Rate: 10, Period: time.Minute, Start: noon, Slots: 6}
	sharded := ratelimit.SlidingWindow{Name: "sharded", Rate: 8, Period: time.Minute, Start: noon, Slots: 6, Shards: 2}
	everyList(t, func(t *testing.T, s lists, c *clock) {
		ctx := t.Context()
		for key, counts := range map[string][]float64{"a": {4}, "b": {10, 5}, "p": {3}} {
			for _, n := range counts {
				must(t, errOf(s.Reserve(ctx, one.ForN(key, n))))
			}
		}
		must(t, errOf(s.Pause(ctx, one, "p", 20*time.Second)))
		must(t, errOf(s.Reserve(ctx, sharded.ForN("k", 6))))
		settled, err := s.Allow(ctx, one.ForN("s", 4))
		must(t, err)
		must(t, errOf(s.Settle(ctx, settled.Receipt, 12)))
		c.add(10 * time.Second)
		want := []string{
			"a: 6, 0.6, full after 1m10s, ok true",
			"b: -10, -1, full after 2m20s, ok false", // the five are for when the ten are gone, in a minute
			"p: 7, 0.7, full after 1m10s, ok false paused for 20s",
			"s: -2, -0.2, full after 1m10s, ok false",
		}
		if got := told(t, s, one, ratelimit.Page{}); !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
		if got, want := told(t, s, sharded, ratelimit.Page{}), []string{"k: 2, 0.25, full after 1m10s, ok true"}; !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	})
}

func TestRowsInvalid(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Second}
	everyList(t, func(t *testing.T, s lists, _ *clock) {
		for name, test := range map[string]struct {
			limit ratelimit.Limit
			page  ratelimit.Page
		}{
			"no limit":      {nil, ratelimit.Page{}},
			"a bad limit":   {ratelimit.TokenBucket{Name: "a"}, ratelimit.Page{}},
			"a bad prefix":  {bucket, ratelimit.Page{Prefix: "\xff"}},
			"a bad key":     {bucket, ratelimit.Page{After: "\x00"}},
			"negative most": {bucket, ratelimit.Page{Most: -1}},
		} {
			n := 0
			for status, err := range s.Rows(t.Context(), test.limit, test.page) {
				if n++; !errors.Is(err, ratelimit.ErrInvalid) || status.Request.Limit != nil {
					t.Errorf("%s: %v, %v, want ErrInvalid", name, status, err)
				}
			}
			if n != 1 {
				t.Errorf("%s: told %d times, want once", name, n)
			}
		}
	})
}

func TestCheckEach(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: 10 * time.Second}
	window := ratelimit.FixedWindow{Name: "window", Rate: 4, Period: time.Minute, Start: noon, Shards: 2}
	sliding := ratelimit.SlidingWindow{Name: "sliding", Rate: 10, Period: time.Minute, Start: noon, Slots: 6}
	everyList(t, func(t *testing.T, s lists, c *clock) {
		ctx := t.Context()
		must(t, errOf(s.Allow(ctx, bucket.ForN("a", 10), window.ForN("b", 3), sliding.ForN("a", 7))))
		c.add(time.Second)
		var requests []ratelimit.Request
		for i := range 3000 {
			requests = append(requests, bucket.ForN("a", float64(i%3)), window.For("b"), []ratelimit.Request{bucket.For(fmt.Sprint(i)), sliding.ForN("a", float64(i%7))}[i%2])
		}
		before, err := s.Check(ctx, bucket.ForN("a", 2))
		must(t, err)
		if before.RetryAfter != time.Second {
			t.Fatalf("got %v, want a second", before)
		}
		if _, err := s.CheckEach(ctx, requests...); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("12,000 rows: %v, want ErrInvalid", err)
		}
		statuses, err := s.CheckEach(ctx, requests[:7500]...)
		if err != nil || len(statuses) != 7500 {
			t.Fatalf("%d statuses, %v", len(statuses), err)
		}
		for i, got := range statuses {
			want, err := ratelimit.Result{}, error(nil)
			if i < 12 || i%500 == 0 {
				if want, err = s.Check(ctx, requests[i]); err != nil {
					t.Fatal(err)
				}
				if err := sameStatus(got, want.Status); err != nil {
					t.Errorf("request %d: %v", i, err)
				}
			}
			if got.Request != requests[i] {
				t.Fatalf("request %d: %v, want %v", i, got.Request, requests[i])
			}
		}
		for name, requests := range map[string][]ratelimit.Request{"none": nil, "bad": {bucket.For("a"), bucket.ForN("a", -1)}} {
			if got, err := s.CheckEach(ctx, requests...); !errors.Is(err, ratelimit.ErrInvalid) || got != nil {
				t.Errorf("%s: %v, %v, want ErrInvalid", name, got, err)
			}
		}
		if _, err := s.CheckEach(ctx, bucket.ForN("a", 11)); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
			t.Errorf("never: %v", err)
		}
	})
}

package riverlimit

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
)

// An answer is older than a job that was parked after its question; and while permits are left for jobs
// whose snooze River has not written, the line is looked at again soon.
func TestAnswers(t *testing.T) {
	t.Parallel()
	limit := ratelimit.InFlight{Name: "answered", Limit: 3, Lease: time.Hour}
	for name, test := range map[string]struct {
		answer found
		parked int // meanwhile
		known  bool
		within time.Duration
	}{
		"the line is empty":        {},
		"a job was parked":         {parked: 1, known: true, within: time.Hour},
		"some were not written":    {answer: found{1, true, true, 0}, known: true, within: lookParked},
		"none was written":         {answer: found{0, true, true, 0}, known: true, within: lookParked},
		"all permits are taken":    {answer: found{1, true, false, 0}, known: true, within: time.Hour},
		"the front was taken away": {answer: found{0, true, false, fronts}, known: true, within: 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLines(nil, nil, nil)
			l.running = true // and nothing looks
			id := lineID{name: limit.Name}
			li := l.line(id, limit)
			li.known = true
			asked := l.call(li, 1)
			li.parks += test.parked
			asked.found = test.answer
			l.answered(nil, asked)
			li = l.of[id]
			if (li != nil) != test.known {
				t.Fatalf("got %+v, want known %t", li, test.known)
			}
			if wait := time.Duration(0); li != nil {
				if wait = time.Until(li.next); wait > test.within || wait < test.within-time.Minute {
					t.Errorf("looks after %v, want %v", wait, test.within)
				}
			}
		})
	}
}

// When a limit is raised, the next look wakes jobs for its new permits, though all that hold one are at work.
func TestLooksKnowTheCatalog(t *testing.T) {
	t.Parallel()
	limit := ratelimit.InFlight{Name: "raised", Limit: 1}
	limits, err := catalog.NewInMemory(nil)
	if err == nil {
		err = limits.PublishInFlight(t.Context(), limit)
	}
	if err == nil {
		_, err = limits.Set(t.Context(), limit.Name, catalog.AllKeys, catalog.Override{AtOnce: 3})
	}
	if err != nil {
		t.Fatal(err)
	}
	l := newLines(nil, limits, nil)
	id := lineID{name: limit.Name}
	if asked := l.call(l.line(id, limit), 0); asked.limit != 3 {
		t.Errorf("asks for jobs for %d permits, want 3", asked.limit)
	}
}

// Whichever tenant's job ends under a shared limit, the next job is of the tenant that is behind; unless its
// jobs cannot be woken. A tenant that comes later makes up for mostBehind jobs.
func TestTurns(t *testing.T) {
	t.Parallel()
	two, all := ratelimit.InFlight{Name: "two", Limit: 2}, ratelimit.InFlight{Name: "all", Limit: 3}
	l := newLines(nil, nil, nil)
	l.running = true // and nothing looks
	next := func(ended string) (turn string) {
		calls, _ := l.calls(nil, &ratelimit.Permit{InFlight: two, Key: ended, With: []ratelimit.Permit{{InFlight: all}}}, time.Millisecond)
		for _, c := range calls {
			turn += c.line.key
		}
		return turn
	}
	a, b := l.line(lineID{name: two.Name, key: "A"}, two), l.line(lineID{name: two.Name, key: "B"}, two)
	a.known = true
	for range 100 {
		if got := next("A"); got != "A" {
			t.Fatalf("wakes a job of %q, want of A, which is alone", got)
		}
	}
	next("B")
	b.known = true
	for i := range mostBehind - 2 {
		if got := next("B"); got != "B" {
			t.Fatalf("wakes a job of %q after %d of B, want of B, which is behind", got, i)
		}
	}
	for range 5 {
		next("B")
	}
	if got := next("B"); got != "A" {
		t.Errorf("wakes a job of %q, want of A, which is behind", got)
	}
	if a.pause = time.Second; next("B") != "B" {
		t.Error("wakes none of B's jobs, while those of A cannot be woken")
	}
}

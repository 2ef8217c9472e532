package trial

import (
	"cmp"
	"container/heap"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// A Load is a model of callers. Each of them makes a call, and if that is refused, calls again as
// Retry says.
type Load struct {
	For    time.Duration // how long callers come
	Rate   float64       // callers a second, at random instants
	Burst  int           // so many more at once, at the beginning and each Every
	Every  time.Duration
	Herd   int // so many more at once, at HerdAt
	HerdAt time.Duration

	Keys  int     // among which callers are spread at random
	Count float64 // of each call

	Retry    Retry
	Attempts int           // of a caller, the first included
	Spread   time.Duration // of Jittered and Fixed

	PauseAt, Pause time.Duration // of all keys
	Seed           uint64
}

// Retry is how a caller goes on that was refused; "" is Never.
type Retry string

const (
	Never    Retry = "never"    // give up
	Promised Retry = "promised" // call again at the instant that the refusal told
	Jittered Retry = "jitter"   // call again after it, by up to Spread later
	Fixed    Retry = "fixed"    // call again after Spread, whatever the refusal told
)

// An Outcome counts the callers, and has the waits of those that were served.
type Outcome struct {
	*Trial
	Callers int
	Served  int
	GaveUp  int
	waits   []time.Duration // of those that were served
	Busiest int             // the most calls within a millisecond
}

// Wait returns how long a share of those that were served waited at most; 1 for all.
func (o *Outcome) Wait(share float64) time.Duration {
	if len(o.waits) == 0 {
		return 0
	}
	return o.waits[min(int(share*float64(len(o.waits))), len(o.waits)-1)]
}

// mostCallers bounds a simulation.
const mostCallers = 5_000_000

// origin is when simulations begin: on an edge of the calendar's, so that quotas begin whole.
var origin = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

// Simulate has callers meet a limit. The same seed has the same callers come. The pictures's
// watch is of one key, from the beginning on.
func Simulate(ctx context.Context, limit ratelimit.Limit, load Load, reserve bool, watch *Watch) (*Outcome, error) {
	if callers := load.Rate*load.For.Seconds() + float64(load.Herd) + float64(load.Burst)*load.bursts(); callers > mostCallers {
		return nil, &ratelimit.FieldError{Package: "trial", Field: "Callers", Value: callers, Reason: fmt.Sprintf("must be at most %d: simulate a shorter time, or fewer", mostCallers)}
	}
	t, err := New(limit, reserve)
	if err != nil {
		return nil, err
	}
	t.now, t.watch = origin, watch
	s := &simulation{Outcome: Outcome{Trial: t}, load: load, random: rand.New(rand.NewPCG(load.Seed, 1))}
	s.arrive()
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	if watch != nil {
		watch.look(t, watch.To)
	}
	slices.Sort(s.waits)
	return &s.Outcome, nil
}

// WatchOf returns a watch of the first key of a simulation.
func (l Load) WatchOf() *Watch { return NewWatch(keyName(0), origin, origin.Add(l.For)) }

// Origin returns when simulations begin.
func Origin() time.Time { return origin }

func (l *Load) bursts() float64 {
	if l.Every <= 0 {
		return 1
	}
	return float64(l.For/l.Every) + 1
}

// simulation is a run of Simulate.
type simulation struct {
	Outcome
	load   Load
	random *rand.Rand
	events events

	second time.Time // of the last call, to the millisecond
	within int
}

// event is a call that is to be made, or the pause.
type event struct {
	at, first time.Time // when it is made; when its caller came
	key       int       // −1 for the pause
	attempt   int
	order     int
}

// events is a heap by instant, and then by order.
type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	if !e[i].at.Equal(e[j].at) {
		return e[i].at.Before(e[j].at)
	}
	return e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	*e = (*e)[:last]
	return x
}

// arrive has all callers come.
func (s *simulation) arrive() {
	come := func(at time.Duration) {
		instant := origin.Add(at.Truncate(time.Microsecond))
		s.events = append(s.events, event{at: instant, first: instant, key: s.random.IntN(s.load.Keys), attempt: 1, order: len(s.events)})
	}
	if s.load.Pause > 0 {
		s.events = append(s.events, event{at: origin.Add(s.load.PauseAt), key: -1})
	}
	if s.load.Rate > 0 {
		for at := s.gap(); at < s.load.For; at += s.gap() {
			come(at)
		}
	}
	if s.load.Burst > 0 {
		for at := time.Duration(0); at < s.load.For; at += s.load.Every {
			for range s.load.Burst {
				come(at)
			}
			if s.load.Every <= 0 {
				break
			}
		}
	}
	for range s.load.Herd {
		come(s.load.HerdAt)
	}
	s.Callers = len(s.events)
	if s.load.Pause > 0 {
		s.Callers--
	}
	heap.Init(&s.events)
}

// gap returns a random time between two callers.
func (s *simulation) gap() time.Duration {
	return max(time.Duration(s.random.ExpFloat64()/s.load.Rate*float64(time.Second)), time.Nanosecond)
}

func (s *simulation) run(ctx context.Context) error {
	for n := 0; len(s.events) > 0; n++ {
		if n%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		e := heap.Pop(&s.events).(event)
		if e.key < 0 {
			for key := range s.load.Keys {
				if err := s.Pause(e.at, keyName(key), s.load.Pause); err != nil {
					return err
				}
			}
			continue
		}
		if err := s.call(e); err != nil {
			return err
		}
	}
	return nil
}

// call makes a call, and has its caller come again if it was refused.
func (s *simulation) call(e event) error {
	if at := e.at.Truncate(time.Millisecond); !at.Equal(s.second) {
		s.second, s.within = at, 0
	}
	s.within++
	s.Busiest = max(s.Busiest, s.within)
	status, err := s.Call(e.at, keyName(e.key), s.load.Count)
	if err != nil {
		return err
	}
	again, will := s.again(e, &status)
	switch {
	case status.OK:
		s.Served++
		s.waits = append(s.waits, status.RetryAt.Sub(e.first))
	case !will || e.attempt >= s.load.Attempts:
		s.GaveUp++
	default:
		heap.Push(&s.events, event{at: again, first: e.first, key: e.key, attempt: e.attempt + 1, order: e.order})
	}
	return nil
}

// again returns when a caller that was refused calls again, if it does.
func (s *simulation) again(e event, refusal *ratelimit.Status) (at time.Time, will bool) {
	if cmp.Or(s.load.Retry, Never) == Never || refusal.RetryAt.IsZero() { // of what can never be granted
		return time.Time{}, false
	}
	spread := time.Duration(s.random.Float64() * float64(s.load.Spread)).Truncate(time.Microsecond)
	switch s.load.Retry {
	case Jittered:
		return refusal.RetryAt.Add(spread), true
	case Fixed:
		return e.at.Add(s.load.Spread), true
	}
	return refusal.RetryAt, true
}

func keyName(n int) string { return fmt.Sprintf("key %d", n+1) }

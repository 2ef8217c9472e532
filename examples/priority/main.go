// Priority has three classes of calls share one limit that cannot serve them all, and shows that
// each gets what the more important ones leave:
//
//	go run ./examples/priority
//	go run ./examples/priority --svg docs/priority.svg   # and draws it
//
// Batch work asks all the time for more than there is. After a while normal calls do so as
// well, then critical ones come, at first a few, then as many. At the end only some normal calls
// are left. Nobody is told to slow down: each call says which share of the limit it leaves.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// API is the limit that the classes share.
var API = ratelimit.TokenBucket{Name: "api", Rate: 100, Period: time.Second}

// classes are the classes of calls, the most important one first.
var classes = []struct {
	name  string
	above float64 // the share of API that a call leaves to others
}{
	{"critical", 0},
	{"normal", 0.2},
	{"batch", 0.5},
}

// phases are how often each of the classes asks, in calls a second.
var phases = [][]float64{
	{0, 0, 200},
	{0, 200, 200},
	{60, 200, 200},
	{200, 200, 200},
	{0, 30, 200},
}

const (
	phase   = 2 * time.Second
	settles = 500 * time.Millisecond // after which a phase is judged: a class that begins finds what was kept for it
	step    = 500 * time.Millisecond
	late    = 100 * time.Millisecond // of a caller, at most: on a busy machine, fewer calls are made
	callers = 4                      // of each class
)

var ends = time.Duration(len(phases)) * phase

func main() {
	file := flag.String("svg", "", "where to draw it")
	flag.Parse()
	demo.Main("priority", func(ctx context.Context, out io.Writer) error {
		t, err := measure(ctx, out)
		if err == nil && *file != "" {
			err = os.WriteFile(*file, []byte(picture(t.granted)), 0o644)
		}
		return err
	})
}

// traffic is the calls of each class that were granted and refused, in each step.
type traffic struct {
	mu               sync.Mutex
	granted, refused [][]int
	least            []float64 // tokens that a granted call of each class has left
}

func newTraffic() *traffic {
	t := new(traffic)
	for range classes {
		t.granted = append(t.granted, make([]int, ends/step))
		t.refused = append(t.refused, make([]int, ends/step))
		t.least = append(t.least, math.Inf(1))
	}
	return t
}

// measure runs the traffic.
func measure(ctx context.Context, out io.Writer) (t *traffic, err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return nil, err
	}
	t = newTraffic()
	begun := time.Now()
	errs := make([]error, len(classes)*callers)
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() { errs[i] = t.ask(ctx, store, i/callers, begun, time.Duration(i%callers)) })
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	t.print(out)
	return t, t.claims(out)
}

// ask asks for a class, as one of its callers, until the last phase ends.
func (t *traffic) ask(ctx context.Context, store *pgstore.Store, class int, begun time.Time, caller time.Duration) error {
	for at := caller * 5 * time.Millisecond; at < ends; at = max(at, time.Since(begun)-late) {
		rate := phases[at/phase][class]
		if rate == 0 {
			at = at.Truncate(phase) + phase
			continue
		}
		select {
		case <-time.After(time.Until(begun.Add(at))):
		case <-ctx.Done():
			return ctx.Err()
		}
		result, err := store.Allow(ctx, API.For("").Above(classes[class].above))
		if err != nil {
			return err
		}
		t.note(class, time.Since(begun), result)
		at += time.Duration(callers / rate * float64(time.Second))
	}
	return nil
}

func (t *traffic) note(class int, at time.Duration, result ratelimit.Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts := t.refused
	if result.OK {
		counts = t.granted
		t.least[class] = min(t.least[class], result.Value)
	}
	if n := int(at / step); n < len(counts[class]) {
		counts[class][n]++
	}
}

// in returns how many of some steps' counts there are in a phase, once it has settled.
func in(counts []int, n int) (sum int) {
	for i, count := range counts {
		if at := time.Duration(i)*step - time.Duration(n)*phase; at >= settles && at < phase {
			sum += count
		}
	}
	return sum
}

func (t *traffic) print(out io.Writer) {
	fmt.Fprintf(out, "%v; a second, asked and granted, once a phase has settled:\n", API.Definition())
	for n, asked := range phases {
		fmt.Fprintf(out, "%5.1fs", (time.Duration(n) * phase).Seconds())
		for class, c := range classes {
			fmt.Fprintf(out, "   %s %3.0f %3.0f", c.name, asked[class], float64(in(t.granted[class], n))/(phase-settles).Seconds())
		}
		fmt.Fprintln(out)
	}
}

// keeps reports whether all granted calls of a class have left its share of the limit.
func (t *traffic) keeps(class int) bool {
	return t.least[class] >= classes[class].above*API.Definition().Capacity-1e-9
}

// claims checks the promises.
func (t *traffic) claims(out io.Writer) error {
	const critical, normal, batch = 0, 1, 2
	sum := 0
	for _, counts := range t.granted {
		for _, n := range counts {
			sum += n
		}
	}
	return errors.Join(
		demo.Claim(out, in(t.refused[critical], 2) == 0, "no critical call is refused, however often the others ask"),
		demo.Claim(out, t.keeps(batch), "batch work leaves half of the limit to the others"),
		demo.Claim(out, t.keeps(normal), "normal calls leave a fifth of it to critical ones"),
		demo.Claim(out, in(t.refused[normal], 4) == 0 && in(t.granted[batch], 4) > 0, "when others ask for less, batch work has the rest"),
		demo.Claim(out, float64(sum) <= API.Rate*(ends+time.Second).Seconds()+API.Rate, "together they never get more than the limit"))
}

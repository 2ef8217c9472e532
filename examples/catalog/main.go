// Catalog raises one customer's plan in the database while traffic runs, and shows when it
// holds:
//
//	go run ./examples/catalog
//	go run ./examples/catalog --svg docs/catalog.svg   # and draws it
//
// Two customers ask far more often than their plan grants. After a while somebody types one
// INSERT into psql: acme may do five times as much, for eight seconds. Nothing is deployed,
// nothing restarted. The program looks into the catalog every 5 seconds, so the plan holds
// within 5; it ends by itself at the very instant that was said. The other customer notices
// nothing.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// API is the limit of a customer.
var API = ratelimit.TokenBucket{Name: "api", Rate: 20, Period: time.Second, Capacity: 10}

// raise is the statement that somebody types.
const raise = `INSERT INTO rate_limit_definitions (name, key, rate, until, note)
VALUES ('api', 'acme', 100, now() + interval '8 seconds', 'their sale')`

const (
	raisedAt = 2 * time.Second
	lasts    = 8 * time.Second
	ends     = raisedAt + lasts + 2*time.Second
	asks     = 5 * time.Millisecond // between two requests of a customer
	step     = 500 * time.Millisecond
)

var customers = []string{"acme", "initech"}

func main() {
	file := flag.String("svg", "", "where to draw it")
	flag.Parse()
	demo.Main("catalog", func(ctx context.Context, out io.Writer) error {
		granted, raised, err := measure(ctx, out)
		if err == nil && *file != "" {
			err = os.WriteFile(*file, []byte(picture(granted, raised)), 0o644)
		}
		return err
	})
}

// traffic is the calls of customers that were granted in each step.
type traffic struct {
	mu      sync.Mutex
	granted map[string][]int
}

// measure runs the traffic, and returns the grants, and when the limit was raised.
func measure(ctx context.Context, out io.Writer) (granted map[string][]int, raised time.Duration, err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := migrate.Up(ctx, db.Pool, &migrate.Config{Schema: db.Schema, Set: migrations.Catalog}); err != nil {
		return nil, 0, err
	}
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return nil, 0, err
	}
	limits, err := catalog.New(db.Pool, nil)
	if err != nil {
		return nil, 0, err
	}
	if err := limits.Publish(ctx, API); err != nil {
		return nil, 0, err
	}
	running, stop := context.WithTimeout(ctx, ends)
	defer stop()
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { limits.Run(running) })

	begun, t := time.Now(), traffic{granted: map[string][]int{}}
	failed := make(chan error, len(customers))
	for _, customer := range customers {
		group.Go(func() { failed <- t.ask(running, begun, store, limits, customer) })
	}
	select {
	case <-time.After(raisedAt):
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
	if err := byHand(ctx, db, out, raise); err != nil {
		return nil, 0, err
	}
	raised = time.Since(begun)
	for range customers {
		err = cmp.Or(err, <-failed)
	}
	if err = cmp.Or(err, ctx.Err()); err != nil {
		return nil, 0, err
	}
	t.print(out, raised)
	return t.granted, raised, t.claims(out, raised)
}

// byHand runs a statement in psql, as somebody would; where there is no psql, on a connection.
func byHand(ctx context.Context, db *demo.DB, out io.Writer, statement string) error {
	path, err := exec.LookPath("psql")
	if err != nil {
		fmt.Fprintln(out, "there is no psql on this machine, so this is not typed, but sent on a connection:")
		_, err := db.Pool.Exec(ctx, statement)
		return err
	}
	psql := exec.CommandContext(ctx, path, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname="+db.URL(), "--command="+statement)
	psql.Env = append(os.Environ(), "PGOPTIONS=-c search_path="+db.Schema)
	fmt.Fprintln(out, "typed into psql:")
	if said, err := psql.CombinedOutput(); err != nil {
		return fmt.Errorf("psql: %w: %s", err, said)
	}
	return nil
}

// ask asks for a customer until the context ends.
func (t *traffic) ask(ctx context.Context, begun time.Time, store *pgstore.Store, limits *catalog.Catalog, customer string) error {
	ticker := time.NewTicker(asks)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		result, err := store.Allow(ctx, limits.For(API, customer))
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		t.note(customer, int(time.Since(begun)/step), result.OK)
	}
}

func (t *traffic) note(customer string, at int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.granted[customer]) <= at {
		t.granted[customer] = append(t.granted[customer], 0)
	}
	if ok {
		t.granted[customer][at]++
	}
}

func (t *traffic) print(out io.Writer, raised time.Duration) {
	fmt.Fprintln(out, "granted a second, by customer:")
	for i := range t.granted[customers[0]] {
		at := time.Duration(i) * step
		fmt.Fprintf(out, "%5.1fs", at.Seconds())
		for _, customer := range customers {
			fmt.Fprintf(out, "  %s %3d", customer, t.rate(customer, i))
		}
		if at <= raised && raised < at+step {
			fmt.Fprint(out, "  <- ", strings.ReplaceAll(raise, "\n", " "))
		}
		fmt.Fprintln(out)
	}
}

// rate returns the calls a second that a customer was granted in a step.
func (t *traffic) rate(customer string, i int) int {
	if i >= len(t.granted[customer]) {
		return 0
	}
	return t.granted[customer][i] * int(time.Second/step)
}

// claims checks the promises.
func (t *traffic) claims(out io.Writer, raised time.Duration) error {
	first := func(from time.Duration, high bool) time.Duration {
		for i := int(from/step) + 1; i < len(t.granted["acme"]); i++ {
			if (t.rate("acme", i) > 50) == high {
				return time.Duration(i) * step
			}
		}
		return ends
	}
	rose := first(raised, true)
	fell := first(raised+lasts-2*step, false)
	most := 0
	for i := 2; i < len(t.granted["initech"]); i++ {
		most = max(most, t.rate("initech", i))
	}
	return errors.Join(
		demo.Claim(out, rose-raised <= 5*time.Second+2*step, "the plan of acme holds within 5 seconds, without a deployment"),
		demo.Claim(out, (fell-raised-lasts).Abs() <= 2*step, "it ends by itself when it was said to"),
		demo.Claim(out, most <= 40, "initech has what it had"))
}

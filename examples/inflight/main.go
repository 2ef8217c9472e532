// Inflight keeps two promises to the provider of a language model at a time: no more than 10
// calls at once, and no more than 60 in 2 seconds.
//
//	go run ./examples/inflight
//
// Workers of three processes take a permit, a request and an estimate of the tokens, all or
// nothing, and then a prompt. The transaction that stores the answer settles the tokens by
// their use, and releases the permit. Some workers are killed in the middle of a call: nobody
// releases their permits, whose leases end by themselves, and nobody answers their prompts, which
// others take.
//
// It works in a schema of its own, on the server that DATABASE_URL names or else on one that
// it starts, and leaves nothing behind.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The limits of the provider.
var (
	AtOnce   = ratelimit.InFlight{Name: "llm_at_once", Limit: 10, Lease: time.Second}
	Requests = ratelimit.TokenBucket{Name: "llm_requests", Rate: 60, Period: 2 * time.Second, Capacity: 20}
	Tokens   = ratelimit.TokenBucket{Name: "llm_tokens", Rate: 100_000, Period: 2 * time.Second}
)

const (
	prompts   = 120
	processes = 3
	workers   = 24 // of all processes
	killed    = 6
	estimate  = 1000
)

func main() { demo.Main("inflight", run) }

func run(ctx context.Context, out io.Writer) (err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	fmt.Fprintf(out, "%d prompts, %d workers in %d processes; %v; %v\n", prompts, workers, processes, AtOnce, Requests)
	if _, err := db.Pool.Exec(ctx, `CREATE TABLE prompts (id int PRIMARY KEY, claimed timestamptz NOT NULL DEFAULT '-infinity', answers int NOT NULL DEFAULT 0, used float8)`); err != nil {
		return err
	}
	if _, err := db.Pool.Exec(ctx, `INSERT INTO prompts (id) SELECT generate_series(1, $1::int)`, prompts); err != nil {
		return err
	}
	o := &office{pool: db.Pool}
	for range processes {
		store, err := pgstore.New(db.Pool, nil)
		if err != nil {
			return err
		}
		o.stores = append(o.stores, store)
	}
	begun := time.Now()
	if err := demo.WorkAll(ctx, db.Pool, workers, `SELECT count(*) FROM prompts WHERE used IS NULL`, o.work); err != nil {
		return err
	}
	return o.judge(ctx, out, time.Since(begun))
}

// office is the workers of all processes, and their provider.
type office struct {
	pool   *pgxpool.Pool
	stores []*pgstore.Store

	hired, dead        atomic.Int32
	calls, atOnce, top atomic.Int32
}

// work is a worker. It returns when there is no more to do, or it is killed.
func (o *office) work(ctx context.Context) error {
	number := int(o.hired.Add(1))
	store := o.stores[number%processes]
	for ctx.Err() == nil {
		permit, err := store.Permits().AcquireWait(ctx, AtOnce.For(""), Requests.For(""), Tokens.ForN("", estimate))
		if err != nil {
			return err
		}
		if !permit.OK { // there was a permit, but the rates refused
			sleep(ctx, permit.Rates.RetryAfter)
			continue
		}
		if number <= killed {
			o.dead.Add(1)
			return o.die(ctx)
		}
		err = store.Permits().Keep(ctx, permit, func(ctx context.Context, permit ratelimit.Permit) error { return o.answer(ctx, store, permit) })
		if err != nil && !errors.Is(err, ratelimit.ErrLeaseLost) {
			return err
		}
	}
	return nil
}

// claim takes a prompt for as long as a lease lasts, and returns its number; 0 if there is none.
func (o *office) claim(ctx context.Context) (id int, err error) {
	err = o.pool.QueryRow(ctx, `UPDATE prompts SET claimed = clock_timestamp() + $1::interval
		WHERE id = (SELECT id FROM prompts WHERE used IS NULL AND claimed < clock_timestamp() ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING id`, AtOnce.Lease).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return id, err
}

// answer has the provider answer a prompt, and stores that, settles and releases in one
// transaction: all of it, or nothing.
func (o *office) answer(ctx context.Context, store *pgstore.Store, permit ratelimit.Permit) error {
	id, err := o.claim(ctx)
	if err != nil {
		return err
	}
	if id == 0 {
		_, err := store.Cancel(ctx, permit.Rates.Receipt)
		sleep(ctx, 20*time.Millisecond)
		return err
	}
	used := o.call(ctx)
	return pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `UPDATE prompts SET used = $2, answers = answers + 1 WHERE id = $1`, id, used); err != nil {
			return err
		}
		if _, err := store.SettleTx(ctx, tx, permit.Rates.Receipt, 1, used); err != nil {
			return err
		}
		return store.Permits().ReleaseTx(ctx, tx, permit)
	})
}

// die is a worker that is killed: it has a prompt, and its permit is not released.
func (o *office) die(ctx context.Context) error {
	_, err := o.claim(ctx)
	return err
}

// call is the provider, which counts.
func (o *office) call(ctx context.Context) (used float64) {
	o.calls.Add(1)
	now := o.atOnce.Add(1)
	defer o.atOnce.Add(-1)
	for was := o.top.Load(); now > was && !o.top.CompareAndSwap(was, now); was = o.top.Load() {
	}
	sleep(ctx, time.Duration(50+rand.IntN(100))*time.Millisecond)
	return float64(200 + rand.IntN(800))
}

func (o *office) judge(ctx context.Context, out io.Writer, took time.Duration) error {
	var answered, twice int
	if err := o.pool.QueryRow(ctx, `SELECT count(used), count(*) FILTER (WHERE answers > 1) FROM prompts`).Scan(&answered, &twice); err != nil {
		return err
	}
	sleep(ctx, AtOnce.Lease) // after which nobody has a permit who does not live
	left, err := o.stores[0].Permits().Held(ctx, AtOnce, "")
	if err != nil {
		return err
	}
	most := Requests.Capacity + Requests.Rate*took.Seconds()/Requests.Period.Seconds()
	return errors.Join(
		demo.Claim(out, int(o.top.Load()) <= AtOnce.Limit, "at most %d calls at once, of %d that are allowed", o.top.Load(), AtOnce.Limit),
		demo.Claim(out, float64(o.calls.Load()) <= most, "%d calls in %.1f s, of %.0f that are allowed", o.calls.Load(), took.Seconds(), most),
		demo.Claim(out, answered == prompts && twice == 0, "%d of %d prompts answered, %d twice, although %d workers were killed", answered, prompts, twice, o.dead.Load()),
		demo.Claim(out, o.dead.Load() > 0 && len(left) == 0, "the permits of the %d killed workers are free, as %d are held", o.dead.Load(), len(left)))
}

// sleep sleeps for a while, or until ctx is over.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

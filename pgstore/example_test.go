package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Definitions are kept where the code that they limit is.
var (
	SendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 2, Period: time.Hour}
	SignUp      = ratelimit.TokenBucket{Name: "sign_up", Rate: 3, Period: time.Hour}
	Calls       = ratelimit.InFlight{Name: "calls", Limit: 2, Lease: 30 * time.Second}
)

// exampleStore returns a store made by pgstore.New(pool, nil), and its pool: of a database with the
// library's table, and a table of messages.
func exampleStore() (ctx context.Context, store *pgstore.Store, pool *pgxpool.Pool, done func()) {
	pool, done = pgtest.Example(`CREATE TABLE messages (sender text, body text, send_at timestamptz DEFAULT now())`)
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	return context.Background(), store, pool, done
}

// A message and its token travel in one round trip. A refusal undoes both.
func ExampleStore_QueueTake() {
	ctx, store, pool, done := exampleStore()
	defer done()
	for _, body := range []string{"one", "two", "three"} {
		var batch pgx.Batch
		batch.Queue("INSERT INTO messages (sender, body) VALUES ($1, $2)", "alice", body)
		if _, err := store.QueueTake(&batch, SendMessage.For("alice")); err != nil {
			log.Fatal(err)
		}
		err := pool.SendBatch(ctx, &batch).Close()
		if err != nil && !errors.Is(err, ratelimit.ErrRefused) {
			log.Fatal(err)
		}
		fmt.Println(body, err == nil)
	}
	// Output:
	// one true
	// two true
	// three false
}

// A message is written, and counted, or neither: the limit is in the same
// transaction. A refusal is no error, so what else the transaction did stays.
func ExampleStore_AllowTx() {
	ctx, store, pool, done := exampleStore()
	defer done()
	send := func(body string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			res, err := store.AllowTx(ctx, tx, SendMessage.For("alice"))
			if err != nil {
				return err
			}
			if !res.OK {
				fmt.Printf("%s: not sent, try again in %v\n", body, res.RetryAfter.Round(time.Minute))
				return nil
			}
			_, err = tx.Exec(ctx, `INSERT INTO messages (sender, body) VALUES ('alice', $1)`, body)
			fmt.Printf("%s: sent, %d left\n", body, res.Remaining)
			return err
		})
	}
	for _, body := range []string{"one", "two", "three"} {
		if err := send(body); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// one: sent, 1 left
	// two: sent, 0 left
	// three: not sent, try again in 30m0s
}

// On its own a decision is durable when it returns, and stays spent whatever
// happens to the caller. Failed logins and sign-ups want that.
func ExampleStore_Allow() {
	ctx, store, _, done := exampleStore()
	defer done()
	for range 4 {
		res, err := store.Allow(ctx, SignUp.For("203.0.113.7"))
		if err != nil {
			log.Fatal(err) // no answer is not a yes
		}
		fmt.Println(res.OK, res.Remaining, "of", res.Capacity)
	}
	// Output:
	// true 2 of 3
	// true 1 of 3
	// true 0 of 3
	// false 0 of 3
}

// The runner takes, does the work in the same SERIALIZABLE transaction, and
// runs both again when PostgreSQL asks for it.
func ExampleStore_AllowFunc() {
	ctx, store, _, done := exampleStore()
	defer done()
	for range 3 {
		requests := []ratelimit.Request{SendMessage.For("alice")}
		_, err := store.AllowFunc(ctx, requests, func(tx pgx.Tx, _ ratelimit.Result) error {
			_, err := tx.Exec(ctx, `INSERT INTO messages (sender, body) VALUES ('alice', 'hello')`)
			return err
		})
		var refused *ratelimit.RefusedError
		switch {
		case errors.As(err, &refused):
			fmt.Println("refused for", refused.Result.RetryAfter.Round(time.Minute))
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Println("sent")
		}
	}
	// Output:
	// sent
	// sent
	// refused for 30m0s
}

// A reservation goes into debt and says when the work may run. It is scheduled
// for then in the same transaction, and does not ask again.
func ExampleStore_ReserveTx() {
	ctx, store, pool, done := exampleStore()
	defer done()
	for range 4 {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			res, err := store.ReserveTx(ctx, tx, SendMessage.For("alice"))
			if err != nil {
				return err
			}
			if err := res.Err(); err != nil {
				return err // more debt than MaxReserved allows
			}
			_, err = tx.Exec(ctx, `INSERT INTO messages (sender, body, send_at) VALUES ('alice', 'hello', $1)`, res.RetryAt)
			fmt.Println("send in", res.RetryAfter.Round(time.Minute))
			return err
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// send in 0s
	// send in 0s
	// send in 30m0s
	// send in 1h0m0s
}

// Tests put in a clock of their own. A program leaves it to the database.
func ExampleConfig() {
	ctx, _, pool, done := exampleStore()
	defer done()
	now := time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)
	store, err := pgstore.New(pool, &pgstore.Config{Clock: func() time.Time { return now }})
	if err != nil {
		log.Fatal(err)
	}
	for range 4 {
		res, err := store.Allow(ctx, SendMessage.For("alice"))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.RetryAfter)
		now = now.Add(res.RetryAfter)
	}
	// Output:
	// 12:00:00 true 0s
	// 12:00:00 true 0s
	// 12:00:00 false 30m0s
	// 12:30:00 true 0s
}

// Work that takes long is held, and its permit is released by the transaction that finishes it.
func ExamplePermits_Hold() {
	ctx, store, pool, done := exampleStore()
	defer done()
	err := store.Permits().Hold(ctx, Calls.For("acme"), func(ctx context.Context, permit ratelimit.Permit) error {
		held, err := store.Permits().Held(ctx, Calls, "acme")
		fmt.Println("held meanwhile:", len(held), err)
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO messages (sender, body) VALUES ('acme', 'done')`); err != nil {
				return err
			}
			return store.Permits().ReleaseTx(ctx, tx, permit)
		})
	})
	held, _ := store.Permits().Held(ctx, Calls, "acme")
	fmt.Println("held afterwards:", len(held), err)
	// Output:
	// held meanwhile: 1 <nil>
	// held afterwards: 0 <nil>
}

// Two at once, and three an hour: all or nothing.
func ExamplePermits_Acquire() {
	ctx, store, _, done := exampleStore()
	defer done()
	for range 5 {
		permit, err := store.Permits().Acquire(ctx, Calls.For("acme"), SignUp.For("acme"))
		var full *ratelimit.FullError
		switch {
		case err != nil:
			log.Fatal(err)
		case errors.As(permit.Err(), &full):
			fmt.Println("all permits are held")
			held, _ := store.Permits().Held(ctx, Calls, "acme")
			_ = store.Permits().Release(ctx, held[0])
		case !permit.OK:
			fmt.Println("too often, retry after", permit.Rates.RetryAfter.Round(time.Minute))
		default:
			fmt.Println("at work,", permit.Rates.Remaining, "of the rate left")
		}
	}
	// Output:
	// at work, 2 of the rate left
	// at work, 1 of the rate left
	// all permits are held
	// at work, 0 of the rate left
	// all permits are held
}

// What a call costs is known only after it. The receipt of the estimate is stored with the work, and
// whoever finishes that settles it, in the same transaction.
func ExampleStore_SettleTx() {
	ctx, store, pool, done := exampleStore()
	defer done()
	tokens := ratelimit.FixedWindow{Name: "llm_tokens", Rate: 60, Period: 24 * time.Hour}
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		res, err := store.ReserveTx(ctx, tx, tokens.ForN("acme", 10))
		if err != nil || !res.OK {
			return errors.Join(err, res.Err())
		}
		_, err = tx.Exec(ctx, `CREATE TABLE work AS SELECT $1::text AS receipt`, res.Receipt)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var receipt ratelimit.Receipt
		if err := tx.QueryRow(ctx, `DELETE FROM work RETURNING receipt`).Scan(&receipt); err != nil {
			return err // pgx.ErrNoRows: somebody else has finished it
		}
		res, err := store.SettleTx(ctx, tx, &receipt, 4)
		fmt.Println(res.Remaining)
		return err
	})
	fmt.Println(err)
	// Output:
	// 56
	// <nil>
}

// Each customer has a minimum of its own, and borrows from what all share.
func ExampleStore_AllowFirst() {
	ctx, store, _, done := exampleStore()
	defer done()
	own := ratelimit.TokenBucket{Name: "reports_own", Rate: 1, Period: time.Hour}
	shared := ratelimit.TokenBucket{Name: "reports_shared", Rate: 1, Period: time.Hour}
	for _, customer := range []string{"acme", "acme", "acme", "globex"} {
		res, err := store.AllowFirst(ctx, own.For(customer), shared.For(""))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(customer, res.OK, ratelimit.NameOf(res.Request.Limit))
	}
	// Output:
	// acme true reports_own
	// acme true reports_shared
	// acme false reports_own
	// globex true reports_own
}

// A worker calls a third party no faster than it may, and does not begin what it has no time for.
func ExampleStore_Wait() {
	ctx, store, _, done := exampleStore()
	defer done()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for range 3 {
		_, err := store.Wait(ctx, SendMessage.For("third party"))
		var tooLong *ratelimit.WaitError
		if errors.As(err, &tooLong) {
			fmt.Println("not in time:", tooLong.Wait.Round(time.Minute), errors.Is(err, context.DeadlineExceeded))
		} else if err != nil {
			log.Fatal(err)
		}
	}
	// Output: not in time: 30m0s true
}

// Reset forgets a key: it is full again, without debt or pause.
func ExampleStore_Reset() {
	ctx, store, _, done := exampleStore()
	defer done()
	if _, err := store.Reserve(ctx, SendMessage.ForN("alice", 2)); err != nil {
		log.Fatal(err)
	}
	if err := store.Reset(ctx, SendMessage, "alice"); err != nil {
		log.Fatal(err)
	}
	res, err := store.Allow(ctx, SendMessage.For("alice"))
	fmt.Println(res.OK, res.Remaining, err)
	// Output: true 1 <nil>
}

// A row that is full means the same as none. Prune deletes such rows, beside any traffic.
func ExampleStore_Prune() {
	ctx, _, pool, done := exampleStore()
	defer done()
	now := time.Now()
	store, err := pgstore.New(pool, &pgstore.Config{Clock: func() time.Time { return now }})
	if err != nil {
		log.Fatal(err)
	}
	for _, request := range []ratelimit.Request{SendMessage.ForN("alice", 2), SendMessage.For("bob")} {
		if err := store.Take(ctx, request); err != nil {
			log.Fatal(err)
		}
	}
	now = now.Add(time.Hour) // bob's has been full for half of it, alice's for no minute
	deleted, err := store.Prune(ctx, SendMessage)
	fmt.Println(deleted, err)
	// Output: 1 <nil>
}

// Many keys are checked at once, each by itself.
func ExampleStore_CheckEach() {
	ctx, store, _, done := exampleStore()
	defer done()
	if err := store.Take(ctx, SendMessage.ForN("bob", 2)); err != nil {
		log.Fatal(err)
	}
	statuses, err := store.CheckEach(ctx, SendMessage.For("alice"), SendMessage.For("bob"))
	if err != nil {
		log.Fatal(err)
	}
	for _, status := range statuses {
		fmt.Println(status.Request.Key, status.OK)
	}
	// Output:
	// alice true
	// bob false
}

// A limit that everyone takes from is spread over several rows. It is one limit all the same.
func Example_shards() {
	ctx, store, _, done := exampleStore()
	defer done()
	global := ratelimit.FixedWindow{Name: "global", Rate: 100, Period: 24 * time.Hour, Shards: 8}
	for _, n := range []float64{1, 60, 39, 1} { // 60 are more than one row holds
		res, err := store.Allow(ctx, global.ForN("", n))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(n, res.OK, res.Remaining)
	}
	// Output:
	// 1 true 99
	// 60 true 39
	// 39 true 0
	// 1 false 0
}

// Refusals, calls that can never succeed, mistakes and faults are told apart by errors.Is and errors.As.
func Example_errors() {
	ctx, store, pool, done := exampleStore()
	defer done()
	for _, n := range []float64{3, -1, 2, 1} {
		res, err := store.Allow(ctx, SendMessage.ForN("alice", n))
		if err == nil {
			err = res.Err() // a refusal is no error, unless it is wanted as one
		}
		fmt.Println(n, errors.Is(err, ratelimit.ErrExceedsCapacity), errors.Is(err, ratelimit.ErrInvalid), errors.Is(err, ratelimit.ErrRefused))
	}
	if _, err := pool.Exec(ctx, `DROP TABLE rate_limits`); err != nil {
		log.Fatal(err)
	}
	_, err := store.Allow(ctx, SendMessage.For("alice"))
	fmt.Println(errors.Is(err, pgstore.ErrNotMigrated))
	// Output:
	// 3 true false false
	// -1 false true false
	// 2 false false false
	// 1 false false true
	// true
}

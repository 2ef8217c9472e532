package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Definitions are kept where the code that they limit is.
var (
	SendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 2, Period: time.Hour}
	SignUp      = ratelimit.TokenBucket{Name: "sign_up", Rate: 3, Period: time.Hour}
	Requests    = ratelimit.TokenBucket{Name: "requests", Rate: 60, Period: time.Hour}
	Tokens      = ratelimit.TokenBucket{Name: "tokens", Rate: 40_000, Period: time.Hour}
)

// A message and its token travel in one round trip. A refusal undoes both.
func ExampleStore_QueueTake() {
	ctx := context.Background()
	pool, done := exampleDatabase() // a *pgxpool.Pool
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
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

// BEGIN travels with the INSERT, and the take with COMMIT. A refusal undoes both.
func ExampleStore_AllowOnCommit() {
	ctx := context.Background()
	pool, done := exampleDatabase() // a *pgxpool.Pool
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, body := range []string{"one", "two", "three"} {
		_, err := store.AllowOnCommit(ctx, []ratelimit.Request{SendMessage.For("alice")}, pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", "alice", body)
			return err
		})
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
	ctx := context.Background()
	pool, done := exampleDatabase() // a *pgxpool.Pool
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

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

// What is rolled back costs nothing, roll-backs to a savepoint included.
func ExampleStore_AllowTx_rollback() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := store.AllowTx(ctx, tx, SendMessage.For("alice")); err != nil {
			return err
		}
		return errors.New("the work failed")
	})
	fmt.Println(err)

	res, err := store.Check(ctx, SendMessage.For("alice"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.Remaining, "left")
	// Output:
	// the work failed
	// 2 left
}

// On its own a decision is durable when it returns, and stays spent whatever
// happens to the caller. Failed logins and sign-ups want that.
func ExampleStore_Allow() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

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
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

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
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

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

// Check says what Allow would, and takes nothing.
func ExampleStore_Check() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	for range 2 {
		res, err := store.Check(ctx, SendMessage.ForN("alice", 2))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(res.OK, res.Remaining)
	}
	// Output:
	// true 2
	// true 2
}

// Reset forgets a key: full again, debt and pause gone.
func ExampleStore_Reset() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	if _, err := store.Reserve(ctx, SendMessage.ForN("alice", 2)); err != nil {
		log.Fatal(err)
	}
	if err := store.Reset(ctx, SendMessage, "alice"); err != nil {
		log.Fatal(err)
	}
	res, err := store.Allow(ctx, SendMessage.For("alice"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.OK, res.Remaining)
	// Output: true 1
}

// Rows that are full mean the same as none. Prune deletes them, now and then,
// beside any traffic.
func ExampleStore_Prune() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	now := time.Now()
	store, err := pgstore.New(pool, &pgstore.Config{Clock: func() time.Time { return now }})
	if err != nil {
		log.Fatal(err)
	}

	if _, err := store.Allow(ctx, SendMessage.ForN("alice", 2)); err != nil {
		log.Fatal(err)
	}
	if _, err := store.Allow(ctx, SendMessage.For("bob")); err != nil {
		log.Fatal(err)
	}
	now = now.Add(time.Hour) // bob's limit has been full for half of it, alice's for no minute
	deleted, err := store.Prune(ctx, SendMessage, SignUp)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(deleted)
	// Output: 1
}

// A limit that everyone takes from is spread over several rows, so that it is
// not one hot row. It is one limit all the same.
func Example_shards() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	global := ratelimit.TokenBucket{Name: "global", Rate: 100, Period: time.Hour, Shards: 8}
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

// A limit that a process takes from all the time need not ask its row each time: with
// Escrow a statement takes ahead, and what it took is handed out from memory, also to
// transactions, which then wait for nobody. It is never too much.
func Example_fromMemory() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, &pgstore.Config{Escrow: time.Second})
	if err != nil {
		log.Fatal(err)
	}

	global := ratelimit.FixedWindow{Name: "global", Rate: 500, Period: 24 * time.Hour}
	granted := 0
	for range 600 {
		res, err := store.AllowFunc(ctx, []ratelimit.Request{global.For("")}, func(tx pgx.Tx, _ ratelimit.Result) error {
			return nil // the work
		})
		if err != nil && !errors.Is(err, ratelimit.ErrRefused) {
			log.Fatal(err)
		}
		if res.OK {
			granted++
		}
	}
	fmt.Println(granted > 0, granted <= 500)
	store.Close() // gives back what is left
	// Output: true true
}

// Refusals, calls that can never succeed, mistakes and faults of the database
// are told apart with errors.Is and errors.As.
func Example_errors() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	explain := func(res ratelimit.Result, err error) {
		var fault *pgconn.PgError
		switch {
		case errors.Is(err, ratelimit.ErrExceedsCapacity):
			fmt.Println("never:", err)
		case errors.Is(err, ratelimit.ErrInvalid):
			fmt.Println("invalid:", err)
		case errors.Is(err, pgstore.ErrNotMigrated):
			fmt.Println("the table is missing")
		case errors.As(err, &fault):
			fmt.Println("PostgreSQL:", fault.Code)
		case err != nil:
			fmt.Println(err) // such as a context's
		case !res.OK:
			fmt.Println(errors.Is(res.Err(), ratelimit.ErrRefused))
		}
	}
	explain(store.Allow(ctx, SendMessage.ForN("alice", 3)))
	explain(store.Allow(ctx, SendMessage.ForN("alice", -1)))

	if _, err := store.Reserve(ctx, SendMessage.ForN("alice", 3)); err != nil {
		log.Fatal(err)
	}
	explain(store.Allow(ctx, SendMessage.For("alice")))

	if _, err := pool.Exec(ctx, `DROP TABLE rate_limits`); err != nil {
		log.Fatal(err)
	}
	explain(store.Allow(ctx, SendMessage.For("alice")))
	// Output:
	// never: ratelimit: limit "send_message": 3 tokens can never be allowed at once, at most 2 can
	// invalid: ratelimit: limit "send_message": Count -1: must not be negative
	// true
	// the table is missing
}

// Tests put in a clock of their own. A program leaves it to the database.
func ExampleConfig() {
	ctx := context.Background()
	pool, done := exampleDatabase()
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

// Take is the shortest form, and the safe one: no error means that it was granted.
func ExampleStore_TakeTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	for range 3 {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO messages (sender, body) VALUES ('alice', 'hello')`); err != nil {
				return err
			}
			return store.TakeTx(ctx, tx, SendMessage.For("alice")) // a refusal rolls the message back
		})
		var refused *ratelimit.RefusedError
		switch {
		case errors.As(err, &refused):
			fmt.Println("try again in", refused.Result.RetryAfter.Round(time.Minute))
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Println("sent")
		}
	}
	// Output:
	// sent
	// sent
	// try again in 30m0s
}

// On its own, for a program that needs no more than yes or an error.
func ExampleStore_Take() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println(store.Take(ctx, SendMessage.ForN("alice", 2)))
	err = store.Take(ctx, SendMessage.For("alice"))
	fmt.Println(errors.Is(err, ratelimit.ErrRefused))
	// Output:
	// <nil>
	// true
}

// What a call will cost is known only after it. The receipt of the estimate is stored with
// the work; whoever finishes that, in whichever process, settles it in the same
// transaction.
func ExampleStore_SettleTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := pool.Exec(ctx, `CREATE TABLE prompts (id int, receipt text, answered bool DEFAULT false)`); err != nil {
		log.Fatal(err)
	}

	const estimate, used = 10_000, 6_400
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		res, err := store.ReserveTx(ctx, tx, Requests.For("acme"), Tokens.ForN("acme", estimate))
		if err == nil {
			err = res.Err()
		}
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO prompts VALUES (1, $1)`, res.Receipt)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var receipt ratelimit.Receipt
		const finish = `UPDATE prompts SET answered = true WHERE id = 1 AND NOT answered RETURNING receipt`
		if err := tx.QueryRow(ctx, finish).Scan(&receipt); err != nil {
			return err // pgx.ErrNoRows: somebody else has finished it, and settled
		}
		res, err := store.SettleTx(ctx, tx, &receipt, 1, used) // in the order of the call
		if err == nil {
			fmt.Println(res.Each()[1].Remaining)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: 33600
}

// More than was reserved is taken, too, since it is spent.
func ExampleStore_Settle() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	res, err := store.Allow(ctx, Tokens.ForN("acme", 30_000))
	if err != nil {
		log.Fatal(err)
	}
	settled, err := store.Settle(ctx, res.Receipt, 42_000)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(settled.Remaining, settled.RetryAfter.Round(time.Minute))
	// Output: 0 3m0s
}

// A scheduler asks how many of 100 messages it may send now.
func ExampleStore_AllowAtMostTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	for range 2 {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			res, err := store.AllowAtMostTx(ctx, tx, Requests.ForN("", 100))
			if err != nil || !res.OK {
				fmt.Println(res.OK, res.RetryAfter.Round(time.Minute))
				return err
			}
			fmt.Println(res.OK, res.Taken) // fetch so many, in tx
			return nil
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// true 60
	// false 1m0s
}

// Each customer has a guaranteed minimum, and borrows from what all share.
func ExampleStore_AllowFirst() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	own := ratelimit.TokenBucket{Name: "reports_own", Rate: 1, Period: time.Hour}
	shared := ratelimit.TokenBucket{Name: "reports_shared", Rate: 2, Period: time.Hour}
	for _, customer := range []string{"acme", "acme", "acme", "acme", "globex"} {
		res, err := store.AllowFirst(ctx, own.For(customer), shared.For(""))
		if err != nil {
			log.Fatal(err)
		}
		if res.OK {
			fmt.Println(customer, "from", ratelimit.NameOf(res.Request.Limit))
		} else {
			fmt.Println(customer, "in", res.RetryAfter.Round(time.Minute))
		}
	}
	// Output:
	// acme from reports_own
	// acme from reports_shared
	// acme from reports_shared
	// acme in 30m0s
	// globex from reports_own
}

// A worker's loop calls a third party no faster than it may, and does not begin what it
// has no time for.
func ExampleStore_Wait() {
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	geocode := ratelimit.TokenBucket{Name: "geocode", Rate: 1, Period: time.Hour}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for range 2 {
		_, err := store.Wait(ctx, geocode.For(""))
		var tooLong *ratelimit.WaitError
		switch {
		case errors.As(err, &tooLong):
			fmt.Println("not in time:", tooLong.Wait.Round(time.Minute), errors.Is(err, context.DeadlineExceeded))
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Println("call")
		}
	}
	// Output:
	// call
	// not in time: 1h0m0s true
}

// The provider has refused a call that counts for several limits.
func ExampleStore_PauseEach() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	if _, err := store.PauseEach(ctx, []ratelimit.Request{Requests.For("acme"), Tokens.For("acme")}, 90*time.Minute); err != nil {
		log.Fatal(err)
	}
	res, err := store.Check(ctx, Tokens.ForN("acme", 0))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.OK, res.PausedUntil.Sub(res.At).Round(time.Minute))
	// Output: false 1h30m0s
}

// A customer who has used up the free plan buys another one: the row is raised in the transaction
// that changes the plan, and what was used stays used.
func ExampleStore_ChangeTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	free := ratelimit.FixedWindow{Name: "calls", Rate: 50, Every: ratelimit.Month, Zone: "America/New_York"}
	team := free
	team.Rate = 1000
	if err := store.Take(ctx, free.ForN("acme", 50)); err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `UPDATE customers SET plan = 'team' WHERE name = 'acme'`); err != nil {
			return err
		}
		now, err := store.ChangeTx(ctx, tx, free, team, "acme")
		if err != nil {
			return err
		}
		fmt.Println(now.Remaining, "left of", now.Capacity)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: 950 left of 1000
}

// A dashboard shows the customers of a region, a page at a time.
func ExampleStore_Rows() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

	for customer, tokens := range map[string]float64{"eu/acme": 10_000, "eu/globex": 50_000, "us/initech": 1} {
		if _, err := store.Reserve(ctx, Tokens.ForN(customer, tokens)); err != nil {
			log.Fatal(err)
		}
	}
	for status, err := range store.Rows(ctx, Tokens, ratelimit.Page{Prefix: "eu/", Most: 50}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: %d left, %.0f %%, full in %v\n", status.Request.Key, status.Remaining,
			100*status.Share(), status.FullAt().Sub(status.At).Round(time.Minute))
	}
	// Output:
	// eu/acme: 30000 left, 75 %, full in 15m0s
	// eu/globex: 0 left, -25 %, full in 1h15m0s
}

// Many keys are checked at once, each by itself.
func ExampleStore_CheckEach() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}

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
